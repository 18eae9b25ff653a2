"""Methods that keep more than weights, killed by SIGKILL at random moments: they end as if they had never stopped, bit for bit.

A minute and a half; the same states die at chosen lines in test_resume_everything.py, which is part of every test run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from burnish.config.loading import load_shrunk
from burnish.config.schema import TrainConfig
from tests.trainers.test_resume import Runner, result

RECIPES = Path(__file__).parents[2] / "recipes"
SMALL = ["training.steps=6", "run.save_every=2", "run.samples_every=3", "run.threads=1", "model.device=cpu"]
METHODS = {
    "spo_tree": ["algorithm.replay={share: 0.5, uses: 3, max_age: 3}"],
    "spo_chain": [],
    "pf_ppo": [],
    "prime": [],
    "gigpo": [],
    "spiral": [],
    "luffy": [],
    "online_dpo": [],
    "on_policy_distillation": [],
    "absolute_zero": ["rollout.exact=true"],
}
KILLS = 4


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    one = Runner()
    yield one
    one.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_method_killed_at_random_moments_ends_as_if_it_had_never_stopped(
    name: str, runner: Runner, tmp_path: Path
) -> None:
    loaded, _ = load_shrunk(TrainConfig, RECIPES / f"{name}.yaml", [*SMALL, *METHODS[name]])
    recipe = yaml.safe_dump(loaded.resolved)
    seconds = runner.finish(_folder(tmp_path / "unbroken", recipe))
    expected = result(tmp_path / "unbroken")
    assert len(expected[0]) >= 6
    rng = random.Random(name)
    killed = _folder(tmp_path / "killed", recipe)
    for k in range(KILLS):
        runner.kill_after(killed, seconds * (k + rng.random()) / KILLS)
    runner.finish(killed)
    for what, mine, unbroken in zip(("metrics", "weights", "used", "tables"), result(killed), expected, strict=True):
        assert mine == unbroken, what


def _folder(folder: Path, recipe: str) -> Path:
    folder.mkdir()
    (folder / "recipe.yaml").write_text(recipe)
    return folder
