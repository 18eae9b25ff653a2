"""The gated activation silu(gate) * up (Shazeer, 2002.05202) of a fused gate-and-up projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.ops.cpu import rows as cpu_rows
from burnish.models.ops.cpu.build import kernels
from burnish.models.ops.device import use_kernels


class _Swiglu(torch.autograd.Function):
    """The backward writes both halves of the gradient in place, instead of concatenating them; on a GPU each way is one kernel."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        if use_kernels(gate_up):
            from burnish.models.ops.kernels import rows

            ctx.save_for_backward(gate_up)
            return rows.gate(gate_up)
        ctx.library = kernels(gate_up)
        if ctx.library is not None:
            gate_up = gate_up.contiguous()
            ctx.save_for_backward(gate_up)
            return cpu_rows.gate(ctx.library, gate_up, is_gelu=False)
        gate, up = gate_up.chunk(2, -1)
        activated = functional.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate_up, *rest = ctx.saved_tensors  # read once: what is recomputed is handed out once
        if not rest and not gate_up.is_cuda:
            return cpu_rows.gate_backward(ctx.library, grads[0].contiguous(), gate_up, is_gelu=False)
        if not rest:
            from burnish.models.ops.kernels import rows

            return rows.gate_backward(grads[0], gate_up)
        activated = rest[0]
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.mul(grads[0], activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad


def swiglu(gate_up: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second half."""
    if torch.is_grad_enabled() or use_kernels(gate_up):
        return _Swiglu.apply(gate_up)
    library = kernels(gate_up)
    if library is not None:
        return cpu_rows.gate(library, gate_up.contiguous(), is_gelu=False)
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)
