"""New weights from the trainer to engines in other processes, and the proof that they arrived.

`begin` has them published and sent, and waits for neither; `finish` waits for the engines and compares what they show (`sync/verify.py`) with what was
published. In between the engines may be given requests, which they begin when they have taken the weights: nobody may use what
they sample, and the trainer may not move, before `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from burnish.core.engine import Request
from burnish.core.workers import Handle, WorkerLost, Workers
from burnish.rollout.sync.buckets import Publication, digest
from burnish.rollout.sync.verify import Report, check_probe, check_version, wrong_tensors


class Scores(Protocol):
    """Log-probs that were asked for."""

    def result(self) -> list[float]:
        """They; waits for them."""


class Published(Protocol):
    """Weights that are being published."""

    def result(self) -> Publication:
        """They; waits for them."""


@dataclass(frozen=True)
class Trainer:
    """What the engine asks of whoever trains."""

    publish: Callable[[int, bool], Published]
    """The weights under a version; all of them if the second argument says so, else what changed, where that is known."""
    score: Callable[[Sequence[int], Sequence[int]], Scores]
    """The log-probs of tokens after a prompt, at temperature 1."""
    dtype: str
    """The type of the weights."""


@dataclass(frozen=True)
class _Sent:
    """A publication on its way."""

    published: Published
    ranks: list[int]
    handles: Sequence[Handle]
    guessed: dict[tuple[int, ...], Scores]


class WeightSync:
    """Sends weights to some engines of a group at a time."""

    def __init__(self, workers: Workers, trainer: Trainer, probe: Request, count: Callable[[str, float], None]) -> None:
        self.workers, self.trainer, self.probe, self.count = workers, trainer, probe, count
        self._sent: _Sent | None = None
        self._last: tuple[int, ...] | None = None

    @property
    def is_pending(self) -> bool:
        """Whether something was sent and is not verified."""
        return self._sent is not None

    def begin(self, version: int, ranks: Sequence[int], complete: bool) -> None:
        """Have the weights published and sent; what changed since the last time will do unless all must be `complete`."""
        assert self._sent is None, "what was sent before is not verified"
        published = self.trainer.publish(version, complete)
        # Engines are sent what the trainer has yet to publish: they have it a message earlier than if it was waited for here.
        handles = self.workers.send_same(ranks, "take", published)
        # Most steps leave the likeliest tokens as they were: while engines are at it, the trainer tells its log-probs of those.
        guessed = {self._last: self.trainer.score(self.probe.tokens, self._last)} if self._last is not None else {}
        self._sent = _Sent(published, list(ranks), handles, guessed)

    def finish(self) -> list[WorkerLost]:
        """Wait for what was sent; those that ended meanwhile. Raises `SyncError` for an engine that has something else."""
        sent = self._sent
        if sent is None:
            return []
        self._sent = None
        publication = sent.published.result()  # first: where the trainer failed, engines had nothing to take
        self.count("controller/sync_bytes", publication.num_bytes)
        self.workers.settle(sent.handles)
        reports: dict[int, Report] = {}
        lost: list[WorkerLost] = []
        for handle in sent.handles:
            try:
                reports[handle.rank] = self.workers.result(handle)
            except WorkerLost as error:
                lost.append(error)
        gone = {error.rank for error in lost}
        self._verify(publication, sent.guessed, reports, [rank for rank in sent.ranks if rank not in gone])
        return lost

    def _verify(
        self,
        publication: Publication,
        scores: Mapping[tuple[int, ...], Scores],
        reports: Mapping[int, Report],
        ranks: Sequence[int],
    ) -> None:
        """Every engine has shown that it has the weights, or the run stops."""
        expected: dict[tuple[int, ...], list[float]] = {}
        wanted = digest(publication.checksums)
        for rank in ranks:
            report = check_version(rank, publication, reports.get(rank))
            if report.digest != wanted:
                raise wrong_tensors(rank, publication, self.workers.result(self.workers.send(rank, "checksums")))
            tokens = self._last = report.tokens
            if tokens not in expected:
                asked = scores.get(tokens) or self.trainer.score(self.probe.tokens, tokens)
                expected[tokens] = asked.result()
            check_probe(rank, report, expected[tokens], self.trainer.dtype)
