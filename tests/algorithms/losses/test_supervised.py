"""Negative log-likelihood as a loss of the slot: ALGORITHMS.md 6.8."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.algorithms.losses.loss_functions import nll
from burnish.core.batch import Batch


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 0.938462), ("seq-mean-token-mean", 0.941667)])
def test_worked_numbers(f1: Batch, evaluate: Any, mode: str, expected: float) -> None:
    result = evaluate(nll, f1, mode)
    assert result.value == pytest.approx(expected, abs=1e-6)
    assert result.metrics["nll"] == pytest.approx(0.938462, abs=1e-6)


def test_nothing_in_the_loss_adds_exactly_nothing(f1: Batch, evaluate: Any) -> None:
    result = evaluate(nll, f1.with_token(loss_mask=torch.zeros_like(f1.loss_mask)))
    assert result.value == 0
    assert result.gradient.numel() == 0
