"""Segment operations against loops over Python lists."""

from __future__ import annotations

import math
from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.segments import (
    compact_ids,
    ids_from_offsets,
    offsets_from_lengths,
    segment_broadcast,
    segment_count,
    segment_max,
    segment_mean,
    segment_min,
    segment_sum,
)

ELEMENTS = st.lists(st.tuples(st.integers(0, 4), st.floats(-100, 100), st.booleans()), max_size=20)
NUM = 6  # segment 5 is always empty


def columns(elements: list[tuple[int, float, bool]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor([e[0] for e in elements], dtype=torch.int64),
        torch.tensor([e[1] for e in elements], dtype=torch.float64),
        torch.tensor([e[2] for e in elements], dtype=torch.bool),
    )


@settings(max_examples=100, deadline=None)
@given(ELEMENTS)
def test_reductions_equal_loops_over_unsorted_ids(elements: list[tuple[int, float, bool]]) -> None:
    ids, values, mask = columns(elements)
    members = [[v for i, v, _ in elements if i == s] for s in range(NUM)]
    kept = [[v for i, v, m in elements if i == s and m] for s in range(NUM)]

    def close(got: torch.Tensor, expected: list[float]) -> None:
        torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))

    close(segment_sum(values, ids, NUM), [math.fsum(m) for m in members])
    close(segment_mean(values, ids, NUM), [math.fsum(m) / max(len(m), 1) for m in members])
    close(segment_mean(values, ids, NUM, mask), [math.fsum(m) / max(len(m), 1) for m in kept])
    assert segment_max(values, ids, NUM).tolist() == [max(m, default=-math.inf) for m in members]
    assert segment_min(values, ids, NUM).tolist() == [min(m, default=math.inf) for m in members]
    assert segment_count(ids, NUM).tolist() == [len(m) for m in members]
    assert segment_count(ids, NUM, mask).tolist() == [len(m) for m in kept]


@settings(max_examples=50, deadline=None)
@given(ELEMENTS, st.randoms(use_true_random=False))
def test_the_order_of_elements_does_not_matter(elements: list[tuple[int, float, bool]], random: Random) -> None:
    ids, values, mask = columns(elements)
    order = list(range(len(elements)))
    random.shuffle(order)
    p = torch.tensor(order, dtype=torch.int64)
    for operation in (segment_sum, segment_max, segment_min, segment_mean):
        torch.testing.assert_close(operation(values[p], ids[p], NUM), operation(values, ids, NUM))
    torch.testing.assert_close(segment_mean(values[p], ids[p], NUM, mask[p]), segment_mean(values, ids, NUM, mask))
    assert torch.equal(segment_count(ids[p], NUM, mask[p]), segment_count(ids, NUM, mask))


def test_a_masked_mean_never_sees_what_is_masked() -> None:
    values = torch.tensor([1.0, torch.nan, 3.0, torch.inf])
    mask = torch.tensor([True, False, True, False])
    assert segment_mean(values, torch.tensor([0, 0, 0, 1]), 2, mask).tolist() == [2.0, 0.0]


def test_gradients_flow_through_a_segment_sum() -> None:
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (segment_sum(values, torch.tensor([1, 0, 1]), 2) * torch.tensor([10.0, 100.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [100.0, 10.0, 100.0]


def test_boundaries_and_ids() -> None:
    offsets = offsets_from_lengths(torch.tensor([2, 0, 3]))
    assert offsets.tolist() == [0, 2, 2, 5]
    assert ids_from_offsets(offsets).tolist() == [0, 0, 2, 2, 2]
    assert offsets_from_lengths(torch.tensor([], dtype=torch.int64)).tolist() == [0]


def test_broadcast_spreads_a_value_over_its_segment() -> None:
    assert segment_broadcast(torch.tensor([5, 7]), torch.tensor([1, 0, 1])).tolist() == [7, 5, 7]


def test_compact_ids_renumber_whatever_the_ids_were() -> None:
    compact, num = compact_ids(torch.tensor([70, -3, 70, 8]))
    assert (compact.tolist(), num) == ([2, 0, 2, 1], 3)
