"""Answers with values of their steps, for process reward models.

A row has a prompt, the steps of an answer, and a value of each step: the probability that the answer ends right, from 0 to 1, or null for
a step without label. It is read from four forms:

- `prompt`, `steps` and `values`. In place of `values`, `ratings` of -1, 0 and 1; or steps that are objects with `text` and `rating`.
  With `finished` false, the answer goes on behind its last step, as a partial answer of a search does.
- PRM800K (2305.20050): `question.problem` and `label.steps`. Completions that were not chosen are rows of their own.
- Math-Shepherd (2312.08935): `input` with a tag at the end of every step, and `label` with + or - in its place.
- TRL's stepwise supervision: `prompt`, `completions` and `labels`.

Other columns are not read. Steps are tokenised as one answer, joined by the delimiter, and scored where the reward part `model` reads
them (`models/answer_steps.py`). An unfinished answer ends with the delimiter of its last step, and has no end token.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.schema import StepValues
from burnish.core.pictures import PictureSpan
from burnish.data.files import Record
from burnish.data.preference_pairs import EncodingOptions, is_short_enough, located_records, row_prompt
from burnish.data.row import Row, TextOrMessages, short_repr, typed_repr
from burnish.data.row_formats import TOOLS_IN_SUPERVISED_DATA, refuse_tools, refuse_weights, source_name
from burnish.data.supervised import Encoded, encode_example, refuse_column_keys
from burnish.data.tasks.registry import make_step_values
from burnish.models.answer_steps import scored_positions

FORMS = (
    "prompt, steps and values; prompt, steps and ratings; PRM800K's question and label; Math-Shepherd's input and label; or TRL's prompt, "
    "completions and labels"
)
FIRST_STEP = re.compile(r"Step 1\s*:")
"""Where the answer begins in Math-Shepherd's text."""
RATINGS = (-1, 0, 1)


@dataclass(frozen=True)
class AnswerSteps:
    """An answer as the steps of a row."""

    prompt: TextOrMessages
    steps: list[str]
    values: list[float | None]
    suffix: str = ""
    """What its id has after the record's, where a record holds several answers."""
    is_finished: bool = True
    """Whether the answer ends with its last step."""


@dataclass(frozen=True)
class SteppedAnswer:
    """The tokens of a prompt and an answer, where its steps are scored, and their values."""

    id: str
    tokens: list[int]
    positions: list[int]
    values: list[float | None]
    """The value of the step at each position; None without a label."""
    pictures: tuple[PictureSpan, ...] = ()

    @property
    def labelled(self) -> list[tuple[int, float]]:
        """Position and value of the steps that have a label."""
        return [(at, value) for at, value in zip(self.positions, self.values, strict=True) if value is not None]


@dataclass(frozen=True)
class LeftOutAnswers:
    """How many answers were left out, and why."""

    overlong: int = 0
    unlabelled: int = 0
    merged: int = 0
    """Answers whose steps the model cannot be read one by one, because two of them end in the same token."""
    longest: int = 0

    @property
    def notes(self) -> list[str]:
        """One sentence per reason."""
        reasons = (
            (self.overlong, f"are longer than {self.longest} tokens"),
            (self.unlabelled, "have no step with a value"),
            (self.merged, "have steps that this tokenizer does not keep apart with this delimiter"),
        )
        return [f"{count} answers {reason} and were left out" for count, reason in reasons if count]


