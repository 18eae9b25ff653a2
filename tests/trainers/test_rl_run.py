"""The supervised control runs imitate the demonstrations that they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.cli.main import main
from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.data.tasks.registry import make_demonstrations
from burnish.run.metrics import read_metrics
from burnish.trainers.rl_run import check_controls, control_data

RECIPE = Path(__file__).parents[2] / "recipes" / "sort_digits.yaml"


def is_right(row: dict[str, str]) -> bool:
    return row["completion"] == "".join(sorted(row["prompt"].rstrip(">")))


def test_one_has_more_of_the_same_and_the_other_the_right_ones_of_the_runs_own() -> None:
    own = make_demonstrations("sort_digits", {"num": 300}, seed=5)
    more, right = control_data(Source(task="sort_digits", options={"num": 300}), seed=5).values()
    assert more[:300] == own
    assert len(more) == 3000
    assert right == [row for row in own if is_right(row)]
    assert 0 < len(right) < 300


def test_controls_need_a_warm_start_on_a_task() -> None:
    config = load(TrainConfig, RECIPE, ["warm_start=null"]).config
    with pytest.raises(UserError, match="needs a warm_start on one task"):
        check_controls(config)


def test_controls_are_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "model.new.hidden_size=16", "model.new.num_layers=1", "model.new.mlp_size=16", "model.device=cpu", "training.steps=1",
        "rollout.prompts=2", "rollout.n=2", "validation.limit=10", "warm_start.updates=2", "warm_start.data.0.options.num=20",
        f"run.directory={tmp_path}", "run.name=run", "run.threads=1",
    ]  # fmt: skip
    assert main(["train", str(RECIPE), "--controls", *small]) == 0
    printed = capsys.readouterr().out
    assert "control, SFT on 10x the demonstrations: greedy" in printed
    assert "control, SFT on the demonstrations that are right: greedy" in printed
    results = json.loads((tmp_path / "run" / "controls.json").read_text())
    assert all("validation/greedy/accuracy" in values for values in results.values())
    assert len(list((tmp_path / "run" / "samples").glob("control-*"))) == 4


def test_an_engine_with_8_bit_copies_samples_from_the_weights_of_the_warm_start(tmp_path: Path) -> None:
    small = [
        "model.new.hidden_size=32", "model.new.num_layers=1", "model.new.mlp_size=32", "model.device=cpu", "training.steps=1", "algorithm.filters=[]",
        "rollout.prompts=4", "rollout.n=8", "validation.limit=4", "warm_start.updates=60", "warm_start.optimizer.lr=0.01",
        "rollout.weights=fp8", f"run.directory={tmp_path}", "run.name=run", "run.threads=1",
    ]  # fmt: skip
    assert main(["train", str(RECIPE), *small]) == 0
    (row,) = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["step"] == 1]
    assert row["mismatch/mean"] < 0.2
