"""What filters and shapers read of a batch: right or wrong, how long, cut short; and orders within groups.

A trajectory may be several sequences. What is said of a trajectory is said of each of its sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.advantages import trajectory_groups
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import segment_count, segment_max, segment_min


def judged_accuracy(batch: Batch, user: str) -> Tensor:
    """[S] the accuracy; a sample nobody judged is an error that names `user`, who cannot do without."""
    accuracy = batch.sequence["accuracy"]
    unjudged = int(accuracy.isnan().sum())
    if unjudged:
        raise UserError(
            f"{user} needs to know right from wrong, but {unjudged} of {accuracy.numel()} samples have no accuracy: "
            "add a reward part that judges the answer (exact, number, choice, math, task) for every data source, or set correct_at of a "
            "graded part (your own function) to the value from which an answer is correct"
        )
    return accuracy


def is_correct(batch: Batch, user: str) -> Tensor:
    """[S] bool: the accuracy is 1; what counts as correct is said by the reward (`rewards.parts.accuracy_of`)."""
    return judged_accuracy(batch, user) >= 1


def written_lengths(batch: Batch) -> Tensor:
    """[S] int64: the tokens the model wrote in the whole trajectory."""
    owner, groups = trajectory_groups(batch)
    return segment_count(owner[batch.sequence_ids], groups.numel(), batch.action_mask)[owner]


def is_cut_short(batch: Batch) -> Tensor:
    """[S] bool: some sequence of the trajectory was truncated."""
    owner, groups = trajectory_groups(batch)
    return (segment_max(batch.sequence["truncated"].double(), owner, groups.numel()) > 0)[owner]


def lexsort(*keys: Tensor) -> Tensor:
    """The order that sorts by the last key, ties by the one before it, and so on; what is still equal keeps its order."""
    order = torch.arange(keys[0].numel(), device=keys[0].device)
    for key in keys:
        order = order[key[order].argsort(stable=True)]
    return order


def first_index(ids: Tensor, num: int) -> Tensor:
    """[num] where each id occurs first."""
    return segment_min(torch.arange(ids.numel(), device=ids.device).double(), ids, num).long()
