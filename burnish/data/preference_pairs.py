"""Preference data: pairs of answers to one prompt, and single answers with a label.

A pair is a row with `prompt`, `chosen` and `rejected`, each text or messages. Without `prompt`, `chosen` and `rejected` are whole
conversations or whole texts, and their common beginning is the prompt. A labelled answer is a row with `prompt`, `completion` and `label`
(true if it is good). A pair also serves as one good and one bad answer. Answers are tokenised as in supervised training: after exactly the
prompt's tokens, each with its end token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from burnish.data.template import as_messages, prompt_as_text
from burnish.models.tokenizer import Tokenizer

PREFERENCE_COLUMNS = (
    "rows of preferences, whose columns are prompt, chosen and rejected, or prompt, completion and label"
)
FIRST_CJK = 0x2E80  # the first code point of scripts that are written without spaces


MakeRows = Callable[[str, dict[str, Any], int, str], Sequence[Record]]
"""Makes the rows of one split of a task: from its name, its options, the seed and the split."""


@dataclass(frozen=True)
class SharedText:
    """The common beginning of two whole texts. It is their prompt and is used without a template."""

    text: str


PairPrompt = TextOrMessages | SharedText


@dataclass(frozen=True)
class PreferencePair:
    """Two answers to one prompt. The masks mark the tokens of the answers."""

    id: str
    chosen: Example
    rejected: Example
    margin: float = 0.0
    """How much better the chosen answer is, from the column `margin`."""


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer, and whether it is good."""

    id: str
    answer: Example
    is_good: bool


@dataclass(frozen=True)
class LeftOutRows:
    """How many rows were left out, and why."""

    overlong: int = 0
    identical: int = 0
    """Pairs with two identical answers, which express no preference."""
    longest: int = 0

    @property
    def notes(self) -> list[str]:
        """One sentence per reason."""
        overlong = f"{self.overlong} rows are longer than {self.longest} tokens and were left out"
        identical = f"{self.identical} pairs have the same answer twice and were left out"
        return [text for text, count in ((overlong, self.overlong), (identical, self.identical)) if count]


@dataclass(frozen=True)
class EncodingOptions:
    """How rows are tokenised, and what happens to over-long ones."""

    tokenizer: Tokenizer
    template: Template
    max_tokens: int
    overlong: Literal["filter", "error"] = "filter"
    base: Path | None = None
    """The folder that relative paths are tried against first."""
    seed: int = 0


def load_pairs(
    sources: list[Source], options: EncodingOptions, split: str = "train"
) -> tuple[list[PreferencePair], LeftOutRows]:
    """Load all pairs of the sources, in order; also return what was left out. `split` is for tasks that name none."""
    pairs: list[PreferencePair] = []
    overlong = identical = 0
    for where, identity, record in _records(sources, options.base, options.seed, split):
        prompt, chosen, rejected = _parse_pair(record, where)
        pair = PreferencePair(
            identity,
            _encode(f"{identity}/chosen", prompt, chosen, where, options),
            _encode(f"{identity}/rejected", prompt, rejected, where, options),
            _margin(record, where),
        )
        if not is_short_enough(max(len(pair.chosen.tokens), len(pair.rejected.tokens)), where, options):
            overlong += 1
        elif pair.chosen.tokens == pair.rejected.tokens:
            identical += 1
        else:
            pairs.append(pair)
    left_out = LeftOutRows(overlong, identical, options.max_tokens)
    if not pairs:
        raise _nothing_left("pairs", sources, left_out)
    return pairs, left_out


def load_labelled(
    sources: list[Source], options: EncodingOptions, split: str = "train"
) -> tuple[list[LabelledAnswer], LeftOutRows]:
    """Load all labelled answers of the sources, in order; also return what was left out. A pair gives a good and a bad answer."""
    found: list[LabelledAnswer] = []
    overlong = 0
    for where, identity, record in _records(sources, options.base, options.seed, split):
        for name, prompt, answer, is_good in _parse_answers(record, where):
            example = _encode(f"{identity}{name}", prompt, answer, where, options)
            if is_short_enough(len(example.tokens), where, options):
                found.append(LabelledAnswer(example.id, example, is_good))
            else:
                overlong += 1
    left_out = LeftOutRows(overlong, 0, options.max_tokens)
    if not found:
        raise _nothing_left("answers", sources, left_out)
    return found, left_out


