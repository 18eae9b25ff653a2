"""Pairs from groups, after advantages: the best and the worst sample of each, for losses that compare two answers.

Which of the two is the better one is the sequence column `chosen`, made when all filters are through (`better_of_two`).
Online DPO (2402.04792), with as many samples of a prompt as there are.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_max, segment_min


def pairs(batch: Batch) -> Tensor:
    """[2 P] sequences: of each group the first of the best and the first of the worst, by reward, among those with a token in
    the loss. A group where these are equal, in reward or in every token, has no preference to learn from and gives none.
    """
    best, worst = best_and_worst(batch)
    is_pair = ~(are_ties(batch, best, worst) | are_identical(batch, best, worst))
    return torch.stack([best[is_pair], worst[is_pair]], 1).flatten()


def pair_counts(batch: Batch) -> dict[str, float]:
    """Groups whose best and worst sample have the same reward, and others where both are the same text."""
    best, worst = best_and_worst(batch)
    ties = are_ties(batch, best, worst)
    identical = are_identical(batch, best, worst) & ~ties
    made = float((~ties & ~identical).sum())
    return {"pairs/made": made, "pairs/ties": float(ties.sum()), "pairs/identical": float(identical.sum())}


def better_of_two(batch: Batch) -> Tensor:
    """[S] bool: the sample of the pair with the higher reward."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    rewards = batch.sequence["reward"]
    return rewards == segment_max(rewards, groups, num)[groups]


def best_and_worst(batch: Batch) -> tuple[Tensor, Tensor]:
    """[G] each: the first sequence of highest and of lowest reward of each group that has a token in the loss."""
    if batch.sequence["trajectory_ids"].unique().numel() < batch.num_sequences:
        raise UserError(
            "filter pairs compares whole answers, and a sample of this environment is several sequences: use a loss of the policy"
        )
    alive = torch.zeros(batch.num_sequences, dtype=torch.bool, device=batch.offsets.device)
    alive[batch.sequence_ids[batch.loss_mask]] = True
    where = alive.nonzero().squeeze(1)
    groups, num = compact_ids(batch.sequence["group_ids"][where])
    rewards = batch.sequence["reward"][where]
    place = torch.arange(where.numel(), device=where.device).double()

    def first(extreme: Tensor) -> Tensor:
        """[G] the first sequence whose reward is its group's."""
        return where[segment_min(torch.where(rewards == extreme[groups], place, torch.inf), groups, num).long()]

    return first(segment_max(rewards, groups, num)), first(segment_min(rewards, groups, num))


def are_ties(batch: Batch, best: Tensor, worst: Tensor) -> Tensor:
    """[G] bool: the same reward; a group of one is its own best and worst."""
    return batch.sequence["reward"][best] == batch.sequence["reward"][worst]


def are_identical(batch: Batch, best: Tensor, worst: Tensor) -> Tensor:
    """[G] bool: the same tokens, written at the same places."""
    lengths = batch.lengths
    same = lengths[best] == lengths[worst]
    one, other = batch.select(best[same]), batch.select(worst[same])
    differs = (one.tokens != other.tokens) | (one.action_mask != other.action_mask)
    apart = torch.zeros(one.num_sequences, dtype=torch.bool, device=differs.device)
    apart[one.sequence_ids[differs]] = True
    return same.masked_scatter(same, ~apart)
