"""Reward functions written by users, in the calling conventions of verl, TRL and OpenRLHF.

    compute_score(data_source, solution_str, ground_truth, extra_info)
        verl. One sample per call. Returns a number, or a dict with "score", optionally "acc", and values to log.
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)
        verl, batched. Returns a list of such results.
    f(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns)
        TRL. Returns a list of numbers; None means that the function does not apply to that sample.
    reward_func(queries, prompts, labels)
        OpenRLHF. Returns a tensor or list, or a dict with "rewards", optionally "scores" and "extra_logs".

The convention is recognised by one parameter: `solution_str`, `solution_strs`, `completions` or `queries`. A function receives the
parameters above that it names, or all of them if it has `**kwargs`. It may be `async`. Its other parameters are set by the options of
the reward part.

`**columns` are the columns of the row. `answer`, `ground_truth`, `data_source` and `truncated` are added for rows that have no column
of that name. A column of the row itself is never replaced.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish.config.errors import UserError
from burnish.config.plugins import check_options, load_plugin
from burnish.rewards.score_types import PartResult, ScoreRequest

if TYPE_CHECKING:
    import asyncio

    from burnish.data.row import Row

ANSWER_COLUMNS = ("answer", "ground_truth")
"""Columns that are available for every row with an expected answer."""
ROW_COLUMNS = (*ANSWER_COLUMNS, "data_source", "truncated")
"""Columns that are added for a row that has no column of that name."""
MAX_LOGGED_CHARS = 4_000
"""Logged texts are cut to this length, because they are sent and stored with every sample."""


class Convention(NamedTuple):
    """The calling convention of a reward function."""

    name: str
    marker: str
    """The parameter that the convention is recognised by."""
    arguments: tuple[str, ...]
    """The parameters that burnish passes."""
    signature: str
    is_batch: bool = True
    has_columns: bool = False
    """Whether the function may also name columns of the row."""


VERL = Convention(
    "verl",
    "solution_str",
    ("data_source", "solution_str", "ground_truth", "extra_info"),
    "compute_score(data_source, solution_str, ground_truth, extra_info) -> float or dict with 'score' (verl)",
    is_batch=False,
)
VERL_BATCH = Convention(
    "verl, batched",
    "solution_strs",
    ("data_sources", "solution_strs", "ground_truths", "extra_infos"),
    "compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> list of float or dict with 'score' (verl, batched)",
)
TRL = Convention(
    "TRL",
    "completions",
    ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    "f(prompts, completions, **columns) -> list of float (TRL)",
    has_columns=True,
)
OPENRLHF = Convention(
    "OpenRLHF",
    "queries",
    ("queries", "prompts", "labels"),
    "reward_func(queries, prompts, labels) -> tensor, list, or dict with 'rewards' (OpenRLHF)",
    has_columns=True,
)
CONVENTIONS = (VERL, VERL_BATCH, TRL, OPENRLHF)


class TrlTrainerState(NamedTuple):
    """The fields of TRL's `trainer_state` that a reward may use. The defaults, a finished run of one step, apply outside of training."""

    global_step: int = 1
    """Completed steps: 0 while the first step is sampled."""
    max_steps: int = 1
    """Total steps of the run."""


class UserScorer(NamedTuple):
    """A loaded reward function with its calling convention."""

    function: Callable[..., Any]
    convention: Convention
    parameters: frozenset[str]
    """The names of its parameters."""
    has_kwargs: bool = False

    @property
    def is_batch(self) -> bool:
        return self.convention.is_batch

    def wants(self, name: str) -> bool:
        """Whether the function takes an argument of this name."""
        return self.has_kwargs or name in self.parameters

    @property
    def wants_tokens(self) -> bool:
        """Whether the function takes the token ids of completions."""
        return self.convention is TRL and self.wants("completion_ids")


# --- loading ---------------------------------------------------------------------------------------------------------