def count_rows(
    sources: list[Source], base: Path | None, seed: int, is_labelled: bool = False, split: str = "train"
) -> int:
    """Count the rows of the sources, and check each as far as that is possible without a tokenizer."""
    num_rows = 0
    for where, _, record in _records(sources, base, seed, split):
        if is_labelled:
            _parse_answers(record, where)
        else:
            _parse_pair(record, where)
        num_rows += 1
    return num_rows


def pair_texts(sources: list[Source], base: Path | None, seed: int = 0) -> Iterator[tuple[str, str, str, str, str]]:
    """Every pair as texts: its place, its id, the prompt, the chosen and the rejected answer. Messages are joined by line breaks."""
    for where, identity, record in _records(sources, base, seed, "train"):
        prompt, chosen, rejected = _parse_pair(record, where)
        asked = prompt.text if isinstance(prompt, SharedText) else prompt_as_text(prompt)
        yield where, str(record.get("id", identity)), asked, prompt_as_text(chosen), prompt_as_text(rejected)


def _records(sources: list[Source], base: Path | None, seed: int, split: str) -> Iterator[tuple[str, str, Record]]:
    """Every record, with its place and its id."""
    refuse_weights(sources, "preferences, which are used whole")
    refuse_column_keys(sources, PREFERENCE_COLUMNS)
    return located_records(sources, base, seed, split, make_preferences, "preference")


def located_records(
    sources: list[Source], base: Path | None, seed: int, split: str, make_rows: MakeRows, kind: str
) -> Iterator[tuple[str, str, Record]]:
    """Every record of files, plug-ins and tasks, with its place and its id. `make_rows` makes those of a task, which are of a `kind`."""
    for source in sources:
        if source.task is None:
            located = source_records(source, base)
        else:
            rows = make_rows(source.task, source.options, seed, source.split or split)
            located = ((f"{source.task}, {kind} {i + 1}", row) for i, row in enumerate(rows[: source.limit]))
        for index, (where, record) in enumerate(located):
            yield where, f"{source_name(source)}/{index}", record


# --- parsing rows ----------------------------------------------------------------------------------------------------


def _parse_pair(record: Record, where: str) -> tuple[PairPrompt, TextOrMessages, TextOrMessages]:
    """The prompt, the chosen and the rejected answer of a record."""
    row_formats.refuse_tools(record, where, TOOLS_IN_SUPERVISED_DATA)
    for key in ("chosen", "rejected"):
        if key not in record:
            raise _missing(key, record, where, "a pair has prompt, chosen and rejected")
    chosen, rejected = (_parse_answer(record[key], key, where) for key in ("chosen", "rejected"))
    prompt = row_prompt(record, where)
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
            f"{where}: one of chosen and rejected is a text and the other is messages, so their common prompt cannot be found: "
            "give a column prompt, or both in the same form"
        )
    shared = next(
        (i for i, (one, other) in enumerate(zip(chosen, rejected, strict=False)) if one != other),
        min(len(chosen), len(rejected)),
    )
    # If the conversations never differ, the last turn is the answer.
    shared = min(shared, len(chosen) - 1, len(rejected) - 1)
    if shared == 0:
        raise UserError(f"{where}: chosen and rejected have no first message in common, so there is no prompt")
    return row_formats.full_prompt(record, "chosen", chosen[:shared], where), chosen[shared:], rejected[shared:]


def row_prompt(record: Record, where: str) -> TextOrMessages | None:
    """The prompt column of a row, under any known name; None if it has none."""
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
    """An answer: text, messages, or one message, as in ShareGPT."""
    return text_or_messages([value] if isinstance(value, dict) else value, key, where)


