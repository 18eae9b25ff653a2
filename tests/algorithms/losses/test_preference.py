"""Preferences: the worked numbers of ALGORITHMS.md 6.5 to 6.7 and 10.10, and what makes a pair."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.preference_losses import bradley_terry
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import dpo, ipo, kto, orpo, simpo

PAIRWISE = [dpo, ipo, simpo, orpo]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def answers(logp: list[float], ref: list[float], lengths: list[int], **columns: Tensor) -> Batch:
    """Sequences with these summed log-probs, spread unevenly over their tokens, each behind a prompt token."""

    def parts(total: float, n: int) -> list[float]:
        shares = [k + 1 for k in range(n)]
        return [math.nan, *(total * s / sum(shares) for s in shares)]

    def column(totals: list[float]) -> Tensor:
        rows = [parts(t, n) for t, n in zip(totals, lengths, strict=True)]
        return torch.tensor([x for row in rows for x in row], dtype=torch.float64)

    mask = torch.tensor([i > 0 for n in lengths for i in range(n + 1)])
    token = {"action_mask": mask, "loss_mask": mask, "new": column(logp), "ref_logp": column(ref)}
    token["old_logp"] = token["new"]
    offsets = offsets_from_lengths(torch.tensor(lengths) + 1)
    return Batch(torch.arange(mask.numel()), offsets, token, columns)


@pytest.fixture(scope="module")
def pair() -> Batch:
    return answers(
        [-10.0, -14.0], [-11.0, -12.5], [5, 7], group_ids=torch.tensor([4, 4]), chosen=torch.tensor([True, False])
    )


@pytest.fixture(scope="module")
def pairs() -> Batch:
    """Three pairs, their sequences out of order."""
    return answers(
        [-10.0, -3.0, -14.0, -2.0, -6.0, -5.0],
        [-11.0, -2.0, -12.5, -4.0, -6.5, -5.0],
        [5, 2, 7, 1, 3, 3],
        group_ids=torch.tensor([9, -1, 9, 0, -1, 0]),
        chosen=torch.tensor([True, False, False, True, True, False]),
    )


def test_direct_preference_optimisation(pair: Batch, evaluate: Any) -> None:
    result = evaluate(dpo, pair)
    assert result.value == pytest.approx(0.575939, abs=1e-6)
    assert result.metrics["pref_margin"] == pytest.approx(0.1 - -0.15, abs=1e-9)  # of the implicit rewards
    assert result.metrics["pref_accuracy"] == pytest.approx(1)
    assert evaluate(dpo, pair, smoothing=0.1).value == pytest.approx(0.600939, abs=1e-6)
    # dL/dlogp = -beta sigmoid(-beta h) on every chosen token, the opposite on every rejected one.
    slope = 0.1 * sigmoid(-0.25)
    expected = torch.tensor([-slope] * 5 + [slope] * 7, dtype=torch.float64)
    torch.testing.assert_close(result.gradient, expected, atol=1e-12, rtol=0)


def test_bounded_preference(pair: Batch, evaluate: Any) -> None:
    assert evaluate(ipo, pair, average=False).value == pytest.approx(6.25, abs=1e-9)
    assert evaluate(ipo, pair).value == pytest.approx(21.028776, abs=1e-6)


def test_mean_log_probs_with_a_margin(pair: Batch, evaluate: Any) -> None:
    # Both answers have mean log-prob -2, so that only the margin is left.
    assert evaluate(simpo, pair).value == pytest.approx(-math.log(sigmoid(-0.5)), abs=1e-12)
    better = pair.with_token(new=torch.where(pair.sequence_ids == 0, pair.token["new"] / 2, pair.token["new"]))
    assert evaluate(simpo, better, beta=3.0, margin=1.0).value == pytest.approx(-math.log(sigmoid(3 - 1)), abs=1e-12)


def test_odds_ratio(pair: Batch, evaluate: Any) -> None:
    better = pair.with_token(new=torch.where(pair.sequence_ids == 0, pair.token["new"] / 4, pair.token["new"]))

    def log_odds(mean: float) -> float:
        return mean - math.log(1 - math.exp(mean))

    expected = 0.5 - 0.3 * math.log(sigmoid(log_odds(-0.5) - log_odds(-2.0)))
    assert evaluate(orpo, better, coef=0.3).value == pytest.approx(expected, abs=1e-12)


def test_odds_of_a_certain_answer_are_finite(pair: Batch, evaluate: Any) -> None:
    for dtype in (torch.float32, torch.float64):
        certain = torch.where(pair.sequence_ids == 0, 0.0, pair.token["new"]).to(dtype)
        result = evaluate(orpo, pair.with_token(new=certain))
        assert math.isfinite(result.value)
        assert bool(result.gradient.isfinite().all())


def test_good_and_bad_answers_without_pairs(evaluate: Any) -> None:
    batch = answers(
        [-4.0, -7.5, -3.6, -5.2],
        [-5.0, -6.0, -4.0, -5.0],
        [3, 2, 4, 1],
        desirable=torch.tensor([True, False, True, False]),
        mismatched=torch.tensor([False, False, True, True]),
    )
    result = evaluate(kto, batch)
    assert result.metrics["kto_z0"] == pytest.approx(0.1, abs=1e-9)
    # Two of four rows have a loss: each counts twice, so that the mean over rows is the mean over answers.
    good, bad = result.per_token[0], result.per_token[3]
    assert (float(good) / 2, float(bad) / 2) == pytest.approx((0.477515, 0.460085), abs=1e-6)
    assert result.value == pytest.approx((0.477515 + 0.460085) / 2, abs=1e-6)
    assert result.per_token[5:].tolist() == [0.0] * 5
    assert result.gradient[5:].tolist() == [0.0] * 5
    assert float(result.gradient[0]) < 0 < float(result.gradient[3])
    weighted = evaluate(kto, batch, desirable=2.0, undesirable=0.5).value
    assert weighted == pytest.approx((2 * 0.477515 + 0.5 * 0.460085) / 2, abs=1e-6)


def test_the_reference_point_is_never_below_zero(evaluate: Any) -> None:
    batch = answers(
        [-4.0, -9.0],
        [-5.0, -5.0],
        [3, 2],
        desirable=torch.tensor([True, True]),
        mismatched=torch.tensor([False, True]),
    )
    result = evaluate(kto, batch)
    assert result.metrics["kto_z0"] == 0
    assert result.value == pytest.approx(1 - sigmoid(0.1), abs=1e-12)


@pytest.mark.parametrize("mismatched", [[True, True], [False, False]])
def test_unpaired_answers_need_mismatched_rows_and_others(evaluate: Any, mismatched: list[bool]) -> None:
    batch = answers([-4.0, -9.0], [-5.0, -5.0], [3, 2], desirable=torch.tensor([True, False]))
    with pytest.raises(ValueError, match="needs both in every mini-batch"):
        evaluate(kto, batch.with_sequence(mismatched=torch.tensor(mismatched)))


def test_bradley_terry() -> None:
    one, zero = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])
    assert bradley_terry(one, zero).tolist() == pytest.approx([0.313262, math.log(2)], abs=1e-6)
    assert float(bradley_terry(one, zero, margin=1.0)[0]) == pytest.approx(math.log(2), abs=1e-6)
    assert bool(bradley_terry(torch.tensor([-1e4, 1e4]), zero).isfinite().all())


@pytest.mark.parametrize("loss", PAIRWISE)
def test_the_mean_over_sequences_is_the_mean_over_pairs(pairs: Batch, evaluate: Any, loss: Callable[..., Any]) -> None:
    whole = evaluate(loss, pairs)
    alone = [evaluate(loss, pairs.select(torch.tensor(index))) for index in ([0, 2], [1, 4], [3, 5])]
    assert whole.value == pytest.approx(sum(r.value for r in alone) / 3, abs=1e-12)
    for name in ("pref_margin", "pref_accuracy"):
        assert whole.metrics[name] == pytest.approx(sum(r.metrics[name] for r in alone) / 3, abs=1e-12)


@pytest.mark.parametrize("loss", PAIRWISE)
@pytest.mark.parametrize(
    "breaks",
    [
        {"group_ids": torch.tensor([9, -1, 9, 0, -1, 8])},  # two halves
        {"group_ids": torch.tensor([9, -1, 9, 9, -1, 9])},  # four of a kind
        {"chosen": torch.tensor([True, False, True, True, True, False])},  # two winners
        {"chosen": torch.tensor([False, False, False, True, True, False])},  # none
    ],
)
def test_an_incomplete_pair_is_refused(
    pairs: Batch, evaluate: Any, loss: Callable[..., Any], breaks: dict[str, Tensor]
) -> None:
    with pytest.raises(ValueError, match="each needs one chosen and one rejected answer"):
        evaluate(loss, pairs.with_sequence(**breaks))


def test_a_pair_with_an_answer_out_of_the_loss_is_refused_and_named(pairs: Batch, evaluate: Any) -> None:
    with pytest.raises(ValueError, match=r"1 of 3 groups are not pairs \(the first is group -1\)"):
        evaluate(dpo, pairs.with_token(loss_mask=pairs.loss_mask & (pairs.sequence_ids != 1)))


@pytest.mark.parametrize("loss", PAIRWISE)
@pytest.mark.parametrize("shift", [-1e4, 1e4])
def test_far_answers_stay_finite(pair: Batch, evaluate: Any, loss: Callable[..., Any], shift: float) -> None:
    row = 0 if shift < 0 else 1
    far = torch.where(pair.sequence_ids == row, -abs(shift), pair.token["new"]).float()
    result = evaluate(loss, pair.with_token(new=far))
    assert math.isfinite(result.value)
    assert bool(result.gradient.isfinite().all())
