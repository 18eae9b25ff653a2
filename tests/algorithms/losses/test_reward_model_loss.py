"""The loss of a reward model: worked numbers, and the same gradient for any split into micro-batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.model_losses import RewardModelLoss


def view_of_scores(scores: list[float], margins: list[float] | None = None, order: list[int] | None = None) -> LossView:
    """Pairs (chosen, rejected) of scores, one token a sequence; `order` shuffles the sequences."""
    num = len(scores) // 2
    at = torch.tensor(order if order is not None else list(range(len(scores))))
    columns: dict[str, Tensor] = {
        "group_ids": torch.arange(num).repeat_interleave(2)[at],
        "chosen": torch.tensor([True, False]).repeat(num)[at],
        "margin": torch.tensor(margins or [0.0] * num, dtype=torch.float64).repeat_interleave(2)[at],
        "weight": torch.full((2 * num,), 1 / num, dtype=torch.float64)[at],
    }
    value = torch.tensor(scores, dtype=torch.float64)[at].requires_grad_()
    return LossView(torch.arange(len(scores) + 1), {}, columns, value=value)


def test_one_pair_whose_scores_are_1_and_0() -> None:
    loss, sums = RewardModelLoss()(view_of_scores([1.0, 0.0]))
    assert float(loss.detach()) == pytest.approx(0.313262, abs=1e-6)
    assert {name: float(value) / 2 for name, value in sums.items()} == {"accuracy": 1.0, "margin": 1.0, "score": 0.5}


def test_the_margin_of_the_config_and_of_the_pair_add_up() -> None:
    loss, _ = RewardModelLoss(margin=0.25)(view_of_scores([1.0, 0.0], margins=[0.75]))
    assert float(loss.detach()) == pytest.approx(math.log(2), abs=1e-12)


def test_centring_is_the_square_of_the_sum_of_both_scores() -> None:
    loss, _ = RewardModelLoss(centre=0.1)(view_of_scores([1.0, 0.5, 0.0, 0.0]))
    expected = (-math.log(1 / (1 + math.exp(-0.5))) + 0.1 * 1.5**2 + math.log(2)) / 2
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-12)


def test_the_order_of_sequences_changes_nothing() -> None:
    scores, margins = [0.3, -0.2, 1.0, 1.5, -2.0, 0.1], [0.0, 0.5, 0.1]
    plain, mixed = (
        RewardModelLoss(0.1, 0.05)(view_of_scores(scores, margins, order)) for order in (None, [5, 0, 2, 1, 4, 3])
    )
    assert float(plain[0].detach()) == pytest.approx(float(mixed[0].detach()), abs=1e-12)
    assert {k: float(v) for k, v in plain[1].items()} == pytest.approx({k: float(v) for k, v in mixed[1].items()})


def test_half_a_pair_is_an_error() -> None:
    view = view_of_scores([1.0, 0.0])
    broken = LossView(view.offsets, {}, {**view.sequence, "chosen": torch.tensor([True, True])}, value=view.value)
    with pytest.raises(ValueError, match="not pairs"):
        RewardModelLoss()(broken)
