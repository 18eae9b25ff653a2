"""`burnish train` from a shell: a light supervisor process that restarts its driver and passes on Ctrl-C once."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.cli.train import heartbeat_timeout_s
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.dispatch import WorkerLost
from burnish.run.supervisor.exit_status import WORKER_LOST_STATUS
from burnish.run.supervisor.processes import descendants
from burnish.run.supervisor.supervisor import is_supported

RECIPE = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
data: {train: {task: sort_digits}, max_prompt_tokens: 16}
reward: {parts: task, workers: 1}
rollout: {prompts: 3, n: 4, max_tokens: 6}
training: {steps: 100000, optimizer: {lr: 1.0e-3}}
run: {threads: 1, directory: runs, name: r}
"""
PATIENCE_S = 240


class Terminal:
    """A command in a terminal of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.text = ""
        root = str(Path(__file__).parents[2])
        self.pid, self.file = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = os.environ | {"TERM": "xterm", "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
            os.execve(sys.executable, [sys.executable, "-m", "burnish.cli.main", *arguments], environment)

    def read_until(self, condition: object) -> None:
        """Read what is shown until a function says that it is enough."""
        assert callable(condition)
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, self.text[-2000:]
            if select.select([self.file], [], [], 0.05)[0]:
                try:
                    self.text += os.read(self.file, 65536).decode(errors="replace")
                except OSError:  # the other end is closed
                    return

    def wait(self) -> int:
        ended: list[int] = []

        def has_ended() -> bool:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
            return bool(ended)

        self.read_until(has_ended)
        return ended[0] if ended else os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.mark.skipif(not is_supported(), reason="the supervisor needs Linux")
def test_ctrl_c_in_a_terminal_is_heard_once_and_a_killed_driver_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "new.yaml").write_text(RECIPE)
    metrics = tmp_path / "runs" / "r" / "metrics.jsonl"
    terminal = Terminal(tmp_path, "train", "new.yaml")
    try:
        terminal.read_until(lambda: metrics.exists() and metrics.read_text().count("\n") > 2)
        driver = descendants(terminal.pid)[0]
        assert "libtorch" in Path(f"/proc/{driver}/maps").read_text()
        assert "libtorch" not in Path(f"/proc/{terminal.pid}/maps").read_text()
        os.kill(driver, signal.SIGKILL)
        terminal.read_until(lambda: "(restart 1 of 3)" in terminal.text and terminal.text.count("grpo on r") > 1)
        begun = metrics.read_text().count("\n")
        terminal.read_until(lambda: metrics.read_text().count("\n") > begun)
        os.write(terminal.file, b"\x03")
        assert terminal.wait() == 0
    finally:
        for pid in [*descendants(terminal.pid), terminal.pid]:
            if Path(f"/proc/{pid}").exists():
                os.kill(pid, signal.SIGKILL)
    assert f"the driver (process {driver}) was killed (SIGKILL)" in terminal.text
    assert "\x1b[?25h" in terminal.text  # the cursor that the dead display had hidden
    assert terminal.text.count("stopping after this step") == 1
    assert "stopped; the same command goes on from here" in terminal.text
    assert "interrupted" not in terminal.text


def test_a_lost_worker_has_a_status_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def drive(*_: object) -> int:
        raise WorkerLost("actor rank 1 of 2 has ended", 1)

    (tmp_path / "new.yaml").write_text(RECIPE)
    monkeypatch.setattr("burnish.cli.train.train_in_process", drive)
    assert main(["train", str(tmp_path / "new.yaml")]) == WORKER_LOST_STATUS == 75
    assert capsys.readouterr().err == "burnish: error: actor rank 1 of 2 has ended\n"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 100.0),
        (["placement=ray", "placement.timeout_s=20"], 100.0),
        (["placement=ray", "placement.timeout_s=500"], 560.0),
        (["rollout.engine=sglang", "rollout.sglang={urls: 'http://localhost:1', timeout_s: 300}"], 360.0),
    ],
)
def test_the_supervisor_waits_longer_than_its_driver_does(
    overrides: list[str], expected: float, tmp_path: Path
) -> None:
    (tmp_path / "new.yaml").write_text(RECIPE)
    config = load(TrainConfig, tmp_path / "new.yaml", overrides).config
    assert heartbeat_timeout_s(Namespace(deadline=100.0), config) == expected


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--max-restarts", "2"], "--max-restarts 2 needs the command `burnish train`"),
        (["--max-restarts", "-1"], "--max-restarts -1: give 0 or more"),
        (["--deadline", "0"], "--deadline 0: give a number of seconds above 0"),
    ],
)
def test_options_of_the_supervisor_are_checked(
    option: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "new.yaml").write_text(RECIPE)
    assert main(["train", str(tmp_path / "new.yaml"), *option]) == 2
    assert message in capsys.readouterr().err
