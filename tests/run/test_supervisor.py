"""The supervisor: when it restarts a driver, when it does not, and what it reports. Real processes follow a script."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from burnish.run.durable_files import folder_id
from burnish.run.journal import Journal
from burnish.run.run_directory import RunDirectory
from burnish.run.supervisor.exit_status import DriverRecord
from burnish.run.supervisor.processes import (
    descendants,
    is_stopped,
    num_bytes_read,
    out_of_memory_kills,
    workers_that_dump_stacks,
)
from burnish.run.supervisor.supervisor import Supervisor, is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="the supervisor needs Linux")
ROOT = Path(__file__).parents[2]
STOPS_S = 300
"""Limit of every wait, and deadline of drivers that do not hang: generous, because a busy machine may be slow."""


class Ended(NamedTuple):
    status: int
    said: str
    drivers: list[int]


def begin(folder: Path, *scripts: str, restarts: int = 3, deadline_s: float = STOPS_S) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.run.scripted_drivers",
        str(folder),
        str(restarts),
        str(deadline_s),
        *scripts,
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], folder: Path) -> Ended:
    try:
        said = process.communicate(timeout=STOPS_S)[0]
    finally:
        process.kill()
    drivers = [int(line) for line in (folder / "drivers").read_text().split()]
    assert not any(Path(f"/proc/{pid}").exists() for pid in drivers)
    return Ended(process.returncode, said, drivers)


def supervised(folder: Path, *scripts: str, restarts: int = 3, deadline_s: float = STOPS_S) -> Ended:
    return finish(begin(folder, *scripts, restarts=restarts, deadline_s=deadline_s), folder)


def driver_of(folder: Path, number: int = 1) -> int:
    """The pid of the n-th driver, once it is about to follow the last word of its script, or to hold."""
    until = time.monotonic() + STOPS_S
    while time.monotonic() < until:
        known = (folder / "drivers").read_text().split() if (folder / "drivers").exists() else []
        if len(known) >= number and (folder / "log.txt").exists() and "about to" in beat(folder):
            return int(known[number - 1])
        time.sleep(0.02)
    pytest.fail("no driver came")


def beat(folder: Path) -> str:
    return (folder / "heartbeat.json").read_text() if (folder / "heartbeat.json").exists() else ""


def test_a_driver_that_is_killed_is_named_and_another_goes_on(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "step,step,kill", "step,segv", "step")
    assert ended.status == 0
    assert len(ended.drivers) == 3
    first, second = ended.drivers[:2]
    assert f"the driver (process {first}) was killed (SIGKILL) by a user or another program" in ended.said
    assert "in step 3, 'about to kill'" in ended.said
    assert f"the driver (process {second}) was killed by SIGSEGV, in step 4, 'about to segv'" in ended.said
    assert "going on from the start, with what the journal has (restart 2 of 3)" in ended.said
    assert "supervisor: the driver (process" in (tmp_path / "log.txt").read_text()
    assert "  toy\n" in ended.said  # the last lines of its log


def test_a_crash_leaves_the_stack_of_it(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "step,crash", "step")
    assert ended.status == 0
    assert "ctypes" in (tmp_path / "stacks" / f"driver-{ended.drivers[0]}.txt").read_text()


@pytest.mark.parametrize(("word", "status"), [("step", 0), ("2", 2), ("130", 130), ("term", 143), ("int", 130)])
def test_what_a_user_did_or_must_see_to_is_not_tried_again(tmp_path: Path, word: str, status: int) -> None:
    ended = supervised(tmp_path, f"step,{word}")
    assert ended.status == status
    assert len(ended.drivers) == 1
    assert "restart" not in ended.said


@pytest.mark.parametrize("word", ["0", "exit"])
def test_status_0_of_a_driver_that_did_not_end_its_run_is_an_error(tmp_path: Path, word: str) -> None:
    ended = supervised(tmp_path, f"step,{word}", f"{word}")
    assert ended.status == 1
    assert (
        "exited with status 0 before the run was complete (does a plug-in call sys.exit() or os._exit()?)" in ended.said
    )
    assert len(ended.drivers) == 2  # after a step it may have been an accident; then it would come again


def test_a_run_that_dies_twice_in_the_same_step_stops(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "step,step,kill", "kill", restarts=9)
    assert ended.status == 137
    assert "the run stops here: it died twice in step 3; the same command goes on from" in ended.said
    assert len(ended.drivers) == 2


def test_a_run_that_dies_twice_before_it_has_begun_stops(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "early", "early", restarts=9)
    assert ended.status == 137
    assert "SIGKILL" in ended.said
    assert "before it had begun" in ended.said
    assert "it died twice before its first step" in ended.said


def test_restarts_are_counted(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "step,kill", "step,75", "step,kill", restarts=2)
    assert ended.status == 137
    assert "lost a worker" in ended.said
    assert "it was restarted 2 times, which is --max-restarts" in ended.said
    assert len(ended.drivers) == 3


def test_what_is_measured_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "measure,bug", "bug")
    assert ended.status == 1
    assert "the error came before a step was done, and would come again" in ended.said
    assert len(ended.drivers) == 1


def test_a_bug_is_tried_again_only_after_steps(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "step,step,bug", "bug")
    assert ended.status == 1
    assert ended.said.count("ZeroDivisionError: a bug") == 2
    assert "the error came before a step was done, and would come again" in ended.said
    assert len(ended.drivers) == 2


def test_a_driver_that_hangs_leaves_its_stacks_and_is_ended(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "step,hang", "step,step", deadline_s=5)
    assert ended.status == 0
    assert re.search(r"gave no sign of life for \d+ s \(--deadline\), in step 2, 'about to hang'", ended.said)
    assert "in end" in (tmp_path / "stacks" / f"driver-{ended.drivers[0]}.txt").read_text()


def test_one_that_always_hangs_ends_with_a_status(tmp_path: Path) -> None:
    assert supervised(tmp_path, "hang", "hang", deadline_s=0.6).status == 124


def test_one_that_is_slow_but_moves_is_left_alone(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "step,slow,step", deadline_s=5)
    assert ended.status == 0
    assert len(ended.drivers) == 1


def test_a_driver_that_is_stopped_is_ended_and_one_that_goes_on_is_not(tmp_path: Path) -> None:
    process = begin(tmp_path, "step,hold,step", "step")
    driver = driver_of(tmp_path)
    os.kill(driver, signal.SIGSTOP)
    time.sleep(0.2)
    os.kill(driver, signal.SIGCONT)
    (tmp_path / "release").touch()
    ended = finish(process, tmp_path)
    assert (ended.status, len(ended.drivers)) == (0, 1)
    (tmp_path / "drivers").unlink()
    ended = supervised(tmp_path, "step,stop", "step")
    assert (ended.status, len(ended.drivers)) == (0, 2)
    assert re.search(r"was stopped by a signal and not continued for \d+ s", ended.said)
    assert "in end" in (tmp_path / "stacks" / f"driver-{ended.drivers[0]}.txt").read_text()


def test_a_driver_that_is_stopped_with_its_supervisor_waits_with_it(tmp_path: Path) -> None:
    process = begin(tmp_path, "step,hold,step", "step")  # as Ctrl-Z does
    pids = [process.pid, driver_of(tmp_path)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(3.5)  # longer than a driver may be stopped alone
    for pid in reversed(pids):
        os.kill(pid, signal.SIGCONT)
    (tmp_path / "release").touch()
    ended = finish(process, tmp_path)
    assert (ended.status, len(ended.drivers)) == (0, 1)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_supervisor_is_passed_on_and_ends_the_run(tmp_path: Path, number: int) -> None:
    process = begin(tmp_path, "step,hang", "step")
    driver_of(tmp_path)
    process.send_signal(number)
    ended = finish(process, tmp_path)
    assert len(ended.drivers) == 1
    assert ended.status == 128 + number
    assert "restart" not in ended.said


def test_a_driver_ends_with_its_supervisor(tmp_path: Path) -> None:
    process = begin(tmp_path, "step,hang")
    driver = driver_of(tmp_path)
    process.kill()
    process.wait(STOPS_S)
    until = time.monotonic() + STOPS_S
    while Path(f"/proc/{driver}").exists() and time.monotonic() < until:
        time.sleep(0.02)
    assert not Path(f"/proc/{driver}").exists()


def test_what_a_dead_driver_left_is_ended(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "step,orphan", "step")
    assert ended.status == 0
    orphan = int((tmp_path / "orphan").read_text())
    assert not Path(f"/proc/{orphan}").exists()
    assert f"what it had started did not end by itself and was killed: process {orphan}" in ended.said


def test_an_old_run_that_is_replaced_says_nothing_of_the_new_one(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path, "r", "seed: 0") as run:
        journal = Journal(run.journal)
        for step in range(1, 9):
            journal.append("step", step=step)
        journal.append("complete", step=8)
        run.log.write_text("of the old run")
        (run.checkpoints / "step-000008").mkdir()
    replaced = folder_id(tmp_path / "r")
    record = DriverRecord(tmp_path / "r", replaced)
    ended = record.exited(1, 0, "")
    assert (ended.status, ended.num_steps, ended.last_lines) == (1, 0, ())
    assert record.resume_point() == "from the start, with what the journal has"
    supervisor = Supervisor(tmp_path / "r", 0, 1.0, replaced)
    supervisor.say("not for the old log")
    assert (tmp_path / "r" / "log.txt").read_text() == "of the old run"
    with RunDirectory.create(tmp_path, "r", "seed: 1", replaced=replaced) as run:
        Journal(run.journal).append("complete", step=0)
        assert record.exited(1, 0, "").status == 0


def test_what_is_asked_of_the_kernel_is_there() -> None:
    assert f"\nread_bytes: {num_bytes_read(os.getpid())}\n" in Path("/proc/self/io").read_text()
    assert num_bytes_read(2**22 + 1) == 0  # no process has such a high pid
    assert not is_stopped(os.getpid())
    assert os.getpid() in descendants(os.getppid())
    assert list(workers_that_dump_stacks(os.getpid())) == []
    assert out_of_memory_kills() >= 0


def test_a_process_may_have_a_name_that_is_no_text() -> None:
    code = "open('/proc/self/comm', 'wb').write(b'\\xff\\xfe'); print('named', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as named:
        assert named.stdout is not None
        assert named.stdout.readline() == b"named\n"
        assert b"\xff\xfe" in Path(f"/proc/{named.pid}/stat").read_bytes()
        assert named.pid in descendants(os.getpid())
        assert not is_stopped(named.pid)
        named.communicate(b"\n")
