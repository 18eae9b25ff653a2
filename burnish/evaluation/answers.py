r"""The answer in a completion, as the verifier that judges it would read it: for votes (maj@k) and for the format rate.

Votes need to know which completions answer alike. Right ones do, since the verifier found each equal to the expected
answer; wrong ones do when their answers are written alike, after spelling is made plain (`\dfrac` and `\frac`, `0.50` and
`1/2`, spaces). A completion is in format when its answer stands where it was asked for: in `\boxed{}`, in an `<answer>`
block or after `####`; for a choice, when a letter is found; for a program, when there is a block of code.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from burnish.config.consistency import may_give_verdict
from burnish.config.data import RewardPart
from burnish.data.curation.decontamination import word_ngrams
from burnish.rewards.language_id import may_be_language
from burnish.rewards.verifiers import (
    answer_block,
    answered_number,
    chosen_letter,
    count_words_by_script,
    last_boxed,
    strip_markup,
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


# --- Whether a completion is good to read: one language, no loops, nothing broken.
#
# DeepSeek-R1 (2501.12948) left mixed languages, long paragraphs and code blocks out of the samples it fine-tuned on.

REPEAT_WORDS = 8
_MIXED_SCRIPTS = ({"CJK", "HIRAGANA", "KATAKANA"}, {"CJK", "HANGUL"})
"""Scripts that one language mixes by itself."""
_BROKEN_CHARACTERS = {"\ufffd", "\ufffe", "\uffff"}
_ALLOWED_CONTROL = {"\n", "\t", "\r"}


def script_purity(text: str) -> float:
    """The share of words in the commonest script; 1 where there are no words. Formulas and code have no language."""
    words = count_words_by_script(text)
    total = sum(words.values())
    groups = [*_MIXED_SCRIPTS, *({script} for script in words)]
    return max(sum(words[script] for script in group) for group in groups) / total if total else 1.0


def is_in_language(text: str, language: str) -> bool:
    """Whether a text may be in a language, by its script and its small words."""
    return may_be_language(strip_markup(text), language)


def repeated_share(text: str, length: int = REPEAT_WORDS) -> float:
    """The share of runs of so many words that stood in the text before: near 1 for a text that goes round in circles."""
    runs = list(word_ngrams(text.split(), length))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def longest_paragraph(text: str) -> int:
    """Words of the longest paragraph."""
    return max(len(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))


def has_code(text: str) -> bool:
    """Whether there is a block of code."""
    return "```" in text


def is_broken(text: str) -> bool:
    """Whether there are characters that are none: what a decoder writes for half a character, or control codes."""
    return any(c in _BROKEN_CHARACTERS or (unicodedata.category(c) == "Cc" and c not in _ALLOWED_CONTROL) for c in text)
