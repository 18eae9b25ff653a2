"""What a row of the algorithm table is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A named algorithm: the slots that differ from the defaults, where it was published, what it is for."""

    title: str
    paper: str
    solves: str
    """The problem it answers, in a line."""
    slots: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    """What belongs to the method and lies outside the slots: rollout, rewards, schedule."""


PPO = {"name": "ppo", "low": 0.2, "high": 0.2}
TOKEN_MEAN, SEQUENCE_MEAN = "token-mean", "seq-mean-token-mean"
NO_RATIO = {"ratio": "none", "clip": "none", "loss": "logprob", "aggregation": "seq-mean-token-sum"}
KL_IN_REWARD = {"reward": {"estimator": "k1", "coef": 0.001}, "reference": "frozen"}
KL_IN_LOSS = {"loss": {"estimator": "k3", "coef": 0.001}, "reference": "frozen"}
CRITIC: dict[str, Any] = {}
"""A critic with its defaults."""
