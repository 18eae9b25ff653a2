"""The mismatch example trains twice from one start and draws what became of both runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

SCRIPT = Path(__file__).parents[2] / "examples" / "mismatch" / "run.py"
SMALL = ("warm_start.updates=2", "training.steps=2", "rollout.prompts=4", "validation.limit=20")


def test_two_steps_of_both_runs_are_drawn(tmp_path: Path) -> None:
    chart = tmp_path / "mismatch.svg"
    command = [sys.executable, str(SCRIPT), "--chart", str(chart), "--correction", "sequence_mis", *SMALL]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line for line in said.splitlines() if "->" in line]
    names, before = zip(*[line.removesuffix(line[line.index(" -> ") :]).split(": ") for line in lines], strict=True)
    assert names == ("correction none", "correction sequence_mis")
    assert len(set(before)) == 1, "both runs start from the same weights"
    texts = {text.strip() for text in ElementTree.parse(chart).getroot().itertext()}
    assert {"no correction", "sequence MIS", "step"} <= texts