def load_stepped_answers(
    sources: list[Source], options: EncodingOptions, steps: StepValues, split: str = "train"
) -> tuple[list[SteppedAnswer], LeftOutAnswers]:
    """Load all answers of the sources, in order; also return what was left out. `split` is for tasks that name none."""
    found: list[SteppedAnswer] = []
    overlong = unlabelled = merged = 0
    for where, identity, answer in _answers(sources, options.base, options.seed, steps, split):
        encoded = _encode(identity, answer, where, options, steps.delimiter)
        if not is_short_enough(len(encoded.tokens), where, options):
            overlong += 1
            continue
        positions = scored_positions(encoded.tokens, encoded.mask, options.tokenizer, steps.delimiter)
        if len(positions) != len(answer.steps):
            merged += 1
        elif all(value is None for value in answer.values):
            unlabelled += 1
        else:
            found.append(SteppedAnswer(identity, encoded.tokens, positions, answer.values, encoded.pictures))
    left_out = LeftOutAnswers(overlong, unlabelled, merged, options.max_tokens)
    if not found:
        names = ", ".join(source_name(source) for source in sources) or "no source at all"
        raise UserError(f"no answers left in {names}: {'; '.join(left_out.notes) or 'the source has no rows'}")
    return found, left_out


def count_stepped_answers(
    sources: list[Source], base: Path | None, seed: int, steps: StepValues, split: str = "train"
) -> int:
    """Count the answers of the sources, and check each as far as that is possible without a tokenizer."""
    return sum(1 for _ in _answers(sources, base, seed, steps, split))


def _answers(
    sources: list[Source], base: Path | None, seed: int, steps: StepValues, split: str
) -> Iterator[tuple[str, str, AnswerSteps]]:
    """Every answer, with its place and its id."""
    refuse_weights(sources, "answers with values of steps, which are used whole")
    refuse_column_keys(sources, f"answers with values of steps, whose columns are {FORMS}")
    for where, identity, record in located_records(sources, base, seed, split, make_step_values, "answer"):
        for answer in parse_steps(record, where, steps):
            yield where, identity + answer.suffix, answer


# --- parsing rows ------------------------------------------------------------------------------------------------------


def parse_steps(record: Record, where: str, steps: StepValues) -> list[AnswerSteps]:
    """The answers of a record: one, or those of PRM800K's alternatives."""
    refuse_tools(record, where, TOOLS_IN_SUPERVISED_DATA)
    label = record.get("label")
    if record.get("steps") is not None:
        answers = [_plain(record, where, steps)]
    elif isinstance(label, dict) and "steps" in label:
        answers = _prm800k(record, label, where, steps)
    elif record.get("completions") is not None:
        answers = [_trl(record, where)]
    elif isinstance(label, str) and isinstance(record.get("input"), str):
        answers = [_math_shepherd(record["input"], label, where, steps.tag)]
    else:
        raise UserError(f"{where}: no steps; a row has {FORMS} (has: {', '.join(map(str, record))})")
    for answer in answers:
        _check_steps(answer, where, steps.delimiter)
    return answers


def _plain(record: Record, where: str, steps: StepValues) -> AnswerSteps:
    """`prompt`, `steps` and `values` or `ratings`; ratings may also stand in the steps."""
    given = _list_of(record, "steps", where)
    labels = [name for name in ("values", "ratings") if record.get(name) is not None]
    is_rated = bool(given) and all(isinstance(step, dict) for step in given)
    if len(labels) + is_rated != 1:
        raise UserError(
            f"{where}: the steps have {'no values' if not labels and not is_rated else 'values in several places'}; give one of the column "
            "values (0 to 1 or null), the column ratings (-1, 0, 1 or null), or steps that are objects with text and rating"
        )
    if is_rated:
        texts = [step.get("text") for step in given]
        values = [_rating(step.get("rating"), f"{where}: steps[{i}].rating", steps) for i, step in enumerate(given)]
    else:
        texts, items = given, _list_of(record, labels[0], where)
        places = [f"{where}: {labels[0]}[{i}]" for i in range(len(items))]
        if labels[0] == "values":
            values = [_value(item, place) for item, place in zip(items, places, strict=True)]
        else:
            values = [_rating(item, place, steps) for item, place in zip(items, places, strict=True)]
    return AnswerSteps(_prompt(record, where), texts, values, is_finished=_finished(record, where))


