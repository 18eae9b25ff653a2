"""Correction rescues training: one cell of the sweep in `bench/mismatch.py`, whose figure is in the docs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "mismatch.py"


@pytest.mark.slow
def test_a_stale_sampler_ruins_plain_grpo_and_neither_corrected_run(tmp_path: Path) -> None:
    out = tmp_path / "mismatch.json"
    cell = ["--faults", "stale", "--strengths", "16", "--seeds", "0"]
    subprocess.run([sys.executable, str(BENCH), *cell, "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
    rows = {
        row["correction"] if row["fault"] == "stale" else "matched": row for row in json.loads(out.read_text())["rows"]
    }
    (before,) = {row["before"] for row in rows.values()}
    matched = rows["matched"]["after"]
    assert matched >= 0.97
    assert rows["none"]["after"] <= matched - 0.2
    assert min(accuracy for _, accuracy, _ in rows["none"]["accuracy"]) < before / 2, "it collapses on the way"
    assert rows["token_tis"]["after"] >= matched - 0.03
    assert rows["sequence_mis"]["after"] >= matched - 0.03
