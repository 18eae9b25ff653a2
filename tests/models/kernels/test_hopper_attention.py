"""The Hopper decode attention kernel: its output, what it stores, and that it writes nothing else."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.models.kernels import inference_ops
from burnish.models.kernels.cuda.hopper import attention_source, decode_attention, has_decode_attention
from burnish.models.kernels.elementwise import inverse_frequencies, rotation_table
from burnish.models.kernels.fp8 import FP8, Fp8Rows, dequantised, quantise_rows
from burnish.models.kernels.paged_cache import HeadNorms, Placement
from tests.kernels import error, on_hopper

PAGE = 16
EDGES = (-1, 0, 1, 15, 16, 17, 31, 32, 100, 255, 300, 513)


def test_a_source_says_what_heads_it_is_for() -> None:
    settings = {"DIM": 64, "QUERIES": 7, "NORMED": 1, "STAGES": 2, "ROTATED": 0, "EIGHT": 0, "STORES": 1}
    defines = "".join(f"#define {name} {value}\n" for name, value in settings.items())
    assert attention_source(64, 7, True, 2).startswith(defines)


def test_it_is_not_for_a_cpu() -> None:
    place = Placement(torch.arange(2), torch.arange(2), torch.zeros(2, 1, dtype=torch.int32))
    pages = torch.zeros(1, 1, PAGE, 64)
    assert not has_decode_attention(torch.zeros(2, 4 * 64), pages, place, None, pages, pages)


class Case:
    """Rows of the given lengths with pages in random order; unused cache entries are NaN."""

    def __init__(self, positions: tuple[int, ...], dim: int, queries: int, kv_heads: int, normed: bool = False) -> None:
        rows, width = len(positions), max(positions) // PAGE + 1
        count = rows * width + 1
        table = (torch.randperm(count - 1) + 1).view(rows, width).int()
        cache = torch.full((2, count, kv_heads, PAGE, dim), torch.nan)
        for row, position in enumerate(positions):
            for token in range(position):
                cache[:, table[row, token // PAGE], :, token % PAGE] = torch.randn(2, kv_heads, dim)
        self.cache = cache.bfloat16().cuda()
        self.place = Placement(torch.arange(rows).cuda(), torch.tensor(positions).cuda(), table.cuda())
        self.qkv = torch.randn(rows, (queries + 2) * kv_heads * dim).bfloat16().cuda()
        self.cos, self.sin = (
            x.cuda() for x in rotation_table(1024, inverse_frequencies(dim, 1e4, None), torch.bfloat16)
        )
        weights = [(torch.rand(dim) + 0.5).bfloat16().cuda() for _ in range(2)]
        self.norms = HeadNorms(weights[0], weights[1], 1e-6, 1.0, 0.7) if normed else None

    def found(self, window: int | None, splits: int, least: int = 64) -> tuple[Tensor, Tensor]:
        """The kernel's attention output, and the cache afterwards."""
        cache = self.cache.clone()
        assert has_decode_attention(self.qkv, self.cos, self.place, self.norms, cache[0], cache[1])
        out = decode_attention(
            self.qkv, self.cos, self.sin, self.place, self.norms, cache[0], cache[1], window, splits, least
        )
        return out, cache

    def truth(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The same by torch in float64."""
        cache = self.cache.double().nan_to_num(0.0)
        norms = self.norms and self.norms._replace(query=self.norms.query.double(), key=self.norms.key.double())
        wide = (self.qkv.double(), self.cos.double(), self.sin.double(), self.place, norms)
        with torch.no_grad():
            return inference_ops.decode_attention(*wide, cache[0], cache[1], window), cache


# A window of 70 has splits that end within the new token's page, past whose end nothing may be read.
CASES = [
    (dim, queries, kv_heads, normed, window, splits)
    for dim, (queries, kv_heads), normed, window, splits in itertools.product(
        (128, 64), ((1, 2), (6, 2), (7, 4), (8, 1)), (False, True), (None, 1, 70, 100), (1, 4)
    )
    if normed is (window == 70) or window is None
]


@on_hopper
@pytest.mark.parametrize(("dim", "queries", "kv_heads", "normed", "window", "splits"), CASES)
def test_it_attends_as_float64_does(
    dim: int, queries: int, kv_heads: int, normed: bool, window: int | None, splits: int
) -> None:
    torch.manual_seed(queries)
    case = Case(EDGES, dim, queries, kv_heads, normed)
    (found, cache), (truth, stored) = case.found(window, splits), case.truth(window)
    there = case.place.position >= 0
    assert error(found[there], truth[there]) < 8e-3
    assert found.isfinite().all()  # also for an empty row
    new = cache.isfinite() & case.cache.isnan()
    assert new.sum() == 2 * kv_heads * dim * int(there.sum())  # each row's key and value
    assert error(cache[new], stored[new]) < 5e-3
    assert torch.equal(cache.nan_to_num(9.0)[~new], case.cache.nan_to_num(9.0)[~new])


@on_hopper
@pytest.mark.parametrize(
    ("queries", "kv_heads", "normed", "window", "splits"),
    [
        (1, 2, False, None, 1),
        (6, 2, False, None, 4),
        (7, 4, True, 70, 1),
        (8, 1, True, None, 4),
        (6, 2, False, 1, 1),
        (6, 2, False, 100, 2),
    ],
)
def test_an_8_bit_cache_is_attended_to_as_float64_does(
    queries: int, kv_heads: int, normed: bool, window: int | None, splits: int
) -> None:
    torch.manual_seed(queries)
    case = Case(EDGES, 128, queries, kv_heads, normed)
    unused = case.cache.isnan().any(-1)
    full = quantise_rows(case.cache.nan_to_num(0.0))
    full.data.view(torch.uint8)[unused] = 0x7F  # NaN
    full.scale[unused] = torch.nan
    seen = [Fp8Rows(full.data[k].clone(), full.scale[k].clone()) for k in (0, 1)]
    clean = [Fp8Rows(x.data.clone(), x.scale.nan_to_num(0.0)) for x in seen]
    for rows, gone in zip(clean, unused, strict=True):
        rows.data.view(torch.uint8)[gone] = 0
    assert has_decode_attention(case.qkv, case.cos, case.place, case.norms, *seen)
    found = decode_attention(case.qkv, case.cos, case.sin, case.place, case.norms, *seen, window, splits, 64)
    norms = case.norms and case.norms._replace(query=case.norms.query.double(), key=case.norms.key.double())
    wide = (case.qkv.double(), case.cos.double(), case.sin.double(), case.place, norms)
    with torch.no_grad():
        truth = inference_ops.decode_attention(*wide, *clean, window)
    there = case.place.position >= 0
    assert error(found[there], truth[there]) < 1.5e-2
    assert found.isfinite().all()
    for mine, theirs, gone in zip(seen, clean, unused, strict=True):
        new = mine.scale.isfinite() & gone
        assert new.sum() == kv_heads * int(there.sum())
        both = [
            dequantised(Fp8Rows(x.data.view(torch.uint8)[new].view(FP8), x.scale[new]), torch.float64)
            for x in (mine, theirs)
        ]
        assert error(both[0], both[1]) < 0.02  # a bfloat16 rounding may go the other way, and with it an 8-bit one
        assert (mine.scale[gone & ~new]).isnan().all()


@on_hopper
def test_stretches_change_nothing_but_rounding() -> None:
    torch.manual_seed(0)
    case = Case(EDGES, 128, 6, 2)
    whole, _ = case.found(None, 1)
    for splits, least in ((2, 64), (8, 64), (32, 64), (4, 512)):
        assert error(case.found(None, splits, least)[0], whole.double()) < 5e-3


@on_hopper
@pytest.mark.parametrize("dim", [64, 128])
def test_rows_turn_by_their_rotation_index(dim: int) -> None:
    torch.manual_seed(0)
    case = Case(EDGES, dim, 6, 2)
    plain, _ = case.found(None, 1)
    case.place = replace(case.place, rotation=(case.place.position * 3 % 257).clamp(min=0))
    found, truth = case.found(None, 2)[0], case.truth(None)[0]
    there = case.place.position >= 0
    assert error(found[there], truth[there]) < 8e-3
    assert error(plain[there], truth[there]) > 0.05


@on_hopper
@pytest.mark.parametrize("splits", [1, 4])
def test_rows_that_share_pages_see_the_tokens_of_each_other(splits: int) -> None:
    """Four new tokens of one row, across the border of a page."""
    torch.manual_seed(0)
    case = Case((300, 300, 300, 300, 40), 128, 6, 2, True)
    table = case.place.table[[0, 0, 0, 0, 4]].contiguous()
    case.place = Placement(case.place.owner, torch.tensor([300, 301, 302, 303, 40]).cuda(), table)
    cache = case.cache.clone()
    inputs = case.qkv, case.cos, case.sin, case.place, case.norms, cache[0], cache[1], None, splits
    assert has_decode_attention(*inputs[:2], case.place, case.norms, cache[0], cache[1])
    found = inference_ops.decode_attention(*inputs, shares_pages=True)
    truth, stored = case.truth(None)
    assert error(found, truth) < 8e-3
    assert error(cache.nan_to_num(0.0), stored) < 5e-3


@on_hopper
def test_a_row_does_not_depend_on_the_rows_beside_it() -> None:
    torch.manual_seed(0)
    case = Case(EDGES, 128, 6, 2)
    beside, _ = case.found(None, 1)
    place = replace(case.place, position=torch.where(case.place.position == 300, case.place.position, -1))
    case.place = place
    alone, _ = case.found(None, 1)
    assert torch.equal(alone[10], beside[10])


@on_hopper
def test_large_scores_do_not_overflow_and_late_ones_count() -> None:
    from burnish.models.kernels.triton.decode_attention import decode_attention

    torch.manual_seed(0)
    case = Case((500,), 128, 6, 2)
    case.cache[0] *= 40  # scores in the hundreds: one key has nearly all the weight, at any position
    keys, values = case.cache.clone()
    by_triton = decode_attention(case.qkv, case.cos, case.sin, case.place, None, keys, values, None, 1, 64)
    found, _ = case.found(None, 1)
    assert found.isfinite().all()
    assert error(found, by_triton.double()) < 3e-2


@on_hopper
def test_other_types_and_heads_are_left_to_triton() -> None:
    case = Case((5, 6), 128, 4, 2, normed=True)

    def has(qkv: Tensor = case.qkv, keys: Tensor = case.cache[0], **others: Any) -> bool:
        asked: dict[str, Any] = {"cos": case.cos, "placement": case.place, "norms": case.norms, "values": keys} | others
        return has_decode_attention(qkv=qkv, keys=keys, **asked)

    assert case.norms is not None
    assert has()
    assert has(norms=None)
    assert not has(case.qkv.half(), case.cache[0].half())
    assert not has(keys=case.cache[0][:, :, :8].contiguous())
    assert not has(keys=case.cache[0][..., :32].contiguous())
    assert not has(case.qkv.repeat(1, 2))  # ten queries per key
    assert not has(case.qkv[:0])
    assert not has(values=case.cache[1].half())
    assert not has(cos=case.cos.float())
    assert not has(norms=case.norms._replace(query=case.norms.query.float()))


@on_hopper
def test_it_runs_in_a_graph_while_rows_grow() -> None:
    torch.manual_seed(0)
    case = Case((5, 40), 128, 6, 2)
    keys, values = case.cache.nan_to_num(0.0)
    asked = (case.qkv, case.cos, case.sin, case.place, None, keys, values, None)
    decode_attention(*asked, 4, 64)  # compile first
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(*asked, 4, 64)
    for _ in range(3):
        case.qkv.normal_()
        case.place.position.add_(1)
        graph.replay()
        assert torch.equal(out, decode_attention(*asked, 4, 64))
