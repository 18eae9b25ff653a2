"""Rewards of an answer's steps on the tokens that end them.

A trajectory says in its metadata where in its last sequence each step ends and what it earned (`STEP_REWARDS`); its reward
has the sum. `step_columns` makes a token column of what has to move: each step's reward to its last token, the sum off the
end of the answer, where the reward stands otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from burnish.core.trajectory import Trajectory

STEP_REWARDS = "step_rewards"


def step_columns(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """`step_rewards` [N]: what to add to a reward that stands on last tokens; nothing where no trajectory has steps."""
    if not any(STEP_REWARDS in t.metadata for t in trajectories):
        return {}
    moved = []
    for t in trajectories:
        steps = t.metadata.get(STEP_REWARDS, ())
        columns = [np.zeros(len(s.tokens)) for s in t.sequences]
        for sequence, column in zip(t.sequences, columns, strict=True):
            column[np.flatnonzero(sequence.action_mask)[-1:]] -= sum(value for _, value in steps)
        for position, value in steps:
            columns[-1][position] += value
        moved += columns
    return {STEP_REWARDS: torch.from_numpy(np.concatenate(moved))}
