"""Which tokens of a trajectory are the bodies of messages that the environment wrote, and the role of each message.

A token node that the model only read has `observed`: for each token 0, or the number of a role. A body is the text of a message without what the
chat template writes around it, or of an observation without its tags. First prompts have no marks. The roots of later conversations have none either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from burnish.core.trajectory import TokenNode, Trajectory

OBSERVED = "observed"
"""Name of the token column of a batch, and of the array of a journal."""
OBSERVED_ROLES = ("tool", "user", "system")
"""Roles whose messages are marked. The number of a role is its place here, counted from 1."""
ROLE_NUMBERS: Mapping[str, int] = {role: number for number, role in enumerate(OBSERVED_ROLES, 1)}


def observed_columns(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return the token column `observed`: 0, or the role of the message of whose body the token is a part; {} if nothing is marked.

    A token that several sequences of a trajectory share has its mark in the first of them, so that it counts once.
    """
    if not any(node.observed is not None for t in trajectories for node in t.nodes):
        return {}
    parts = [
        marks_of(t.nodes[index]) if t.node_places[index].sequence == number else np.zeros(len(t.nodes[index].tokens))
        for t in trajectories
        for number, path in enumerate(t.paths)
        for index in path
    ]
    return {OBSERVED: torch.from_numpy(np.concatenate([np.zeros(0), *parts]).astype(np.int8))}


def marks_of(node: TokenNode) -> np.ndarray:
    """[n] int8 the marks of a node, 0 if it has none."""
    return np.zeros(len(node.tokens), dtype=np.int8) if node.observed is None else node.observed


def marks_to_arrays(nodes: Sequence[TokenNode]) -> dict[str, np.ndarray]:
    """Return the marks of all tokens of some nodes as one array of a journal; {} if nothing is marked."""
    if all(node.observed is None for node in nodes):
        return {}
    return {OBSERVED: np.concatenate([marks_of(node) for node in nodes])}


def restore_marks(nodes: Sequence[TokenNode], arrays: Mapping[str, np.ndarray]) -> None:
    """Write the marks of `marks_to_arrays` back. Journals without marks have no such array."""
    if OBSERVED not in arrays:
        return
    at, marks = 0, arrays[OBSERVED].copy()
    for node in nodes:
        own = marks[at : (at := at + len(node.tokens))]
        node.observed = own if own.any() else None
