"""Reward functions of TRL, verl and OpenRLHF users in a whole run; every score is computed a second time here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.run import metrics
from burnish.run.samples import read_samples
from burnish.trainers.rl_run import checked_run, execute

USER_FILES = Path(__file__).with_name("user_files")
STEPS = 2
TRL_ROWS = [
    {"prompt": f"{k}>", "ground_truth": str(k % 10), "kind": "sum" if k % 2 else "other"} for k in range(10, 16)
]
VERL_ROWS = [
    {
        "data_source": "verl_rows",
        "prompt": [{"role": "user", "content": f"{k}>"}],
        "ability": "digits",
        "reward_model": {"style": "rule", "ground_truth": str(k % 10)},
        "extra_info": {"index": k, "answer": f"a long way to {k % 10}", "kind": "sum"},
    }
    for k in range(20, 26)
]
CONFIG = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, device: cpu}
data:
  train: [{path: trl_rows.jsonl}, {path: verl_rows.jsonl}]
  validation: {task: sort_digits, limit: 1}  # names the characters of the model
reward:
  workers: 1
  parts:
    - {name: 'trl_rewards.py:starts_with_digit', sources: [trl_rows.jsonl, verl_rows]}
    - {name: 'trl_rewards.py:accuracy', weight: 2, sources: [trl_rows.jsonl, verl_rows]}
    - {name: 'trl_rewards.py:answer_column', weight: 0.125, sources: [verl_rows]}
    - {name: 'trl_rewards.py:brevity', sources: [trl_rows.jsonl, verl_rows]}
    - {name: 'trl_rewards.py:progress', sources: [trl_rows.jsonl, verl_rows]}
    - {name: 'trl_rewards.py:only_sums', sources: [trl_rows.jsonl, verl_rows]}
    - {name: 'verl_rewards.py:compute_score', sources: [verl_rows]}
    - {name: 'verl_rewards.py:short', weight: 0.5, options: {bonus: 0.5}, sources: [trl_rows.jsonl, verl_rows]}
    - {name: 'verl_rewards.py:batched', sources: [trl_rows.jsonl, verl_rows]}
    - {name: 'openrlhf_reward.py:reward_func', sources: [trl_rows.jsonl, verl_rows]}
    - {name: 'house_rules.scoring:odd_digits', sources: [trl_rows.jsonl, verl_rows]}
    - {name: task, sources: [sort_digits]}
rollout: {prompts: 6, n: 4, max_tokens: 5}
training: {optimizer: {lr: 1.0e-2}}
validation: {before: false}
run: {threads: 1, samples_every: 1}
"""
WEIGHTS = {"accuracy": 2.0, "answer_column": 0.125, "short": 0.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose recipe is in the folder of the users' files."""
    folder = tmp_path_factory.mktemp("users")
    for path in [*USER_FILES.glob("*.py"), *USER_FILES.glob("house_rules/*.py")]:
        (folder / path.relative_to(USER_FILES)).parent.mkdir(exist_ok=True)
        (folder / path.relative_to(USER_FILES)).write_text(path.read_text())
    for name, rows in (("trl_rows", TRL_ROWS), ("verl_rows", VERL_ROWS)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "users.yaml").write_text(CONFIG)
    overrides = [f"run.directory={folder}", "run.name=it", f"training.steps={STEPS}"]
    loaded = load(TrainConfig, folder / "users.yaml", overrides)
    with checked_run(loaded.config, loaded.resolved, loaded.base, "it") as (parts, run):
        assert execute(parts, run)
    return folder / "it"


def expected(sample: dict[str, Any]) -> dict[str, float]:
    """The parts of a sample, from its text alone."""
    text, number = sample["completion"], int(sample["prompt"].rstrip(">"))
    truth, is_verl = str(number % 10), number >= 20
    is_right = truth in text
    ids = json.loads(json.loads(sample["extra"])["brevity/ids"])
    parts = {
        "starts_with_digit": 0.5 if text[:1].isdigit() else 0.0,
        "accuracy": float(is_right),
        "brevity": -0.01 * sample["length"],
        "progress": (sample["step"] - 1) / STEPS,
        "short": float(is_right) + 0.5,
        "batched": float(is_right),
        "batched/tried": 1.0,
        "reward_func": 1.0 if is_right else -1.0,
        "reward_func/chars": float(len(f"{number}>") + len(text)),
        "odd_digits": 0.001 * sum(text.count(digit) for digit in "13579"),
    }
    assert len(ids) == sample["length"]
    if is_verl or number % 2:
        parts["only_sums"] = 0.25
    if is_verl:
        score = 1.0 if is_right else -0.25
        parts |= {"answer_column": 1.0, "compute_score": score, "compute_score/length": float(len(text))}
        parts["compute_score/index"] = float(number)
    return parts


def test_every_convention_gives_the_scores_its_function_computes(run: Path) -> None:
    samples = [row for row in read_samples(run / "samples") if row["kind"] == "train"]
    assert {row["data_source"] for row in samples} == {"trl_rows.jsonl", "verl_rows"}
    assert len({row["reward"] for row in samples}) > 5
    for row in samples:
        parts = json.loads(row["parts"])
        del parts["brevity/longest"]  # of the whole call
        wanted = expected(row)
        assert parts == pytest.approx(wanted, abs=1e-12)
        total = sum(WEIGHTS.get(name, 1.0) * value for name, value in wanted.items() if "/" not in name)
        assert row["reward"] == pytest.approx(total, abs=1e-9)
        assert row["error"] is None


def test_what_functions_log_arrives_in_samples_and_metrics(run: Path) -> None:
    samples = [row for row in read_samples(run / "samples") if row["kind"] == "train"]
    for row in samples:
        extra = json.loads(row["extra"])
        assert extra["brevity/is_short"] is (row["length"] < 4)
        assert extra.get("compute_score/source") == (None if row["data_source"] == "trl_rows.jsonl" else "verl_rows")
    for line in metrics.read_metrics(run / "metrics.jsonl"):
        of_step = [row for row in samples if row["step"] == line["step"]]
        assert line["reward/part/brevity/longest"] == max(row["length"] for row in of_step)
        assert line["reward/failed"] == 0
