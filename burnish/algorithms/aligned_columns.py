"""Groups of tokens that spell the same in two tokenizers, as columns of a batch (loss `gold`).

A row's groups are numbered from 0: the token column `aligned_group` has the group of each token of the policy, the ragged column
`teacher_groups` that of each token of `teacher_answer`. -1 is a token in no group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import ALIGNED, TEACHER_GROUPS
from burnish.core.batch import Batch
from burnish.core.segments import ids_from_offsets, segment_count


class BatchGroups(NamedTuple):
    """The groups of a batch, numbered from 0 over all rows. -1 is a token in none."""

    student: Tensor  # [N]
    teacher: Tensor  # [values of `teacher_answer`]
    num: int


def batch_groups(batch: Batch) -> BatchGroups:
    """The groups whose tokens are all in the loss: a filter that drops one token of a group drops the group."""
    student, teacher = batch.token[ALIGNED], batch.ragged[TEACHER_GROUPS]
    width = int(student.max()) + 1 if student.numel() else 0
    if width == 0:
        return BatchGroups(torch.full_like(student, -1), torch.full_like(teacher.values, -1), 0)
    slot = batch.sequence_ids * width + student.clamp(min=0)
    size = batch.num_sequences * width
    is_grouped = student >= 0
    counts = segment_count(slot, size, is_grouped)
    is_whole = (counts > 0) & (counts == segment_count(slot, size, is_grouped & batch.loss_mask))
    number = torch.where(is_whole, is_whole.long().cumsum(0) - 1, -1)
    of_teacher = number[ids_from_offsets(teacher.offsets) * width + teacher.values.clamp(min=0)]
    return BatchGroups(
        torch.where(is_grouped, number[slot], -1),
        torch.where(teacher.values >= 0, of_teacher, -1),
        int(is_whole.sum()),
    )


def group_ends(batch: Batch) -> Tensor:
    """[N] bool: the last token of each group, where the loss of the group stands."""
    student = batch_groups(batch).student
    following = torch.cat([student[1:], student.new_full((1,), -1)])
    return (student >= 0) & (student != following)
