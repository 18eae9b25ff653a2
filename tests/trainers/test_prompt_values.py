"""The value pass of A*-PO: made once, kept in the run folder, and not repeated by a resumed run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from burnish.config.errors import UserError
from burnish.rollout.scoring import RolloutBatch
from burnish.trainers import prompt_values
from tests.trainers.tiny import TINY, run_of

ASTAR = ["algorithm=astar_po", "algorithm.loss.beta=0.1", "rollout.n=1", "run.samples_every=1", "run.save_every=1"]


def weights_of(run: Path, step: int) -> dict[str, list[float]]:
    folder = run / "checkpoints" / f"step-{step:06d}"
    return {name: tensor.flatten().tolist() for name, tensor in load_file(folder / "model.safetensors").items()}


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many prompts each chunk of a value pass has sampled."""
    counts: list[int] = []
    real: Callable[..., RolloutBatch] = prompt_values.rollout_and_score

    def counted(runner: Any, rewards: Any, draws: Any, *rest: Any) -> RolloutBatch:
        counts.append(len(draws))
        return real(runner, rewards, draws, *rest)

    monkeypatch.setattr(prompt_values, "rollout_and_score", counted)
    return counts


def test_a_resumed_run_reads_the_values_and_samples_only_what_is_missing(
    tmp_path: Path, warm: Path, sampled: list[int]
) -> None:
    base = ["model.new=null", f"model.path={warm}", *ASTAR]
    whole = run_of(tmp_path / "whole", TINY, [*base, "training.steps=3"])
    assert sampled == [12]
    run_of(tmp_path / "cut", TINY, [*base, "training.steps=1"])
    assert sampled == [12, 12]
    values = tmp_path / "cut" / "it" / prompt_values.VALUES_FILE
    lines = values.read_bytes().splitlines(keepends=True)
    assert len(lines) == 12
    values.write_bytes(b"".join(lines[:9]) + lines[9][:20])  # as a kill may leave it
    resumed = run_of(tmp_path / "cut", TINY, [*base, "training.steps=3"])
    assert sampled == [12, 12, 3]
    assert values.read_bytes() == b"".join(lines)  # and the samples are those of the initial policy, not of step 1
    assert run_of(tmp_path / "cut", TINY, [*base, "training.steps=3"]) == resumed
    assert len(sampled) == 3
    assert weights_of(resumed, 3) == weights_of(whole, 3)
    solved = {row["id"] for row in map(json.loads, lines) if any(row["rewards"])}
    assert 0 < len(solved) < 12
    rewards = {name: [1.0, 0.0] for name in solved}
    assert set(prompt_values.solved_values(rewards | {"never": [0.0, 0.0]}, 0.5)) == solved


def test_a_damaged_file_of_values_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "prompt_values.jsonl"
    assert prompt_values.read_rewards(path, 8) == {}
    rows = [{"id": "a", "samples": 8, "rewards": [1, 0]}, {"id": "b", "samples": 4, "rewards": [1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert prompt_values.read_rewards(path, 8) == {"a": [1.0, 0.0]}  # a pass with another number is made again
    path.write_text('{"id": "a"}\n')
    with pytest.raises(UserError, match=r"line 1 is damaged .* delete the file"):
        prompt_values.read_rewards(path, 8)


def test_an_endless_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the value pass before training samples every prompt: set the source's limit"):
        run_of(tmp_path, TINY, [*ASTAR, "data.train=[{task: sort_digits}]"])
