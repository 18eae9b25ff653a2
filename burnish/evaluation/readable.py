"""Whether a completion is good to read: one language, no loops, nothing broken.

DeepSeek-R1 (2501.12948) left mixed languages, long paragraphs and code blocks out of the samples it fine-tuned on.
"""

from __future__ import annotations

import re
import unicodedata

from burnish.data.overlap import runs_of
from burnish.rewards.tongues import could_be
from burnish.rewards.verifiers import count_words, prose

RUN = 8
_TOGETHER = ({"CJK", "HIRAGANA", "KATAKANA"}, {"CJK", "HANGUL"})
"""Scripts that one language mixes by itself."""
_BROKEN = {"\ufffd", "\ufffe", "\uffff"}
_CONTROL = {"\n", "\t", "\r"}


def purity(text: str) -> float:
    """The share of words in the commonest script; 1 where there are no words. Formulas and code have no language."""
    words = count_words(text)
    total = sum(words.values())
    groups = [*_TOGETHER, *({script} for script in words)]
    return max(sum(words[script] for script in group) for group in groups) / total if total else 1.0


def is_in(text: str, language: str) -> bool:
    """Whether a text may be in a language, by its script and its small words."""
    return could_be(prose(text), language)


def repeated_share(text: str, length: int = RUN) -> float:
    """The share of runs of so many words that stood in the text before: near 1 for a text that goes round in circles."""
    runs = list(runs_of(text.split(), length))
    return 1 - len(set(runs)) / len(runs) if runs else 0.0


def longest_paragraph(text: str) -> int:
    """Words of the longest paragraph."""
    return max(len(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))


def has_code(text: str) -> bool:
    """Whether there is a block of code."""
    return "```" in text


def is_broken(text: str) -> bool:
    """Whether there are characters that are none: what a decoder writes for half a character, or control codes."""
    return any(c in _BROKEN or (unicodedata.category(c) == "Cc" and c not in _CONTROL) for c in text)
