"""Packing into micro-batches: each sequence once, within the budget, balanced; and Karmarkar-Karp partitions."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.training.forward import Packing, micro_batches_of, token_positions
from burnish.training.packing import (
    PrefixTree,
    Unit,
    karmarkar_karp,
    pack_units,
    sequence_units,
    tree_units,
    unshared_trees,
)

LENGTHS = st.lists(st.integers(1, 20), max_size=15)
GROUPED = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 12)), min_size=1, max_size=14)


def members(part: list[Unit]) -> list[int]:
    return [i for unit in part for i in unit.members]


@given(LENGTHS, st.integers(1, 60))
def test_every_sequence_is_in_one_micro_batch_under_the_budget(lengths: list[int], budget: int) -> None:
    parts = pack_units(sequence_units(lengths), budget)
    assert sorted(i for part in parts for i in members(part)) == list(range(len(lengths)))
    for part in parts:
        assert len(part) < 2 or sum(lengths[i] for i in members(part)) <= budget


@given(LENGTHS, st.integers(1, 60))
def test_there_are_never_more_than_one_and_a_half_times_the_fewest(lengths: list[int], budget: int) -> None:
    parts = pack_units(sequence_units(lengths), budget)
    alone = sum(length >= budget for length in lengths)
    fewest = math.ceil(sum(length for length in lengths if length < budget) / budget)
    assert len(parts) <= alone + 2 * fewest


def test_micro_batches_cost_about_the_same() -> None:
    lengths = [100 + (37 * i) % 400 for i in range(256)]
    parts = pack_units(sequence_units(lengths), 8192)
    costs = [sum(unit.cost for unit in part) for part in parts]
    assert len(parts) == math.ceil(sum(lengths) / 8192)
    assert max(costs) < 1.01 * min(costs)


def test_a_long_sequence_counts_for_its_attention() -> None:
    """By tokens 600 and three of 100 are half of it all; with attention 600 costs 1200, and each 100 only 117."""
    lengths = [600, *[100] * 12]
    by_tokens, by_cost = (pack_units(sequence_units(lengths, b), 1200) for b in (0.0, 1 / 600))
    assert sorted(len(part) for part in by_tokens) == [4, 9]
    assert sorted(len(part) for part in by_cost) == [2, 11]


@given(GROUPED, st.integers(1, 40), st.integers(0, 6))
def test_units_of_trees_hold_every_sequence_once_and_stay_under_the_budget(
    drawn: list[tuple[int, int]], budget: int, prompt: int
) -> None:
    groups, lengths = [g for g, _ in drawn], [prompt + length for _, length in drawn]
    trees = [PrefixTree(tree.members, [0, *[prompt] * (len(tree.members) - 1)]) for tree in unshared_trees(groups)]
    units = tree_units(lengths, trees, budget)
    assert sorted(i for unit in units for i in unit.members) == list(range(len(groups)))
    for unit in units:
        assert len({groups[i] for i in unit.members}) == 1
        assert unit.shared == [0] + [prompt] * (len(unit.members) - 1)
        assert unit.num_tokens == sum(lengths[i] for i in unit.members) - sum(unit.shared)
        assert len(unit.members) == 1 or (prompt and unit.num_tokens <= budget)


def test_a_tree_is_cut_at_the_budget_and_its_trunk_is_computed_on_both_sides() -> None:
    lengths, tree = [12, 13, 15, 9], PrefixTree([2, 0, 3, 1], [0, 10, 8, 6])
    (unit,) = tree_units(lengths, [tree], 100, attention_cost=0.5)
    assert unit.num_tokens == 15 + 2 + 1 + 7
    assert unit.cost == 25 + 0.5 * (15**2 + (12**2 - 10**2) + (9**2 - 8**2) + (13**2 - 6**2))
    parts = [(unit.members, unit.shared, unit.num_tokens) for unit in tree_units(lengths, [tree], 17)]
    assert parts == [([2, 0], [0, 10], 17), ([3, 1], [0, 6], 16)]


@pytest.mark.parametrize(("lengths", "budget", "sizes"), [([9, 1, 1], 4, [9, 2]), ([5], 1, [5]), ([], 8, [])])
def test_a_sequence_above_the_budget_is_alone(lengths: list[int], budget: int, sizes: list[int]) -> None:
    parts = pack_units(sequence_units(lengths), budget)
    assert sorted((sum(unit.num_tokens for unit in part) for part in parts), reverse=True) == sizes


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 20), st.booleans())
def test_what_is_computed_on_parts_goes_back_to_its_tokens(lengths: list[int], budget: int, shares: bool) -> None:
    n = sum(lengths)
    mask = torch.arange(n) % 3 == 1
    groups = torch.arange(len(lengths)) % 2
    batch = Batch(
        torch.arange(n) * 3, offsets_from_lengths(torch.tensor(lengths)), {"loss_mask": mask}, {"group_ids": groups}
    )
    found = torch.full_like(batch.tokens, -1)
    for piece in micro_batches_of(batch, Packing(budget, shares=shares), "loss_mask"):
        assert bool((found[piece.positions] == -1).all())
        assert torch.equal(piece.batch.tokens[piece.wanted], batch.tokens[piece.positions])
        found[piece.positions] = batch.tokens[piece.positions]
    assert torch.equal(found, torch.where(mask, batch.tokens, -1))
    everything = torch.arange(len(lengths))
    assert torch.equal(token_positions(batch, everything), torch.arange(n))


# --- Karmarkar-Karp partitions -----------------------------------------------------------------------------------------


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
