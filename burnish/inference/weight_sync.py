"""New weights from the trainer to engines in other processes: in buckets, versioned, verified after every transfer."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.core.dispatch import CallHandle, WorkerLost, Workers
from burnish.core.engine import Request, SamplingOptions
from burnish.core.random_keys import GOLDEN, MASK_64, fold, mix, to_int64
from burnish.core.serialization import array_to_tensor

# --- Named tensors in buckets of bytes: what a trainer publishes under a version, and how an engine takes it.
#
# A bucket is one flat array, since few large objects travel faster than many small ones. A tensor is never cut, so a bucket is
# as large as its largest tensor if need be. Every tensor's checksum goes along, made of the trainer's own bits.

# --- Only the values that changed, bit for bit: a bit for every value of a tensor, and the new values where it is set.
#
# A step of reinforcement learning at a small learning rate leaves most values of a half type as they were: they move by less
# than half of their last bit.

WORD_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers by the bytes of a value: numbers are compared and moved as their bits."""


def encode_delta(old: np.ndarray, new: np.ndarray, item_size: int) -> np.ndarray | None:
    """What makes the bytes `new` out of the bytes `old`; None where all of them would be no more."""
    before, after = old.view(WORD_TYPES[item_size]), new.view(WORD_TYPES[item_size])
    changed = before != after
    bits = np.packbits(changed)
    values = after[changed].view(np.uint8)
    return np.concatenate([bits, values]) if bits.size + values.size < new.size else None


