"""The page docs/python.md and the notebook run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import burnish

ROOT = Path(__file__).parents[2]
IN_CELLS = """
from dataclasses import dataclass

from burnish import End, Environment, Observation

@dataclass
class Payment:
    amount: float = 0.25

class OneTurn(Environment):
    takes_truncated = True

    async def start(self, episode):
        return Observation()

    async def step(self, answer):
        return End(Payment().amount)

def make(bonus):
    def closure(completions, **columns):
        return [bonus for _ in completions]
    return closure

tiny = {"new": {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "mlp_size": 24}}
quick = {"model": tiny, "data": "task:sort_digits", "rollout": {"prompts": 2, "n": 2, "max_tokens": 3}}
game = burnish.train(environment={"name": OneTurn, "workers": 1}, steps=1, name="game", **quick)
assert game.metrics.column("reward/mean") == [0.25]
pickled = burnish.train(reward=make(0.5), steps=1, name="pickled", **quick)
assert pickled.metrics.column("reward/mean") == [0.5]
try:
    burnish.train(reward="nothing", name="refused", **quick)
except burnish.UserError as error:
    print(error._render_traceback_())
"""
INTERRUPTED = """
import os, signal

def interrupt(metrics):
    if metrics["step"] == 2:
        os.kill(os.getpid(), signal.SIGINT)  # what the interrupt button does

stopped = burnish.train(reward="task", steps=500, callback=interrupt, **quick)
assert (stopped.status, stopped.name) == ("stopped", "notebook-train-0"), stopped
assert len(stopped.metrics) < 500
"""


def test_every_block_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 5
    (tmp_path / "page.py").write_text("\n\n".join(blocks))
    done = subprocess.run([sys.executable, "page.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first = burnish.Run(tmp_path / "runs" / "page-train-0")
    assert first.metrics.column("reward/mean")[-1] > 0.9
    assert "locked cannot be sent to worker processes: locked uses lock, a _thread.lock" in done.stdout
    assert len([line for line in blocks[0].splitlines() if line]) <= 10


def test_the_notebook_runs_in_a_kernel_where_an_interrupt_stops_a_run(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="nbclient and ipykernel are in the extra [dev]")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in (IN_CELLS, INTERRUPTED)]
    client = nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises for a cell that fails
    shown = [out for cell in notebook.cells for out in cell.get("outputs", []) if out.output_type == "display_data"]
    panels = [out.data["text/plain"] for out in shown]
    assert any("40/40" in text and "reward 1.000" in text for text in panels), (
        panels
    )  # updated in place to its last state
    assert len(panels) == 5  # one for each run
    assert burnish.Run(tmp_path / "runs" / "sevens").status == "complete"
