"""What goes into scoring and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_REWARD = 1e9
"""The largest size of a reward, of a part of it and of what a turn earns.

Statistics of rewards add up squares, partly in float32, which ends at 3e38: squares of 1e18 leave room for any number of samples,
for returns summed over tokens and for a critic's squared errors. Past that a standard deviation becomes inf and advantages 0.
"""


def reward_problem(value: float) -> str | None:
    """What is wrong with a number as a reward; None if nothing is."""
    if math.isfinite(value) and abs(value) <= MAX_REWARD:
        return None
    return f"{value:g} is no reward that can be computed with: it must be finite and at most {MAX_REWARD:g} in size; scale it down"


def is_missing(answer: Any) -> bool:
    """Whether a row has no expected answer: null, the NaN that a table has in place of null, blank text, or a list of such."""
    if isinstance(answer, list | tuple):
        return any(_is_null(one) for one in answer) or all(is_missing(one) for one in answer)
    return _is_null(answer) or (isinstance(answer, str) and not answer.strip())


def _is_null(answer: Any) -> bool:
    return answer is None or (isinstance(answer, float) and answer != answer)


def require_answer(answer: Any) -> None:
    """ValueError for a missing answer; without this check the completion `None` would equal `str(None)`."""
    if is_missing(answer):
        raise ValueError(
            "the row has no expected answer to compare with: name its column with `answer_key` of the row's data source, "
            "such as answer_key: solution"
        )


@dataclass(frozen=True)
class ScoreRequest:
    """One completion to be scored."""

    id: str
    prompt: str | list[dict[str, Any]]  # text, or chat messages
    completion: str
    data_source: str
    answer: Any  # the expected answer; a task or a plug-in may need none
    extra: dict[str, Any]  # the row's other columns
    truncated: bool = False  # the completion stopped at its length limit; plug-ins see it
    nested: tuple[str, ...] = ()  # keys of extra that stood inside verl's extra_info: they are no columns of the row
    step: int = 0  # the training step it was drawn for, counted from 1; 0 outside of training
    tokens: Iterable[int] | None = field(default=None, compare=False)
    """What the policy read and wrote, for a model with the same tokenizer and functions that ask for tokens; others are not sent them."""
    written: Iterable[bool] | None = field(default=None, compare=False)
    """Which of the tokens it wrote."""


@dataclass(frozen=True)
class Score:
    """The verdict on one request.

    `reward` is None when the scorer itself failed twice: the sample then leaves the loss and the group statistics,
    and `error` holds the traceback, the part and the text that caused it. A call past its deadline is no failure: its
    part is 0.0 and `timed_out` says so.
    """

    id: str
    reward: float | None
    accuracy: (
        float | None
    )  # 1 correct, 0 wrong; None too where no part tells the two apart (`format`, a graded function)
    parts: dict[str, float] = field(default_factory=dict)  # raw values by part, before weights
    timed_out: bool = False
    error: str | None = None
    details: dict[str, str] = field(default_factory=dict)  # what a part has to say about its value, by part
    steps: list[tuple[int, float]] = field(default_factory=list)  # what of the reward belongs to tokens before the last
    extra: dict[str, Any] = field(default_factory=dict)  # what functions log beside the sample, by part and column


class PartResult(NamedTuple):
    """What one part says of one request."""

    value: float | None  # None: a batch function says that it does not apply to this row (TRL's convention)
    accuracy: float | None = None  # 1 correct, 0 wrong; None: `parts.accuracy_of` decides by the value
    parts: Mapping[str, float] = MappingProxyType({})  # further numbers to log
    details: str = ""  # why, for whoever looks at the sample
    timed_out: bool = False  # a program of the answer did not come to an end
    steps: tuple[tuple[int, float], ...] = ()  # the tokens that parts of the value belong to, and those parts
    extra: Mapping[str, Any] = MappingProxyType({})  # texts, numbers and truth values to show beside the sample


class ScoringFailure(NamedTuple):
    """That a part could not score a request: it is left without a reward, and counted."""

    error: str


LocalScorer = Callable[[Sequence[ScoreRequest]], Sequence[PartResult | ScoringFailure]]
"""A scorer made elsewhere (a model, which needs a device) that scores many requests at once, in the caller's process."""


class PartSpec(NamedTuple):
    """A part as a worker process has to load it."""

    name: str  # a verifier's name, path/to/file.py:function or package.module:function
    options: dict[str, Any]