def decode_delta(delta: np.ndarray, num_values: int, item_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which values change, [num_values] bool, and the bytes of those that do."""
    size = -(-num_values // 8)
    changed = np.unpackbits(delta[:size], count=num_values).view(bool)
    values = delta[size:]
    if values.size != int(changed.sum()) * item_size:
        raise ValueError(f"a delta of {int(changed.sum())} values of {item_size} bytes holds {values.size} bytes")
    return changed, values


# --- A checksum of a tensor's bits that any device computes: integer arithmetic, so the order of summation does not matter.

BLOCK_WORDS = 1 << 15
"""Words that share a table of multipliers: what a CPU's cache holds."""
BLOCKS_AT_ONCE = {"cpu": 1, "cuda": 256}
"""Blocks summed in one go; the result does not depend on it."""
LOW_BITS = (1 << 32) - 1


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Of a tensor's 64-bit words w: the sums of (w_i xor (w_i >> 32)) m_i mod 2^64 in each block, chained; and the size.

    A word that changes changes it; so do words in another order or place, but for a chance of 2^-32 or less. m are odd random
    numbers. The shift is for the highest bits, whose products with all odd numbers are alike: without it two changed signs would
    make up for each other.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    size = raw.numel()
    if size % 8:
        raw = torch.cat([raw, raw.new_zeros(-size % 8)])
    words = raw.view(torch.int64)
    multipliers, total = _multipliers(str(words.device)), 0
    step = BLOCK_WORDS * BLOCKS_AT_ONCE[words.device.type]
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        whole = part.numel() // BLOCK_WORDS * BLOCK_WORDS
        for rows in (part[:whole].view(-1, BLOCK_WORDS), part[whole:].view(1, -1)):
            folded = (rows >> 32).bitwise_and_(LOW_BITS).bitwise_xor_(rows)
            for found in folded.mul_(multipliers[: rows.shape[1]]).sum(1).tolist() if rows.numel() else ():
                total = (total * GOLDEN + found) & MASK_64
    return (total * GOLDEN + size) & MASK_64


@lru_cache(maxsize=8)
def _multipliers(device: str) -> Tensor:
    return torch.tensor([to_int64(mix(k + 1) | 1) for k in range(BLOCK_WORDS)], device=device)


BUCKET_BYTES = 1 << 26


@dataclass(frozen=True)
class Entry:
    """A tensor in a bucket, at bytes [start, stop)."""

    name: str
    dtype: torch.dtype
    num_values: int
    start: int
    stop: int
    is_delta: bool
    checksum: int
    """Of the whole tensor as it shall be."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel together; `data` is their bytes, or whatever stands for them in a store."""

    entries: tuple[Entry, ...]
    data: Any


@dataclass(frozen=True)
class Publication:
    """The weights of a version; with a `base`, only what is new since that one."""

    version: int
    buckets: tuple[Bucket, ...]
    base: int | None = None
    is_complete: bool = True
    """Whether everything is in it, frozen matrices in 4 bits too: else only the parameters that are trained."""

    @property
    def entries(self) -> list[Entry]:
        return [entry for bucket in self.buckets for entry in bucket.entries]

    @property
    def num_bytes(self) -> int:
        return sum(entry.stop - entry.start for entry in self.entries)

    @property
    def checksums(self) -> dict[str, int]:
        return {entry.name: entry.checksum for entry in self.entries}


def digest(checksums: Mapping[str, int]) -> int:
    """One number for the checksums of many tensors, whatever their order."""
    return sum(fold(name, total) for name, total in checksums.items()) & MASK_64


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """[bytes] of a tensor, in host memory; where it is contiguous there already, its own."""
    raw: np.ndarray = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return raw


@dataclass
class Publisher:
    """The trainer's side. Of the tensors that are `trained` (None: of all) it can also publish what changed since the last time, with
    `keeps_base`, for which it keeps a copy of them; and all of them as they were then, though the trainer has moved since, with
    either this copy or `holds`, which leaves what was published last in the store."""

    put: Callable[[np.ndarray], Any]
    """Makes a bucket's bytes something that can be sent."""
    trained: Container[str] | None = None
    keeps_base: bool = False
    holds: bool = False
    bucket_bytes: int = BUCKET_BYTES
    _base: dict[str, Tensor] = field(default_factory=dict)
    """Flat, in host memory."""
    _held: tuple[Bucket, ...] = ()
    _version: int | None = None

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], as_delta: bool, complete: bool
    ) -> Publication:
        """The tensors as they are now; as a delta only if there is something it can be one to."""
        base = self._version if as_delta and self.keeps_base else None
        self._held = ()  # first: a store need not have room for two of them
        buckets = self._bucketed(tensors, is_delta=base is not None, keep=self.keeps_base)
        self._held = buckets if self.holds else ()
        self._version = version
        return Publication(version, buckets, base, complete)

    def again(self, others: Iterable[tuple[str, Tensor]]) -> Publication:
        """Everything as it was published last. `others` are all tensors of which neither a copy nor a bucket is kept: they have not
        changed."""
        assert self._version is not None, "nothing was published"
        buckets = self._bucketed(chain(others, self._base.items()), is_delta=False, keep=False)
        held = (
            replace(b, entries=tuple(entry for entry in b.entries if self._changes(entry.name))) for b in self._held
        )
        return Publication(self._version, buckets + tuple(bucket for bucket in held if bucket.entries))

    def _bucketed(self, tensors: Iterable[tuple[str, Tensor]], is_delta: bool, keep: bool) -> tuple[Bucket, ...]:
        buckets: list[Bucket] = []
        entries: list[Entry] = []
        parts: list[np.ndarray] = []
        size = 0
        for name, tensor in tensors:
            raw = raw_bytes(tensor)
            delta = encode_delta(raw_bytes(self._base[name]), raw, tensor.element_size()) if is_delta else None
            sent = raw if delta is None else delta
            if parts and size + sent.size > self.bucket_bytes:
                buckets.append(Bucket(tuple(entries), self.put(np.concatenate(parts))))
                entries, parts, size = [], [], 0
            total = checksum(tensor)
            place = (tensor.numel(), size, size + sent.size)
            entries.append(Entry(name, tensor.dtype, *place, delta is not None, total))
            parts.append(sent)
            size += sent.size
            if keep and self._changes(name):
                self._keep(name, raw, tensor.dtype)
        if parts:
            buckets.append(Bucket(tuple(entries), self.put(np.concatenate(parts))))
        return tuple(buckets)

    def _changes(self, name: str) -> bool:
        """Whether a tensor is ever another: of one that is not there is nothing to keep."""
        return self.trained is None or name in self.trained

    def _keep(self, name: str, raw: np.ndarray, dtype: torch.dtype) -> None:
        if name in self._base:
            raw_bytes(self._base[name])[:] = raw
        else:
            self._base[name] = torch.from_numpy(raw.copy()).view(dtype)


