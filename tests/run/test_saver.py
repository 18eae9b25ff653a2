"""Saving in the background: training continues, the journal records only finished checkpoints, and no error is lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from burnish.config.errors import UserError
from burnish.config.schema import Run as RunConfig
from burnish.run.checkpoint import saver
from burnish.run.checkpoint.saver import BackgroundTask, TensorStaging
from burnish.run.checkpoint.snapshot import BytesFile, Checksums, Snapshot, write_file
from burnish.run.checkpoint.tensor_file import TensorFile
from burnish.run.metrics import read_metrics
from burnish.run.run import Run
from burnish.run.run_directory import RunDirectory

PATIENCE_S = 20.0


class Gate:
    """A file whose writer waits to be let through."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def write(self, folder: Path) -> Checksums:
        self.reached.set()
        assert self.opened.wait(PATIENCE_S)
        return BytesFile("gate", "passed").write(folder)


class Full:
    """A file on a disk without room."""

    def write(self, folder: Path) -> Checksums:
        (folder / "optimizer.safetensors").symlink_to("/dev/full")
        return write_file(folder, "optimizer.safetensors", [b"x" * 10_000])


@pytest.fixture
def open_run(tmp_path: Path) -> Callable[..., Run]:
    def build(**options: Any) -> Run:
        return Run(RunDirectory.create(tmp_path, "it", "seed: 1\n"), RunConfig(**options), {})

    return build


def taking(*contents: Any) -> Callable[[TensorStaging], Snapshot]:
    return lambda stage: Snapshot([BytesFile("config.json", "{}")], contents)


def events(run: Run) -> list[tuple[str, int]]:
    lines = (run.directory.journal / "events.jsonl").read_text().splitlines()
    return [(e["event"], e["step"]) for e in map(json.loads, lines)]


def steps(run: Run) -> list[int]:
    return [c.step for c in run.checkpoints.all()]


def test_the_loop_goes_on_while_a_checkpoint_is_written(open_run: Callable[..., Run]) -> None:
    gate = Gate()
    with open_run() as run:
        run.commit(1, {"loss": 1.0}, [])
        run.checkpoint(1, taking(gate), 0.5)
        assert gate.reached.wait(PATIENCE_S)
        run.commit(2, {"loss": 0.5}, [])
        run.journal.attach("completed-000001", {"x": np.zeros(1)})
        run.journal.attach("completed-000002", {"x": np.zeros(1)})
        assert steps(run) == []
        assert ("checkpoint", 1) not in events(run), "the journal speaks of what is there"
        gate.opened.set()
        run.wait()
        assert steps(run) == [1]
        assert events(run)[-1] == ("checkpoint", 1)
        assert [(e["event"], e["step"]) for e in run.journal.events] == [("used", 2), ("step", 2), ("checkpoint", 1)]
        assert [f.name for f in run.directory.journal.glob("*.safetensors")] == ["completed-000002.safetensors"]
        run.commit(3, {"loss": 0.2}, [])
    rows = read_metrics(run.directory.metrics)
    assert ["time/checkpoint_write_s" in row for row in rows] == [False, False, True]
    assert ["time/checkpoint_blocked_s" in row for row in rows] == [False, True, False]


def test_what_training_changes_afterwards_is_not_in_the_checkpoint(open_run: Callable[..., Run]) -> None:
    gate, weight = Gate(), torch.zeros(8)

    def take(stage: TensorStaging) -> Snapshot:
        return Snapshot([TensorFile("model.safetensors", {"w": stage(weight)})], [gate])

    with open_run() as run:
        for step in (1, 2):
            run.checkpoint(step, take, None)
            weight += 1
            gate.opened.set()
        run.wait()
        found = [load_file(c.path / "model.safetensors")["w"] for c in run.checkpoints.all()]
    assert [int(w.unique()) for w in found] == [0, 1]


