"""`burnish reward-model` with adapters: it learns, resumes after a kill, and saves a PEFT directory that can be used as a reward."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.cli.main import main
from burnish.config.model import Lora, Model, NewModel
from burnish.data.tasks.registry import make_preferences
from burnish.models.policy import load_policy
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.reward_parts import RewardModelOptions
from burnish.rewards.score_types import PartResult, ScoreRequest
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.training.reward_scorer import ModelScorer
from tests.cli.crashing_runs import killed_after

RECIPE = """
model: {path: base, device: cpu, lora: {rank: 4}}
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
WEIGHTS = ("adapter_model.safetensors", "optimizer.safetensors")


@pytest.fixture(autouse=True)
def _recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)
    new = NewModel(hidden_size=32, num_layers=2, num_heads=2, mlp_size=64, max_positions=64)
    Path("base").mkdir()
    load_policy(Model(new=new, device="cpu"), None, "0123456789>", seed=4).save(Path("base"))


def train(*overrides: str) -> Path:
    assert main(["reward-model", "tiny.yaml", *overrides]) == 0
    folder = next((o.removeprefix("run.directory=") for o in overrides if o.startswith("run.directory=")), "runs")
    return Path(folder, "tiny-0")


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in read_metrics(path)]


def scores(folder: Path) -> list[float]:
    """As the reward part `model` gives them, of the run's held-out pairs."""
    tokenizer = Tokenizer.load("base")
    scorer = ModelScorer(folder, RewardModelOptions(str(folder), device="cpu"), tokenizer)
    requests = []
    for index, pair in enumerate(make_preferences("sort_digits", {"num": 16}, 0, "test")):
        for kind in ("chosen", "rejected"):
            tokens = [*tokenizer.encode(pair["prompt"] + pair[kind]), tokenizer.eos_ids[0]]
            requests.append(ScoreRequest(f"{index}-{kind}", pair["prompt"], pair[kind], "it", "", {}, tokens=tokens))
    found = scorer(requests)
    assert all(isinstance(one, PartResult) for one in found)
    return [one.value for one in found if isinstance(one, PartResult)]


@pytest.mark.parametrize("base", ["dtype", "nf4"])
def test_a_run_leaves_a_small_directory_that_is_a_reward(base: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(f"model.lora.base={base}")
    text = capsys.readouterr()
    assert "LoRA of rank 4 x 8 on all projections" in text.out + text.err
    held = json.loads((run / LAST / "scores.json").read_text())
    there = scores(run / LAST)
    assert sum(there) / len(there) == pytest.approx(held["mean"], abs=1e-5)
    right = [chosen > rejected for chosen, rejected in zip(there[::2], there[1::2], strict=True)]
    assert sum(right) / len(right) == held["accuracy"]
    assert not list((run / LAST).glob("model*.safetensors"))
    trained = sum(tensor.numel() for tensor in load_file(run / LAST / WEIGHTS[0]).values())
    assert trained == 2 * 4 * (8 * 32 + 3 * (32 + 64)) + 32

    assert main(["export", str(run), "merged", "--merged", "--step", "last"]) == 0
    assert json.loads(Path("merged/config.json").read_text())["architectures"] == ["LlamaForSequenceClassification"]
    assert scores(Path("merged")) == pytest.approx(there, abs=1e-5)
    assert json.loads(Path("merged/scores.json").read_text()) == held
    assert main(["export", str(run), "adapter", "--step", "last"]) == 0
    assert scores(Path("adapter")) == there


@pytest.mark.parametrize("base", ["dtype", "nf4"])
@pytest.mark.parametrize("kill_after", [1, 5])
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(kill_after: int, base: str) -> None:
    key = f"model.lora.base={base}"
    whole = train(key, "run.directory=whole")
    with killed_after(kill_after):
        main(["reward-model", "tiny.yaml", key, "run.directory=broken"])
    broken = train(key, "run.directory=broken")
    assert without_times(whole / "metrics.jsonl") == without_times(broken / "metrics.jsonl")
    for name in WEIGHTS:
        one, other = load_file(whole / LAST / name), load_file(broken / LAST / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def sums(start: int, num: int) -> str:
    """Pairs of two-digit answers of which the one with the larger sum of digits is better."""
    rows = []
    for k in range(start, start + num):
        answers = sorted((f"{k * 7 % 100:02d}", f"{k * 13 % 89:02d}"), key=lambda text: int(text[0]) + int(text[1]))
        if sum(map(int, answers[0])) < sum(map(int, answers[1])):
            rows.append(json.dumps({"prompt": f"{k % 10}>", "chosen": answers[1], "rejected": answers[0]}))
    return "\n".join(rows)


def test_pairs_are_learnt() -> None:
    """The layers are random and frozen: adapters and head do it."""
    Path("pairs.jsonl").write_text(sums(0, 600))
    Path("held_out.jsonl").write_text(sums(5000, 100))
    rows = read_metrics(
        train(
            "reward_model.data=[{path: pairs.jsonl}]", "reward_model.held_out=[{path: held_out.jsonl}]",
            "reward_model.updates=60", "reward_model.batch_size=32", "reward_model.held_out_every=0", "run.save_every=60",
        )
        / "metrics.jsonl"
    )  # fmt: skip
    assert rows[0]["validation/pairs/accuracy"] < 0.6
    assert rows[-1]["validation/pairs/accuracy"] > 0.8


def test_it_starts_from_the_adapter_of_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    policy = load_policy(Model(device="cpu", lora=Lora(rank=3, targets=["q_proj", "down_proj"])), Path("base"), None, 0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in policy.module.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    Path("sft").mkdir()
    policy.save(Path("sft"))
    new = train("model.lora={rank: 3, targets: [q_proj, down_proj]}", "run.directory=new")
    from_it = train("model.lora=null", "model.path=null", "model.adapter=sft", "run.directory=from_it")
    first = [read_metrics(run / "metrics.jsonl")[0]["validation/pairs/score_mean"] for run in (new, from_it)]
    assert abs(first[0] - first[1]) > 0.01
    config = json.loads((from_it / LAST / "adapter_config.json").read_text())
    assert (config["r"], config["target_modules"]) == (3, ["q_proj", "down_proj"])
    capsys.readouterr()
    again = ["model.lora=null", f"model.adapter={from_it / LAST}", "run.directory=again"]
    assert main(["reward-model", "tiny.yaml", *again]) == 2
    assert "is the adapter of a reward model" in capsys.readouterr().err
    assert not Path("again").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (["model.path=null", "model.new={}"], "model.lora adapts a trained model"),
        (["model.adapter=sft"], "its own rank and targets: remove model.lora"),
        (["model.backend=transformers"], "model.lora needs the native decoder"),
    ],
)
def test_what_makes_no_sense_is_refused(override: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-model", "tiny.yaml", *override]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()
