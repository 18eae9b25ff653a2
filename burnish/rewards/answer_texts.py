r"""Finds the answer in a completion, and compares the words of short answers."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterator

ANSWER_BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def answer_block(text: str) -> str | None:
    """The inside of the last `<answer>...</answer>`, or None."""
    blocks = ANSWER_BLOCK.findall(text)
    return blocks[-1].strip() if blocks else None


def last_boxed(text: str) -> str | None:
    r"""The inside of the last complete `\boxed{...}` with balanced braces, or None."""
    best = max(_boxed_spans(text), default=None)
    return None if best is None else text[best[0] : best[1]].strip()


def boxed_texts(text: str) -> list[str]:
    r"""The insides of all complete `\boxed{...}`, in the order in which they begin."""
    return [text[start:end].strip() for start, end in sorted(_boxed_spans(text))]


def _boxed_spans(text: str) -> Iterator[tuple[int, int]]:
    r"""Where the inside of each complete `\boxed{...}` starts and ends. It takes one pass even if many are left open."""
    open_braces: list[int] = []  # where the inside of each open \boxed starts; -1 for a plain brace
    for token in _BRACES.finditer(text):
        if token[0] == "}":
            start = open_braces.pop() if open_braces else -1
            if start >= 0:
                yield start, token.start()
        elif token[0].endswith("{") and not token[0].startswith("\\{"):
            open_braces.append(token.end() if token[0] != "{" else -1)


def normalized_words(text: str) -> list[str]:
    """The words of an answer without case, punctuation and articles; an answer of nothing else ("The The", "!!!") is kept."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split() or text.lower().split()


def token_f1(answered: list[str], expected: list[str]) -> float:
    """Harmonic mean of precision and recall over words; 1 for two empty answers."""
    if not answered or not expected:
        return float(answered == expected)
    common = sum((Counter(answered) & Counter(expected)).values())
    return 2 * common / (len(answered) + len(expected))


def has_words(text: list[str], wanted: list[str]) -> bool:
    """Whether the wanted words stand in a text, next to each other and in order."""
    return any(text[i : i + len(wanted)] == wanted for i in range(len(text) - len(wanted) + 1))
