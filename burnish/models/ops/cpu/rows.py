"""Norms, rotations and gated activations of the learner's rows by C kernels (`learner.c`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from burnish.models.ops.cpu.build import address, num_threads

Long, Double = ctypes.c_long, ctypes.c_double
PER_THREAD = 1 << 14
"""Numbers worth waking a thread for."""


def _threads(x: Tensor) -> ctypes.c_long:
    return Long(min(num_threads(), -(-x.numel() // PER_THREAD)))


def norm(library: ctypes.CDLL, x: Tensor, weight: Tensor, eps: float, shift: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * (shift + weight) over the last dimension of a contiguous x, and [rows] one over rms(x)."""
    size = x.shape[-1]
    rows = x.numel() // max(1, size)
    y, scale = torch.empty_like(x), x.new_empty(rows)
    library.norm_forward(
        address(x), address(weight), address(y), address(scale), Long(rows), Long(size), Double(eps), Double(shift), _threads(x)
    )  # fmt: skip
    return y, scale


def norm_backward(
    library: ctypes.CDLL, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, shift: float
) -> tuple[Tensor, Tensor]:
    """Gradients of the input and of the weight."""
    rows, size = scale.numel(), x.shape[-1]
    library.norm_parts.restype = Long
    grad_x, grad_weight, parts = (
        torch.empty_like(x),
        torch.empty_like(weight),
        x.new_empty(library.norm_parts(Long(rows)), size),
    )
    library.norm_backward(
        address(grad), address(x), address(weight), address(scale), address(grad_x), address(grad_weight), address(parts),
        Long(rows), Long(size), Double(shift), _threads(x),
    )  # fmt: skip
    return grad_x, grad_weight


def rotate(library: ctypes.CDLL, x: Tensor, cos: Tensor, sin: Tensor, way: float) -> Tensor:
    """Heads x [N, H, D] by tables [N, 1, D] for a `way` of 1, back for -1."""
    rows, heads, dim = x.shape
    if x.stride()[1:] != (dim, 1):
        x = x.contiguous()
    cos, sin = (table.expand(rows, 1, dim).contiguous() for table in (cos, sin))
    y = x.new_empty(x.shape)
    library.rotate_heads(
        address(x), address(cos), address(sin), address(y), Long(rows), Long(heads), Long(dim), Long(x.stride(0)),
        Double(way), _threads(x),
    )  # fmt: skip
    return y


def gate(library: ctypes.CDLL, gate_up: Tensor, is_gelu: bool) -> Tensor:
    """act(gate) * up of a contiguous [..., gate and up]."""
    size = gate_up.shape[-1] // 2
    y = gate_up.new_empty(*gate_up.shape[:-1], size)
    rows = y.numel() // max(1, size)
    library.gate_forward(address(gate_up), address(y), Long(rows), Long(size), Long(is_gelu), _threads(gate_up))
    return y


def gate_backward(library: ctypes.CDLL, grad: Tensor, gate_up: Tensor, is_gelu: bool) -> Tensor:
    """Its gradient."""
    size = grad.shape[-1]
    into = torch.empty_like(gate_up)
    rows = grad.numel() // max(1, size)
    library.gate_backward(
        address(grad), address(gate_up), address(into), Long(rows), Long(size), Long(is_gelu), _threads(gate_up)
    )
    return into
