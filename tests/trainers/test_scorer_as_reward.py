"""RL with a reward model as its reward: the numbers it leaves, its failures, going on, and that a policy learns from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from burnish.config.loading import load
from burnish.config.preference import RewardModelConfig
from burnish.data.tasks.registry import make_task
from burnish.data.tasks.task import Dice
from burnish.models.export_and_merge import merge_model
from burnish.run.metrics import MEASURED, read
from burnish.run.samples import read_table
from burnish.trainers.reward_model_run import execute as train_scorer
from tests.trainers.tiny import TINY, WARM, run_of

BENCH = Path(__file__).parents[2] / "bench" / "reward_model_rl.py"
TWO = {"min_digits": 2, "max_digits": 2}
SCORER = """
model: {new: {hidden_size: 32, num_layers: 2, num_heads: 2, mlp_size: 64, max_positions: 64}, device: cpu}
run: {name: scorer}
reward_model:
  data: {task: sort_digits, options: {num: 400, min_digits: 2, max_digits: 3}}
  held_out: {task: sort_digits, options: {num: 50, min_digits: 2, max_digits: 3}}
  updates: 20
  batch_size: 32
  optimizer: {lr: 5.0e-3, schedule: linear, final: 0.1}
"""


def scorer(folder: Path, *overrides: str) -> Path:
    (folder / "scorer.yaml").write_text(SCORER)
    loaded = load(RewardModelConfig, folder / "scorer.yaml", [*overrides, f"run.directory={folder}"])
    outcome = train_scorer(loaded.config, loaded.resolved, loaded.base, "scorer")
    return outcome.model


def part(path: Path, **options: Any) -> str:
    return json.dumps({"name": "model", "options": {"path": str(path), "device": "cpu", **options}})


def without_times(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read(path)]


def start_from(model: Path) -> list[str]:
    return ["model.new=null", f"model.path={model}"]


def test_scores_are_a_part_in_metrics_and_samples_and_the_run_repeats_itself(warm: Path, tmp_path: Path) -> None:
    overrides = [
        f"reward.parts=[{part(scorer(tmp_path))}, {{name: task, weight: 0}}]",
        "run.samples_every=1",
        "reward.workers=1",
        *start_from(warm),
    ]
    one, other = (run_of(tmp_path / name, TINY, overrides) for name in ("one", "other"))
    rows = read(one / "metrics.jsonl")
    assert all(row["reward/mean"] == pytest.approx(row["reward/part/model"]) for row in rows)
    assert all(row["reward/failed"] == 0 and "reward/part/task" in row and "reward/accuracy" in row for row in rows)
    assert len({row["reward/part/model"] for row in rows}) == len(rows)
    assert without_times(one / "metrics.jsonl") == without_times(other / "metrics.jsonl")
    samples = read_table(next((one / "samples").glob("*.parquet")))
    assert {"model", "task"} <= json.loads(samples[0]["parts"]).keys()


def test_a_scorer_of_adapters_rewards_as_the_whole_model_they_make(warm: Path, tmp_path: Path) -> None:
    adapted = scorer(tmp_path, *start_from(warm), "model.lora={rank: 4, base: nf4}")
    assert (adapted / "adapter_config.json").is_file()
    (tmp_path / "merged").mkdir()
    merge_model(adapted, tmp_path / "merged", None)
    found = []
    for name, path in (("adapters", adapted), ("merged", tmp_path / "merged")):
        overrides = [f"reward.parts=[{part(path, standardise=True)}]", "training.steps=2", *start_from(warm)]
        rows = read(run_of(tmp_path / name, TINY, overrides) / "metrics.jsonl")
        assert all(row["reward/failed"] == 0 for row in rows)
        found.append([row["reward/part/model"] for row in rows])
    assert found[0] == pytest.approx(found[1], abs=1e-3)
    assert len(set(found[0])) == 2


def test_a_text_beyond_the_scorers_positions_counts_as_failed(tmp_path: Path) -> None:
    small = scorer(tmp_path, "model.new.max_positions=8", "reward_model.updates=1")
    overrides = [f"reward.parts=[{part(small)}]", "training.steps=2", "rollout.max_tokens=12", "reward.workers=1"]
    rows = read(run_of(tmp_path / "run", TINY, overrides) / "metrics.jsonl")
    assert max(row["reward/failed"] for row in rows) > 0


def judged_pairs(num_problems: int, num: int) -> str:
    """Right answers of a few problems beside answers the checker refuses: near ones, copies, and any digits at all."""
    task, rows = make_task("sort_digits", TWO, 0), list[str]()
    for index in range(num):
        row, dice = task.row("train", index % num_problems), Dice(0, "judged", index)
        assert isinstance(row.prompt, str)
        digits, other = row.prompt.removesuffix(">"), str(dice.between(0, 9))
        choices = [digits, row.answer[0] + other, other + row.answer[1], other, row.answer + other]
        wrong = [*choices, f"{dice.between(0, 99):02d}", f"{dice.between(0, 9999)}"][dice.between(0, 6)]
        if task.score(wrong, row.answer, row.extra) == 0:
            rows.append(json.dumps({"prompt": row.prompt, "chosen": row.answer, "rejected": wrong}))
    return "\n".join(rows)


def test_a_policy_learns_the_task_from_a_scorer_alone(tmp_path: Path) -> None:
    """Pairs judged by the checker teach the scorer, and the scorer the policy; the checker only measures."""
    text = TINY.replace("max_digits: 3", "max_digits: 2").replace(
        "hidden_size: 16, num_layers: 1", "hidden_size: 32, num_layers: 2"
    )
    warm = WARM.replace("max_digits: 3", "max_digits: 2").replace("updates: 60", "updates: 20")
    start = run_of(tmp_path / "start", text + warm, ["training.steps=1", "reward.workers=1"]) / "warm_start"
    (tmp_path / "pairs.jsonl").write_text(judged_pairs(12, 6000))
    model = scorer(
        tmp_path, *start_from(start), f"reward_model.data=[{{path: {tmp_path}/pairs.jsonl}}]",
        "reward_model.held_out=[]", "reward_model.updates=60", "reward_model.batch_size=64",
    )  # fmt: skip
    overrides = [
        f"reward.parts=[{part(model, clip=2)}, {{name: task, weight: 0}}]", *start_from(start),
        "algorithm.shaping=[{name: stop_properly, coef: -2}]", "training.optimizer.lr=2.0e-3", "training.steps=20",
        "rollout.prompts=12", "rollout.n=8", "reward.workers=1",
    ]  # fmt: skip
    rows = read(run_of(tmp_path / "rl", text, overrides) / "metrics.jsonl")
    before, after = (sum(row["reward/part/task"] for row in some) / len(some) for some in (rows[:3], rows[-3:]))
    assert after > before + 0.1, (before, after)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_rl_against_a_reward_model_learns_on_every_seed(seed: int, tmp_path: Path) -> None:
    """As `bench/reward_model_rl.py` runs it; three to six minutes a seed on a busy core."""
    out = tmp_path / "rows.json"
    command = [sys.executable, str(BENCH), "--seeds", str(seed), "--out", str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["pairs_accuracy"] >= 0.95
    assert row["before"] <= 0.75
    assert row["after"] >= row["before"] + 0.15
