"""The learner's part of ECHO: observed tokens go through the same forward pass as the tokens of the policy loss, which does not see them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from burnish.algorithms.losses.policy_loss import Loss
from burnish.algorithms.terms.observations import OBSERVATION_WEIGHT, OBSERVATIONS, observation_nll
from burnish.core.batch import Batch
from burnish.training.forward import MicroBatch

LOSS_MASK, WANTED_MASK = "loss_mask", "wanted_mask"
NAMES = ("observation_loss", "observation_nll", "observation_tokens")


def with_wanted_mask(batch: Batch, loss: Loss) -> tuple[Batch, str]:
    """Return the batch with a mask of the tokens whose outputs are needed, and the name of its column: the loss mask, or also observed tokens."""
    if OBSERVATIONS not in loss.needs or OBSERVATION_WEIGHT not in batch.token:
        return batch, LOSS_MASK
    return batch.with_token(**{WANTED_MASK: batch.loss_mask | (batch.token[OBSERVATION_WEIGHT] > 0)}), WANTED_MASK


class SplitOutputs:
    """The outputs of a micro-batch, divided into those of the policy loss and those of observed tokens."""

    def __init__(self, micro_batch: MicroBatch, outputs: Mapping[str, Tensor], mask: str) -> None:
        self.outputs, self.positions = dict(outputs), micro_batch.positions
        self.observed: tuple[Tensor, Tensor] | None = None
        """Log-probs and weights of observed tokens; None if there are none."""
        if mask == LOSS_MASK or micro_batch.is_padding:
            return
        in_loss = micro_batch.batch.loss_mask[micro_batch.wanted]
        if bool(in_loss.all()):
            return
        weight = micro_batch.batch.token[OBSERVATION_WEIGHT][micro_batch.wanted]
        self.observed = outputs["logp"][~in_loss], weight[~in_loss]
        self.outputs = {name: output[in_loss] for name, output in outputs.items()}
        self.positions = micro_batch.positions[in_loss]

    def term(self) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The loss of observed tokens and its metric sums; None if there are none."""
        return None if self.observed is None else observation_nll(*self.observed)


def add_observed_slopes(
    batch: Batch, outputs: Mapping[str, Tensor], slopes: dict[str, Tensor]
) -> tuple[float, dict[str, float]]:
    """Add the derivatives of the term to those of the policy loss, as [N] columns of a whole mini-batch. Returns its loss and metric sums."""
    weight = torch.where(batch.loss_mask, 0.0, batch.token[OBSERVATION_WEIGHT])
    chosen = weight > 0
    logp = outputs["logp"]
    slopes["logp"] = slopes["logp"] - weight.to(logp.dtype)
    loss, sums = observation_nll(logp[chosen], weight[chosen])
    return float(loss), {name: float(value) for name, value in sums.items()}


def observation_stats(sums: dict[str, float], num_tokens: int) -> dict[str, float]:
    """Take the sums of observed tokens out of the metric sums, and return their metrics."""
    loss, nll, count = (sums.pop(name, 0.0) for name in NAMES)
    if not count:
        return {}
    return {
        "observation_loss": loss,
        "observation_nll": nll / count,
        "observation_share": count / (count + num_tokens),
    }
