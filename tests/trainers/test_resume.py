"""A run killed by SIGKILL at any moment resumes and ends bit for bit like one that was never killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet  # noqa: F401 (imported here once, not in every forked child)
import pytest
import transformers  # noqa: F401
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast  # noqa: F401

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.trainers.rl_run import checked_run, execute

RECIPE = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
data: {train: {task: sort_digits}, validation: {task: sort_digits}, max_prompt_tokens: 16}
warm_start: {data: {task: sort_digits, options: {num: 50}}, updates: 8, batch_size: 16, optimizer: {lr: 3.0e-3}}
reward: {parts: [task, {name: format, weight: 0.1, options: {pattern: '[0-9]{3,5}'}}], workers: 1}
rollout: {prompts: 6, n: 4, max_tokens: 8}
algorithm: {preset: grpo, kl: {loss: {coef: 0.01}}}
training: {steps: 10, mini_batches: 2, optimizer: {lr: 1.0e-3, schedule: linear}}
validation: {every: 4, limit: 8}
run: {save_every: 3, samples_every: 5, threads: 1}
"""
NUM_KILLS, PARTS = 12, 2
"""Moments in a run, and the tests that share them."""


def run_child(folder: Path) -> None:
    """The run, in a child process just forked; never returns."""
    status = 1
    try:
        quiet = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        loaded = load(TrainConfig, folder / "recipe.yaml", [f"run.directory={folder}", "run.name=run"])
        with checked_run(loaded.config, loaded.resolved, loaded.base, "run") as (parts, run):
            status = 0 if execute(parts, run) else 3
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    """Forks runs on request: `start FOLDER` answers a pid, `wait PID` an exit code. Torch is imported once, by one thread."""
    for line in sys.stdin:
        command, argument = line.split(maxsplit=1)
        if command == "start":
            pid = os.fork()
            if pid == 0:
                run_child(Path(argument.strip()))
            print(pid, flush=True)
        else:
            print(os.waitstatus_to_exitcode(os.waitpid(int(argument), 0)[1]), flush=True)


class Runner:
    """The other end of `serve`, in a process of its own: forking the threads of a test runner would not be safe."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def _ask(self, text: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def kill_after(self, folder: Path, seconds: float) -> None:
        pid = self._ask(f"start {folder}")
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self._ask(f"wait {pid}")

    def finish(self, folder: Path) -> float:
        """Run to the end; the seconds it took."""
        started = time.monotonic()
        pid = self._ask(f"start {folder}")
        assert self._ask(f"wait {pid}") == 0, (folder / "output.txt").read_text()[-3000:]
        return time.monotonic() - started

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(300)


@pytest.fixture(scope="session")
def runner() -> Iterator[Runner]:
    one = Runner()
    yield one
    one.close()


def result(folder: Path) -> tuple[list[dict], dict, list, dict]:
    """Everything that must not depend on interruptions: metrics, weights and optimizer, which samples were used, tables."""
    run = folder / "run"
    metrics = [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    last = max((run / "checkpoints").glob("step-*"))
    weights = {f"{f.name} {n}": t.tobytes() for f in last.rglob("*.safetensors") for n, t in load_file(f).items()}
    events = [json.loads(line) for line in (run / "journal" / "events.jsonl").read_text().splitlines()]
    resumed = [(i, e["step"]) for i, e in enumerate(events) if e["event"] == "resumed"]
    used = [
        (e["step"], e["ids"])
        for i, e in enumerate(events)
        if e["event"] == "used" and not any(i < k and e["step"] > step for k, step in resumed)
    ]
    tables = {path.name: path.read_bytes() for path in sorted((run / "samples").iterdir())}
    return metrics, weights, used, tables


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> tuple[tuple, float]:
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "recipe.yaml").write_text(RECIPE)
    seconds = runner.finish(folder)
    return result(folder), seconds


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.slow] if part else []) for part in range(PARTS)]
)
def test_a_run_killed_at_random_moments_ends_as_if_it_had_never_stopped(
    part: int, unbroken: tuple, runner: Runner, tmp_path: Path
) -> None:
    """Each run is killed twice, early in one life and late in the other; which of them comes first alternates."""
    expected, duration = unbroken
    rng = random.Random(part)
    moments = [duration * (k + rng.random()) / NUM_KILLS for k in range(part, NUM_KILLS, PARTS)]
    for k in range(len(moments) // 2):
        folder = tmp_path / str(k)
        folder.mkdir()
        (folder / "recipe.yaml").write_text(RECIPE)
        early, late = moments[k], moments[-1 - k]
        lives = (early, late) if k % 2 else (late, early)
        for moment in lives:
            runner.kill_after(folder, moment)
        runner.finish(folder)
        metrics, weights, used, tables = result(folder)
        assert metrics == expected[0], f"killed after {lives[0]:.2f} s, and after {lives[1]:.2f} s more"
        assert weights == expected[1]
        assert used == expected[2]
        assert tables == expected[3]


def test_a_run_killed_again_and_again_still_ends_the_same(unbroken: tuple, runner: Runner, tmp_path: Path) -> None:
    expected, duration = unbroken
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    for k in range(4):
        runner.kill_after(tmp_path, duration * (0.3 + 0.1 * (k % 3)))
    runner.finish(tmp_path)
    assert result(tmp_path) == expected


def test_the_unbroken_run_measured_what_it_should(unbroken: tuple) -> None:
    metrics, weights, used, tables = unbroken[0]
    assert [row["step"] for row in metrics] == list(range(11))
    assert all("validation/greedy/accuracy" in metrics[step] for step in (0, 4, 8, 10))
    assert all(row["mismatch/mean"] <= 1e-5 and row["mismatch/max"] <= 1e-3 for row in metrics[1:])
    assert all(row["actor/updates"] == 2 for row in metrics[1:])
    assert len(used) == 11
    assert len({i for step, ids in used for i in ids}) == sum(len(ids) for _, ids in used)
    assert weights
    steps = [json.loads(line)["step"] for line in tables["worst_tokens.jsonl"].splitlines()]
    assert sorted(set(steps)) == list(range(1, 11))
    assert all("mismatch/by_position/0/abs" in row for row in metrics[1:])


if __name__ == "__main__":
    serve()