def _shared_text(chosen: str, rejected: str, where: str) -> tuple[SharedText, str, str]:
    """Split two whole texts into their common beginning, up to the end of a word, and the two answers.

    The space before an answer belongs to it, because tokenizers join it to the next word. Neither answer is empty.
    """
    last = min(len(chosen), len(rejected)) - 1
    at = next((i for i in range(last) if chosen[i] != rejected[i]), last)
    while at and any(_is_letter(text[at - 1]) and _is_letter(text[at]) for text in (chosen, rejected)):
        at -= 1
    while at and chosen[at - 1] == " ":
        at -= 1
    if not chosen[:at].strip():
        raise UserError(
            f"{where}: there is no prompt column, and chosen and rejected do not begin with the same words, so the start of the answers "
            "cannot be found: give a column prompt"
        )
    return SharedText(chosen[:at]), chosen[at:], rejected[at:]


def _is_letter(character: str) -> bool:
    """Whether a character belongs to a word that ends at a space; scripts without spaces have no such words."""
    return character.isalnum() and ord(character) < FIRST_CJK


def _answer_after_prompt(prompt: TextOrMessages, answer: TextOrMessages, key: str, where: str) -> TextOrMessages:
    """The answer without the prompt, which the column may repeat before it."""
    if isinstance(answer, str) or answer[0]["role"] == "assistant":
        return answer
    prompt = as_messages(prompt, "user")
    if answer[: len(prompt)] == prompt and len(answer) > len(prompt):
        return answer[len(prompt) :]
    raise UserError(
        f"{where}: {key} begins with a message of role {answer[0]['role']!r} and does not repeat the prompt: it should be the "
        "assistant's messages, or the prompt's messages followed by them"
    )


def _parse_answers(record: Record, where: str) -> list[tuple[str, PairPrompt, TextOrMessages, bool]]:
    """The labelled answers of a record, each as (suffix of its id, prompt, answer, whether it is good)."""
    if "completion" not in record and "chosen" in record:
        prompt, chosen, rejected = _parse_pair(record, where)
        return [("/chosen", prompt, chosen, True), ("/rejected", prompt, rejected, False)]
    row_formats.refuse_tools(record, where, TOOLS_IN_SUPERVISED_DATA)
    if "label" not in record:
        raise _missing("label", record, where, "a labelled answer has prompt, completion and label")
    label = record["label"]
    if label not in (0, 1):
        raise UserError(f"{where}: label should be true (good) or false (bad), got {label!r}")
    prompt, answer = prompt_and_completion(record, where)
    return [("", prompt, _answer_after_prompt(prompt, answer, "completion", where), bool(label))]


def _margin(record: Record, where: str) -> float:
    margin = record.get("margin")
    if margin is None:
        return 0.0
    if isinstance(margin, bool) or not isinstance(margin, int | float) or margin < 0:
        raise UserError(f"{where}: margin should be a number of 0 or more, got {margin!r}")
    return float(margin)


# --- tokens ----------------------------------------------------------------------------------------------------------


def _encode(identity: str, prompt: PairPrompt, answer: TextOrMessages, where: str, options: EncodingOptions) -> Example:
    if isinstance(prompt, SharedText):
        row = Row(identity, [], "", None, {}, completion=answer, text=prompt.text)
    else:
        row = Row(identity, prompt, "", None, {}, completion=answer)
    try:
        return Example(identity, *encode_example(row, options.tokenizer, options.template))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def is_short_enough(length: int, where: str, options: EncodingOptions) -> bool:
    """Whether a row is short enough to be used; with overlong=error a longer one is an error."""
    if length <= options.max_tokens:
        return True
    if options.overlong == "filter":
        return False
    raise UserError(
        f"{where}: {length} tokens, more than max_tokens={options.max_tokens}; raise it, or set overlong=filter"
    )


def _missing(key: str, record: dict[str, Any], where: str, needed: str) -> UserError:
    return UserError(f"{where}: no column {key!r}; {needed} (has: {', '.join(map(str, record))})")


def _nothing_left(what: str, sources: list[Source], left_out: LeftOutRows) -> UserError:
    names = ", ".join(source_name(source) for source in sources) or "no source at all"
    return UserError(f"no {what} left in {names}: {'; '.join(left_out.notes) or 'the source has no rows'}")
