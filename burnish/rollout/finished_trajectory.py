"""`finished_trajectory` turns a running trajectory that has ended into a `Trajectory`, and checks the rewards of environments."""

from __future__ import annotations

import math

import numpy as np

from burnish.config.errors import UserError
from burnish.core.trajectory import (
    EPISODE_METRICS,
    EVENTS,
    LAST_WORDS,
    VOID_TURNS,
    TokenNode,
    Trajectory,
    TrajectoryFinish,
)
from burnish.environments.base import End, EpisodeFailed
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import reward_problem
from burnish.rollout.running_trajectory import RunningTrajectory, TokenPath


def finished_trajectory(
    active: RunningTrajectory,
    path: TokenPath,
    tokenizer: Tokenizer,
    finish: TrajectoryFinish,
    is_scored: bool = False,
    error: str | None = None,
    end: End | None = None,
    role: str | None = None,
) -> Trajectory:
    """Return the trajectory of one conversation of an episode. `is_scored`: the environment gave a reward at the end."""
    row = active.draw.prompt.row.id
    total_reward = math.fsum(span.reward for span in path.turns)
    is_scored = error is None and (is_scored or getattr(active.environment, "gives_rewards", False))
    if any(span.reward for span in path.turns) and not is_scored and error is None:
        raise UserError(
            f"the environment gave turns of {row} a reward and none at the end ({finish}): give the end a reward too. An environment on "
            "tokens also needs `gives_rewards = True` for trajectories that are cut off"
        )
    if wrong := reward_problem(total_reward):
        raise UserError(f"the environment's rewards of {row}, added up over its turns: {wrong}")
    reward = total_reward if is_scored else None
    prompt_length = path.prompt_length()
    success = end.success if end is not None else None
    if end is not None and end.successes is not None:
        success = end.successes.get(role or "")
    accuracy = float(success) if success is not None else _accuracy(active, reward)
    return Trajectory(
        prompt_id=row,
        visit=active.draw.visit,
        sample=active.sample,
        nodes=path.nodes or [TokenNode(-1, np.zeros(0, dtype=np.int64))],
        finish=finish,
        completion=tokenizer.decode(path.tokens()[prompt_length:]),
        reward=reward,
        accuracy=accuracy,
        parts={} if reward is None else {"environment": reward},
        error=error,
        metadata={"prompt_length": prompt_length} | _episode_metadata(active, end),
        turns=path.turns,
    )


def _episode_metadata(active: RunningTrajectory, end: End | None) -> dict[str, object]:
    """Return what went wrong in an episode, what its environment measured, and what it said last."""
    metrics = active.metrics | ({"retries": float(active.num_retries)} if active.num_retries else {})
    found: dict[str, object] = {EVENTS: active.events} if active.events else {}
    if active.session is not None and active.session.kind.tells_void_turns:
        found[VOID_TURNS] = metrics.get(VOID_TURNS, 0.0)
    found |= {EPISODE_METRICS: metrics} if metrics else {}
    return found | ({LAST_WORDS: end.text} if end is not None and end.text else {})


def _accuracy(active: RunningTrajectory, reward: float | None) -> float | None:
    """Return 1 if a reward reaches the environment's `correct_at`, else 0; None if there is no reward or no `correct_at`."""
    kind = active.session.kind if active.session is not None else active.environment
    threshold = getattr(kind, "correct_at", None)
    return None if reward is None or threshold is None else float(reward >= threshold)


def episode_reward(value: object) -> float:
    """Return the reward of an environment on messages as a float. A wrong one fails the episode, not the run."""
    try:
        return checked_reward(value)
    except UserError as error:
        raise EpisodeFailed("bad_reply", f"reward is wrong: {error}") from error


def checked_reward(value: object) -> float:
    """Return the reward of an environment on tokens as a float. Raises if it is no finite number within the allowed range."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"the environment gave a turn the reward {value!r}; expected a finite number")
    if wrong := reward_problem(float(value)):
        raise UserError(f"the environment gave a turn a reward out of range: {wrong}")
    return float(value)
