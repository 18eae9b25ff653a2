"""A teacher with a tokenizer of its own: it reads the policy's answers in its own tokens, behind its own rendering of the prompt.

The columns `teacher_prompt`, `teacher_answer` and `teacher_groups` have what it reads, and which of its tokens belong to which group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from burnish.algorithms.aligned_columns import batch_groups
from burnish.algorithms.batch_columns import TEACHER_ANSWER, TEACHER_PROMPT
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.models.decoder import Decoder
from burnish.models.kernels.aligned_groups import AlignedGroups, GroupComparison
from burnish.training.forward import MicroBatch
from burnish.training.parallel.ranks import SOLO, Ranks
from burnish.training.reference import TeacherReference


class AlignedTeacher(TeacherReference):
    """A model from a directory, compared in groups of tokens that spell the same. Without a path, the policy as it is now."""

    def __init__(
        self,
        model: nn.Module,
        token_budget: int,
        temperature: float,
        comparison: GroupComparison,
        ranks: Ranks = SOLO,
        path: str | None = None,
    ) -> None:
        super().__init__(model, token_budget, temperature, ranks, path)
        device = next(self.model.parameters()).device
        self.comparison = comparison._replace(vocabulary=comparison.vocabulary.to(device))

    def distribution(self, micro_batch: MicroBatch) -> AlignedGroups:
        """The teacher's states at the groups of a micro-batch whose tokens are all in the loss."""
        batch = micro_batch.batch
        if batch.needed_pictures:
            raise UserError(
                "a teacher with another tokenizer does not read images: use one with the policy's tokenizer"
            )
        groups = batch_groups(batch)
        tokens, offsets, place = teacher_tokens(batch)
        is_grouped = groups.teacher >= 0
        wanted = place[is_grouped]
        with self._weights() as model:
            assert isinstance(model, Decoder), "the config refuses any other model"
            if wanted.numel():
                hidden, weight = model.distribution(tokens, offsets, wanted)[:2]
            else:
                weight = model.head_weight
                hidden = weight.new_zeros(0, weight.shape[1])
        return AlignedGroups(
            hidden,
            weight,
            tokens[wanted],
            groups.teacher[is_grouped],
            groups.student[micro_batch.wanted],
            groups.num,
            self.comparison,
            model.arch.logit_softcap,
        )


def teacher_tokens(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """What the teacher reads, its offsets, and where in it each token of `teacher_answer` is. A row without a prompt has no sequence."""
    prompts, answers = batch.ragged[TEACHER_PROMPT], batch.ragged[TEACHER_ANSWER]
    num_prompt, num_answer = prompts.offsets.diff(), answers.offsets.diff()
    lengths = num_prompt + num_answer
    starts = offsets_from_lengths(lengths)[:-1]
    tokens = batch.tokens.new_empty(int(lengths.sum()))
    place = _places(answers.offsets, starts + num_prompt)
    tokens[_places(prompts.offsets, starts)] = prompts.values.to(tokens.dtype)
    tokens[place] = answers.values.to(tokens.dtype)
    return tokens, offsets_from_lengths(lengths[lengths > 0]), place


def _places(offsets: Tensor, starts: Tensor) -> Tensor:
    """Where the values of a ragged column are if each row's begin at `starts`."""
    shift = torch.repeat_interleave(starts - offsets[:-1], offsets.diff())
    return torch.arange(int(offsets[-1]), device=offsets.device) + shift
