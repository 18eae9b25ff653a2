"""A group of workers that run one class, called as if it were one object.

    group = WorkerGroup("actor", TrainingWorker, backend, deadline_s=600)
    columns = group.outputs(batch, needs)              # waits for all ranks
    pending = group.outputs.later(batch, needs)        # does not; pending.result() does

A method's `@dispatch` says how its arguments are divided and its results joined (`core/dispatch.py`). A backend knows where the
workers are: in this process (`LocalBackend`), in Ray actors (`ray_backend.py`), or in a test.

Tensor- and sequence-parallel ranks work on the same sequences. `shares` says which shard of a batch each rank gets, so that a batch is
divided over the data-parallel ranks and their peers get copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Protocol

from burnish.core.batch import Batch
from burnish.core.dispatch import Dispatch, WorkerLost, dispatch_of, method_summary
from burnish.core.serialization import decode
from burnish.distributed.batch_dispatch import (
    Placeholder,
    ShardedBatch,
    collect_results,
    extract_batches,
    plan_shards,
    shard_batch,
)
from burnish.distributed.resident_batches import ResidentBatch

POLL_INTERVAL_S = 0.5
"""Longest wait before looking for workers that have died."""


# --- Backends: ranks and messages, without knowledge of batches or of what a call does ----------------------------------


class WorkerGone(Exception):
    """A worker's process has ended: the called one, or the `rank` that it depended on. The message says how that is known."""

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass
class Traffic:
    """Messages and bytes between the driver and the workers."""

    messages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_stored: int = 0
    """Bytes, in either direction, that went through an object store."""

    def take(self) -> Traffic:
        """The counts since the last call."""
        taken = replace(self)
        self.messages, self.bytes_out, self.bytes_in, self.bytes_stored = 0, 0, 0, 0
        return taken


@dataclass(eq=False)
class SentCall:
    """A call that was sent to one rank."""

    rank: int
    method: str
    token: Any
    """The backend's handle of the call."""
    started: float
    has_ended: bool = False
    """Whether the call is known to have ended, so that it need not be polled again."""
    is_promised: bool = False
    """Whether it was sent before all of its arguments were available."""


@dataclass(frozen=True)
class RankCall:
    """A call to be sent to one rank."""

    rank: int
    method: str
    parcel: Any
    """Its arguments, packed by the backend; parts of batches replace the placeholders in them."""
    lane: str
    parts: Sequence[tuple[ShardedBatch, int]] = ()
    promises: Sequence[Any] = ()
    """Results of other calls that replace the placeholders; a call has either promises or parts."""


class WorkerBackend(Protocol):
    """Sends calls to the ranks of a group and receives their results."""

    size: int
    traffic: Traffic
    is_here: bool
    """Whether the worker is in this process: arguments are then neither divided nor serialised."""

    @property
    def keeps_promises(self) -> bool:
        """Whether a call may be sent before all of its arguments are available."""

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pack arguments, to be sent to any number of ranks."""

    def send(self, rank_calls: Sequence[RankCall]) -> list[Any]:
        """Start calls; returns a handle for each, in rank_call."""

    def wait(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
        """The calls that have ended, failed ones first. Returns when all have ended, or after the timeout."""

    def any_of(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
        """The calls that have ended. Returns when one has (of very many calls: a few), or after the timeout."""

    def promise(self, token: Any) -> Any:
        """What represents a call's result in the arguments of another call; None if it must be waited for."""

    def value(self, token: Any) -> Any:
        """The serialised result of a call that has ended (`core/serialization.py`).

        Raises a worker's `UserError`, `WorkerFailed` for its other errors, and `WorkerGone` if its process has ended.
        """

    def describe(self, rank: int) -> str:
        """The process of a rank, and the last lines of its output."""

    def silent(self, ranks: Sequence[int], what: str) -> str:
        """What ranks that do not answer are doing, as far as it can be found out."""

    def restart(self, rank: int) -> None:
        """Start a new worker in a rank's place."""

    def close(self) -> None:
        """End all workers."""


# --- Groups ------------------------------------------------------------------------------------------------------------


