"""Supervised terms beside the policy loss: the worked number of ALGORITHMS.md 5.13 and its edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.algorithms.terms.loss_terms import positive_nll_weights
from burnish.config.errors import UserError
from burnish.core.batch import Batch


def judged(f1: Batch, accuracy: list[float]) -> Batch:
    return f1.with_sequence(accuracy=torch.tensor(accuracy, dtype=torch.float64))


def total(batch: Batch, weights: Tensor) -> float:
    mask = batch.loss_mask
    return float((weights[mask] * -batch.token["new"][mask]).sum())


def test_right_answers_are_imitated(f1: Batch) -> None:
    batch = judged(f1, [1, 0, 0, 1])
    weights = positive_nll_weights(batch, 1.0)
    assert weights.dtype == torch.float64
    assert total(batch, weights) == pytest.approx(0.825, abs=1e-12)
    assert total(batch, positive_nll_weights(batch, 0.1)) == pytest.approx(0.0825, abs=1e-12)


def test_weights_are_zero_but_on_tokens_of_right_answers_in_the_loss(f1: Batch) -> None:
    batch = judged(f1, [1, 0, 0, 1])
    batch = batch.with_token(loss_mask=batch.loss_mask & (torch.arange(batch.num_tokens) != 2))
    weights = positive_nll_weights(batch, 0.7)
    wanted = batch.loss_mask & ((batch.sequence_ids == 0) | (batch.sequence_ids == 3))
    torch.testing.assert_close(weights, 0.7 * wanted.double() / 7, atol=1e-15, rtol=0)


def test_without_right_answers_the_term_is_exactly_zero(f1: Batch) -> None:
    assert positive_nll_weights(judged(f1, [0, 0, 0, 0]), 0.1).tolist() == [0.0] * f1.num_tokens
    out = judged(f1, [1, 0, 0, 0])
    out = out.with_token(loss_mask=out.loss_mask & (out.sequence_ids != 0))
    assert positive_nll_weights(out, 0.1).tolist() == [0.0] * f1.num_tokens


def test_partly_right_is_not_right_and_rewards_do_not_matter(f1: Batch) -> None:
    batch = judged(f1, [0.9, 0, 1, 0]).with_sequence(reward=torch.tensor([5.0, 5, -5, 5]))
    weights = positive_nll_weights(batch, 1.0)
    assert batch.sequence_ids[weights > 0].unique().tolist() == [2]


def test_an_answer_nobody_judged_is_an_error(f1: Batch) -> None:
    with pytest.raises(UserError, match=r"1 of 4 samples have no accuracy: use a reward"):
        positive_nll_weights(judged(f1, [1, float("nan"), 0, 1]), 0.1)
