"""Attention of vision towers: patches attend to all patches of their segment, a window or a frame, in both directions.

Segments of one length are stacked for one call of torch's fused attention. Pictures of one size have few lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


class Segments:
    """Consecutive segments of patches: planned once, then called by every layer."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        sizes = np.asarray(lengths, dtype=np.int64)
        starts = sizes.cumsum() - sizes
        self.lengths = np.unique(sizes).tolist()
        self._stacks: list[Tensor] = []
        self._back: Tensor | None = None
        if len(self.lengths) > 1:
            stacks = [starts[sizes == length][:, None] + np.arange(length) for length in self.lengths]
            self._stacks = [torch.from_numpy(stack).to(device) for stack in stacks]
            order = np.concatenate([stack.ravel() for stack in stacks])
            self._back = torch.from_numpy(order.argsort()).to(device)

    def attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of packed heads [N, heads, D]; [N, heads * D]."""
        if self._back is None:
            return _stacked(*(x.unflatten(0, (-1, self.lengths[0])) for x in (q, k, v))).flatten(0, 1)
        parts = [_stacked(q[stack], k[stack], v[stack]).flatten(0, 1) for stack in self._stacks]
        return torch.cat(parts)[self._back]


def _stacked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of [segments, length, heads, D]; [segments, length, heads * D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
