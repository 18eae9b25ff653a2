"""Metrics of episodes with an environment: turns, branches, what went wrong, and what the environment measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from burnish.core.trajectory import EPISODE_METRICS, EVENTS, PLAYERS, Trajectory, role_name


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return turns per trajectory, the share of trajectories that ran out of turns, and environment errors.

    If any context was rewritten: `branches`, the sequences per trajectory, and `forks`, the share of turns that begin another sequence.
    Empty for single-turn rollouts.
    """
    counts, errors = [len(t.turns) for t in trajectories], sum(t.finish == "error" for t in trajectories)
    cut = sum(t.finish == "turns" for t in trajectories)
    if max(counts, default=0) < 2 and not errors and not cut:
        return {}
    values = {
        "turns_mean": sum(counts) / len(counts),
        "turns_max": float(max(counts)),
        "out_of_turns": cut / len(counts),
        "environment_errors": float(errors),
    }
    return values | branch_metrics(trajectories)


def branch_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return `branches` and `forks`; {} if every trajectory has one sequence."""
    branches, turns = [len(t.paths) for t in trajectories], sum(len(t.turns) for t in trajectories)
    if max(branches, default=1) < 2:
        return {}
    return {"branches": sum(branches) / len(branches), "forks": sum(k - 1 for k in branches) / max(1, turns)}


def role_rewards(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean reward of each role, as `role=<name>`; {} unless a game has several players. Copies of a role count as one.

    The mean over all roles of a zero-sum game is 0, whatever the players do.
    """
    rewards: dict[str, list[float]] = {}
    for t in trajectories:
        if t.role is not None and t.reward is not None:
            rewards.setdefault(role_name(t.role), []).append(t.reward)
    return {f"role={role}": sum(found) / len(found) for role, found in sorted(rewards.items())}


def episode_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the number of events of each kind that occurred, and the mean of each number that environments measured.

    A number that only some episodes have is averaged over those. One with the name of an event's kind is named `<name>_mean`. The
    trajectories of one game hold the same events, which count once.
    """
    events = defaultdict[str, float](float)
    for t in trajectories:
        for event in t.metadata.get(EVENTS, ()):
            events[event["kind"]] += 1 / t.metadata.get(PLAYERS, 1)
    values = {kind: float(round(count)) for kind, count in sorted(events.items())}
    measured: dict[str, list[float]] = {}
    for t in trajectories:
        for name, value in t.metadata.get(EPISODE_METRICS, {}).items():
            measured.setdefault(name, []).append(float(value))
    for name, found in sorted(measured.items()):
        values[f"{name}_mean" if name in events else name] = sum(found) / len(found)
    return values
