"""A user's own reward function, in one of the conventions of the field.

    compute_score(data_source, solution_str, ground_truth, extra_info)          verl: one sample a call; a number, or a dict with
                                                                                "score", perhaps "acc", and what to log
    compute_score(data_sources, solution_strs, ground_truths, extra_infos)      verl, batched: a list of these
    f(prompts, completions, completion_ids, trainer_state, log_extra,
      log_metric, **columns)                                                    TRL: a list of numbers, None where it does not apply
    reward_func(queries, prompts, labels)                                       OpenRLHF: a tensor or list, or a dict with "rewards",
                                                                                perhaps "scores" and "extra_logs"

A function gets those of these parameters that it names, or all with `**kwargs`. It may be `async`. Parameters beyond these are
options of the reward part. The convention is told by one parameter: `solution_str`, `solution_strs`, `completions` or `queries`.

Columns are the columns of the row. `answer`, `ground_truth`, `data_source` and `truncated` are there for rows without such a column:
what the row says itself is never replaced.
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
"""Columns that every row with an expected answer has."""
ROW_COLUMNS = (*ANSWER_COLUMNS, "data_source", "truncated")
"""Columns that are made for a row that has none of that name."""
MAX_LOGGED_CHARS = 4_000
"""Longer texts of `log_extra` are cut: they travel with every sample."""


class Convention(NamedTuple):
    """How a function wants to be called."""

    name: str
    told_by: str
    """The parameter it is recognised by."""
    gives: tuple[str, ...]
    """The parameters that are filled in."""
    signature: str
    is_batch: bool = True
    has_columns: bool = False
    """Whether it may name columns of the row."""


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
    """What TRL calls the trainer's state, as far as a reward may go by it. Outside of training it is that of a finished run of one step."""

    global_step: int = 1
    """Steps that are complete: 0 while the first one is sampled."""
    max_steps: int = 1
    """Steps of the run."""


class UserScorer(NamedTuple):
    """A loaded function and how it wants to be called."""

    function: Callable[..., Any]
    convention: Convention
    takes: frozenset[str]
    """The names of its parameters."""
    takes_any: bool = False
    """Whether it has `**kwargs`."""

    @property
    def is_batch(self) -> bool:
        return self.convention.is_batch

    def wants(self, name: str) -> bool:
        return self.takes_any or name in self.takes

    @property
    def wants_tokens(self) -> bool:
        """Whether it is given the tokens of completions."""
        return self.convention is TRL and self.wants("completion_ids")


# --- loading ---------------------------------------------------------------------------------------------------------


def load_user_scorer(spec: str, base: Path | None, options: Mapping[str, Any], where: str) -> UserScorer:
    """The function that a plug-in names, with its convention recognised from its signature and its options checked."""
    function = load_plugin(spec, base)
    if not callable(function):
        raise UserError(f"{where}: {spec!r} is a {type(function).__name__}, not a function")
    parameters = inspect.signature(function).parameters.values()
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    convention = next((c for c in CONVENTIONS if c.told_by in takes), None)
    if convention is None:
        expected = "\n  ".join(c.signature for c in CONVENTIONS)
        raise UserError(f"{where}: {spec!r} has parameters ({', '.join(takes)}); expected one of\n  {expected}")
    scorer = UserScorer(function, convention, frozenset(takes), any(p.kind is p.VAR_KEYWORD for p in parameters))
    for key in options:
        if key in convention.gives:
            raise UserError(f"{where}: option {key!r} is filled in by the program; remove it")
    check_options(function, options, where)
    if not convention.has_columns and (missing := _required_parameters(function, convention.gives, options)):
        raise UserError(
            f"{where}: {spec!r} needs the parameter {missing[0]!r}, which {convention.name} does not give "
            f"({', '.join(convention.gives)}); set it in the part's options"
        )
    return scorer


def required_columns(scorer: UserScorer, options: Mapping[str, Any]) -> list[str]:
    """The columns of a row that a function cannot do without."""
    if not scorer.convention.has_columns:
        return []
    return _required_parameters(scorer.function, (*scorer.convention.gives, "data_source", "truncated"), options)


def reserved_columns(scorer: UserScorer) -> list[str]:
    """The names that a column of a row must not have, because the function gets something else under them."""
    return [name for name in scorer.convention.gives if scorer.convention.has_columns and scorer.wants(name)]


