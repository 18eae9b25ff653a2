"""Row-wise operations of a decoder layer: RMS norm, rotary embedding, gated activations, with memory-saving backwards.

RMS norm: Zhang and Sennrich (1910.07467). Rotary position embedding: Su et al. (2104.09864), in the half-split layout of
Hugging Face checkpoints. SwiGLU and GEGLU: Shazeer (2002.05202), on a fused gate-and-up projection.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.kernels.cpu import cpu_ops
from burnish.models.kernels.cpu.c_library import c_kernels
from burnish.models.kernels.device import use_triton
from burnish.models.latent_shape import yarn_factor

FULL_PRECISION = (torch.float32, torch.float64)
GELU_FORM = "tanh"


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        ctx.shift, ctx.library = shift, c_kernels(x, weight)
        if ctx.library is not None:
            x = x.contiguous()
            y, scale = cpu_ops.norm(ctx.library, x, weight, eps, shift)
            ctx.save_for_backward(x, scale, weight)
            return y
        scale = _inverse_rms(x, eps)
        normal = x * scale
        ctx.save_for_backward(normal, scale, weight)
        return normal * _shifted(weight, shift)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        normal, scale, weight = ctx.saved_tensors
        if ctx.library is not None:
            return *cpu_ops.norm_backward(ctx.library, grad.contiguous(), normal, weight, scale, ctx.shift), None, None
        grad_weight = (grad * normal).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        # dx = scale * (g - normal * mean(g * normal)), where g is the gradient of the normalised input
        slope = grad * _shifted(weight, ctx.shift)
        mean = torch.linalg.vecdot(slope, normal).unsqueeze(-1).div_(-normal.shape[-1])
        return slope.addcmul_(normal, mean).mul_(scale), grad_weight, None, None


class _HalfRmsNorm(torch.autograd.Function):
    """RMS norm of half types, computed in float32: 1 + weight has too few digits in bfloat16. Saves its input and a scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, shift: float) -> Tensor:
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, scale, weight)
        ctx.shift = shift
        return (wide * scale * (weight.float() + shift)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, scale, weight = ctx.saved_tensors
        grad, normal = grads[0].float(), x.float() * scale
        grad_weight = (grad * normal).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        slope = grad * (weight.float() + ctx.shift)
        mean = (slope * normal).mean(-1, keepdim=True)
        return ((slope - normal * mean) * scale).to(x.dtype), grad_weight, None, None


def _inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / rms(x), [..., 1]."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return torch.addcmul(norm.new_full((), eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def _shifted(weight: Tensor, shift: float) -> Tensor:
    return weight + shift if shift else weight


def rms_norm(x: Tensor, weight: Tensor, eps: float, shift: float = 0.0) -> Tensor:
    """x / rms(x) * (shift + weight) over the last dimension, without gradient."""
    # For few rows on a CPU torch's function takes half as long again. torch.compile fuses it, so it is kept there.
    if (
        x.device.type == "cpu"
        and x.dtype in FULL_PRECISION
        and not (torch.is_grad_enabled() or torch.compiler.is_compiling())
    ):
        library = c_kernels(x, weight)
        if library is not None:
            return cpu_ops.norm(library, x.contiguous(), weight, eps, shift)[0]
        return (x * _inverse_rms(x, eps)).mul_(_shifted(weight, shift))
    if not shift:
        return functional.rms_norm(x, weight.shape, weight, eps)
    wide = torch.promote_types(x.dtype, torch.float32)
    return functional.rms_norm(x.to(wide), weight.shape, weight.to(wide) + shift, eps).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """RMS norm with weight (shift + weight).

    float32 and float64 train through `_RmsNorm`. Half types train through `_HalfRmsNorm` with a shift, else through torch.
    """

    def __init__(self, size: int, eps: float, shift: float = 0.0) -> None:
        super().__init__(size, eps)
        self.shift = shift

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.dtype in FULL_PRECISION:
            return _RmsNorm.apply(x, self.weight, self.eps, self.shift)
        if torch.is_grad_enabled() and self.shift:
            return _HalfRmsNorm.apply(x, self.weight, self.eps, self.shift)
        return self.functional(x)

    def functional(self, x: Tensor) -> Tensor:
        """The norm without our backward: for passes without gradient, and for torch.compile."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps, self.shift)


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> Tensor:
    """Angular frequencies [head_dim/2] in float32, with linear, Llama-3 or YaRN scaling."""
    inverse = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return inverse
    if scaling["rope_type"] == "linear":
        return inverse / scaling["factor"]
    if scaling["rope_type"] == "yarn":
        return _yarn_frequencies(inverse, theta, scaling)
    # Llama 3 stretches long wavelengths by `factor`, keeps short ones, and blends linearly between.
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    original = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inverse
    blend = (original / wavelength - low) / (high - low)
    smooth = (1 - blend) * inverse / factor + blend * inverse
    scaled = torch.where(wavelength > original / low, inverse / factor, inverse)
    between = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(between, smooth, scaled)


def _yarn_frequencies(inverse: Tensor, theta: float, scaling: dict[str, Any]) -> Tensor:
    """YaRN (2309.00071): fast dimensions keep their frequency, slow ones are stretched by `factor`, with a linear ramp between."""
    dim, original = 2 * inverse.shape[0], scaling["original_max_position_embeddings"]

    def dimension(num_rotations: float) -> float:
        """The dimension that turns this often within the original length."""
        return dim * math.log(original / (num_rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    steps = torch.arange(dim // 2, dtype=torch.float32) - low
    stretched = (steps / (high - low if high != low else 0.001)).clamp(0, 1)
    return inverse / scaling["factor"] * stretched + inverse * (1 - stretched)


def rotation_factor(scaling: dict[str, Any] | None) -> float:
    """The factor of rotated queries and keys that a RoPE scaling implies: YaRN's `attention_factor`."""
    if scaling is None or scaling["rope_type"] != "yarn":
        return 1.0
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    factor, mscale, all_dim = scaling["factor"], scaling.get("mscale"), scaling.get("mscale_all_dim")
    return yarn_factor(factor, mscale) / yarn_factor(factor, all_dim) if mscale and all_dim else yarn_factor(factor)


def rotation_table(
    num_positions: int, inverse: Tensor, dtype: torch.dtype, factor: float = 1.0, still: int = 0, scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """cos and signed sin of each position, [P, 1, head_dim]; the rotation is `x * cos + swap_halves(x) * sin`.

    Rotated dimensions are multiplied by `factor`. The first `still` dimensions of each half are not rotated. All are multiplied by `scale`.
    """
    angles = torch.arange(num_positions, device=inverse.device, dtype=torch.float32)[:, None] * inverse
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    if still:
        ones = cos.new_ones(num_positions, still)
        cos, sin = torch.cat([ones, cos], 1), torch.cat([0 * ones, sin], 1)
    if scale != 1.0:
        cos, sin = cos * scale, sin * scale
    return torch.cat([cos, cos], -1)[:, None].to(dtype), torch.cat([-sin, sin], -1)[:, None].to(dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, way: float = 1.0) -> Tensor:
    library = c_kernels(x, cos, sin)
    if library is not None:
        return cpu_ops.rotate(library, x, cos, sin, way)
    sin = sin if way == 1.0 else -sin
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


class _Rotate(torch.autograd.Function):
    """The backward is the inverse rotation, so only the table is saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1.0), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads x [N, H, D]; `cos` and `sin` are the table rows of their positions."""
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _rotate(x, cos, sin)


class _Swiglu(torch.autograd.Function):
    """The backward writes both halves of the gradient in place instead of concatenating them. On a GPU each direction is one kernel."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        if use_triton(gate_up):
            from burnish.models.kernels.triton import elementwise_kernels

            ctx.save_for_backward(gate_up)
            return elementwise_kernels.swiglu(gate_up)
        ctx.library = c_kernels(gate_up)
        if ctx.library is not None:
            gate_up = gate_up.contiguous()
            ctx.save_for_backward(gate_up)
            return cpu_ops.gate(ctx.library, gate_up, is_gelu=False)
        gate, up = gate_up.chunk(2, -1)
        activated = functional.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate_up, *rest = ctx.saved_tensors  # read once: a recomputed tensor can only be read once
        if not rest and not gate_up.is_cuda:
            return cpu_ops.gate_backward(ctx.library, grads[0].contiguous(), gate_up, is_gelu=False)
        if not rest:
            from burnish.models.kernels.triton import elementwise_kernels

            return elementwise_kernels.swiglu_backward(grads[0], gate_up)
        activated = rest[0]
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.mul(grads[0], activated, out=grad_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=grad_gate)
        return grad


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, where gate and up are the halves of the last dimension."""
    if torch.is_grad_enabled() or use_triton(gate_up):
        return _Swiglu.apply(gate_up)
    library = c_kernels(gate_up)
    if library is not None:
        return cpu_ops.gate(library, gate_up.contiguous(), is_gelu=False)
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


class _Geglu(torch.autograd.Function):
    """The backward writes both halves of the gradient in place instead of concatenating them."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.library = c_kernels(gate_up)
        if ctx.library is not None:
            gate_up = gate_up.contiguous()
            ctx.save_for_backward(gate_up)
            return cpu_ops.gate(ctx.library, gate_up, is_gelu=True)
        gate, up = gate_up.chunk(2, -1)
        activated = functional.gelu(gate, approximate=GELU_FORM)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gate_up, *rest = ctx.saved_tensors  # read once: a recomputed tensor can only be read once
        if not rest:
            return cpu_ops.gate_backward(ctx.library, grads[0].contiguous(), gate_up, is_gelu=True)
        (activated,) = rest
        gate, up = gate_up.chunk(2, -1)
        grad = torch.empty_like(gate_up)
        grad_gate, grad_up = grad.chunk(2, -1)
        torch.mul(grads[0], activated, out=grad_up)
        grad_gate.copy_(torch.ops.aten.gelu_backward(grads[0] * up, gate, approximate=GELU_FORM))
        return grad


def geglu(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh form of GELU, where gate and up are the halves of the last dimension."""
    if torch.is_grad_enabled():
        return _Geglu.apply(gate_up)
    library = c_kernels(gate_up)
    if library is not None:
        return cpu_ops.gate(library, gate_up.contiguous(), is_gelu=True)
    gate, up = gate_up.chunk(2, -1)
    return functional.gelu(gate, approximate=GELU_FORM).mul_(up)


def exact_geglu(gate_up: Tensor) -> Tensor:
    """`geglu` by batch-invariant operations: a row has the same bits whatever other rows are computed with it."""
    gate, up = gate_up.chunk(2, -1)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
    # 0.5 (1 + tanh(u)) is the logistic function of 2u. torch's exp rounds the same everywhere in a tensor, its tanh does not.
    return gate / (1 + (-2 * inner).exp()) * up
