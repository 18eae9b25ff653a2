"""Demonstrations: answers by another author that join the groups of a run's prompts.

They come from rows of `data.demonstrations` or from a column of the training rows. A row of `data.demonstrations` names its prompt by the
`id` of a training row, or repeats it in `prompt` (or in `messages` before the last turn). It may have `logp`: the author's log-prob of each
token of the answer, end token included.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from burnish.config.data import Data, Source, Template
from burnish.config.errors import UserError, did_you_mean
from burnish.core.pictures import PictureSpan
from burnish.data.images import content_digest
from burnish.data.row import Message, Row, TextOrMessages, checked_messages, text_or_messages
from burnish.data.row_formats import refuse_weights, source_records
from burnish.data.supervised import encode_example, refuse_column_keys, task_demonstrations
from burnish.data.template import as_messages, render
from burnish.models.tokenizer import Tokenizer

MAX_NAMED_PROMPTS = 5
PromptKey = tuple[str, str]
"""What a demonstration is looked up by: ("id", id) or ("prompt", prompt)."""


@dataclass(frozen=True)
class Demonstration:
    """A demonstration as it was read; `where` is its place, for errors."""

    answer: TextOrMessages
    where: str
    logp: list[float] | None = None


@dataclass(frozen=True)
class DemonstrationTokens:
    """The tokens of a prompt followed by a demonstration."""

    tokens: np.ndarray  # int64
    num_prompt: int
    """Number of prompt tokens, which come first."""
    logp: np.ndarray | None
    """float32 log-probs of the answer's tokens under its author; None if the row has none."""
    pictures: tuple[PictureSpan, ...] = ()
    """The images of the prompt."""


class PromptDemonstrations:
    """The demonstrations of each prompt, as tokens. Over-long ones are left out and reported, as are prompts without any."""

    def __init__(self, data: Data, tokenizer: Tokenizer, longest: int, seed: int, base: Path | None) -> None:
        """`longest` is the most tokens that an answer may have."""
        self.tokenizer, self.template, self.longest = tokenizer, data.template, longest
        self.column = data.demonstration_column
        self.needs_logp = False
        self.num_prompts = 0
        self.without: list[str] = []
        """Ids of the scanned prompts without a demonstration."""
        self.overlong: list[str] = []
        self._found = {} if self.column is not None else demonstrations_by_prompt(data.demonstrations, seed, base)
        self._known: dict[str, list[DemonstrationTokens]] = {}

    def scan(self, rows: Iterable[Row]) -> None:
        """Tokenize the demonstrations of these prompts, so that errors are found before the run starts."""
        for row in rows:
            self._known[row.id] = self._tokens(row)
            self.num_prompts += 1
            if not self._known[row.id]:
                self.without.append(row.id)
        if self.num_prompts and len(self.without) == self.num_prompts:
            key = "demonstration_column" if self.column is not None else "demonstrations"
            raise UserError(
                f"data.{key}: none of {self.num_prompts} training prompts has a demonstration (first: {self.without[0]})"
                f"{_overlong_note(self.overlong, self.longest)}; a demonstration needs the `id` of a training row or exactly the same `prompt`"
            )

    def of(self, row: Row) -> list[DemonstrationTokens]:
        """The demonstrations of a prompt. For an endless task they are looked up when the prompt is drawn."""
        known = self._known.get(row.id)
        return self._tokens(row) if known is None else known

    def report(self) -> str | None:
        """A note on the prompts without a demonstration; None if all have one."""
        if not self.without:
            return None
        named = ", ".join(self.without[:MAX_NAMED_PROMPTS]) + (", ..." if len(self.without) > MAX_NAMED_PROMPTS else "")
        return (
            f"{len(self.without)} of {self.num_prompts} prompts have no demonstration and are sampled only: {named}"
            f"{_overlong_note(self.overlong, self.longest)}"
        )

    def _tokens(self, row: Row) -> list[DemonstrationTokens]:
        found = self._in_row(row) if self.column is not None else self._in_file(row)
        made = []
        for demonstration in found:
            tokens = encode_demonstration(row, demonstration, self.tokenizer, self.template)
            if self.needs_logp and tokens.logp is None:
                raise UserError(
                    f"{demonstration.where}: no `logp`, but algorithm.loss.weight=author divides by the author's probabilities; give the "
                    "log-prob of every token, or set algorithm.loss.weight=shaped"
                )
            if len(tokens.tokens) - tokens.num_prompt > self.longest:
                self.overlong.append(row.id)
            else:
                made.append(tokens)
        return made

    def _in_file(self, row: Row) -> list[Demonstration]:
        return self._found.get(("id", row.id)) or self._found.get(prompt_key(row.prompt)) or []

    def _in_row(self, row: Row) -> list[Demonstration]:
        assert self.column is not None
        columns = row.extra | ({} if row.answer is None else {"answer": row.answer})
        if self.column not in columns:
            raise UserError(
                f"row {row.id}: no column {self.column!r}{did_you_mean(self.column, columns)} for data.demonstration_column "
                f"(has: {', '.join(columns) or 'none'})"
            )
        return list(_column_demonstrations(columns[self.column], f"row {row.id}: {self.column}"))


