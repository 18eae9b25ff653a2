"""`TrainerState`: everything that a run changes besides weights and optimizers. `advance` updates it after a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from burnish.algorithms.correction.budget import BudgetState
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import adapt_entropy_coefficient, adapt_kl_coefficient

REWARD_MEAN_DECAY = 0.9
"""Decay of the moving mean reward, which is baseline `ema` of advantage reinforce."""


@dataclass(frozen=True)
class TrainerState:
    """State of the trainer, saved as JSON in every checkpoint."""

    step: int = 0
    stream: dict[str, Any] = field(default_factory=dict)
    """Position of the prompt stream, with the statistics of its prompts."""
    waiting: list[list[Any]] = field(default_factory=list)
    """Drawn prompts that no step has used yet (`PendingDraw` in `rollout/sync_source.py`)."""
    kl_coef: float | None = None
    """Adaptive coefficient of the KL in the reward; None if it is fixed."""
    entropy_coef: float | None = None
    """Adaptive coefficient of the entropy bonus; None if it is fixed."""
    entropy_bonus: bool = True
    """Whether the adaptive bonus is on: only while the entropy is at or below its target."""
    reward_mean: float | None = None
    """Moving average of the mean shaped reward; None before the first step."""
    role_baselines: dict[str, float] = field(default_factory=dict)
    """Moving average of the reward of each role, the baselines of advantage rae."""
    budget: BudgetState | None = None
    """State of a mismatch budget; None without one, or before its first batch."""


def state_from_checkpoint(values: dict[str, Any]) -> TrainerState:
    """The state from the JSON values of a checkpoint."""
    budget = values.pop("budget", None)
    return TrainerState(**values, budget=None if budget is None else BudgetState(**budget))


def initial_state(algorithm: Algorithm) -> TrainerState:
    """The state before the first step."""
    return TrainerState(
        kl_coef=algorithm.kl.reward.coef if algorithm.kl.adaptive is not None else None,
        entropy_coef=algorithm.entropy.coef if algorithm.entropy.adaptive is not None else None,
        entropy_bonus=algorithm.entropy.adaptive is None,
    )


def advance(state: TrainerState, algorithm: Algorithm, stats: Mapping[str, float], num_sequences: int) -> TrainerState:
    """The state after a step. `stats` has its mean KL, entropy and reward. A value that the step did not measure leaves its controller unchanged."""
    state = replace(state, step=state.step + 1)
    if "reward" in stats:
        earlier = stats["reward"] if state.reward_mean is None else state.reward_mean
        state = replace(state, reward_mean=REWARD_MEAN_DECAY * earlier + (1 - REWARD_MEAN_DECAY) * stats["reward"])
    target = algorithm.kl.adaptive
    if target is not None and state.kl_coef is not None and "kl_reward" in stats:
        kl = stats["kl_reward"]
        state = replace(
            state, kl_coef=adapt_kl_coefficient(state.kl_coef, kl, target.target, target.horizon, num_sequences)
        )
    adaptive = algorithm.entropy.adaptive
    if adaptive is not None and state.entropy_coef is not None and "entropy" in stats:
        coef, bonus = adapt_entropy_coefficient(state.entropy_coef, stats["entropy"], adaptive.target, adaptive.delta)
        state = replace(state, entropy_coef=coef, entropy_bonus=bonus)
    return state


def entropy_coefficient(state: TrainerState, algorithm: Algorithm) -> float:
    """The entropy coefficient of the next step."""
    if state.entropy_coef is None:
        return algorithm.entropy.coef
    return state.entropy_coef if state.entropy_bonus else 0.0
