"""Which sequences of a mini-batch each data-parallel rank works on."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.training.balance import karmarkar_karp
from burnish.training.packing import ATTENTION_COST
from burnish.training.sharing import shared_prefixes


def shares(batch: Batch, num_ranks: int, attention_cost: float = ATTENTION_COST) -> list[Tensor]:
    """The sequences of each rank, in rising order: every one once, about the same work for all; a share may be empty.

    A group stays together, since its samples share the work of their prompt. A sequence of L tokens costs
    L + attention_cost L^2, what it begins with in common with its group counted once.
    """
    lengths = batch.lengths.tolist()
    if "group_ids" in batch.sequence:
        groups, shared = batch.sequence["group_ids"].tolist(), shared_prefixes(batch).tolist()
    else:
        groups, shared = list(range(len(lengths))), [0] * len(lengths)
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)

    def cost(length: int) -> float:
        return length + attention_cost * length**2

    units = list(members.values())
    costs = [cost(shared[unit[0]]) + sum(cost(lengths[i]) - cost(shared[i]) for i in unit) for unit in units]
    parts = karmarkar_karp(costs, num_ranks)
    return [torch.tensor(sorted(i for k in part for i in units[k]), dtype=torch.long) for part in parts]
