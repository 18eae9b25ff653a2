"""The gated activation gelu(gate) * up with the tanh form of GELU (Shazeer, 2002.05202) of a fused gate-and-up projection."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.ops.cpu import rows
from burnish.models.ops.cpu.build import kernels

FORM = "tanh"


class _Geglu(torch.autograd.Function):
    """The backward writes both halves of the gradient in place, instead of concatenating them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.library = kernels(gate_up)
        if ctx.library is not None:
            gate_up = gate_up.contiguous()
            ctx.save_for_backward(gate_up)
            return rows.gate(ctx.library, gate_up, is_gelu=True)
        gate, up = gate_up.chunk(2, -1)
        activated = functional.gelu(gate, approximate=FORM)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate_up, *rest = ctx.saved_tensors  # read once: what is recomputed is handed out once
        if not rest:
            return rows.gate_backward(ctx.library, grads[0].contiguous(), gate_up, is_gelu=True)
        (activated,) = rest
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.mul(grads[0], activated, out=grad_up)
        grad_gate.copy_(torch.ops.aten.gelu_backward(grads[0] * up, gate, approximate=FORM))
        return grad


def geglu(gate_up: Tensor) -> Tensor:
    """GELU of the first half of the last dimension times the second half."""
    if torch.is_grad_enabled():
        return _Geglu.apply(gate_up)
    library = kernels(gate_up)
    if library is not None:
        return rows.gate(library, gate_up.contiguous(), is_gelu=True)
    gate, up = gate_up.chunk(2, -1)
    return functional.gelu(gate, approximate=FORM).mul_(up)


def exact_geglu(gate_up: Tensor) -> Tensor:
    """The same by operations that give a row the same bits beside whatever rows it stands."""
    gate, up = gate_up.chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    # 0.5 (1 + tanh(u)) is a logistic function of 2u; torch's exponential rounds alike everywhere in a tensor, its tanh does not.
    return gate / (1 + (-2 * inner).exp()) * up
