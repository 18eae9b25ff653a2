"""Trajectories and scores as arrays, for the journal: written when a step's rollouts are complete and again when they
are scored, read back on resume so that finished work is not done again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from burnish.core.trajectory import TokenSequence, Trajectory, TurnSpan

COLUMNS = ("tokens", "action_mask", "behaviour_logp", "version")
SCORE = ("reward", "accuracy", "parts", "error", "metadata")
FIELDS = ("prompt_id", "visit", "sample", "finish", "completion", "turns", *SCORE)


def to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """All tokens of all sequences, packed, and everything else as JSON."""
    sequences = [s for t in trajectories for s in t.sequences]
    arrays = {name: np.concatenate([getattr(s, name) for s in sequences]) for name in COLUMNS}
    arrays["lengths"] = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
    arrays["sequences"] = np.array([len(t.sequences) for t in trajectories], dtype=np.int64)
    arrays["records"] = _to_bytes([{name: getattr(t, name) for name in FIELDS} for t in trajectories])
    return arrays


def from_arrays(arrays: dict[str, np.ndarray]) -> list[Trajectory]:
    """The inverse of `to_arrays`."""
    stops = np.cumsum(arrays["lengths"])
    bounds = zip((stops - arrays["lengths"]).tolist(), stops.tolist(), strict=True)
    sequences = [TokenSequence(*(arrays[name][a:b].copy() for name in COLUMNS)) for a, b in bounds]
    result, at = [], 0
    for record, count in zip(_from_bytes(arrays["records"]), arrays["sequences"].tolist(), strict=True):
        record["turns"] = [TurnSpan(*span) for span in record.get("turns", ())]
        result.append(Trajectory(sequences=sequences[at : at + count], **record))
        at += count
    return result


def scores_to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """What scoring added to the trajectories."""
    return {"scores": _to_bytes([{name: getattr(t, name) for name in SCORE} for t in trajectories])}


def restore_scores(trajectories: Sequence[Trajectory], arrays: dict[str, np.ndarray]) -> None:
    """Write saved scores back into their trajectories."""
    for trajectory, score in zip(trajectories, _from_bytes(arrays["scores"]), strict=True):
        for name in SCORE:
            setattr(trajectory, name, score[name])


def copy_score(scored: Trajectory, trajectory: Trajectory) -> None:
    """Give a trajectory the score of another copy of it."""
    for name in SCORE:
        setattr(trajectory, name, getattr(scored, name))


def _to_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _from_bytes(array: np.ndarray) -> Any:
    return json.loads(array.tobytes().decode())
