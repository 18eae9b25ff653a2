"""Slot `auxiliary`: imitation beside the policy loss, as weights of -logp fixed on the whole mini-batch."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import broadcast


def positive_nll_weights(batch: Batch, mu: float) -> Tensor:
    """[N] float64 weights w such that sum(w * -logp) is mu times the mean NLL of the tokens of right answers.

    w = mu / (tokens in the loss of all sequences whose accuracy is 1); zeros where there is none. Shaping the reward
    does not change which answers are right. VAPO (2504.05118).
    """
    accuracy = batch.sequence["accuracy"]
    if bool(accuracy.isnan().any()):
        raise UserError(
            f"auxiliary.positive_nll imitates right answers, but nobody judged {int(accuracy.isnan().sum())} of "
            f"{accuracy.numel()}: use a reward that says right or wrong, or set correct_at of its part to the value from which an answer is right"
        )
    tokens = (batch.loss_mask & broadcast(accuracy == 1, batch.sequence_ids)).to(torch.float64)
    return mu * tokens / tokens.sum().clamp(min=1)
