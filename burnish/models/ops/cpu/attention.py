"""Causal attention of packed sequences by a C kernel (`attention.c`): no padding, and no copy of what sequences share."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from burnish.models.ops.cpu.build import address, num_threads
from burnish.models.ops.trunks import Rows

LONGEST = 1024
"""Sequences up to this length: a head's keys stay near the core."""

Pointer, Long = ctypes.c_void_p, ctypes.c_long


class _Arguments(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("q", "k", "v")),
        *((name, Long) for name in ("q_row", "k_row", "v_row")),
        *((name, Pointer) for name in ("sequences", "groups")),
        *((name, Long) for name in ("heads", "kv_heads", "dim", "window")),
        *((name, Pointer) for name in ("out", "lse", "grad", "grad_q", "grad_k", "grad_v", "space")),
        *((name, Long) for name in ("room", "longest")),
    ]  # fmt: skip


class Sequences:
    """Which rows each sequence of a packing has, its own and those it begins with, and which sequences share any."""

    def __init__(self, offsets: Tensor, rows: Rows | None) -> None:
        offsets = offsets.long()  # as C reads them
        lengths = offsets.diff()
        self.longest = int(lengths.max()) if lengths.numel() else 0
        if rows is None:
            trunks = torch.zeros_like(lengths)
            self.table = torch.stack([offsets[:-1], lengths, trunks, trunks], 1)
            self.groups = torch.arange(lengths.shape[0] + 1)
            return
        starts = rows.offsets.long()
        own = starts.diff()
        first = rows.row_of.long()[offsets[:-1].clamp(max=rows.row_of.shape[0] - 1)]
        table = torch.stack([starts[:-1], own, first, lengths - own], 1)
        order = (2 * first + (own < lengths)).argsort(stable=True)  # the one that others begin with comes first
        self.table = table[order]
        counts = first[order].unique_consecutive(return_counts=True)[1]
        self.groups = torch.cat([counts.new_zeros(1), counts.cumsum(0)])

    @property
    def num_groups(self) -> int:
        return self.groups.shape[0] - 1


def attention(
    library: ctypes.CDLL, q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, window: int | None
) -> Tensor:
    """Queries [U, heads, D] over keys and values [U, kv_heads, D] of their own sequence; [U, heads, D]."""
    return _Attention.apply(q, k, v, library, sequences, window)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, library: ctypes.CDLL, sequences: Sequences, window: int | None
    ) -> Tensor:
        q, k, v = _together(q), _together(k), _together(v)
        out, lse = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        _call(library, "forward", q, k, v, sequences, window, out=out, lse=lse)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan = library, sequences, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        library, sequences, window = ctx.plan
        grad_q, grad_k, grad_v = (x.new_empty(x.shape) for x in (q, k, v))
        given = {"out": out, "lse": lse, "grad": grads[0].contiguous()}
        _call(library, "backward", q, k, v, sequences, window, **given, grad_q=grad_q, grad_k=grad_k, grad_v=grad_v)
        return grad_q, grad_k, grad_v, None, None, None


def _together(x: Tensor) -> Tensor:
    """The heads of a row side by side; rows may be apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _call(
    library: ctypes.CDLL,
    way: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    window: int | None,
    **tensors: Tensor,
) -> None:
    (_, heads, dim), kv_heads = q.shape, k.shape[1]
    threads = max(1, min(num_threads(), sequences.num_groups * kv_heads))
    library.attention_room.restype = Long
    room = library.attention_room(Long(sequences.longest), Long(dim), Long(way == "backward"))
    space = q.new_empty(threads * room)
    arguments = _Arguments(
        q=address(q), k=address(k), v=address(v), q_row=q.stride(0), k_row=k.stride(0), v_row=v.stride(0),
        sequences=address(sequences.table), groups=address(sequences.groups),
        heads=heads, kv_heads=kv_heads, dim=dim, window=window or 0,
        space=address(space), room=room, longest=sequences.longest,
        **{name: address(x) for name, x in tensors.items()},
    )  # fmt: skip
    function = library.attention_forward if way == "forward" else library.attention_backward
    function(ctypes.byref(arguments), Long(sequences.num_groups), Long(threads))
