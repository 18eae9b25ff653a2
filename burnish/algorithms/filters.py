"""Slot `filters`: which groups are used, and which samples stay in the loss.

A group filter (before advantages) says for each sequence whether to keep it. A sample filter (after advantages, whose
statistics saw everything) returns a new loss mask; so does a user's own filter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.advantages import trajectory_groups
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_count, segment_max, segment_min


def zero_signal(batch: Batch) -> Tensor:
    """[S] bool: keep groups whose rewards differ, and groups of one. DAPO's dynamic sampling (2503.14476), without refill."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    rewards = batch.sequence["reward"]
    keep = segment_max(rewards, groups, num) > segment_min(rewards, groups, num)
    _, group_of_trajectory = trajectory_groups(batch)
    return (keep | (segment_count(group_of_trajectory, num) == 1))[groups]


def overlong(batch: Batch) -> Tensor:
    """[N] bool: the loss mask without truncated sequences (DAPO's overlong filtering)."""
    return batch.loss_mask & ~batch.sequence["truncated"][batch.sequence_ids]


GROUP_FILTERS = {"zero_signal": zero_signal}
SAMPLE_FILTERS = {"overlong": overlong}


def loss_mask_from(result: Tensor, batch: Batch, name: str) -> Tensor:
    """[N] the loss mask after a user's filter, which may answer per sequence (keep it?) or per token (keep it?)."""
    if not isinstance(result, Tensor):
        raise UserError(
            f"filter {name} returned {type(result).__name__}; expected a bool tensor: what to keep in the loss"
        )
    if result.dtype != torch.bool or result.shape not in ((batch.num_sequences,), (batch.num_tokens,)):
        raise UserError(
            f"filter {name} returned {result.dtype} of shape {tuple(result.shape)}; expected bool, one a sequence "
            f"[{batch.num_sequences}] or one a token [{batch.num_tokens}]: what to keep in the loss"
        )
    if result.shape == (batch.num_sequences,):
        result = result[batch.sequence_ids]
    return batch.loss_mask & result
