r"""Extracts the answer of a completion as its verifier would, for majority votes (maj@k) and for the format rate.

A vote counts completions with equal answers. All right completions are equal, because the verifier found each equal to the
expected answer. Wrong ones are equal if their normalised answers are (`answer_spelling.py`). A
completion is in format if its answer is in `\boxed{}`, in an `<answer>` block or after `####`. A choice is in format if a
letter is found; a program, if there is a code block.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from burnish.config.consistency import may_give_verdict
from burnish.config.data import RewardPart
from burnish.evaluation.answer_spelling import math_spelling, normal_spelling
from burnish.rewards.verifiers import answer_block, answered_number, chosen_letter, last_boxed

MAX_CHARS = 20_000
"""Characters at the end of a completion that are searched for the answer."""
_HASHES = "####"
_CODE = re.compile(r"```.*?```", re.DOTALL)


class Answer(NamedTuple):
    """The answer of a completion."""

    text: str | None
    """The normalised answer; None if there is no answer to compare."""
    is_marked: bool | None
    """Whether the answer is in the required format; None if no format is required."""


def read_answer(kind: str, completion: str) -> Answer:
    """Return the answer of a completion for the verifier `kind`."""
    return ANSWER_READERS.get(kind, _read_marked)(completion[-MAX_CHARS:])


def has_comparable_answers(kind: str) -> bool:
    """Whether completions for the verifier `kind` may have an answer whose text can be compared with others, as votes do."""
    return ANSWER_READERS.get(kind, _read_marked) not in (_read_code, _read_none)


def verifier_of(parts: Sequence[RewardPart], data_source: str, extra: Mapping[str, Any]) -> str:
    """Return the verifier that decides whether a row's answer is right: the first applicable reward part with a verdict."""
    for part in parts:
        if not may_give_verdict(part) or (part.sources is not None and data_source not in part.sources):
            continue
        if part.name == "rule_scores":
            return str(part.options.get("checker", "number"))
        return str(extra.get("verifier", "row")) if part.name == "row" else part.name
    return ""


def marked_answer(text: str) -> str | None:
    r"""Return the content of the last `\boxed{}` (in the last `<answer>` block if there is one), of the block, or after `####`."""
    block = answer_block(text)
    boxed = last_boxed(block or text)
    if boxed is not None:
        return boxed
    return block or (text.rpartition(_HASHES)[2].strip() if _HASHES in text else None) or None


def _read_number(text: str) -> Answer:
    value = answered_number(text)
    return Answer(None if value is None else str(value), value is not None and marked_answer(text) is not None)


def _read_math(text: str) -> Answer:
    found = marked_answer(text)
    return Answer(math_spelling(found) or None if found else None, found is not None)


def _read_choice(text: str) -> Answer:
    letter = chosen_letter(text)
    return Answer(letter, letter is not None)


def _read_exact(text: str) -> Answer:
    return Answer((answer_block(text) or text).strip() or None, None)


def _read_block(text: str) -> Answer:
    found = answer_block(text)
    return Answer(found or None, found is not None)


def _read_code(text: str) -> Answer:
    return Answer(None, _CODE.search(text) is not None)


def _read_none(text: str) -> Answer:
    return Answer(None, None)


def _read_marked(text: str) -> Answer:
    found = marked_answer(text)
    return Answer(normal_spelling(found) or None if found else None, None)


ANSWER_READERS: dict[str, Callable[[str], Answer]] = {
    "number": _read_number,
    "math": _read_math,
    "answer_set": _read_math,
    "choice": _read_choice,
    "exact": _read_exact,
    "task": _read_exact,
    "code": _read_code,
    "code_output": _read_block,
    "code_input": _read_block,
    "ifeval": _read_none,
    "": _read_none,
}
