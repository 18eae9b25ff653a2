"""Losses as the learner evaluates them, and views of the fixture F1 and of ragged random batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView, loss_view
from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths


@dataclass(frozen=True)
class Evaluated:
    """A loss on a batch: its weighted sum, the gradient of that, and its metrics."""

    value: float
    gradient: Tensor  # [M] of the value in the policy's log-probs
    per_token: Tensor  # [M]
    metrics: dict[str, float]


def evaluate_loss(
    function: Callable[..., Any], batch: Batch, mode: str = "seq-mean-token-mean", **options: Any
) -> Evaluated:
    """Column `new` is the policy, `old_logp` the anchor; advantages are 0 if the batch has none."""
    if "advantages" not in {*batch.token, *batch.sequence}:
        batch = batch.with_sequence(advantages=torch.zeros(batch.num_sequences, dtype=torch.float64))
    batch = batch.with_token(weight=aggregation_weights(batch, mode, horizon=4))
    view = loss_view(batch, batch.token["new"][batch.loss_mask].clone().requires_grad_())
    per_token, token_metrics = function(view, view.column("old_logp"), view.column("advantages"), **options)
    total = (view.column("weight") * per_token).sum()
    (gradient,) = torch.autograd.grad(total, [view.logp])
    metrics = {name: float(column.sum() / view.num_tokens) for name, column in token_metrics.items()}
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


@dataclass(frozen=True)
class Seen:
    """A view, and the leaf under its log-probs: [N], so that gradients of different views can be compared."""

    view: LossView
    theta: Tensor

    def gradient(self, loss: Tensor) -> Tensor:
        """[N] dloss/dlogp at every token of the batch."""
        return torch.autograd.grad(loss, self.theta, retain_graph=True)[0]

    def run(self, **record: Any) -> tuple[float, list[float], dict[str, float]]:
        """The loss, its gradient at the tokens in the loss, and the metrics as means over tokens."""
        loss, sums = PolicyLoss(**record)(self.view)
        gradient = self.gradient(loss)[self.view.token["index"]]
        return loss.item(), gradient.tolist(), {k: float(v) / self.view.num_tokens for k, v in sums.items()}


def make(batch: Batch, mode: str | None = "token-mean", theta: Tensor | None = None) -> Seen:
    """What a learner hands over; `mode` None keeps the weights the batch has."""
    if "index" not in batch.token:
        batch = batch.with_token(index=torch.arange(batch.num_tokens))
    if mode is not None:
        batch = batch.with_token(weight=aggregation_weights(batch, mode, 4))
    theta = batch.token["new"].clone().requires_grad_() if theta is None else theta
    logp = theta[batch.token["index"][batch.loss_mask]]
    entropy = batch.token["entropy"][batch.loss_mask] if "entropy" in batch.token else torch.zeros_like(logp)
    return Seen(loss_view(batch, logp, entropy), theta)


@pytest.fixture(scope="session")
def look() -> Callable[..., Seen]:
    return make


@pytest.fixture(scope="session")
def keyed(f1: Batch) -> Batch:
    """F1 with identities."""
    return f1.with_sequence(key=torch.tensor([11, -5, 2**40, 3]))


@pytest.fixture(scope="session")
def ragged() -> Callable[[int], Batch]:
    """Seven sequences: of one token, with an interior tool mask, wholly out of the loss, and far from the old policy."""
    return make_ragged


def make_ragged(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 5, 3, 8, 1, 6, 4]
    mask = torch.tensor([i > 0 for n in lengths for i in range(n + 1)])
    n = mask.numel()
    loss_mask = mask.clone()
    loss_mask[5] = False  # a tool's answer inside the second sequence
    start = sum(lengths[:2]) + 2
    loss_mask[start : start + 4] = False  # the third sequence, filtered out
    old = -0.05 - 3 * torch.rand(n, generator=generator, dtype=torch.float64)
    new = old + 0.5 * torch.randn(n, generator=generator, dtype=torch.float64)
    new[14], new[16] = old[14] - 25, old[16] + 25  # beyond the clamp, in sequence 3
    nan = torch.full((n,), torch.nan, dtype=torch.float64)
    return Batch(
        tokens=torch.arange(n),
        offsets=offsets_from_lengths(torch.tensor(lengths) + 1),
        token={
            "action_mask": mask,
            "loss_mask": loss_mask,
            "index": torch.arange(n),
            "new": torch.where(loss_mask, new, nan),
            "old_logp": torch.where(loss_mask, old, nan),
            "ref_logp": torch.where(loss_mask, old + 0.1, nan),
            "entropy": torch.rand(n, generator=generator, dtype=torch.float64),
        },
        sequence={
            "advantages": torch.randn(7, generator=generator, dtype=torch.float64),
            "key": torch.randint(-(2**62), 2**62, (7,), generator=generator),
        },
    )
