"""Latent attention over a paged cache of latents: against expanded heads, and the Triton kernels against the torch operations.

The kernels run where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from burnish.models.kernels import latent_ops
from burnish.models.kernels.elementwise import rotation_table
from burnish.models.kernels.fp8 import Fp8Rows, quantise_rows
from burnish.models.kernels.latent_ops import LatentHeads
from burnish.models.kernels.paged_cache import Pages, Placement, read_pages
from burnish.models.latent_shape import LatentShape
from tests.kernels import CUDA, DEVICE, kernel
from tests.models.kernels.test_inference_ops import close, on_device, randn, shuffled_table

PAGE, WIDTH, HEADS, SCALE = 16, 20, 5, 0.8
POSITIONS = torch.tensor([0, 16, -1, 64, 65, 150, 300])
ROWS = len(POSITIONS)
SMALL = LatentShape(None, 24, 6, 4, 5)
SHAPES = [SMALL, LatentShape(None, 32, 16, 16, 8, interleaved=False)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float32]


def inputs(
    shape: LatentShape, dtype: torch.dtype
) -> tuple[LatentHeads, tuple[Tensor, Tensor], Placement, list[Tensor]]:
    """New tokens, rotation tables, where the tokens are stored, and a cache."""
    kv_up = nn.Linear(shape.rank, HEADS * (shape.nope_dim + shape.value_dim), bias=False).to(dtype)
    kv_up.weight.data.copy_(0.2 * randn(*kv_up.weight.shape, seed=3))
    q = randn(ROWS, HEADS, shape.head_dim, dtype=dtype)
    latent, k_rope = randn(ROWS, shape.rank, dtype=dtype, seed=1), randn(ROWS, 9 + shape.rope_dim, dtype=dtype, seed=2)
    heads = LatentHeads(q, latent, k_rope[:, 9:], kv_up.requires_grad_(False), shape, SCALE)
    frequencies = torch.rand(shape.rope_dim // 2, generator=torch.Generator().manual_seed(4))
    tables = rotation_table(WIDTH * PAGE, frequencies, dtype, still=shape.nope_dim // 2, scale=SCALE**0.5)
    table = shuffled_table(ROWS, WIDTH)
    pages = [
        randn(table.numel() + 1, 1, PAGE, width, dtype=dtype, seed=width) for width in (shape.rank, shape.rope_dim)
    ]
    return heads, tables, Placement(torch.arange(ROWS), POSITIONS, table), pages


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_queries_on_latents_give_what_expanded_heads_give(shape: LatentShape) -> None:
    heads, tables, place, pages = inputs(shape, torch.float64)
    with torch.no_grad():
        got = latent_ops.latent_decode(heads, *tables, place, *pages).view(ROWS, HEADS, -1)
        for row, position in enumerate(POSITIONS.tolist()):
            if position < 0:
                continue
            index = torch.arange(position + 1)
            at = (place.table[row, index // PAGE].long(), 0, index % PAGE)
            c, k_rope = pages[0][at], pages[1][at]
            assert torch.equal(c[-1], heads.latent[row])
            k_nope, v = heads.kv_up(c).view(len(c), HEADS, -1).split([shape.nope_dim, shape.value_dim], 2)
            x = heads.q[row, :, shape.nope_dim :]
            pairs = x.view(HEADS, -1, 2) if shape.interleaved else x.view(HEADS, 2, -1).transpose(1, 2)
            cos, sin = (part[position, 0, -shape.rope_dim // 2 :] for part in tables)
            turn = torch.stack(
                [pairs[..., 0] * cos - pairs[..., 1] * sin, pairs[..., 1] * cos + pairs[..., 0] * sin], 1
            )
            scores = SCALE * torch.einsum("hd,nhd->hn", heads.q[row, :, : shape.nope_dim], k_nope)
            scores = (scores + turn.flatten(1) @ k_rope.t()) * shape.head_dim**-0.5
            expected = torch.einsum("hn,nhv->hv", scores.softmax(-1), v)
            torch.testing.assert_close(got[row], expected, rtol=1e-6, atol=1e-7)  # the table is computed in float32


def test_adapters_and_4_bits_have_the_matrix_that_they_multiply_by() -> None:
    """Any other layer than a plain one is asked for its matrix through its product."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    heads, *_ = inputs(SMALL, torch.float64)
    module = Doubled(SMALL.rank, heads.kv_up.out_features, bias=False).double()
    module.weight = heads.kv_up.weight
    with torch.no_grad():
        for plain, doubled in zip(
            latent_ops.up_matrices(heads), latent_ops.up_matrices(heads._replace(kv_up=module)), strict=True
        ):
            torch.testing.assert_close(2 * plain, doubled)


@kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize(("shape", "splits", "least"), [(SMALL, 1, 64), (SMALL, 4, 64), (SHAPES[1], 3, 128)], ids=str)
def test_the_kernels_do_what_the_operations_do(
    shape: LatentShape, splits: int, least: int, in_8_bits: bool, dtype: torch.dtype
) -> None:
    """The stored latents and keys, the rotated queries, and the weighted sums of latents."""
    from burnish.models.kernels.triton.latent_decode import attend_latents, store_latents

    heads, tables, place, plain = inputs(shape, dtype)
    pages: list[Pages] = [quantise_rows(x) if in_8_bits else x for x in plain]
    there = [Fp8Rows(*on_device(*x)) if isinstance(x, Fp8Rows) else x.clone().to(DEVICE) for x in pages]
    moved = Placement(*on_device(place.owner, place.position, place.table))
    sent = heads._replace(q=heads.q.to(DEVICE), latent=heads.latent.to(DEVICE), k_rope=heads.k_rope.to(DEVICE))
    got = store_latents(sent, *on_device(*tables), moved, *there)
    with torch.no_grad():
        expected = latent_ops.store_latents(heads, *tables, place, *pages)
        q = latent_ops.absorbed_queries(heads, latent_ops.up_matrices(heads)[0])
        # Stored fp8 numbers are compared below and may differ by one fp8 step.
        seen = [Fp8Rows(*(part.cpu() for part in x)) for x in there] if in_8_bits else pages
        mixed, joint = latent_ops.attend_latents(q, expected[0], *seen, place, shape.head_dim)
    known = POSITIONS >= 0
    for mine, twin in zip(got, expected, strict=True):
        close(mine.cpu()[known], twin[known], dtype)
    found, totals = attend_latents(*on_device(q, expected[0]), *there, moved, shape.head_dim, splits, least)
    assert found.isfinite().all()
    close(found.cpu()[known], mixed[known], dtype)
    close(totals.cpu()[known], joint.float()[known], dtype)
    for mine, twin in zip(there, pages, strict=True):
        if isinstance(twin, Fp8Rows):
            assert isinstance(mine, Fp8Rows)
            mine, twin = (read_pages(Fp8Rows(*(part.cpu() for part in x)), slice(1, None), dtype) for x in (mine, twin))
            differs = ~torch.isclose(mine.double(), twin.double(), rtol=0.02, atol=1e-6)
            if not CUDA:  # Triton's interpreter halves fp8 numbers that round up to a power of two
                differs &= ~torch.isclose(mine.double(), twin.double() / 2, rtol=1e-4)
            assert differs.double().mean() <= 1e-3
        else:
            close(mine.cpu()[1:], twin[1:], dtype)
