"""Signs of life: written when something moves, seldom enough to cost nothing, and read for one driver alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.run.supervisor import liveness
from burnish.run.supervisor.liveness import (
    RECORD_BYTES,
    Heartbeat,
    HeartbeatDisplay,
    HeartbeatRecord,
    StopOnInterrupt,
    read_heartbeat,
)


def test_a_new_phase_is_written_at_once_and_a_count_only_now_and_then(tmp_path: Path) -> None:
    now, path = [0.0], tmp_path / "heartbeat.json"
    heartbeat = Heartbeat(path, lambda: now[0])
    assert read_heartbeat(path, os.getpid()) == HeartbeatRecord(0, "starting", 1)
    heartbeat.beat(3, "rollout 1/9")
    heartbeat.beat(3, "rollout 2/9")
    assert read_heartbeat(path, os.getpid()) == HeartbeatRecord(3, "rollout 1/9", 2)
    heartbeat.beat(3, "learning")
    assert read_heartbeat(path, os.getpid()) == HeartbeatRecord(3, "learning", 3)
    now[0] += 1.0
    heartbeat.beat(3, "learning")
    assert str(read_heartbeat(path, os.getpid())) == "step 3, 'learning'"
    assert json.loads(path.read_text())["count"] == 4
    assert path.stat().st_size == RECORD_BYTES
    heartbeat.beat(3, "é" * 1000)
    assert read_heartbeat(path, os.getpid()) == HeartbeatRecord(3, "é" * 60, 5)
    heartbeat.close()


def test_another_drivers_record_and_a_torn_one_are_none(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    assert read_heartbeat(path, os.getpid()) is None
    Heartbeat(path).close()
    assert read_heartbeat(path, os.getpid() + 1) is None
    path.write_text(path.read_text()[:20])
    assert read_heartbeat(path, os.getpid()) is None


def test_whatever_a_display_is_told_is_a_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "heartbeat.json"
    display = HeartbeatDisplay(tmp_path / "log.txt", Heartbeat(path), open(os.devnull, "w"))  # noqa: SIM115
    seen = []
    for tell in (
        lambda: display.start("toy", 6, 4),
        lambda: display.phase("rollout 1/2"),
        lambda: display.step(5, {}),
        lambda: display.step(6, {}),
    ):
        tell()
        seen.append(str(read_heartbeat(path, os.getpid())))
    assert seen == ["step 5", "step 5, 'rollout 1/2'", "step 6", "step 6, 'all steps are done'"]


def test_a_disk_that_takes_nothing_is_said(tmp_path: Path) -> None:
    heartbeat = Heartbeat(tmp_path / "heartbeat.json")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, heartbeat._file)
    os.close(full)
    with pytest.raises(UserError, match=r"cannot write .*heartbeat\.json: No space left"):
        heartbeat.beat(1, "learning")


# Ctrl-C: the first lets the step finish, the second stops at once, and neither depends on the display.


def test_the_first_interrupt_is_noted_and_the_second_raises() -> None:
    notes: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    times = iter([10.0, 12.0])
    with StopOnInterrupt(notes.append, lambda: next(times)) as stop:
        assert not stop.requested
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        assert len(notes) == 1
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_signals_of_the_same_moment_are_one() -> None:
    times = iter([10.0, 10.1, 10.2, 11.0])
    with StopOnInterrupt(lambda text: None, lambda: next(times)) as stop:
        signal.raise_signal(signal.SIGTERM)  # a batch system's
        signal.raise_signal(signal.SIGTERM)  # the same, passed on by the supervisor
        signal.raise_signal(signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_an_interrupt_in_the_middle_of_a_line_of_output_does_not_end_the_run() -> None:
    def reentrant(text: str) -> None:
        raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    with StopOnInterrupt(reentrant) as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.requested


# The age of the process counts from its start, not from the import of the module.

LATE = "import time; time.sleep(0.5); from burnish.run.supervisor.liveness import process_seconds; print(process_seconds())"


def test_the_time_before_the_import_counts() -> None:
    started = time.monotonic()
    told = float(
        subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True, timeout=120).stdout
    )
    assert 0.45 <= told <= time.monotonic() - started + 0.1  # the system counts in hundredths of a second


def test_without_proc_it_counts_from_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(liveness, "PROC_STAT", tmp_path / "absent")
    first = liveness.process_seconds()
    assert 0 <= first <= liveness.process_seconds() <= time.monotonic() - liveness.IMPORT_TIME
