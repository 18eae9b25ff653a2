"""Corrections in runs whose sampler has a known fault: measuring changes nothing, and a budget finds its rung or stops."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from burnish.algorithms.correction.budget import BudgetState, MismatchBudget, first_rung_within_budget
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.run.metrics import read_metrics
from burnish.trainers import mismatch
from tests.trainers.sorter import SORTING
from tests.trainers.tiny import run_of

BUDGET = "algorithm.correction={budget: {k3_kl: 1.0e-3, ess: 0.9}}"
STRENGTHS = {0.0: 0, 0.005: 0, 0.05: 1, 0.07: 1, 0.3: 6}
"""Sizes of the noise in the sampler's weights, and the rung of the ladder that holds the budget there."""


def run(folder: Path, sorter: Path, *overrides: str) -> Path:
    folder.mkdir(exist_ok=True)
    return run_of(folder, f"model: {{path: {sorter}}}\n{SORTING}", list(overrides))


def test_measuring_alone_leaves_every_weight_of_a_run_bit_for_bit(sorter: Path, tmp_path: Path) -> None:
    fault = "rollout.mismatch={name: noise, scale: 0.05}"
    ends = []
    for number, correction in enumerate(("none", "{name: seed, apply: false}", "{name: decoupled}")):
        done = run(tmp_path / str(number), sorter, fault, "training.steps=3", f"algorithm.correction={correction}")
        ends.append(load_file(done / "checkpoints" / "step-000003" / "model.safetensors"))
        (last,) = read_metrics(done / "metrics.jsonl")[-1:]
        assert last["rollout_corr/k3_kl" if "decoupled" in correction else "mismatch/mismatch_k3_kl"] > 0
    start = load_file(sorter / "model.safetensors")
    assert any(not torch.equal(start[name], weight) for name, weight in ends[0].items())
    for other in ends[1:]:
        assert all(torch.equal(weight, other[name]) for name, weight in ends[0].items())


@pytest.mark.parametrize("scale", STRENGTHS)
def test_a_budget_settles_on_the_rung_of_exhaustive_search(
    sorter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    picked: list[int] = []
    choose = mismatch.budget_correction

    def and_search(batch: Batch, state: BudgetState | None, *, k3_kl: float | None, ess: float | None) -> object:
        picked.append(first_rung_within_budget(batch, MismatchBudget(k3_kl, ess)))
        return choose(batch, state, k3_kl=k3_kl, ess=ess)

    monkeypatch.setattr(mismatch, "budget_correction", and_search)
    done = run(tmp_path, sorter, f"rollout.mismatch={{name: noise, scale: {scale}}}", BUDGET)
    taken = [row["rollout_corr/budget_rung"] for row in read_metrics(done / "metrics.jsonl")]
    assert picked == [STRENGTHS[scale]] * 6
    assert taken == picked


@pytest.mark.parametrize(
    ("fault", "step", "cause"),
    [
        ("{name: temperature, factor: 3}", 1, "a wrong temperature"),
        ("never_loaded", None, "weights never arrived"),
        ("{name: stale, steps: 3}", None, "stale weights"),
    ],
)
def test_a_budget_that_nothing_holds_stops_the_run_with_the_cause(
    sorter: Path, tmp_path: Path, fault: str, step: int | None, cause: str
) -> None:
    words = rf"step {step or '[2-6]'}: no correction holds correction.budget: .*; likely cause: {cause}.*; try: "
    with pytest.raises(UserError, match=words):
        run(tmp_path, sorter, f"rollout.mismatch={fault}", BUDGET, "training.optimizer.lr=1e-2")


# --- Correction rescues training: one cell of the sweep in `bench/mismatch.py` -------------------------------------------

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
