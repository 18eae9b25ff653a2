"""The plan of the KV cache: plain arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.memory_plan.kv_cache import (
    GIB,
    MAX_FREE_SHARE,
    graph_batch_size,
    kv_token_bytes,
    min_split_keys,
    num_splits,
    plan_cache,
)

LARGE = kv_token_bytes(28, 2, 128, 2)


def test_the_numbers_of_a_known_shape() -> None:
    """By hand: 28 layers x (key + value) x 2 heads x 128 numbers x 2 bytes = 28,672 bytes a token."""
    assert LARGE == 28_672
    assert kv_token_bytes(28, 2, 128, 1, scale_bytes=4) == 28 * 2 * 2 * (128 + 4)
    plan = plan_cache(token_bytes=LARGE, max_rows=256, longest=384, free_bytes=130 * GIB)
    assert (plan.blocks_per_row, plan.num_blocks, plan.tokens, plan.rows) == (24, 256 * 24 + 1, 98_304, 256)
    assert plan.bytes == (256 * 24 + 1) * 16 * LARGE
    assert plan.graphs == len((1, 2, 4, 8, 16, 32, 64, 128, 192, 256))


def test_little_free_memory_bounds_the_blocks_and_a_size_fixes_them() -> None:
    asked: dict[str, Any] = {"token_bytes": LARGE, "max_rows": 256, "longest": 4000}
    bounded = plan_cache(**asked, free_bytes=10 * GIB)
    assert bounded.num_blocks == int(10 * GIB * MAX_FREE_SHARE) // (16 * LARGE)
    assert bounded.rows == (bounded.num_blocks - 1) // 250 < 256
    for size in (1, 3, 60):
        fixed = plan_cache(**asked, free_bytes=10 * GIB, cache_bytes=size * GIB)
        assert fixed.num_blocks == size * GIB // (16 * LARGE)
        assert size * GIB - 16 * LARGE < fixed.bytes <= size * GIB
    assert plan_cache(**asked).rows == 256, "without a GPU nothing bounds it"
    assert plan_cache(**asked, cache_bytes=60 * GIB).rows == 256, "more blocks than rows need, but no more rows"


def test_a_person_is_told_the_numbers() -> None:
    text = plan_cache(token_bytes=LARGE, max_rows=256, longest=384, free_bytes=130 * GIB).text
    for part in ("2.63 GiB of 130.0 GiB free", "6,144 blocks of 16", "28,672 bytes a token", "98,304 tokens", "256 of 256 rows", "384 tokens", "10 graphs"):  # fmt: skip
        assert part in text


def test_a_cache_that_cannot_hold_one_request_is_refused_with_the_numbers() -> None:
    plan = plan_cache(token_bytes=LARGE, max_rows=4, longest=4000, cache_bytes=GIB // 16)
    with pytest.raises(
        UserError, match=r"rollout.cache_gib: .* hold 145 blocks of 16 .* needs 250 \(4,000 tokens, 0.107 GiB\)"
    ):
        plan.require_one("rollout.cache_gib")
    plan_cache(token_bytes=LARGE, max_rows=4, longest=4000, cache_bytes=251 * 16 * LARGE).require_one("x")
    with pytest.raises(UserError, match="hold 0 blocks"):
        plan_cache(token_bytes=LARGE, max_rows=4, longest=4000, cache_bytes=5).require_one("x")


@pytest.mark.parametrize(("rows", "most", "size"), [(1, 9, 1), (5, 9, 8), (9, 9, 9), (129, 256, 192), (1025, 4000, 2048), (3000, 2900, 2900)])  # fmt: skip
def test_buckets(rows: int, most: int, size: int) -> None:
    assert graph_batch_size(rows, most) == size


def test_rows_are_cut_where_they_are_few_or_where_one_is_much_longer_than_most() -> None:
    assert num_splits(256, 2, [384] * 256) == 1
    assert num_splits(256, 2, [384] * 255 + [2048]) == 4
    assert num_splits(256, 2, [2048] * 256) == 1, "rows of equal length need no split"
    assert num_splits(8, 2, [100] * 8) == 32
    assert num_splits(128, 2, [300] * 128) == 2
    assert num_splits(256, 2, [100] * 255 + [40_000]) == 32
    assert num_splits(1024, 8, [100] * 1023 + [40_000]) == 4, "the places of their sums would take half a GiB"


@given(
    st.integers(1, 4096),
    st.integers(1, 64),
    st.lists(st.lists(st.integers(1, 50_000), min_size=1, max_size=20), max_size=20),
)
def test_splits_are_powers_of_two_and_no_more_than_the_plan_has_graphs(
    max_rows: int, kv_heads: int, batches: list[list[int]]
) -> None:
    asked: dict[str, Any] = {"token_bytes": 16, "max_rows": max_rows, "longest": 50_000}
    seen = set()
    for lengths in batches:
        rows = graph_batch_size(min(len(lengths), max_rows), max_rows)
        splits, least = num_splits(rows, kv_heads, lengths), min_split_keys(rows, kv_heads)
        assert splits in (1, 2, 4, 8, 16, 32)
        assert 64 <= least <= 512
        assert splits == 1 or rows * kv_heads < 132 * 4 or max(lengths) > least
        seen.add((rows, splits))
    sizes = {graph_batch_size(rows, max_rows) for rows in range(1, max_rows + 1)}
    assert len(seen) <= plan_cache(**asked, kv_heads=kv_heads).graphs
    assert plan_cache(**asked).graphs == len(sizes)


def test_a_plan_counts_the_graphs_of_every_length_of_its_longest_row() -> None:
    """By all batches of two lengths, one row longer than the others."""
    plan = plan_cache(token_bytes=LARGE, max_rows=256, longest=2176, kv_heads=2)
    seen = set()
    for rows in {graph_batch_size(rows, 256) for rows in range(1, 257)}:
        for longest in range(1, 2177):
            seen.add((rows, num_splits(rows, 2, [1] * (rows - 1) + [longest])))
            seen.add((rows, num_splits(rows, 2, [longest] * rows)))
    assert len(seen) == plan.graphs == 25
    assert plan_cache(token_bytes=LARGE, max_rows=256, longest=384, kv_heads=2).graphs == 10
