"""Segments and trees: ALGORITHMS.md 4.15 and 4.16, and their edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.algorithms.advantages.spo import cutpoints, spo_chain
from burnish.algorithms.filters.filter_functions import has_untrained_edges
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import spo_tree, tree_edges

NAN = float("nan")
PROBS = [0.95, 0.5, 0.99, 0.6, 0.97, 0.3]


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def chain(rows: list[list[float]], name: str = "old_logp") -> Batch:
    """Probabilities of the tokens, NaN where the model did not write."""
    probs = doubles([p for row in rows for p in row])
    offsets = offsets_from_lengths(torch.tensor([len(row) for row in rows]))
    return Batch(
        torch.arange(probs.numel()), offsets, {"action_mask": ~probs.isnan(), name: probs.log()}
    ).with_sequence(reward=torch.ones(len(rows), dtype=torch.float64))


def with_values(batch: Batch, values: list[float], every: int = 1) -> Batch:
    ids, starts = cutpoints(batch, rho=0.9, every=every)
    ragged = {"border_values": Ragged(doubles(values), starts.offsets)}
    return Batch(batch.tokens, batch.offsets, {**batch.token, "segment_ids": ids}, batch.sequence, ragged)


# --- chains ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["old_logp", "behaviour_logp"])
def test_a_segment_starts_with_each_unsure_token(name: str) -> None:
    ids, starts = cutpoints(chain([[NAN, *PROBS]], name), rho=0.9, every=1)
    assert ids.tolist() == [-1, 0, 1, 1, 2, 2, 3]
    assert starts.values.tolist() == [1, 2, 4, 6]  # the borders -1, 0, 2, 4 of the answer, one token on
    assert starts.offsets.tolist() == [0, 4]


def test_only_every_nth_unsure_token_starts_one_and_rho_says_what_is_unsure() -> None:
    batch = chain([[NAN, *PROBS]])
    assert cutpoints(batch, rho=0.9, every=2)[0].tolist() == [-1, 0, 0, 0, 1, 1, 1]
    assert cutpoints(batch, rho=0.9, every=5)[0].tolist() == [-1, 0, 0, 0, 0, 0, 0]
    assert cutpoints(batch, rho=0.96, every=1)[0].tolist() == [-1, 0, 1, 1, 2, 2, 3]
    assert cutpoints(batch, rho=0.55, every=1)[0].tolist() == [-1, 0, 1, 1, 1, 1, 2]


def test_tool_tokens_are_in_no_segment_and_sure_answers_have_none() -> None:
    rows = [[NAN, 0.95, NAN, 0.5, 0.99], [NAN, 0.95, 0.99], [NAN], [0.5, 0.4]]
    ids, starts = cutpoints(chain(rows), rho=0.9, every=1)
    assert ids.tolist() == [-1, 0, -1, 1, 1, -1, -1, -1, -1, 0, 1]
    assert starts.offsets.tolist() == [0, 2, 2, 2, 4]
    assert starts.values.tolist() == [1, 3, 9, 10]


def test_spo_chain_on_the_worked_example() -> None:
    batch = with_values(chain([[NAN, *PROBS]]), [0.5, 0.5, 0.75, 0.25])
    assert spo_chain(batch).tolist() == [0, 0, 0.25, 0.25, -0.5, -0.5, 0.75]


def test_spo_chain_keeps_sequences_apart_and_gives_sure_answers_nothing() -> None:
    rows = [[NAN, 0.95, NAN, 0.5], [NAN, 0.95, 0.99], [0.95, 0.5]]
    batch = with_values(chain(rows), [0.5, 0.75, 0.0, 0.125])
    assert spo_chain(batch).tolist() == [0, 0.25, 0, 0.25, 0, 0, 0, 0.125, 0.875]


def test_spo_chain_refuses_segments_without_a_value() -> None:
    batch = with_values(chain([[0.95, 0.5], [0.95, 0.5]]), [0.5, 0.5, 0.5, 0.5])
    ids = batch.token["segment_ids"].clone()
    ids[1] = 2
    with pytest.raises(ValueError, match="past the last segment of its sequence"):
        spo_chain(batch.with_token(segment_ids=ids))


# --- trees -------------------------------------------------------------------------------------------------------------


def tree(paths: list[list[int]], rewards: list[float], groups: list[int] | None = None) -> Batch:
    """Paths of nodes to leaves with a prompt token and then a token for each edge, which the first path that has it trains."""
    seen: set[int] = set()
    ids, mask = [], []
    for path in paths:
        ids += [-1, *(place if node not in seen else -1 for place, node in enumerate(path))]
        mask += [False, *[True] * len(path)]
        seen |= set(path)
    lengths = torch.tensor([len(path) for path in paths])
    nodes = Ragged(torch.tensor([node for path in paths for node in path]), offsets_from_lengths(lengths))
    token = {"action_mask": torch.tensor(mask), "segment_ids": torch.tensor(ids)}
    sequence = {"reward": doubles(rewards), "group_ids": torch.tensor(groups or [0] * len(paths))}
    return Batch(
        torch.zeros(len(ids), dtype=torch.int64), offsets_from_lengths(lengths + 1), token, sequence, {"nodes": nodes}
    )


def edges(batch: Batch, advantages: Tensor) -> dict[int, float]:
    """The advantage of each edge by its node; every edge must be on exactly one token."""
    ids, sequence = batch.token["segment_ids"], batch.sequence_ids
    where = (ids >= 0).nonzero().squeeze(1)
    nodes = batch.ragged["nodes"].values[batch.ragged["nodes"].offsets[sequence[where]] + ids[where]].tolist()
    assert sorted(nodes) == sorted(set(batch.ragged["nodes"].values.tolist()))
    assert advantages[ids < 0].tolist() == [0.0] * int((ids < 0).sum())
    return dict(zip(nodes, advantages[where].tolist(), strict=True))


PATHS = [[1, 11], [1, 12], [1, 13], [2, 21], [2, 22], [2, 23]]
"""A root whose children are 1 and 2."""
LEAVES = [1.0, 0, 1, 0, 0, 1]
INNER = {1: 1 / 6, 2: -1 / 6}
OUTER = {11: 1 / 3, 12: -2 / 3, 13: 1 / 3, 21: -1 / 3, 22: -1 / 3, 23: 2 / 3}


def test_spo_tree_on_the_worked_example() -> None:
    batch = tree(PATHS, LEAVES)
    assert edges(batch, spo_tree(batch)) == pytest.approx(INNER | OUTER, abs=1e-12)
    deviation = (2 / 9) ** 0.5
    divided = {1: 1, 2: -1} | {node: value / deviation for node, value in OUTER.items()}
    assert edges(batch, spo_tree(batch, normalise="std")) == pytest.approx(divided, abs=1e-6)


def test_spo_tree_does_not_depend_on_the_order_and_trees_do_not_meet() -> None:
    moved = [[node + 100 for node in path] for path in PATHS]
    batch = tree([*PATHS, *moved], LEAVES * 2, [0] * 6 + [1] * 6)
    expected = INNER | OUTER
    expected |= {node + 100: value for node, value in expected.items()}
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    shuffled = batch.select(order)
    assert edges(shuffled, spo_tree(shuffled)) == pytest.approx(expected, abs=1e-12)


def test_a_node_that_ended_early_is_a_leaf() -> None:
    batch = tree([[1], [2, 21], [2, 22]], [1, 0, 1])
    assert edges(batch, spo_tree(batch)) == {1: 0.25, 2: -0.25, 21: -0.5, 22: 0.5}


def test_equal_siblings_and_an_only_child_have_exactly_no_advantage() -> None:
    batch = tree([[1], [2], [3, 31]], [0.1, 0.1, 0.1])
    for normalise in ("none", "std"):
        assert set(edges(batch, spo_tree(batch, normalise=normalise)).values()) == {0.0}


@pytest.mark.parametrize("normalise", ["none", "std"])
def test_an_edge_that_is_nothing_on_paper_is_exactly_nothing(normalise: str) -> None:
    """Six children with 2, 2, 3, 3, 4 and 4 right leaves of six: the mean of their values is that of the middle ones."""
    right = [2, 2, 3, 3, 4, 4]
    paths = [[child, 10 * child + leaf] for child in range(1, 7) for leaf in range(6)]
    batch = tree(paths, [float(leaf < right[child - 1]) for child in range(1, 7) for leaf in range(6)])
    found = edges(batch, spo_tree(batch, normalise=normalise))  # type: ignore[arg-type]
    assert [found[child] for child in (3, 4)] == [0.0, 0.0]
    assert min(abs(found[child]) for child in (1, 2, 5, 6)) > 0.1


def test_what_is_no_tree_is_refused() -> None:
    for paths in ([[1, 11], [1, 11]], [[1, 11], [2, 11]], [[1, 11], [11, 1]]):
        with pytest.raises(ValueError, match=r"not of trees|contain a cycle"):
            spo_tree(tree(paths, [1, 1]))


# --- edges in the loss -------------------------------------------------------------------------------------------------


def trained(batch: Batch, use: int | None = None, most: int = 2) -> set[int]:
    """The nodes whose edges are in the loss."""
    batch = batch.with_token(advantages=spo_tree(batch), loss_mask=batch.token["segment_ids"] >= 0)
    batch = batch.with_sequence(key=torch.arange(batch.num_sequences) * 977 + 7)
    if use is not None:
        batch = batch.with_sequence(use=torch.full((batch.num_sequences,), float(use), dtype=torch.float64))
    kept = tree_edges(batch, most=most)
    assert not (kept & ~batch.loss_mask).any()
    ids, sequence = batch.token["segment_ids"][kept], batch.sequence_ids[kept]
    return set(batch.ragged["nodes"].values[batch.ragged["nodes"].offsets[sequence] + ids].tolist())


def test_only_edges_with_an_advantage_are_trained_and_as_many_as_asked_for() -> None:
    flat = tree([[1, 11], [1, 12], [2, 21], [2, 22]], [1, 0, 1, 1])
    assert trained(flat, most=32) == {1, 2, 11, 12}  # 21 and 22 are alike
    assert len(trained(tree(PATHS, LEAVES), most=3)) == 3
    both = tree([*PATHS, *([n + 100 for n in p] for p in PATHS)], LEAVES * 2, [0] * 6 + [1] * 6)
    found = trained(both, most=3)
    assert len({n for n in found if n < 100}) == len({n for n in found if n >= 100}) == 3  # of each tree


def test_a_tree_that_comes_back_goes_on_with_other_edges_until_none_is_left() -> None:
    batch = tree(PATHS, LEAVES)
    parts = [trained(batch, use, most=3) for use in range(4)]
    assert parts[0] == trained(batch, None, most=3)
    assert [len(part) for part in parts] == [3, 3, 2, 0]
    assert set().union(*parts) == set(INNER | OUTER)


def test_a_tree_has_edges_left_until_the_last_is_trained() -> None:
    flat = [[101], [102]]
    batch = tree([*PATHS, *flat], [*LEAVES, 1, 1], [0] * 6 + [1] * 2)
    batch = batch.with_token(advantages=spo_tree(batch))
    assert (
        has_untrained_edges(batch, most=7).tolist() == [True] * 6 + [False] * 2
    )  # eight edges, and none with an advantage
    assert has_untrained_edges(batch, most=8).tolist() == [False] * 8
    for use, left in ((0, True), (1, True), (2, False)):
        again = batch.with_sequence(use=torch.full((8,), float(use), dtype=torch.float64))
        assert has_untrained_edges(again, most=3).tolist() == [left] * 6 + [False] * 2
