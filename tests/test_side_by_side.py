"""`bench/side_by_side.py`: which of several jobs run, in which order, and what it keeps of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "bench" / "side_by_side.py"
JOBS = """
first: {command: "echo first {word} >> {out}/order", gib: 1}
alone: {command: "test $(ls {out}/*.now 2>/dev/null | wc -l) = 0; echo alone >> {out}/order", alone: true}
left: {command: "touch {out}/left.now; until test -e {out}/right.now; do sleep 0.05; done", gib: 3, limit_s: 100}
right: {command: "touch {out}/right.now; until test -e {out}/left.now; do sleep 0.05; done", gib: 3, limit_s: 100}
broken: {command: "echo why; exit 3", gib: 1}
behind: {command: "echo never", gib: 1, after: [broken]}
slow: {command: "sleep 600", gib: 1, limit_s: 0.5}
large: {command: "echo never", gib: 9}
"""


def run(folder: Path, *options: str) -> tuple[int, dict[str, dict[str, object]]]:
    paths = [str(SCRIPT), str(folder / "jobs.yaml"), "--out", str(folder / "out")]
    command = [sys.executable, *paths, "--gib", "8", "--set", "word=here", *options]
    status = subprocess.run(command, capture_output=True, text=True).returncode
    rows = json.loads((folder / "out" / "state.json").read_text())
    return status, {row["name"]: row for row in rows}


def test_jobs_run_side_by_side_as_far_as_memory_goes(tmp_path: Path) -> None:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    status, jobs = run(tmp_path)
    assert status == 1
    assert {name: job["state"] for name, job in jobs.items()} == {
        **dict.fromkeys(["first", "alone", "left", "right"], "done"),  # `left` and `right` wait for each other
        **dict.fromkeys(["broken", "slow"], "failed"),
        **dict.fromkeys(["behind", "large"], "skipped"),
    }
    assert jobs["broken"]["note"] == "status 3"
    assert jobs["behind"]["note"] == "broken did not succeed"
    assert jobs["slow"]["note"] == "ended after its limit of 0.5 s"
    assert jobs["large"]["note"] == "it takes 9 GiB of 8"
    assert (tmp_path / "out" / "broken.log").read_text() == "why\n"
    assert (tmp_path / "out" / "order").read_text() == "first here\nalone\n"

    (tmp_path / "jobs.yaml").write_text(JOBS.replace("exit 3", "exit 0").replace("sleep 600", "true"))
    for name in ("broken", "behind"):  # what this call is not asked for keeps its state
        status, jobs = run(tmp_path, "--only", name)
        assert (status, jobs[name]["state"], jobs["first"]["state"]) == (0, "done", "done")
    status, jobs = run(tmp_path)
    assert status == 1  # one job is too large
    assert jobs["slow"]["state"] == "done"
    assert jobs["behind"]["note"] == jobs["first"]["note"] == "in an earlier call"
    assert (tmp_path / "out" / "order").read_text() == "first here\nalone\n"


def test_mps_runs_for_the_jobs_that_are_not_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs.yaml").write_text(
        "alone: {command: 'echo of $CUDA_MPS_PIPE_DIRECTORY none', alone: true}\n"
        "shared: {command: 'cat $CUDA_MPS_PIPE_DIRECTORY/said', gib: 1}\n"
    )
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    control.parent.mkdir()
    control.write_text(
        f'#!/bin/sh\necho "$1" >> "$CUDA_MPS_PIPE_DIRECTORY/said"\n[ -n "$1" ] || cat > {tmp_path}/ended\n'
    )
    control.chmod(0o755)
    monkeypatch.setenv("PATH", f"{control.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert run(tmp_path, "--mps")[0] == 0
    assert [(tmp_path / "out" / f"{name}.log").read_text() for name in ("alone", "shared")] == ["of none\n", "-d\n"]
    assert (tmp_path / "ended").read_text() == "quit\n"
