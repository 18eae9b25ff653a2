r"""Readers of published multiple-choice sets: GPQA, MMLU, MMLU-Pro, ARC. `published_datasets.SHAPES` names them.

The options are listed with letters, and the letter of the right one is asked for within \boxed{}.
"""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from typing import Any

from burnish.core.random_keys import hash_text
from burnish.data.files import Record
from burnish.data.published_example import (
    PublishedExample,
    UnusableRow,
    first_value,
    question_of,
    renamed_columns,
    user_messages,
)

LETTERS = string.ascii_uppercase[:10]
"""The letters that the verifier `choice` reads; MMLU-Pro has up to ten options."""
CHOICE_INSTRUCTION = (
    "\nPlease reason step by step, and put the letter of the right option, and nothing else, within \\boxed{}."
)
MISSING_OPTION = "N/A"
"""What MMLU-Pro 1.1 has in place of options, so that there are ten."""


def gpqa(record: Record) -> PublishedExample:
    """GPQA: `Question`, `Correct Answer`, `Incorrect Answer 1` to `3`, `Subdomain`, `High-level domain`.

    The right option is always first in the file. A hash of the question and the option decides the order here, so that it depends neither
    on the place of the row nor on a seed.
    """
    question = question_of(record)
    right, *wrong = (
        str(record[name] if record[name] is not None else "").strip()
        for name in ("Correct Answer", *(f"Incorrect Answer {number}" for number in (1, 2, 3)))
    )
    if not right:
        raise UnusableRow("no answer")
    options = sorted([right, *wrong], key=lambda option: hash_text(f"{question}\n{option}"))
    extra = renamed_columns(record, subject="Subdomain", category="High-level domain")
    return choice_example(question, options, options.index(right), extra)


def mmlu(record: Record) -> PublishedExample:
    """MMLU: `question`, `choices` or `A` to `D`, `answer` (an index or a letter), `subject`; also with capitals.

    The csv files of the authors have no line of names, and their subject is in the file's name (`abstract_algebra_test.csv`).
    """
    question, options = question_of(record), first_value(record, "choices", "Choices")
    if options is None:
        options = [record.get(letter) for letter in "ABCD"]
    answer = first_value(record, "answer", "Answer")
    extra = renamed_columns(record, subject="subject") or renamed_columns(record, subject="Subject")
    if not extra and record.get("file") is not None:
        extra = {"subject": re.sub(r"_(test|val|dev)$", "", record["file"])}
    return choice_example(question, options, option_index(answer), extra)


def mmlu_pro(record: Record) -> PublishedExample:
    """MMLU-Pro: `question`, `options` (up to ten), `answer` (a letter), `answer_index`, `category`."""
    options = list(record["options"])
    while options and options[-1] == MISSING_OPTION:
        options.pop()
    index, given = option_index(first_value(record, "answer", "answer_index")), record.get("answer_index")
    if index is not None and given is not None and option_index(given) != index:
        raise UnusableRow("answer and answer_index differ")
    return choice_example(question_of(record), options, index, renamed_columns(record, subject="category"))


def arc(record: Record) -> PublishedExample:
    """ARC: `question`, `choices` with `text` and `label`, `answerKey`; the labels may be numbers. Also with the options in `question`."""
    question, choices = record["question"], record.get("choices")
    if isinstance(question, dict):  # the files of the authors: {"stem": ..., "choices": [{"text", "label"}]}
        choices = {key: [choice[key] for choice in question["choices"]] for key in ("text", "label")}
        question = question["stem"]
    if not isinstance(choices, dict):
        raise ValueError("choices should be an object with text and label")
    labels, key = [str(label) for label in choices["label"]], str(record["answerKey"] or "")
    index = labels.index(key) if key in labels else None
    if key and index is None:
        raise UnusableRow("the answer is none of the options")
    return choice_example(question_of({"question": question}), choices["text"], index, {})


def option_index(answer: Any) -> int | None:
    """The index of an option from an index or a letter; None for no answer. Anything else is unusable."""
    text = "" if answer is None else str(answer).strip()
    if not text:
        return None
    if text.upper() in LETTERS and len(text) == 1:
        return LETTERS.index(text.upper())
    if text.isdecimal():
        return int(text)
    raise UnusableRow("the answer is neither a letter nor an index")


def choice_example(question: str, options: Sequence[Any], right: int | None, extra: dict[str, Any]) -> PublishedExample:
    """A question with its options listed by letter, and the letter of the right one as its answer."""
    texts = ["" if option is None else str(option).strip() for option in options]
    if right is None:
        raise UnusableRow("no answer")
    if len(texts) < 2 or not all(texts):
        raise UnusableRow("an option is missing")
    if len(texts) > len(LETTERS):
        raise UnusableRow(f"more than {len(LETTERS)} options")
    if right >= len(texts):
        raise UnusableRow("the answer is none of the options")
    if texts.count(texts[right]) > 1:
        raise UnusableRow("the right option is there twice")
    listed = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, texts, strict=False))
    prompt = f"{question}\n\n{listed}\n{CHOICE_INSTRUCTION}"
    return PublishedExample(question, user_messages(prompt), LETTERS[right], extra)
