"""The column `observed`: marks of read nodes, each once."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from burnish.core.observations import OBSERVED, observed_columns
from burnish.core.trajectory import TokenNode, Trajectory, pack
from tests.core.token_forests import nodes


def sampled(parent: int, *tokens: int) -> TokenNode:
    size = len(tokens)
    return TokenNode(parent, np.array(tokens), np.zeros(size, np.float32), np.zeros(size, np.int32))


def test_a_token_of_two_branches_is_marked_in_the_first() -> None:
    told = TokenNode(1, np.array([3, 4, 5]), observed=np.array([0, 1, 1], np.int8))
    asked = TokenNode(3, np.array([7]), observed=np.array([2], np.int8))
    forest = [TokenNode(-1, np.array([1])), sampled(0, 2), told, sampled(2, 6), asked, sampled(4, 8), sampled(2, 9)]
    found = Trajectory("p", 0, 0, forest, "stop", "", reward=1.0)
    batch = pack([found])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 9]
    assert batch.token[OBSERVED].tolist() == [0, 0, 0, 1, 1, 0, 2, 0, 0, 0, 0, 0, 0, 0]
    assert not bool((batch.action_mask & (batch.token[OBSERVED] > 0)).any())
    plain = Trajectory("p", 0, 0, [TokenNode(-1, np.array([1])), sampled(0, 2)], "stop", "", reward=1.0)
    assert OBSERVED not in pack([plain]).token
    assert pack([plain, found]).token[OBSERVED].tolist()[:2] == [0, 0]


@settings(max_examples=30, deadline=None)
@given(nodes())
def test_every_mark_of_a_sequence_counts_once(forest: list[TokenNode]) -> None:
    found = Trajectory("p", 0, 0, forest, "stop", "")
    kept = {index for path in found.paths for index in path}
    expected = sum(int((forest[k].observed > 0).sum()) for k in kept if forest[k].observed is not None)
    columns = observed_columns([found])
    assert (int((columns[OBSERVED] > 0).sum()) if columns else 0) == expected
    if columns:
        assert len(columns[OBSERVED]) == sum(len(s.tokens) for s in found.sequences)
