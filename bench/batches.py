"""Batches of random tokens for the benchmarks of the learner."""

from __future__ import annotations

import torch

from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths


def ragged(num: int, vocab: int, group: int = 1, device: str = "cuda") -> Batch:
    """Samples with prompts of 64 to 192 tokens and completions of 64 to 448, with advantages of both signs.

    Those of a group begin with the same prompt.
    """
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(64, 193, (num // group,), generator=random).repeat_interleave(group)
    answers = torch.randint(64, 449, (num,), generator=random)
    offsets = offsets_from_lengths(prompts + answers)
    tokens = torch.randint(vocab, (int(offsets[-1]),), generator=random)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for k in range(num):
        start, prompt, first = int(offsets[k]), int(prompts[k]), int(offsets[k - k % group])
        tokens[start : start + prompt] = tokens[first : first + prompt]
        mask[start : start + prompt] = False
    columns = {
        "advantages": torch.where(torch.arange(num) % 2 == 0, -1.0, 1.0),
        "group_ids": torch.arange(num) // group,
    }
    batch = Batch(tokens, offsets, {"action_mask": mask, "loss_mask": mask}, columns)
    return batch.with_token(weight=aggregation_weights(batch, "token-mean")).to(device)


def equal(num: int, length: int, vocab: int, device: str = "cuda") -> Batch:
    """Sequences of one length, every token but the first in the loss."""
    tokens = torch.randint(vocab, (num * length,), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(num * length) % length > 0
    batch = Batch(tokens, torch.arange(num + 1) * length, {"action_mask": mask, "loss_mask": mask})
    return batch.with_token(weight=aggregation_weights(batch, "token-mean")).to(device)
