"""A user's own reward function, in either of the two conventions of the field.

    compute_score(data_source, solution_str, ground_truth, extra_info)    one sample a call (verl): a float, or a dict
                                                                          with "score" and perhaps "acc" and numbers
    f(prompts, completions, **columns) -> list                            many samples a call (TRL)

Both may be `async`. Parameters beyond these are options of the reward part. Columns are the keys of the row's extra
plus `answer`, `ground_truth`, `data_source` and `truncated`; a function gets those it names, or all with `**kwargs`.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.config.errors import UserError
from burnish.config.plugins import check_options, load_plugin
from burnish.rewards.types import Result, ScoreRequest

if TYPE_CHECKING:
    import asyncio

SIGNATURES = (
    "compute_score(data_source, solution_str, ground_truth, extra_info) -> float or dict with 'score'",
    "f(prompts, completions, **columns) -> list of float",
)
SINGLE = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH = ("prompts", "completions")
ROW_COLUMNS = ("answer", "ground_truth", "data_source", "truncated")


class UserScorer(NamedTuple):
    """A loaded function and how it wants to be called."""

    function: Callable[..., Any]
    is_batch: bool


def load_scorer(spec: str, base: Path | None, options: Mapping[str, Any], where: str) -> UserScorer:
    """The function `path/to/file.py:name` with its convention recognised from its signature and its options checked."""
    function = load_plugin(spec, base)
    if not callable(function):
        raise UserError(f"{where}: {spec!r} is a {type(function).__name__}, not a function")
    named, takes_any = _parameters(function)
    if "completions" in named:
        is_batch = True
    elif all(name in named or takes_any for name in SINGLE) and "solution_str" in named:
        is_batch = False
    else:
        expected = "\n  ".join(SIGNATURES)
        raise UserError(f"{where}: {spec!r} has parameters ({', '.join(named)}); expected one of\n  {expected}")
    reserved = BATCH if is_batch else SINGLE
    for key in options:
        if key in reserved:
            raise UserError(f"{where}: option {key!r} is filled in by the program; remove it")
    check_options(function, options, where)
    return UserScorer(function, is_batch)


def _parameters(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """The names a function can be called with, and whether it has `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return named, any(p.kind is p.VAR_KEYWORD for p in parameters)


def score_single(function: Callable[..., Any], request: ScoreRequest, options: Mapping[str, Any]) -> Result:
    """One call in verl's convention."""
    returned = _finished(
        function(
            data_source=request.data_source,
            solution_str=request.completion,
            ground_truth=request.answer,
            extra_info={**request.extra, "truncated": request.truncated},
            **options,
        )
    )
    if not isinstance(returned, Mapping):
        return Result(_finite(returned, "the score"))
    if "score" not in returned:
        raise ValueError(f"the dict returned has no 'score', only {', '.join(map(repr, returned)) or 'nothing'}")
    logged = {str(key): float(value) for key, value in returned.items() if _is_number(value)}
    accuracy = returned.get("acc")
    return Result(
        _finite(returned["score"], "'score'"),
        None if accuracy is None else _finite(accuracy, "'acc'"),
        {key: value for key, value in logged.items() if key not in ("score", "acc")},
    )


def score_batch(
    function: Callable[..., Any], requests: Sequence[ScoreRequest], options: Mapping[str, Any]
) -> list[Result]:
    """One call in TRL's convention; None in the list means that the function does not apply to that row."""
    returned = _finished(function(**columns(function, requests), **options))
    if not hasattr(returned, "__len__") or len(returned) != len(requests):
        shown = len(returned) if hasattr(returned, "__len__") else type(returned).__name__
        raise ValueError(f"expected a list of {len(requests)} scores, one a completion; got {shown}")
    return [Result(None if value is None else _finite(value, f"score {i}")) for i, value in enumerate(returned)]


def columns(function: Callable[..., Any], requests: Sequence[ScoreRequest]) -> dict[str, list[Any]]:
    """The keyword arguments of a batch function: as TRL has it, completions to chat prompts are messages too."""
    keys = dict.fromkeys(key for r in requests for key in r.extra)
    table: dict[str, list[Any]] = {key: [r.extra.get(key) for r in requests] for key in keys}
    table |= {
        "prompts": [r.prompt for r in requests],
        "completions": [
            r.completion if isinstance(r.prompt, str) else [{"role": "assistant", "content": r.completion}]
            for r in requests
        ],
        "answer": [r.answer for r in requests],
        "ground_truth": [r.answer for r in requests],
        "data_source": [r.data_source for r in requests],
        "truncated": [r.truncated for r in requests],
    }
    named, takes_any = _parameters(function)
    return table if takes_any else {key: column for key, column in table.items() if key in named}


def required_columns(function: Callable[..., Any], options: Mapping[str, Any]) -> list[str]:
    """The columns of a row's extra that a batch function cannot do without."""
    parameters = inspect.signature(function).parameters.values()
    given = {*BATCH, *ROW_COLUMNS, *options}
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in needed if p.name not in given]


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of the process: clients kept in a user's module belong to the loop they were made in."""
    import asyncio  # a quarter of what a worker imports, and few functions are async

    return asyncio.new_event_loop()


def _finished(returned: Any) -> Any:
    if inspect.iscoroutine(returned):
        return _loop().run_until_complete(returned)
    return returned


def _is_number(value: Any) -> bool:
    """Python's and numpy's numbers, and one-element tensors without importing what they come from."""
    is_scalar_array = getattr(value, "shape", None) == () and not isinstance(value, str | bytes)
    return isinstance(value, numbers.Real) or is_scalar_array


def _finite(value: Any, what: str) -> float:
    if not _is_number(value):
        raise ValueError(f"{what} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    return number
