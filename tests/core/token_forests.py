"""Random trajectories that are forests of nodes, and the sequences that they should give."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from burnish.core.trajectory import TokenNode, Trajectory, TurnSpan


@st.composite
def nodes(draw: st.DrawFn, max_size: int = 8) -> list[TokenNode]:
    """Any forest: every node has an earlier parent or none. Only tokens that were not sampled may be missing."""
    found = []
    for index in range(draw(st.integers(1, max_size))):
        parent, is_sampled = draw(st.integers(-1, index - 1)), draw(st.booleans())
        size = draw(st.integers(int(is_sampled), 3))

        def column(values: st.SearchStrategy[Any], dtype: type, size: int = size) -> np.ndarray:
            return np.array(draw(st.lists(values, min_size=size, max_size=size)), dtype=dtype)

        node = TokenNode(parent, column(st.integers(0, 2**40), np.int64))
        if is_sampled:
            node.logp = column(st.floats(-50, 0, width=32), np.float32)
            node.version = column(st.integers(-1, 1000), np.int32)
            node.is_trained = draw(st.booleans())
        elif draw(st.booleans()):
            marks = column(st.integers(0, 3), np.int8)
            node.observed = marks if marks.any() else None
        found.append(node)
    return found


def turns_of(forest: list[TokenNode], states: bool = True) -> list[TurnSpan]:
    """A turn for each sampled node, with a reward and a state of its own."""
    sampled = [index for index, node in enumerate(forest) if node.is_sampled]
    return [TurnSpan(index, f"s{index}" if states else None, 0.5 + index) for index in sampled]


Row = tuple[int, bool, float, int]
"""Token, whether it is an action, log-prob, version."""


def expected_rows(trajectory: Trajectory) -> list[tuple[list[Row], list[TurnSpan], list[int]]]:
    """The rows of each sequence with its turns and where they start, token by token from the definition."""
    forest, seen = trajectory.nodes, set[int]()
    leaves = [k for k in range(len(forest)) if all(node.parent != k for node in forest)]
    found = []
    for leaf in leaves:
        path, at = list[int](), leaf
        while at >= 0:
            path.insert(0, at)
            at = forest[at].parent
        rows, spans, starts, is_owner = list[Row](), list[TurnSpan](), list[int](), False
        for index in path:
            logp, version = forest[index].logp, forest[index].version
            if logp is None or version is None or index in seen:
                rows += [(int(token), False, 0.0, -1) for token in forest[index].tokens]
                continue
            seen.add(index)
            is_owner = True
            own = [span for span in trajectory.turns if span.node == index]
            spans, starts = spans + own, starts + [len(rows)] * len(own)
            for k, token in enumerate(forest[index].tokens):
                rows.append((int(token), True, float(logp[k]), int(version[k])))
        found.append((is_owner, (rows, spans, starts)))
    owning = [one for is_owner, one in found if is_owner]
    return owning or [found[0][1]]
