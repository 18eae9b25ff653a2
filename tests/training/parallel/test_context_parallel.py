"""Context parallelism without processes: how rows are divided, and that chunks attend to what whole sequences attend to.

That several processes train what one trains is tested in `test_several_ranks.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.config.errors import UserError
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.kernels import tree_attention as tree
from burnish.models.kernels.shared_prefix import computed_rows
from burnish.models.kernels.tree_attention import PieceKernel, tree_attention
from burnish.models.model_families import FAMILIES
from burnish.training.parallel.context_parallel import (
    ContextShard,
    apply_context_parallel,
    choose_kernel,
    chunk_pieces,
    divide_rows,
)
from burnish.training.parallel.sequence_parallel import SequenceSlice
from tests.kernels import CUDA, error
from tests.models.kernels.test_tree_attention import HEADS, KV_HEADS, Packing, drawn, naive, packings, results


def shards(packing: Packing, num_ranks: int, device: str = "cpu") -> list[ContextShard]:
    """The shards of all ranks; no rank communicates here."""
    rows = computed_rows(*packing)
    wanted = torch.arange(rows.num_rows, device=device)
    groups = [cast(Any, SimpleNamespace(size=lambda: num_ranks, rank=lambda r=r: r)) for r in range(num_ranks)]
    return [ContextShard(group, packing[0].diff().tolist(), rows, wanted, None) for group in groups]


def attention_of_all_ranks(
    parts: list[ContextShard], q: Tensor, k: Tensor, v: Tensor, window: int | None, kind: str, kernel: PieceKernel
) -> Tensor:
    """The attention of every rank, put together in the order of the rows. Keys are laid out as the gather does it."""
    keys, values = (torch.cat([_padded(x, part) for part in parts]) for x in (k, v))
    out = torch.zeros_like(q)
    for part in parts:
        if part.num_rows:
            plan = chunk_pieces(part.chunks, part.key_places, window, kind, q.device)
            out = out.index_copy(0, part.own, tree_attention(q[part.own], keys, values, plan, kernel, window))
    return out


def _padded(x: Tensor, part: ContextShard) -> Tensor:
    return torch.cat([x[part.own], x.new_full((part.each - part.num_rows, *x.shape[1:]), torch.nan)])


@pytest.mark.parametrize(("num_ranks", "expected"), [(2, SequenceSlice), (3, ContextShard), (4, ContextShard)])
def test_heads_are_exchanged_if_key_heads_can_be_divided_and_keys_are_gathered_otherwise(
    num_ranks: int, expected: type
) -> None:
    model = Decoder(Architecture("llama", 11, 32, 1, 8, 2, 4, 24, 32))
    apply_context_parallel(model, cast(Any, SimpleNamespace(size=lambda: num_ranks, rank=lambda: 0)))
    assert model.shard_rows is not None
    assert type(model.shard_rows([5, 3], None, torch.tensor([1, 6]))) is expected


def test_a_teacher_computes_the_rows_of_the_policy() -> None:
    model, group = (
        Decoder(Architecture("llama", 11, 32, 1, 8, 4, 4, 24, 32)),
        SimpleNamespace(size=lambda: 4, rank=lambda: 0),
    )
    for policy_kv_heads, expected in ((8, SequenceSlice), (2, ContextShard)):
        apply_context_parallel(model, cast(Any, group), policy_kv_heads)
        assert model.shard_rows is not None
        assert type(model.shard_rows([5, 3], None, torch.tensor([1, 6]))) is expected
    fewer = Decoder(Architecture("llama", 11, 32, 1, 8, 2, 4, 24, 32))
    with pytest.raises(UserError, match=r"divides the policy's 8 key/value heads .* but not the 2 of the reference"):
        apply_context_parallel(fewer, cast(Any, group), 8)


def test_soft_capped_scores_need_divided_heads() -> None:
    model = Decoder(Architecture("gemma2", 11, 32, 1, 8, 2, 4, 24, 32, **FAMILIES["gemma2"].fixed, score_softcap=50.0))
    apply_context_parallel(model, cast(Any, SimpleNamespace(size=lambda: 2, rank=lambda: 0)))
    with pytest.raises(UserError, match=r"context=4 does not divide the 2 key/value heads .* no soft-capped scores"):
        apply_context_parallel(model, cast(Any, SimpleNamespace(size=lambda: 4, rank=lambda: 0)))


@settings(max_examples=60, deadline=None)
@given(
    packings(most=20),
    st.integers(1, 5),
    st.sampled_from([("apart", None), ("joined", None), ("joined", 1), ("joined", 4), ("dense", None)]),
)
def test_chunks_attend_to_what_whole_sequences_attend_to(
    packing: Packing, num_ranks: int, plan: tuple[str, int | None]
) -> None:
    kind, window = plan
    tensors, parts = drawn(packing), shards(packing, num_ranks)
    kernel = tree.CPU_KERNEL if kind == "apart" else tree.EXPLICIT_KERNEL
    expected = results(lambda *qkv: naive(*qkv, packing, window), tensors)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("MIN_DENSE_ROWS", 4), ("MIN_DENSE_SIDE", 3), ("ROUNDING", 2), ("TILE", 1)):
            patch.setattr(tree, name, value)
        found = results(lambda *qkv: attention_of_all_ranks(parts, *qkv, window, kind, kernel), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@settings(max_examples=100, deadline=None)
@given(packings(most=40), st.integers(1, 6))
def test_every_row_is_on_one_rank_and_comes_back(packing: Packing, num_ranks: int) -> None:
    parts, count = shards(packing, num_ranks), computed_rows(*packing).num_rows
    assert torch.cat([part.own for part in parts]).sort().values.tolist() == list(range(count))
    column = torch.arange(1, count + 1)
    values = torch.cat([part.rows(column) for part in parts])
    for part in parts:
        mine = part.select_wanted(column)[: part.count]
        assert torch.equal(part.rows(column)[part.at][: part.count], mine)
        assert sorted(mine.tolist()) == sorted(part.rows(column)[: part.num_rows].tolist())
    assert sorted(values[values > 0].tolist()) == column.tolist()


@pytest.mark.parametrize("lengths", [[70_000], [30_000, 9_000, 8_000, 120, 80, 75, 3], [900] * 40, [17]])
def test_ranks_have_equal_work(lengths: list[int]) -> None:
    shared = [0, *([60] * (len(lengths) - 2)), 0][: len(lengths)]
    found = divide_rows(lengths, shared, 4)
    rows = [sum(chunk.end - chunk.begin for chunk in chunks) for chunks in found]
    pairs = [sum((c.end - c.begin) * (c.begin + c.end + 1) / 2 for c in chunks) for chunks in found]
    assert max(rows) - min(rows) <= max(2, 0.02 * sum(rows) / 4)
    assert max(pairs) <= 1.02 * min(pairs) or sum(lengths) < 100


def test_short_sequences_stay_whole() -> None:
    found = divide_rows([5000, 40, 50], [0, 10, 0], 2)
    whole = [chunk for chunks in found for chunk in chunks if chunk.sequence]
    assert sorted((c.sequence, c.begin, c.end) for c in whole) == [(1, 10, 40), (2, 0, 50)]
    assert [[c.begin for c in chunks if c.sequence == 0] for chunks in found] == [[0, 3750], [1250, 2500]]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_chunks_on_a_gpu(window: int | None, dtype: torch.dtype) -> None:
    packing = torch.tensor([0, 9000, 18500, 18900, 24000]), torch.tensor([0, 4000, 300, 0])
    generator = torch.Generator().manual_seed(0)
    count = computed_rows(*packing).num_rows
    tensors = [
        torch.randn(count, heads, 64, generator=generator).to("cuda", dtype)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]
    on_gpu = packing[0].cuda(), packing[1].cuda()
    parts = shards(on_gpu, 2, "cuda")
    kind, kernel = choose_kernel(tensors[0], window)
    assert kind == ("dense" if dtype == torch.bfloat16 and window is None else "joined")
    found = results(lambda *qkv: attention_of_all_ranks(parts, *qkv, window, kind, kernel), tensors)
    whole = [ContextShard(cast(Any, SimpleNamespace(size=lambda: 1, rank=lambda: 0)), packing[0].diff().tolist(),
        computed_rows(*on_gpu), torch.arange(count, device="cuda"), None)]  # fmt: skip
    wide = [x.double() for x in tensors]
    expected = results(lambda *qkv: attention_of_all_ranks(whole, *qkv, window, "joined", tree.EXPLICIT_KERNEL), wide)
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) < (0.01 if dtype == torch.bfloat16 else 1e-5)
