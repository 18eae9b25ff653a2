"""Weight transfer from the trainer to engines in other processes: bucketed, versioned, and verified after every transfer.

A bucket is one flat array: a few large objects travel faster than many small ones. A tensor is never split. A publication carries
a checksum of every tensor, computed from the trainer's bits. It may hold only the values that changed: at a small learning rate
most values of a half-precision tensor move by less than half of their last bit, and stay as they are.

`WeightSync.begin` has weights published and sent, and does not wait. `finish` waits for the engines and verifies them by version,
by checksums of their parameters, and by a probe: a fixed prompt that they continue greedily. Its log-probs must match the
trainer's. Between the two, engines may get requests, which they start after the weights have arrived. Their samples must not be
used, and the trainer must not change its weights, before `finish`. `repeat` sends a restarted engine what the others have.

If an engine has several ranks, each tensor is cut into their parts, and a rank reads only the buckets of its own. Checksums are then
of the parts.
"""

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

WORD_TYPES = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integer type by bytes of a value: values are compared and copied as bits."""
BLOCK_WORDS = 1 << 15
"""Words that share a table of multipliers, which fits into a CPU cache."""
BLOCKS_AT_ONCE = {"cpu": 1, "cuda": 256}
"""Blocks summed in one operation; the result does not depend on it."""
LOW_BITS = (1 << 32) - 1
BUCKET_BYTES = 1 << 26
"""Size of a bucket, unless one tensor is larger."""
PROBE_PROMPT_TOKENS, PROBE_NEW_TOKENS = 8, 4
PROBE_TOLERANCE = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
"""Largest difference of the engine's and the trainer's log-probs, by the type of the weights."""
FOREIGN_PROBE_TOLERANCE = {"float64": 0.02, "float32": 0.02, "bfloat16": 1.0, "float16": 0.2}
"""The same for engines with kernels of their own, such as vLLM. Other kernels stay below it; other weights do not."""
ROUNDED_PROBE_TOLERANCE = 2.0
"""The same where sampler or learner compute in 8 bits. It finds broken engines only; checksums find other weights."""


def encode_delta(old: np.ndarray, new: np.ndarray, item_size: int) -> np.ndarray | None:
    """Encode the bytes `new` as a bit for every value and the values that differ from `old`; None if that is not smaller."""
    before, after = old.view(WORD_TYPES[item_size]), new.view(WORD_TYPES[item_size])
    changed = before != after
    bits = np.packbits(changed)
    values = after[changed].view(np.uint8)
    return np.concatenate([bits, values]) if bits.size + values.size < new.size else None


def decode_delta(delta: np.ndarray, num_values: int, item_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Decode which values change, [num_values] bool, and the bytes of those that do."""
    size = -(-num_values // 8)
    changed = np.unpackbits(delta[:size], count=num_values).view(bool)
    values = delta[size:]
    if values.size != int(changed.sum()) * item_size:
        raise ValueError(f"a delta of {int(changed.sum())} values of {item_size} bytes holds {values.size} bytes")
    return changed, values


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's bits: the sums of (w_i xor (w_i >> 32)) m_i mod 2^64 over 64-bit words w in each block, chained.

    Integer arithmetic gives the same result on any device, in any order of summation. The m are odd random numbers. A changed word
    changes the checksum; words in another order or place change it except with probability 2^-32 or less. The shift is for the
    highest bits, whose products with all odd numbers are equal: without it two changed signs would cancel.
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
    """Checksum of the whole tensor after the update."""


@dataclass(frozen=True)
class Bucket:
    """Tensors that are sent together. `data` is their bytes, or a reference to them in an object store."""

    entries: tuple[Entry, ...]
    data: Any
    part: int = 0
    """The rank of an engine that has these parts of the tensors."""


def part_name(name: str, part: int, num_parts: int) -> str:
    """The name of a rank's part of a tensor among the parts of all ranks."""
    return name if num_parts == 1 else f"{name} of rank {part}"


@dataclass(frozen=True)
class Publication:
    """The weights of a version; with `base`, only what changed since that version."""

    version: int
    buckets: tuple[Bucket, ...]
    base: int | None = None
    is_complete: bool = True
    """Whether it has all tensors, also frozen 4-bit matrices; otherwise only the trained parameters."""
    num_parts: int = 1
    """Ranks of an engine, each with a part of every tensor."""
    moved_bytes: int = 0
    """Bytes that went straight from the learner's ranks to the engines', without buckets."""

    def of_rank(self, rank: int) -> Publication:
        """The parts of one rank of an engine."""
        return replace(self, buckets=tuple(bucket for bucket in self.buckets if bucket.part == rank), num_parts=1)

    @property
    def entries(self) -> list[Entry]:
        return [entry for bucket in self.buckets for entry in bucket.entries]

    @property
    def num_bytes(self) -> int:
        return self.moved_bytes + sum(entry.stop - entry.start for entry in self.entries)

    @property
    def checksums(self) -> dict[str, int]:
        return {
            part_name(entry.name, bucket.part, self.num_parts): entry.checksum
            for bucket in self.buckets
            for entry in bucket.entries
        }


def digest(checksums: Mapping[str, int]) -> int:
    """One number for the checksums of many tensors, independent of their order."""
    return sum(fold(name, total) for name, total in checksums.items()) & MASK_64


def raw_bytes(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor in host memory, without a copy if it is contiguous there."""
    raw: np.ndarray = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return raw


@dataclass
class Publisher:
    """The trainer's side of a transfer.

    With `keeps_base` it keeps a copy of the `trained` tensors (None: of all) and can publish only what changed since the last time.
    With this copy, or with `keeps_buckets`, which leaves the last buckets in the store, it can publish the last version again after
    the trainer has changed its weights.
    """

    put: Callable[[np.ndarray], Any]
    """Turns the bytes of a bucket into something that can be sent."""
    trained: Container[str] | None = None
    keeps_base: bool = False
    keeps_buckets: bool = False
    bucket_bytes: int = BUCKET_BYTES
    num_parts: int = 1
    """Ranks of an engine."""
    cut: Callable[[str, Tensor, int], Tensor] | None = None
    """`cut(name, tensor, rank)`: the part of a tensor that a rank of an engine has. Needed if there are several ranks."""
    _base: dict[str, Tensor] = field(default_factory=dict)
    """Copies in host memory."""
    _last_buckets: tuple[Bucket, ...] = ()
    _version: int | None = None

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], as_delta: bool, complete: bool
    ) -> Publication:
        """Publish the present tensors, as a delta if there is a base for it."""
        base = self._version if as_delta and self.keeps_base else None
        self._last_buckets = ()  # first, so that the store never holds two versions
        buckets = self._bucketed(tensors, is_delta=base is not None, keep=self.keeps_base)
        self._last_buckets = buckets if self.keeps_buckets else ()
        self._version = version
        return Publication(version, buckets, base, complete, self.num_parts)

    def skip(self, version: int) -> None:
        """Record a version that reached the engines another way, so that it can be published again."""
        self._last_buckets, self._version = (), version

    def publish_again(self, others: Iterable[tuple[str, Tensor]]) -> Publication:
        """Publish all tensors of the last version again. `others` are those without a copy or a bucket, which never change."""
        assert self._version is not None, "nothing was published"
        buckets = self._bucketed(chain(others, self._base.items()), is_delta=False, keep=False)
        last = (
            replace(b, entries=tuple(entry for entry in b.entries if self._is_trained(entry.name)))
            for b in self._last_buckets
        )
        buckets += tuple(bucket for bucket in last if bucket.entries)
        return Publication(self._version, buckets, num_parts=self.num_parts)

    def _bucketed(self, tensors: Iterable[tuple[str, Tensor]], is_delta: bool, keep: bool) -> tuple[Bucket, ...]:
        writers = [_BucketWriter(self.put, self.bucket_bytes, part) for part in range(self.num_parts)]
        for name, tensor in tensors:
            old = self._base[name] if is_delta else None
            for part, writer in enumerate(writers):
                writer.add(name, self._part(name, tensor, part), None if old is None else self._part(name, old, part))
            if keep and self._is_trained(name):
                self._copy_base(name, tensor)
        return tuple(bucket for writer in writers for bucket in writer.finish())

    def _part(self, name: str, tensor: Tensor, part: int) -> Tensor:
        if self.num_parts == 1:
            return tensor
        assert self.cut is not None, "several ranks have parts"
        return self.cut(name, tensor, part)

    def _is_trained(self, name: str) -> bool:
        """Whether a tensor is trained. Others need no copy."""
        return self.trained is None or name in self.trained

    def _copy_base(self, name: str, tensor: Tensor) -> None:
        if name in self._base:
            self._base[name].copy_(tensor.detach())
        else:
            self._base[name] = tensor.detach().to("cpu", copy=True).contiguous()


@dataclass
class _BucketWriter:
    """Collects the tensors of one rank of an engine into buckets."""

    put: Callable[[np.ndarray], Any]
    bucket_bytes: int
    part: int
    size: int = 0
    entries: list[Entry] = field(default_factory=list)
    arrays: list[np.ndarray] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)

    def add(self, name: str, tensor: Tensor, old: Tensor | None) -> None:
        """Add a tensor, as a delta from `old` if that is smaller."""
        raw = raw_bytes(tensor)
        delta = None if old is None else encode_delta(raw_bytes(old), raw, tensor.element_size())
        sent = raw if delta is None else delta
        if self.arrays and self.size + sent.size > self.bucket_bytes:
            self._close()
        span = (tensor.numel(), self.size, self.size + sent.size)
        self.entries.append(Entry(name, tensor.dtype, *span, delta is not None, checksum(tensor)))
        self.arrays.append(sent)
        self.size += sent.size

    def finish(self) -> list[Bucket]:
        if self.arrays:
            self._close()
        return self.buckets

    def _close(self) -> None:
        self.buckets.append(Bucket(tuple(self.entries), self.put(np.concatenate(self.arrays)), self.part))
        self.entries, self.arrays, self.size = [], [], 0


@torch.no_grad()
def apply_publication(
    publication: Publication, parameters: Mapping[str, Tensor], get: Callable[[Any], np.ndarray]
) -> None:
    """The engine's side of a transfer: write the weights in place into the parameters of their names."""
    for bucket in publication.buckets:
        data = get(bucket.data)
        for entry in bucket.entries:
            _write_tensor(parameters[entry.name], entry, data[entry.start : entry.stop])


def _write_tensor(parameter: Tensor, entry: Entry, raw: np.ndarray) -> None:
    flat = parameter.detach().view(
        -1
    )  # not `.data`: a write to it would not increase the version counter of the parameter
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
    # Copy first: a view as wider values must start at a multiple of their size, and a part of a bucket may not.
    return array_to_tensor(np.array(raw)).view(dtype)


# --- verification ------------------------------------------------------------------------------------------------------


class SyncError(UserError):
    """An engine does not have the weights it was sent."""


@dataclass(frozen=True)
class EngineReport:
    """What an engine reports after a transfer."""

    version: int
    digest: int
    """Digest of the checksums of its parameters after they were written, so that it also shows a faulty copy."""
    tokens: tuple[int, ...]
    """Its continuation of the probe."""
    logp: np.ndarray  # float32


def probe_request(vocab_size: int, max_positions: int | None) -> Request:
    """The probe of all engines of a run. Its tokens depend only on the size of the vocabulary."""
    length = (
        PROBE_PROMPT_TOKENS
        if max_positions is None
        else max(1, min(PROBE_PROMPT_TOKENS, max_positions - PROBE_NEW_TOKENS - 1))
    )
    tokens = tuple(fold("probe", k) % vocab_size for k in range(length))
    return Request("probe", tokens, SamplingOptions(temperature=0.0, max_tokens=PROBE_NEW_TOKENS), key=0)


def check_version(engine: int, sent: Publication, report: EngineReport | None) -> EngineReport:
    """Return the report; raise if there is none, or if the engine has another version than the published one."""
    if report is not None and report.version == sent.version:
        return report
    names = list(sent.checksums)
    old = f"tensor {names[0]} and {len(names) - 1} more there are old" if names else "it has no new tensors"
    if report is None:
        raise SyncError(f"engine {engine} was not sent version {sent.version} of the weights: {old}")
    raise SyncError(
        f"engine {engine} has version {report.version} of the weights, and {sent.version} was published: {old}"
    )


def checksum_error(engine: int, sent: Publication, found: Mapping[str, int]) -> SyncError:
    """The error for an engine whose tensors do not have the published checksums."""
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
    """Cut a report, and the log-probs of another continuation, after the first token that differs."""
    pairs = enumerate(zip(report.tokens, tokens, strict=False))
    stop = next((k + 1 for k, (one, other) in pairs if one != other), len(tokens))
    return replace(report, tokens=report.tokens[:stop], logp=report.logp[:stop]), expected[:stop]


def check_probe(engine: int, report: EngineReport, expected: Sequence[float], tolerance: float) -> None:
    """Raise if the engine's log-probs of the probe differ from the trainer's: it samples with other weights."""
    gaps = np.abs(report.logp.astype(np.float64) - np.asarray(expected, dtype=np.float64))
    if len(expected) != len(report.logp) or not (gaps <= tolerance).all():
        worst = int(gaps.argmax()) if len(gaps) else 0
        raise SyncError(
            f"engine {engine}, version {report.version}: token {worst + 1} of the probe has log-prob {report.logp[worst]:.5f} there and "
            f"{expected[worst]:.5f} at the trainer, though all tensors are equal: the engine does not sample with its parameters"
        )


class PendingScores(Protocol):
    """Log-probs that are being computed."""

    def result(self) -> list[float]:
        """Wait for the result."""


class PendingPublication(Protocol):
    """Weights that are being published."""

    def result(self) -> Publication:
        """Wait for the result."""


@dataclass(frozen=True)
class TrainerClient:
    """Calls that the engines' side makes to the trainer."""

    publish: Callable[[int, bool], PendingPublication]
    """`publish(version, complete)`: publish all weights if `complete`, else what changed if that is known."""
    publish_again: Callable[[], PendingPublication]
    """Publish all weights of the last version again."""
    score: Callable[[Sequence[int], Sequence[int]], PendingScores]
    """`score(prompt, tokens)`: log-probs at temperature 1."""
    tolerance: float
    """Largest difference of an engine's log-probs from the trainer's."""
    open_link: Callable[[], bool] | None = None
    """Connects the trainer's ranks with those of all engines; False if one did not come. None if weights go through the object store."""
    reshard: Callable[[int, bool], PendingPublication] | None = None
    """`reshard(version, complete)`: send weights over the link."""


@dataclass(frozen=True)
class _PendingSync:
    """A publication that is being sent."""

    published: PendingPublication
    ranks: list[int]
    handles: Sequence[CallHandle]
    is_repeated: bool
    is_resharded: bool = False
    guessed: dict[tuple[int, ...], PendingScores] = field(default_factory=dict)


class WeightSync:
    """Sends weights to engines of a worker group and verifies that they arrived."""

    def __init__(
        self, workers: Workers, trainer: TrainerClient, probe: Request, count: Callable[[str, float], None]
    ) -> None:
        self.workers, self.trainer, self.probe, self.count = workers, trainer, probe, count
        self.has_published = False
        self.is_linked = False
        """Whether weights can go straight from the trainer's ranks to the engines'. Set to False if an engine is started again."""
        self._sent: _PendingSync | None = None
        self._last: tuple[int, ...] | None = None
        self._expected: dict[tuple[int, ...], list[float]] = {}
        """The trainer's log-probs of continuations of the probe, with the weights published last."""

    @property
    def is_pending(self) -> bool:
        """Whether weights were sent and not verified yet."""
        return self._sent is not None

    def begin(self, version: int, ranks: Sequence[int], complete: bool) -> None:
        """Publish and send weights. Without `complete`, only what changed since the last time may be sent."""
        if self._has_link(ranks):
            assert self.trainer.reshard is not None, "there is a link"
            handles = self.workers.send_same(ranks, "take_resharded", version, complete)
            published = self.trainer.reshard(version, complete)
            sent = self._sent = _PendingSync(published, list(ranks), handles, False, is_resharded=True)
        else:
            sent = self._send(self.trainer.publish(version, complete), ranks)
        self.has_published, self._expected = True, {}
        # Most steps do not change the greedy continuation: the trainer scores the last one while the engines receive the weights.
        if self._last is not None:
            sent.guessed[self._last] = self.trainer.score(self.probe.tokens, self._last)

    def _has_link(self, ranks: Sequence[int]) -> bool:
        """Whether there is a link to all engines; opens one if there should be."""
        if self.trainer.open_link is None or len(ranks) < self.workers.size:
            return False
        if not self.is_linked:
            self.is_linked = self.trainer.open_link()
        return self.is_linked

    def repeat(self, ranks: Sequence[int]) -> None:
        """Send the weights published last to engines that have none."""
        self._send(self.trainer.publish_again(), ranks, is_repeated=True)

    def _send(self, published: PendingPublication, ranks: Sequence[int], is_repeated: bool = False) -> _PendingSync:
        assert self._sent is None, "the last transfer is not verified"
        # Send the pending publication: the engines get it one message earlier than if it were awaited here.
        handles = self.workers.send_same(ranks, "take", published)
        self._sent = _PendingSync(published, list(ranks), handles, is_repeated)
        return self._sent

    def finish(self) -> list[WorkerLost]:
        """Wait for the transfer and verify it; return the errors of lost engines. Raise `SyncError` if an engine has other weights."""
        sent = self._sent
        if sent is None:
            return []
        self._sent = None
        publication = sent.published.result()  # first: if the trainer failed, its error is the cause
        self.count("controller/sync_bytes", publication.num_bytes)
        self.workers.wait_all(sent.handles)
        reports: dict[int, EngineReport] = {}
        lost: list[WorkerLost] = []
        for handle in sent.handles:
            try:
                reports[handle.rank] = self.workers.result(handle)
            except WorkerLost as error:
                lost.append(error)
        here = [rank for rank in sent.ranks if rank not in {error.rank for error in lost}]
        missed = [rank for rank in here if sent.is_resharded and reports[rank].version != publication.version]
        self._verify(publication, sent, reports, [rank for rank in here if rank not in missed])
        if lost or missed:
            self.is_linked = False
        if missed:  # a process ended in the middle, and engines that waited for it have parts of two versions
            self.count("controller/resharding_failures", len(missed))
            self._send(self.trainer.publish_again(), missed)
            lost += self.finish()
        return lost

    def _verify(
        self, publication: Publication, sent: _PendingSync, reports: Mapping[int, EngineReport], ranks: Sequence[int]
    ) -> None:
        """Raise unless every engine has the published weights."""
        wanted = digest(publication.checksums)
        for rank in ranks:
            report = check_version(rank, publication, reports.get(rank))
            if report.digest != wanted:
                raise checksum_error(rank, publication, self.workers.result(self.workers.send(rank, "checksums")))
            self._last = report.tokens
            check_probe(rank, *self._comparable(report, sent), self.trainer.tolerance)

    def _comparable(self, report: EngineReport, sent: _PendingSync) -> tuple[EngineReport, Sequence[float]]:
        """An engine's report, and the trainer's log-probs of the same tokens with the published weights."""
        tokens, known = report.tokens, self._expected
        if tokens not in known and known and sent.is_repeated:
            # The trainer's weights may have changed, so it cannot score these tokens. With equal weights engines differ only where
            # two tokens are equally likely: compare with a known continuation up to there.
            return until_first_difference(report, *next(iter(known.items())))
        if tokens not in known:
            asked = sent.guessed.get(tokens) or self.trainer.score(self.probe.tokens, tokens)
            known[tokens] = asked.result()
        return report, known[tokens]
