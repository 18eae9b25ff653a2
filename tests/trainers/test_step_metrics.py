"""Token values in the sample tables, and the prompt visits of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.core.trajectory import Trajectory
from burnish.rollout.scoring import RolloutBatch
from burnish.run.run import PromptVisit
from burnish.run.samples import read_samples
from burnish.trainers.step_metrics import prompt_visits
from tests.trainers.tiny import TINY, WARM, run_of

EVERY = ["run.samples_every=1", "training.steps=2"]


def tables(folder: Path, overrides: list[str]) -> list[dict[str, object]]:
    return read_samples(run_of(folder, TINY + WARM, [*EVERY, *overrides]) / "samples")


def lengths(row: dict[str, object], *names: str) -> set[int]:
    return {len(row[name]) for name in names}  # type: ignore[arg-type]


@pytest.mark.parametrize("several", [[], ["training.mini_batches=2"]], ids=["one update", "old log-probs"])
def test_the_gap_of_each_token_is_that_of_trainer_and_engine(tmp_path: Path, several: list[str]) -> None:
    rows = tables(tmp_path, several)
    assert len(rows) == 32
    for row in rows:
        assert lengths(row, "pieces", "logp", "gap") == {row["length"]}
        assert max(abs(gap) for gap in row["gap"]) < 1e-4  # type: ignore[attr-defined]
        assert row["advantages"] is None, "one a sample"
        assert row["finish"] == ("length" if row["truncated"] else "stop")


def test_advantages_of_tokens_are_kept_where_they_differ(tmp_path: Path) -> None:
    rows = tables(tmp_path, ["algorithm.preset=ppo", "algorithm.kl.reward.coef=0", "algorithm.kl.reference=none"])
    assert all(lengths(row, "advantages", "logp") == {row["length"]} for row in rows)
    assert any(len(set(row["advantages"])) > 1 for row in rows)  # type: ignore[call-overload]
    for row in rows:
        mean = sum(row["advantages"]) / row["length"]  # type: ignore[call-overload,operator]
        assert mean == pytest.approx(row["advantage"], abs=1e-5)


def test_a_lagging_engine_shows_in_the_gap(tmp_path: Path) -> None:
    rows = tables(tmp_path, ["rollout.mismatch={name: stale, steps: 1}", "training.steps=3"])
    last = [row for row in rows if row["step"] == 3]
    assert max(abs(gap) for row in last for gap in row["gap"]) > 1e-3  # type: ignore[attr-defined]


def test_samples_that_filters_dropped_have_no_values(tmp_path: Path) -> None:
    rows = tables(tmp_path, ["algorithm.filters=[zero_signal]"])
    groups = {(row["step"], row["group"]): set() for row in rows}
    for row in rows:
        groups[row["step"], row["group"]].add(row["reward"])
    for row in rows:
        assert (row["gap"] is None) == (len(groups[row["step"], row["group"]]) == 1)


# --- Prompt visits ------------------------------------------------------------------------------------------------------


def sample(prompt: str, visit: int, number: int, **score: Any) -> Trajectory:
    return Trajectory(prompt, visit, number, [], "stop", "", **score)


def test_every_prompt_is_told_of_with_what_could_be_scored_and_judged() -> None:
    trajectories = [
        sample("f/1", 0, 0, reward=1.5, accuracy=1.0),
        sample("f/0", 2, 0, reward=0.5),
        sample("f/1", 0, 1, reward=0.0, accuracy=0.0),
        sample("f/1", 1, 0, error="the scorer failed"),
    ]
    assert prompt_visits(RolloutBatch([], trajectories, 0.0, 0.0)) == [
        PromptVisit("f/1", 0, 2, 1.5, 2, 1.0),
        PromptVisit("f/0", 2, 1, 0.5, 0, 0),
        PromptVisit("f/1", 1, 0, 0, 0, 0),
    ]