def _trl(record: Record, where: str) -> AnswerSteps:
    """TRL's `prompt`, `completions` and `labels`, which are booleans."""
    if record.get("labels") is None:
        raise UserError(f"{where}: no column 'labels'; completions need a label (true or false) each")
    labels = _list_of(record, "labels", where)
    values = [_value(label, f"{where}: labels[{i}]") for i, label in enumerate(labels)]
    return AnswerSteps(_prompt(record, where), _list_of(record, "completions", where), values)


def _math_shepherd(text: str, label: str, where: str, tag: str) -> AnswerSteps:
    """Math-Shepherd's texts: every tag of `input` is + or - in `label`. What follows the last tag is a step without label."""
    parts = text.split(tag)
    if len(parts) == 1:
        raise UserError(
            f"{where}: input has no step tag {tag!r}; name the tag of this file with reward_model.steps.tag"
        )
    values: list[float | None] = []
    at = 0
    for part in parts[:-1]:
        at += len(part)
        if not label.startswith(part, at - len(part)) or label[at : at + 1] not in ("+", "-"):
            raise UserError(
                f"{where}: label should be input with + or - in place of every {tag!r}, and step {len(values) + 1} is not: "
                f"{short_repr(label[max(at - 20, 0) : at + 20])}"
            )
        values.append(float(label[at] == "+"))
        at += 1
    starts = [match.start() for match in FIRST_STEP.finditer(parts[0])]
    if not starts or not parts[0][: starts[-1]].strip():
        raise UserError(f"{where}: input should be a question followed by 'Step 1:', got {short_repr(parts[0])}")
    steps = [parts[0][starts[-1] :], *parts[1:-1], *([parts[-1]] if parts[-1].strip() else [])]
    values += [None] * (len(steps) - len(values))
    return AnswerSteps(parts[0][: starts[-1]].strip(), [step.strip() for step in steps], values)


def _prm800k(record: Record, label: dict[str, Any], where: str, steps: StepValues) -> list[AnswerSteps]:
    """PRM800K's tree: the chosen completion of every step is one answer, and each other completion ends one of its own.

    The steps before an alternative have no label there, so that each label counts once. A step that a person wrote has none either.
    Where nothing was chosen, the first completion ends the answer.
    """
    question = record.get("question")
    prompt = question.get("problem") if isinstance(question, dict) else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise UserError(f"{where}: question.problem should be a text, got {typed_repr(prompt)}")
    texts: list[Any] = []
    values: list[float | None] = []
    alternatives: list[AnswerSteps] = []
    for number, step in enumerate(_list_of(label, "steps", f"{where}: label"), start=1):
        place = f"{where}: label.steps[{number - 1}]"
        if not isinstance(step, dict):
            raise UserError(f"{place} should be an object with completions, got {typed_repr(step)}")
        rated = step.get("completions") or []
        if not isinstance(rated, list) or not all(isinstance(one, dict) for one in rated):
            raise UserError(f"{place}.completions should be a list of objects, got {typed_repr(rated)}")
        found = [
            (one.get("text"), _rating(one.get("rating"), f"{place}.completions[{i}].rating", steps))
            for i, one in enumerate(rated)
        ]
        chosen, human = step.get("chosen_completion"), step.get("human_completion")
        main = chosen if chosen is not None else 0 if human is None and found else None
        if main is not None and (isinstance(main, bool) or not isinstance(main, int) or not 0 <= main < len(found)):
            raise UserError(
                f"{place}.chosen_completion should be the index of one of {len(found)} completions, got {main!r}"
            )
        alternatives += [
            AnswerSteps(prompt, [*texts, text], [*([None] * len(texts)), value], f"/{number}.{i + 1}")
            for i, (text, value) in enumerate(found)
            if i != main and value is not None
        ]
        if main is not None:
            texts, values = [*texts, found[main][0]], [*values, found[main][1]]
        else:
            written = human.get("text") if isinstance(human, dict) else human
            texts, values = [*texts, written], [*values, None]
        if chosen is None and human is None:
            break
    return [AnswerSteps(prompt, texts, values), *alternatives]


