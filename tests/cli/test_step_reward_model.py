"""`burnish reward-model` on values of steps: it learns, its values come back through the reward part, it resumes, and its delimiter stays."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.model import Model, NewModel
from burnish.models.answer_steps import stored_delimiter
from burnish.models.policy import load_policy
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.reward_parts import RewardModelOptions
from burnish.rewards.score_types import PartResult, ScoreRequest
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.training.reward_scorer import ModelScorer
from tests.cli.crashing_runs import killed_after

RECIPE = """
model: {path: base, device: cpu}
reward_model:
  steps: {delimiter: ";"}
  data: {path: rows.jsonl}
  held_out: {path: held_out.jsonl}
  updates: 60
  batch_size: 32
  optimizer: {lr: 1.0e-2, warmup: 5}
run: {directory: runs, save_every: 60}
"""
RIGHT, WRONG = 0.8, 0.1
"""The value of a step before and after the first `x`."""


def toy_rows(num: int, seed: int) -> list[dict[str, Any]]:
    """Answers of two to four steps. From a step with an `x` on they are hardly ever right."""
    dice, rows = random.Random(seed), []
    for _ in range(num):
        steps = ["".join(dice.choice("abcx" if dice.random() < 0.2 else "abc") for _ in range(3)) for _ in range(4)]
        steps = steps[: dice.randint(2, 4)]
        values = [WRONG if "x" in "".join(steps[: i + 1]) else RIGHT for i in range(len(steps))]
        rows.append({"prompt": "p>", "steps": steps, "values": values, "counts": [10] * len(steps)})
    return rows


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(RECIPE)
    for name, num, seed in (("rows", 400, 0), ("held_out", 40, 1)):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy_rows(num, seed)))
    Path("base").mkdir()
    new = NewModel(hidden_size=32, num_layers=2, num_heads=2, mlp_size=64, max_positions=32)
    load_policy(Model(new=new, device="cpu"), None, "abcxp>;", seed=4).save(Path("base"))


def train(*overrides: str, name: str = "tiny-0") -> Path:
    assert main(["reward-model", "tiny.yaml", *overrides]) == 0
    return Path("runs", name)


def chances(directory: Path, rows: list[dict[str, Any]], **options: Any) -> list[list[float]]:
    """The probabilities of the steps of rows, as the reward part `model` reads them from a policy's tokens."""
    tokenizer = Tokenizer.load("base")
    made = RewardModelOptions.of({"path": str(directory), "device": "cpu", "aggregate": "each", **options}, "here")
    requests = []
    for index, row in enumerate(rows):
        prompt, answer = (
            tokenizer.encode(row["prompt"]),
            [*tokenizer.encode(";".join(row["steps"])), tokenizer.eos_ids[0]],
        )
        written = [False] * len(prompt) + [True] * len(answer)
        text = ";".join(row["steps"])
        requests.append(
            ScoreRequest(f"{index:03}", row["prompt"], text, "toy", None, {}, tokens=prompt + answer, written=written)
        )
    found = ModelScorer(directory, made, tokenizer)(requests)
    return [[value for _, value in one.steps] for one in found if isinstance(one, PartResult)]


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MACHINE_PREFIXES)} for row in read_metrics(path)]


def test_it_learns_the_values_and_the_reward_part_reads_them(capsys: pytest.CaptureFixture[str]) -> None:
    run = train()
    first, last = (read_metrics(run / "metrics.jsonl")[i] for i in (0, -1))
    figures = {
        name: last[f"validation/steps/{name}"] for name in ("accuracy", "ranking", "first_error", "no_error", "f1")
    }
    assert min(figures.values()) >= 0.95, figures
    assert last["validation/steps/loss"] < 0.9 * first["validation/steps/loss"]
    assert last["validation/steps/predicted"] == pytest.approx(last["validation/steps/value"], abs=0.05)
    out = capsys.readouterr().out
    assert "held-out steps: " in out
    assert f"{figures['first_error']:.1%} of first errors found" in out

    checkpoint = run / "checkpoints/step-000060"
    rows = toy_rows(40, 1)
    read = chances(checkpoint, rows)  # no delimiter: the directory names it
    assert [len(one) for one in read] == [len(row["steps"]) for row in rows]
    flat = [value for one in read for value in one]
    wanted = [value for row in rows for value in row["values"]]
    assert max(abs(a - b) for a, b in zip(flat, wanted, strict=True)) < 0.15
    # Exactly what the run measured: the same positions of the same tokens.
    assert sum(flat) / len(flat) == pytest.approx(last["validation/steps/predicted"], abs=1e-6)
    assert chances(checkpoint, rows, delimiter=";") == read
    with pytest.raises(UserError, match="trained to score steps that end with ';', and delimiter is 'a'"):
        chances(checkpoint, rows, delimiter="a")


