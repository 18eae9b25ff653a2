"""A process's own age: from its start, not from the import of our module."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.run.supervisor import liveness

LATE = "import time; time.sleep(0.5); from burnish.run.supervisor.liveness import process_seconds; print(process_seconds())"


def test_the_time_before_the_import_counts() -> None:
    started = time.monotonic()
    told = float(
        subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=True, timeout=120).stdout
    )
    assert 0.45 <= told <= time.monotonic() - started + 0.1  # the system counts in hundredths of a second


def test_without_proc_it_counts_from_the_import(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(liveness, "STAT", tmp_path / "absent")
    first = liveness.process_seconds()
    assert 0 <= first <= liveness.process_seconds() <= time.monotonic() - liveness.IMPORTED