def _required_parameters(function: Callable[..., Any], given: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """Parameters without a default that nothing fills in."""
    parameters = inspect.signature(function).parameters.values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [p.name for p in needed if p.name not in given and p.name not in options]


# --- calling ---------------------------------------------------------------------------------------------------------


def call_user_scorer(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int = 0
) -> list[PartResult]:
    """One call of a function; of one that takes one sample a call, `requests` is that one."""
    call = {VERL: _score_single, VERL_BATCH: _score_verl_batch, TRL: _score_trl, OPENRLHF: _score_openrlhf}
    return call[scorer.convention](scorer, requests, options, max_steps)


def _call_function(scorer: UserScorer, table: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """What the function returns for the arguments it takes; an option stands in place of a column of its name."""
    arguments = {name: value for name, value in table.items() if scorer.wants(name) and name not in options}
    returned = scorer.function(**arguments, **options)
    return _event_loop().run_until_complete(returned) if inspect.isawaitable(returned) else returned


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One event loop for the life of the process: clients kept in a user's module belong to the loop they were made in."""
    import asyncio  # a quarter of what a worker imports, and few functions are async

    return asyncio.new_event_loop()


def row_value(request: ScoreRequest | Row, name: str) -> Any:
    """A column of the row where it has one that is not null, or what every request has under that name (`ROW_COLUMNS`).

    Keys of verl's `extra_info` are no columns: there `answer` is often a worked solution, and `ground_truth` stands elsewhere.
    """
    if request.extra.get(name) is not None and name not in request.nested:
        return request.extra[name]
    return getattr(request, "answer" if name in ANSWER_COLUMNS else name)


def _score_single(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int
) -> list[PartResult]:
    """verl's convention, one sample a call."""
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
    """verl's convention for many samples a call: the same names in the plural."""
    rows = [_verl_arguments(request) for request in requests]
    names = zip(VERL_BATCH.gives, VERL.gives, strict=True)
    table = {plural: [row[singular] for row in rows] for plural, singular in names}
    returned = _one_per_sample(_call_function(scorer, table, options), len(requests), "scores")
    return [_verl_result(value, f"score {i}") for i, value in enumerate(returned)]


def _verl_result(returned: Any, what: str) -> PartResult:
    """A result in verl's form: a number, or a dict with "score", perhaps "acc", numbers to log and other things to show."""
    if not isinstance(returned, Mapping):
        return PartResult(_finite_number(returned, what), accuracy_from_bool(returned))
    if "score" not in returned:
        raise ValueError(f"the dict returned has no 'score', only {', '.join(map(repr, returned)) or 'nothing'}")
    others = {str(key): value for key, value in returned.items() if key not in ("score", "acc")}
    accuracy = returned.get("acc", accuracy_from_bool(returned["score"]))
    return PartResult(
        _finite_number(returned["score"], "'score'"),
        None if accuracy is None else _fraction(accuracy, "'acc'"),
        {key: float(value) for key, value in others.items() if _is_number(value)},
        extra={key: _loggable_value(value) for key, value in others.items() if not _is_number(value)},
    )


def requested_columns(scorer: UserScorer, requests: Sequence[ScoreRequest]) -> dict[str, list[Any]]:
    """The columns of the rows that a function takes; one that no row has is left out, for its default."""
    there = dict.fromkeys(key for r in requests for key in r.extra)
    made = {name: [row_value(r, name) for r in requests] for name in ROW_COLUMNS}
    made = {name: values for name, values in made.items() if name in there or any(v is not None for v in values)}
    table = {name: [r.extra.get(name) for r in requests] for name in there} | made
    return {name: values for name, values in table.items() if scorer.wants(name)}


@dataclass
class _TrlLogs:
    """What a function of TRL's convention logs in one call."""

    count: int
    numbers: dict[str, float] = field(default_factory=dict)
    extra: dict[str, list[Any]] = field(default_factory=dict)

    def log_metric(self, name: str, value: Any) -> None:
        """A number of the whole call."""
        if not _is_number(value):
            raise ValueError(f"log_metric({name!r}, ...) takes a number, got {value!r}")
        self.numbers[str(name)] = float(value)

    def log_extra(self, column: str, values: Any) -> None:
        """Something to show beside each sample."""
        self.extra[str(column)] = [
            _loggable_value(value) for value in _one_per_sample(values, self.count, f"values of {column!r}")
        ]


def _score_trl(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int
) -> list[PartResult]:
    """TRL's convention: completions to chat prompts are messages too; None means that the function does not apply to a sample."""
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
    """The tokens of a completion: from the first that the policy wrote to the end."""
    tokens = [] if request.tokens is None else [int(token) for token in request.tokens]
    written = [] if request.written is None else [bool(one) for one in request.written]
    return tokens[written.index(True) :] if True in written else []


def _score_openrlhf(
    scorer: UserScorer, requests: Sequence[ScoreRequest], options: Mapping[str, Any], max_steps: int
) -> list[PartResult]:
    """OpenRLHF's convention: `scores`, which it filters prompts by, say how right an answer is, from 0 to 1."""
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
        raise ValueError(f"the dict returned has no 'rewards', only {', '.join(map(repr, returned)) or 'nothing'}")
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


# --- what comes back -------------------------------------------------------------------------------------------------


def _one_per_sample(values: Any, count: int, what: str) -> list[Any]:
    """One value for each sample, of a list, an array or a tensor."""
    if (
        not hasattr(values, "__len__")
        or isinstance(values, str | bytes | Mapping)
        or getattr(values, "shape", (1,)) == ()
    ):
        raise ValueError(f"expected a list of {count} {what}, one a completion; got {type(values).__name__}")
    if len(values) != count:
        raise ValueError(f"expected a list of {count} {what}, one a completion; got {len(values)}")
    return list(values)


def _is_number(value: Any) -> bool:
    """Python's and numpy's numbers, and one-element tensors without importing what they come from."""
    is_scalar_array = getattr(value, "shape", None) == () and not isinstance(value, str | bytes)
    return isinstance(value, numbers.Real) or is_scalar_array


def _fraction(value: Any, what: str) -> float:
    share = _finite_number(value, what)
    if not 0 <= share <= 1:
        raise ValueError(
            f"{what} says how right an answer is, from 0 to 1, and is {share:g}; give other numbers another name"
        )
    return share


def accuracy_from_bool(value: Any) -> float | None:
    """The accuracy that a value states by its type: a truth value (Python's, numpy's or a tensor's) is a verdict, a number is none."""
    is_truth = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
    return float(value) if is_truth else None


def _finite_number(value: Any, what: str) -> float:
    if not _is_number(value):
        raise ValueError(f"{what} must be a number, got {value!r}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, got {number}")
    return number


def _loggable_value(value: Any) -> Any:
    """A value as it can be sent and written down: a number, a truth value, null, or a text."""
    if value is None or isinstance(value, bool):
        return value
    if _is_number(value):
        return float(value)
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= MAX_LOGGED_CHARS else text[:MAX_LOGGED_CHARS] + "…"