@torch.no_grad()
def apply_publication(
    publication: Publication, parameters: Mapping[str, Tensor], get: Callable[[Any], np.ndarray]
) -> None:
    """The engine's side: write the weights into the parameters of their names, in place."""
    for bucket in publication.buckets:
        data = get(bucket.data)
        for entry in bucket.entries:
            _write_tensor(parameters[entry.name], entry, data[entry.start : entry.stop])


def _write_tensor(parameter: Tensor, entry: Entry, raw: np.ndarray) -> None:
    flat = parameter.detach().view(-1)  # not `.data`, of which the parameter does not know that it was written
    if (parameter.dtype, parameter.numel()) != (entry.dtype, entry.num_values):
        raise ValueError(
            f"{entry.name} is {parameter.numel()} x {parameter.dtype} here and {entry.num_values} x {entry.dtype} at the trainer"
        )
    if not entry.is_delta:
        flat.copy_(_bytes_as(raw, entry.dtype))
        return
    changed, values = decode_delta(raw, entry.num_values, parameter.element_size())
    if values.size:
        flat[torch.from_numpy(changed).to(flat.device)] = _bytes_as(values, entry.dtype).to(flat.device)


def _bytes_as(raw: np.ndarray, dtype: torch.dtype) -> Tensor:
    # A view of bytes as wider values must begin at a multiple of their size, which a part of a bucket may not.
    return array_to_tensor(np.array(raw)).view(dtype)


# --- New weights from the trainer to engines in other processes, and the proof that they arrived.
#
# `begin` has them published and sent, and waits for neither; `finish` waits for the engines and compares what they show (`sync/verify.py`) with what was
# published. In between the engines may be given requests, which they begin when they have taken the weights: nobody may use what
# they sample, and the trainer may not move, before `finish`. `repeat` sends an engine that was started again what the others have:
# the trainer may have moved since.

# --- Whether an engine has the weights it was sent: by version, by the bits of every tensor, and by what it samples.
#
# Checksums are of the engine's parameters after they were written, so they also find what a faulty copy did. The probe is a
# fixed prompt that the engine continues greedily: its log-probs must be those the trainer gives the same tokens, or the engine
# samples with something else than its parameters.

