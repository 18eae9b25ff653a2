"""Products of a few rows with a large matrix, which take as long as the matrix takes to be read.

A program reads a strip of the matrix once for all rows. A strip is some outputs, or the gate and the value of some activations,
whose product leaves the program at once; with parts it is a stretch of the inputs besides, and who reads the sums next adds them
up (`ops/partial_sums.py`). The beginning of the strip is asked for before the rows are there: they come from the kernel before, the
matrix does not.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from burnish.models.ops.kernels.early import early

MOST_ROWS = 64


@triton.jit
def _ask_for(strip_ptr, outputs, inputs, column, OUT: tl.constexpr, LINES: tl.constexpr):
    """The first LINES * 64 inputs of a strip into the level-2 cache."""
    at = strip_ptr + column[:, None].to(tl.int64) * inputs + tl.arange(0, LINES)[None, :] * 64
    at = tl.where((column < outputs)[:, None], at, strip_ptr)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _few_rows(
    x_ptr,
    matrix_ptr,
    bias_ptr,
    out_ptr,
    rows,
    inputs,
    outputs,
    stretch,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    GATED: tl.constexpr,
    BIASED: tl.constexpr,
    LINES: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    tile, part = tl.program_id(0), tl.program_id(1)
    row, column = tl.arange(0, ROWS), tile * OUT + tl.arange(0, OUT)
    there, inside = (row < rows)[:, None], (column < outputs)[:, None]
    strip_ptr = matrix_ptr + part * stretch
    value_sums = tl.zeros([ROWS, OUT], tl.float32)
    sums = tl.zeros([ROWS, OUT], tl.float32)
    if EARLY:
        gdc_launch_dependents()
        if LINES > 0:
            _ask_for(strip_ptr, outputs, inputs, column, OUT, LINES)
        gdc_wait()
    for begin in range(0, stretch, IN):
        at = begin + tl.arange(0, IN)
        known = (at < stretch)[None, :]
        x = tl.load(x_ptr + row[:, None] * inputs + part * stretch + at[None, :], mask=there & known, other=0.0)
        strip = strip_ptr + column[:, None].to(tl.int64) * inputs + at[None, :]
        w = tl.load(strip, mask=inside & known, other=0.0)
        sums = tl.dot(x, tl.trans(w), sums, input_precision=PRECISION)
        if GATED:
            w = tl.load(strip + outputs.to(tl.int64) * inputs, mask=inside & known, other=0.0)
            value_sums = tl.dot(x, tl.trans(w), value_sums, input_precision=PRECISION)
    dtype = out_ptr.dtype.element_ty
    if BIASED:
        sums += tl.load(bias_ptr + column, mask=column < outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:  # rounded where the two kernels of this would round
        gate = sums.to(dtype).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(dtype)
        result = active * value_sums.to(dtype)
    else:
        result = sums.to(dtype)
    to = (part * rows + row)[:, None] * outputs + column[None, :]
    tl.store(out_ptr + to, result, mask=there & (column < outputs)[None, :])


def tiles(gated: bool, outputs: int) -> dict[str, Any]:
    """Outputs and inputs of a step, and how the compiler cuts it up."""
    return {"OUT": 32 if gated or outputs > 4096 else 16, "IN": 128, "num_warps": 4, "num_stages": 5}


def few_rows(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
    parts: int = 1,
    options: dict[str, Any] | None = None,
    lines: int = 4,
) -> Tensor:
    """Rows [N, in] times a matrix [out, in]: [N, out], or [parts, N, out] that add up to it.

    Gated, the matrix has gates and then values: [N, out / 2], silu(gate) * value.
    """
    rows, inputs = x.shape
    outputs = matrix.shape[0] // 2 if gated else matrix.shape[0]
    out = x.new_empty((parts, rows, outputs) if parts > 1 else (rows, outputs))
    options = options or tiles(gated, outputs)
    _few_rows[(triton.cdiv(outputs, options["OUT"]), parts)](
        x,
        matrix,
        matrix if bias is None else bias,
        out,
        rows,
        inputs,
        outputs,
        inputs // parts,
        ROWS=max(16, triton.next_power_of_2(rows)),
        GATED=gated,
        BIASED=bias is not None,
        LINES=lines,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        **early(x),
        **options,
    )
    return out