def test_one_is_written_at_a_time_and_a_long_wait_says_for_what(
    open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LONG_WAIT_S", 0.01)
    gate, said = Gate(), list[str]()
    with open_run() as run:
        monkeypatch.setattr(run.saver, "note", lambda text: (said.append(text), gate.opened.set()))
        run.checkpoint(1, taking(gate), None)
        run.checkpoint(2, taking(), None)
        assert said == ["waiting for the checkpoint of step 1 to be written"]
        assert events(run) == [("checkpoint", 1)]
    assert events(run) == [("checkpoint", 1), ("checkpoint", 2)]
    assert steps(run) == [1, 2], "the end of the run waits for the last"


def test_to_wait_is_to_have_it_written(open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    """`run.save=wait`: nothing is copied, and the checkpoint is there when the loop goes on."""
    weight = torch.zeros(8)

    def take(stage: TensorStaging) -> Snapshot:
        return Snapshot([TensorFile("model.safetensors", {"w": stage(weight)})])

    monkeypatch.setattr(saver.HostCopy, "__call__", None)
    with open_run(save="wait") as run:
        run.checkpoint(1, take, None)
        assert events(run) == [("checkpoint", 1)]
        assert steps(run) == [1]


def test_without_room_for_a_copy_the_run_waits_and_says_so(
    open_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "SMALL_TENSOR_BYTES", 0)
    for module in (saver, saver):
        monkeypatch.setattr(module, "free_memory", lambda: (1 << 30, 1 << 34))
    weight, said = torch.zeros(8), list[str]()

    def take(stage: TensorStaging) -> Snapshot:
        return Snapshot([TensorFile("model.safetensors", {"w": stage(weight)})])

    with open_run() as run:
        monkeypatch.setattr(run.saver, "note", said.append)
        for step in (1, 2):
            run.checkpoint(step, take, None)
            assert events(run)[-1] == ("checkpoint", step)
    assert len(said) == 1
    assert "no room for a copy of the checkpoint (1.0 of 16.0 GiB are free)" in said[0]


def test_a_full_disk_is_told_at_the_next_step_with_the_file(open_run: Callable[..., Run]) -> None:
    with open_run() as run:
        run.checkpoint(1, taking(), None)
        run.checkpoint(2, taking(Full()), None)
        run.saver._work.wait(PATIENCE_S)
        with pytest.raises(UserError, match=r"optimizer\.safetensors: No space left on device; make room") as caught:
            run.commit(3, {}, [])
        assert isinstance(caught.value.__cause__, OSError)
        assert [e for e in events(run) if e[0] == "step"] == [], "the step is not committed, so it is made again"
        assert steps(run) == [1]
        assert not list(run.directory.checkpoints.glob(".tmp*")), "what was written of it is gone"


def test_a_folder_that_cannot_be_made_is_named(open_run: Callable[..., Run]) -> None:
    with open_run() as run:
        run.directory.checkpoints.rmdir()
        run.directory.checkpoints.write_text("in the way")
        run.checkpoint(1, taking(), None)
        with pytest.raises(UserError, match=r"cannot write the checkpoint of step 1 in .*checkpoints: File exists"):
            run.wait()


def test_the_end_of_a_run_raises_what_its_last_checkpoint_met(open_run: Callable[..., Run]) -> None:
    with pytest.raises(UserError, match="No space left"), open_run() as run:
        run.checkpoint(1, taking(Full()), None)
    RunDirectory.create(run.directory.path.parent, "it", "seed: 1\n").close()  # the lock was given back


def test_a_second_error_does_not_hide_the_first(open_run: Callable[..., Run]) -> None:
    run = open_run()

    def ends() -> None:
        with run:
            run.checkpoint(1, taking(Full()), None)
            raise KeyError("first")

    with pytest.raises(KeyError, match="first"):
        ends()
    assert "No space left on device" in run.directory.log.read_text()
    RunDirectory.create(run.directory.path.parent, "it", "seed: 1\n").close()


def test_an_error_that_ends_a_run_leaves_it_the_checkpoint_that_was_under_way(open_run: Callable[..., Run]) -> None:
    gate, run = Gate(), open_run()

    def ends() -> None:
        with run:
            run.checkpoint(1, taking(gate), None)
            gate.opened.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ends()
    assert steps(run) == [1]
    assert events(run) == [("checkpoint", 1)]


def test_what_work_in_the_background_raises_is_raised_where_it_is_picked_up() -> None:
    work: BackgroundTask[int] = BackgroundTask()
    assert work.wait()
    work.start(lambda: 1 // 0, "division")
    with pytest.raises(ZeroDivisionError):
        work.collect()
    assert work.is_idle
    work.start(lambda: 3, "three")
    assert work.collect() == 3
    assert work.is_idle
