"""The turns of an agent: which turn every written token belongs to, and what each turn earned.

Turns are ragged columns of a batch: `turn_start` says where in its sequence a turn begins; the tokens the model wrote from there to the
next turn are its own, what an environment said between them is nobody's.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import ids_from_offsets, segment_sum


class Turns(NamedTuple):
    """K turns of a batch, in order, and the M tokens the model wrote."""

    where: Tensor  # [M] the written tokens among the N
    of_token: Tensor  # [M] the turn of each, from 0
    sequence: Tensor  # [K] the sequence of each turn

    @property
    def num(self) -> int:
        return self.sequence.numel()

    @property
    def last(self) -> Tensor:
        """[K] the last token of each turn among the N."""
        every = torch.arange(self.num, device=self.where.device)
        return self.where[torch.searchsorted(self.of_token, every, right=True) - 1]


def turns_of(batch: Batch) -> Turns:
    """The turns of a batch whose environment told them."""
    starts = batch.ragged["turn_start"]
    sequence = ids_from_offsets(starts.offsets)
    begins = torch.zeros(batch.num_tokens, dtype=torch.int64, device=batch.tokens.device)
    begins[starts.values + batch.offsets[:-1][sequence]] = 1
    where = batch.action_mask.nonzero().squeeze(1)
    of_token = begins.cumsum(0)[where] - 1
    if bool((of_token < 0).any()) or not torch.equal(sequence[of_token], batch.sequence_ids[where]):
        raise ValueError("a sequence has written tokens before its first turn, or no turns at all")
    return Turns(where, of_token, sequence)


def with_turn_rewards(batch: Batch, rewards: Tensor, last: Tensor) -> Tensor:
    """Outcomes on the tokens `last` [S] with what turns earned moved to the last tokens of those turns.

    What a trajectory's reward has beyond its turns' (the configured reward, a shaper) stays where it is.
    """
    turns, earned = turns_of(batch), batch.ragged["turn_reward"].values
    of_sequence = segment_sum(earned, turns.sequence, batch.num_sequences)
    if "trajectory_ids" in batch.sequence:
        owner = batch.sequence["trajectory_ids"].unique(return_inverse=True)[1]
        of_sequence = segment_sum(of_sequence, owner, batch.num_sequences)[owner]
    placed = rewards.clone()
    placed[last] -= of_sequence
    return placed.index_add_(0, turns.last, earned)
