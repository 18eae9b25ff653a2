"""An engine whose work is done by a group of engines in other processes.

Requests are dealt to the engine that has least to do, the samples of a prompt to the same one, since they share its work.
Completions come back in batches as they finish. An engine that ends, or does not answer, is started again, and what it had not
handed over is dealt anew: a request's tokens follow from its key, so they are the same wherever they are drawn, and a completion
is only ever taken from the engine that has the request.

New weights are asked of the trainer and sent to every engine; nothing is sampled before all of them have shown that they have
them (`sync/verify.py`).
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from burnish.core.engine import Completion, Request
from burnish.core.workers import Handle, WorkerLost, Workers
from burnish.rollout.messages import Completions, by_prompt, pack_requests, unpack_completions
from burnish.rollout.sync.buckets import Publication, digest
from burnish.rollout.sync.verify import Report, check_probe, check_version, wrong_tensors

WAIT_S = 0.05
"""How long an engine may wait for more completions before it hands over what it has; for hundreds of engines more,"""
WAIT_FOR_EACH_S = 0.01
"""so much for each, or the driver would do nothing but read."""
LOOK_EVERY_S = 0.2
SILENT_S = 60.0
"""An engine answers within moments, however long its requests take: one that has not for so long is stopped or cut off."""
MAX_RESTARTS = 3
"""Times that an engine is started again without having handed over anything in between: it would end for ever."""


@dataclass(frozen=True)
class Trainer:
    """What the engine asks of whoever trains."""

    publish: Callable[[int, bool], Publication]
    """The weights under a version; all of them if the second argument says so, else what changed, where that is known."""
    score: Callable[[Sequence[int], Sequence[int]], list[float]]
    """The log-probs of tokens after a prompt, at temperature 1."""
    dtype: str
    """The type of the weights."""


class _Member:
    """What is known of one engine."""

    def __init__(self) -> None:
        self.running: dict[str, Request] = {}
        self.work = 0
        """Tokens that it may still have to compute."""
        self.listening: Handle | None = None
        self.heard = 0.0
        """When it was last asked for completions."""
        self.has_weights = False
        self.restarts = 0


class RemoteEngine:
    """Many engines as one (`core.engine.Engine`). `count(name, amount)` takes metrics, `note` a sentence for the user."""

    def __init__(
        self,
        workers: Workers,
        trainer: Trainer,
        probe: Request,
        deadline_s: float,
        check: Callable[[Sequence[Request]], None],
        count: Callable[[str, float], None],
        note: Callable[[str], None],
    ) -> None:
        self.workers, self.trainer, self.probe, self.deadline_s = workers, trainer, probe, deadline_s
        self.check, self.count, self.note = check, count, note
        self.members = [_Member() for _ in range(workers.size)]
        self.home: dict[str, int] = {}
        """The engine of every unfinished request."""
        self.is_awake = False
        self.version = 0
        self.ready: deque[Completion] = deque()
        self._interrupted = False

    @property
    def num_unfinished(self) -> int:
        return len(self.home)

    # --- the Engine protocol ---------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> None:
        self.check(requests)
        fresh = {request.id for request in requests}
        if len(fresh) < len(requests) or fresh & self.home.keys():
            raise ValueError("two requests have the same id, or one is already running")
        self.is_awake = True
        self._deal(requests)

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
        wanted = set(ids)
        kept = [completion for completion in self.ready if completion.id in wanted]
        self.ready = deque(completion for completion in self.ready if completion.id not in wanted)
        unknown = wanted - {c.id for c in kept} - self.home.keys()
        if unknown:
            raise KeyError(f"cannot abort requests that are not running: {sorted(unknown)[:3]}")
        own = {rank: sorted(wanted & member.running.keys()) for rank, member in enumerate(self.members)}
        for handle in self.workers.send_each("abort", {rank: (ids,) for rank, ids in own.items() if ids}):
            try:
                # What finished meanwhile is handed over by a later `stream`.
                kept += self._accept(handle.rank, self.workers.result(handle))
            except WorkerLost as error:
                kept += [self._forget(handle.rank, id) for id in own[handle.rank]]
                self._replace(handle.rank, error)
        return kept if keep else []

    def _forget(self, rank: int, id: str) -> Completion:
        """A request that an engine took with it, as if it had been stopped before its first token."""
        del self.home[id]
        request, none = self.members[rank].running.pop(id), np.zeros(0, np.float32)
        raw = none if request.sampling.raw_logprobs else None
        return Completion(id, np.zeros(0, np.int64), none, "aborted", self.version, raw_logp=raw)

    def load(self, version: int, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Have the trainer's weights sent to all engines, under this version; none are taken from elsewhere."""
        if any(True for _ in named_tensors):
            raise ValueError("engines in other processes take their weights from the trainer, not from here")
        if self.num_unfinished:
            raise RuntimeError(f"new weights while {self.num_unfinished} requests run: finish or abort them first")
        started = time.perf_counter()
        self.version = version
        self._send_weights(range(len(self.members)))
        self.count("time/sync_s", time.perf_counter() - started)

    def sleep(self) -> None:
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

    def _deal(self, requests: Sequence[Request]) -> None:
        """Each prompt's requests to the engine with least work, of those that have weights."""
        if not any(member.has_weights for member in self.members):
            self._send_weights(range(len(self.members)))
        heap = [(member.work, rank) for rank, member in enumerate(self.members) if member.has_weights]
        heapq.heapify(heap)
        dealt: dict[int, list[list[Request]]] = {}
        for group in by_prompt(requests):
            work, rank = heap[0]
            dealt.setdefault(rank, []).append(group)
            work += sum(len(request.tokens) + request.sampling.max_tokens for request in group)
            heapq.heapreplace(heap, (work, rank))
            self.members[rank].work = work
        for rank, groups in dealt.items():
            given = {request.id: request for group in groups for request in group}
            self.members[rank].running |= given
            self.home |= dict.fromkeys(given, rank)
        # Nobody waits for it: one that is lost does not answer when it is asked for completions either.
        self.workers.send_each("submit", {rank: (pack_requests(groups),) for rank, groups in dealt.items()})

    def _listen(self) -> None:
        """Ask every engine that has something to do for what is finished; wait for some of them to answer."""
        wait_s = max(WAIT_S, WAIT_FOR_EACH_S * len(self.members))
        now = time.monotonic()
        # All it has: of most engines some finish in that time, and whoever has finished all need not wait.
        enough = {rank: len(self.members[rank].running) for rank in self._idle(now, wait_s)}
        for handle in self.workers.send_each("collect", {rank: (least, wait_s) for rank, least in enough.items()}):
            self.members[handle.rank].listening, self.members[handle.rank].heard = handle, now
        asked = [member.listening for member in self.members if member.listening is not None]
        for handle in self.workers.ready(asked, LOOK_EVERY_S):
            self._hear(handle)

    def _idle(self, now: float, wait_s: float) -> list[int]:
        """The engines to ask; one that has not answered for too long is replaced."""
        idle = []
        for rank, member in enumerate(self.members):
            if member.listening is None:
                if member.running:
                    idle.append(rank)
            elif now - member.heard > min(self.deadline_s, SILENT_S) + wait_s:
                silent_s = now - member.heard
                self._replace(rank, WorkerLost(f"engine {rank} has not answered for {silent_s:.1f} s", rank))
        return idle

    def _hear(self, handle: Handle) -> None:
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

    def _accept(self, rank: int, packed: Completions) -> list[Completion]:
        """The completions of requests that the engine has; there are no others unless it is asked twice."""
        member = self.members[rank]
        before = len(member.running)
        requests = [member.running.pop(id, None) for id in packed.ids]
        found = [one for one, asked in zip(unpack_completions(packed), requests, strict=True) if asked is not None]
        for completion in found:
            del self.home[completion.id]
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
        for request in lost:
            del self.home[request.id]
        self.members[rank] = _Member()
        self.members[rank].restarts = restarts
        self.count("controller/restarts", 1)
        self.note(f"engine {rank} is started again, and its {len(lost)} unfinished requests are issued again: {error}")
        self.workers.restart(rank)
        if lost:
            self._deal(lost)

    # --- weights ---------------------------------------------------------------------------------------------------------

    def _send_weights(self, ranks: Iterable[int]) -> None:
        """One publication for all; engines that end meanwhile are started again, and then sent everything."""
        waiting = list(ranks)
        while waiting:
            complete = any(not self.members[rank].has_weights for rank in waiting)
            publication = self.trainer.publish(self.version, complete)
            self.count("controller/sync_bytes", publication.num_bytes)
            sent = self.workers.send_same(waiting, "take", publication)
            self.workers.settle(sent)
            reports: dict[int, Report] = {}
            lost = []
            for handle in sent:
                try:
                    reports[handle.rank] = self.workers.result(handle)
                except WorkerLost as error:
                    self._replace(handle.rank, error)
                    lost.append(handle.rank)
            self._verify(publication, reports, [rank for rank in waiting if rank not in lost])
            waiting = lost

    def _verify(self, sent: Publication, reports: Mapping[int, Report], ranks: Sequence[int]) -> None:
        """Every engine has shown that it has the weights, or the run stops."""
        expected: dict[tuple[int, ...], list[float]] = {}
        wanted = digest(sent.checksums)
        for rank in ranks:
            report = check_version(rank, sent, reports.get(rank))
            if report.digest != wanted:
                raise wrong_tensors(rank, sent, self.workers.result(self.workers.send(rank, "checksums")))
            if report.tokens not in expected:
                expected[report.tokens] = self.trainer.score(self.probe.tokens, report.tokens)
            check_probe(rank, report, expected[report.tokens], self.trainer.dtype)
            self.members[rank].has_weights = True
