"""Shapers by length (ALGORITHMS.md 10.3, 10.4, 10.5, 10.7, and their invariants in 18)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from burnish.algorithms.shaping.spec import LinearLengthShaper, SoftOverlongShaper
from burnish.config.errors import UserError
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import (
    SHAPERS,
    cosine,
    kimi_length,
    lcpo_exact,
    lcpo_max,
    linear_length,
    soft_overlong,
)

NAN = float("nan")


def answers(
    lengths: list[int], correct: list[float] | None = None, reward: float = 0.0, prompt: int = 1, **columns: Any
) -> Batch:
    """Answers of so many written tokens to one prompt, behind `prompt` tokens each."""
    sizes = torch.tensor(lengths) + prompt
    offsets = offsets_from_lengths(sizes)
    mask = torch.ones(int(offsets[-1]), dtype=torch.bool)
    for k in range(prompt):
        mask[offsets[:-1] + k] = False
    num = len(lengths)
    sequence = {
        "reward": torch.full((num,), reward, dtype=torch.float64),
        "accuracy": torch.tensor(correct or [1.0] * num, dtype=torch.float64),
        "group_ids": torch.zeros(num, dtype=torch.int64),
        "truncated": torch.zeros(num, dtype=torch.bool),
    }
    return Batch(torch.arange(mask.numel()), offsets, {"action_mask": mask, "loss_mask": mask}, {**sequence, **columns})


def close(found: torch.Tensor, expected: list[float]) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


# --- soft overlong -----------------------------------------------------------------------------------------------------


def test_soft_overlong_of_the_worked_lengths() -> None:
    batch = answers([16384, 17408, 18432, 20480, 20481])
    options = {"max_tokens": 20480, "cache": 4096}
    close(soft_overlong(batch, 1, max_tokens=20480), [0, -0.25, -0.5, -1, -1])  # a fifth by default
    close(soft_overlong(answers([2, 3]), 1, max_tokens=3), [0, -1])
    close(soft_overlong(batch, 1, **options), [0, -0.25, -0.5, -1, -1])
    close(soft_overlong(batch, 1, **options, factor=0.5), [0, -0.125, -0.25, -0.5, -0.5])
    close(soft_overlong(answers([18432], reward=1.0), 1, **options), [0.5])


@given(st.integers(1, 40), st.data())
def test_soft_overlong_never_rises_with_length_and_has_no_jump(max_tokens: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(1, max_tokens))
    lengths = list(range(max_tokens + 4))
    found = soft_overlong(answers(lengths), 1, max_tokens=max_tokens, cache=cache)
    steps = found.diff()
    assert bool((steps <= 1e-12).all())
    assert float(steps.min()) >= -1 / cache - 1e-9
    assert float(found[max_tokens - cache]) == 0
    assert float(found[max_tokens]) == float(found[-1]) == -1


def test_a_cache_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(UserError, match=r"cache is 9; expected 1 to max_tokens \(8\)"):
        soft_overlong(answers([3]), 1, max_tokens=8, cache=9)
    with pytest.raises(ValidationError, match="cache 9 is above max_tokens 8"):
        SoftOverlongShaper(max_tokens=8, cache=9)


@pytest.mark.parametrize("name", ["soft_overlong", "cosine"])
def test_a_limit_nobody_filled_in_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\.max_tokens is null"):
        SHAPERS[name](answers([3]), 1)


# --- kimi --------------------------------------------------------------------------------------------------------------


def test_kimi_length_of_the_worked_group() -> None:
    batch = answers([100, 200, 300, 500], [1.0, 1, 0, 0])
    close(kimi_length(batch, 1), [0.5, 0.25, 0, -0.5])
    close(kimi_length(answers([100, 200, 300, 500], [1.0, 1, 0, 0], reward=1.0), 1, weight=2.0), [2, 1.5, 1, 0])


def test_a_short_wrong_answer_gets_nothing_for_its_length() -> None:
    close(kimi_length(answers([1, 2, 3], [0.0, 1, 0]), 1), [0, 0, -0.5])


def test_kimi_length_is_off_for_the_first_steps() -> None:
    batch = answers([1, 3], reward=1.0)
    close(kimi_length(batch, 2, warmup_steps=2), [1, 1])
    close(kimi_length(batch, 3, warmup_steps=2), [1.5, 0.5])


def test_equal_lengths_and_a_group_of_one_get_nothing() -> None:
    groups = torch.tensor([4, 4, 9])
    close(kimi_length(answers([7, 7, 3], group_ids=groups), 1), [0, 0, 0])


def test_kimi_length_compares_within_groups_only() -> None:
    groups = torch.tensor([4, 1, 4, 1])
    close(kimi_length(answers([10, 100, 20, 300], group_ids=groups), 1), [0.5, 0.5, -0.5, -0.5])


# --- cosine ------------------------------------------------------------------------------------------------------------

TIMES = [0, 250, 500, 900, 0, 250, 900, 1000]
RIGHT = [1.0, 1, 1, 1, 0, 0, 0, 1]
COSINE = [2, 1.853553, 1.5, 1.024472, -10, -8.535534, -0.244717, -10]


def test_cosine_of_the_worked_lengths_whatever_the_old_reward() -> None:
    close(cosine(answers(TIMES, RIGHT), 1, max_tokens=1000), COSINE)
    close(cosine(answers(TIMES, RIGHT, reward=7.0), 1, max_tokens=1000), COSINE)


def test_cosine_exceeds_from_the_margin_on() -> None:
    batch = answers([983, 984, 999, 1000])
    assert (cosine(batch, 1, max_tokens=1000) == -10).tolist() == [False, False, False, True]
    assert (cosine(batch, 1, max_tokens=1000, margin=16) == -10).tolist() == [False, True, True, True]
    assert cosine(batch, 1, max_tokens=1000, exceeded=-3.0)[3] == -3


def test_cosine_ends_where_it_is_told() -> None:
    batch = answers([0, 50, 0, 50], [1.0, 1, 0, 0])
    close(cosine(batch, 1, max_tokens=100, correct=(4.0, 2.0), wrong=(-6.0, -2.0)), [4, 3, -6, -4])


@given(st.integers(1, 60))
def test_cosine_is_continuous_and_stays_between_its_ends(max_tokens: int) -> None:
    lengths = list(range(max_tokens))
    right = cosine(answers(lengths), 1, max_tokens=max_tokens)
    wrong = cosine(answers(lengths, [0.0] * max_tokens), 1, max_tokens=max_tokens)
    assert 1 <= float(right.min()) <= float(right.max()) <= 2
    assert -10 <= float(wrong.min()) <= float(wrong.max()) <= 0
    steepest = math.pi / 2 / max_tokens
    assert bool((right.diff() <= 0).all())
    assert bool((right.diff() >= -steepest - 1e-9).all())
    assert bool((wrong.diff() >= 0).all())
    assert bool((wrong.diff() <= 10 * steepest + 1e-9).all())


# --- length control ----------------------------------------------------------------------------------------------------


def budget(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_lcpo_of_the_worked_lengths() -> None:
    exact = answers([1500, 1500, 1000], [1.0, 0, 1], reward=9.0, budget=budget(1000, 1000, 1000))
    close(lcpo_exact(exact, 1), [0.85, -0.15, 1])
    close(lcpo_exact(exact, 1, alpha=0.001), [0.5, -0.5, 1])
    at_most = answers([500, 1000, 1500, 4000, 500], [1.0, 1, 1, 1, 0], budget=budget(*[1000] * 5))
    close(lcpo_max(at_most, 1), [0.65, 0.5, 0.35, 0, 0])
    close(lcpo_max(at_most, 1, delta=0.9), [1, 0.9, 0.75, 0, 0])
    close(lcpo_max(at_most, 1, alpha=0.0001), [0.55, 0.5, 0.45, 0.2, 0])


@pytest.mark.parametrize("name", ["lcpo_exact", "lcpo_max"])
def test_a_prompt_without_a_budget_is_an_error(name: str) -> None:
    with pytest.raises(UserError, match=rf"shaper {name} needs a token budget.* 1 of 2 samples"):
        SHAPERS[name](answers([3, 3], budget=budget(5, NAN)), 1)


# --- what they have in common ------------------------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "soft_overlong": {"max_tokens": 12, "cache": 10},
    "kimi_length": {},
    "cosine": {"max_tokens": 20},
    "lcpo_exact": {"alpha": 0.1},
    "lcpo_max": {"alpha": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_only_written_tokens_of_the_whole_trajectory_count(name: str) -> None:
    plain = answers([5, 9], budget=budget(6, 6))
    prompted = answers([5, 9], budget=budget(6, 6), prompt=4)
    close(SHAPERS[name](prompted, 1, **OPTIONS[name]), SHAPERS[name](plain, 1, **OPTIONS[name]).tolist())
    parts = answers([2, 9, 3], budget=budget(6, 6, 6), trajectory_ids=torch.tensor([8, 2, 8]))
    long, other = SHAPERS[name](plain, 1, **OPTIONS[name]).tolist()
    close(SHAPERS[name](parts, 1, **OPTIONS[name]), [long, other, long])


@pytest.mark.parametrize("name", ["kimi_length", "cosine", "lcpo_exact", "lcpo_max"])
def test_a_sample_nobody_judged_is_an_error(name: str) -> None:
    batch = answers([5, 9], [NAN, 1.0], budget=budget(6, 6))
    with pytest.raises(UserError, match=f"shaper {name} needs to know right from wrong"):
        SHAPERS[name](batch, 1, **OPTIONS[name])


@pytest.mark.parametrize("name", ["kimi_length", "cosine", "lcpo_exact", "lcpo_max"])
def test_half_right_is_wrong(name: str) -> None:
    half, wrong = (answers([5, 9], [a, 1.0], budget=budget(6, 6)) for a in (0.5, 0.0))
    assert torch.equal(SHAPERS[name](half, 1, **OPTIONS[name]), SHAPERS[name](wrong, 1, **OPTIONS[name]))


# --- linear_length (ALGORITHMS-2026.md N7.1) ----------------------------------------------------------------------------


def test_linear_length_penalises_tokens_and_turns_by_the_pass_rate() -> None:
    """out = [100, 200, 400, 300], in = [50, 100, 100, 50], turns = [1, 2, 4, 2]."""
    written, read, turns = [100, 200, 400, 300], [50, 100, 100, 50], [1, 2, 4, 2]
    offsets = offsets_from_lengths(torch.tensor(written) + torch.tensor(read))
    mask = torch.cat([torch.arange(w + r) >= r for w, r in zip(written, read, strict=True)])
    starts = [r + k * w // n for w, r, n in zip(written, read, turns, strict=True) for k in range(n)]
    ragged = {"turn_start": Ragged(torch.tensor(starts), offsets_from_lengths(torch.tensor(turns)))}
    rewards = torch.tensor([1, 1, 0, 1], dtype=torch.float64)
    groups = torch.zeros(4, dtype=torch.int64)
    batch = Batch(
        torch.arange(mask.numel()), offsets, {"action_mask": mask}, {"reward": rewards, "group_ids": groups}, ragged
    )
    found = linear_length(batch, 1)
    assert found.tolist() == pytest.approx([0.896875, 0.79375, -0.3375, 0.784375], abs=1e-9)
    assert (found - found.mean()).tolist() == pytest.approx([0.3625, 0.259375, -0.871875, 0.25], abs=1e-9)
    unsolved = batch.with_sequence(reward=torch.zeros(4, dtype=torch.float64))
    assert linear_length(unsolved, 1).tolist() == [0] * 4
    with pytest.raises(ValidationError, match="changes nothing"):
        LinearLengthShaper(output=0, input=0, turns=0)
