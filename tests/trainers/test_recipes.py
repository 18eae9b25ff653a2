"""Every recipe loads, prints its plan, and runs its whole algorithm for a few steps of a tiny model."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.algorithms.presets import PRESETS
from burnish.cli.main import main
from burnish.config.loading import load, load_shrunk
from burnish.config.recipe_names import command_of
from burnish.config.requirements import AnyConfig, missing_extras
from burnish.config.schema import PreferConfig, SftConfig, TrainConfig
from burnish.config.systems import SYSTEMS
from burnish.rewards import lean_reward
from burnish.run.metrics import read_metrics
from burnish.trainers import preference, sft
from burnish.trainers.rl_run import checked_run, execute
from tests.recipe_files import make_files, make_lean

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
EXAMPLES = {"sort_digits", "sort_digits_experts", "beyond_demonstrations", "gsm8k", "reward_model", "step_reward_model"}
EXAMPLES |= {"math", "math_fast", "mbpp", "smollm2_sums"}
EXAMPLES |= {f"gsm8k_{name}" for name in ("fast", "dapo", "dr_grpo", "gspo", "rloo", "ppo")}
EXAMPLES |= {"guess_number", "r1_toy", "long2short_toy", "deepscaler_toy", "proofs", "rm_r1"}
AGENTS = {"search_r1", "research", "retool", "torl", "deep_retrieval", "table_r1", "mem_agent", "multi_turn_correction"}
AGENTS |= {"ragen_sokoban", "ragen_frozen_lake", "ragen_countdown", "tic_tac_toe_self_play", "kuhn_poker", "spiral"}
AGENTS |= {"absolute_zero", "alphabet_sort", "reverse_text", "science_world", "calculator_toy", "gsm8k_agent"}
AGENTS |= {"deep_researcher", "rl_factory", "openmanus_rl", "ragen", "verl_agent"}
OF_SYSTEMS = {recipe for system in SYSTEMS for recipe in system.recipes} - set(PRESETS) - EXAMPLES
"""Recipes of published systems that are no preset. Most extend another recipe."""
LIKE_OTHERS = {
    "simplerl",
    "open_r1",
    "x_r1",
    "polaris",
    "deepmath",
    "still3",
    "qwq",
    "deep_researcher",
    "openmanus_rl",
}
LIKE_OTHERS |= {"tinyzero", "cot_rm", "code_r1"}
LIKE_OTHERS |= {"racro", "gui_r1", "vision_sr1", "vtool_r1", "count_shapes", "click_target"}
LIKE_OTHERS |= {"llasa_tts", "simple_vla", "frozen_lake_pictures", "sokoban_pictures"}
LIKE_OTHERS |= {"verl_agent"}
"""Those of them whose shrunk run chooses nothing that no other shrunk run chooses: only their plans are checked. --shrink replaces judges, speech,
image tools and the environments describe and tabletop, which have tests of their own."""
PICTURE_TASKS = {"count_shapes", "click_target"}
"""Tasks that tests/trainers/test_new_vision_runs.py trains on."""
EXAMPLES |= AGENTS | OF_SYSTEMS
"""Recipes of a task or a system rather than of an algorithm."""
PREFERENCES = [path for path in RECIPES if path.stem in ("dpo", "ipo", "kto", "simpo", "orpo")]
SUPERVISED = [path for path in RECIPES if command_of(path) == "sft"]
STAGES = [path for path in RECIPES if "\nstages:\n" in path.read_text(encoding="utf-8")]
"""Recipes of several commands in a row, which `test_stages.py` takes through all of theirs."""
FEW_EXAMPLES = 50
RL = [path for path in RECIPES if command_of(path) == "train"]


pytestmark = pytest.mark.usefixtures("shared_reward_workers")


def name(path: Path) -> str:
    return path.stem


def test_every_preset_has_a_recipe_and_every_recipe_a_preset() -> None:
    assert {path.stem for path in RECIPES} - EXAMPLES == set(PRESETS)
    assert LIKE_OTHERS <= OF_SYSTEMS | AGENTS


def choices(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every text of a config with its key: names of choices, tasks and families."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from choices(value, f"{key}.{name}")
    elif isinstance(tree, list):
        for value in tree:
            yield from choices(value, key)
    elif isinstance(tree, str) and not key.endswith(".pattern"):
        yield key, tree


def test_what_a_shrunk_recipe_chooses_is_trained_by_it_or_by_another() -> None:
    def chosen(path: Path) -> set[tuple[str, str]]:
        tree = load_shrunk(TrainConfig, path)[0].resolved
        algorithm = {key: value for key, value in tree["algorithm"].items() if key != "preset"}
        return set(choices({**tree, "algorithm": algorithm, "run": {}}))

    left = {choice for path in RL if path.stem in LIKE_OTHERS for choice in chosen(path)}
    left -= {(key, text) for key, text in left if text in PICTURE_TASKS}
    for path in (path for path in RL if path.stem not in LIKE_OTHERS):
        if not left:
            return
        left -= chosen(path)
    assert left == set()


def fewer_examples(config: AnyConfig) -> list[str]:
    """Overrides: what a task makes for a warm start and for validation needs no thousands of rows to be checked."""
    if not isinstance(config, TrainConfig):
        return []
    sources = config.warm_start.data if config.warm_start is not None else []
    numbers = [source.options.get("num", 0) for source in sources]
    overrides = []
    if len(numbers) == 1 and numbers[0] > FEW_EXAMPLES:
        overrides.append(f"warm_start.data.options.num={FEW_EXAMPLES}")
    if (config.validation.limit or 0) > FEW_EXAMPLES:
        overrides.append(f"validation.limit={FEW_EXAMPLES}")
    return overrides


def dry_run(command: str, path: Path, config: AnyConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """What a dry run of a whole recipe prints where all of its files are there and it has a device."""
    make_files(config)
    status = main([command, str(path), "--dry-run", "model.device=cuda", *fewer_examples(config)])
    out = capsys.readouterr().out
    assert status == 0, out[-2000:]
    assert out.splitlines()[-1] == "dry run: the run would start"
    return out


@pytest.mark.parametrize("path", RL, ids=name)
def test_a_recipe_is_of_its_preset_says_where_it_comes_from_and_would_start(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(TrainConfig, path).config
    if any(part.name == "lean" for part in config.reward.parts):
        monkeypatch.setenv("PATH", str(make_lean(tmp_path / "lean")), prepend=os.pathsep)
        monkeypatch.setattr(lean_reward, "lean_prefix", lean_reward.lean_prefix.__wrapped__)
    if missing := [text for text in missing_extras(config) if path.stem in AGENTS]:
        pytest.skip(missing[0])
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.startswith("# ") for line in lines[:4]] == [True, True, True, False]
    if path.stem not in EXAMPLES:
        assert config.algorithm.preset == path.stem
        assert config.model.path is not None
    assert f"{config.rollout.prompts:,} prompts x {config.rollout.n:,} samples" in dry_run(
        "train", path, config, capsys
    )


@pytest.mark.parametrize("path", [path for path in RL if path.stem not in LIKE_OTHERS], ids=name)
def test_a_shrunk_recipe_trains_from_end_to_end(path: Path, tmp_path: Path) -> None:
    loaded, _ = load_shrunk(TrainConfig, path, [f"run.directory={tmp_path}", "run.threads=1"])
    algorithm, notes = loaded.config.algorithm, list[str]()
    with checked_run(loaded.config, loaded.resolved, loaded.base, path.stem) as (parts, run):
        run.display.note = notes.append
        assert execute(parts, run)
    steps = [row for row in read_metrics(run.directory.metrics) if row["step"] > 0]
    warming = algorithm.critic.warmup_steps if algorithm.critic is not None else 0
    assert [row["step"] for row in steps] == list(range(1, loaded.config.training.steps + 1))
    assert [row["actor/updates"] > 0 for row in steps] == [row["step"] > warming for row in steps], notes
    assert max(row.get("actor/grad_norm", 0.0) for row in steps) > 1e-3  # something was learnt from
    assert all(math.isfinite(value) for row in steps for key, value in row.items() if key != "step")
    assert all(row["reward/failed"] == 0 for row in steps)
    part = "task" if "reward/part/task" in steps[0] else "environment"
    if loaded.config.environment.name in ("single_turn", "guess_number", "tags"):  # games have other scales
        assert 0 < sum(row[f"reward/part/{part}"] for row in steps) < len(steps)  # some right, some wrong
    assert all(("critic/loss" in row) == (algorithm.critic is not None) for row in steps)
    assert all(("actor/kl_ref" in row) == (algorithm.kl.loss.coef > 0) for row in steps if "actor/loss" in row)
    assert all(("actor/kl_reward" in row) == (algorithm.kl.reward.coef > 0) for row in steps)
    assert ("reward/greedy" in steps[0]) == bool(algorithm.needs("greedy"))


def test_speech_trains_on_its_own_task_which_shrink_replaces(tmp_path: Path) -> None:
    warm_start = ["data.options.num=300", "updates=20", "batch_size=32", "optimizer.lr=1e-2"]
    rest = "rollout.prompts=4 rollout.n=4 training.steps=2 validation.limit=8 validation.every=2 run.threads=1 model.device=cpu"
    overrides = ["model.new.hidden_size=32", "model.new.mlp_size=64", *(f"warm_start.{one}" for one in warm_start)]
    path = RECIPES[0].parent / "llasa_tts.yaml"
    loaded = load(TrainConfig, path, [*overrides, *rest.split(), f"run.directory={tmp_path}"])
    with checked_run(loaded.config, loaded.resolved, loaded.base, path.stem) as (parts, run):
        assert execute(parts, run)
    steps = [row for row in read_metrics(run.directory.metrics) if row["step"] > 0]
    assert [row["actor/updates"] for row in steps] == [1, 1]
    assert all(0 < row["reward/part/task"] < 1 for row in steps)  # what the recogniser hears is partly right


@pytest.mark.parametrize("path", SUPERVISED, ids=name)
def test_a_supervised_recipe_loads_and_trains(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "training" in dry_run("sft", path, load(SftConfig, path).config, capsys)
    loaded, _ = load_shrunk(SftConfig, path, [f"run.directory={tmp_path}", "run.threads=1"])
    outcome = sft.execute(loaded.config, loaded.resolved, loaded.base, path.stem)
    assert outcome.is_complete
    assert outcome.loss is not None
    assert math.isfinite(outcome.loss)


@pytest.mark.parametrize("path", PREFERENCES, ids=name)
def test_a_recipe_of_preferences_is_of_its_preset_and_trains_shrunk(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(PreferConfig, path).config
    lines = path.read_text(encoding="utf-8").splitlines()
    assert [line.startswith("# ") for line in lines[:4]] == [True, True, True, False]
    assert config.preference.loss.name == path.stem
    assert f"updates of {config.preference.batch_size} " in dry_run("prefer", path, config, capsys)
    loaded, _ = load_shrunk(PreferConfig, path, [f"run.directory={tmp_path}", "run.threads=1"])
    outcome = preference.execute(loaded.config, loaded.resolved, loaded.base, path.stem)
    assert outcome is not None
    assert outcome.is_complete
    rows = read_metrics(outcome.directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["preference/grad_norm"] > 1e-3 for row in rows[1:])
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_spiral_plays_as_the_bench_in_which_nothing_collapsed() -> None:
    """`rae-pool` of bench/self_play.py, whose numbers docs/games.md shows."""
    text = (Path(__file__).parents[2] / "bench" / "self_play.py").read_text(encoding="utf-8")
    (pool,) = re.findall(r'"rae-pool": \["algorithm=rae", "rollout.opponents=(\{.*\})"\]', text)
    for recipe in ("spiral", "spiral_tic_tac_toe"):
        path = next(path for path in RECIPES if path.stem == recipe)
        config = load(TrainConfig, path).config
        measured = load(TrainConfig, path, [f"rollout.opponents={pool}"]).config
        assert config.algorithm.preset == "rae"
        assert config.rollout.opponents == measured.rollout.opponents
