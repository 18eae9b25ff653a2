"""`burnish reward-model`: output, the saved model, resuming after a kill, and the effect of each option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.cli.main import main
from burnish.config.model import Model, NewModel
from burnish.data.tasks.registry import make_preferences
from burnish.models.policy import load_policy
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from tests.cli.crashing_runs import killed_after

RECIPE = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
reward_model:
  data: {task: sort_digits, options: {num: 48}}
  held_out: {task: sort_digits, options: {num: 16}}
  held_out_every: 2
  updates: 7
  batch_size: 8
  optimizer: {lr: 1.0e-2, warmup: 2, schedule: linear}
run: {directory: runs, save_every: 3}
"""
LAST = "checkpoints/step-000007"


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)


def train(*overrides: str) -> Path:
    assert main(["reward-model", "tiny.yaml", *overrides]) == 0
    folder = next((o.removeprefix("run.directory=") for o in overrides if o.startswith("run.directory=")), "runs")
    return Path(folder, "tiny-0")


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in read_metrics(path)]


def test_a_run_leaves_metrics_and_a_scorer_that_transformers_loads(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    run = train()
    rows = read_metrics(run / "metrics.jsonl")
    assert [r["step"] for r in rows] == list(range(8))
    # Before the first update, every second one, with the checkpoints at 3 and 6, and at the end.
    assert [r["step"] for r in rows if "validation/pairs/accuracy" in r] == [0, 2, 3, 4, 6, 7]
    assert rows[-1]["validation/pairs/loss"] < rows[0]["validation/pairs/loss"]
    held = {name: rows[-1][f"validation/pairs/{name}"] for name in ("accuracy", "margin", "score_mean", "score_std")}
    out = capsys.readouterr().out
    assert f"held-out pairs: {held['accuracy']:.1%} of 16 in the right order, margin {held['margin']:.3f}" in out
    assert f"model: runs/tiny-0/{LAST}" in out
    statistics = json.loads((run / LAST / "scores.json").read_text())
    assert statistics["mean"] == held["score_mean"]
    assert statistics["std"] == held["score_std"]

    theirs: Any = AutoModelForSequenceClassification.from_pretrained(run / LAST, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run / LAST)
    scores = []
    for pair in make_preferences("sort_digits", {"num": 16}, 0, "test"):
        for answer in (pair["chosen"], pair["rejected"]):
            tokens = [tokenizer.convert_tokens_to_ids(c) for c in pair["prompt"] + answer] + [tokenizer.eos_token_id]
            scores.append(float(theirs(torch.tensor([tokens])).logits.detach()))
    assert sum(scores) / len(scores) == pytest.approx(held["score_mean"], abs=1e-5)
    right = [chosen > rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]
    assert sum(right) / len(right) == held["accuracy"]
    assert main(["reward-model", "tiny.yaml"]) == 0
    assert "is complete: all 7 updates are done" in capsys.readouterr().out


@pytest.mark.parametrize("kill_after", [1, 5])
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(kill_after: int) -> None:
    whole = train("run.directory=whole")
    with killed_after(kill_after):
        main(["reward-model", "tiny.yaml", "run.directory=broken"])
    broken = train("run.directory=broken")
    assert without_times(whole / "metrics.jsonl") == without_times(broken / "metrics.jsonl")
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = load_file(whole / LAST / name), load_file(broken / LAST / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert "sort_digits/" in next((whole / "journal").iterdir()).read_text()  # which pairs each update used


def final_loss(*overrides: str) -> float:
    run = train(*overrides, "reward_model.updates=3", f"run.directory=other{abs(hash(overrides))}")
    return float(read_metrics(run / "metrics.jsonl")[-1]["reward_model/loss"])


def test_every_option_of_the_loss_changes_it() -> None:
    plain = final_loss()
    assert final_loss("reward_model.margin=0.5") != plain
    assert final_loss("reward_model.centre=0.5") != plain
    assert final_loss("reward_model.batch_size=4") != plain
    assert final_loss("seed=0") == plain


def test_the_margin_of_a_row_counts() -> None:
    rows = [{"prompt": "21>", "chosen": "12", "rejected": "21"}, {"prompt": "31>", "chosen": "13", "rejected": "3"}]
    for name, margin in (("with", 2.0), ("without", None)):
        text = "".join(json.dumps(row | ({"margin": margin} if margin else {})) + "\n" for row in rows)
        Path(f"{name}.jsonl").write_text(text)
    common = ["model.new=null", "model.path=policy", "reward_model.held_out=[]", "reward_model.held_out_every=0"]
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=32)
    Path("policy").mkdir()
    load_policy(Model(new=new, device="cpu"), None, "0123456789>", seed=4).save(Path("policy"))
    losses = []
    for name in ("with", "without"):
        data = f"reward_model.data=[{{path: {name}.jsonl}}]"
        run = train(*common, data, "reward_model.updates=1", f"run.directory={name}")
        losses.append(read_metrics(run / "metrics.jsonl")[0]["reward_model/loss"])
        assert not (run / "checkpoints/step-000001/scores.json").exists()
    assert losses[0] > losses[1] + 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward_model.data=[]", "no data: give reward_model.data"),
        ("model.backend=transformers", "needs the native decoder"),
        ("reward_model.held_out=[]", "held_out_every has no effect without reward_model.held_out"),
    ],
)
def test_what_makes_no_sense_is_refused(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-model", "tiny.yaml", override]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_a_dry_run_and_a_shrunk_one(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[2] / "recipes/reward_model.yaml"
    assert main(["reward-model", str(recipe), "--dry-run"]) == 0
    assert "300 updates of 128 pairs" in capsys.readouterr().out
    assert main(["reward-model", str(recipe), "--shrink", "run.directory=small"]) == 0
    assert "held-out pairs:" in capsys.readouterr().out
