"""Which samples of a batch begin alike: the prompt of a group, which its samples share in the learner's forward and backward."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import compact_ids

PAYS = 0.05
"""Least share of a batch's tokens that must be saved: below it the gathering of keys and values costs more."""


def shared_prefixes(batch: Batch) -> Tensor:
    """[S] how many first tokens a sequence has in common with all others of its group; 0 where it is alone.

    Each keeps at least one token of its own. By tokens, not by masks: whatever samples begin with in common they share.
    """
    groups, num_groups = compact_ids(batch.sequence["group_ids"])
    sequence = torch.arange(batch.num_sequences, device=groups.device)
    first = torch.full((num_groups,), batch.num_sequences, device=groups.device).scatter_reduce_(
        0, groups, sequence, "amin"
    )
    ids, positions = batch.sequence_ids, batch.positions
    partner = first[groups][ids]
    within = positions < batch.lengths[partner]
    counterpart = batch.tokens[torch.where(within, batch.offsets[partner] + positions, 0)]
    alike = within & (counterpart == batch.tokens)
    # The first token that differs from the group's first sequence; a sequence that never does keeps its last token.
    limit = torch.where(alike, batch.lengths[ids] - 1, positions)
    common = (batch.lengths - 1).scatter_reduce_(0, ids, limit, "amin")
    of_group = torch.full((num_groups,), batch.num_tokens, device=groups.device).scatter_reduce_(
        0, groups, common, "amin"
    )
    alone = torch.bincount(groups, minlength=num_groups) == 1
    return torch.where(alone, 0, of_group)[groups]


def pays(lengths: list[int], groups: list[int], shared: list[int]) -> bool:
    """Whether computing the shared tokens once saves enough."""
    counts: dict[int, int] = {}
    saved = 0
    for group, length in zip(groups, shared, strict=True):
        counts[group] = counts.get(group, 0) + 1
        saved += length if counts[group] > 1 else 0
    return saved > PAYS * sum(lengths)
