"""The Triton decode attention kernel, with and without splits, against the torch operations that define it.

The kernel runs where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from burnish.models.kernels import inference_ops
from burnish.models.kernels.fp8 import Fp8Rows, quantise_rows
from burnish.models.kernels.paged_cache import HeadNorms, Placement, read_pages
from tests.kernels import CUDA, DEVICE, kernel
from tests.models.kernels.test_inference_ops import close, on_device, randn, shuffled_table

PAGE, WIDTH = 16, 20
POSITIONS = [0, 16, -1, 64, 65, 150, 300]
HALF = [torch.bfloat16, torch.float16] if CUDA else []


@dataclass(frozen=True)
class Case:
    """The setting of a decode step."""

    heads: int
    kv_heads: int
    dim: int
    norms: tuple[float, float] | None = None
    """Shift of the norm weights, and factor of the queries."""
    window: int | None = None
    splits: int = 1
    least: int = 64
    softcap: float | None = None
    rotated: bool = False
    """Whether rows turn by other than their positions."""


CASES = [
    Case(4, 2, 8),
    Case(6, 1, 128),
    Case(3, 1, 16, window=70, splits=3),
    Case(2, 2, 20, splits=4, least=128),
    Case(4, 2, 8, norms=(0.0, 1.0), window=1, splits=2),
    Case(3, 3, 20, norms=(1.0, 0.8), splits=8),
    Case(7, 1, 128, splits=5, least=64),
    Case(4, 2, 16, window=70, splits=3, softcap=0.5),
    Case(3, 1, 16, splits=3, rotated=True),
]


def inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, HeadNorms | None]:
    """Fused projections, rotation tables and norms."""
    qkv = randn(len(POSITIONS), (case.heads + 2 * case.kv_heads) * case.dim, dtype=dtype)
    angles = randn(WIDTH * PAGE, 1, case.dim // 2, seed=1)
    cos, sin = angles.cos(), angles.sin()
    table = torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)
    weights = randn(case.dim, dtype=dtype, seed=4), randn(case.dim, dtype=dtype, seed=5)
    norms = None if case.norms is None else HeadNorms(*weights, 1e-6, *case.norms)
    return qkv, *table, norms


@kernel
@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("splits", [1, 4])
def test_rows_that_share_pages_see_the_tokens_of_each_other(splits: int, in_8_bits: bool) -> None:
    """Three new tokens of one row and two of another. They are stored by `rotate_store`, and the kernel stores nothing."""
    from burnish.models.kernels.triton import elementwise_kernels
    from burnish.models.kernels.triton.decode_attention import decode_attention

    positions = torch.tensor([199, 200, 201, -1, 15, 16])
    table = shuffled_table(2, WIDTH)[[0, 0, 0, 0, 1, 1]]
    place = Placement(torch.arange(6), positions, table)
    qkv, cos, sin, norms = inputs(Case(4, 2, 16, norms=(0.0, 1.0)), torch.float32)
    assert norms is not None
    qkv = qkv[:6]
    plain = [randn(2 * WIDTH + 1, 2, PAGE, 16, seed=s) for s in (6, 7)]
    pages = [quantise_rows(x) if in_8_bits else x for x in plain]
    there = [Fp8Rows(*on_device(*x)) if isinstance(x, Fp8Rows) else x.clone().to(DEVICE) for x in pages]
    sent = norms._replace(query=norms.query.to(DEVICE), key=norms.key.to(DEVICE))
    moved = Placement(*on_device(place.owner, positions, table))
    on_there = on_device(qkv, cos, sin)
    elementwise_kernels.rotate_store(*on_there, moved, sent, *there)
    before = [x.data.view(torch.uint8).clone() if isinstance(x, Fp8Rows) else x.clone() for x in there]
    got = decode_attention(*on_there, moved, sent, *there, None, splits, 64, None, False)
    for now, then in zip(there, before, strict=True):
        assert torch.equal(now.data.view(torch.uint8) if isinstance(now, Fp8Rows) else now, then)
    seen = [Fp8Rows(*(part.cpu() for part in x)) if isinstance(x, Fp8Rows) else x.cpu() for x in there]
    with torch.no_grad():
        if not in_8_bits:
            expected = inference_ops.decode_attention(qkv, cos, sin, place, norms, *pages, None)
        else:
            scratch = [randn(2 * WIDTH + 1, 2, PAGE, 16) for _ in range(2)]
            q = inference_ops.rotate_store(qkv, cos, sin, place, norms, *scratch)
            expected = inference_ops.attend_pages(q, *seen, place, None)
    known = positions >= 0
    close(got.cpu()[known], expected[known], torch.float32)


@kernel
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_step_of_one_kernel_is_that_of_the_operations(case: Case, in_8_bits: bool, dtype: torch.dtype) -> None:
    """The attention output, and the new keys and values in the cache."""
    from burnish.models.kernels.triton.decode_attention import decode_attention

    qkv, cos, sin, norms = inputs(case, dtype)
    positions = torch.tensor(POSITIONS)
    table = shuffled_table(len(POSITIONS), WIDTH)
    rotation = (positions * 7 % 311).clamp(min=0) if case.rotated else None
    place = Placement(torch.arange(len(POSITIONS)), positions, table, rotation)
    plain = [randn(table.numel() + 1, case.kv_heads, PAGE, case.dim, dtype=dtype, seed=s) for s in (6, 7)]
    pages = [quantise_rows(x) if in_8_bits else x for x in plain]
    there = [Fp8Rows(*on_device(*x)) if isinstance(x, Fp8Rows) else x.clone().to(DEVICE) for x in pages]
    sent = None if norms is None else norms._replace(query=norms.query.to(DEVICE), key=norms.key.to(DEVICE))
    moved = Placement(*on_device(place.owner, positions, table), None if rotation is None else rotation.to(DEVICE))
    options = case.window, case.splits, case.least, case.softcap
    got = decode_attention(*on_device(qkv, cos, sin), moved, sent, *there, *options)
    with torch.no_grad():
        q = inference_ops.rotate_store(qkv, cos, sin, place, norms, *pages)
        # Stored fp8 numbers are compared below and may differ by one fp8 step.
        seen = [Fp8Rows(*(part.cpu() for part in x)) for x in there] if in_8_bits else pages
        expected = inference_ops.attend_pages(q, *seen, place, case.window, case.softcap)
    known = positions >= 0
    close(got.cpu()[known], expected[known], dtype)
    assert got.isfinite().all()
    for mine, twin in zip(there, pages, strict=True):
        if isinstance(twin, Fp8Rows):
            mine, twin = (read_pages(Fp8Rows(*(part.cpu() for part in x)), slice(1, None), dtype) for x in (mine, twin))
            differs = ~torch.isclose(mine.double(), twin.double(), rtol=0.02, atol=1e-6)
            if not CUDA:  # Triton's interpreter halves fp8 numbers that round up to a power of two
                differs &= ~torch.isclose(mine.double(), twin.double() / 2, rtol=1e-4)
            assert differs.double().mean() <= 1e-3
        else:
            close(mine[1:], twin[1:], dtype)
