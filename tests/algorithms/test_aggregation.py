"""Aggregation: the worked numbers of ALGORITHMS.md 1.3, a padded oracle, and the invariants of 18."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch, to_padded

LOSS = [1, 2, 3, 4, 5, 6, 1, 0, 2, 0.5, 0.5, 0.5, 0.5]
MODES = [
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
    "prompt-mean",
]


def per_token(batch: Batch) -> torch.Tensor:
    values = torch.zeros(batch.num_tokens, dtype=torch.float64)
    values[batch.action_mask] = torch.tensor(LOSS, dtype=torch.float64)
    return values


@pytest.mark.parametrize(
    ("mode", "horizon", "expected"),
    [
        ("token-mean", None, 2),
        ("token-sum", None, 26),
        ("seq-mean-token-sum", None, 6.5),
        ("seq-mean-token-mean", None, 2.375),
        ("seq-mean-token-sum-norm", 4, 1.625),
        ("seq-mean-token-sum-norm", 10, 0.65),
        ("prompt-mean", None, (21 / 6 + 5 / 7) / 2),
    ],
)
def test_the_worked_numbers(f1: Batch, mode: str, horizon: int | None, expected: float) -> None:
    weights = aggregation_weights(f1, mode, horizon)
    assert weights.dtype == torch.float64
    assert float((weights * per_token(f1)).sum()) == pytest.approx(expected, abs=1e-12)
    assert weights[~f1.loss_mask].tolist() == [0.0] * 4


def padded_oracle(loss: torch.Tensor, mask: torch.Tensor, mode: str, horizon: int) -> float:
    """The rows of the table on [B, T], with padding and masked entries already out of `loss`."""
    kept = (loss * mask).sum(1)
    rows = int((mask.sum(1) > 0).sum())
    prompts = [(float(kept[k : k + 2].sum()), int(mask[k : k + 2].sum())) for k in (0, 2)]  # two rows each
    means = [total / count for total, count in prompts if count > 0]
    return {
        "prompt-mean": sum(means) / max(len(means), 1),
        "token-mean": float(kept.sum() / max(int(mask.sum()), 1)),
        "token-sum": float(kept.sum()),
        "seq-mean-token-sum": float(kept.sum()) / max(rows, 1),
        "seq-mean-token-mean": float((kept / mask.sum(1).clamp(min=1)).sum()) / max(rows, 1),
        "seq-mean-token-sum-norm": float((kept / horizon).sum()) / max(rows, 1),
    }[mode]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=17, max_size=17), st.sampled_from(MODES), st.integers(1, 9))
def test_ragged_weights_equal_the_padded_formula_for_any_loss_mask(
    f1: Batch, bits: list[bool], mode: str, horizon: int
) -> None:
    batch = f1.with_token(loss_mask=f1.action_mask & torch.tensor(bits))
    weights = aggregation_weights(batch, mode, horizon)
    loss, mask = (to_padded(c, batch.offsets) for c in (per_token(batch), batch.loss_mask.to(torch.float64)))
    assert float((weights * per_token(batch)).sum()) == pytest.approx(
        padded_oracle(loss, mask, mode, horizon), abs=1e-12
    )
    assert bool((weights[~batch.loss_mask] == 0).all())


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(4)), st.sampled_from(MODES))
def test_weights_travel_with_their_sequences(f1: Batch, order: list[int], mode: str) -> None:
    index = torch.tensor(order)
    moved = f1.with_token(weight=aggregation_weights(f1, mode, 4)).select(index)
    assert torch.equal(aggregation_weights(f1.select(index), mode, 4), moved.token["weight"])


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_loss_mask_weighs_nothing_and_divides_by_nothing(f1: Batch, mode: str) -> None:
    batch = f1.with_token(loss_mask=torch.zeros_like(f1.loss_mask))
    assert aggregation_weights(batch, mode, 4).tolist() == [0.0] * f1.num_tokens


def test_prompt_mean_lies_between_token_mean_and_seq_mean(f1: Batch) -> None:
    """It is the first if all prompts have as many tokens, the second if every prompt has one answer. ALGORITHMS-2026.md N2.1."""
    even = f1.with_token(
        loss_mask=f1.loss_mask & (f1.sequence_ids != 2) & ~((f1.sequence_ids == 0) & (f1.positions > 2))
    )
    assert torch.equal(aggregation_weights(even, "prompt-mean"), aggregation_weights(even, "token-mean"))
    alone = f1.with_sequence(group_ids=torch.tensor([5, -1, 3, 9]))
    assert torch.allclose(aggregation_weights(alone, "prompt-mean"), aggregation_weights(alone, "seq-mean-token-mean"))
    ratio = torch.exp(f1.token["new"] - f1.token["old_logp"])
    advantage = f1.sequence["advantages"][f1.sequence_ids]
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).nan_to_num()
    assert float((aggregation_weights(f1, "prompt-mean") * loss).sum()) == pytest.approx(0.040001, abs=1e-5)
    masked = f1.with_token(loss_mask=f1.loss_mask & (f1.sequence_ids < 2))  # the second prompt does not count
    assert float(aggregation_weights(masked, "prompt-mean").sum()) == pytest.approx(1)


def test_a_constant_horizon_must_be_given(f1: Batch) -> None:
    with pytest.raises(ValueError, match="horizon"):
        aggregation_weights(f1, "seq-mean-token-sum-norm")


def test_an_unknown_aggregation_is_refused(f1: Batch) -> None:
    with pytest.raises(ValueError, match="'token-median'"):
        aggregation_weights(f1, "token-median")
