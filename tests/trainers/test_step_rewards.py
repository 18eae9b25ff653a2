"""RL whose reward is a process reward model read at the ends of steps: what a run logs, what it refuses, and that it goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.run.metrics import MEASURED, read
from burnish.run.samples import read_samples
from tests.trainers.test_resume_everything import MOMENTS, dies, killing
from tests.trainers.test_scorer_as_reward import scorer
from tests.trainers.tiny import TINY, run_of


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return scorer(tmp_path_factory.mktemp("scorer"))


def overrides(path: Path, warm: Path, algorithm: str = "reinforce", **options: Any) -> list[str]:
    """Steps of sorted digits that end with a 7: as good as any."""
    start = ["model.new=null", f"model.path={warm}", "reward.workers=1", "run.samples_every=1"]
    part = {"name": "model", "options": {"path": str(path), "device": "cpu", "delimiter": "7", **options}}
    return [f"reward.parts=[{json.dumps(part)}]", f"algorithm={algorithm}", *start]


def logged(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in read(folder / "metrics.jsonl")]


def test_the_steps_of_answers_are_in_metrics_and_samples(trained: Path, warm: Path, tmp_path: Path) -> None:
    folder = run_of(tmp_path / "run", TINY, overrides(trained, warm, aggregate="prod"))
    rows = logged(folder)
    assert all(1 <= row["reward/part/model/steps"] < 3 for row in rows)
    assert all(0 < row["reward/part/model"] < 1 for row in rows)
    assert len({row["actor/loss"] for row in rows}) == len(rows)
    samples = read_samples(folder / "samples")
    several = [row for row in samples if json.loads(row["parts"])["model/steps"] > 1]
    assert several
    for row in several:
        chances = [float(word) for word in row["details"].removeprefix("model: steps ").split()]
        assert len(chances) == json.loads(row["parts"])["model/steps"]
        product = 1.0
        for chance in chances:
            product *= chance
        assert row["reward"] == pytest.approx(product, abs=5e-3)


def test_each_aggregation_is_another_reward(trained: Path, warm: Path, tmp_path: Path) -> None:
    runs = [
        logged(run_of(tmp_path / how, TINY, [*overrides(trained, warm, aggregate=how), "training.steps=1"]))
        for how in ("last", "min", "prod", "mean", "each")
    ]
    means = [rows[0]["reward/mean"] for rows in runs]
    assert len(set(means)) == len(means)
    assert len({rows[0]["actor/grad_norm"] for rows in runs}) == len(means)


def test_rewards_of_steps_survive_the_end_of_a_process(trained: Path, warm: Path, tmp_path: Path) -> None:
    each = [*overrides(trained, warm, aggregate="each"), "training.steps=5", "run.save_every=2"]
    expected = run_of(tmp_path / "unbroken", TINY, each)
    for name in ("before the first step", "step done, not committed", "a step after a checkpoint"):
        with killing(MOMENTS[name]):
            assert dies(lambda: run_of(tmp_path / "run", TINY, each)), name
    found = run_of(tmp_path / "run", TINY, each)
    assert logged(found) == logged(expected)
    weights = [folder / "checkpoints" / "step-000005" / "model.safetensors" for folder in (found, expected)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_an_advantage_that_looks_at_the_sum_alone_is_refused(trained: Path, warm: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="advantage grpo counts their sum alone: use one with a return for every token"):
        run_of(tmp_path / "run", TINY, overrides(trained, warm, "grpo", aggregate="each"))
