"""Triton kernel of 8-bit Adam: dequantises, updates, rounds and stores the moments in one pass, block by block.

The arithmetic is that of `Adam8bit._update_quantised`, which tests compare it with. Only the random numbers of the rounding differ:
they come from Philox with a seed and an element's index. Every number is read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.training.optimizers.stochastic_rounding import SMALLEST_NORMAL, block_size, byte_format

PROGRAM_SIZE = 2048
"""Elements that one program updates, in whole blocks."""


@triton.jit
def triton_noise(seed, at):
    """Two words of random bits for every element."""
    first, second, _, _ = tl.randint4x(seed, at)
    return first.to(tl.int32, bitcast=True), second.to(tl.int32, bitcast=True)


@triton.jit
def _decode(code, scale, DROPPED: tl.constexpr, LOWEST: tl.constexpr, SIGNED: tl.constexpr):
    magnitude = code & 127 if SIGNED else code
    number = ((magnitude + LOWEST) << DROPPED).to(tl.float32, bitcast=True)
    if SIGNED:
        number = tl.where(magnitude == 0, 0.0, tl.where(code > 127, -number, number))
    return number * scale


@triton.jit
def _encode(
    number,
    random,
    DROPPED: tl.constexpr,
    TOP: tl.constexpr,
    LOWEST: tl.constexpr,
    SIGNED: tl.constexpr,
    TINY: tl.constexpr,
):
    scale = tl.max(tl.abs(number), 1)
    bits = tl.div_rn(number, tl.maximum(scale, TINY)[:, None]).to(tl.int32, bitcast=True)
    code = (((random & ((1 << DROPPED) - 1)) + (bits & 0x7FFFFFFF)) >> DROPPED) - LOWEST
    code = tl.minimum(tl.maximum(code, 0), TOP)
    if SIGNED:
        code = code | ((bits >> 24) & 128)
    return code.to(tl.uint8), scale


@triton.jit(do_not_specialize=["seed"])
def _update(
    weight_ptr,
    gradient_ptr,
    mean_ptr,
    mean_scale_ptr,
    root_ptr,
    root_scale_ptr,
    seed,
    num_blocks,
    size,
    rate1,
    beta2,
    rate2,
    keep,
    step_size,
    correction,
    eps,
    DROPPED: tl.constexpr,
    LOWEST: tl.constexpr,
    ROOT_DROPPED: tl.constexpr,
    ROOT_LOWEST: tl.constexpr,
    TINY: tl.constexpr,
    BLOCKS: tl.constexpr,
    SIZE: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    k = tl.arange(0, SIZE)
    has_block = block < num_blocks
    inside = has_block[:, None] & (k < size)[None, :]
    at = block[:, None] * size + k[None, :]  # a part has few enough elements for 32 bits
    gradient = tl.load(gradient_ptr + at, mask=inside, other=0.0)
    code = tl.load(mean_ptr + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(mean_scale_ptr + block, mask=has_block, other=0.0)[:, None]
    mean = _decode(code, scale, DROPPED, LOWEST, True)
    mean = mean + rate1 * (gradient - mean)
    code = tl.load(root_ptr + at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(root_scale_ptr + block, mask=has_block, other=0.0)[:, None]
    root = _decode(code, scale, ROOT_DROPPED, ROOT_LOWEST, False)
    root = tl.sqrt_rn(root * root * beta2 + rate2 * (gradient * gradient))
    mean, root = tl.where(inside, mean, 0.0), tl.where(inside, root, 0.0)
    of_mean, of_root = triton_noise(seed, at)
    code, scale = _encode(mean, of_mean, DROPPED, 127, LOWEST, True, TINY)
    tl.store(mean_ptr + at, code, mask=inside)
    tl.store(mean_scale_ptr + block, scale, mask=has_block)
    code, scale = _encode(root, of_root, ROOT_DROPPED, 255, ROOT_LOWEST, False, TINY)
    tl.store(root_ptr + at, code, mask=inside)
    tl.store(root_scale_ptr + block, scale, mask=has_block)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0) * keep
    weight = weight - step_size * tl.div_rn(mean, root * correction + eps)
    tl.store(weight_ptr + at, weight, mask=inside)


def update(
    weight: Tensor,
    gradient: Tensor,
    mean: tuple[Tensor, Tensor],
    root: tuple[Tensor, Tensor],
    seed: int,
    betas: tuple[float, float],
    keep: float,
    step_size: float,
    correction: float,
    eps: float,
) -> None:
    """Update a weight [..., C] and its moments, each as codes and scales, in place.

    weight <- keep * weight - step_size * mean / (root * correction + eps)
    """
    size = block_size(weight.shape[-1])
    padded = triton.next_power_of_2(size)
    blocks = max(1, PROGRAM_SIZE // padded)
    num_blocks = weight.numel() // size
    (dropped, _, lowest), (root_dropped, _, root_lowest) = byte_format(True), byte_format(False)
    _update[(triton.cdiv(num_blocks, blocks),)](
        weight,
        gradient,
        *mean,
        *root,
        seed,
        num_blocks,
        size,
        1 - betas[0],
        betas[1],
        1 - betas[1],
        keep,
        step_size,
        correction,
        eps,
        DROPPED=dropped,
        LOWEST=lowest,
        ROOT_DROPPED=root_dropped,
        ROOT_LOWEST=root_lowest,
        TINY=SMALLEST_NORMAL,
        BLOCKS=blocks,
        SIZE=padded,
        num_warps=8,
    )


def can_update(*tensors: Tensor) -> bool:
    """Whether tensors have the layout and type that the kernel needs."""
    return all(t.is_contiguous() for t in tensors) and tensors[0].dtype == torch.float32
