"""Scores completions: the reward is the weighted sum of the reward parts that apply to a row.

    with Rewards(config.reward) as rewards:
        scores = rewards.score(requests)        # or submit(...) as completions finish, and poll(...)

Built-in verifiers run in killable worker processes without network. Functions of users run in worker processes of their own, which
keep the network. A judge asks its endpoint, or an attached engine, from threads of this process. A reward model is an attached
callable; it scores all waiting requests at the next `poll`. Values depend on the requests alone, never on the number of workers or on
what else is being scored.
"""

from __future__ import annotations

import logging
import pickle
import queue
import time
import traceback
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, cast

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.data.row import VERL_MODEL_STYLE, Row
from burnish.data.tasks.proofs import theorem_of_row
from burnish.rewards.code_prediction import expected_output, prediction_tests
from burnish.rewards.code_reward import check_sandbox, parse_tests
from burnish.rewards.judge_endpoint import JudgeBackend
from burnish.rewards.judge_options import JudgeOptions
from burnish.rewards.lean_reward import parse_statement
from burnish.rewards.llm_judge import Judge
from burnish.rewards.math_answers import read_answer_set
from burnish.rewards.pair_verdicts import check_verdict
from burnish.rewards.reward_parts import (
    JUDGE,
    MODEL,
    CheckedPart,
    PendingScore,
    check_parts,
    check_row,
    combine_parts,
    parts_without_rules,
)
from burnish.rewards.score_types import (
    LocalScorer,
    PartResult,
    PartSpec,
    Score,
    ScoreRequest,
    ScoringFailure,
    is_missing,
)
from burnish.rewards.user_rewards import (
    ANSWER_COLUMNS,
    OPENRLHF,
    ROW_COLUMNS,
    VERL,
    VERL_BATCH,
    Convention,
    reserved_columns,
    row_value,
)
from burnish.rewards.worker import WorkerSetup
from burnish.rewards.worker_pool import CallOutcome, OutcomeQueue, ScoringCall, WorkerPool

logger = logging.getLogger(__name__)

MAX_REQUESTS_PER_CALL = 64
"""Most requests in one call of a batch function."""
SHOWN_CHARS = 400
"""How much of a completion an error shows."""
ANSWER_PARAMETER: dict[Convention, str] = {VERL: "ground_truth", VERL_BATCH: "ground_truths", OPENRLHF: "labels"}
"""The parameter for the expected answer in each convention that passes it even where a row has none."""
RUN_PROGRAMS = frozenset({"code", "code_input", "lean"})
"""Verifiers that run programs in the sandbox."""
ANSWER_CHECKS: dict[str, Callable[[Any], object]] = {
    "answer_set": read_answer_set,
    "code": parse_tests,
    "code_input": prediction_tests,
    "code_output": expected_output,
    "lean": parse_statement,
    "proof": theorem_of_row,
    "rm_r1": check_verdict,
}
"""What raises ValueError for a row's answer that a verifier cannot use."""


class ScoringPool(Protocol):
    """Computes calls and puts their outcomes into a queue; `WorkerPool` documents each method."""

    counters: dict[str, int]

    def submit(self, calls: Sequence[ScoringCall]) -> None: ...

    def close(self) -> None: ...


class ScoreQueue(Protocol):
    """Takes requests and returns their scores. `Rewards` is one, and `Rewards.apart` gives another."""

    @property
    def pending(self) -> int: ...

    def submit(self, requests: Sequence[ScoreRequest]) -> None: ...

    def poll(self, timeout_s: float | None = None) -> list[Score]: ...


