"""Which training questions are in a test set: the same words exactly, or a run of words in common.

Texts are compared as words, folded to one case and without punctuation. A common run of 13 words is the mark of
contamination that GPT-3's authors used (Brown et al. 2020, 2005.14165, appendix C).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

NGRAM = 13
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Match:
    """A training question with what it shares with a test question; `words` is None where they are the same."""

    train: int
    test: int
    words: str | None


def words_of(text: str) -> list[str]:
    """The words of a text, as they are compared."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def find_overlap(train: Sequence[str], test: Sequence[str], ngram: int = NGRAM) -> list[Match]:
    """The training questions that overlap a test question, each with the first it does, by their indices."""
    whole: dict[str, int] = {}
    runs: dict[str, int] = {}
    for index, text in enumerate(test):
        words = words_of(text)
        whole.setdefault(" ".join(words), index)
        for run in runs_of(words, ngram):
            runs.setdefault(run, index)
    matches: list[Match] = []
    for index, text in enumerate(train):
        words = words_of(text)
        same = whole.get(" ".join(words))
        if same is not None:
            matches.append(Match(index, same, None))
            continue
        shared = next((run for run in runs_of(words, ngram) if run in runs), None)
        if shared is not None:
            matches.append(Match(index, runs[shared], shared))
    return matches


def runs_of(words: Sequence[str], length: int) -> Iterator[str]:
    """Every run of so many words in a row."""
    return (" ".join(words[at : at + length]) for at in range(len(words) - length + 1))


def num_repeated(texts: Sequence[str]) -> int:
    """How many texts say the same as one before them."""
    return len(texts) - len({" ".join(words_of(text)) for text in texts})
