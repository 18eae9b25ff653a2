"""Blocks of a tensor that is spread over processes, and how one way to cut it follows from another.

A shard is described by where it starts and how far it goes in each dimension of the whole: rows of a chunk that need
not be as many as the next chunk's, columns of a tensor-parallel layer, both at once, or everything. A process may hold
several of them in one tensor, where the rows it works on together stand apart in the whole. To make a tensor from those
that were cut in another way, take from each what the two have in common. Nothing here knows of processes or of files.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """A block of a tensor of a shape: `sizes` elements from `offsets` on, in each dimension."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(f"a shard of a tensor of shape {self.shape} cannot be {self.sizes} at {self.offsets}")
        for length, offset, size in zip(self.shape, self.offsets, self.sizes, strict=True):
            if offset < 0 or size < 0 or offset + size > length:
                raise ValueError(f"{self.sizes} from {self.offsets} on is not inside a tensor of shape {self.shape}")

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class PlacedShard:
    """A shard and where it lies in the tensor that holds it: from `at` on, in each dimension."""

    shard: Shard
    at: tuple[int, ...]


@dataclass(frozen=True)
class Overlap:
    """A block of elements that is in both: where in the tensor that is read, and where in the one that is made."""

    source: Slices
    target: Slices
    numel: int


def full_shard(shape: Sequence[int]) -> Shard:
    """The shard that is the tensor."""
    return Shard(tuple(shape), (0,) * len(shape), tuple(shape))


def at_origin(shard: Shard) -> PlacedShard:
    """A shard that is all of the tensor that holds it."""
    return PlacedShard(shard, (0,) * len(shard.shape))


def blocks_of_permuted_rows(shard: Shard, order: Sequence[int] | None) -> list[PlacedShard]:
    """The blocks of a tensor that a shard of the same tensor with its rows in another order holds.

    Row i of that other tensor is row `order[i]` of the usual one; None stands for the usual order.
    """
    if order is None or shard.numel == 0:
        return [at_origin(shard)]
    first, height = shard.offsets[0], shard.sizes[0]
    rows = order[first : first + height]
    starts = [i for i in range(height) if i == 0 or rows[i] != rows[i - 1] + 1]
    found = []
    for start, stop in zip(starts, [*starts[1:], height], strict=True):
        offsets, sizes = (rows[start], *shard.offsets[1:]), (stop - start, *shard.sizes[1:])
        found.append(PlacedShard(Shard(shard.shape, offsets, sizes), (start, *(0 for _ in shard.shape[1:]))))
    return found


def in_block_units(placed: PlacedShard, each: Sequence[int]) -> PlacedShard:
    """The same of a tensor that has one number for every `each` of this one's, in each dimension."""
    shard = placed.shard
    numbers = (shard.shape, shard.offsets, shard.sizes, placed.at)
    if any(number % divisor for values in numbers for number, divisor in zip(values, each, strict=True)):
        raise ValueError(f"{shard} cannot be counted in blocks of {tuple(each)}")
    shape, offsets, sizes, at = (tuple(n // d for n, d in zip(values, each, strict=True)) for values in numbers)
    return PlacedShard(Shard(shape, offsets, sizes), at)


def overlap(wanted: PlacedShard, stored: PlacedShard) -> Overlap | None:
    """What two shards of one tensor have in common; None where that is not one element."""
    want, have = wanted.shard, stored.shard
    if want.shape != have.shape:
        raise ValueError(f"shards of tensors of different shapes: {want.shape} wanted, {have.shape} stored")
    source, target = [], []
    for dim in range(len(want.shape)):
        start = max(want.offsets[dim], have.offsets[dim])
        size = min(want.offsets[dim] + want.sizes[dim], have.offsets[dim] + have.sizes[dim]) - start
        if size <= 0:
            return None
        here, there = start - have.offsets[dim] + stored.at[dim], start - want.offsets[dim] + wanted.at[dim]
        source.append(slice(here, here + size))
        target.append(slice(there, there + size))
    return Overlap(tuple(source), tuple(target), math.prod(part.stop - part.start for part in source))


def plan_reads(wanted: Sequence[PlacedShard], stored: Sequence[PlacedShard]) -> list[tuple[int, Overlap]]:
    """What to read of which stored shard to make the wanted ones, each element exactly once.

    Stored shards may be equal (copies on several processes; the first is read) but not overlap otherwise; a `ValueError`
    says how much is missing or there twice.
    """
    found: list[tuple[int, Overlap]] = []
    seen: set[Shard] = set()
    for index, block in enumerate(stored):
        if block.shard in seen:
            continue
        seen.add(block.shard)
        found += [(index, common) for place in wanted if (common := overlap(place, block)) is not None]
    num_wanted, num_found = sum(place.shard.numel for place in wanted), sum(common.numel for _, common in found)
    if num_found != num_wanted:
        what = "are stored more than once" if num_found > num_wanted else "are not stored"
        raise ValueError(f"{abs(num_wanted - num_found)} of {num_wanted} elements {what}")
    return found


# --- The part of a tensor that this process holds, where tensors may be spread over processes (torch's `DTensor`).
#
# A plain tensor is its own local part. Nothing here loads torch.distributed: where it is not loaded, no tensor is spread.


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over processes."""
    # Another thread may be loading the module: as long as it has no such class, nothing is one.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_tensor(tensor: Tensor) -> Tensor:
    """What this process holds; writing to it writes to the tensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    held: Tensor = tensor.to_local().detach()
    return held


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process; all of them must call this, in the same order."""
    if not is_dtensor(tensor):
        return tensor.detach()
    full: Tensor = tensor.full_tensor().detach()
    return full


def local_shard(tensor: Tensor) -> Shard:
    """Which block of the whole this process holds."""
    if not is_dtensor(tensor):
        return full_shard(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(sizes) != tuple(tensor.to_local().shape):
        raise RuntimeError(
            f"a local part of shape {tuple(tensor.to_local().shape)} where {tensor.placements} say {sizes}"
        )
    if 0 in sizes:  # an empty block has no place; torch puts it past the end
        offsets = tuple(min(offset, length) for offset, length in zip(offsets, tensor.shape, strict=True))
    return Shard(tuple(tensor.shape), tuple(offsets), tuple(sizes))


def is_first_copy(tensor: Tensor) -> bool:
    """Whether no process before this one holds the same block: of equal copies one is saved."""
    if not is_dtensor(tensor):
        return True
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a process that is not part of the tensor's mesh"
    if 0 not in mesh.mesh:  # all processes hold the tensor, some of them in meshes of their own
        return False
    return all(
        place == 0 for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )
