"""Answers of somebody else to the prompts of a run, to stand in their groups: found by prompt, turned into tokens once.

They come from rows of `data.demonstrations`, which name their prompt by its row's `id` or say it in `prompt` (or in `messages`
before the last turn), or from a column of the training rows. A row may have `logp`, the author's log-prob of each token of the
answer, its end token included.
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
from burnish.data.row import Message, Row, checked_messages, text_or_messages
from burnish.data.row_formats import refuse_weights, source_records
from burnish.data.supervised import encode_example, refuse_column_keys, task_demonstrations
from burnish.data.template import as_messages, render
from burnish.models.tokenizer import Tokenizer

MAX_NAMED_PROMPTS = 5
Answer = str | list[Message]
PromptKey = tuple[str, str]
"""What an answer is found by: `id` or `prompt`, and its value."""


@dataclass(frozen=True)
class Demonstration:
    """An answer as it was found; `where` is its place, for errors."""

    answer: Answer
    where: str
    logp: list[float] | None = None


@dataclass(frozen=True)
class DemonstrationTokens:
    """An answer after its prompt as tokens."""

    tokens: np.ndarray  # int64
    num_prompt: int
    """Tokens of the prompt, which come first."""
    logp: np.ndarray | None
    """float32, of the answer's tokens under whoever wrote it; None where nobody says."""


class PromptDemonstrations:
    """The answers to each prompt, as tokens; over-long ones are left out, counted and named like prompts that have none."""

    def __init__(self, data: Data, tokenizer: Tokenizer, longest: int, seed: int, base: Path | None) -> None:
        """`longest` is how many tokens an answer may have."""
        self.tokenizer, self.template, self.longest = tokenizer, data.template, longest
        self.column = data.demonstration_column
        self.needs_logp = False
        self.num_prompts = 0
        self.without: list[str] = []
        """Ids of the prompts seen before the run that have no answer."""
        self.overlong: list[str] = []
        self._found = {} if self.column is not None else demonstrations_by_prompt(data.demonstrations, seed, base)
        self._known: dict[str, list[DemonstrationTokens]] = {}

    def scan(self, rows: Iterable[Row]) -> None:
        """Make tokens of the answers to these prompts, so that what is wrong with any is said before the run starts."""
        for row in rows:
            self._known[row.id] = self._tokens(row)
            self.num_prompts += 1
            if not self._known[row.id]:
                self.without.append(row.id)
        if self.num_prompts and len(self.without) == self.num_prompts:
            key = "demonstration_column" if self.column is not None else "demonstrations"
            raise UserError(
                f"data.{key}: none of {self.num_prompts} training prompts has a demonstration (first: {self.without[0]})"
                f"{_overlong_note(self.overlong, self.longest)}; rows are found by the `id` of a training row or by the very same `prompt`"
            )

    def of(self, row: Row) -> list[DemonstrationTokens]:
        """The answers to a prompt; one of an endless task is looked up when it is drawn."""
        known = self._known.get(row.id)
        return self._tokens(row) if known is None else known

    def report(self) -> str | None:
        """How many prompts have no demonstration, and which; None if all have one."""
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
        for trace in found:
            tokens = encode_demonstration(row, trace, self.tokenizer, self.template)
            if self.needs_logp and tokens.logp is None:
                raise UserError(
                    f"{trace.where}: no `logp`, and algorithm.loss.weight=author divides by its author's probabilities; give the "
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
    """The answers that rows of files, tasks or plug-ins hold, by what they answer, in their order."""
    refuse_weights(sources, "demonstrations, which are looked up")
    refuse_column_keys(sources, "demonstrations, whose columns are prompt and completion, or messages")
    found: dict[PromptKey, list[Demonstration]] = {}
    for source in sources:
        for where, record in _records(source, seed, base):
            asked, trace = _parse_demonstration(record, where)
            found.setdefault(asked, []).append(trace)
    return found


def prompt_key(prompt: str | list[Message]) -> PromptKey:
    """A prompt, whichever way it is written: a text is what a user says."""
    return "prompt", json.dumps([(m["role"], m["content"]) for m in as_messages(prompt, "user")])


def encode_demonstration(
    row: Row, trace: Demonstration, tokenizer: Tokenizer, template: Template
) -> DemonstrationTokens:
    """A row's prompt with an answer, in the tokens a rollout would have: the very ones of the prompt, then the answer and its end."""
    try:
        context = render(row, tokenizer, template)
        tokens, mask = encode_example(replace(row, completion=trace.answer), tokenizer, template)
    except UserError as error:
        raise UserError(f"{trace.where}: {error}") from error
    while mask and not mask[-1]:  # what a template writes after the end of the turn is never sampled
        tokens, mask = tokens[:-1], mask[:-1]
    size = len(context)
    if tokens[:size] != context or any(mask[:size]) or not all(mask[size:]):
        raise UserError(
            f"{trace.where}: the chat template writes the prompt in another way when an answer follows, so the answer would not be "
            "to the prompt that is sampled from; use a plain template, or a chat template that only adds"
        )
    if trace.logp is not None and len(trace.logp) != len(tokens) - size:
        raise UserError(
            f"{trace.where}: logp has {len(trace.logp)} values, and the answer with its end has {len(tokens) - size} tokens"
        )
    logp = None if trace.logp is None else np.array(trace.logp, dtype=np.float32)
    return DemonstrationTokens(np.array(tokens, dtype=np.int64), size, logp)


def _records(source: Source, seed: int, base: Path | None) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield from source_records(source, base) if source.task is None else task_demonstrations(source, seed)


def _parse_demonstration(record: Mapping[str, Any], where: str) -> tuple[PromptKey, Demonstration]:
    """What a row answers, and how."""
    if "messages" in record:
        messages = checked_messages(record["messages"], "messages", where)
        if len(messages) < 2 or messages[-1]["role"] != "assistant":
            raise UserError(f"{where}: messages should end with the assistant's answer to what comes before")
        return prompt_key(messages[:-1]), Demonstration(messages[-1:], where, _logp(record, where))
    if "completion" not in record or all(record.get(key) is None for key in ("id", "prompt")):
        raise UserError(
            f"{where}: a demonstration needs `completion` and, to say of which prompt it is, `id` or `prompt` (or it is `messages`); "
            f"has: {', '.join(map(str, record))}"
        )
    answer = text_or_messages(record["completion"], "completion", where)
    trace = Demonstration(answer, where, _logp(record, where))
    if record.get("prompt") is not None:  # it says more than an id, which many files have for themselves
        return prompt_key(text_or_messages(record["prompt"], "prompt", where)), trace
    return ("id", str(record["id"])), trace


def _column_demonstrations(value: Any, where: str) -> Iterator[Demonstration]:
    """The answers in a column: none, one, or a list of them; an object has `completion`, and `logp` where that is known."""
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
        raise UserError(f"{where}: logp should be a list of log-probs, numbers of 0 or less")
    return [float(v) for v in values]


def _overlong_note(overlong: list[str], longest: int) -> str:
    return f" ({len(overlong)} are longer than {longest} tokens)" if overlong else ""
