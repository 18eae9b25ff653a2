"""Preferences as data: pairs of answers to one prompt, and single answers with a label.

A pair is a row with `prompt`, `chosen` and `rejected`, each text or messages. Without a `prompt`, `chosen` and `rejected`
are whole conversations or whole texts, and what they begin with in common is the prompt. A labelled answer is a row with `prompt`,
`completion` and `label` (true where it is good); a pair also serves as one good and one bad answer. Answers are tokenised
as in supervised training, behind the very tokens of the prompt, each with its end token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from burnish.config.data import Source, Template
from burnish.config.errors import UserError
from burnish.data import row_formats
from burnish.data.files import Record
from burnish.data.row import Row, TextOrMessages, text_or_messages
from burnish.data.row_formats import (
    TOOLS_IN_SUPERVISED_DATA,
    prompt_and_completion,
    refuse_weights,
    source_name,
    source_records,
)
from burnish.data.supervised import Example, encode_example, refuse_column_keys
from burnish.data.tasks.registry import make_preferences
from burnish.data.template import as_messages
from burnish.models.tokenizer import Tokenizer

PREFERENCE_COLUMNS = (
    "rows of preferences, whose columns are prompt, chosen and rejected, or prompt, completion and label"
)
FIRST_CJK = 0x2E80  # the first code point of the scripts that are written without spaces


@dataclass(frozen=True)
class SharedText:
    """The beginning that two whole texts share: their prompt, which stands as it is, without a template."""

    text: str


PairPrompt = TextOrMessages | SharedText


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt; the masks of both mark the tokens of the answer."""

    id: str
    chosen: Example
    rejected: Example
    margin: float = 0.0
    """How much better the chosen one is: the row's column `margin`."""


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer and whether it is good."""

    id: str
    answer: Example
    is_good: bool


@dataclass(frozen=True)
class LeftOutRows:
    """How many rows were not used, and why."""

    overlong: int = 0
    identical: int = 0
    """Pairs whose two answers are the same tokens, which prefer nothing."""
    longest: int = 0

    @property
    def notes(self) -> list[str]:
        """For people, one sentence a reason."""
        overlong = f"{self.overlong} rows are longer than {self.longest} tokens and were left out"
        identical = f"{self.identical} pairs have the same answer twice and were left out"
        return [text for text, count in ((overlong, self.overlong), (identical, self.identical)) if count]


@dataclass(frozen=True)
class EncodingOptions:
    """How rows become tokens, and which are too long."""

    tokenizer: Tokenizer
    template: Template
    max_tokens: int
    overlong: Literal["filter", "error"] = "filter"
    base: Path | None = None
    """The folder that relative paths are tried from first."""
    seed: int = 0


def load_pairs(
    sources: list[Source], reading: EncodingOptions, split: str = "train"
) -> tuple[list[PreferencePair], LeftOutRows]:
    """All pairs of the sources, in order, and what was left out; `split` is the side of a task that does not say one."""
    pairs: list[PreferencePair] = []
    overlong = identical = 0
    for where, identity, record in _records(sources, reading.base, reading.seed, split):
        prompt, chosen, rejected = _parse_pair(record, where)
        pair = PreferencePair(
            identity,
            _encode(f"{identity}/chosen", prompt, chosen, where, reading),
            _encode(f"{identity}/rejected", prompt, rejected, where, reading),
            _margin(record, where),
        )
        if not _is_short_enough(max(len(pair.chosen.tokens), len(pair.rejected.tokens)), where, reading):
            overlong += 1
        elif pair.chosen.tokens == pair.rejected.tokens:
            identical += 1
        else:
            pairs.append(pair)
    left_out = LeftOutRows(overlong, identical, reading.max_tokens)
    if not pairs:
        raise _nothing_left("pairs", sources, left_out)
    return pairs, left_out


def load_labelled(
    sources: list[Source], reading: EncodingOptions, split: str = "train"
) -> tuple[list[LabelledAnswer], LeftOutRows]:
    """All labelled answers of the sources, in order, and what was left out; a pair is a good one and a bad one."""
    found: list[LabelledAnswer] = []
    overlong = 0
    for where, identity, record in _records(sources, reading.base, reading.seed, split):
        for name, prompt, answer, is_good in _parse_answers(record, where):
            example = _encode(f"{identity}{name}", prompt, answer, where, reading)
            if _is_short_enough(len(example.tokens), where, reading):
                found.append(LabelledAnswer(example.id, example, is_good))
            else:
                overlong += 1
    left_out = LeftOutRows(overlong, 0, reading.max_tokens)
    if not found:
        raise _nothing_left("answers", sources, left_out)
    return found, left_out


def count_rows(
    sources: list[Source], base: Path | None, seed: int, is_labelled: bool = False, split: str = "train"
) -> int:
    """How many rows the sources have, each checked as far as it can be without a tokenizer."""
    num_rows = 0
    for where, _, record in _records(sources, base, seed, split):
        if is_labelled:
            _parse_answers(record, where)
        else:
            _parse_pair(record, where)
        num_rows += 1
    return num_rows


def _records(sources: list[Source], base: Path | None, seed: int, split: str) -> Iterator[tuple[str, str, Record]]:
    """Every record with its place and its id."""
    refuse_weights(sources, "preferences, which are used whole")
    refuse_column_keys(sources, PREFERENCE_COLUMNS)
    for source in sources:
        if source.task is None:
            located = source_records(source, base)
        else:
            rows = make_preferences(source.task, source.options, seed, source.split or split)
            located = ((f"{source.task}, preference {i + 1}", row) for i, row in enumerate(rows[: source.limit]))
        for index, (where, record) in enumerate(located):
            yield where, f"{source_name(source)}/{index}", record


# --- the shapes of a row ---------------------------------------------------------------------------------------------


def _parse_pair(record: Record, where: str) -> tuple[PairPrompt, TextOrMessages, TextOrMessages]:
    """Prompt, chosen and rejected of a row."""
    row_formats.refuse_tools(record, where, TOOLS_IN_SUPERVISED_DATA)
    for key in ("chosen", "rejected"):
        if key not in record:
            raise _missing(key, record, where, "a pair has prompt, chosen and rejected")
    chosen, rejected = (_parse_answer(record[key], key, where) for key in ("chosen", "rejected"))
    prompt = _prompt(record, where)
    if prompt is not None:
        return (
            prompt,
            _answer_after_prompt(prompt, chosen, "chosen", where),
            _answer_after_prompt(prompt, rejected, "rejected", where),
        )
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _shared_text(chosen, rejected, where)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise UserError(
            f"{where}: of chosen and rejected one is a text and one is messages, so what they share cannot be told: "
            "give a column prompt, or both in the same form"
        )
    shared = next(
        (i for i, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    # Of two conversations that never part the last turn is the answer.
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if shared == 0:
        raise UserError(f"{where}: chosen and rejected have no first message in common, so there is no prompt")
    return row_formats.full_prompt(record, "chosen", chosen[:shared], where), chosen[shared:], rejected[shared:]


def _prompt(record: Record, where: str) -> TextOrMessages | None:
    """The prompt of a pair, under any of the names of `data/row_formats.py`; None where the answers have it in them."""
    if record.get("prompt") is not None:
        key: str | None = "prompt"
    elif record.get("conversations") is not None:
        key = "conversations"
    else:
        key = row_formats.question_column(record, where, "question")
    if key is None:
        return None
    return row_formats.full_prompt(record, key, text_or_messages(record[key], key, where), where)


def _parse_answer(value: Any, key: str, where: str) -> TextOrMessages:
    """An answer: text, messages, or (as ShareGPT has it) one message."""
    return text_or_messages([value] if isinstance(value, dict) else value, key, where)


def _shared_text(chosen: str, rejected: str, where: str) -> tuple[SharedText, str, str]:
    """The prompt of two whole texts is what they begin with in common, up to the end of a word.

    The space before the answers goes with them, as tokenizers have it. Neither answer is empty.
    """
    last = min(len(chosen), len(rejected)) - 1
    at = next((i for i in range(last) if chosen[i] != rejected[i]), last)
    while at and any(_is_letter(text[at - 1]) and _is_letter(text[at]) for text in (chosen, rejected)):
        at -= 1
    while at and chosen[at - 1] == " ":
        at -= 1
    if not chosen[:at].strip():
        raise UserError(
            f"{where}: chosen and rejected have no prompt column and do not begin with the same words, so where the answers begin "
            "cannot be told: give a column prompt"
        )
    return SharedText(chosen[:at]), chosen[at:], rejected[at:]


def _is_letter(character: str) -> bool:
    """Whether a character is part of a word that spaces end; scripts without spaces have no such words."""
    return character.isalnum() and ord(character) < FIRST_CJK


def _answer_after_prompt(prompt: TextOrMessages, said: TextOrMessages, key: str, where: str) -> TextOrMessages:
    """What is said behind the prompt, also where the column repeats the prompt before it."""
    if isinstance(said, str) or said[0]["role"] == "assistant":
        return said
    asked = as_messages(prompt, "user")
    if said[: len(asked)] == asked and len(said) > len(asked):
        return said[len(asked) :]
    raise UserError(
        f"{where}: {key} begins with a message of role {said[0]['role']!r} and does not repeat the prompt: it should be the "
        "assistant's messages, or the prompt's followed by them"
    )


def _parse_answers(record: Record, where: str) -> list[tuple[str, PairPrompt, TextOrMessages, bool]]:
    """The labelled answers of a row: what to add to its id, the prompt, the answer, and whether it is good."""
    if "completion" not in record and "chosen" in record:
        prompt, chosen, rejected = _parse_pair(record, where)
        return [("/chosen", prompt, chosen, True), ("/rejected", prompt, rejected, False)]
    row_formats.refuse_tools(record, where, TOOLS_IN_SUPERVISED_DATA)
    if "label" not in record:
        raise _missing("label", record, where, "a labelled answer has prompt, completion and label")
    label = record["label"]
    if label not in (0, 1):
        raise UserError(f"{where}: label should be true (good) or false (bad), got {label!r}")
    asked, said = prompt_and_completion(record, where)
    return [("", asked, _answer_after_prompt(asked, said, "completion", where), bool(label))]


def _margin(record: Record, where: str) -> float:
    margin = record.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or margin < 0:
        raise UserError(f"{where}: margin should be a number of 0 or more, got {margin!r}")
    return float(margin)


# --- tokens ----------------------------------------------------------------------------------------------------------


def _encode(identity: str, prompt: PairPrompt, answer: TextOrMessages, where: str, reading: EncodingOptions) -> Example:
    if isinstance(prompt, SharedText):
        row = Row(identity, [], "", None, {}, completion=answer, text=prompt.text)
    else:
        row = Row(identity, prompt, "", None, {}, completion=answer)
    try:
        return Example(identity, *encode_example(row, reading.tokenizer, reading.template))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _is_short_enough(length: int, where: str, reading: EncodingOptions) -> bool:
    if length <= reading.max_tokens:
        return True
    if reading.overlong == "filter":
        return False
    raise UserError(
        f"{where}: {length} tokens, more than max_tokens={reading.max_tokens}; raise it, or set overlong=filter"
    )


def _missing(key: str, record: dict[str, Any], where: str, needed: str) -> UserError:
    return UserError(f"{where}: no column {key!r}; {needed} (has: {', '.join(map(str, record))})")


def _nothing_left(what: str, sources: list[Source], left_out: LeftOutRows) -> UserError:
    names = ", ".join(source_name(source) for source in sources) or "no source at all"
    return UserError(f"no {what} left in {names}: {'; '.join(left_out.notes) or 'there is not one row'}")
