"""Teacher contexts: a reference reads the policy's answers behind other prompts than the policy did.

The ragged column `teacher_prompt` has the tokens of the teacher's prompt for each sequence. The answer, from the first token that the
model wrote, does not change. Self-distillation uses this: the teacher is the policy itself with more in its context (SDPO, SDFT).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import TAUGHT, TEACHER_IDS, TEACHER_PROMPT
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.pictures import PICTURE_KEYS
from burnish.core.segments import offsets_from_lengths


class TeacherBatch(NamedTuple):
    """A batch as the teacher reads it."""

    batch: Batch
    position: Tensor
    """[N] where each token of the policy's batch is in the teacher's batch; -1 for tokens of the policy's prompt."""


def in_teacher_context(batch: Batch) -> TeacherBatch:
    """The sequences of a batch behind the teacher's prompts. Rows that are not taught keep their tokens and lose their action mask."""
    if PICTURE_KEYS in batch.ragged:
        raise UserError(
            "a teacher with a prompt of its own (SDPO, SDFT) reads no images yet, but samples of this batch have some; use a loss or reward "
            "without teacher prompts for rows with images"
        )
    prompts, device = batch.ragged[TEACHER_PROMPT], batch.tokens.device
    rows = batch.sequence_ids
    is_answer = _after_first_action(batch)
    answer_lengths = torch.zeros(batch.num_sequences, dtype=torch.long, device=device)
    answer_lengths.index_add_(0, rows, is_answer.long())
    prompt_lengths = prompts.offsets.diff()
    offsets = offsets_from_lengths(prompt_lengths + answer_lengths)
    # The answer of a sequence ends where the sequence ends, so a token's place is found from the end.
    position = offsets[1:][rows] - (batch.offsets[1:][rows] - torch.arange(batch.num_tokens, device=device))
    position = torch.where(is_answer, position, torch.full_like(position, -1))
    tokens = batch.tokens.new_empty(int(offsets[-1]))
    tokens[position[is_answer]] = batch.tokens[is_answer]
    shift = torch.repeat_interleave(offsets[:-1] - prompts.offsets[:-1], prompt_lengths)
    tokens[torch.arange(prompts.values.shape[0], device=device) + shift] = prompts.values.to(batch.tokens.dtype)
    action_mask = torch.zeros(tokens.shape, dtype=torch.bool, device=device)
    is_action = batch.action_mask & batch.sequence[TAUGHT][rows] if TAUGHT in batch.sequence else batch.action_mask
    action_mask[position[is_answer]] = is_action[is_answer]
    sequence = {name: batch.sequence[name] for name in ("group_ids", TEACHER_IDS) if name in batch.sequence}
    return TeacherBatch(Batch(tokens, offsets, {"action_mask": action_mask}, sequence), position)


def _after_first_action(batch: Batch) -> Tensor:
    """[N] bool: the first token of each sequence that the model wrote, and all tokens after it."""
    count = batch.action_mask.long().cumsum(0)
    before = count - batch.action_mask.long()
    starts = before[batch.offsets[:-1].clamp(max=max(batch.num_tokens - 1, 0))]
    return count > starts[batch.sequence_ids]
