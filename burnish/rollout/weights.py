"""New weights from the trainer to engines in other processes, and the proof that they arrived.

`begin` has them published and sent, and waits for neither; `finish` waits for the engines and compares what they show (`sync/verify.py`) with what was
published. In between the engines may be given requests, which they begin when they have taken the weights: nobody may use what
they sample, and the trainer may not move, before `finish`. `repeat` sends an engine that was started again what the others have:
the trainer may have moved since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from burnish.core.engine import Request
from burnish.core.workers import Handle, WorkerLost, Workers
from burnish.rollout.sync.buckets import Publication, digest
from burnish.rollout.sync.verify import Report, check_probe, check_version, until_parted, wrong_tensors


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
    publish_again: Callable[[], Published]
    """All weights as they were published last."""
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
    is_repeated: bool
    guessed: dict[tuple[int, ...], Scores] = field(default_factory=dict)


class WeightSync:
    """Sends weights to some engines of a group at a time."""

    def __init__(self, workers: Workers, trainer: Trainer, probe: Request, count: Callable[[str, float], None]) -> None:
        self.workers, self.trainer, self.probe, self.count = workers, trainer, probe, count
        self.has_published = False
        self._sent: _Sent | None = None
        self._last: tuple[int, ...] | None = None
        self._expected: dict[tuple[int, ...], list[float]] = {}
        """The trainer's log-probs of continuations of the probe, with the weights that were published last."""

    @property
    def is_pending(self) -> bool:
        """Whether something was sent and is not verified."""
        return self._sent is not None

    def begin(self, version: int, ranks: Sequence[int], complete: bool) -> None:
        """Have the weights published and sent; what changed since the last time will do unless all must be `complete`."""
        sent = self._send(self.trainer.publish(version, complete), ranks)
        self.has_published, self._expected = True, {}
        # Most steps leave the likeliest tokens as they were: while engines are at it, the trainer tells its log-probs of those.
        if self._last is not None:
            sent.guessed[self._last] = self.trainer.score(self.probe.tokens, self._last)

    def repeat(self, ranks: Sequence[int]) -> None:
        """Have all that was published last sent to engines that have nothing."""
        self._send(self.trainer.publish_again(), ranks, is_repeated=True)

    def _send(self, published: Published, ranks: Sequence[int], is_repeated: bool = False) -> _Sent:
        assert self._sent is None, "what was sent before is not verified"
        # Engines are sent what the trainer has yet to publish: they have it a message earlier than if it was waited for here.
        handles = self.workers.send_same(ranks, "take", published)
        self._sent = _Sent(published, list(ranks), handles, is_repeated)
        return self._sent

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
        self._verify(publication, sent, reports, [rank for rank in sent.ranks if rank not in gone])
        return lost

    def _verify(
        self, publication: Publication, sent: _Sent, reports: Mapping[int, Report], ranks: Sequence[int]
    ) -> None:
        """Every engine has shown that it has the weights, or the run stops."""
        wanted = digest(publication.checksums)
        for rank in ranks:
            report = check_version(rank, publication, reports.get(rank))
            if report.digest != wanted:
                raise wrong_tensors(rank, publication, self.workers.result(self.workers.send(rank, "checksums")))
            self._last = report.tokens
            check_probe(rank, *self._comparable(report, sent), self.trainer.dtype)

    def _comparable(self, report: Report, sent: _Sent) -> tuple[Report, Sequence[float]]:
        """What an engine showed, and the log-probs that the trainer gives the same tokens with the weights that were published."""
        tokens, known = report.tokens, self._expected
        if tokens not in known and known and sent.is_repeated:
            # It may have moved, and can tell no more. Up to where engines part with the same weights it has told: there two tokens
            # are as likely.
            return until_parted(report, *next(iter(known.items())))
        if tokens not in known:
            asked = sent.guessed.get(tokens) or self.trainer.score(self.probe.tokens, tokens)
            known[tokens] = asked.result()
        return report, known[tokens]