def demonstrations_by_prompt(
    sources: list[Source], seed: int, base: Path | None
) -> dict[PromptKey, list[Demonstration]]:
    """The demonstrations in files, tasks or plug-ins, by prompt, in their order."""
    refuse_weights(sources, "demonstrations, which are looked up")
    refuse_column_keys(sources, "demonstrations, whose columns are prompt and completion, or messages")
    found: dict[PromptKey, list[Demonstration]] = {}
    for source in sources:
        for where, record in _records(source, seed, base):
            key, demonstration = _parse_demonstration(record, where)
            found.setdefault(key, []).append(demonstration)
    return found


def prompt_key(prompt: str | list[Message]) -> PromptKey:
    """The key of a prompt. A text has the same key as one user message with that text."""
    return "prompt", json.dumps(
        [(m["role"], m["content"]) for m in as_messages(prompt, "user")], default=content_digest
    )


def encode_demonstration(
    row: Row, demonstration: Demonstration, tokenizer: Tokenizer, template: Template
) -> DemonstrationTokens:
    """Tokenize a prompt and a demonstration as a rollout would: exactly the prompt's tokens, then the answer and its end token."""
    try:
        context = render(row, tokenizer, template).tokens
        tokens, mask, pictures = encode_example(replace(row, completion=demonstration.answer), tokenizer, template)
    except UserError as error:
        raise UserError(f"{demonstration.where}: {error}") from error
    while mask and not mask[-1]:  # text that a template writes after the end of the turn is never sampled
        tokens, mask = tokens[:-1], mask[:-1]
    size = len(context)
    if tokens[:size] != context or any(mask[:size]) or not all(mask[size:]):
        raise UserError(
            f"{demonstration.where}: the chat template renders the prompt differently when an answer follows, so the answer would not belong to "
            "the prompt that is sampled from; use a plain template, or a chat template that only appends"
        )
    if demonstration.logp is not None and len(demonstration.logp) != len(tokens) - size:
        raise UserError(
            f"{demonstration.where}: logp has {len(demonstration.logp)} values, and the answer with its end has {len(tokens) - size} tokens"
        )
    logp = None if demonstration.logp is None else np.array(demonstration.logp, dtype=np.float32)
    return DemonstrationTokens(np.array(tokens, dtype=np.int64), size, logp, pictures)


def _records(source: Source, seed: int, base: Path | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from source_records(source, base) if source.task is None else task_demonstrations(source, seed)


def _parse_demonstration(record: Mapping[str, Any], where: str) -> tuple[PromptKey, Demonstration]:
    """The prompt key and the demonstration of a record."""
    if "messages" in record:
        messages = checked_messages(record["messages"], "messages", where)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise UserError(f"{where}: messages should end with an assistant message, after at least one other message")
        return prompt_key(messages[:-1]), Demonstration(messages[-1:], where, _logp(record, where))
    if "completion" not in record or all(record.get(key) is None for key in ("id", "prompt")):
        raise UserError(
            f"{where}: a demonstration needs `completion`, and `id` or `prompt` to name its prompt (or else `messages`); "
            f"has: {', '.join(map(str, record))}"
        )
    answer = text_or_messages(record["completion"], "completion", where)
    demonstration = Demonstration(answer, where, _logp(record, where))
    if record.get("prompt") is not None:  # the prompt takes precedence: many files have ids of their own
        return prompt_key(text_or_messages(record["prompt"], "prompt", where)), demonstration
    return ("id", str(record["id"])), demonstration


def _column_demonstrations(value: Any, where: str) -> Iterator[Demonstration]:
    """The demonstrations in a column: none, one, or a list. An object has `completion`, and optionally `logp`."""
    if value is None or value == []:
        return
    several = isinstance(value, list) and not (isinstance(value[0], Mapping) and "role" in value[0])
    for one in value if several else [value]:
        if isinstance(one, Mapping) and "completion" in one:
            yield Demonstration(text_or_messages(one["completion"], "completion", where), where, _logp(one, where))
        else:
            yield Demonstration(text_or_messages(one, "it", where), where)


def _logp(record: Mapping[str, Any], where: str) -> list[float] | None:
    values = record.get("logp")
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(v, int | float) and v <= 0 for v in values):
        raise UserError(f"{where}: logp should be a list of log-probs, which are numbers of 0 or less")
    return [float(v) for v in values]


def _overlong_note(overlong: list[str], longest: int) -> str:
    return f" ({len(overlong)} are longer than {longest} tokens)" if overlong else ""
