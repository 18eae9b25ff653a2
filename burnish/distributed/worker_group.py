"""A group of workers that run one class, called as if it were one object.

    group = WorkerGroup("actor", TrainingWorker, backend, deadline_s=600)
    columns = group.outputs(batch, needs)              # waits for all ranks
    pending = group.outputs.later(batch, needs)        # does not; pending.result() does

How a call is divided and its results joined stands at the method (`core/dispatch.py`). Where the workers are is the backend's
business (`backend.py`).

Ranks that train a model together may have the same share of a batch (they divide its rows or its weights): `shares` says
which share each rank has, so a split goes to data-parallel ranks and their peers get copies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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

# --- Where workers are and how they are reached: what a group asks of `local.py`, of `ray_group.py`, or of a test.
#
# A backend knows ranks and messages, and nothing of batches, marks or what a call is for.


class WorkerGone(Exception):
    """There is no worker any more: whoever was called, or the `rank` that it could not do without. The message says how that is known."""

    def __init__(self, text: str, rank: int | None = None) -> None:
        super().__init__(text)
        self.rank = rank


@dataclass
class Traffic:
    """What went to workers and came back."""

    messages: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    bytes_stored: int = 0
    """Of both, what lay in an object store on its way."""

    def take(self) -> Traffic:
        """All since the last time."""
        taken = replace(self)
        self.messages, self.bytes_out, self.bytes_in, self.bytes_stored = 0, 0, 0, 0
        return taken


@dataclass(eq=False)
class SentCall:
    """One method of one rank, asked for."""

    rank: int
    method: str
    token: Any
    """What the backend knows it by."""
    started: float = field(default_factory=time.monotonic)
    has_ended: bool = False
    """Whether it is known to have: then nobody need look again."""
    is_promised: bool = False
    """Whether it was sent before all of its arguments were there."""


@dataclass(frozen=True)
class RankCall:
    """A call to be sent to one rank."""

    rank: int
    method: str
    parcel: Any
    """Its arguments, as the backend packed them; parts of batches go into the marked places (`splitting.Slot`)."""
    lane: str
    parts: Sequence[tuple[ShardedBatch, int]] = ()
    promises: Sequence[Any] = ()
    """Results of other calls that go into the marked places; a call has either these or parts."""


class WorkerBackend(Protocol):
    """Where workers are and how they are reached."""

    size: int
    traffic: Traffic
    is_here: bool
    """Whether arguments are handed over as they are: in this process there is nothing to divide or to send."""

    @property
    def keeps_promises(self) -> bool:
        """Whether a call may be sent before all of its arguments are there."""

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Arguments, ready to be sent to any number of ranks."""

    def send(self, orders: Sequence[RankCall]) -> list[Any]:
        """Begin calls; what is returned stands for them, in their order."""

    def wait(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
        """The calls that have ended, well or badly: as soon as all have, or when the time is over. Those that ended badly first."""

    def any_of(self, tokens: Sequence[Any], timeout_s: float) -> list[Any]:
        """The calls that have ended: as soon as one has (of very many: a few have), or when the time is over."""

    def promise(self, token: Any) -> Any:
        """What stands for a call's result in orders of such a backend; None where it must be waited for."""

    def value(self, token: Any) -> Any:
        """What a call that has ended gave, as it travelled (`core/serialization.py`). Raises a worker's `UserError`, `WorkerFailed` for
        any other error of its, and `Gone` where there is no worker any more."""

    def describe(self, rank: int) -> str:
        """Which process a rank is, and the last lines it wrote."""

    def silent(self, ranks: Sequence[int], what: str) -> str:
        """What ranks that do not answer are doing, as far as it can be found out."""

    def restart(self, rank: int) -> None:
        """A new worker in a rank's place."""

    def close(self) -> None:
        """End all workers."""


POLL_INTERVAL_S = 0.5
"""How long a wait goes on before it looks for workers that have ended."""


class PendingCall:
    """A call on its way to the ranks of a group."""

    def __init__(
        self, group: WorkerGroup, calls: list[SentCall], join: Callable[[list[Any]], Any], is_first: bool = False
    ) -> None:
        """`is_first` says that the result is what the first rank gave."""
        self._group, self._calls, self._join, self._is_first = group, calls, join, is_first
        self._found: tuple[Any] | None = None

    def result(self) -> Any:
        """What the ranks gave, joined; waits for all, and raises the first error it sees of any."""
        if self._found is None:
            self._found = (self._join(self._group.gather(self._calls)),)
        return self._found[0]

    def promise(self) -> Any:
        """What stands for the result among the arguments of another call, before it is there; None where it must be waited for."""
        return self._group.backend.promise(self._calls[0].token) if self._is_first and self._found is None else None


class GroupMethod:
    """A marked method of a group."""

    def __init__(self, group: WorkerGroup, name: str, mark: Dispatch) -> None:
        self._group, self._name, self._mark = group, name, mark

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        pending = self.later(*args, **kwargs)
        return None if self._mark.join == "nothing" else pending.result()

    def later(self, *args: Any, **kwargs: Any) -> PendingCall:
        """The same without waiting."""
        return self._group.start(self._name, self._mark, args, kwargs)


class WorkerGroup:
    """See the module's docstring. `name` is what messages call it; every call must be answered in `deadline_s`."""

    def __init__(
        self,
        name: str,
        kind: type,
        backend: WorkerBackend,
        deadline_s: float,
        shares: Sequence[int] | None = None,
        mini_batches: int = 1,
    ) -> None:
        self.name, self.kind, self.backend, self.deadline_s = name, kind, backend, deadline_s
        self.mini_batches = mini_batches
        """How many selections of a batch, one after the other, ranks will be given: each is divided evenly."""
        self.size = backend.size
        self.shares = list(range(self.size)) if shares is None else list(shares)
        self._lock = threading.Lock()  # a checkpoint is written from another thread
        self._sending = (
            threading.Lock()
        )  # ranks get calls of several threads in one order, or they would wait for each other
        self._base: ResidentBatch | None = None
        self._last: tuple[Batch, ShardedBatch] | None = None
        self._num_bases = 0
        self._unheard: list[SentCall] = []
        """Calls whose results nobody waits for; their errors are raised by a later call."""

    def __getattr__(self, name: str) -> GroupMethod:
        if name.startswith("_"):
            raise AttributeError(name)
        return GroupMethod(self, name, dispatch_of(self.kind, name))

    # --- calls on the group ----------------------------------------------------------------------------------------------

    def start(self, name: str, mark: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PendingCall:
        """Begin a call on the ranks it is for."""
        self._raise_unheard()
        orders, sent = self._orders(name, mark, args, kwargs)
        calls = self._send(orders)
        if mark.join == "nothing":
            with self._lock:
                self._unheard += calls
            return PendingCall(self, calls, lambda results: None)
        if mark.join == "list":
            return PendingCall(self, calls, lambda results: [decode(result) for result in results])
        if sent is None or mark.join == "first":
            return PendingCall(self, calls, lambda results: decode(results[0]), is_first=True)
        rank_of = {share: rank for rank, share in reversed(list(enumerate(self.shares)))}  # the first that has it
        firsts, base = [rank_of[part] for part in range(sent.division.num_parts)], self._base

        def join(results: list[Any]) -> Any:
            joined = collect_results([results[rank] for rank in firsts], sent.division)
            if base is not None:
                base.keeps(sent, joined)
            return joined

        return PendingCall(self, calls, join)

    def _orders(
        self, name: str, mark: Dispatch, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[RankCall], ShardedBatch | None]:
        """What each rank is sent, and the parts of the first batch among the arguments."""
        ranks = range(1 if mark.split == "first" else self.size)
        if mark.split == "each":
            values = [*args, *kwargs.values()]
            if any(not isinstance(value, (list, tuple)) or len(value) != self.size for value in values):
                raise ValueError(f"{self.name} has {self.size} ranks: every argument is a list with an entry for each")
            own = [(tuple(a[rank] for a in args), {k: v[rank] for k, v in kwargs.items()}) for rank in ranks]
            return [RankCall(rank, name, self.backend.pack(*own[rank]), mark.lane) for rank in ranks], None
        batches: list[Batch] = []
        if mark.split == "sequences":
            slotted = extract_batches((args, kwargs), batches)
            if not batches:
                raise ValueError(f"no argument of this call of {self.name} is a batch that could be divided")
            args, kwargs = (args, kwargs) if self.backend.is_here else slotted
        parcel = self.backend.pack(args, kwargs)
        if not batches or self.backend.is_here:
            return [RankCall(rank, name, parcel, mark.lane) for rank in ranks], None
        parts = [self._parts(batch, is_first=k == 0) for k, batch in enumerate(batches)]
        orders = [RankCall(r, name, parcel, mark.lane, [(one, self.shares[r]) for one in parts]) for r in ranks]
        return orders, parts[0]

    def _parts(self, batch: Batch, is_first: bool) -> ShardedBatch:
        """What ranks are sent of a batch: the first one of a call they keep, and are told of what they have."""
        if self._last is not None and self._last[0] is batch:
            return self._last[1]
        if self._base is not None and self._base.batch is batch:
            return self._base.parts_again()
        chosen = None if self._base is None else self._base.chosen(batch)
        if chosen is not None:
            self._last = batch, chosen
            return chosen
        num_parts = max(self.shares) + 1
        if not is_first:
            return shard_batch(batch, plan_shards(batch, num_parts))
        self._num_bases += 1
        self._base, self._last = (
            ResidentBatch(batch, plan_shards(batch, num_parts, self.mini_batches), self._num_bases),
            None,
        )
        return self._base.first_parts()

    def gather(self, calls: Sequence[SentCall]) -> list[Any]:
        """The results of calls as they travelled, in their order; an error of any is raised as soon as it is seen."""
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

    def _raise_unheard(self) -> None:
        """The error of an earlier call that nobody waited for."""
        with self._lock:
            if not self._unheard:
                return
            ended = {id(token) for token in self.backend.wait([call.token for call in self._unheard], 0)}
            done = [call for call in self._unheard if id(call.token) in ended]
            self._unheard = [call for call in self._unheard if id(call.token) not in ended]
        for call in done:
            self._value(call)
        self._check_deadline(self._unheard)

    # --- calls on one rank (`core.workers.Workers`) ----------------------------------------------------------------------

    def send(self, rank: int, method: str, *arguments: Any) -> SentCall:
        """Call a method of one rank; its mark's lane is used, and nothing is divided or joined."""
        return self.send_same([rank], method, *arguments)[0]

    def send_same(self, ranks: Sequence[int], method: str, *arguments: Any) -> list[SentCall]:
        """The same call to several ranks, packed once. An argument that is `Pending` goes to them when it is there."""
        promises: list[Any] = []
        known = tuple(self._given(argument, promises) for argument in arguments)
        parcel, lane = self.backend.pack(known, {}), dispatch_of(self.kind, method).lane
        return self._send([RankCall(rank, method, parcel, lane, promises=promises) for rank in ranks])

    def _given(self, argument: Any, promises: list[Any]) -> Any:
        """An argument as it can be packed now: of a pending one its place, where messages may be sent before what is in them."""
        if not isinstance(argument, PendingCall):
            return argument
        promise = argument.promise() if self.backend.keeps_promises else None
        if promise is None:
            return argument.result()
        promises.append(promise)
        return Placeholder(len(promises) - 1)

    def send_each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> list[SentCall]:
        """A call to several ranks, each with arguments of its own."""
        lane = dispatch_of(self.kind, method).lane
        return self._send([RankCall(rank, method, self.backend.pack(own, {}), lane) for rank, own in arguments.items()])

    def ready(self, handles: Sequence[Any], timeout_s: float) -> list[Any]:
        """Those that have ended, as soon as there is one, or when the time is over."""
        ended = {id(token) for token in self.backend.any_of([call.token for call in handles], timeout_s)}
        found = [call for call in handles if id(call.token) in ended]
        for call in found:
            call.has_ended = True
        return found

    def wait_all(self, handles: Sequence[Any]) -> None:
        """Wait until all have ended, well or badly, or one is late; `result` says so then."""
        left = [call for call in handles if not call.has_ended]
        for call in left:
            if call.is_promised:  # it could not begin before what it was promised was there
                call.started, call.is_promised = time.monotonic(), False
        while left and time.monotonic() - min(call.started for call in left) <= self.deadline_s:
            ended = {id(token) for token in self.backend.wait([call.token for call in left], POLL_INTERVAL_S)}
            for call in left:
                call.has_ended = id(call.token) in ended
            left = [call for call in left if not call.has_ended]

    def result(self, handle: Any) -> Any:
        """What a call gave; waits for it."""
        return decode(self.gather([handle])[0])

    def restart(self, rank: int) -> None:
        """A new worker in a lost one's place."""
        with self._lock:
            self._unheard = [call for call in self._unheard if call.rank != rank]
        self.backend.restart(rank)

    def close(self) -> None:
        """End all workers."""
        self.backend.close()

    # --- one call --------------------------------------------------------------------------------------------------------

    def _send(self, orders: Sequence[RankCall]) -> list[SentCall]:
        with nullcontext() if self.backend.is_here else self._sending:
            tokens = self.backend.send(orders)
        pairs = zip(orders, tokens, strict=True)
        return [SentCall(order.rank, order.method, token, is_promised=bool(order.promises)) for order, token in pairs]

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
        late = next((call for call in calls if time.monotonic() - call.started > self.deadline_s), None)
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


# --- Workers in this process: one rank, and a call is a call.


@dataclass(eq=False)
class _LocalResult:
    """What a call gave, or what it raised."""

    value: Any = None
    error: Exception | None = None


class LocalBackend:
    """One worker, called directly: nothing is packed, copied or waited for."""

    size = 1
    is_here = True
    keeps_promises = False

    def __init__(self, worker: Any) -> None:
        self.worker, self.traffic = worker, Traffic()

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs

    def send(self, orders: Sequence[RankCall]) -> list[_LocalResult]:
        return [self._call(order) for order in orders]

    def _call(self, order: RankCall) -> _LocalResult:
        args, kwargs = order.parcel
        try:
            return _LocalResult(getattr(self.worker, order.method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 (raised where the result is asked for, as of any other worker)
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
