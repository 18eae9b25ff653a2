r"""Verifiers of mathematics with math-verify: one expression (`math`), or several answers with tolerances (`answer_set`)."""

from __future__ import annotations

import functools
import json
import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.rewards.answer_texts import answer_block, boxed_texts, last_boxed
from burnish.rewards.score_types import require_answer

_DELIMITED = re.compile(r"\\boxed|(?<!\\)\$")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}\s")


def _parse_math(latex: str) -> list[Any]:
    from math_verify import parse

    # math-verify's own timeout needs the main thread, and it would turn a hostile answer into an uncounted 0. The worker pool's deadline
    # works in any thread and is counted.
    return parse(latex, parsing_timeout=None)


@functools.lru_cache(maxsize=1024)
def _expected_math(answer: str) -> list[Any]:
    # Answers in data files are bare LaTeX; math-verify parses only what is inside a delimiter.
    parsed = _parse_math(answer if _DELIMITED.search(answer) else f"\\boxed{{{answer}}}")
    if not parsed:
        raise ValueError(f"math-verify cannot parse the expected answer {answer!r}")
    return parsed


def math_verifier(completion: str, answer: Any, extra: Mapping[str, Any]) -> float:
    """1 if math-verify finds the completion's expression equal to the expected one (Hugging Face, math-verify)."""
    from math_verify import verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns on every call that its timeout is off
    require_answer(answer)
    expected = _expected_math(str(answer))
    block = answer_block(completion)
    text = block or completion
    if block and not _DELIMITED.search(block) and not _PROSE.search(block):
        text = f"\\boxed{{{block}}}"
    return float(verify(expected, _parse_math(text), timeout_seconds=None))


# --- several answers ---------------------------------------------------------------------------------------------------


_CONJUNCTION = re.compile(r"\\text\{\s*(?:and|or|,)\s*\}|(?<=[\s$}])(?:and|or)(?=[\s$\\])")
_SPACES = re.compile(r"\\[;,: !]|\\q?quad")


@dataclass(frozen=True)
class AnswerSet:
    """The expected answers of a row, in any order, each with its absolute tolerance (None: equal as expressions)."""

    answers: tuple[str, ...]
    tolerances: tuple[float | None, ...]


def read_answer_set(answer: Any) -> AnswerSet:
    r"""Read `{"answers": [text, ...]}`, as an object or as JSON text; ValueError for anything else.

    With `"several": true`, `3, 5` stands for two answers and `\pm 3` too. `"tolerance"` has one number for all, or one for each.
    """
    record = json.loads(answer) if isinstance(answer, str) else answer
    texts = record.get("answers") if isinstance(record, Mapping) else None
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"the expected answer should be an object with a list of texts `answers`, got {answer!r:.200}")
    if record.get("several"):
        texts = [one for text in texts for part in top_level_parts(text) for one in both_signs(part)]
    given = record.get("tolerance") or [None]
    if len(given) not in (1, len(texts)):
        raise ValueError(f"{len(texts)} answers with {len(given)} tolerances")
    tolerances = tuple(given) * (len(texts) if len(given) == 1 else 1)
    for tolerance in tolerances:
        if tolerance is not None and not 0 <= tolerance < math.inf:
            raise ValueError(f"a tolerance is a number from 0 on, got {tolerance!r}")
    return AnswerSet(tuple(texts), tolerances)


def both_signs(text: str) -> list[str]:
    r"""The two values of an answer with one `\pm`; any other answer as it is."""
    if text.count(r"\pm") != 1:
        return [text]
    return [text.replace(r"\pm", sign).removeprefix("+").strip() for sign in ("+", "-")]


def answer_set(completion: str, answer: Any, extra: Mapping[str, Any]) -> float:
    r"""1 if the last `\boxed{}` has exactly the expected answers, in any order, separated by commas.

    With several answers, as many last boxes with one each count too. A number with a tolerance may differ by it; expressions must be equal
    by math-verify. OlympiadBench's `error` is such a tolerance (He et al. 2024, 2402.14008).
    """
    require_answer(answer)
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    expected = read_answer_set(answer)
    given = given_answers(completion, len(expected.answers))
    if len(given) != len(expected.answers):
        return 0.0
    fits = [
        [_equal(text, tolerance, one) for one in given]
        for text, tolerance in zip(expected.answers, expected.tolerances, strict=True)
    ]
    return float(has_perfect_matching(fits))


def given_answers(completion: str, count: int) -> list[str]:
    """The answers of a completion to a question with `count` of them: the parts of its last box, or the last `count` boxes."""
    text = answer_block(completion) or completion
    boxed = last_boxed(text)
    if boxed is None:
        return []
    if count == 1:
        return [boxed]
    inside = boxed.removeprefix(r"\{").removesuffix(r"\}") if boxed.startswith(r"\{") else boxed
    parts = [one for part in top_level_parts(inside) for one in both_signs(part)]
    return boxed_texts(text)[-count:] if len(parts) == 1 else parts


def top_level_parts(text: str) -> list[str]:
    r"""The parts of a text between commas, semicolons, `and` and `or` that are in no brackets."""
    parts, depth = [""], 0
    for character in _SPACES.sub(" ", _CONJUNCTION.sub(",", text)):
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part for part in (part.strip().strip("$").strip() for part in parts) if part]


def has_perfect_matching(fits: list[list[bool]]) -> bool:
    """Whether every row can get a column of its own that fits it (augmenting paths, Kuhn 1955)."""
    owner: dict[int, int] = {}

    def place(row: int, tried: set[int]) -> bool:
        for column, fit in enumerate(fits[row]):
            if fit and column not in tried:
                tried.add(column)
                if column not in owner or place(owner[column], tried):
                    owner[column] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(fits)))


def _equal(expected: str, tolerance: float | None, given: str) -> bool:
    from math_verify import verify

    right = None if tolerance is None else number_value(expected)
    if tolerance is None or right is None:
        return bool(verify(_expected_math(expected), _parse_math(f"\\boxed{{{given}}}"), timeout_seconds=None))
    value = number_value(given)
    return value is not None and abs(value - right) <= tolerance + 1e-12 * abs(right)


def number_value(text: str) -> float | None:
    """The value of a text that is one real number or an expression of numbers; None for anything else."""
    try:
        value = float(text)
    except ValueError:
        parsed = _parse_math(f"\\boxed{{{text}}}")
        try:
            value = float(parsed[0]) if parsed else math.nan
        except (TypeError, ValueError, OverflowError):  # a symbol, a set, a complex number, or beyond a float
            return None
    return value if math.isfinite(value) else None
