"""Trackers run beside the run: they get everything, and one that fails, hangs or dies neither ends nor slows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from burnish.config.errors import UserError
from burnish.config.trackers import TrackerSlot, Wandb
from burnish.run.samples import write_samples
from burnish.run.trackers import tracker_process
from burnish.run.trackers.backends import has_wandb_key, mlflow_name
from burnish.run.trackers.tracker_process import Trackers, check_trackers


class Recorder(TrackerSlot):
    """The section of a tracker of tests/run/tracker_backends.py; a class has the name of its backend."""

    name: str = "recorder"
    module: ClassVar[str] = "json"  # always installed


class Fails(Recorder): ...


class NeverBegins(Recorder): ...


class Hangs(Recorder): ...


class Dies(Recorder): ...


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_process, "BACKENDS", "tests.run.tracker_backends")
    for name in ("FLUSH_S", "QUIET_S"):  # a slow machine must not decide
        monkeypatch.setattr(tracker_process, name, 600.0)


def recorded(run: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (run / "recorded.jsonl").read_text().splitlines()]


def test_a_tracker_gets_config_metrics_samples_and_report(tmp_path: Path) -> None:
    said: list[str] = []
    rows = [{"prompt": f"p{i}", "completion": "c", "reward": i / 2} for i in range(10)]
    trackers = Trackers([Recorder(sample_rows=5)], tmp_path, {"seed": 1}, said.append)
    trackers.log(1, {"x": 0.1, "bad": float("nan")})
    trackers.samples(1, "train", write_samples(tmp_path / "samples", 1, "train", rows))
    (tmp_path / "report.html").write_text("<html>")
    trackers.attach_report(tmp_path / "report.html")
    trackers.close(is_failed=False)
    trackers.close(is_failed=True)  # a second call does nothing
    begin, log, table, report, close = recorded(tmp_path)
    assert begin[2] == {"seed": 1}
    assert log[:2] == ["log", 1]
    assert log[2]["x"] == 0.1
    assert log[2]["bad"] != log[2]["bad"]
    assert [row[4] for row in table[3]] == ["p0", "p2", "p4", "p6", "p8"]
    assert [report, close] == [["report", "report.html"], ["close", False]]
    assert said == ["tracker recorder: 1 step, recorded.jsonl"]


def test_a_resumed_run_continues_the_same_tracker_run_after_the_steps_that_it_has(tmp_path: Path) -> None:
    for steps in ((1, 2, 3), (2, 3, 4)):  # steps 2 and 3 are repeated from the checkpoint of step 1
        trackers = Trackers([Recorder()], tmp_path, {}, print)
        for step in steps:
            trackers.log(step, {})
        trackers.close(is_failed=False)
    lines = recorded(tmp_path)
    ids = {line[1] for line in lines if line[0] == "begin"}
    assert len(ids) == 1
    assert json.loads((tmp_path / "trackers" / "recorder.json").read_text()) == {"id": ids.pop(), "last_step": 4}
    assert [line[1] for line in lines if line[0] == "log"] == [1, 2, 3, 4]


def test_failures_are_reported_once_counted_and_named_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    trackers = Trackers([Fails()], tmp_path, {}, said.append)
    for step in range(20):
        trackers.log(step, {})
    trackers.close(is_failed=False)
    first, given_up, summary = said
    assert first.startswith("tracker recorder failed (ConnectionError: no route in step 2); the run goes on")
    assert given_up == "recorder: given up after 5 failures in a row"
    assert (
        "tracker recorder: 8 steps, recorded.jsonl; 7 calls failed, first: ConnectionError: no route in step 2"
        in summary
    )
    assert [line[1] for line in recorded(tmp_path) if line[0] == "log"] == [0, 1, 3, 5, 6, 7, 8, 9]
    assert "ConnectionError: no route in step 4" in (tmp_path / "trackers" / "recorder.log").read_text()


def test_a_tracker_that_cannot_begin_is_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    trackers = Trackers([NeverBegins()], tmp_path, {}, said.append)
    for step in range(3):
        trackers.log(step, {})
    trackers.close(is_failed=False)
    assert "PermissionError: no such account" in said[0]
    assert "0 steps" in said[-1]


def test_a_tracker_that_hangs_drops_what_does_not_fit_and_is_killed_at_the_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tracker_process, "QUEUE_SIZE", 5)
    monkeypatch.setattr(tracker_process, "FLUSH_S", 0.2)
    said: list[str] = []
    trackers = Trackers([Hangs()], tmp_path, {}, said.append)
    (process,) = trackers.processes
    for step in range(60):  # more than the queue and the pipe hold; the calls return although no process reads them
        trackers.log(step, {f"metric/{k}": k / 3 for k in range(300)})
    trackers.close(is_failed=False)
    assert process.num_dropped > 20
    assert said[0] == "waiting up to 0 s for recorder to send what is left"
    assert (
        f"{process.num_dropped} entries dropped, because it was 5 behind; it did not finish within 0 s and was killed"
        in said[1]
    )
    assert process._process.returncode == -signal.SIGKILL


def test_a_tracker_whose_process_dies_is_named_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    trackers = Trackers([Dies()], tmp_path, {}, said.append)
    for step in range(3):
        trackers.log(step, {})
    trackers.close(is_failed=False)
    assert "its process ended with status 7" in said[-1]


def test_a_killed_run_leaves_no_process_and_the_tracker_keeps_what_arrived(tmp_path: Path) -> None:
    code = f"""
import os, signal, time
from pathlib import Path
from burnish.run.trackers import tracker_process
from tests.run.test_trackers import Recorder
tracker_process.BACKENDS = "tests.run.tracker_backends"
trackers = tracker_process.Trackers([Recorder()], Path({str(tmp_path)!r}), {{}}, print)
trackers.log(1, {{"x": 1.0}})
while not trackers.processes[0].steps_sent:
    time.sleep(0.01)
print(trackers.processes[0]._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root}
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    for _ in range(5000):
        if not Path(f"/proc/{done.stdout.strip()}").exists() or recorded(tmp_path)[-1] == ["close", True]:
            break
        time.sleep(0.02)
    assert recorded(tmp_path)[-1] == ["close", True]


def test_a_package_that_is_missing_or_named_twice_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        UserError, match=r"run\.trackers names wandb, which is not installed: pip install 'burnish\[wandb\]'"
    ):
        check_trackers([Wandb()])
    with pytest.raises(UserError, match="names recorder twice"):
        check_trackers([Recorder(), Recorder()])


def test_names_of_metrics_do_not_collide_as_files_of_mlflow() -> None:
    assert mlflow_name("validation/greedy/accuracy") == "validation/greedy.accuracy"
    assert mlflow_name("validation/greedy/accuracy/length=3") == "validation/greedy.accuracy.length_3"


def test_wandb_is_online_only_with_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