def load_user_scorer(spec: str, base: Path | None, options: Mapping[str, Any], where: str) -> UserScorer:
    """Load the function that a plug-in string names, recognise its convention and check its options."""
    function = load_plugin(spec, base)
    if not callable(function):
        raise UserError(f"{where}: {spec!r} is a {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    convention = next((c for c in CONVENTIONS if c.marker in names), None)
    if convention is None:
        expected = "\n  ".join(c.signature for c in CONVENTIONS)
        raise UserError(
            f"{where}: the parameters of {spec!r} ({', '.join(names)}) match no known convention; expected one of\n  {expected}"
        )
    scorer = UserScorer(function, convention, frozenset(names), any(p.kind is p.VAR_KEYWORD for p in parameters))
    for key in options:
        if key in convention.arguments:
            raise UserError(f"{where}: burnish passes {key!r} to the function, so it cannot be an option; remove it")
    check_options(function, options, where)
    if not convention.has_columns and (missing := _required_parameters(function, convention.arguments, options)):
        raise UserError(
            f"{where}: {spec!r} has a required parameter {missing[0]!r} that the {convention.name} convention does not pass "
            f"(it passes {', '.join(convention.arguments)}); set it in the part's options"
        )
    return scorer


def required_columns(scorer: UserScorer, options: Mapping[str, Any]) -> list[str]:
    """The columns that a row must have for this function."""
    if not scorer.convention.has_columns:
        return []
    return _required_parameters(scorer.function, (*scorer.convention.arguments, "data_source", "truncated"), options)


def reserved_columns(scorer: UserScorer) -> list[str]:
    """Names that a column of a row must not have, because the function receives something else under them."""
    return [name for name in scorer.convention.arguments if scorer.convention.has_columns and scorer.wants(name)]


def _required_parameters(function: Callable[..., Any], given: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Parameters without a default that neither burnish nor the options set."""
    parameters = inspect.signature(function).parameters.values()
    required = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in required if p.name not in given and p.name not in options]


# --- calling ---------------------------------------------------------------------------------------------------------


def call_user_scorer(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int = 0
) -> list[PartResult]:
    """Call the function once. For a convention with one sample per call, `requests` has one element."""
    call = {VERL: _score_single, VERL_BATCH: _score_verl_batch, TRL: _score_trl, OPENRLHF: _score_openrlhf}
    return call[scorer.convention](scorer, requests, options, max_steps)


def _call_function(scorer: UserScorer, table: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """Call the function with the arguments it takes. An option replaces a column of the same name."""
    arguments = {name: value for name, value in table.items() if scorer.wants(name) and name not in options}
    returned = scorer.function(**arguments, **options)
    return _event_loop().run_until_complete(returned) if inspect.isawaitable(returned) else returned


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One event loop for the whole process, because a client kept in a user's module is bound to the loop it was created in."""
    import asyncio  # imported late: a quarter of a worker's import time, and few functions are async

    return asyncio.new_event_loop()


def row_value(request: ScoreRequest | Row, name: str) -> Any:
    """The value of one of `ROW_COLUMNS`: the row's own column if it is not null, otherwise the field of the request.

    Keys of verl's `extra_info` do not count as columns: `answer` in there is often a worked solution, not the ground truth.
    """
    if request.extra.get(name) is not None and name not in request.nested:
        return request.extra[name]
    return getattr(request, "answer" if name in ANSWER_COLUMNS else name)


def _score_single(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int
) -> list[PartResult]:
    """verl: one sample per call."""
    return [
        _verl_result(_call_function(scorer, _verl_arguments(request), options), "the score") for request in requests
    ]


def _verl_arguments(request: ScoreRequest) -> dict[str, Any]:
    return {
        "data_source": request.data_source,
        "solution_str": request.completion,
        "ground_truth": row_value(request, "ground_truth"),
        "extra_info": {"truncated": request.truncated, **request.extra},
    }


def _score_verl_batch(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int
) -> list[PartResult]:
    """verl, batched: the same arguments as lists, under plural names."""
    rows = [_verl_arguments(request) for request in requests]
    names = zip(VERL_BATCH.arguments, VERL.arguments, strict=True)
    table = {plural: [row[singular] for row in rows] for plural, singular in names}
    returned = _one_per_sample(_call_function(scorer, table, options), len(requests), "scores")
    return [_verl_result(value, f"score {i}") for i, value in enumerate(returned)]


def _verl_result(returned: Any, what: str) -> PartResult:
    """Parse a result in verl's form: a number, or a dict with "score", optionally "acc", and values to log."""
    if not isinstance(returned, Mapping):
        return PartResult(_finite_number(returned, what), accuracy_from_bool(returned))
    if "score" not in returned:
        raise ValueError(f"the returned dict has no 'score'; its keys: {', '.join(map(repr, returned)) or 'none'}")
    others = {str(key): value for key, value in returned.items() if key not in ("score", "acc")}
    accuracy = returned.get("acc", accuracy_from_bool(returned["score"]))
    return PartResult(
        _finite_number(returned["score"], "'score'"),
        None if accuracy is None else _fraction(accuracy, "'acc'"),
        {key: float(value) for key, value in others.items() if _is_number(value)},
        extra={key: _loggable_value(value) for key, value in others.items() if not _is_number(value)},
    )


def requested_columns(scorer: UserScorer, requests: Sequence[ScoreRequest]) -> dict[str, list[Any]]:
    """The row columns that the function takes. A column that no row has is left out, so that its default applies."""
    present = dict.fromkeys(key for r in requests for key in r.extra)
    made = {name: [row_value(r, name) for r in requests] for name in ROW_COLUMNS}
    made = {name: values for name, values in made.items() if name in present or any(v is not None for v in values)}
    table = {name: [r.extra.get(name) for r in requests] for name in present} | made
    return {name: values for name, values in table.items() if scorer.wants(name)}


@dataclass
class _TrlLogs:
    """Collects what a TRL function logs during one call."""

    count: int
    numbers: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: Any) -> None:
        """Log a number for the whole call."""
        if not _is_number(value):
            raise ValueError(f"log_metric({name!r}, ...) takes a number, got {value!r}")
        self.numbers[str(name)] = float(value)

    def log_extra(self, column: str, values: Any) -> None:
        """Log one value per sample."""
        self.extra[str(column)] = [
            _loggable_value(value) for value in _one_per_sample(values, self.count, f"values of {column!r}")
        ]


def _score_trl(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int
) -> list[PartResult]:
    """TRL: completions of chat prompts are message lists; a result of None means that the function does not apply to the sample."""
    logs = _TrlLogs(len(requests))
    table = requested_columns(scorer, requests) | {
        "prompts": [r.prompt for r in requests],
        "completions": [
            r.completion if isinstance(r.prompt, str) else [{"role": "assistant", "content": r.completion}]
            for r in requests
        ],
        "completion_ids": [_completion_ids(r) for r in requests] if scorer.wants_tokens else [],
        "trainer_state": TrlTrainerState(requests[0].step - 1, max_steps) if max_steps else TrlTrainerState(),
        "log_extra": logs.log_extra,
        "log_metric": logs.log_metric,
    }
    returned = _one_per_sample(_call_function(scorer, table, options), len(requests), "scores")
    return [
        PartResult(
            None if value is None else _finite_number(value, f"score {i}"),
            accuracy_from_bool(value),
            logs.numbers,
            extra={column: values[i] for column, values in logs.extra.items()},
        )
        for i, value in enumerate(returned)
    ]


def _completion_ids(request: ScoreRequest) -> list[int]:
    """Token ids of the completion: those behind the prompt."""
    return [] if request.tokens is None else [int(token) for token in request.tokens][request.num_prompt :]


def _score_openrlhf(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int
) -> list[PartResult]:
    """OpenRLHF: its `scores`, which it filters prompts by, become the accuracy, clamped to 0..1."""
    from burnish.data.template import prompt_as_text

    prompts = [prompt_as_text(r.prompt) for r in requests]
    table = requested_columns(scorer, requests) | {
        "queries": [prompt + r.completion for prompt, r in zip(prompts, requests, strict=True)],
        "prompts": prompts,
        "labels": [row_value(r, "ground_truth") for r in requests],
    }
    returned = _call_function(scorer, table, options)
    if not isinstance(returned, Mapping):
        returned = {"rewards": returned}
    if "rewards" not in returned:
        raise ValueError(f"the returned dict has no 'rewards'; its keys: {', '.join(map(repr, returned)) or 'none'}")
    rewards = _one_per_sample(returned["rewards"], len(requests), "rewards")
    scores = None if returned.get("scores") is None else _one_per_sample(returned["scores"], len(requests), "scores")
    logged: dict[str, list[Any]] = {}
    for name, values in (returned.get("extra_logs") or {}).items():
        logged[str(name)] = (
            [values] * len(requests)
            if _is_number(values)
            else _one_per_sample(values, len(requests), f"values of {name!r}")
        )
    return [
        PartResult(
            _finite_number(value, f"reward {i}"),
            accuracy_from_bool(value)
            if scores is None
            else min(1.0, max(0.0, _finite_number(scores[i], f"score {i}"))),
            {name: float(values[i]) for name, values in logged.items() if _is_number(values[i])},
            extra={name: _loggable_value(values[i]) for name, values in logged.items() if not _is_number(values[i])},
        )
        for i, value in enumerate(rewards)
    ]


# --- checking returned values ----------------------------------------------------------------------------------------


def _one_per_sample(values: Any, count: int, what: str) -> list[Any]:
    """Check that a list, array or tensor has one value per sample, and return it as a list."""
    if (
        not hasattr(values, "__len__")
        or isinstance(values, str | bytes | Mapping)
        or getattr(values, "shape", (1,)) == ()
    ):
        raise ValueError(f"expected a list of {count} {what}, one per completion; got {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"expected a list of {count} {what}, one per completion; got {len(values)}")
    return list(values)


def _is_number(value: Any) -> bool:
    """Whether a value is a number: Python's, numpy's, or a tensor without dimensions (checked without importing torch)."""
    is_scalar_array = getattr(value, "shape", None) == () and not isinstance(value, str | bytes)
    return isinstance(value, numbers.Real) or is_scalar_array


def _fraction(value: Any, what: str) -> float:
    share = _finite_number(value, what)
    if not 0 <= share <= 1:
        raise ValueError(
            f"{what} is the accuracy of an answer and must be from 0 to 1, got {share:g}; log other numbers under another name"
        )
    return share


def accuracy_from_bool(value: Any) -> float | None:
    """1.0 or 0.0 for a boolean (Python's, numpy's or a tensor's), which states right or wrong; None for any other value."""
    is_boolean = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    return float(value) if is_boolean else None


def _finite_number(value: Any, what: str) -> float:
    if not _is_number(value):
        raise ValueError(f"{what} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    return number


def _loggable_value(value: Any) -> Any:
    """Convert a value to what can be sent and stored: a number, a boolean, None, or a text."""
    if value is None or isinstance(value, bool):
        return value
    if _is_number(value):
        return float(value)
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_LOGGED_CHARS else text[:MAX_LOGGED_CHARS] + "…"
