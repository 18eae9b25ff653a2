"""Segments and trees: ALGORITHMS.md 4.15 and 4.16, and their edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from burnish.algorithms.advantages import cutpoints
from burnish.algorithms.advantages.splits import spo_chain, spo_tree
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths

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
    ids, starts = cutpoints(batch, every=every)
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
    assert cutpoints(batch, every=2)[0].tolist() == [-1, 0, 0, 0, 1, 1, 1]
    assert cutpoints(batch, every=5)[0].tolist() == [-1, 0, 0, 0, 0, 0, 0]
    assert cutpoints(batch, rho=0.96, every=1)[0].tolist() == [-1, 0, 1, 1, 2, 2, 3]
    assert cutpoints(batch, rho=0.55, every=1)[0].tolist() == [-1, 0, 1, 1, 1, 1, 2]


def test_tool_tokens_are_in_no_segment_and_sure_answers_have_none() -> None:
    rows = [[NAN, 0.95, NAN, 0.5, 0.99], [NAN, 0.95, 0.99], [NAN], [0.5, 0.4]]
    ids, starts = cutpoints(chain(rows), every=1)
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
    with pytest.raises(ValueError, match="past the last of its sequence's border_values"):
        spo_chain(batch.with_token(segment_ids=ids))


# --- trees -------------------------------------------------------------------------------------------------------------


def tree(nodes: list[int], parents: list[int], rewards: list[float]) -> Batch:
    s = len(nodes)
    mask = torch.ones(s, dtype=torch.bool)
    return Batch(torch.arange(s), torch.arange(s + 1), {"action_mask": mask}).with_sequence(
        node_ids=torch.tensor(nodes), parent_ids=torch.tensor(parents), reward=doubles(rewards)
    )


def close(got: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, doubles(expected), atol=1e-6, rtol=0)


@pytest.fixture
def example() -> Batch:
    """Root 0, its children 1 and 2 (whose own rewards must not count), their leaves [1, 0, 1] and [0, 0, 1]."""
    return tree([1, 2, 11, 12, 13, 21, 22, 23], [0, 0, 1, 1, 1, 2, 2, 2], [9, 9, 1, 0, 1, 0, 0, 1])


def test_spo_tree_on_the_worked_example(example: Batch) -> None:
    inner, leaves = [0.166667, -0.166667], [0.333333, -0.666667, 0.333333, -0.333333, -0.333333, 0.666667]
    close(spo_tree(example), inner + leaves)
    close(spo_tree(example, normalise="std")[:2], [1, -1])
    deviation = (2 / 9) ** 0.5
    close(spo_tree(example, normalise="std")[2:], [x / deviation for x in leaves])


def test_spo_tree_does_not_depend_on_the_order_and_trees_do_not_meet(example: Batch) -> None:
    moved = example.with_sequence(
        node_ids=example.sequence["node_ids"] + 100, parent_ids=example.sequence["parent_ids"] + 100
    )
    both = Batch.merge([example, moved])
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    expected = torch.cat([spo_tree(example)] * 2)
    torch.testing.assert_close(spo_tree(both.select(order)), expected[order])


def test_a_node_that_ended_early_is_a_leaf() -> None:
    close(spo_tree(tree([1, 2, 21, 22], [0, 0, 2, 2], [1, 0, 0, 1])), [0.25, -0.25, -0.5, 0.5])


def test_equal_siblings_and_an_only_child_have_exactly_no_advantage() -> None:
    batch = tree([1, 2, 3, 31], [0, 0, 0, 3], [0.1, 0.1, 5.0, 0.1])
    for normalise in ("none", "std"):
        assert spo_tree(batch, normalise=normalise).tolist() == [0, 0, 0, 0]


def test_what_is_no_tree_is_refused() -> None:
    with pytest.raises(ValueError, match="two sequences have the same node_ids"):
        spo_tree(tree([1, 1], [0, 0], [1, 1]))
    with pytest.raises(ValueError, match="go round in a circle"):
        spo_tree(tree([1, 2], [2, 1], [1, 1]))
