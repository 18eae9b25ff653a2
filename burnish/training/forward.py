"""The learner's forward pass: log-probs of chosen tokens of a batch, micro-batch by micro-batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.training.packing import micro_batches


class Policy(Protocol):
    """What the learner asks of a model: our decoder and `models/hf.py` both have it."""

    def token_logprobs(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token given its past) at the `wanted` positions, and entropies if asked."""


def split(batch: Batch, budget: int) -> list[tuple[Tensor, Batch]]:
    """(sequence indices, micro-batch) pairs under the token budget."""
    parts = [torch.tensor(p) for p in micro_batches(batch.lengths.tolist(), budget)]
    return [(part, batch.select(part)) for part in parts]


def element_positions(batch: Batch, part: Tensor) -> Tensor:
    """Where the tokens of the micro-batch `part` stand in the whole batch."""
    starts, lengths = batch.offsets[:-1][part], batch.lengths[part]
    shift = torch.repeat_interleave(starts - (lengths.cumsum(0) - lengths), lengths)
    return torch.arange(int(lengths.sum()), device=shift.device) + shift


@torch.no_grad()
def batch_logprobs(model: Policy, batch: Batch, budget: int, temperature: float) -> Tensor:
    """[N] log-prob of every token the model wrote under `model`, 0 elsewhere."""
    result = torch.zeros(batch.num_tokens, device=batch.tokens.device)
    for part, micro in split(batch, budget):
        wanted = micro.action_mask.nonzero().squeeze(1)
        logp, _ = model.token_logprobs(micro.tokens, micro.offsets, wanted, temperature)
        if result.dtype != logp.dtype:
            result = result.to(logp.dtype)
        result[element_positions(batch, part)[wanted]] = logp
    return result
