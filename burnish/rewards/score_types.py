"""Data types of scoring: the request, the result of one reward part, and the combined score."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

MAX_REWARD = 1e9
"""The largest magnitude of a reward, of one part of it, and of the reward of one turn.

Reward statistics sum squares, partly in float32, whose maximum is 3e38. Squares of at most 1e18 leave room for any number of samples,
for returns summed over tokens and for a critic's squared errors. Beyond that a standard deviation becomes inf and advantages become 0.
"""


def reward_problem(value: float) -> str | None:
    """Why a number cannot be a reward; None if it can."""
    if math.isfinite(value) and abs(value) <= MAX_REWARD:
        return None
    return f"{value:g} is not a usable reward: it must be finite and at most {MAX_REWARD:g} in magnitude; scale it down"


def is_missing(answer: Any) -> bool:
    """Whether an expected answer is missing: null, NaN (which tables use for null), blank text, or a list of such values."""
    if isinstance(answer, list | tuple):
        return any(_is_null(one) for one in answer) or all(is_missing(one) for one in answer)
    return _is_null(answer) or (isinstance(answer, str) and not answer.strip())


def _is_null(answer: Any) -> bool:
    return answer is None or (isinstance(answer, float) and answer != answer)


def require_answer(answer: Any) -> None:
    """Raise ValueError for a missing answer. Without this check the completion "None" would equal `str(None)`."""
    if is_missing(answer):
        raise ValueError(
            "the row has no expected answer to compare with: name the column that holds it with `answer_key` of the data source, "
            "such as answer_key: solution"
        )


@dataclass(frozen=True)
class ScoreRequest:
    """One completion to score."""

    id: str
    prompt: str | list[dict[str, Any]]  # text or chat messages
    completion: str
    data_source: str
    answer: Any  # the expected answer; some tasks and plug-ins need none
    extra: dict[str, Any]  # the row's other columns
    truncated: bool = False  # whether the completion was cut at its length limit; plug-ins see it
    nested: tuple[str, ...] = ()  # keys of `extra` that came from verl's extra_info; they are not columns of the row
    step: int = 0  # the training step, counted from 1; 0 outside of training
    style: str | None = None  # verl's reward_model.style: `model` for a row that a reward model or a judge scores
    tokens: Iterable[int] | None = field(default=None, compare=False)
    """All tokens of the sequence, prompt included. Sent only to reward models and to functions that take token ids."""
    written: Iterable[bool] | None = field(default=None, compare=False)
    """Which of the tokens the policy wrote."""
    num_prompt: int = 0
    """How many of the tokens are the prompt; `completion` is the text of the others."""


@dataclass(frozen=True)
class Score:
    """The combined score of one request.

    `reward` is None if a scorer failed twice. The sample is then excluded from the loss and the group statistics, and `error` names the
    part, the traceback and the completion. A call past its deadline is not a failure: its part is 0.0 and `timed_out` is true.
    """

    id: str
    reward: float | None
    accuracy: float | None
    """1 correct, 0 wrong; None if no part tells right from wrong (`format`, a graded function)."""
    parts: dict[str, float] = field(default_factory=dict)  # values by part, before weights
    timed_out: bool = False
    error: str | None = None
    details: dict[str, str] = field(default_factory=dict)  # explanations of the values, by part
    steps: list[tuple[int, float]] = field(default_factory=list)  # (token position, reward) before the last token
    extra: dict[str, Any] = field(default_factory=dict)  # values that functions log with the sample, by "part/column"
    num_tokens: int | None = field(default=None, compare=False)
    """Tokens that models read and wrote for the score; None if a part does not say, or failed."""


class PartResult(NamedTuple):
    """The result of one reward part for one request."""

    value: float | None  # None: the function does not apply to this row (TRL's convention)
    accuracy: float | None = None  # 1 correct, 0 wrong; None: `reward_parts.accuracy_of` decides by the value
    parts: Mapping[str, float] = MappingProxyType({})  # further numbers to log
    details: str = ""  # an explanation to show with the sample
    timed_out: bool = False  # a program in the completion ran out of time
    steps: tuple[
        tuple[int, float], ...
    ] = ()  # (token position, value) for shares of the value given before the last token
    extra: Mapping[str, Any] = MappingProxyType({})  # texts, numbers and booleans to log with the sample
    num_tokens: int | None = None  # tokens that a model read and wrote for the value; None: not known


class ScoringFailure(NamedTuple):
    """A part could not score a request. The sample has no reward, and the failure is counted."""

    error: str


LocalScorer = Callable[[Sequence[ScoreRequest]], Sequence[PartResult | ScoringFailure]]
"""A scorer that runs in the caller's process, such as a reward model on a device. It scores many requests at once."""


class PartSpec(NamedTuple):
    """What a worker process needs to load a reward part."""

    name: str  # name of a verifier, path/to/file.py:function or package.module:function
    options: dict[str, Any]
