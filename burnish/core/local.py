"""The part of a tensor that this process holds, where tensors may be spread over processes (torch's `DTensor`).

A plain tensor is its own local part. Nothing here loads torch.distributed: where it is not loaded, no tensor is spread.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

from burnish.core.shards import Shard, whole

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_spread(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over processes."""
    # Another thread may be loading the module: as long as it has no such class, nothing is one.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def local(tensor: Tensor) -> Tensor:
    """What this process holds; writing to it writes to the tensor."""
    if not is_spread(tensor):
        return tensor.detach()
    held: Tensor = tensor.to_local().detach()
    return held


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, on every process; all of them must call this, in the same order."""
    if not is_spread(tensor):
        return tensor.detach()
    full: Tensor = tensor.full_tensor().detach()
    return full


def shard_of(tensor: Tensor) -> Shard:
    """Which block of the whole this process holds."""
    if not is_spread(tensor):
        return whole(tensor.shape)
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
    if not is_spread(tensor):
        return True
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "a process that is not part of the tensor's mesh"
    if 0 not in mesh.mesh:  # all processes hold the tensor, some of them in meshes of their own
        return False
    return all(
        place == 0 for place, placement in zip(coordinate, tensor.placements, strict=True) if placement.is_replicate()
    )
