"""The kernels of a decode step against their torch twins: attention with the rotation and the write to the cache, products of few rows.

They run where CUDA is, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1 with triton installed.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from burnish.models.ops import paged
from burnish.models.ops.paged import Norms, Placement
from burnish.models.ops.quantised import Quantised, quantise

CUDA = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(
    not (importlib.util.find_spec("triton") and (CUDA or os.environ.get("TRITON_INTERPRET") == "1")),
    reason="Triton kernels need CUDA, or triton and TRITON_INTERPRET=1",
)
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if CUDA else [])]
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.fixture(params=[False, True], ids=["", "early"])
def early(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without kernels that start before the one before them has ended."""
    from burnish.models.ops.kernels import early

    if request.param and not (CUDA and torch.cuda.get_device_capability() >= (9, 0)):
        pytest.skip("kernels start early from Hopper on")
    monkeypatch.setattr(early, "ENABLED", request.param)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.cpu().float() - expected).norm() / expected.norm())


POSITIONS = torch.tensor([0, 15, 16, -1, 63, 64, 150, 3])
WIDTH, PAGE = 10, 16


def row_case(kv_heads: int, shared: int, dim: int, norm: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Fused projections, cosines, sines, a table of pages, keys, values, norm weights of queries and keys."""
    rows = len(POSITIONS)
    angle = randn(WIDTH * PAGE, 1, dim // 2, seed=1) * 6
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([-angle.sin(), angle.sin()], -1)
    order = torch.randperm(rows * WIDTH, generator=torch.Generator().manual_seed(2))
    keys, values = (randn(rows * WIDTH + 1, kv_heads, PAGE, dim, dtype=dtype, seed=s) for s in (3, 4))
    weights = [randn(dim, dtype=dtype, seed=s) for s in (5, 6)]
    qkv = randn(rows, kv_heads * (shared + 2) * dim, dtype=dtype)
    return qkv, cos.to(dtype), sin.to(dtype), (order + 1).int().view(rows, WIDTH), keys, values, *weights


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kv_heads", "shared", "dim", "norm", "window", "splits"),
    [
        (2, 2, 8, "", None, 1),
        (1, 3, 16, "", 70, 4),
        (2, 1, 20, "plain", None, 8),
        (1, 4, 32, "shifted", 7, 2),
        (2, 6, 128, "", None, 1),
        (2, 6, 128, "", None, 4),
    ],
)
def test_a_rows_attention_is_its_twins(
    dtype: torch.dtype, kv_heads: int, shared: int, dim: int, norm: str, window: int | None, splits: int
) -> None:
    from burnish.models.ops.kernels.row_attention import row_attention

    case = row_case(kv_heads, shared, dim, norm, dtype)
    qkv, cos, sin, table, keys, values, q_weight, k_weight = (x.clone().to(DEVICE) for x in case)
    norms, twins = None, None
    if norm:
        more = (1.0, 1.5) if norm == "shifted" else ()
        norms = Norms(q_weight, k_weight, 1e-6, *more)
        twins = Norms(case[6].float(), case[7].float(), 1e-6, *more)
    own = torch.arange(len(POSITIONS))
    wide = [x.float() for x in (*case[:3], *case[4:6])]
    expected = paged.decode_attention(*wide[:3], Placement(own, POSITIONS, case[3]), twins, wide[3], wide[4], window)
    place = Placement(own.to(DEVICE), POSITIONS.to(DEVICE), table)
    got, again = (
        row_attention(qkv, cos, sin, place, norms, keys, values, window, splits=splits, least=16) for _ in range(2)
    )
    there = POSITIONS >= 0
    assert error(got[there.to(DEVICE)], expected[there]) < ERROR[dtype]
    assert not got[~there.to(DEVICE)].any()
    assert torch.equal(got, again)  # whichever stretch comes last
    assert error(keys[1:], wide[3][1:]) < ERROR[dtype]  # page 0 is nobody's
    assert torch.equal(values[1:].cpu().float(), wide[4][1:])


@pytest.mark.usefixtures("early")
@pytest.mark.skipif(not CUDA, reason="the interpreter rounds 8-bit floats wrongly")
@pytest.mark.parametrize("splits", [1, 4])
def test_a_rows_attention_over_8_bits_is_its_twins(splits: int) -> None:
    from burnish.models.ops.kernels.row_attention import row_attention

    qkv, cos, sin, table, keys, values, *_ = row_case(2, 6, 128, "", torch.float32)
    mine = [Quantised(*(part.clone().to(DEVICE) for part in quantise(x))) for x in (keys, values)]
    twins = [quantise(x) for x in (keys, values)]
    own = torch.arange(len(POSITIONS))
    expected = paged.decode_attention(qkv, cos, sin, Placement(own, POSITIONS, table), None, *twins, None)
    place = Placement(*(x.to(DEVICE) for x in (own, POSITIONS, table)))
    moved = [x.to(DEVICE) for x in (qkv, cos, sin)]
    got = row_attention(*moved, place, None, *mine, None, splits=splits, least=16)
    there = POSITIONS >= 0
    # A new key that differs in its last bit may round to the next number of 8 bits.
    assert error(got[there.to(DEVICE)], expected[there]) < 1e-2


@pytest.mark.usefixtures("early")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "gated", "parts", "biased"),
    [
        (1, 96, 40, False, 1, True),
        (16, 96, 48, False, 3, False),
        (20, 80, 40, True, 1, False),
        (64, 200, 33, False, 1, True),
    ],
)
def test_products_of_few_rows(
    dtype: torch.dtype, rows: int, inputs: int, outputs: int, gated: bool, parts: int, biased: bool
) -> None:
    from burnish.models.ops.kernels.few_rows import few_rows

    x, matrix = randn(rows, inputs, dtype=dtype), randn(outputs * (2 if gated else 1), inputs, dtype=dtype, seed=1) / 8
    bias = randn(outputs, dtype=dtype, seed=2) if biased else None
    expected = functional.linear(x.float(), matrix.float(), None if bias is None else bias.float())
    if gated:
        gate, value = expected.chunk(2, -1)
        expected = functional.silu(gate) * value
    got = few_rows(x.to(DEVICE), matrix.to(DEVICE), None if bias is None else bias.to(DEVICE), gated, parts)
    assert got.shape == ((parts, rows, outputs) if parts > 1 else (rows, outputs))
    assert error(got.float().sum(0) if parts > 1 else got, expected) < ERROR[dtype]
