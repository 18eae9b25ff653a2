"""The runs of `chaos.py`: forks of one process, which has imported torch already, so that a run takes a second or two.

python -m tests.distributed.chaos_runs    answers `start FOLDER OVERRIDE ...` with a pid, `wait PID` with an exit code
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from burnish.run.supervisor.processes import descendants

STEPS = 10
RECIPE = f"""
model: {{new: {{hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}}, dtype: float64, device: cpu}}
data: {{train: {{task: sort_digits, limit: 12, options: {{min_digits: 2, max_digits: 3}}}}, max_prompt_tokens: 8}}
reward: {{workers: 2, timeout_s: 1.5, parts: [{{name: 'slow.py:digits'}}, {{name: task, weight: 0.5}}]}}
rollout: {{prompts: 4, n: 4, max_tokens: 4}}
training: {{steps: {STEPS}, mini_batches: 2, optimizer: {{lr: 1.0e-2}}}}
algorithm: {{kl: {{loss: {{coef: 0.1}}, reference: frozen}}}}
run: {{samples_every: 5, save_every: 3, threads: 1, directory: runs, name: run}}
"""
SLOW = """
import time
def digits(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.004)
    return 0.2 * sum(c.isdigit() for c in solution_str)
"""
PLAYS = """
import time
from burnish.environments.base import End, Environment, Observation
class Plays(Environment):
    takes_truncated = True
    def start(self, episode):
        return Observation()
    def step(self, answer):
        time.sleep(0.004)
        if answer.turn == 1:
            return End()
        return Observation(messages=({"role": "user", "content": "2"},))
"""
"""An environment of two turns in worker processes; the rewards are those of the recipe."""
DEADLINE_S = 400.0
LATE = 999
"""Stands for the exit code of a run that did not end in time."""


def serve() -> None:
    """Forks runs on request: torch is imported once, by one thread."""
    import transformers  # noqa: F401

    import burnish.cli.train
    import burnish.trainers.rl_run
    from burnish.run.supervisor import processes, supervisor

    supervisor.MAX_STOPPED_S, supervisor.STACK_DUMP_S, processes.ORPHAN_GRACE_S = 0.5, 0.2, 3.0
    burnish.cli.train.print_results = lambda run: None  # curves and a report take longer than the run
    for line in sys.stdin:
        command, argument, *overrides = line.split()
        if command == "start":
            pid = os.fork()
            if pid == 0:
                command_line(Path(argument), overrides)
            print(pid, flush=True)
        else:
            print(exit_code(int(argument)), flush=True)


def command_line(folder: Path, overrides: list[str]) -> None:
    """`burnish train` as a shell would start it; never returns."""
    from burnish.cli.main import main

    status = 1
    try:
        os.setsid()
        os.chdir(folder)
        output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["burnish", "train", "recipe.yaml", *overrides]
        status = main()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def exit_code(pid: int) -> int:
    """Of a run; one that takes too long is ended."""
    until = time.monotonic() + DEADLINE_S
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    for left in [*descendants(pid), pid]:
        os.kill(left, signal.SIGKILL)
    os.waitpid(pid, 0)
    return LATE


class Runner:
    """The other end of `serve`."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        command = [sys.executable, "-m", "tests.distributed.chaos_runs"]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True, env=environment)

    def _ask(self, text: str) -> int:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def start(self, folder: Path, overrides: tuple[str, ...]) -> int:
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "slow.py").write_text(SLOW)
        (folder / "plays.py").write_text(PLAYS)
        return self._ask(" ".join(["start", str(folder), *overrides]))

    def wait(self, pid: int) -> int:
        return self._ask(f"wait {pid}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(30)


@contextmanager
def open_runner() -> Iterator[Runner]:
    runner = Runner()
    try:
        yield runner
    finally:
        runner.close()


if __name__ == "__main__":
    serve()
