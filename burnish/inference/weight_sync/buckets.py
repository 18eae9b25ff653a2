"""Named tensors in buckets of bytes: what a trainer publishes under a version, and how an engine takes it.

A bucket is one flat array, since few large objects travel faster than many small ones. A tensor is never cut, so a bucket is
as large as its largest tensor if need be. Every tensor's checksum goes along, made of the trainer's own bits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.core.random_keys import GOLDEN, MASK, fold, mix, signed
from burnish.core.serialization import to_tensor

# --- Only the values that changed, bit for bit: a bit for every value of a tensor, and the new values where it is set.
#
# A step of reinforcement learning at a small learning rate leaves most values of a half type as they were: they move by less
# than half of their last bit.

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""Unsigned integers by the bytes of a value: numbers are compared and moved as their bits."""


def changes(old: np.ndarray, new: np.ndarray, item_size: int) -> np.ndarray | None:
    """What makes the bytes `new` out of the bytes `old`; None where all of them would be no more."""
    before, after = old.view(WORDS[item_size]), new.view(WORDS[item_size])
    changed = before != after
    bits = np.packbits(changed)
    values = after[changed].view(np.uint8)
    return np.concatenate([bits, values]) if bits.size + values.size < new.size else None


def split(delta: np.ndarray, num_values: int, item_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Which values change, [num_values] bool, and the bytes of those that do."""
    size = -(-num_values // 8)
    changed = np.unpackbits(delta[:size], count=num_values).view(bool)
    values = delta[size:]
    if values.size != int(changed.sum()) * item_size:
        raise ValueError(f"a delta of {int(changed.sum())} values of {item_size} bytes holds {values.size} bytes")
    return changed, values


# --- A checksum of a tensor's bits that any device computes: integer arithmetic, so the order of summation does not matter.

BLOCK = 1 << 15
"""Words that share a table of multipliers: what a CPU's cache holds."""
AT_ONCE = {"cpu": 1, "cuda": 256}
"""Blocks summed in one go; the result does not depend on it."""
LOW = (1 << 32) - 1


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
    step = BLOCK * AT_ONCE[words.device.type]
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        whole = part.numel() // BLOCK * BLOCK
        for rows in (part[:whole].view(-1, BLOCK), part[whole:].view(1, -1)):
            folded = (rows >> 32).bitwise_and_(LOW).bitwise_xor_(rows)
            for found in folded.mul_(multipliers[: rows.shape[1]]).sum(1).tolist() if rows.numel() else ():
                total = (total * GOLDEN + found) & MASK
    return (total * GOLDEN + size) & MASK


@lru_cache(maxsize=8)
def _multipliers(device: str) -> Tensor:
    return torch.tensor([signed(mix(k + 1) | 1) for k in range(BLOCK)], device=device)


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
    return sum(fold(name, total) for name, total in checksums.items()) & MASK


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
            delta = changes(raw_bytes(self._base[name]), raw, tensor.element_size()) if is_delta else None
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
def take(publication: Publication, parameters: Mapping[str, Tensor], get: Callable[[Any], np.ndarray]) -> None:
    """The engine's side: write the weights into the parameters of their names, in place."""
    for bucket in publication.buckets:
        data = get(bucket.data)
        for entry in bucket.entries:
            _write(parameters[entry.name], entry, data[entry.start : entry.stop])


def _write(parameter: Tensor, entry: Entry, raw: np.ndarray) -> None:
    flat = parameter.detach().view(-1)  # not `.data`, of which the parameter does not know that it was written
    if (parameter.dtype, parameter.numel()) != (entry.dtype, entry.num_values):
        raise ValueError(
            f"{entry.name} is {parameter.numel()} x {parameter.dtype} here and {entry.num_values} x {entry.dtype} at the trainer"
        )
    if not entry.is_delta:
        flat.copy_(_values(raw, entry.dtype))
        return
    changed, values = split(raw, entry.num_values, parameter.element_size())
    if values.size:
        flat[torch.from_numpy(changed).to(flat.device)] = _values(values, entry.dtype).to(flat.device)


def _values(raw: np.ndarray, dtype: torch.dtype) -> Tensor:
    # A view of bytes as wider values must begin at a multiple of their size, which a part of a bucket may not.
    return to_tensor(np.array(raw)).view(dtype)
