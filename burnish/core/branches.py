"""Answers that are cut into segments, or share their beginnings as the paths of a tree: what a batch knows of them.

A trajectory says it in its metadata; `branch_columns` makes columns of it, one sequence a trajectory.

- A chain: `borders`, the place in the sequence with which each of its segments starts, and `border_values`, the value of the
  state before each. Token column `segment_ids` (-1 outside of all segments), ragged column `border_values`.
- A path of a tree: `nodes`, the names of the nodes from the root's child to the leaf, and `ends`, where in the sequence the edge
  into each ends. Ragged column `nodes`, equal numbers for equal nodes. Paths that begin alike hold the same edges, and one of
  them trains each: `segment_ids` is the place of the edge in `nodes` where the first sequence that has it holds it, and -1 in
  all others, which keep its tokens as context: they are not in their `loss_mask`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from burnish.core.batch import Ragged
from burnish.core.segments import offsets_from_lengths

if TYPE_CHECKING:
    from burnish.core.trajectory import Trajectory

BORDERS, BORDER_VALUES = "borders", "border_values"
NODES, ENDS = "nodes", "ends"
SHARED_TOKENS = "shared_tokens"
"""Tokens of a path that its tree counts with another path, in its metadata."""


def branch_columns(
    trajectories: Sequence[Trajectory], group_ids: Sequence[int]
) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    """Token and ragged columns of the trajectories, [N] and by sequence; none where they are neither chains nor paths."""
    if any(NODES in t.metadata for t in trajectories):
        return _paths(trajectories, group_ids)
    if any(BORDERS in t.metadata for t in trajectories):
        return _chains(trajectories)
    return {}, {}


def _chains(trajectories: Sequence[Trajectory]) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    segments = [_segments(t, t.metadata[BORDERS]) for t in trajectories]
    values = [value for t in trajectories for value in t.metadata[BORDER_VALUES]]
    lengths = torch.tensor([len(t.metadata[BORDERS]) for t in trajectories], dtype=torch.int64)
    ragged = Ragged(torch.tensor(values, dtype=torch.float64), offsets_from_lengths(lengths))
    return {"segment_ids": torch.from_numpy(np.concatenate(segments))}, {BORDER_VALUES: ragged}


def _paths(trajectories: Sequence[Trajectory], group_ids: Sequence[int]) -> tuple[dict[str, Tensor], dict[str, Ragged]]:
    numbers: dict[tuple[int, str], int] = {}
    segments, nodes = [], list[int]()
    for t, group in zip(trajectories, group_ids, strict=True):
        starts = [t.metadata["prompt_length"], *t.metadata[ENDS][:-1]]
        edges = _segments(t, starts)
        for place, name in enumerate(t.metadata[NODES]):
            if (group, name) in numbers:
                edges[edges == place] = -1
            nodes.append(numbers.setdefault((group, name), len(numbers)))
        segments.append(edges)
    lengths = torch.tensor([len(t.metadata[NODES]) for t in trajectories], dtype=torch.int64)
    ragged = Ragged(torch.tensor(nodes, dtype=torch.int64), offsets_from_lengths(lengths))
    ids = torch.from_numpy(np.concatenate(segments))
    return {"segment_ids": ids, "loss_mask": ids >= 0}, {NODES: ragged}


def _segments(trajectory: Trajectory, starts: Sequence[int]) -> np.ndarray:
    """Which of the segments with these starts each token is in; -1 before the first and where the model did not write."""
    (sequence,) = trajectory.sequences
    ids = np.searchsorted(np.array(starts, dtype=np.int64), np.arange(len(sequence.tokens)), side="right") - 1
    return np.where(sequence.action_mask, ids, -1)


def path_names(sample: int, path: Sequence[int]) -> list[str]:
    """The nodes on the way to a leaf: the sample of the prompt it descends from, then which child each next node is."""
    return list(accumulate((str(k) for k in (sample, *path)), lambda above, child: f"{above}.{child}"))
