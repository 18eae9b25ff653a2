"""A loss of the slot as the learner sees it: its weighted sum, the gradient of that, and its metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch


@dataclass(frozen=True)
class Evaluated:
    value: float
    gradient: Tensor  # [M] of the value in the policy's log-probs
    per_token: Tensor  # [M]
    metrics: dict[str, float]


def evaluate_loss(
    function: Callable[..., Any], batch: Batch, mode: str = "seq-mean-token-mean", **options: Any
) -> Evaluated:
    """Columns: `new` for the policy, `old_logp` for the anchor; advantages 0 where the batch has none."""
    if "advantages" not in {*batch.token, *batch.sequence}:
        batch = batch.with_sequence(advantages=torch.zeros(batch.num_sequences, dtype=torch.float64))
    batch = batch.with_token(weight=aggregation_weights(batch, mode, horizon=4))
    view = loss_view(batch, batch.token["new"][batch.loss_mask].clone().requires_grad_())
    per_token, marks = function(view, view.column("old_logp"), view.column("advantages"), **options)
    total = (view.column("weight") * per_token).sum()
    (gradient,) = torch.autograd.grad(total, [view.logp])
    metrics = {name: float(mark.sum() / view.num_tokens) for name, mark in marks.items()}
    return Evaluated(total.item(), gradient, per_token.detach(), metrics)


@pytest.fixture(scope="session")
def evaluate() -> Callable[..., Evaluated]:
    return evaluate_loss


@pytest.fixture(scope="session")
def f1_group(f1: Batch) -> Batch:
    """F1 as one group whose answers are right, wrong, wrong, right; no advantages."""
    columns = {name: column for name, column in f1.sequence.items() if name != "advantages"}
    columns |= {"group_ids": torch.zeros(4, dtype=torch.int64), "accuracy": f1.sequence["reward"]}
    return Batch(f1.tokens, f1.offsets, f1.token, columns)
