"""Dividing costs over parts: everything is placed once, and evenly."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.training.packing import karmarkar_karp


def spreads(costs: list[float], parts: list[list[int]]) -> list[float]:
    return [sum(costs[i] for i in part) for part in parts]


@given(st.lists(st.floats(0, 100), max_size=30), st.integers(1, 7))
def test_every_item_is_in_exactly_one_part(costs: list[float], num_parts: int) -> None:
    parts = karmarkar_karp(costs, num_parts)
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(costs)))
    assert parts == karmarkar_karp(costs, num_parts)


@pytest.mark.parametrize(
    ("costs", "num_parts", "largest"),
    [([8, 7, 6, 5, 4], 2, 16), ([4, 5, 6, 7, 8], 2, 16), ([5, 5, 5, 4, 4, 3, 3, 1], 3, 11), ([9, 1, 1], 3, 9)],
)
def test_the_differencing_method_by_hand(costs: list[float], num_parts: int, largest: float) -> None:
    """8-7-6-5-4 into two: 8-7, 6-5 leave 1, 1, 4; 4-1 leaves 3, 1; the parts differ by 2: 16 and 14."""
    assert max(spreads(costs, karmarkar_karp(costs, num_parts))) == largest


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=2, max_size=7), st.integers(2, 3))
def test_the_largest_part_is_near_the_best_there_is(costs: list[int], num_parts: int) -> None:
    choices = product(range(num_parts), repeat=len(costs))
    best = min(
        max(sum(c for c, p in zip(costs, choice, strict=True) if p == k) for k in range(num_parts))
        for choice in choices
    )
    found = max(spreads([float(c) for c in costs], karmarkar_karp(costs, num_parts)))
    assert found <= best * (4 / 3)


def test_many_like_items_differ_by_one_item() -> None:
    parts = karmarkar_karp([384.0] * 256, 7)
    assert sorted(len(part) for part in parts) == [36, 36, 36, 37, 37, 37, 37]


def test_random_lengths_are_balanced_to_a_thousandth() -> None:
    costs = [100.0 + (37 * i) % 400 for i in range(512)]
    sums = spreads(costs, karmarkar_karp(costs, 8))
    assert max(sums) - min(sums) < 1e-3 * sum(costs) / 8