class PendingCall:
    """A call that was sent to the ranks of a group."""

    def __init__(
        self, group: WorkerGroup, calls: list[SentCall], join: Callable[[list[Any]], Any], is_first: bool = False
    ) -> None:
        """`is_first`: the result is that of the first rank."""
        self._group, self._calls, self._join, self._is_first = group, calls, join, is_first
        self._found: tuple[Any] | None = None

    def result(self) -> Any:
        """The joined result; waits for all ranks, and raises the first error of any."""
        if self._found is None:
            self._found = (self._join(self._group.gather(self._calls)),)
        return self._found[0]

    def promise(self) -> Any:
        """What represents the result in the arguments of another call; None if it must be waited for."""
        return self._group.backend.promise(self._calls[0].token) if self._is_first and self._found is None else None


class GroupMethod:
    """A method of a group that is marked with `@dispatch`."""

    def __init__(self, group: WorkerGroup, name: str, mark: Dispatch) -> None:
        self._group, self._name, self._mark = group, name, mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pending = self.later(*args, **kwargs)
        return None if self._mark.join == "nothing" else pending.result()

    def later(self, *args: Any, **kwargs: Any) -> PendingCall:
        """Call the method without waiting for its result."""
        return self._group.start(self._name, self._mark, args, kwargs)


