"""Columns for a teacher with another tokenizer (loss gold): prompts and answers in its own tokens, and the groups that spell the same.

The teacher's prompt is the row's prompt, rendered with the teacher's own chat template and tokenizer. With `kl.context` it has more in
it, as for any other teacher. A row is not taught if its teacher has nothing to show, if no token could be aligned, or if prompt and
answer do not fit the teacher's positions; such a row has no group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from burnish.algorithms.batch_columns import ALIGNED, TAUGHT, TEACHER_ANSWER, TEACHER_GROUPS, TEACHER_PROMPT
from burnish.algorithms.losses.distillation_spec import GoldLoss
from burnish.algorithms.terms.spec import ContextRecord, TeacherReference
from burnish.config.data import Template
from burnish.config.errors import UserError
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.template import render, template_kind
from burnish.models.architecture import max_positions_of
from burnish.models.policy import AnyPolicy, find_directory
from burnish.models.token_alignment import Alignment, Spelling, align
from burnish.models.tokenizer import Tokenizer
from burnish.trainers.teacher_columns import AddColumns, Prompts, TeacherPrompts, prompt_length

NOTHING = Alignment([], [], [])


def aligned_columns(config: TrainConfig, policy: AnyPolicy, base: Path | None) -> list[AddColumns]:
    """The function that adds a step's columns; none for other losses."""
    slot, context = config.algorithm.kl.reference, config.algorithm.kl.context
    if not isinstance(config.algorithm.loss, GoldLoss):
        return []
    assert isinstance(slot, TeacherReference), "checked with the config"
    teacher, most = policy.tokenizer, policy.max_positions
    if slot.path is not None:
        directory = find_directory(slot.path, base, with_weights=False)
        teacher, most = Tokenizer.load(directory), max_positions_of(directory)
    shown = context if isinstance(context, ContextRecord) else None
    return [AlignedAnswers(policy.tokenizer, teacher, config.data.template, most, shown)]


class AlignedAnswers:
    """Adds `teacher_prompt`, `teacher_answer`, `teacher_groups`, `aligned_group` and `taught`."""

    def __init__(
        self,
        student: Tokenizer,
        teacher: Tokenizer,
        template: Template,
        max_positions: int | None,
        context: ContextRecord | None = None,
    ) -> None:
        self.student = Spelling(student, "the policy's tokenizer")
        self.teacher = Spelling(teacher, "the teacher's tokenizer")
        self.template, self.max_positions = teacher_template(template, teacher), max_positions
        self.contexts = None if context is None else TeacherPrompts(context, teacher, self.template, max_positions)

    def __call__(self, batch: Batch, trajectories: Sequence[Trajectory], prompts: Prompts) -> Batch:
        rendered: dict[tuple[str, int, str | None], list[int]] = {}
        starts, found, groups = list[list[int]](), list[Alignment](), list[list[int]]()
        shown: list[str | None] = [None] * len(trajectories)
        if self.contexts is not None:
            shown = self.contexts.texts(trajectories, prompts)
        for t, text in zip(trajectories, shown, strict=True):
            prompt = prompts[t.prompt_id, t.visit]
            num_prompt = _answer_start(t, prompt)
            answer = t.sequences[0].tokens[num_prompt:].tolist()
            start, aligned = list[int](), NOTHING
            if self.contexts is None or text is not None:
                key = t.prompt_id, t.visit, text
                if key not in rendered:
                    rendered[key] = self._render(prompt, text)
                aligned = align(answer, self.student, self.teacher)
                start = rendered[key]
            num_read = len(start) + len(aligned.teacher_tokens)
            if not aligned.teacher_tokens or (self.max_positions is not None and num_read > self.max_positions):
                start, aligned = [], NOTHING
            starts.append(start)
            found.append(aligned)
            groups.append([-1] * num_prompt + (aligned.student_groups or [-1] * len(answer)))
        batch = replace(
            batch,
            ragged={
                **batch.ragged,
                TEACHER_PROMPT: _ragged(starts),
                TEACHER_ANSWER: _ragged([one.teacher_tokens for one in found]),
                TEACHER_GROUPS: _ragged([one.teacher_groups for one in found]),
            },
        )
        taught = torch.tensor([bool(one.teacher_tokens) for one in found])
        batch = batch.with_sequence(**{TAUGHT: taught}).with_token(**{ALIGNED: _ragged(groups).values})
        return batch if self.contexts is None else self.contexts.skipped(batch)

    def _render(self, prompt: Prompt, text: str | None) -> list[int]:
        if self.contexts is not None and text is not None:
            return self.contexts.render(prompt.row, text)
        return render(prompt.row, self.teacher.tokenizer, self.template).text_tokens("the teacher of loss gold")


def teacher_template(template: Template, teacher: Tokenizer) -> Template:
    """The template of the run, without variables that only the policy's chat template has."""
    known = {name: value for name, value in template.kwargs.items() if teacher.chat_template_mentions(name)}
    template = template.model_copy(update={"kwargs": known})
    try:
        template_kind(teacher, template)
    except UserError as error:
        raise UserError(f"data.template does not fit the teacher of loss gold: {error}") from error
    return template


def _answer_start(trajectory: Trajectory, prompt: Prompt) -> int:
    """Tokens before the answer, which must be all that follows."""
    num = prompt_length(trajectory, prompt, "loss gold")
    if not trajectory.sequences[0].action_mask[num:].all():
        raise UserError(
            f"{trajectory.id}: loss gold aligns one answer behind a prompt, but the environment wrote into the answer: use "
            "environment=single_turn"
        )
    return num


def _ragged(rows: list[list[int]]) -> Ragged:
    lengths = torch.tensor([len(one) for one in rows], dtype=torch.int64)
    return Ragged(torch.tensor([x for one in rows for x in one], dtype=torch.int64), offsets_from_lengths(lengths))
