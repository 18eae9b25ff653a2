"""The blocked scan against a plain loop: ragged runs, every block size, both precisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.advantages.reverse_scan import discount_cumsum, segment_cumsum
from burnish.core.segments import offsets_from_lengths

LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), min_size=1, max_size=12)


def loop(x: list[float], lengths: list[int], c: list[float]) -> list[float]:
    y, start = [0.0] * len(x), 0
    for length, factor in zip(lengths, c, strict=True):
        running = 0.0
        for t in range(start + length - 1, start - 1, -1):
            y[t] = running = x[t] + factor * running
        start += length
    return y


def numbers(num: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(num, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.floats(0, 1), st.sampled_from([None, 1, 2, 3, 8, 64]), st.integers(0, 999))
def test_it_equals_a_loop_for_one_coefficient(lengths: list[int], c: float, block: int | None, seed: int) -> None:
    x = numbers(sum(lengths), seed)
    got = discount_cumsum(x, offsets_from_lengths(torch.tensor(lengths)), c, block)
    expected = torch.tensor(loop(x.tolist(), lengths, [c] * len(lengths)), dtype=torch.float64)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.data(), st.sampled_from([None, 1, 2, 3, 8, 64]), st.integers(0, 999))
def test_it_equals_a_loop_for_a_coefficient_a_run(lengths: list[int], data: Any, block: int | None, seed: int) -> None:
    value = st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1))
    c = data.draw(st.lists(value, min_size=len(lengths), max_size=len(lengths)))
    x = numbers(sum(lengths), seed)
    got = discount_cumsum(x, offsets_from_lengths(torch.tensor(lengths)), torch.tensor(c, dtype=torch.float64), block)
    expected = torch.tensor(loop(x.tolist(), lengths, c), dtype=torch.float64)
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("c", [0.0, 0.5, 0.95, 1.0])
def test_long_runs_cross_many_blocks_and_levels(c: float) -> None:
    lengths = [5000, 1, 0, 700, 64, 128]
    x = numbers(sum(lengths), 7)
    expected = torch.tensor(loop(x.tolist(), lengths, [c] * 6), dtype=torch.float64)
    offsets = offsets_from_lengths(torch.tensor(lengths))
    for coefficient in (c, torch.full((6,), c, dtype=torch.float64)):
        torch.testing.assert_close(discount_cumsum(x, offsets, coefficient), expected, atol=1e-9, rtol=1e-9)
        single = discount_cumsum(x.float(), offsets, coefficient)
        assert single.dtype == torch.float32
        torch.testing.assert_close(single, expected.float(), atol=1e-3, rtol=1e-4)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.sampled_from([None, 2, 8]), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 99))
def test_coefficients_0_and_1_are_exact(lengths: list[int], block: int | None, dtype: torch.dtype, seed: int) -> None:
    """Whole numbers leave no rounding to hide behind."""
    x = (numbers(sum(lengths), seed) * 10).round().to(dtype)
    offsets = offsets_from_lengths(torch.tensor(lengths))
    assert discount_cumsum(x, offsets, 0.0, block).tolist() == x.tolist()
    assert discount_cumsum(x, offsets, torch.zeros(len(lengths)), block).tolist() == x.tolist()
    expected = loop(x.tolist(), lengths, [1.0] * len(lengths))
    assert discount_cumsum(x, offsets, 1.0, block).tolist() == expected
    assert discount_cumsum(x, offsets, torch.ones(len(lengths)), block).tolist() == expected


def test_the_input_is_left_as_it_was() -> None:
    x = numbers(200, 1)
    before = x.clone()
    for c in (0.0, 0.9, torch.tensor([0.5, 0.9])):
        discount_cumsum(x, torch.tensor([0, 90, 200]), c).zero_()
        assert torch.equal(x, before)


@settings(max_examples=25, deadline=None)
@given(LENGTHS, st.integers(0, 99))
def test_a_running_sum_counts_from_the_start_of_its_run(lengths: list[int], seed: int) -> None:
    x = numbers(sum(lengths), seed)
    parts = [part.cumsum(0) for part in x.split(lengths)]
    torch.testing.assert_close(segment_cumsum(x, offsets_from_lengths(torch.tensor(lengths))), torch.cat(parts))
