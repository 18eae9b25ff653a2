"""Where the mismatch is: by position, by probability, and the worst tokens."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.correction.mismatch_diagnostics import (
    ComparedTokens,
    _sums,
    _sums_in_order,
    compare_tokens,
    mismatch_profiles,
    worst_tokens,
)
from burnish.config.errors import UserError
from burnish.core.batch import Batch

Build = Callable[..., Batch]


def seen(batch: Batch) -> ComparedTokens:
    """All tokens the model wrote."""
    return compare_tokens(batch, batch.token["old_logp"], batch.action_mask)


def profile(batch: Batch, kind: str) -> dict[str, tuple[float, float, float]]:
    """(mean |l|, mean l, tokens) of each bucket."""
    found = mismatch_profiles(seen(batch))
    ends = [name.split("/")[2] for name in found if name.startswith(f"mismatch/by_{kind}/") and name.endswith("/abs")]
    stems = {end: f"mismatch/by_{kind}/{end}/" for end in ends}
    return {end: (found[s + "abs"], found[s + "signed"], found[s + "tokens"]) for end, s in stems.items()}


def test_positions_count_what_the_model_wrote(sampled: Batch) -> None:
    found = profile(sampled, "position")
    assert list(found) == ["0", "1", "3"]
    # l: .05 -.05 .1 0 | 0 .1 | -.05 0 1.1 | 0 0 -.1 .1
    assert found["0"] == pytest.approx((0.1 / 4, 0.0, 4), abs=1e-12)
    assert found["1"] == pytest.approx(((0.05 + 0.1 + 0.1 + 0 + 1.1 + 0 + 0.1) / 7, (0.05 + 0.1 + 1.1 - 0.1) / 7, 7))
    assert found["3"] == pytest.approx((0.1 / 2, 0.1 / 2, 2))


def test_a_bucket_of_positions_begins_where_the_one_before_has_doubled(build: Build) -> None:
    found = profile(build([[-1.0] * 40], [[-1.0] * 40]), "position")
    assert {end: count for end, (_, _, count) in found.items()} == {"0": 1, "1": 2, "3": 4, "7": 8, "15": 16, "31": 9}


def test_a_tools_answer_is_no_position(build: Build) -> None:
    batch = build([[-1.0, -1.0, -1.0]], [[-1.5, -9.0, -1.25]], [[True, False, True]])
    assert profile(batch, "position") == {"0": (0.5, 0.5, 1), "1": (0.25, 0.25, 1)}


def test_a_token_keeps_its_position_when_those_before_it_are_not_known(build: Build) -> None:
    masks = [[True] * 4, [False, True, True, True]]
    batch = build([[-1.0] * 4] * 2, [[-1.0] * 4] * 2, masks)
    known = torch.tensor([False, False, False, True, False, False, False, True])
    assert compare_tokens(batch, batch.token["old_logp"], known).position.tolist() == [3, 2]


def test_probabilities_are_in_decades(build: Build) -> None:
    probabilities = [1.0, 0.5, 0.11, 0.05, 1.1e-5, 1.01e-6, 1e-9, 0.0]
    behaviour = [math.log(p) if p > 0 else -math.inf for p in probabilities]
    old = [b - 0.25 if math.isfinite(b) else -1.0 for b in behaviour]
    found = profile(build([old], [behaviour]), "probability")
    assert list(found) == ["0", "1e-6", "1e-5", "1e-2", "1e-1"]
    assert [count for _, _, count in found.values()] == [2, 1, 1, 1, 3]
    assert [signed for _, signed, _ in found.values()][1:] == pytest.approx([-0.25] * 4)
    assert found["0"][0] == pytest.approx((299 + 0.25) / 2), "a token the engine gave no probability"


def test_the_worst_tokens_are_found_where_they_are(sampled: Batch) -> None:
    all_of_them = seen(sampled)
    first, second = worst_tokens(all_of_them, 2).tolist()
    assert all_of_them.token_indices[first] == 5 + 3 + 3, "the fourth token of the third sequence"
    assert (all_of_them.trainer[first], all_of_them.engine[first]) == (-1.5, -2.6)
    assert all_of_them.position[first] == 2
    assert all_of_them.log_ratio[second].abs() == pytest.approx(0.1)


def test_of_equal_gaps_the_first_is_taken_and_none_that_is_0(build: Build) -> None:
    gaps = [0.0, -0.5, 0.25, 0.5, 0.25, 0.25, 0.0]
    found = seen(build([gaps], [[0.0] * 7]))
    assert worst_tokens(found, 3).tolist() == [1, 3, 2]
    assert worst_tokens(found, 100).tolist() == [1, 3, 2, 4, 5]
    assert worst_tokens(seen(build([[-1.0, -2.0]], [[-1.0, -2.0]])), 8).tolist() == []


def test_the_worst_tokens_show_what_was_reported(build: Build) -> None:
    found = seen(build([[-1.0, -2.0], [-3.0]], [[-1.0, -math.inf], [-3.5]]))
    which = worst_tokens(found, 8)
    assert found.token_indices[which].tolist() == [1, 2]
    assert found.engine[which].tolist() == [-math.inf, -3.5]
    assert found.log_ratio[which].tolist() == [298.0, 0.5]


@given(seed=st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_every_written_token_is_in_one_bucket(ragged: Build, seed: int) -> None:
    batch = ragged(seed)
    mask = batch.action_mask
    gaps = (batch.token["old_logp"] - batch.token["behaviour_logp"])[mask]
    for kind in ("position", "probability"):
        found = profile(batch, kind).values()
        assert sum(count for _, _, count in found) == int(mask.sum())
        assert sum(size * count for size, _, count in found) == pytest.approx(float(gaps.abs().sum()))
        assert sum(signed * count for _, signed, count in found) == pytest.approx(float(gaps.sum()))
    every = compare_tokens(batch, batch.token["old_logp"], mask)
    shown = every.log_ratio[worst_tokens(every, 3)].abs()
    assert shown.tolist() == pytest.approx(gaps.abs().sort(descending=True).values[:3].tolist())


@given(seed=st.integers(0, 10_000), num=st.integers(1, 300))
@settings(max_examples=25, deadline=None)
def test_sums_in_a_fixed_order_are_the_same_sums(seed: int, num: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bucket = torch.randint(0, 9, (num,), generator=generator)
    gap = torch.randn(num, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(_sums_in_order(gap, bucket, 10), _sums(gap, bucket, 10), rtol=0, atol=1e-12)


def test_identical_policies_have_a_profile_of_0(build: Build) -> None:
    found = profile(build([[-1.0, -2.0, -0.5]], [[-1.0, -2.0, -0.5]]), "position")
    assert found == {"0": (0, 0, 1), "1": (0, 0, 2)}


def test_a_missing_log_prob_is_refused(build: Build) -> None:
    with pytest.raises(UserError, match="the engine's log-probs are nan"):
        seen(build([[-1.0, -2.0]], [[math.nan, -2.0]]))
    with pytest.raises(UserError, match="the trainer's log-probs are nan"):
        seen(build([[math.nan, -2.0]], [[-1.0, -2.0]]))


def test_a_batch_without_a_written_token_has_no_profile_and_no_worst_token(build: Build) -> None:
    none = seen(build([[-1.0]], [[-1.0]], [[False]]))
    assert mismatch_profiles(none) == {}
    assert worst_tokens(none, 8).shape == torch.Size([0])
