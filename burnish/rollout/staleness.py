"""How old tokens are: the steps between the weights that drew them and those that are trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from burnish.core.trajectory import Trajectory


def oldest_version(trajectory: Trajectory) -> int | None:
    """Of the tokens that the model wrote; None where it wrote none, as in a demonstration."""
    versions = _versions(trajectory)
    return int(versions.min()) if versions.size else None


def staleness(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Of the tokens written, with the trainer at `version`: their mean and largest age, the share of every age, and the share of
    samples that were drawn by several versions."""
    ages = [version - _versions(t) for t in trajectories]
    written = [age for age in ages if age.size]
    if not written:
        return {}
    every = np.concatenate(written)
    found, counts = np.unique(every, return_counts=True)
    shares = {f"staleness/share/{age}": count / every.size for age, count in zip(found, counts, strict=True)}
    return {
        "staleness/mean": float(every.mean()),
        "staleness/max": float(every.max()),
        "staleness/mixed": sum(bool(np.ptp(age)) for age in written) / len(written),
    } | {name: float(share) for name, share in shares.items()}


def _versions(trajectory: Trajectory) -> np.ndarray:
    return np.concatenate([s.version[s.action_mask & (s.version >= 0)] for s in trajectory.sequences])
