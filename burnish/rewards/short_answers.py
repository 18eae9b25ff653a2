"""Short answers to questions of knowledge, compared as words: case, punctuation and articles do not count.

The normalisation and the two measures are SQuAD's (Rajpurkar et al. 2016, 1606.05250).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any

from burnish.rewards.types import require_answer

METRICS = ("em", "f1")


def normal(text: str) -> list[str]:
    """The words of an answer, as they are compared; what has nothing else is its articles and punctuation ("The The", "!!!")."""
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split() or text.lower().split()


def token_f1(said: list[str], expected: list[str]) -> float:
    """Harmonic mean of precision and recall over words; 1 for two empty answers."""
    if not said or not expected:
        return float(said == expected)
    common = sum((Counter(said) & Counter(expected)).values())
    return 2 * common / (len(said) + len(expected))


def qa(completion: str, answer: Any, extra: Mapping[str, Any], *, metric: str = "em") -> float:
    r"""How well the `<answer>` block, the `\boxed{}` or else the whole completion matches one of the accepted answers.

    em: 1 for the same words, else 0. f1: the best share of words in common.
    """
    from burnish.rewards.verifiers import answer_block, last_boxed  # which has this one in its table

    require_answer(answer)
    accepted = [normal(str(one)) for one in (answer if isinstance(answer, list | tuple) else [answer])]
    block = answer_block(completion)
    said = normal(block if block is not None else last_boxed(completion) or completion)
    if metric == "em":
        return float(said in accepted)
    return max(token_f1(said, expected) for expected in accepted)