class Rewards:
    """Scores requests in the background. All methods must be called from one thread. Close it, or use it in `with`."""

    def __init__(self, config: Reward, base: Path | None = None, is_remote: bool = False, max_steps: int = 0) -> None:
        """With `is_remote` no process is started here, and `use_pool` must be called before anything is submitted. `max_steps` is the
        length of the run; TRL functions see it in `trainer_state`."""
        self._config = config
        self._is_remote = is_remote
        self._parts = check_parts(config.parts, base)
        self._has_checked_sandbox = False
        self._warned_parts: set[str] = set()  # labels of parts that get None for an answer
        if any(part.config.name in RUN_PROGRAMS for part in self._parts):
            self._check_sandbox()
        self._applying: dict[tuple[str, bool], list[int]] = {}  # by data source, and whether a model scores the row
        self._outcomes: OutcomeQueue = queue.SimpleQueue()
        self._pending: dict[int, PendingScore] = {}
        self._done: dict[int, Score] = {}
        self._apart: set[int] = set()  # tickets of the queues that `apart` gave
        self._next_ticket = 0
        self._broken: BaseException | None = None
        self._is_closed = False
        self._counters = {"answer_timeout": 0, "scorer_failed": 0}
        self._local_scorers: dict[int, LocalScorer] = {}  # by the index of the part
        self._waiting: dict[
            int, list[tuple[int, ScoreRequest]]
        ] = {}  # for local scorers, by part: tickets and requests
        self._pools: dict[str, WorkerPool | Judge | ScoringPool] = {}  # by `CheckedPart.backend`
        self.worker_setups: dict[str, WorkerSetup] = {}  # of the worker processes, by backend
        for backend in sorted({part.backend for part in self._parts if part.config.name != MODEL}):
            parts = {i: p.config for i, p in enumerate(self._parts) if p.backend == backend}
            if backend not in ("verifiers", "users"):
                options = JudgeOptions.of(next(iter(parts.values())).options, backend)
                self._pools[backend] = Judge(options, self._outcomes, base)
                continue
            specs = {i: PartSpec(part.name, part.options) for i, part in parts.items()}
            folder = None if base is None else str(Path(base).resolve())
            isolated = backend == "verifiers"
            setup = WorkerSetup(specs, folder, config.timeout_s, isolated, config.memory_gib, config.sandbox, max_steps)
            self.worker_setups[backend] = setup
            if not is_remote:
                self._pools[backend] = WorkerPool(setup, config.workers, self._outcomes)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part in the sum, by its name in `Score.parts`."""
        return {part.label: part.config.weight for part in self._parts}

    @property
    def pending(self) -> int:
        """How many submitted requests have not been returned yet, without those of the queues of `apart`."""
        return len(self._pending) + len(self._done) - len(self._apart)

    @property
    def may_be_slow(self) -> bool:
        """Whether a score may take seconds, because a judge, a user's function or a program of the model gives it. Rows may name programs."""
        return any(
            part.backend == "users" or part.config.name in (JUDGE, "row") or part.config.name in RUN_PROGRAMS
            for part in self._parts
        )

    def apart(self) -> ScoreQueue:
        """Return a queue for requests whose scores must not come from `poll`, such as those of a validation during a step."""
        return _QueueApart(self)

    @property
    def counters(self) -> dict[str, int]:
        """What went wrong so far. answer_timeout and scorer_failed count parts of requests, scorer_retried counts calls."""
        total = dict(self._counters)
        for pool in dict.fromkeys(self._pools.values()):
            for name, count in pool.counters.items():
                total[name] = total.get(name, 0) + count
        return total

    def attach_scorers(self, scorers: Mapping[int, LocalScorer | JudgeBackend]) -> None:
        """Set the models that score the parts with these indexes, or that answer for a judge. Call it before `submit`."""
        for index, scorer in scorers.items():
            pool = self._pools.get(self._parts[index].backend)
            if isinstance(pool, Judge):
                pool.set_backend(cast(JudgeBackend, scorer))
            else:
                self._local_scorers[index] = cast(LocalScorer, scorer)

    def use_pool(self, make: Callable[[OutcomeQueue], ScoringPool]) -> None:
        """Compute verifiers, users' functions and models in the pool that `make` builds; a judge stays in this process."""
        pool = make(self._outcomes)
        self._pools |= {part.backend: pool for part in self._parts if part.config.name != JUDGE}

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        """Start scoring; `poll` returns the scores as they finish."""
        self._submit(requests)

    def poll(self, timeout_s: float | None = None) -> list[Score]:
        """Return the finished scores; wait at most `timeout_s` (None: no limit) for the first. [] if nothing is pending."""
        return list(self._poll(timeout_s, lambda ticket: ticket not in self._apart).values())

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return the scores of these requests, in order. Other requests that finish meanwhile stay for `poll`."""
        tickets = self._submit(requests)
        while any(ticket in self._pending for ticket in tickets):
            self._collect(None)
        return [self._done.pop(ticket) for ticket in tickets]

    def close(self) -> None:
        """Kill and reap every worker, and drop all pending requests."""
        for pool in dict.fromkeys(self._pools.values()) if not self._is_closed else ():
            pool.close()
        self._is_closed = True
        self._waiting.clear()
        self._pending.clear()
        self._done.clear()
        self._apart.clear()

    def __enter__(self) -> Rewards:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _poll(self, timeout_s: float | None, is_own: Callable[[int], bool]) -> dict[int, Score]:
        """`poll` for a caller who owns some of the tickets. Returns its scores by ticket; the others stay."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._collect(0.0)
        while (
            not any(map(is_own, self._done))
            and any(map(is_own, self._pending))
            and (deadline is None or time.monotonic() < deadline)
        ):
            self._collect(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return {ticket: self._done.pop(ticket) for ticket in list(self._done) if is_own(ticket)}

    def _submit(self, requests: Sequence[ScoreRequest]) -> list[int]:
        if self._is_closed:
            raise RuntimeError("submit after close")
        limit, whole = self._config.max_answer_chars, requests
        requests = [replace(r, completion=r.completion[-limit:], tokens=None, written=None) for r in requests]
        applying = [self._applying_parts(request) for request in requests]
        tickets = list(range(self._next_ticket, self._next_ticket + len(requests)))
        calls: dict[str, list[ScoringCall]] = {backend: [] for backend in self._pools}
        waiting: dict[int, list[tuple[int, ScoreRequest]]] = {}
        for index, part in enumerate(self._parts):
            if part.config.name == MODEL and not self._is_remote:
                self._local_scorer(index)
                waiting[index] = [(t, r) for t, r, some in zip(tickets, whole, applying, strict=True) if index in some]
                continue
            given = requests
            if part.config.name == MODEL:
                given = [_with_plain_tokens(r) for r in whole]
            elif part.user is not None and part.user.wants_tokens:
                given = [
                    replace(_with_plain_tokens(w), completion=r.completion)
                    for w, r in zip(whole, requests, strict=True)
                ]
            rows = [(t, r) for t, r, indexes in zip(tickets, given, applying, strict=True) if index in indexes]
            size = MAX_REQUESTS_PER_CALL if part.is_batch or part.config.name == MODEL else 1
            for at in range(0, len(rows), size):
                some_tickets, some_requests = zip(*rows[at : at + size], strict=True)
                calls[part.backend].append(ScoringCall(index, some_tickets, _pickle_requests(some_requests)))
        # Queue nothing before every row has passed its checks, so that an error leaves no request half submitted.
        self._next_ticket += len(requests)
        self._pending |= {
            t: PendingScore(r, set(indexes)) for t, r, indexes in zip(tickets, requests, applying, strict=True)
        }
        for backend, some_calls in calls.items():
            self._pools[backend].submit(some_calls)
        for index, some in waiting.items():
            self._waiting.setdefault(index, []).extend(some)
        return tickets

    def _local_scorer(self, index: int) -> LocalScorer:
        if index not in self._local_scorers:
            raise RuntimeError(
                f"reward part {self._parts[index].label!r} is a model, but no scorer was attached for it"
            )
        return self._local_scorers[index]

    def _waiting_besides(self, tickets: Container[int]) -> bool:
        """Whether requests other than these wait for an attached model."""
        return any(ticket not in tickets for rows in self._waiting.values() for ticket, _ in rows)

    def _run_local_scorers(self) -> None:
        """Score all requests that wait for an attached model, in one call per model."""
        for index in [index for index, rows in self._waiting.items() if rows]:
            rows = self._waiting.pop(index)
            try:
                results = self._local_scorer(index)([request for _, request in rows])
            except Exception:  # noqa: BLE001 - reported with each sample and counted, as for a worker process
                results = [ScoringFailure(traceback.format_exc())] * len(rows)
            for (ticket, _), result in zip(rows, results, strict=True):
                call = ScoringCall(index, (ticket,), b"")
                if isinstance(result, ScoringFailure):
                    self._record(CallOutcome(call, error=result.error))
                else:
                    self._record(CallOutcome(call, [result]))

    def check(self, rows: Iterable[Row], answer_key: str = "data.train.answer_key=") -> None:
        """Raise a UserError, before anything is sampled, for a row that no part can score or that lacks what a part needs.

        `answer_key` is the config key, with `=`, that names the answer's column; the error suggests it.
        """
        for row in rows:
            applying = self._applying_parts(row)
            names = [self._parts[index].config.name for index in applying]
            for index in applying:
                self._warn_of_missing_answer(self._parts[index], row)
            check_row(
                row,
                [(f"reward.parts[{i}] ({self._parts[i].config.name})", self._parts[i].config) for i in applying],
                answer_key,
            )
            verifiers = {row.extra["verifier"] if name == "row" else name for name in names}
            if verifiers & RUN_PROGRAMS:
                self._check_sandbox()
            for verifier in verifiers & ANSWER_CHECKS.keys():
                try:
                    ANSWER_CHECKS[verifier](row.answer)
                except ValueError as error:
                    raise UserError(f"row {row.id!r} of {row.data_source!r}: {error}") from error

    def _warn_of_missing_answer(self, part: CheckedPart, row: Row) -> None:
        """Warn, once per part, that a user's function gets None for the answer. This is no error: it may not use the answer."""
        name = None if part.user is None else ANSWER_PARAMETER.get(part.user.convention)
        if part.user is None or name is None or not part.user.wants(name) or part.label in self._warned_parts:
            return
        if is_missing(row_value(row, "ground_truth")):
            self._warned_parts.add(part.label)
            logger.warning(
                "reward part %r: row %r has no expected answer, so %s is None there (its columns: %s); if a column holds the answer, name it "
                "with answer_key of the data source",
                part.label,
                row.id,
                name,
                ", ".join(row.extra) or "no columns",
            )

    def _check_sandbox(self) -> None:
        """Raise a UserError if programs cannot be run on this machine. The check is made once."""
        if self._has_checked_sandbox:
            return
        self._has_checked_sandbox = True
        if self._config.sandbox == "unsafe":
            logger.warning(
                "reward.sandbox=unsafe: programs written by the model run on this machine as you. They can read, change and send "
                "away everything that you can; only their time, memory, processes and output are limited"
            )
        check_sandbox(self._config.sandbox != "unsafe")

    def _applying_parts(self, request: ScoreRequest | Row) -> list[int]:
        """The indexes of the parts that apply to a row. A row that lacks a column they need is an error."""
        source, by_model = request.data_source, request.style == VERL_MODEL_STYLE
        if (source, by_model) not in self._applying:
            found = [i for i, p in enumerate(self._parts) if p.config.sources is None or source in p.config.sources]
            if not found:
                listed = "; ".join(f"{p.label}: {', '.join(p.config.sources or [])}" for p in self._parts)
                raise UserError(
                    f"no reward part applies to data_source {source!r} of row {request.id!r} (sources of the parts: "
                    f"{listed}); add it to the sources of a part"
                )
            configs = [self._parts[i].config for i in found]
            kept = parts_without_rules(configs) if by_model else configs
            self._applying[source, by_model] = [i for i in found if self._parts[i].config in kept]
        applying = self._applying[source, by_model]
        for index in applying:
            part = self._parts[index]
            missing = [name for name in part.required if not _has_column(request, name)]
            if missing:
                made = [name for name in ROW_COLUMNS if name not in request.extra and _has_column(request, name)]
                available = ", ".join([*request.extra, *made])
                hint = "; 'task' scores only rows of generated tasks" if missing == ["task"] else ""
                raise UserError(
                    f"reward.parts[{index}] ({self._parts[index].config.name}) needs a column {missing[0]!r}, which row "
                    f"{request.id!r} of {source!r} does not have (its columns: {available}){hint}"
                )
            if part.user is not None and (clash := [n for n in reserved_columns(part.user) if n in request.extra]):
                raise UserError(
                    f"reward.parts[{index}] ({part.config.name}): row {request.id!r} of {source!r} has a column {clash[0]!r}, but the "
                    f"{part.user.convention.name} convention passes something else under that name: rename the column"
                )
        return applying

    def _collect(self, timeout_s: float | None) -> None:
        """Record the outcomes that have arrived; wait for the first one."""
        if self._broken is not None:
            raise self._broken
        if any(self._waiting.values()):
            self._run_local_scorers()
            timeout_s = 0
        try:
            outcome = self._outcomes.get(timeout=timeout_s) if timeout_s != 0 else self._outcomes.get_nowait()
            while True:
                if isinstance(outcome, BaseException):
                    self._broken = outcome
                    raise outcome
                self._record(outcome)
                outcome = self._outcomes.get_nowait()
        except queue.Empty:
            return

    def _record(self, outcome: CallOutcome) -> None:
        index = outcome.call.part
        label = self._parts[index].label
        for at, ticket in enumerate(outcome.call.tickets):
            item = self._pending[ticket]
            item.missing.remove(index)
            if outcome.results is not None:
                result = item.results[index] = outcome.results[at]
                if result.timed_out:
                    self._counters["answer_timeout"] += 1
                    item.timed_out = True
            elif outcome.timed_out:
                self._counters["answer_timeout"] += 1
                item.timed_out = True
                item.results[index] = PartResult(0.0, timed_out=True)
            else:
                self._counters["scorer_failed"] += 1
                shown = item.request.completion[-SHOWN_CHARS:]
                item.errors.append(
                    f"reward part {label!r} failed{_retry_note(self._parts[index])} on row {item.request.id!r} of {item.request.data_source!r}\n"
                    f"{outcome.error}\nthe completion (its last {SHOWN_CHARS} characters): {shown!r}"
                )
            if not item.missing:
                self._done[ticket] = combine_parts(self._parts, self._pending.pop(ticket))


class _QueueApart:
    """The requests of one caller. Scores of others that arrive while it waits stay for them."""

    def __init__(self, rewards: Rewards) -> None:
        self._rewards = rewards
        self._tickets: set[int] = set()

    @property
    def pending(self) -> int:
        return len(self._tickets)

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        if self._rewards._waiting_besides(self._tickets):
            self._rewards._run_local_scorers()  # a model scores those of others in a batch of their own, as without this queue
        tickets = self._rewards._submit(requests)
        self._tickets.update(tickets)
        self._rewards._apart.update(tickets)

    def poll(self, timeout_s: float | None = None) -> list[Score]:
        scores = self._rewards._poll(timeout_s, self._tickets.__contains__)
        self._tickets -= scores.keys()
        self._rewards._apart -= scores.keys()
        return list(scores.values())


def _has_column(request: ScoreRequest | Row, name: str) -> bool:
    """Whether a row has a column, or one can be added for it (`ROW_COLUMNS`)."""
    if name in request.extra or name in ("data_source", "truncated"):
        return True
    return name in ANSWER_COLUMNS and not is_missing(request.answer)


def _with_plain_tokens(request: ScoreRequest) -> ScoreRequest:
    """A request whose tokens are plain Python numbers, so that it can be pickled for a model or a function that takes tokens."""
    tokens = None if request.tokens is None else [int(token) for token in request.tokens]
    written = None if request.written is None else [bool(one) for one in request.written]
    return replace(request, tokens=tokens, written=written)


def _retry_note(part: CheckedPart) -> str:
    """ " twice" for parts whose calls are retried by the worker pool. A judge and a model report their own retries."""
    return "" if part.config.name in (MODEL, JUDGE) else " twice"


def _pickle_requests(requests: Sequence[ScoreRequest]) -> bytes:
    try:
        return pickle.dumps(list(requests))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        ids = ", ".join(repr(r.id) for r in requests[:3])
        raise UserError(
            f"row {ids}: its answer or another column cannot be pickled for a scoring process: {error}"
        ) from error
