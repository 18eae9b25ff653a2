"""Parameters that are spread over ranks (`DTensor`), as an optimizer sees them.

What works number by number works on the part this rank has (`core/local.py`). What needs a whole matrix puts it together here.
"""

from __future__ import annotations

import math

from torch import Tensor

from burnish.core.local import is_spread


def pieces(tensor: Tensor) -> int:
    """Into how many different parts a tensor is cut."""
    if not is_spread(tensor):
        return 1
    places = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in places if not placement.is_replicate())


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The tensor of which every rank holds a part, spread as the parameter `like` is; all ranks must call this."""
    if not is_spread(like):
        return part
    from torch.distributed.tensor import DTensor

    spread = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    full: Tensor = spread.full_tensor()
    return full


def part_of(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank holds whole; the inverse of `whole`."""
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate() for _ in like.placements]
    spread = DTensor.from_local(tensor, like.device_mesh, everywhere, run_check=False)
    part: Tensor = spread.redistribute(placements=like.placements).to_local()
    return part
