"""Runs that several tests look at, made once in a process with a Ray of its own; and how to read what they left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.samples import read_samples

ROOT = Path(__file__).parents[2]
ROOTS = ("mismatch/rollout_is_std", "mismatch/heat_fit", "mismatch/balance")
"""Quotients and roots of differences that are nothing but rounding here: they keep half of the digits."""


def made(factory: pytest.TempPathFactory, name: str, scenarios: list[str], deadline_s: float) -> Path:
    """Where the runs of some scenarios are; of several test processes one makes them, the others wait."""
    base = factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    path, done = base / name, base / f"{name}.txt"
    try:
        path.mkdir()
    except FileExistsError:
        until = time.monotonic() + deadline_s
        while not done.exists() and time.monotonic() < until:
            time.sleep(0.1)
    else:
        command = [sys.executable, "-m", "tests.distributed.scenarios", str(path), *scenarios]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=deadline_s, check=False
        )
        error = path / "error.txt"
        said = error.read_text() if error.exists() else ran.stdout[-2000:] + ran.stderr[-4000:]
        done.write_text("" if ran.returncode == 0 else said)
    assert done.read_text() == ""
    return path


def numbers(folder: Path, name: str) -> list[dict[str, float]]:
    """What a run computed in every step."""
    rows = read_metrics(folder / name / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in rows]


def samples(folder: Path, name: str) -> list[tuple[int, str, int, list[str]]]:
    """Every sample of every step, token by token."""
    rows = read_samples(folder / name / "samples")
    return [(row["step"], row["group"], row["sample"], row["pieces"]) for row in rows]


def assert_same(folder: Path, name: str, other: str, within: float) -> None:
    """That two runs drew the same tokens, and computed the same numbers."""
    found, expected = numbers(folder, name), numbers(folder, other)
    assert len(found) == len(expected)
    for row, wanted in zip(found, expected, strict=True):
        assert row.keys() == wanted.keys()
        for key, value in row.items():
            loose = max(within, 1e-7) if within < 1e-6 else within**0.5
            assert value == pytest.approx(wanted[key], abs=loose if key in ROOTS else within), (row["step"], key)
    assert samples(folder, name) == samples(folder, other)
