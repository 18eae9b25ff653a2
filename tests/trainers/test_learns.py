"""The toy task must learn, end to end, through the same entry point as the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.run.metrics import read_metrics
from burnish.trainers.rl_run import checked_run, execute

RECIPES = Path(__file__).parents[2] / "recipes"
BENCH = Path(__file__).parents[2] / "bench" / "learning.py"


def train(recipe: str, folder: Path, *overrides: str) -> list[dict]:
    loaded = load(TrainConfig, RECIPES / recipe, [f"run.directory={folder}", "model.device=cpu", *overrides])
    with checked_run(loaded.config, loaded.resolved, loaded.base, "run") as (parts, run):
        assert execute(parts, run)
        return read_metrics(run.directory.metrics)


def test_reward_rises_and_engine_and_learner_agree(tmp_path: Path) -> None:
    rows = train(
        "sort_digits.yaml", tmp_path, "warm_start.updates=100", "rollout.prompts=32",
        "training.steps=30", "training.optimizer.lr=5.0e-4",
        "validation.limit=200", "validation.every=0", "run.threads=1",
    )  # fmt: skip
    before, after = rows[0]["validation/greedy/accuracy"], rows[-1]["validation/greedy/accuracy"]
    assert after > before + 0.15, (before, after)
    steps = rows[1:]
    assert all(row["mismatch/mean"] <= 1e-5 and row["mismatch/max"] <= 1e-3 for row in steps if "mismatch/mean" in row)
    assert sum(row["reward/mean"] for row in steps[-5:]) > sum(row["reward/mean"] for row in steps[:5])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_default_job_reaches_its_accuracy_on_every_seed(seed: int, tmp_path: Path) -> None:
    rows = train("sort_digits.yaml", tmp_path, f"seed={seed}")
    assert 0.3 <= rows[0]["validation/greedy/accuracy"] <= 0.5
    assert rows[-1]["validation/greedy/accuracy"] >= 0.95
    assert rows[-1]["validation/sampled/accuracy"] >= 0.92


@pytest.mark.slow
def test_rl_learns_what_was_never_shown(tmp_path: Path) -> None:
    rows = train("beyond_demonstrations.yaml", tmp_path)
    key = "validation/greedy/accuracy/length=7"
    assert rows[0][key] <= 0.2
    assert rows[-1][key] >= 0.6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo", "rloo", "dapo", "gspo", "reinforce_plus_plus", "vapo"])
def test_every_kind_of_algorithm_learns_from_the_same_warm_start(name: str, tmp_path: Path) -> None:
    """As `bench/learning.py` runs them; docs/learning.md has all presets."""
    out, places = tmp_path / "learning.json", ["--folder", str(tmp_path / "runs"), "--docs", str(tmp_path / "docs")]
    command = [
        sys.executable,
        str(BENCH),
        "--presets",
        name,
        "--seeds",
        "0",
        "--workers",
        "1",
        "--out",
        str(out),
        *places,
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (row,) = json.loads(out.read_text())["rows"]
    assert 0.3 <= row["before"] <= 0.5
    assert row["after"] >= 0.85


PREFERENCES = {
    "online_dpo": ["algorithm.kl={reference: frozen}", "algorithm.filters=[pairs]"],
    "sppo": ["algorithm.kl={reference: {name: iterate, every: 1}}", "algorithm.filters=[]", "algorithm.loss.eta=10"],
    "pf_ppo": ["algorithm.filters=[pf_ppo]", "algorithm.shaping=[signed]", "algorithm.critic.optimizer.lr=1.0e-3"],
}


@pytest.mark.slow  # half a minute each
@pytest.mark.parametrize("name", PREFERENCES)
def test_pairs_wins_and_filtered_samples_that_come_back_are_learnt_from(name: str, tmp_path: Path) -> None:
    rows = train(
        "sort_digits.yaml", tmp_path, f"algorithm={name}", *PREFERENCES[name], "warm_start.updates=100",
        "rollout.prompts=32", "training.steps=30", "training.optimizer.lr=5.0e-4",
        "validation.limit=200", "validation.every=0", "run.threads=1",
    )  # fmt: skip
    before, after = rows[0]["validation/greedy/accuracy"], rows[-1]["validation/greedy/accuracy"]
    assert after > before + 0.15, (before, after)
    steps = rows[1:]
    if name == "online_dpo":
        assert all(row["pairs/made"] + row["pairs/ties"] + row["pairs/identical"] == 32 for row in steps)
        assert all(row["rollout/sequences_used"] == 2 * row["pairs/made"] for row in steps)
    if name == "pf_ppo":
        assert all(row["replay/groups"] == 16 for row in steps[1:])
