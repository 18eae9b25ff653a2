"""Micro-batches: a partition under the budget, and the way back to the whole batch."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.training.forward import element_positions, split
from burnish.training.packing import micro_batches

LENGTHS = st.lists(st.integers(1, 20), max_size=15)


@given(LENGTHS, st.integers(1, 60))
def test_every_sequence_is_in_one_micro_batch_under_the_budget(lengths: list[int], budget: int) -> None:
    parts = micro_batches(lengths, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or sum(lengths[i] for i in part) <= budget


@given(LENGTHS, st.integers(1, 60))
def test_similar_lengths_share_a_micro_batch(lengths: list[int], budget: int) -> None:
    order = [lengths[i] for part in micro_batches(lengths, budget) for i in part]
    assert order == sorted(lengths)


@given(LENGTHS, st.integers(1, 60))
def test_no_two_neighbours_could_be_one(lengths: list[int], budget: int) -> None:
    parts = micro_batches(lengths, budget)
    for part, following in pairwise(parts):
        assert sum(lengths[i] for i in part) + lengths[following[0]] > budget


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"),
    [
        ([4, 2, 3, 2], 5, [[1, 3], [2], [0]]),
        ([4, 2, 3, 2], 11, [[1, 3, 2, 0]]),
        ([9, 1, 1], 4, [[1, 2], [0]]),
        ([5], 1, [[0]]),
        ([], 8, []),
    ],
)
def test_pinned(lengths: list[int], budget: int, expected: list[list[int]]) -> None:
    assert micro_batches(lengths, budget) == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 20))
def test_what_is_computed_on_parts_goes_back_to_its_tokens(lengths: list[int], budget: int) -> None:
    batch = Batch(torch.arange(sum(lengths)) * 3, offsets_from_lengths(torch.tensor(lengths)))
    found = torch.full_like(batch.tokens, -1)
    for part, micro in split(batch, budget):
        positions = element_positions(batch, part)
        assert bool((found[positions] == -1).all())
        found[positions] = micro.tokens
    assert torch.equal(found, batch.tokens)