PROBE_PROMPT_TOKENS, PROBE_NEW_TOKENS = 8, 4
PROBE_TOLERANCE = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""How far the log-probs of two ways to compute them may be apart, by the type of the weights."""


class SyncError(UserError):
    """An engine does not have the weights it was sent."""


@dataclass(frozen=True)
class EngineReport:
    """What an engine says after it took weights."""

    version: int
    digest: int
    """Of the checksums of its parameters, as they are now."""
    tokens: tuple[int, ...]
    """How it continued the probe."""
    logp: np.ndarray  # float32


def probe_request(vocab_size: int, max_positions: int | None) -> Request:
    """A prompt that every engine of a run is asked; its tokens depend on the vocabulary alone."""
    length = (
        PROBE_PROMPT_TOKENS
        if max_positions is None
        else max(1, min(PROBE_PROMPT_TOKENS, max_positions - PROBE_NEW_TOKENS - 1))
    )
    tokens = tuple(fold("probe", k) % vocab_size for k in range(length))
    return Request("probe", tokens, SamplingOptions(temperature=0.0, max_tokens=PROBE_NEW_TOKENS), key=0)


def check_version(engine: int, sent: Publication, report: EngineReport | None) -> EngineReport:
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


def checksum_error(engine: int, sent: Publication, found: Mapping[str, int]) -> SyncError:
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


def until_first_difference(
    report: EngineReport, tokens: Sequence[int], expected: Sequence[float]
) -> tuple[EngineReport, Sequence[float]]:
    """A report, and log-probs of another continuation, up to the first token that is not the same."""
    pairs = enumerate(zip(report.tokens, tokens, strict=False))
    stop = next((k + 1 for k, (one, other) in pairs if one != other), len(tokens))
    return replace(report, tokens=report.tokens[:stop], logp=report.logp[:stop]), expected[:stop]


def check_probe(engine: int, report: EngineReport, expected: Sequence[float], dtype: str) -> None:
    """Raise if what an engine samples with is not what the trainer computes with."""
    gaps = np.abs(report.logp.astype(np.float64) - np.asarray(expected, dtype=np.float64))
    if len(expected) != len(report.logp) or not (gaps <= PROBE_TOLERANCE[dtype]).all():
        worst = int(gaps.argmax()) if len(gaps) else 0
        raise SyncError(
            f"engine {engine}, version {report.version}: token {worst + 1} of the probe has log-prob {report.logp[worst]:.5f} there and "
            f"{expected[worst]:.5f} at the trainer, though all tensors are the same: the engine samples with something else"
        )


class PendingScores(Protocol):
    """Log-probs that were asked for."""

    def result(self) -> list[float]:
        """They; waits for them."""


class PendingPublication(Protocol):
    """Weights that are being published."""

    def result(self) -> Publication:
        """They; waits for them."""


@dataclass(frozen=True)
class TrainerClient:
    """What the engine asks of whoever trains."""

    publish: Callable[[int, bool], PendingPublication]
    """The weights under a version; all of them if the second argument says so, else what changed, where that is known."""
    publish_again: Callable[[], PendingPublication]
    """All weights as they were published last."""
    score: Callable[[Sequence[int], Sequence[int]], PendingScores]
    """The log-probs of tokens after a prompt, at temperature 1."""
    dtype: str
    """The type of the weights."""


@dataclass(frozen=True)
class _PendingSync:
    """A publication on its way."""

    published: PendingPublication
    ranks: list[int]
    handles: Sequence[CallHandle]
    is_repeated: bool
    guessed: dict[tuple[int, ...], PendingScores] = field(default_factory=dict)


class WeightSync:
    """Sends weights to some engines of a group at a time."""

    def __init__(
        self, workers: Workers, trainer: TrainerClient, probe: Request, count: Callable[[str, float], None]
    ) -> None:
        self.workers, self.trainer, self.probe, self.count = workers, trainer, probe, count
        self.has_published = False
        self._sent: _PendingSync | None = None
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

    def _send(self, published: PendingPublication, ranks: Sequence[int], is_repeated: bool = False) -> _PendingSync:
        assert self._sent is None, "what was sent before is not verified"
        # Engines are sent what the trainer has yet to publish: they have it a message earlier than if it was waited for here.
        handles = self.workers.send_same(ranks, "take", published)
        self._sent = _PendingSync(published, list(ranks), handles, is_repeated)
        return self._sent

    def finish(self) -> list[WorkerLost]:
        """Wait for what was sent; those that ended meanwhile. Raises `SyncError` for an engine that has something else."""
        sent = self._sent
        if sent is None:
            return []
        self._sent = None
        publication = sent.published.result()  # first: where the trainer failed, engines had nothing to take
        self.count("controller/sync_bytes", publication.num_bytes)
        self.workers.wait_all(sent.handles)
        reports: dict[int, EngineReport] = {}
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
        self, publication: Publication, sent: _PendingSync, reports: Mapping[int, EngineReport], ranks: Sequence[int]
    ) -> None:
        """Every engine has shown that it has the weights, or the run stops."""
        wanted = digest(publication.checksums)
        for rank in ranks:
            report = check_version(rank, publication, reports.get(rank))
            if report.digest != wanted:
                raise checksum_error(rank, publication, self.workers.result(self.workers.send(rank, "checksums")))
            self._last = report.tokens
            check_probe(rank, *self._comparable(report, sent), self.trainer.dtype)

    def _comparable(self, report: EngineReport, sent: _PendingSync) -> tuple[EngineReport, Sequence[float]]:
        """What an engine showed, and the log-probs that the trainer gives the same tokens with the weights that were published."""
        tokens, known = report.tokens, self._expected
        if tokens not in known and known and sent.is_repeated:
            # It may have moved, and can tell no more. Up to where engines part with the same weights it has told: there two tokens
            # are as likely.
            return until_first_difference(report, *next(iter(known.items())))
        if tokens not in known:
            asked = sent.guessed.get(tokens) or self.trainer.score(self.probe.tokens, tokens)
            known[tokens] = asked.result()
        return report, known[tokens]
