"""The scores of an answer's steps as one number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {
        "last": lambda scores: scores[-1],
        "min": min,
        "prod": math.prod,
        "mean": lambda scores: sum(scores) / len(scores),
    }
)
"""last: the state that the answer ends in. min: no better than its worst step. prod: the chance that all steps are right. mean: of all."""


def aggregate(scores: Sequence[float], how: str) -> float:
    """One score of the scores of steps, of which there is one at least."""
    return float(AGGREGATIONS[how](scores))