@pytest.mark.parametrize("kill_after", [1, 5])
def test_a_killed_run_goes_on_as_if_it_had_never_stopped(kill_after: int) -> None:
    short = ["reward_model.updates=7", "run.save_every=3"]
    whole = train(*short, "run.name=whole", name="whole")
    with killed_after(kill_after):
        main(["reward-model", "tiny.yaml", *short, "run.name=broken"])
    broken = train(*short, "run.name=broken", name="broken")
    assert without_times(whole / "metrics.jsonl") == without_times(broken / "metrics.jsonl")
    one, other = (load_file(run / "checkpoints/step-000007/model.safetensors") for run in (whole, broken))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert "rows.jsonl/" in next((whole / "journal").iterdir()).read_text()


def test_adapters_keep_their_delimiter_when_they_are_merged() -> None:
    run = train("model.lora.rank=4", "reward_model.updates=3")
    assert main(["export", str(run), "merged", "--merged"]) == 0
    rows = toy_rows(3, 2)
    assert stored_delimiter(Path("merged")) == ";"
    (adapted, merged) = (chances(path, rows) for path in (run / "checkpoints/step-000003", Path("merged")))
    assert [value for one in merged for value in one] == pytest.approx(
        [value for one in adapted for value in one], abs=1e-5
    )


def test_every_option_of_steps_changes_the_loss() -> None:
    rows = [{"prompt": "p>", "steps": ["a", "b"], "ratings": [1, 0]}]
    rows += [{"input": f"p> Step 1: a{tag} b{tag}", "label": "p> Step 1: a+ b-"} for tag in ";c"]
    for name, row in zip(("rated", "semicolon", "letter"), rows, strict=True):
        Path(f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    Path("wide").mkdir()
    new = NewModel(hidden_size=32, num_layers=1, num_heads=2, mlp_size=64, max_positions=32)
    load_policy(Model(new=new, device="cpu"), None, "abcxp>; Ste1:", seed=4).save(Path("wide"))

    def loss(data: str, steps: str) -> float:
        name = f"{data}-{abs(hash(steps))}"
        source = [f"reward_model.data=[{{path: {data}.jsonl}}]", f"reward_model.steps={steps}", f"run.name={name}"]
        run = train(*source, "reward_model.held_out=[]", "reward_model.updates=1", "model.path=wide", name=name)
        return float(read_metrics(run / "metrics.jsonl")[0]["reward_model/loss"])

    rated = [
        loss("rated", text)
        for text in ("{delimiter: x}", "{delimiter: x, neutral: 0}", "{delimiter: x, neutral: null}")
    ]
    assert len(set(rated)) == 3
    assert loss("rated", "{delimiter: ;}") != rated[0]
    assert loss("semicolon", "{delimiter: x, tag: ;}") == loss("letter", "{delimiter: x, tag: c}")
    arguments = ["reward_model.steps={delimiter: x}", "reward_model.data=[{path: letter.jsonl}]", "model.path=wide"]
    assert main(["reward-model", "tiny.yaml", *arguments]) == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("reward_model.margin=0.5", "margin has no effect with reward_model.steps"),
        ("reward_model.centre=0.5", "centre has no effect with reward_model.steps"),
        ("run.best_by=validation/pairs/accuracy", "no such metric"),
        ("reward_model.steps.delimiter=b", "rows.jsonl:1: step 1 contains the delimiter 'b'"),
    ],
)
def test_what_cannot_be_is_refused(override: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward-model", "tiny.yaml", override]) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs").exists()


def test_the_flag_is_the_section_with_its_defaults_and_keeps_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = Path(__file__).parents[2] / "recipes/step_reward_model.yaml"
    assert main(["reward-model", str(recipe), "--steps", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "300 updates of 128 answers (at most 4,096 tokens)" in out
    assert "data: 8,000 answers" in out
    assert main(["reward-model", str(recipe), "--steps", "--shrink"]) == 0
    assert "held-out steps:" in capsys.readouterr().out
    assert stored_delimiter(Path("runs/step_reward_model-shrunk-0/checkpoints/step-000002")) == ">"
    pairs = Path("pairs.yaml")
    pairs.write_text("reward_model: {data: {task: sort_digits}}\nmodel: {new: {}}\n")
    assert main(["reward-model", str(pairs), "--steps", "--shrink"]) == 0
    assert "answers with values of steps" in capsys.readouterr().out
    assert stored_delimiter(Path("runs/pairs-shrunk-0/checkpoints/step-000002")) == "\n\n"
