"""Runs whose rollouts are older than their weights: they learn, and they survive a kill -9 at any moment.

About three minutes on two cores.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.trainers.rl_run import checked_run, execute

pytestmark = pytest.mark.slow

RECIPES = Path(__file__).parents[2] / "recipes"
SOURCES = {"ahead": "rollout.source=ahead", "async": "rollout.source={name: async, max_staleness: 2}"}
RECIPE = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, dtype: float64, device: cpu}
data: {train: {task: sort_digits}, validation: {task: sort_digits}, max_prompt_tokens: 16}
reward: {parts: [{name: format, options: {pattern: '[0-9]{1,3}'}}, {name: task, weight: 0.5}], workers: 1}
rollout: {prompts: 6, n: 4, max_tokens: 8}
algorithm: {kl: {loss: {coef: 0}, reference: none}, correction: decoupled_token_is}
training: {steps: 40, mini_batches: 2, optimizer: {lr: 1.0e-3}}
validation: {every: 7, limit: 8}
run: {save_every: 3, samples_every: 50, threads: 1}
"""
KILLS = 6


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_toy_learns_from_older_rollouts(source: str, tmp_path: Path) -> None:
    overrides = [
        source, "algorithm.correction=decoupled_token_is", "warm_start.updates=100", "rollout.prompts=32", "training.steps=40",
        "training.optimizer.lr=5.0e-4", "validation.limit=200", "validation.every=0", "run.threads=1", "model.device=cpu",
    ]  # fmt: skip
    loaded = load(TrainConfig, RECIPES / "sort_digits.yaml", [f"run.directory={tmp_path}", *overrides])
    with checked_run(loaded.config, loaded.resolved, loaded.base, "run") as (parts, run):
        assert execute(parts, run)
        rows = read_metrics(run.directory.metrics)
    before, after = rows[0]["validation/greedy/accuracy"], rows[-1]["validation/greedy/accuracy"]
    assert after > before + 0.15, (before, after)
    ages = [row["staleness/mean"] for row in rows[2:]]
    assert min(ages) == 1 if "ahead" in source else 0 < max(ages) <= 2


def command(folder: Path, source: str) -> subprocess.Popen[bytes]:
    """The run in a process of its own, and in a group of its own with its reward workers."""
    line = [
        sys.executable,
        "-c",
        "from tests.trainers.test_overlapping_sources_slow import main; main()",
        str(folder),
        source,
    ]
    with open(folder / "output.txt", "ab") as output:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        root = Path(__file__).parents[2]
        return subprocess.Popen(line, stdout=output, stderr=output, env=environment, cwd=root, start_new_session=True)


def main() -> None:
    folder, source = Path(sys.argv[1]), sys.argv[2]
    (folder / "recipe.yaml").write_text(RECIPE)
    overrides = [source, f"run.directory={folder}", "run.name=it"]
    loaded = load(TrainConfig, folder / "recipe.yaml", overrides)
    with checked_run(loaded.config, loaded.resolved, loaded.base, "it") as (parts, run):
        assert execute(parts, run)


def finish(folder: Path, source: str) -> Path:
    process = command(folder, source)
    assert process.wait(1800) == 0, (folder / "output.txt").read_text()[-3000:]
    return folder / "it"


def journal(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "journal" / "events.jsonl").read_text().splitlines()]


def live(run: Path, event: str) -> list[str]:
    events = journal(run)
    resumed = [(i, e["step"]) for i, e in enumerate(events) if e["event"] == "resumed"]
    return [
        name
        for i, e in enumerate(events)
        if e["event"] == event and not any(i < k and e["step"] > step for k, step in resumed)
        for name in e["ids"]
    ]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_run_killed_at_random_moments_loses_nothing_and_uses_nothing_twice(source: str, tmp_path: Path) -> None:
    unbroken = tmp_path / "unbroken"
    unbroken.mkdir()
    expected = finish(unbroken, source)
    broken, rng = tmp_path / "broken", random.Random(7)
    broken.mkdir()
    for number in range(KILLS):
        process = command(broken, source)
        events = broken / "it" / "journal" / "events.jsonl"
        known = len(journal(broken / "it")) if events.exists() else 0
        until = time.monotonic() + 600
        while time.monotonic() < until and process.poll() is None:  # it has begun to sample again
            if events.exists() and events.read_bytes().count(b"\n") > known + 2:
                break
            time.sleep(0.01)
        time.sleep(rng.random() * 0.6)
        assert process.poll() is None, f"kill {number} came too late: {(broken / 'output.txt').read_text()[-1000:]}"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    found = finish(broken, source)
    used, drawn = live(found, "used"), live(found, "drawn")
    assert sorted(used) == sorted(f"{group}.{sample}" for group in drawn for sample in range(4))
    assert len(drawn) == len(set(drawn)) == 40 * 6
    rows = read_metrics(found / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(41))
    assert max(row["staleness/max"] for row in rows[1:]) <= 2
    if "ahead" in source:
        numbers = [
            [
                {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
                for row in read_metrics(run / "metrics.jsonl")
            ]
            for run in (expected, found)
        ]
        assert numbers[0] == numbers[1]
        weights = [load_file(run / "checkpoints" / "step-000040" / "model.safetensors") for run in (expected, found)]
        assert {n: t.tobytes() for n, t in weights[0].items()} == {n: t.tobytes() for n, t in weights[1].items()}
