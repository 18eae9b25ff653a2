"""Columns of a batch that tell a teacher what to read: which teacher a row has, and what it reads before the answer.

`num_chars` and `num_lines` are those of an answer's text, for the filter `non_stub`.

They are made when the rollouts of a step are packed, because they need the rows of the prompts and the texts of the samples:

- `teacher_ids` [S]: the index of the row's teacher (`kl.reference.teachers`).
- `teacher_prompt` (ragged) and `taught` [S]: the tokens of the teacher's own prompt, and whether it has something to show
  (`kl.context`). A row without a success in its group has no teacher; its loss is 0, and it still counts in denominators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from burnish.algorithms.batch_columns import TAUGHT, TEACHER_IDS, TEACHER_PROMPT
from burnish.algorithms.losses.distillation_spec import GoldLoss
from burnish.algorithms.terms.spec import ContextRecord, DemonstrationContext, SuccessContext, TeachersReference
from burnish.config.data import Template
from burnish.config.errors import UserError, did_you_mean
from burnish.config.schema import TrainConfig
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from burnish.core.trajectory import LAST_WORDS, Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.data.template import as_messages, prompt_as_text, render, template_kind, with_suffix
from burnish.models.tokenizer import Tokenizer

Prompts = Mapping[tuple[str, int], Prompt]
"""The prompt of each draw of a step, by row id and visit."""
AddColumns = Callable[[Batch, Sequence[Trajectory], Prompts], Batch]
"""Adds columns to the batch that was packed from these trajectories."""


def teacher_columns(
    config: TrainConfig, tokenizer: Tokenizer, max_positions: int | None, rows: Iterable[Row]
) -> list[AddColumns]:
    """The functions that add a step's columns; none for a run without teachers. `rows` are checked before the run starts."""
    reference, context = config.algorithm.kl.reference, config.algorithm.kl.context
    made: list[AddColumns] = [text_sizes] if config.algorithm.needs("text_sizes") else []
    rows = list(rows) if isinstance(reference, TeachersReference) or isinstance(context, DemonstrationContext) else []
    if isinstance(reference, TeachersReference):
        names = list(reference.paths)
        for row in rows:
            _teacher_index(row, reference.column, names)
        made.append(TeacherOfRow(reference.column, names))
    if isinstance(context, DemonstrationContext):
        assert context.column is not None, "checked with the config"
        for row in rows:
            demonstration_of(row, context.column)
    if isinstance(context, ContextRecord) and not isinstance(config.algorithm.loss, GoldLoss):
        made.append(TeacherPrompts(context, tokenizer, config.data.template, max_positions))
    return made


def text_sizes(batch: Batch, trajectories: Sequence[Trajectory], prompts: Prompts) -> Batch:
    """Add `num_chars` and `num_lines` of each answer's text, for the filter non_stub."""
    texts, of_trajectory = [t.completion.strip() for t in trajectories], batch.sequence["trajectory_ids"]
    return batch.with_sequence(
        num_chars=torch.tensor([len(text) for text in texts])[of_trajectory],
        num_lines=torch.tensor([text.count("\n") + 1 for text in texts])[of_trajectory],
    )


# --- Which teacher ----------------------------------------------------------------------------------------------------------


class TeacherOfRow:
    """Adds `teacher_ids`: the teacher that a column of the row names."""

    def __init__(self, column: str, names: list[str]) -> None:
        self.column, self.names = column, names

    def __call__(self, batch: Batch, trajectories: Sequence[Trajectory], prompts: Prompts) -> Batch:
        ids = [_teacher_index(prompts[t.prompt_id, t.visit].row, self.column, self.names) for t in trajectories]
        return batch.with_sequence(**{TEACHER_IDS: torch.tensor(ids)[batch.sequence["trajectory_ids"]]})


def _teacher_index(row: Row, column: str, names: list[str]) -> int:
    value = _column(row, column, "algorithm.kl.reference.column")
    if str(value) not in names:
        raise UserError(
            f"{row.place}: {column} is {value!r}, and algorithm.kl.reference.paths has no teacher of that name"
            f"{did_you_mean(str(value), names)} (has: {', '.join(names)})"
        )
    return names.index(str(value))


def _column(row: Row, column: str, key: str) -> Any:
    """A column of a row; `data_source` and `answer` are columns too."""
    columns = {**row.extra, "data_source": row.data_source, "answer": row.answer}
    if row.completion is not None:
        columns["completion"] = row.completion
    if columns.get(column) is None:
        known = ", ".join(sorted(name for name, value in columns.items() if value is not None))
        raise UserError(f"{row.place}: no column {column!r} for {key}{did_you_mean(column, columns)} (has: {known})")
    return columns[column]


# --- What it reads ----------------------------------------------------------------------------------------------------------


def demonstration_of(row: Row, column: str) -> str:
    """The demonstration in a column of a row: a text, or the last of its messages."""
    value = _column(row, column, "algorithm.kl.context.column")
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if not isinstance(value, str | int | float) or not str(value).strip():
        raise UserError(f"{row.place}: {column} should be the text of a demonstration, got {value!r}")
    return str(value)


