"""A group of engines in other processes as one engine.

Requests go to the engine with the least work; all samples of a prompt go to the same one, which prefills it once. Completions
come back in batches. Between processes a request has a number, a new one each time it is sent. An engine that ends or does not
answer is restarted, and its unfinished requests are sent again. A request's tokens follow from its key, so they are the same on
every engine. A completion is accepted only from the engine that has the request.

New weights are asked of the trainer and sent to every engine; nothing that is sampled with them is handed over before all have
shown that they have them (`weights.py`).
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from torch import Tensor

from burnish.core.dispatch import CallHandle, WorkerLost, Workers
from burnish.core.engine import Completion, Request
from burnish.inference.engine_common import empty_completion
from burnish.inference.request_arrays import (
    PackedCompletions,
    distinct_requests,
    group_by_prompt,
    pack_requests,
    unpack_completions,
)
from burnish.inference.weight_sync import SyncError, TrainerClient, WeightSync

COLLECT_WAIT_S = 0.05
"""How long an engine may wait for more completions before it answers."""
COLLECT_WAIT_PER_ENGINE_S = 0.01
"""The same for each engine of a large group: otherwise the driver would only read answers."""
POLL_S = 0.2
MAX_SILENCE_S = 60.0
"""An engine answers quickly however long its requests take. One that is silent for this long has stopped or is unreachable."""
MAX_RESTARTS = 3
"""Restarts of an engine without a completion in between; then its error is raised."""


class _EngineState:
    """State of one engine."""

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        """Requests by number."""
        self.work = 0
        """Upper bound of the tokens left to compute."""
        self.pending: CallHandle | None = None
        self.asked_at = 0.0
        """Time of the last call for completions."""
        self.has_weights = False
        self.restarts = 0


class RemoteEngine:
    """Many engines as one (`core.engine.Engine`). `count(name, amount)` takes metrics, `note` a sentence for the user.

    With `at_once` new weights are verified before `load` returns, as needed if the trainer learns while engines sample. Otherwise they
    are verified before any of their samples is returned, and the caller calls `confirm` before the trainer changes its weights.
    """

    def __init__(
        self,
        workers: Workers,
        trainer: TrainerClient,
        probe: Request,
        deadline_s: float,
        check: Callable[[Sequence[Request]], None],
        count: Callable[[str, float], None],
        note: Callable[[str], None],
        at_once: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self.workers, self.deadline_s, self.at_once = workers, deadline_s, at_once
        self.sync = WeightSync(workers, trainer, probe, count)
        self.check, self.count, self.note = check, count, note
        self.engines = [_EngineState() for _ in range(workers.size)]
        self.unfinished: set[str] = set()
        """Ids of the requests that engines have."""
        self._num_sent = 0
        self.is_awake = False
        self.version = 0
        self.ready: deque[Completion] = deque()
        self._interrupted = False

    @property
    def num_unfinished(self) -> int:
        return len(self.unfinished)

    # --- the Engine protocol ---------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        groups = group_by_prompt(requests)
        self.check(distinct_requests(groups))
        fresh = set(map(attrgetter("id"), requests))
        if len(fresh) < len(requests) or not fresh.isdisjoint(self.unfinished):
            raise ValueError("two requests have the same id, or one is already running")
        if undelivered := fresh.intersection(completion.id for completion in self.ready):
            raise ValueError(f"request {min(undelivered)} is already running: its completion is not delivered yet")
        self.is_awake = True
        self.unfinished |= fresh
        self._send_requests(groups)

    def stream(self) -> Iterator[Completion]:
        while self.ready or (self.num_unfinished and not self._interrupted):
            if not self.ready:
                self._collect()
            while self.ready:
                yield self.ready.popleft()
        self._interrupted = False

    def interrupt(self) -> None:
        self._interrupted = True

    def abort(self, ids: Iterable[str], keep: bool) -> list[Completion]:
        self.confirm()
        wanted = set(ids)
        kept = [completion for completion in self.ready if completion.id in wanted]
        self.ready = deque(completion for completion in self.ready if completion.id not in wanted)
        unknown = wanted - {c.id for c in kept} - self.unfinished
        if unknown:
            raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
        own = {
            rank: [number for number, request in engine.running.items() if request.id in wanted]
            for rank, engine in enumerate(self.engines)
        }
        for handle in self.workers.send_each("abort", {rank: (some,) for rank, some in own.items() if some}):
            try:
                # A later `stream` yields requests that finished before the abort.
                kept += self._accept(handle.rank, self.workers.result(handle))
            except WorkerLost as error:
                kept += [self._lost_completion(handle.rank, number) for number in own[handle.rank]]
                self._restart(handle.rank, error)
        return kept if keep else []

    def _lost_completion(self, rank: int, number: int) -> Completion:
        """Complete a request of a lost engine as if it was aborted before its first token."""
        request = self.engines[rank].running.pop(number)
        self.unfinished.discard(request.id)
        return empty_completion(request, self.version)

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Send the trainer's weights to all engines under this version. Other tensors are refused."""
        if any(True for _ in named_tensors):
            raise ValueError("engines in other processes take their weights from the trainer, not from here")
        if self.num_unfinished:
            raise RuntimeError(f"new weights while {self.num_unfinished} requests run: finish or abort them first")
        self.confirm()
        self.version = version
        self._send_weights(range(len(self.engines)), is_new=True)

    def sleep(self) -> None:
        self.confirm()
        if not self.is_awake:
            return
        self.is_awake = False
        for handle in self.workers.send_same(range(len(self.engines)), "sleep"):
            try:
                self.workers.result(handle)
            except WorkerLost as error:
                self._restart(handle.rank, error)

    def wake(self) -> None:
        """Nothing to do: an engine wakes with its first request."""

    # --- requests out, completions in ------------------------------------------------------------------------------------

    def _send_requests(self, groups: Iterable[Sequence[Request]]) -> None:
        """Send each group of requests to the engine with the least work, among those with weights."""
        if not any(engine.has_weights for engine in self.engines):
            self._send_weights(range(len(self.engines)), is_new=not self.sync.has_published)
        heap = [(engine.work, rank) for rank, engine in enumerate(self.engines) if engine.has_weights]
        heapq.heapify(heap)
        by_rank: dict[int, list[Sequence[Request]]] = {}
        most = attrgetter("sampling.max_tokens")
        for group in groups:
            work, rank = heap[0]
            by_rank.setdefault(rank, []).append(group)
            work += len(group) * len(group[0].tokens) + sum(map(most, group))
            heapq.heapreplace(heap, (work, rank))
            self.engines[rank].work = work
        packed = {}
        for rank, own in by_rank.items():
            packed[rank] = (pack_requests(own, self._num_sent),)
            numbered = dict(enumerate(chain.from_iterable(own), self._num_sent))
            self.engines[rank].running |= numbered
            self._num_sent += len(numbered)
        # No wait: a lost engine does not answer the next `collect` either.
        self.workers.send_each("submit", packed)

    def _collect(self) -> None:
        """Call `collect` on every engine with running requests; wait for some answers."""
        self.confirm()
        wait_s = max(COLLECT_WAIT_S, COLLECT_WAIT_PER_ENGINE_S * len(self.engines))
        for handle in self.workers.ready([m.pending for m in self.engines if m.pending is not None], 0.0):
            self._receive(handle)  # an engine that has answered is not silent, however long its answer was not read
        now = self.clock()
        # Ask for all of its requests: an engine that has finished all need not wait.
        enough = {rank: len(self.engines[rank].running) for rank in self._idle(now, wait_s)}
        for handle in self.workers.send_each("collect", {rank: (least, wait_s) for rank, least in enough.items()}):
            self.engines[handle.rank].pending, self.engines[handle.rank].asked_at = handle, now
        asked = [engine.pending for engine in self.engines if engine.pending is not None]
        self.confirm()  # if engines were restarted
        for handle in self.workers.ready(asked, POLL_S):
            self._receive(handle)

    def _idle(self, now: float, wait_s: float) -> list[int]:
        """The engines to ask. One that has been silent for too long is restarted."""
        idle, longest_s = [], min(self.deadline_s, MAX_SILENCE_S) + wait_s
        for rank, engine in enumerate(self.engines):
            if engine.pending is None:
                if engine.running:
                    idle.append(rank)
            elif now - engine.asked_at > longest_s:
                silent_s = now - engine.asked_at
                self._restart(rank, WorkerLost(f"engine {rank} has not answered for {silent_s:.1f} s", rank))
        return idle

    def _receive(self, handle: CallHandle) -> None:
        engine = self.engines[handle.rank]
        if engine.pending is not handle:  # from before a restart
            return
        engine.pending = None
        try:
            found = self._accept(handle.rank, self.workers.result(handle))
        except WorkerLost as error:
            self._restart(handle.rank, error)
            return
        self.ready.extend(found)

    def _accept(self, rank: int, packed: PackedCompletions) -> list[Completion]:
        """Unpack completions; drop those of requests that the engine does not have."""
        engine = self.engines[rank]
        before, take = len(engine.running), engine.running.pop
        requests = [take(number, None) for number in packed.numbers]
        for request, version in zip(requests, packed.columns[2].tolist(), strict=True):
            if request is not None and version != self.version:
                raise SyncError(
                    f"engine {rank} sampled with version {version} of the weights, and {self.version} was sent before the requests"
                )
        ids = ["" if request is None else request.id for request in requests]
        found = unpack_completions(packed, ids)
        if before - len(engine.running) < len(requests):
            found = [one for one, request in zip(found, requests, strict=True) if request is not None]
        self.unfinished.difference_update(ids)
        engine.work = engine.work * len(engine.running) // max(1, before)  # as if all requests were equal
        engine.restarts = 0 if found else engine.restarts
        return found

    # --- engines that end ------------------------------------------------------------------------------------------------

    def _restart(self, rank: int, error: WorkerLost) -> None:
        """Restart an engine and send its requests to others. It gets weights with the next version, or now if it is the only one."""
        engine = self.engines[rank]
        if engine.restarts == MAX_RESTARTS:
            raise error
        lost, restarts = list(engine.running.values()), engine.restarts + 1
        self.engines[rank] = _EngineState()
        self.engines[rank].restarts = restarts
        self.count("controller/restarts", 1)
        self.note(f"engine {rank} is started again, and its {len(lost)} unfinished requests are issued again: {error}")
        self.workers.restart(rank)
        self.sync.is_linked = False
        if lost:
            self._send_requests(group_by_prompt(lost))

    # --- weights ---------------------------------------------------------------------------------------------------------

    def _send_weights(self, ranks: Sequence[int], is_new: bool) -> None:
        """Start to send the trainer's new weights, or those published last. Later requests wait in the engine until it has them."""
        self.confirm()
        complete = any(not self.engines[rank].has_weights for rank in ranks)
        for rank in ranks:
            self.engines[rank].has_weights = True
        started = time.perf_counter()
        if is_new:
            self.sync.begin(self.version, ranks, complete)
        else:
            self.sync.repeat(ranks)
        self.count("time/sync_s", time.perf_counter() - started)
        if self.at_once:
            self.confirm()

    def confirm(self) -> None:
        """Wait until every engine has verified weights, or raise `SyncError`. Engines that end are restarted and sent all weights."""
        while self.sync.is_pending:
            started = time.perf_counter()
            lost = self.sync.finish()
            self.count("time/sync_s", time.perf_counter() - started)
            for error in lost:
                self._restart(error.rank, error)
            again = [error.rank for error in lost if not self.engines[error.rank].has_weights]
            if again:
                self._send_weights(again, is_new=False)
