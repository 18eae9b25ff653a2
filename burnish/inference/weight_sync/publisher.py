"""New weights from the trainer to engines in other processes, and the proof that they arrived.

`begin` has them published and sent, and waits for neither; `finish` waits for the engines and compares what they show (`sync/verify.py`) with what was
published. In between the engines may be given requests, which they begin when they have taken the weights: nobody may use what
they sample, and the trainer may not move, before `finish`. `repeat` sends an engine that was started again what the others have:
the trainer may have moved since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from burnish.config.errors import UserError
from burnish.core.dispatch import Handle, WorkerLost, Workers
from burnish.core.engine import Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.inference.weight_sync.buckets import Publication, digest

# --- Whether an engine has the weights it was sent: by version, by the bits of every tensor, and by what it samples.
#
# Checksums are of the engine's parameters after they were written, so they also find what a faulty copy did. The probe is a
# fixed prompt that the engine continues greedily: its log-probs must be those the trainer gives the same tokens, or the engine
# samples with something else than its parameters.

PROBE_TOKENS, PROBE_NEW = 8, 4
TOLERANCE = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""How far the log-probs of two ways to compute them may be apart, by the type of the weights."""


class SyncError(UserError):
    """An engine does not have the weights it was sent."""


@dataclass(frozen=True)
class Report:
    """What an engine says after it took weights."""

    version: int
    digest: int
    """Of the checksums of its parameters, as they are now."""
    tokens: tuple[int, ...]
    """How it continued the probe."""
    logp: np.ndarray  # float32


def probe(vocab_size: int, max_positions: int | None) -> Request:
    """A prompt that every engine of a run is asked; its tokens depend on the vocabulary alone."""
    length = PROBE_TOKENS if max_positions is None else max(1, min(PROBE_TOKENS, max_positions - PROBE_NEW - 1))
    tokens = tuple(fold("probe", k) % vocab_size for k in range(length))
    return Request("probe", tokens, SamplingOptions(temperature=0.0, max_tokens=PROBE_NEW), key=0)


def check_version(engine: int, sent: Publication, report: Report | None) -> Report:
    """The report; raises if there is none, or the engine has another version than was published."""
    if report is not None and report.version == sent.version:
        return report
    names = list(sent.checksums)
    old = f"tensor {names[0]} and {len(names) - 1} more there are old" if names else "nothing is new in it"
    if report is None:
        raise SyncError(f"engine {engine} was not sent version {sent.version} of the weights: {old}")
    raise SyncError(
        f"engine {engine} has version {report.version} of the weights, and {sent.version} was published: {old}"
    )


def wrong_tensors(engine: int, sent: Publication, found: Mapping[str, int]) -> SyncError:
    """The error for an engine whose tensors have these checksums and not those that were published."""
    wanted = sent.checksums
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    extra = sorted(found.keys() - wanted.keys())
    name, count = (wrong or extra or ["none"])[0], len(wrong or extra)
    why = "is not what the trainer has" if wrong else "was never sent"
    return SyncError(
        f"engine {engine}, version {sent.version}: tensor {name} {why} ({count} of {len(found)} tensors); the run stops before "
        "anything it samples is used"
    )


def until_parted(report: Report, tokens: Sequence[int], expected: Sequence[float]) -> tuple[Report, Sequence[float]]:
    """A report, and log-probs of another continuation, up to the first token that is not the same."""
    pairs = enumerate(zip(report.tokens, tokens, strict=False))
    stop = next((k + 1 for k, (one, other) in pairs if one != other), len(tokens))
    return replace(report, tokens=report.tokens[:stop], logp=report.logp[:stop]), expected[:stop]


def check_probe(engine: int, report: Report, expected: Sequence[float], dtype: str) -> None:
    """Raise if what an engine samples with is not what the trainer computes with."""
    gaps = np.abs(report.logp.astype(np.float64) - np.asarray(expected, dtype=np.float64))
    if len(expected) != len(report.logp) or not (gaps <= TOLERANCE[dtype]).all():
        worst = int(gaps.argmax()) if len(gaps) else 0
        raise SyncError(
            f"engine {engine}, version {report.version}: token {worst + 1} of the probe has log-prob {report.logp[worst]:.5f} there and "
            f"{expected[worst]:.5f} at the trainer, though all tensors are the same: the engine samples with something else"
        )


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