class TeacherPrompts:
    """Adds `teacher_prompt` and `taught`. A prompt that would not fit the teacher's positions is left out: its row is not taught."""

    def __init__(
        self, context: ContextRecord, tokenizer: Tokenizer, template: Template, max_positions: int | None
    ) -> None:
        self.context, self.tokenizer, self.template, self.max_positions = context, tokenizer, template, max_positions

    def __call__(self, batch: Batch, trajectories: Sequence[Trajectory], prompts: Prompts) -> Batch:
        rendered: dict[tuple[str, int, str], list[int]] = {}
        tokens, is_taught = list[list[int]](), list[bool]()
        for t, shown in zip(trajectories, self.texts(trajectories, prompts), strict=True):
            prompt = prompts[t.prompt_id, t.visit]
            num_prompt = prompt_length(t, prompt, "algorithm.kl.context")
            own = list(prompt.tokens)
            if shown is not None:
                key = t.prompt_id, t.visit, shown
                if key not in rendered:
                    rendered[key] = self.render(prompt.row, shown)
                num_answer = len(t.sequences[0].tokens) - num_prompt
                if self.max_positions is None or len(rendered[key]) + num_answer <= self.max_positions:
                    own = rendered[key]
                else:
                    shown = None
            tokens.append(own)
            is_taught.append(shown is not None)
        lengths = torch.tensor([len(one) for one in tokens], dtype=torch.int64)
        values = torch.tensor([token for one in tokens for token in one], dtype=torch.int64)
        column = Ragged(values, offsets_from_lengths(lengths))
        batch = replace(batch, ragged={**batch.ragged, TEACHER_PROMPT: column})
        batch = batch.with_sequence(**{TAUGHT: torch.tensor(is_taught)})
        return self.skipped(batch)

    def skipped(self, batch: Batch) -> Batch:
        """The batch without the first `skip` tokens of each answer in the loss."""
        skip = getattr(self.context, "skip", 0)
        return batch if skip == 0 else batch.with_token(loss_mask=batch.loss_mask & _after_actions(batch, skip))

    def texts(self, trajectories: Sequence[Trajectory], prompts: Prompts) -> list[str | None]:
        """What the teacher of each trajectory is shown; None for nothing."""
        context = self.context
        if isinstance(context, DemonstrationContext):
            assert context.column is not None
            return [demonstration_of(prompts[t.prompt_id, t.visit].row, context.column) for t in trajectories]
        assert isinstance(context, SuccessContext)
        successes: dict[str, list[Trajectory]] = {}
        for t in trajectories:
            if t.reward is not None and t.reward >= context.threshold:
                successes.setdefault(t.group_id, []).append(t)
        texts: list[str | None] = []
        for t in trajectories:
            sibling = next((other for other in successes.get(t.group_id, []) if other is not t), None)
            parts = [] if sibling is None else [sibling.completion]
            parts += [str(t.metadata[LAST_WORDS])] if context.feedback and t.metadata.get(LAST_WORDS) else []
            texts.append("\n\n".join(parts) or None)
        return texts

    def render(self, row: Row, shown: str) -> list[int]:
        """The tokens of a row's prompt with the added text."""
        text = self.context.text.replace("{context}", shown)
        template, prompt = self.template, row.prompt
        if template_kind(self.tokenizer, template) == "plain":
            whole = prompt_as_text(prompt)
            shown_row = replace(row, prompt=text + whole if self.context.place == "system" else whole + text)
        elif self.context.place == "user":
            shown_row = replace(row, prompt=with_suffix(as_messages(prompt, "user"), text, row.place))
        else:
            messages, system = as_messages(prompt, "user"), template.system
            if messages[0]["role"] == "system":
                system, messages = messages[0]["content"], messages[1:]
            lead = {"role": "system", "content": text if system is None else f"{system}\n\n{text}"}
            template = template.model_copy(update={"system": None})
            shown_row = replace(row, prompt=[lead, *messages])
        return render(shown_row, self.tokenizer, template).text_tokens("the teacher of algorithm.kl.context")


def prompt_length(trajectory: Trajectory, prompt: Prompt, what: str) -> int:
    """Tokens before the answer, which must be exactly those of the row's prompt. `what` replaces them for the teacher."""
    if len(trajectory.sequences) == 1:
        (sequence,) = trajectory.sequences
        num = len(prompt.tokens)
        if sequence.tokens[:num].tolist() == list(prompt.tokens) and not sequence.action_mask[:num].any():
            return num
    raise UserError(
        f"{trajectory.id}: {what} replaces the prompt of the row, but the environment wrote another one or rewrote the "
        "context: use environment=single_turn, or one that begins with the row's prompt and keeps its history"
    )


def _after_actions(batch: Batch, skip: int) -> torch.Tensor:
    """[N] bool: tokens that the model wrote after its first `skip` ones of the sequence."""
    count = batch.action_mask.long().cumsum(0)
    before = (count - batch.action_mask.long())[batch.offsets[:-1].clamp(max=max(batch.num_tokens - 1, 0))]
    return count - before[batch.sequence_ids] > skip
