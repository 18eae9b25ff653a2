"""Signs of life: written when something moves, seldom enough to cost nothing, and read for one driver alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.run.supervisor.liveness import SIZE, Beat, BeatingDisplay, Heartbeat, read_beat


def test_a_new_phase_is_written_at_once_and_a_count_only_now_and_then(tmp_path: Path) -> None:
    now, path = [0.0], tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path, lambda: now[0])
    assert read_beat(path, os.getpid()) == Beat(0, "starting", 1)
    heartbeat.beat(3, "rollout 1/9")
    heartbeat.beat(3, "rollout 2/9")
    assert read_beat(path, os.getpid()) == Beat(3, "rollout 1/9", 2)
    heartbeat.beat(3, "learning")
    assert read_beat(path, os.getpid()) == Beat(3, "learning", 3)
    now[0] += 1.0
    heartbeat.beat(3, "learning")
    assert str(read_beat(path, os.getpid())) == "step 3, 'learning'"
    assert json.loads(path.read_text())["count"] == 4
    assert path.stat().st_size == SIZE
    heartbeat.beat(3, "é" * 1000)
    assert read_beat(path, os.getpid()) == Beat(3, "é" * 60, 5)
    heartbeat.close()


def test_another_drivers_record_and_a_torn_one_are_none(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    assert read_beat(path, os.getpid()) is None
    Heartbeat(path).close()
    assert read_beat(path, os.getpid() + 1) is None
    path.write_text(path.read_text()[:20])
    assert read_beat(path, os.getpid()) is None


def test_whatever_a_display_is_told_is_a_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    display = BeatingDisplay(tmp_path / "log.txt", Heartbeat(path), open(os.devnull, "w"))  # noqa: SIM115
    seen = []
    for tell in (
        lambda: display.start("toy", 6, 4),
        lambda: display.phase("rollout 1/2"),
        lambda: display.step(5, {}),
        lambda: display.step(6, {}),
    ):
        tell()
        seen.append(str(read_beat(path, os.getpid())))
    assert seen == ["step 5", "step 5, 'rollout 1/2'", "step 6", "step 6, 'all steps are done'"]


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat.json")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, heartbeat._file)
    os.close(full)
    with pytest.raises(UserError, match=r"cannot write .*heartbeat\.json: No space left"):
        heartbeat.beat(1, "learning")
