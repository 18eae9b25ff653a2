"""Shards of a tensor that is distributed over processes, and the copies that turn one sharding into another.

A shard is described by its offset and size in each dimension of the full tensor. This covers uneven row chunks, columns of
a tensor-parallel layer, both at once, and the full tensor. A local tensor holds several shards if its rows are not adjacent
in the full tensor. To build a tensor from another sharding, copy the overlap
with each stored shard. The functions at the end read the local part of a torch `DTensor`; a plain tensor is its own local part.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.tensor import DTensor


Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Shard:
    """A block of a tensor of shape `shape`: in dimension d it has `sizes[d]` elements, and it starts at `offsets[d]`."""

    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.shape) == len(self.offsets) == len(self.sizes):
            raise ValueError(
                f"shape {self.shape}, offsets {self.offsets} and sizes {self.sizes} differ in their number of dimensions"
            )
        for length, offset, size in zip(self.shape, self.offsets, self.sizes, strict=True):
            if offset < 0 or size < 0 or offset + size > length:
                raise ValueError(
                    f"the block of sizes {self.sizes} at offsets {self.offsets} is not inside a tensor of shape {self.shape}"
                )

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class PlacedShard:
    """A shard, and the position `at` of its first element in the local tensor that holds it."""

    shard: Shard
    at: tuple[int, ...]


@dataclass(frozen=True)
class Overlap:
    """Elements that two shards share: their slices in the tensor to read (`source`) and in the tensor to fill (`target`)."""

    source: Slices
    target: Slices
    numel: int


def full_shard(shape: Sequence[int]) -> Shard:
    """Return the shard that covers a whole tensor."""
    return Shard(tuple(shape), (0,) * len(shape), tuple(shape))


def at_origin(shard: Shard) -> PlacedShard:
    """Return a shard that fills its local tensor."""
    return PlacedShard(shard, (0,) * len(shard.shape))


def blocks_of_permuted_rows(shard: Shard, order: Sequence[int] | None) -> list[PlacedShard]:
    """Return the blocks of a tensor that a shard of its row-permuted copy holds.

    Row i of the permuted copy is row `order[i]` of the tensor. None means that the rows are not permuted.
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
    """Convert a shard from elements to blocks: one block has `each[d]` elements in dimension d (as quantisation scales do)."""
    shard = placed.shard
    fields = (shard.shape, shard.offsets, shard.sizes, placed.at)
    if any(n % d for values in fields for n, d in zip(values, each, strict=True)):
        raise ValueError(f"{shard} cannot be counted in blocks of {tuple(each)}")
    shape, offsets, sizes, at = (tuple(n // d for n, d in zip(values, each, strict=True)) for values in fields)
    return PlacedShard(Shard(shape, offsets, sizes), at)


def overlap(wanted: PlacedShard, stored: PlacedShard) -> Overlap | None:
    """Return the elements that two shards of one tensor share, or None if they share none."""
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
    """Return (index of a stored shard, what to copy from it) so that each wanted element is read exactly once.

    Equal stored shards are copies on several processes; the first is read. Any other overlap of stored shards, and any
    missing element, is a `ValueError` with the number of elements.
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


# The local part of a DTensor. Nothing below loads torch.distributed: if it is not loaded, no tensor is a DTensor.


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is distributed over processes."""
    # Another thread may be importing the module right now; until it defines the class, no tensor is a DTensor.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the part that this process holds. It shares memory with the tensor."""
    if not is_dtensor(tensor):
        return tensor.detach()
    part: Tensor = tensor.to_local().detach()
    return part


def local_with_gradient(tensor: Tensor) -> Tensor:
    """Return the part that this process holds, with its gradient."""
    if not is_dtensor(tensor):
        return tensor
    part: Tensor = tensor.to_local()
    return part


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor on every process. A collective: all processes must call it in the same order."""
    if not is_dtensor(tensor):
        return tensor.detach()
    full: Tensor = tensor.full_tensor().detach()
    return full


def local_shard(tensor: Tensor) -> Shard:
    """Return the block of the full tensor that this process holds."""
    if not is_dtensor(tensor):
        return full_shard(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(sizes) != tuple(tensor.to_local().shape):
        raise RuntimeError(
            f"the local part has shape {tuple(tensor.to_local().shape)}, but {tensor.placements} imply {sizes}"
        )
    if 0 in sizes:  # torch gives an empty block an offset past the end
        offsets = tuple(min(offset, length) for offset, length in zip(offsets, tensor.shape, strict=True))
    return Shard(tuple(tensor.shape), tuple(offsets), tuple(sizes))


def is_first_copy(tensor: Tensor, first_rank: int = 0) -> bool:
    """Whether this process holds the first copy of its block. Only that copy is saved.

    `first_rank` is the first of the processes that hold the tensor: 0, or the first of a pipeline stage.
    """
    if not is_dtensor(tensor):
        return True
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this process is not part of the tensor's mesh"
    if first_rank not in mesh.mesh:  # another mesh holds the same tensor and contains that process, which saves it
        return False
    return all(
        place == 0 for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )
