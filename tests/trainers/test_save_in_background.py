"""Checkpoints are written while the run continues, and a kill during the write loses nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.tensor_file import TensorFile
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.run import Run
from tests.trainers.tiny import TINY, run_of

STEPS, SAVED, LATER = 6, 3, 5
"""A checkpoint at step 3 is held up until step 5 is done; the next is due at step 6."""
OVERRIDES = [f"training.steps={STEPS}", f"run.save_every={SAVED}", "reward.workers=1", "model.device=cpu"]
PATIENCE_S = 60.0


def hold_up(patch: pytest.MonkeyPatch, at_later_step: Any) -> None:
    """Stop the writer of step 3 in the middle of a file; step 5, once committed, calls `at_later_step`."""
    write, commit = TensorFile.write, Run.commit
    reached, opened = threading.Event(), threading.Event()

    def held(self: TensorFile, folder: Path) -> Any:
        if f"step-{SAVED:06d}" in folder.name and self.name == "optimizer.safetensors":
            (folder / self.name).write_bytes(b"half of a file")
            reached.set()
            assert opened.wait(PATIENCE_S), "the run did not go on"
        return write(self, folder)

    def committed(self: Run, step: int, *rest: Any) -> None:
        commit(self, step, *rest)
        if step == LATER:
            assert reached.wait(PATIENCE_S)
            at_later_step(self)
            opened.set()
            assert self.saver._work.wait(PATIENCE_S), "step 6 reports the time of this write"

    patch.setattr(TensorFile, "write", held)
    patch.setattr(Run, "commit", committed)


def result(run: Path) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    rows = [
        {k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)}
        for row in read_metrics(run / "metrics.jsonl")
    ]
    last = run / "checkpoints" / f"step-{STEPS:06d}"
    return rows, {file.name: file.read_bytes() for file in sorted(last.iterdir())}


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that stands still for every checkpoint."""
    return run_of(tmp_path_factory.mktemp("waited") / "run", TINY, [*OVERRIDES, "run.save=wait"])


def test_steps_are_made_while_a_checkpoint_is_written(waited: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        hold_up(patch, lambda run: seen.append(sorted(p.name for p in run.directory.checkpoints.iterdir())))
        run = run_of(tmp_path / "run", TINY, OVERRIDES)
    (folders,) = seen
    assert len(folders) == 1
    assert folders[0].startswith(".tmp-"), "two steps after it was taken the checkpoint is still being written"
    assert [c.step for c in Checkpoints(run / "checkpoints", 1).all()] == [SAVED, STEPS]
    assert result(run) == result(waited), "what is written is what was there when it was taken"
    rows = read_metrics(run / "metrics.jsonl")
    assert "time/checkpoint_blocked_s" in rows[SAVED]
    blocked_s, elapsed_s = (rows[SAVED][f"time/{name}_s"] for name in ("checkpoint_blocked", "elapsed"))
    assert rows[SAVED]["time/checkpoint_share"] == blocked_s / elapsed_s
    assert "time/checkpoint_share" not in rows[SAVED - 1]
    assert rows[SAVED + 1]["time/checkpoint_share"] < rows[SAVED]["time/checkpoint_share"]
    assert "time/checkpoint_write_s" not in rows[SAVED]
    assert "time/checkpoint_write_s" in rows[-1]


def live_and_die(folder: str) -> None:
    """A run that is killed in step 5, while the checkpoint of step 3 is being written."""
    with pytest.MonkeyPatch.context() as patch:
        hold_up(patch, lambda run: os.kill(os.getpid(), signal.SIGKILL))
        run_of(Path(folder), TINY, OVERRIDES)


def test_a_run_killed_while_it_writes_goes_on_as_if_nothing_had_happened(waited: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", f"from {__name__} import live_and_die; live_and_die({str(tmp_path / 'run')!r})"]
    died = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    checkpoints = tmp_path / "run" / "it" / "checkpoints"
    left = [p.name for p in checkpoints.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(".tmp-")
    assert result(run_of(tmp_path / "run", TINY, OVERRIDES)) == result(waited)
    assert not list(checkpoints.glob(".tmp*"))


def test_a_full_disk_ends_the_run_at_the_next_step_and_not_in_silence(tmp_path: Path) -> None:
    write = TensorFile.write

    def full(self: TensorFile, folder: Path) -> Any:
        if self.name == "optimizer.safetensors":
            (folder / self.name).symlink_to("/dev/full")
        return write(self, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TensorFile, "write", full)
        with pytest.raises(UserError, match=r"optimizer\.safetensors: No space left on device; make room and start"):
            run_of(tmp_path / "run", TINY, OVERRIDES)
    steps = [row["step"] for row in read_metrics(tmp_path / "run" / "it" / "metrics.jsonl")]
    assert SAVED <= max(steps) < STEPS
    assert Checkpoints(tmp_path / "run" / "it" / "checkpoints", 1).latest() is None
