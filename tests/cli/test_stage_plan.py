"""`burnish stages`: checks before the first stage, precedence of settings, and the recipes."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.cli import stage_plan
from burnish.cli import stages as cli_stages
from burnish.cli.main import main
from burnish.cli.stage_plan import Plan, RunnableStage, make_plan
from burnish.cli.stages import planned_model
from burnish.config.data import Source
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.config.stages import StagesConfig, load_stage_configs
from burnish.run.metrics import read_metrics
from burnish.run.stage_index import StageIndex
from tests.cli.stage_recipe import CLEAN, DIGITS, PAIRS, RECIPES, recipe, refused, sft, short, stages
from tests.recipe_files import PROMPT, SHAPE, make_data, make_files, make_model


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- checked before the first starts -------------------------------------------------------------------------------------


def test_a_dry_run_checks_all_stages_and_understands_what_is_not_made_yet(capsys: pytest.CaptureFixture[str]) -> None:
    assert stages(recipe(), "--dry-run") == 0
    out = capsys.readouterr().out
    assert "runs/all: 11 stages, all checked" in out
    rows = {line.split("  ")[1].strip(): line.split() for line in out.splitlines() if line.startswith("  ")}
    assert rows["again"] == ["again", "sft", "base", "base,", "right", "to", "do"]
    assert rows["scorer"] == ["scorer", "reward-model", "again", "again", "to", "do"]
    assert rows["last"] == ["last", "train", "merged", "merged,", "scorer", "to", "do"]
    assert "16 (4 prompts x 4 samples)" in out
    assert not Path("runs").exists()


WRONG: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "a file no stage makes": (
        ("again", "config", "sft", "data"),
        {"path": "no.jsonl"},
        "stage again: no such file: no.jsonl",
    ),
    "an unknown key": (("last", "config", "rollout", "m"), 3, "stage last: all.yaml: rollout.m: unknown key"),
    "an option of another command": (
        ("right", "options", "ratio"),
        2,
        "stage right: unrecognized arguments: --ratio 2",
    ),
    "a value of another type": (
        ("right", "options", "most"),
        "many",
        "stage right: argument --most: invalid int value: 'many'",
    ),
    "a later stage": (("cold", "start"), "last", "stages.cold.start=last: stage last comes later"),
    "no such stage": (("again", "start"), "coldd", "there is no stage coldd; did you mean 'cold'"),
    "itself": (("again", "start"), "again", "a stage cannot use its own output"),
    "a start that makes no policy": (("last", "start"), "scorer", "reward-model makes no policy to start from"),
    "a start without effect": (("right", "start"), "cold", "start has no effect on data reject"),
    "a file of a later stage": (("right", "options", "source"), "stage:last", "stage:last: stage last comes later"),
    "a run that is none": (("right", "options", "source"), "run:samples", "eval has no run folder"),
    "a config of a command without": (("right", "config"), {"a": 1}, "data reject has no config: give options"),
    "options of a command with a config": (("cold", "options"), {"a": 1}, "options are for commands without a config"),
    "take without effect": (("right", "take"), "last", "take=last has no effect"),
    "a model of its own": (
        ("cold", "config", "model"),
        {"path": "x"},
        "config.model.path: the model is selected by start",
    ),
    "a place of its own": (("right", "options", "out"), "x.jsonl", "options.out cannot be set in a stage"),
    "nothing to read": (("right", "options"), {}, "stage right: data reject needs options.source"),
    "no such plug-in": (
        ("last", "config", "reward", "parts"),
        ["no.py:f"],
        "stage last: plug-in 'no.py:f': no such file",
    ),
    "no such teacher": (
        ("last", "config", "algorithm"),
        {"kl": {"loss": {"coef": 0.1}, "reference": {"name": "teacher", "path": "nowhere"}}},
        "stage last: algorithm.kl.reference.path: no directory nowhere",
    ),
    "no such process model": (
        ("last", "config", "algorithm"),
        {"preset": "prime", "process": {"path": "nowhere"}},
        "stage last: algorithm.process.path: no directory nowhere",
    ),
    "no such reward model": (
        ("last", "config", "reward", "parts"),
        ["task", {"name": "model", "options": {"path": "nowhere"}}],
        "stage last: reward.parts[1] (model): options.path: no directory nowhere",
    ),
    "no such judge": (
        ("last", "config", "reward", "parts"),
        [{"name": "judge", "options": {"path": "nowhere"}}],
        "stage last: reward.parts[0] (judge): options.path: no directory nowhere",
    ),
    "no such reward": (("last", "config", "reward", "parts"), ["tusk"], "stage last: unknown reward 'tusk'"),
    "an option that no reward model has": (
        ("last", "config", "reward", "parts"),
        [{"name": "model", "options": {"path": "stage:scorer", "clips": 1}}],
        "stage last: reward.parts[0] (model): unknown option 'clips'",
    ),
    "an option that no judge has": (
        ("last", "config", "reward", "parts"),
        [{"name": "judge", "options": {"path": "stage:cold", "vote": 3}}],
        "stage last: reward.parts[0] (judge): unknown option 'vote'",
    ),
    "what eval refuses": (("samples", "options", "temperature"), 0, "samples at temperature 0 are all alike"),
    "no such recipe": (("cold", "recipe"), "no.yaml", "no.yaml: no such file"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_with_any_stage_is_said_before_the_first_starts(
    what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, value, message = WRONG[what]
    tree = recipe()
    place = tree["stages"]
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = value
    assert message in refused(capsys, tree)
    assert not Path("runs").exists()


def test_a_function_of_the_user_s_is_looked_at_before_the_first_stage_starts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("mine.py").write_text("def f(completions, weight=1.0):\n    return [weight] * len(completions)\n")
    Path("fatal.py").write_text("import os\nos._exit(3)\n")
    tree = short("cold", "reasoning")
    place = tree["stages"]["reasoning"]["config"]["reward"]
    place["parts"] = [{"name": "mine.py:f", "options": {"wait": 2}}]
    assert "stage reasoning: reward.parts[0] (mine.py:f): unknown option 'wait'" in refused(capsys, tree)
    place["parts"] = ["mine.py:g"]
    assert "mine.py defines no 'g'" in refused(capsys, tree)
    place["parts"] = ["task", "fatal.py:f"]
    assert "stage reasoning: reward.parts: the process that imported fatal.py:f ended" in refused(capsys, tree)
    place["parts"] = [{"name": "mine.py:f", "options": {"weight": 2}}]
    assert stages(tree, "--dry-run") == 0


def test_a_function_of_the_user_s_that_does_not_end_holds_nobody_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_plan, "EXIT_TIMEOUT_S", 0.1)
    begun = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    Path("busy.py").write_text(begun + "def f(completions):\n    return [1.0] * len(completions)\n")
    Path("stuck.py").write_text("import time\ntime.sleep(600)\n")
    tree = short("cold", "reasoning")
    place = tree["stages"]["reasoning"]["config"]["reward"]
    place["parts"] = ["busy.py:f"]
    threads = set(threading.enumerate())
    assert stages(tree, "--dry-run") == 0
    assert set(threading.enumerate()) <= threads  # its thread is not in this process
    monkeypatch.setattr(stage_plan, "IMPORT_TIMEOUT_S", 0.2)
    place["parts"] = ["stuck.py:f"]
    assert "stage reasoning: reward.parts: the import of stuck.py:f took more than 0.2 s" in refused(capsys, tree)
    assert multiprocessing.active_children() == []


def test_a_process_model_or_a_teacher_that_a_stage_makes_is_planned_as_large_as_the_policy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tree = short("cold", "reasoning")
    config = tree["stages"]["reasoning"]["config"]
    for algorithm in (
        {"preset": "prime", "process": {"path": "stage:cold"}},
        {"kl": {"loss": {"coef": 0.1}, "reference": {"name": "teacher", "path": "stage:cold"}}},
    ):
        config["algorithm"] = algorithm
        assert stages(tree, "--dry-run") == 0
        shown = capsys.readouterr().out
        assert shown.count("memory: ") == 2
        assert "not planned" not in shown


def test_a_judge_that_a_stage_makes_is_no_obstacle_to_a_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    tree = short("cold", "reasoning")
    judge = {"name": "judge", "options": {"path": "stage:cold", "device": "cpu"}}
    tree["stages"]["reasoning"]["config"]["reward"]["parts"] = [judge]
    assert stages(tree, "--dry-run") == 0
    assert capsys.readouterr().out.count("memory: ") == 2


def test_a_stage_is_planned_with_the_adapters_it_trains(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tree = short("cold", "reasoning", "preferred", "merged", "last")
    tree["model"] = {"path": "model", "device": "cpu"}
    tree["stages"]["reasoning"]["config"]["model"] = {"lora": {"rank": 2}}
    tree["stages"]["last"]["config"]["reward"].pop("parts")
    plan = plan_of(tree)
    loras = {name: planned_model(plan, one).lora for name, one in plan.stages.items() if one.loaded is not None}
    assert {name: lora and lora.rank for name, lora in loras.items()} == {
        **{"cold": None, "reasoning": 2, "preferred": 2, "last": None}
    }
    tree["model"] = {"adapter": "model", "path": "model", "device": "cpu"}
    tree["stages"]["reasoning"]["config"].pop("model")
    plan = plan_of(tree)
    adapters = {name: planned_model(plan, one).adapter for name, one in plan.stages.items() if one.loaded is not None}
    assert adapters == {"cold": "model", "reasoning": "model", "preferred": "model", "last": None}


def test_what_a_run_may_change_a_stage_may() -> None:
    tree = short("cold", "reasoning")
    pools = {"here": {"places": 1, "cpus": 2}}
    placement = {"name": "ray", "pools": pools, "roles": {"actor": "here", "rollout": "here"}}
    tree["stages"]["reasoning"]["config"]["placement"] = placement
    asked = plan_of(tree).stages["reasoning"].planned.asked
    assert [key for key in asked if key.startswith("placement.")] == []
    assert "rollout.n" in asked


def plan_of(tree: dict[str, Any]) -> Plan:
    Path("all.yaml").write_text(yaml.safe_dump(tree, sort_keys=False))
    return make_plan(load(StagesConfig, Path("all.yaml")), Path("all.yaml"), "all")


def test_a_stage_of_any_name_or_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    tree = recipe()
    assert "a stage cannot be called 'base'" in refused(capsys, {**tree, "stages": {"base": tree["stages"]["cold"]}})
    assert "a stage cannot be called 'lock'" in refused(capsys, {**tree, "stages": {"lock": tree["stages"]["cold"]}})
    assert "a stage cannot be called 'a/b'" in refused(capsys, {**tree, "stages": {"a/b": tree["stages"]["cold"]}})
    assert "stages" in refused(capsys, {**tree, "stages": {}})
    assert "measure needs data" in refused(capsys, {**tree, "measure": {"limit": 3}})
    assert "measure: " in refused(capsys, {**tree, "measure": {"data": "task:sort_digits", "k": 3}})


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tree = short("cold")
    tree["stages"]["cold"]["config"]["parallel"] = {"data": 2}
    assert "stage cold: a stage is one process, so parallel has no effect" in refused(capsys, tree)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in refused(capsys, short("cold"))


def test_a_recipe_of_stages_given_to_another_command_is_sent_to_the_right_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("all.yaml").write_text(yaml.safe_dump(recipe(), sort_keys=False))
    for command in ("train", "sft"):
        assert main([command, "all.yaml"]) == 2
        assert "`burnish stages all.yaml` runs it" in capsys.readouterr().err


# --- settings of the whole -------------------------------------------------------------------------------------------------


def test_the_whole_s_settings_reach_every_stage_a_stage_s_own_win_and_a_recipe_lies_below(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("below.yaml").write_text(yaml.safe_dump({**sft(CLEAN, 7), "seed": 9, "model": {"path": "nowhere"}}))
    tree = short("cold")
    tree |= {"seed": 4, "template": {"kind": "plain", "text": "{prompt}"}}
    tree["stages"]["cold"] = {"command": "sft", "recipe": "below.yaml", "config": {"run": {"save_every": 5}}}
    assert stages(tree, "stages.cold.config.sft.batch_size=8") == 0
    config = yaml.safe_load(Path("runs/all/cold/config.yaml").read_text())
    assert (config["seed"], config["sft"]["updates"], config["sft"]["batch_size"]) == (4, 7, 8)
    assert config["run"]["save_every"] == 5
    assert config["template"]["kind"] == "plain"
    assert config["model"]["path"] == "runs/all/base/model"


def test_take_chooses_the_checkpoint_that_goes_on() -> None:
    tree = short("cold", "preferred")
    own = tree["stages"]["preferred"]["config"]["preference"]
    own |= {
        "held_out": PAIRS,
        "held_out_every": 1,
        "updates": 4,
        "optimizer": {"lr": 0.5},
    }  # which ruins it: an earlier one is best
    products = {}
    for take in ("best", "last"):
        tree["stages"]["preferred"]["take"] = take
        assert stages(tree, name=take) == 0
        outcome = StageIndex.read(Path(f"runs/{take}")).entries["preferred"].outcome
        assert outcome is not None
        products[take] = outcome.product
    assert products["last"] == "preferred/checkpoints/step-000004"
    assert products["best"] != products["last"]


def test_measuring_tells_the_same_of_every_policy(capsys: pytest.CaptureFixture[str]) -> None:
    tree = short("cold", "scorer", "preferred")
    tree["measure"] = {
        "data": "task:sort_digits",
        "limit": 16,
        "max_tokens": 4,
        "settings": {"data.source.options": DIGITS},
    }
    assert stages(tree) == 0
    index = StageIndex.read(Path("runs/all"))
    after = {name: entry.outcome.after for name, entry in index.entries.items() if entry.outcome}
    assert [name for name in after if name.endswith(".measured")] == [
        "base.measured",
        "cold.measured",
        "preferred.measured",
    ]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  preferred "))
    assert f"{after['cold.measured']:.3f}  {after['preferred.measured']:.3f}  2 updates" in row


def test_adapters_go_on_as_adapters() -> None:
    tree = short("cold")
    assert stages(tree) == 0
    model = "runs/all/cold/checkpoints/step-000020"
    tree = short("cold", "preferred")
    tree["model"] = {"path": model, "device": "cpu", "lora": {"rank": 2}}
    assert stages(tree, name="lora") == 0
    config = yaml.safe_load(Path("runs/lora/preferred/config.yaml").read_text())["model"]
    assert config["adapter"] == "runs/lora/cold/checkpoints/step-000020"
    assert config["path"] is None
    assert config["lora"] is None


# --- recipes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["r1", "long2short", "long2short_toy", "l1"])
def test_a_recipe_goes_through_all_of_its_stages_shrunk(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = RECIPES / f"{name}.yaml"
    loaded = load(StagesConfig, path)
    assert [line.startswith("# ") for line in path.read_text(encoding="utf-8").splitlines()[:4]] == [True] * 3 + [False]
    configs = load_stage_configs(loaded, path, Path())
    presets = [one.config.algorithm.preset for one in configs.values() if isinstance(one.config, TrainConfig)]
    assert {"l1": "lcpo_max"}.get(name, name.removesuffix("_toy")) in presets
    assert main(["stages", str(path), "--shrink", "run.threads=1"]) == 0
    index = StageIndex.read(Path(f"runs/{name}-shrunk-0"))
    assert [stage for stage in loaded.config.stages if not index.is_done(stage)] == []
    for stage, one in configs.items():
        rows = read_metrics(Path(f"runs/{name}-shrunk-0") / stage / "metrics.jsonl")
        assert rows[-1]["step"] >= 2
        if isinstance(one.config, TrainConfig):
            assert max(row.get("actor/grad_norm", 0.0) for row in rows) > 1e-3
    assert f"  {list(loaded.config.stages)[-1]} " in capsys.readouterr().out


def test_r1_fine_tunes_the_base_again_and_long2short_begins_with_what_the_paper_says() -> None:
    r1 = load(StagesConfig, RECIPES / "r1.yaml").config
    assert [r1.start_of(name) for name in r1.stages] == [
        *("base", "cold_start", "reasoning", None, "base", "second_sft", "second_sft")
    ]
    short = load(StagesConfig, RECIPES / "long2short.yaml").config
    assert short.start_of("samples") == "long"
    assert short.start_of("short_rl") == "preferred"


@pytest.mark.parametrize("name", ["r1", "r1_small", "long2short", "r1_toy", "long2short_toy", "l1"])
def test_a_recipe_is_checked_in_all_of_its_stages(
    name: str, here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RECIPES / f"{name}.yaml"
    loaded = load(StagesConfig, path)
    make_model(loaded.config.model.path or "models/none")
    for stage in load_stage_configs(loaded, path, Path()).values():
        make_files(stage.config)
    named = [word for one in loaded.config.stages.values() for word in one.options.values()]
    words = [word for word in [*named, *loaded.config.measure.values()] if str(word).endswith((".parquet", ".jsonl"))]
    make_data([Source(path=word) for word in words], PROMPT)
    Path("data").mkdir(exist_ok=True)
    Path("data/gsm8k_train.jsonl").write_text(
        json.dumps({"question": "1+1?", "answer": "1+1=<<1+1=2>>2\n#### 2"}) + "\n"
    )
    monkeypatch.setattr("burnish.memory_plan.from_config._host_bytes", lambda: 2**50)
    assert main(["stages", str(path), "--dry-run"]) == 0
    assert "all checked" in capsys.readouterr().out


def test_a_reward_model_of_a_base_that_cannot_be_one_is_refused_before_the_first_stage(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model("base")
    (here / "base/config.json").write_text(json.dumps({**SHAPE, "model_type": "deepseek_v3"}))
    pairs = {"reward_model": {"data": {"task": "sort_digits", "options": {"num": 8}}}}
    tree = {
        "model": {"path": "base"},
        "stages": {"scorer": {"command": "reward-model", "start": "base", "config": pairs}},
    }
    message = refused(capsys, tree, "--dry-run")
    assert "stage scorer: model.path=base: `burnish reward-model` needs the native decoder" in message
    Path("scorer.yaml").write_text(yaml.safe_dump({"model": {"path": "base"}, **pairs}))
    assert main(["reward-model", "scorer.yaml", "--dry-run"]) == 2
    assert "`burnish reward-model` needs the native decoder" in capsys.readouterr().out


def test_shrunk_stages_are_made_in_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every process loads torch again, which takes longer than all shrunk stages."""
    made = list[str]()

    def run_stage(plan: Plan, ready: RunnableStage, products: dict[str, str]) -> int:
        made.append(ready.planned.name)
        return 0

    monkeypatch.setattr("burnish.cli.stage_commands.run_stage", run_stage)
    monkeypatch.setattr("burnish.cli.stages.Supervisor", lambda *_: pytest.fail("a supervisor was started"))
    monkeypatch.setattr("burnish.cli.train.is_supported", lambda: True)
    args = ["stages", str(RECIPES / "r1_toy.yaml"), "--shrink"]
    parser = argparse.ArgumentParser()
    cli_stages.add_arguments(parser)
    namespace = parser.parse_args(args[1:])
    namespace.is_command = True
    cli_stages.run(namespace)
    assert made == ["base"]


def test_what_reads_files_of_others_cannot_be_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    tree = recipe()
    tree["stages"]["right"]["options"]["source"] = "there.jsonl"
    Path("there.jsonl").write_text("{}\n")
    message = refused(capsys, tree, "--shrink")
    assert (
        "stage right cannot be shrunk: data reject reads source=there.jsonl, which is not the output of a stage"
        in message
    )
