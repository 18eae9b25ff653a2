"""An engine whose work is done by a group of engines in other processes.

Requests are dealt to the engine that has least to do, the samples of a prompt to the same one, since they share its work.
Completions come back in batches as they finish. On their way requests go by numbers, a new one every time a request is dealt.
An engine that ends, or does not answer, is started again, and what it had not
handed over is dealt anew: a request's tokens follow from its key, so they are the same wherever they are drawn, and a completion
is only ever taken from the engine that has the request.

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

import numpy as np
from torch import Tensor

from burnish.core.dispatch import CallHandle, WorkerLost, Workers
from burnish.core.engine import Completion, Request
from burnish.inference.request_arrays import (
    PackedCompletions,
    distinct_requests,
    group_by_prompt,
    pack_requests,
    unpack_completions,
)
from burnish.inference.weight_sync import SyncError, TrainerClient, WeightSync

COLLECT_WAIT_S = 0.05
"""How long an engine may wait for more completions before it hands over what it has; for hundreds of engines more,"""
COLLECT_WAIT_PER_ENGINE_S = 0.01
"""so much for each, or the driver would do nothing but read."""
POLL_S = 0.2
MAX_SILENCE_S = 60.0
"""An engine answers within moments, however long its requests take: one that has not for so long is stopped or cut off."""
MAX_RESTARTS = 3
"""Times that an engine is started again without having handed over anything in between: it would end for ever."""


class _EngineState:
    """What is known of one engine."""

    def __init__(self) -> None:
        self.running: dict[int, Request] = {}
        """By their numbers."""
        self.work = 0
        """Tokens that it may still have to compute."""
        self.listening: CallHandle | None = None
        self.heard = 0.0
        """When it was last asked for completions."""
        self.has_weights = False
        self.restarts = 0


class RemoteEngine:
    """Many engines as one (`core.engine.Engine`). `count(name, amount)` takes metrics, `note` a sentence for the user.

    With `at_once` new weights are verified before `load` returns: so it must be where the trainer goes on while engines sample.
    Else before anything sampled with them is handed over, and whoever lets the trainer move calls `confirm` first.
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
    ) -> None:
        self.workers, self.deadline_s, self.at_once = workers, deadline_s, at_once
        self.sync = WeightSync(workers, trainer, probe, count)
        self.check, self.count, self.note = check, count, note
        self.members = [_EngineState() for _ in range(workers.size)]
        self.unfinished: set[str] = set()
        """The ids of requests that some engine has."""
        self._num_dealt = 0
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
        self._deal(groups)

    def stream(self) -> Iterator[Completion]:
        while self.ready or (self.num_unfinished and not self._interrupted):
            if not self.ready:
                self._listen()
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
            rank: [number for number, request in member.running.items() if request.id in wanted]
            for rank, member in enumerate(self.members)
        }
        for handle in self.workers.send_each("abort", {rank: (some,) for rank, some in own.items() if some}):
            try:
                # What finished meanwhile is handed over by a later `stream`.
                kept += self._accept(handle.rank, self.workers.result(handle))
            except WorkerLost as error:
                kept += [self._forget(handle.rank, number) for number in own[handle.rank]]
                self._replace(handle.rank, error)
        return kept if keep else []

    def _forget(self, rank: int, number: int) -> Completion:
        """A request that an engine took with it, as if it had been stopped before its first token."""
        request, none = self.members[rank].running.pop(number), np.zeros(0, np.float32)
        self.unfinished.discard(request.id)
        raw = none if request.sampling.raw_logprobs else None
        return Completion(request.id, np.zeros(0, np.int64), none, "aborted", self.version, raw_logp=raw)

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Have the trainer's weights sent to all engines, under this version; none are taken from elsewhere."""
        if any(True for _ in named_tensors):
            raise ValueError("engines in other processes take their weights from the trainer, not from here")
        if self.num_unfinished:
            raise RuntimeError(f"new weights while {self.num_unfinished} requests run: finish or abort them first")
        self.confirm()
        self.version = version
        self._send_weights(range(len(self.members)), is_new=True)

    def sleep(self) -> None:
        self.confirm()
        if not self.is_awake:
            return
        self.is_awake = False
        for handle in self.workers.send_same(range(len(self.members)), "sleep"):
            try:
                self.workers.result(handle)
            except WorkerLost as error:
                self._replace(handle.rank, error)

    def wake(self) -> None:
        """Nothing to do: every engine wakes with its first request."""

    # --- requests out, completions in ------------------------------------------------------------------------------------

    def _deal(self, groups: Iterable[Sequence[Request]]) -> None:
        """Each group of requests to the engine with least work, of those that have weights."""
        if not any(member.has_weights for member in self.members):
            self._send_weights(range(len(self.members)), is_new=not self.sync.has_published)
        heap = [(member.work, rank) for rank, member in enumerate(self.members) if member.has_weights]
        heapq.heapify(heap)
        dealt: dict[int, list[Sequence[Request]]] = {}
        most = attrgetter("sampling.max_tokens")
        for group in groups:
            work, rank = heap[0]
            dealt.setdefault(rank, []).append(group)
            work += len(group) * len(group[0].tokens) + sum(map(most, group))
            heapq.heapreplace(heap, (work, rank))
            self.members[rank].work = work
        packed = {}
        for rank, own in dealt.items():
            packed[rank] = (pack_requests(own, self._num_dealt),)
            numbered = dict(enumerate(chain.from_iterable(own), self._num_dealt))
            self.members[rank].running |= numbered
            self._num_dealt += len(numbered)
        # Nobody waits for it: one that is lost does not answer when it is asked for completions either.
        self.workers.send_each("submit", packed)

    def _listen(self) -> None:
        """Ask every engine that has something to do for what is finished; wait for some of them to answer."""
        self.confirm()
        wait_s = max(COLLECT_WAIT_S, COLLECT_WAIT_PER_ENGINE_S * len(self.members))
        for handle in self.workers.ready([m.listening for m in self.members if m.listening is not None], 0.0):
            self._hear(handle)  # whoever has answered is not silent, however long nobody listened
        now = time.monotonic()
        # All it has: of most engines some finish in that time, and whoever has finished all need not wait.
        enough = {rank: len(self.members[rank].running) for rank in self._idle(now, wait_s)}
        for handle in self.workers.send_each("collect", {rank: (least, wait_s) for rank, least in enough.items()}):
            self.members[handle.rank].listening, self.members[handle.rank].heard = handle, now
        asked = [member.listening for member in self.members if member.listening is not None]
        self.confirm()  # where engines were replaced meanwhile
        for handle in self.workers.ready(asked, POLL_S):
            self._hear(handle)

    def _idle(self, now: float, wait_s: float) -> list[int]:
        """The engines to ask; one that has not answered for too long is replaced."""
        idle, longest_s = [], min(self.deadline_s, MAX_SILENCE_S) + wait_s
        for rank, member in enumerate(self.members):
            if member.listening is None:
                if member.running:
                    idle.append(rank)
            elif now - member.heard > longest_s:
                silent_s = now - member.heard
                self._replace(rank, WorkerLost(f"engine {rank} has not answered for {silent_s:.1f} s", rank))
        return idle

    def _hear(self, handle: CallHandle) -> None:
        member = self.members[handle.rank]
        if member.listening is not handle:  # of an engine that was replaced meanwhile
            return
        member.listening = None
        try:
            found = self._accept(handle.rank, self.workers.result(handle))
        except WorkerLost as error:
            self._replace(handle.rank, error)
            return
        self.ready.extend(found)

    def _accept(self, rank: int, packed: PackedCompletions) -> list[Completion]:
        """The completions of requests that the engine has; there are no others unless it is asked twice."""
        member = self.members[rank]
        before, take = len(member.running), member.running.pop
        requests = [take(number, None) for number in packed.numbers]
        for request, version in zip(requests, packed.columns[2].tolist(), strict=True):
            if request is not None and version != self.version:
                raise SyncError(
                    f"engine {rank} sampled with version {version} of the weights, and {self.version} was sent before the requests"
                )
        ids = ["" if request is None else request.id for request in requests]
        found = unpack_completions(packed, ids)
        if before - len(member.running) < len(requests):
            found = [one for one, request in zip(found, requests, strict=True) if request is not None]
        self.unfinished.difference_update(ids)
        member.work = member.work * len(member.running) // max(1, before)  # as if they were all alike
        member.restarts = 0 if found else member.restarts
        return found

    # --- engines that end ------------------------------------------------------------------------------------------------

    def _replace(self, rank: int, error: WorkerLost) -> None:
        """Start an engine again; others take over what it had. It gets weights with the next version, or now if it is alone."""
        member = self.members[rank]
        if member.restarts == MAX_RESTARTS:
            raise error
        lost, restarts = list(member.running.values()), member.restarts + 1
        self.members[rank] = _EngineState()
        self.members[rank].restarts = restarts
        self.count("controller/restarts", 1)
        self.note(f"engine {rank} is started again, and its {len(lost)} unfinished requests are issued again: {error}")
        self.workers.restart(rank)
        if lost:
            self._deal(group_by_prompt(lost))

    # --- weights ---------------------------------------------------------------------------------------------------------

    def _send_weights(self, ranks: Sequence[int], is_new: bool) -> None:
        """Begin to send the trainer's, or else those that were published last; requests that an engine is given afterwards wait until it
        has them."""
        self.confirm()
        complete = any(not self.members[rank].has_weights for rank in ranks)
        for rank in ranks:
            self.members[rank].has_weights = True
        started = time.perf_counter()
        if is_new:
            self.sync.begin(self.version, ranks, complete)
        else:
            self.sync.repeat(ranks)
        self.count("time/sync_s", time.perf_counter() - started)
        if self.at_once:
            self.confirm()

    def confirm(self) -> None:
        """Wait until every engine has shown that it has the weights it was sent, or raise `SyncError`. Engines that end meanwhile
        are started again, and then sent everything."""
        while self.sync.is_pending:
            started = time.perf_counter()
            lost = self.sync.finish()
            self.count("time/sync_s", time.perf_counter() - started)
            for error in lost:
                self._replace(error.rank, error)
            again = [error.rank for error in lost if not self.members[error.rank].has_weights]
            if again:
                self._send_weights(again, is_new=False)