def _prompt(record: Record, where: str) -> TextOrMessages:
    prompt = row_prompt(record, where)
    if prompt is None:
        raise UserError(f"{where}: no column 'prompt'; a row has {FORMS} (has: {', '.join(map(str, record))})")
    return prompt


def _list_of(record: Record, key: str, where: str) -> list[Any]:
    value = record[key]
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: {key} should be a list that is not empty, got {typed_repr(value)}")
    return value


def _finished(record: Record, where: str) -> bool:
    finished = record.get("finished")
    if not isinstance(finished, bool | None):
        raise UserError(f"{where}: finished should be true, false or null (as true), got {typed_repr(finished)}")
    return finished is not False


def _value(value: Any, where: str) -> float | None:
    """A value from 0 to 1, a boolean, or null."""
    if value is None:
        return None
    if not isinstance(value, bool | int | float) or math.isnan(value) or not 0 <= value <= 1:
        raise UserError(f"{where} should be a number from 0 to 1, true or false, or null, got {value!r}")
    return float(value)


def _rating(rating: Any, where: str, steps: StepValues) -> float | None:
    """The value of a rating of PRM800K: 0 for -1, 1 for 1, `neutral` for 0, and None without a rating."""
    if rating is None:
        return None
    if isinstance(rating, bool) or rating not in RATINGS:
        raise UserError(f"{where} should be -1 (wrong), 0 (neutral), 1 (right) or null, got {rating!r}")
    return steps.neutral if rating == 0 else float(rating > 0)


def _check_steps(answer: AnswerSteps, where: str, delimiter: str) -> None:
    """Raise a UserError for steps that are not texts, that the delimiter would divide, or that are not as many as their values."""
    for number, step in enumerate(answer.steps, start=1):
        if not isinstance(step, str) or not step.strip():
            raise UserError(f"{where}: step {number} should be a text that is not blank, got {typed_repr(step)}")
        if delimiter in step:
            raise UserError(
                f"{where}: step {number} contains the delimiter {delimiter!r}, so it would be read as two: {short_repr(step)}. Remove it from "
                "the step (steps are joined with it), or set another reward_model.steps.delimiter"
            )
    if len(answer.steps) != len(answer.values):
        raise UserError(
            f"{where}: {len(answer.steps)} steps and {len(answer.values)} values; every step has a value, or null without a label"
        )


# --- tokens ------------------------------------------------------------------------------------------------------------


def _encode(identity: str, answer: AnswerSteps, where: str, options: EncodingOptions, delimiter: str) -> Encoded:
    """The tokens of a prompt and its answer, whose steps are joined by the delimiter. Of an unfinished one, the last step has it too."""
    tokenizer = options.tokenizer
    special = next(iter(tokenizer.special_ids([delimiter])), None)
    is_token = special is not None and not options.template.prerendered
    completion = answer.steps[-1] if is_token else delimiter.join(answer.steps)
    try:
        encoded = encode_example(
            Row(identity, answer.prompt, "", None, {}, completion=completion), tokenizer, options.template
        )
        before: list[int] = []
        if special is not None and is_token:
            # The name of a special token in a text is plain text, so the token is put between the tokens of the steps.
            steps = answer.steps[:-1] if answer.is_finished else answer.steps
            before = _joined([tokenizer.encode(tokenizer.literal(step)) for step in steps], special)
        elif not answer.is_finished:
            text = completion + delimiter
            before = tokenizer.encode(text if options.template.prerendered else tokenizer.literal(text))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    start = encoded.mask.index(True)
    end = len(encoded.tokens) if answer.is_finished else start  # what comes from there on has an end token
    tokens = [*encoded.tokens[:start], *before, *encoded.tokens[start:end]]
    mask = [*encoded.mask[:start], *([True] * len(before)), *encoded.mask[start:end]]
    return Encoded(tokens, mask, encoded.pictures)


def _joined(steps: Sequence[Sequence[int]], delimiter: int) -> list[int]:
    """The tokens of steps, each followed by the delimiter."""
    return [token for step in steps for token in (*step, delimiter)]
