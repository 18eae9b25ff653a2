r"""The answer in a completion, as the verifier that judges it would read it: for votes (maj@k) and for the format rate.

Votes need to know which completions answer alike. Right ones do, since the verifier found each equal to the expected
answer; wrong ones do when their answers are written alike, after spelling is made plain (`\dfrac` and `\frac`, `0.50` and
`1/2`, spaces). A completion is in format when its answer stands where it was asked for: in `\boxed{}`, in an `<answer>`
block or after `####`; for a choice, when a letter is found; for a program, when there is a block of code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from burnish.config.consistency import may_give_verdict
from burnish.config.data import RewardPart
from burnish.rewards.verifiers import (
    answer_block,
    answered_number,
    chosen_letter,
    last_boxed,
)

MAX_CHARS = 20_000  # of a completion's end that are looked at
_HASHES = "####"
_SPELLING = (
    (re.compile(r"\\(?:left|right|[,;:! ])|[$\s]|\\%|%|\\\(|\\\)"), ""),
    (re.compile(r"\\[dt]frac"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|mathbf|textbf|mbox)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\^\{?\\circ\}?"), ""),
)
_CODE = re.compile(r"```.*?```", re.DOTALL)


class Answer(NamedTuple):
    """What a completion answers, spelled plainly; None where there is no answer to compare."""

    text: str | None
    is_marked: bool | None
    """Whether it stands where it was asked for; None where nothing was asked."""


def read_answer(kind: str, completion: str) -> Answer:
    """The answer of a completion that the verifier `kind` judges."""
    return ANSWER_READERS.get(kind, _read_marked)(completion[-MAX_CHARS:])


def verifier_of(parts: Sequence[RewardPart], data_source: str, extra: Mapping[str, Any]) -> str:
    """The verifier that decides whether a row's answer is right: of the parts that apply to it the first that judges."""
    for part in parts:
        if not may_give_verdict(part) or (part.sources is not None and data_source not in part.sources):
            continue
        if part.name == "rule_scores":
            return str(part.options.get("checker", "number"))
        return str(extra.get("verifier", "row")) if part.name == "row" else part.name
    return ""


def marked_answer(text: str) -> str | None:
    r"""The inside of the last `<answer>` block, of the last `\boxed{}` in it or anywhere, or what follows `####`."""
    block = answer_block(text)
    boxed = last_boxed(block or text)
    if boxed is not None:
        return boxed
    return block or (text.rpartition(_HASHES)[2].strip() if _HASHES in text else None) or None


def normal_spelling(text: str) -> str:
    """An answer in plain spelling; numbers that are written differently become the same."""
    for pattern, instead in _SPELLING:
        text = pattern.sub(instead, text)
    text = text.rstrip(".")
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(\d+)\}", text)
    candidate = f"{fraction[1]}{fraction[2]}/{fraction[3]}" if fraction else re.sub(r"(?<=\d),(?=\d{3})", "", text)
    try:
        return str(Fraction(candidate)) if len(candidate) < 100 else candidate
    except (ValueError, ZeroDivisionError):
        return text


def _read_number(text: str) -> Answer:
    value = answered_number(text)
    return Answer(None if value is None else str(value), value is not None and marked_answer(text) is not None)


def _read_math(text: str) -> Answer:
    found = marked_answer(text)
    return Answer(normal_spelling(found) or None if found else None, found is not None)


def _read_choice(text: str) -> Answer:
    letter = chosen_letter(text)
    return Answer(letter, letter is not None)


def _read_exact(text: str) -> Answer:
    return Answer((answer_block(text) or text).strip() or None, None)


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
    "choice": _read_choice,
    "exact": _read_exact,
    "task": _read_exact,
    "code": _read_code,
    "ifeval": _read_none,
    "": _read_none,
}
