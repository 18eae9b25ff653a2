"""Policy filtration: drawing a group's samples again (ALGORITHMS.md 11.5)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from burnish.algorithms.filters import filter_functions
from burnish.algorithms.filters.filter_functions import pf_probabilities
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import pf_ppo


def scored(rewards: list[float], groups: list[int], seed: int = 0) -> Batch:
    s = len(groups)
    keys = torch.randint(-(2**62), 2**62, (s,), generator=torch.Generator().manual_seed(seed))
    return Batch(torch.arange(s), torch.arange(s + 1)).with_sequence(
        reward=torch.tensor(rewards, dtype=torch.float64), group_ids=torch.tensor(groups), key=keys
    )


def weights(scores: list[float], mode: Any, power: float = 2.0) -> torch.Tensor:
    ids = torch.zeros(len(scores), dtype=torch.int64)
    return pf_probabilities(torch.tensor(scores, dtype=torch.float64), ids, 1, mode, power)


def close(found: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_worked_probabilities() -> None:
    close(weights([1, -0.5, 0, 2], "power"), [0.190476, 0.047619, 0, 0.761905])
    close(weights([1, 3, 2], "best_random"), [1 / 6, 4 / 6, 1 / 6])
    close(weights([1, 3, 2], "best_worst"), [0.5, 0.5, 0])
    close(weights([1, 3, 2], "best"), [0, 1, 0])
    close(weights([1, -0.5, 0, 2], "power", power=1.0), [1 / 3.5, 0.5 / 3.5, 0, 2 / 3.5])


def test_all_that_tie_for_an_extreme_share_it() -> None:
    close(weights([3, 1, 3, 2], "best"), [0.5, 0, 0.5, 0])
    close(weights([3, 1, 3, 1, 2], "best_worst"), [0.25, 0.25, 0.25, 0.25, 0])


@pytest.mark.parametrize("mode", ["power", "best_worst", "best_random", "best"])
def test_a_constant_group_is_drawn_from_evenly_even_at_zero(mode: str) -> None:
    close(weights([0.0] * 4, mode), [0.25] * 4)


def test_every_group_is_drawn_from_as_often_as_it_has_samples() -> None:
    batch = scored([1.0, 2, 3, 4, 5, 6], [8, -3, 8, 40, -3, 8])
    taken = batch.sequence["group_ids"][pf_ppo(batch)]
    assert sorted(taken.tolist()) == sorted(batch.sequence["group_ids"].tolist())


def test_a_group_of_one_is_drawn_once() -> None:
    assert pf_ppo(scored([0.0], [3])).tolist() == [0]


def test_every_draw_of_a_group_has_its_own_chance() -> None:
    taken = set(pf_ppo(scored([1.0] * 60, [0] * 60)).tolist())
    assert 25 <= len(taken) <= 50  # about 60 (1 - 1/e) = 38 different ones


def test_only_the_best_is_drawn_with_mode_best() -> None:
    batch = scored([1.0, 5, 2, 0.5, 0.2, 0.1], [1, 1, 1, 0, 0, 0])
    assert sorted(pf_ppo(batch, mode="best").tolist()) == [1, 1, 1, 3, 3, 3]


@pytest.mark.parametrize("mode", ["power", "best_worst", "best_random", "best"])
def test_draws_have_the_stated_frequencies(mode: Any) -> None:
    groups = 20000
    batch = scored([1, -0.5, 0, 2] * groups, [g for g in range(groups) for _ in range(4)], seed=1)
    counts = torch.bincount(pf_ppo(batch, mode=mode) % 4, minlength=4) / (4 * groups)
    torch.testing.assert_close(counts.double(), weights([1, -0.5, 0, 2], mode), atol=0.01, rtol=0)


def test_the_draws_of_a_group_do_not_depend_on_the_rest_of_the_batch() -> None:
    batch = scored([1.0, 2, 3, 4] * 3, [5] * 4 + [2] * 4 + [9] * 4)
    alone = batch.select(torch.arange(4, 8))
    whole = pf_ppo(batch)
    in_group = whole[(whole >= 4) & (whole < 8)] - 4
    assert in_group.tolist() == pf_ppo(alone).tolist()
    assert in_group.tolist() != (whole[whole < 4]).tolist()


def test_a_drawn_trajectory_brings_all_its_sequences() -> None:
    batch = scored([1.0, 1.0, 9.0, 9.0, 9.0], [0] * 5).with_sequence(trajectory_ids=torch.tensor([7, 7, 3, 3, 3]))
    assert pf_ppo(batch, mode="best").tolist() == [2, 3, 4, 2, 3, 4]


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(-3, 3)), min_size=1, max_size=20))
def test_no_draw_leaves_its_group(pairs: list[tuple[int, float]]) -> None:
    batch = scored([r for _, r in pairs], [g for g, _ in pairs])
    taken = batch.sequence["group_ids"][pf_ppo(batch)]
    assert sorted(taken.tolist()) == sorted(g for g, _ in pairs)


@pytest.mark.parametrize("noise", [2.0**-54, 1 - 2.0**-53])
def test_rounding_never_hands_a_draw_to_another_group(monkeypatch: pytest.MonkeyPatch, noise: float) -> None:
    monkeypatch.setattr(
        filter_functions, "uniforms", lambda keys, draws: torch.full(keys.shape, noise, dtype=torch.float64)
    )
    rewards = torch.rand(3000, generator=torch.Generator().manual_seed(0)).tolist()
    batch = scored(rewards, [i // 3 for i in range(3000)])
    assert torch.equal(batch.sequence["group_ids"][pf_ppo(batch)], batch.sequence["group_ids"])