class WorkerGroup:
    """Workers of one class on a backend. `name` is for messages; every call must be answered within `deadline_s`."""

    def __init__(
        self,
        name: str,
        kind: type,
        backend: WorkerBackend,
        deadline_s: float,
        shares: Sequence[int] | None = None,
        mini_batches: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.kind, self.backend, self.deadline_s = name, kind, backend, deadline_s
        self.clock = clock
        self.mini_batches = mini_batches
        """Number of consecutive selections of a batch that the ranks will get; each is balanced over the ranks."""
        self.size = backend.size
        self.shares = list(range(self.size)) if shares is None else list(shares)
        self._lock = threading.Lock()  # a checkpoint is written from another thread
        self._sending = threading.Lock()  # all ranks must get the calls of several threads in the same rank_call
        self._resident: ResidentBatch | None = None
        self._last: tuple[Batch, ShardedBatch] | None = None
        self._num_resident = 0
        self._unread: list[SentCall] = []
        """Calls without a reader; their errors are raised by a later call."""

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return GroupMethod(self, name, dispatch_of(self.kind, name))

    # --- calls on the group ----------------------------------------------------------------------------------------------

    def start(self, name: str, mark: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall:
        """Send a call to its ranks."""
        self._raise_unread_errors()
        rank_calls, sent = self._rank_calls(name, mark, args, kwargs)
        calls = self._send(rank_calls)
        if mark.join == "nothing":
            with self._lock:
                self._unread += calls
            return PendingCall(self, calls, lambda results: None)
        if mark.join == "list":
            return PendingCall(self, calls, lambda results: [decode(result) for result in results])
        if sent is None or mark.join == "first":
            return PendingCall(self, calls, lambda results: decode(results[0]), is_first=True)
        rank_of = {share: rank for rank, share in reversed(list(enumerate(self.shares)))}  # the first rank of a share
        firsts, resident = [rank_of[part] for part in range(sent.plan.num_parts)], self._resident

        def join(results: list[Any]) -> Any:
            joined = collect_results([results[rank] for rank in firsts], sent.plan)
            if resident is not None:
                resident.note_result(sent, joined)
            return joined

        return PendingCall(self, calls, join)

    def _rank_calls(
        self, name: str, mark: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[RankCall], ShardedBatch | None]:
        """The call of each rank, and the shards of the first batch among the arguments."""
        ranks = range(1 if mark.split == "first" else self.size)
        if mark.split == "each":
            values = [*args, *kwargs.values()]
            if any(not isinstance(value, (list, tuple)) or len(value) != self.size for value in values):
                raise ValueError(f"{self.name} has {self.size} ranks: every argument is a list with an entry for each")
            own = [(tuple(a[rank] for a in args), {k: v[rank] for k, v in kwargs.items()}) for rank in ranks]
            return [RankCall(rank, name, self.backend.pack(*own[rank]), mark.lane) for rank in ranks], None
        batches: list[Batch] = []
        if mark.split == "sequences":
            extracted = extract_batches((args, kwargs), batches)
            if not batches:
                raise ValueError(f"no argument of this call of {self.name} is a batch that could be divided")
            args, kwargs = (args, kwargs) if self.backend.is_here else extracted
        parcel = self.backend.pack(args, kwargs)
        if not batches or self.backend.is_here:
            return [RankCall(rank, name, parcel, mark.lane) for rank in ranks], None
        parts = [self._parts(batch, is_first=k == 0) for k, batch in enumerate(batches)]
        rank_calls = [RankCall(r, name, parcel, mark.lane, [(one, self.shares[r]) for one in parts]) for r in ranks]
        return rank_calls, parts[0]

    def _parts(self, batch: Batch, is_first: bool) -> ShardedBatch:
        """The message for a batch. The first batch of a call becomes resident, and is not sent again."""
        if self._last is not None and self._last[0] is batch:
            return self._last[1]
        if self._resident is not None and self._resident.batch is batch:
            return self._resident.repeated_message()
        chosen = None if self._resident is None else self._resident.selection_message(batch)
        if chosen is not None:
            self._last = batch, chosen
            return chosen
        num_parts = max(self.shares) + 1
        if not is_first:
            return shard_batch(batch, plan_shards(batch, num_parts))
        self._num_resident += 1
        self._resident, self._last = (
            ResidentBatch(batch, plan_shards(batch, num_parts, self.mini_batches), self._num_resident),
            None,
        )
        return self._resident.first_message()

    def gather(self, calls: Sequence[SentCall]) -> list[Any]:
        """The serialised results of calls, in their rank_call; raises the first error that is seen."""
        values: dict[int, Any] = {}
        by_token = {id(call.token): (k, call) for k, call in enumerate(calls)}
        values |= {k: self._value(call) for k, call in enumerate(calls) if call.has_ended}
        while len(values) < len(calls):
            left = [call for k, call in enumerate(calls) if k not in values]
            for token in self.backend.wait([call.token for call in left], POLL_INTERVAL_S):
                k, call = by_token[id(token)]
                values[k] = self._value(call)
            self._check_deadline([call for k, call in enumerate(calls) if k not in values])
        return [values[k] for k in range(len(calls))]

    def _raise_unread_errors(self) -> None:
        """Raise the error of an earlier call that had no reader."""
        with self._lock:
            if not self._unread:
                return
            ended = {id(token) for token in self.backend.wait([call.token for call in self._unread], 0)}
            done = [call for call in self._unread if id(call.token) in ended]
            self._unread = [call for call in self._unread if id(call.token) not in ended]
        for call in done:
            self._value(call)
        self._check_deadline(self._unread)

    # --- calls on one rank (`core/dispatch.py`: `Workers`) -----------------------------------------------------------------

    def send(self, rank: int, method: str, *arguments: Any) -> SentCall:
        """Call a method of one rank in its lane; nothing is divided or joined."""
        return self.send_same([rank], method, *arguments)[0]

    def send_same(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[SentCall]:
        """Send the same call to several ranks, packed once. A `PendingCall` argument is passed on when its result is available."""
        promises: list[Any] = []
        known = tuple(self._packable(argument, promises) for argument in arguments)
        parcel, lane = self.backend.pack(known, {}), dispatch_of(self.kind, method).lane
        return self._send([RankCall(rank, method, parcel, lane, promises=promises) for rank in ranks])

    def _packable(self, argument: Any, promises: list[Any]) -> Any:
        """An argument that can be packed now; a pending result becomes a placeholder if the backend supports it."""
        if not isinstance(argument, PendingCall):
            return argument
        promise = argument.promise() if self.backend.keeps_promises else None
        if promise is None:
            return argument.result()
        promises.append(promise)
        return Placeholder(len(promises) - 1)

    def send_each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[SentCall]:
        """Send a call to several ranks, each with its own arguments."""
        lane = dispatch_of(self.kind, method).lane
        return self._send([RankCall(rank, method, self.backend.pack(own, {}), lane) for rank, own in arguments.items()])

    def ready(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """The calls that have ended. Returns when there is one, or after the timeout."""
        ended = {id(token) for token in self.backend.any_of([call.token for call in handles], timeout_s)}
        found = [call for call in handles if id(call.token) in ended]
        for call in found:
            call.has_ended = True
        return found

    def wait_all(self, handles: Sequence[Any]) -> None:
        """Wait until all calls have ended, or one is late; `result` raises the error then."""
        left = [call for call in handles if not call.has_ended]
        for call in left:
            if call.is_promised:  # its time starts when its arguments are available
                call.started, call.is_promised = self.clock(), False
        while left and self.clock() - min(call.started for call in left) <= self.deadline_s:
            ended = {id(token) for token in self.backend.wait([call.token for call in left], POLL_INTERVAL_S)}
            for call in left:
                call.has_ended = id(call.token) in ended
            left = [call for call in left if not call.has_ended]

    def result(self, handle: Any) -> Any:
        """The result of a call; waits for it."""
        return decode(self.gather([handle])[0])

    def restart(self, rank: int) -> None:
        """Start a new worker in a lost one's place."""
        with self._lock:
            self._unread = [call for call in self._unread if call.rank != rank]
        self.backend.restart(rank)

    def close(self) -> None:
        """End all workers."""
        self.backend.close()

    # --- one call --------------------------------------------------------------------------------------------------------

    def _send(self, rank_calls: Sequence[RankCall]) -> list[SentCall]:
        with nullcontext() if self.backend.is_here else self._sending:
            tokens = self.backend.send(rank_calls)
        pairs, now = zip(rank_calls, tokens, strict=True), self.clock()
        return [
            SentCall(rank_call.rank, rank_call.method, token, now, is_promised=bool(rank_call.promises))
            for rank_call, token in pairs
        ]

    def _value(self, call: SentCall) -> Any:
        try:
            return self.backend.value(call.token)
        except WorkerGone as error:
            raise self._lost(call.rank if error.rank is None else error.rank, call.method, error) from error

    def _lost(self, rank: int, method: str, why: WorkerGone) -> WorkerLost:
        what = method_summary(self.kind, method)
        return WorkerLost(
            f"{self.name} rank {rank} of {self.size} has ended in `{method}` ({what}): {why}\n{self.backend.describe(rank)}",
            rank,
        )

    def _check_deadline(self, calls: Sequence[SentCall]) -> None:
        late = next((call for call in calls if self.clock() - call.started > self.deadline_s), None)
        if late is None:
            return
        method = late.method
        ranks = [call.rank for call in calls if call.method == method]
        doing = self.backend.silent(ranks, method)
        raise WorkerLost(
            f"{self.name} {_format_ranks(ranks)} of {self.size} did not answer `{method}` ({method_summary(self.kind, method)}) in "
            f"{self.deadline_s:g} s, which is placement.timeout_s: {doing}",
            ranks[0],
        )


def _format_ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(str(rank) for rank in ranks[:8])
    return f"rank {some}" if len(ranks) == 1 else f"ranks {some}{', ...' if len(ranks) > 8 else ''}"


# --- The local backend -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _LocalResult:
    """The result of a call, or its error."""

    value: Any = None
    error: Exception | None = None


class LocalBackend:
    """One worker in this process, called directly: nothing is packed, copied or waited for."""

    size = 1
    is_here = True
    keeps_promises = False

    def __init__(self, worker: Any) -> None:
        self.worker, self.traffic = worker, Traffic()

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs

    def send(self, rank_calls: Sequence[RankCall]) -> list[_LocalResult]:
        return [self._call(rank_call) for rank_call in rank_calls]

    def _call(self, rank_call: RankCall) -> _LocalResult:
        args, kwargs = rank_call.parcel
        try:
            return _LocalResult(getattr(self.worker, rank_call.method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (raised when the result is read, as with any other backend)
            return _LocalResult(error=error)

    def wait(self, tokens: Sequence[_LocalResult], timeout_s: float) -> list[_LocalResult]:
        return list(tokens)

    def any_of(self, tokens: Sequence[_LocalResult], timeout_s: float) -> list[_LocalResult]:
        return list(tokens)

    def promise(self, token: _LocalResult) -> None:
        return None

    def value(self, token: _LocalResult) -> Any:
        if token.error is not None:
            raise token.error
        return token.value

    def describe(self, rank: int) -> str:
        return "it is this process"

    def silent(self, ranks: Sequence[int], what: str) -> str:
        return "it is this process"

    def restart(self, rank: int) -> None:
        raise RuntimeError("a worker in this process cannot be replaced")

    def close(self) -> None:
        """Nothing to end: the worker is this process."""
