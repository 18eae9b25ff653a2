"""Ctrl-C during sampling: the run stops, keeps finished samples, and resumes as if it had never stopped."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.trajectory import Trajectory
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.runner import RolloutRunner
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.trainers.rl_run import checked_run, execute
from tests.trainers.tiny import TINY, run_of

REWARD = "reward.parts=[{name: format, options: {pattern: '[0-9]{3,5}'}}]"
STEPS = [REWARD, "training.steps=5", "rollout.prompts=6", "rollout.max_tokens=8", "run.save_every=2"]
ASKED_S = 60


def result(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    metrics = [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    last = max((run / "checkpoints").glob("step-*"))
    return metrics, {f"{f.name} {n}": t.tobytes() for f in last.rglob("*.safetensors") for n, t in load_file(f).items()}


def events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal" / "events.jsonl").read_text().splitlines()]


def stopped_run(
    folder: Path, overrides: list[str], patch: pytest.MonkeyPatch, step: int, ended: int, acts: str | None = None
) -> Path:
    """A run whose user presses Ctrl-C when so many samples of a step have ended.

    The next sample ends when that acts: when sampling may be cut short, or else when the log says `acts`.
    """
    folder.mkdir()
    (folder / "tiny.yaml").write_text(TINY)
    loaded = load(TrainConfig, folder / "tiny.yaml", [*overrides, f"run.directory={folder}", "run.name=it"])
    whole, count = RolloutRunner.run, 0

    def counted(self: RolloutRunner, draws: Any, *args: Any, **options: Any) -> Iterator[Trajectory]:
        nonlocal count
        count += 1
        for number, trajectory in enumerate(whole(self, draws, *args, **options), 1):
            yield trajectory
            if count == step and number == ended:
                press(
                    lambda: (
                        self.stop_request.is_effective if acts is None else acts in (folder / "it/log.txt").read_text()
                    )
                )

    patch.setattr(RolloutRunner, "run", counted)
    with checked_run(loaded.config, loaded.resolved, loaded.base, "it") as (parts, run):
        assert not execute(parts, run)
    patch.undo()
    return folder / "it"


def press(acts: Callable[[], bool]) -> None:
    """Ctrl-C, and the moment until it acts."""
    signal.raise_signal(signal.SIGINT)
    until = time.monotonic() + ASKED_S
    while not acts():
        assert time.monotonic() < until
        time.sleep(0.01)


ASKS_AGAIN = """
from burnish.environments.base import End, Environment, Observation


class AsksAgain(Environment):
    takes_truncated = True

    async def start(self, episode):
        self.seed = episode.seed
        return Observation()

    def step(self, answer):
        if answer.turn == 2:
            return End(reward=float(answer.num_tokens))
        return Observation(messages=({"role": "user", "content": str(self.seed % 7) + ">"},), reward=0.5)
"""


@pytest.mark.parametrize("kind", ["sync", "greedy", "environment", pytest.param("agent", marks=pytest.mark.slow)])
def test_a_run_stopped_while_it_samples_goes_on_as_if_it_had_never_stopped(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "asks.py").write_text(ASKS_AGAIN)
    kinds = {
        "sync": [],
        "greedy": ["algorithm=remax", "algorithm.kl.reference=none", "algorithm.kl.reward.coef=0"],
        "environment": [
            f"environment={{name: '{tmp_path}/asks.py:AsksAgain', max_turns: 3, workers: 1}}",
            "reward.parts=[task]",
            "rollout.max_rows=2",  # so that episodes are left when the first ones have ended
            "rollout.exact=true",  # which rows are decoded together depends on when the environments reply
        ],
        "agent": [
            f"environment={{agent: '{Path(__file__).with_name('agent_programs.py')}:chain', workers: 1}}",
            "reward.parts=[task]",
            "rollout.max_rows=2",
            "rollout.exact=true",
        ],
    }
    overrides = [*STEPS, *kinds[kind]]
    expected = result(run_of(tmp_path / "whole", TINY, overrides))
    step = 8 if kind == "greedy" else 4  # calls: a greedy one goes before that of the samples
    run = stopped_run(tmp_path / "stopped", overrides, monkeypatch, step, 5)
    (partial,) = [event for event in events(run) if event["event"] == "partial"]
    assert partial["step"] == 4
    assert max((run / "checkpoints").glob("step-*")).name == "step-000003"  # saved when it stopped
    added: list[tuple[str, int]] = []
    add = InFlightTrajectories.add

    def counted(self: InFlightTrajectories, draw: Any, sample: int, *rest: Any) -> list[Trajectory]:
        added.append((draw.prompt.row.id, sample))
        return add(self, draw, sample, *rest)

    monkeypatch.setattr(InFlightTrajectories, "add", counted)
    assert result(run_of(tmp_path / "stopped", TINY, overrides)) == expected
    assert len(added) <= 2 * 6 * 4 + (6 if kind == "greedy" else 0) - 5, "samples that had ended are made again"


def test_a_run_that_samples_ahead_completes_the_batch_and_saves_before_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = [*STEPS, "rollout.source=ahead", "run.save_every=50"]
    expected = result(run_of(tmp_path / "whole", TINY, overrides))
    said = "stopping when the rollouts of step 4 are complete"
    run = stopped_run(tmp_path / "stopped", overrides, monkeypatch, 4, 5, said)
    assert [folder.name for folder in (run / "checkpoints").glob("step-*")] == ["step-000003"]
    assert result(run_of(tmp_path / "stopped", TINY, overrides)) == expected
