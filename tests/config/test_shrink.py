"""`--shrink` turns any recipe into a job of seconds and keeps every choice of its algorithm."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from burnish.algorithms.spec import Algorithm
from burnish.cli.main import main
from burnish.config.errors import UserError
from burnish.config.loading import load, load_shrunk
from burnish.config.recipe_names import command_of
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig, TrainConfig
from burnish.config.shrink import shrink
from burnish.config.stages import StagesConfig, load_shrunk_stages, load_stage_configs
from burnish.data.tasks.registry import make_task

RECIPES = Path(__file__).parents[2] / "recipes"
PREFERENCES = ("dpo", "ipo", "kto", "simpo", "orpo")
FULL = """
run: {name: big, trackers: [wandb]}
model: {path: models/big, dtype: bfloat16, device: 'cuda:1', backend: transformers}
data:
  train: [{path: a.parquet, weight: 2}, {path: b.parquet}]
  validation: {path: c.parquet}
  template: {kind: chat, system: be brief}
  budget: {low: 100, high: 4000}
  demonstrations: {path: d.parquet}
reward:
  parts:
    - {name: think_format, weight: 0.5, sources: [a]}
    - {name: math, weight: 2.0, sources: [a]}
    - {name: 'judge.py:score'}
rollout:
  engine: transformers
  max_tokens: 8192
  prompts: 512
  n: 64
  stages: [{start: 100, max_tokens: 16384, n: 3}, {start: 200, prompts: 20}]
algorithm:
  preset: vc_ppo
  aggregation: {name: seq-mean-token-sum-norm, horizon: 3000}
  kl: {loss: {coef: 0.1}, reference: {name: hard_sync, every: 400}}
  filters: [zero_signal, {name: cppo, prune: 0.75}]
  refill: {rounds: 10, oversample: 3}
  shaping:
    - {name: soft_overlong, max_tokens: 8192, cache: 4096}
    - {name: cosine, margin: 16}
    - {name: kimi_length, warmup_steps: 200}
    - {name: repetition}
    - {name: lcpo_exact}
  curriculum: {name: easy_to_hard, column: level, buckets: 8, steps: 800, warmup_steps: 100}
  auxiliary: {sft: 0.1}
training: {steps: 1000, mini_batches: 16, epochs: 4, optimizer: {warmup: 320, lr: 3.0e-6}}
validation: {every: 50, limit: 500, by: subject, modes: {sampled: {n: 32, max_tokens: 4096, temperature: 0.6}}}
"""


def small(tmp_path: Path, text: str, *overrides: str) -> TrainConfig:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return load_shrunk(TrainConfig, path, overrides)[0].config


def choices(algorithm: Algorithm) -> list[tuple[str, str]]:
    return [(slot, choice.name) for slot, choice in algorithm.choices()]


def test_processes_on_ray_become_one_process(tmp_path: Path) -> None:
    text = "model: {path: models/big}\ndata: {train: {path: a.parquet}}\nreward: {parts: math}\n"
    text += "placement: {name: ray, workers: 8, engines: 8}\nparallel: {context: 4, offload: true}\n"
    config = small(tmp_path, text)
    assert (config.placement.name, config.parallel.context, config.parallel.offload) == ("local", 1, False)
    assert small(tmp_path, text, "placement={name: ray, workers: 2}").placement.name == "ray"


def test_a_recipe_of_everything_becomes_small_everywhere(tmp_path: Path) -> None:
    config = small(tmp_path, FULL)
    assert config.run.name == "big-shrunk"
    assert config.run.trackers == []
    assert config.model.path is None
    assert config.model.new is not None
    assert (config.model.new.hidden_size, config.model.new.num_layers) == (32, 1)
    assert (config.model.dtype, config.model.backend) == ("float32", "auto")
    assert [source.task for source in config.data.train] == ["sort_digits"]
    assert config.data.train[0].limit is not None  # so that a curriculum has prompts that come back
    assert [source.task for source in config.data.validation + config.data.demonstrations] == ["sort_digits"] * 2
    assert config.data.template.kind == "auto"
    assert config.data.template.system is None
    assert config.data.budget is not None
    assert 1 <= config.data.budget.low < config.data.budget.high <= 9
    assert set(config.data.budget.text.replace("{n}", "")) <= set("0123456789>")
    assert (config.rollout.prompts, config.rollout.n, config.rollout.max_tokens) == (4, 4, 10)
    assert config.rollout.engine == "auto"
    assert (config.training.mini_batches, config.training.optimizer.warmup) == (2, 1)
    assert config.training.optimizer.lr == 3e-6
    assert config.validation.limit == 8
    assert config.validation.by == "length"
    assert (config.validation.modes["sampled"].n, config.validation.modes["sampled"].max_tokens) == (2, 10)
    assert config.validation.modes["sampled"].temperature == 0.6
    assert config.warm_start is not None


def test_all_data_of_an_environment_of_several_turns_becomes_the_games(tmp_path: Path) -> None:
    text = """
    model: {path: models/big}
    environment: {name: 'mine.py:Game', max_turns: 9}
    data: {train: {path: a.parquet}, demonstrations: {path: d.parquet}, budget: {low: 100, high: 4000}}
    algorithm: {auxiliary: {sft: 0.1}, shaping: [lcpo_exact]}
    """
    data = small(tmp_path, text).data
    assert [source.task for source in (*data.train, *data.demonstrations)] == ["guess_number"] * 2
    assert data.budget is not None
    made = [make_task(source.task, source.options, 0) for source in data.train if source.task is not None]
    assert set(data.budget.text.replace("{n}", "0123456789")) <= set(made[0].alphabet or "")


def test_every_stage_keeps_a_step_of_its_own(tmp_path: Path) -> None:
    config = small(tmp_path, FULL)
    assert config.training.steps == 3
    assert [(s.start, s.max_tokens, s.n, s.prompts) for s in config.rollout.stages] == [
        (2, 11, 3, None),
        (3, None, None, 4),
    ]


def test_what_counts_steps_or_tokens_comes_into_play_in_two_steps(tmp_path: Path) -> None:
    algorithm = small(tmp_path, FULL).algorithm
    overlong, cosine, kimi, repetition, _ = algorithm.shaping
    assert overlong.cache <= overlong.max_tokens == 10
    assert cosine.margin < 10
    assert kimi.warmup_steps == 1
    assert repetition.ngram < 10
    assert algorithm.critic is not None
    assert algorithm.critic.warmup_steps == 1
    assert algorithm.kl.reference.every == 1
    assert algorithm.aggregation.horizon == 10
    assert 1 < algorithm.refill.rounds <= 3
    curriculum = algorithm.curriculum
    assert (curriculum.column, curriculum.buckets, curriculum.warmup_steps) == ("length", 2, 1)


def test_the_task_s_checker_takes_the_first_verifier_s_place_and_weight(tmp_path: Path) -> None:
    parts = small(tmp_path, FULL).reward.parts
    assert [(p.name, p.weight, p.sources) for p in parts] == [("think_format", 0.5, None), ("task", 2.0, None)]
    only_text = "model: {path: m}\ndata: {train: {path: d}}\nreward: {parts: language}\n"
    assert [p.name for p in small(tmp_path, only_text).reward.parts] == ["task", "language"]


def test_weights_of_reward_parts_follow_the_parts(tmp_path: Path) -> None:
    text = (
        "model: {path: m}\ndata: {train: {path: d}}\nreward: {parts: [math, think_format]}\n"
        "algorithm: {preset: gdpo, advantage: {weights: {math: 2.0, think_format: 0.5}}}\n"
    )
    assert small(tmp_path, text).algorithm.advantage.weights == {"task": 2.0, "think_format": 0.5}


def test_what_a_small_float32_model_on_a_cpu_cannot_use_is_taken_off_the_optimizers(tmp_path: Path) -> None:
    options = "optimizer: {name: muon, precision: stochastic, offload: true, groups: [{match: layers.27, lr_scale: 2}]}"
    text = (
        f"model: {{path: m, dtype: bfloat16}}\ndata: {{train: {{path: d}}}}\ntraining: {{{options}}}\n"
        f"algorithm: {{preset: ppo, critic: {{{options}}}}}\n"
    )
    config = small(tmp_path, text)
    assert config.algorithm.critic is not None
    for optimizer in (config.training.optimizer, config.algorithm.critic.optimizer):
        assert (optimizer.precision, optimizer.offload, optimizer.groups) == ("master", False, [])
        assert optimizer.name == "muon"


def test_prerendered_prompts_become_those_of_a_task_and_a_plain_recipe_keeps_its_template(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    for more, is_changed in (("template: {kind: prerendered}", True), ("max_prompt_tokens: 64", False)):
        recipe.write_text(f"model: {{path: m}}\ndata: {{train: {{path: a.jsonl}}, {more}}}\nreward: {{parts: exact}}")
        loaded, changes = load_shrunk(TrainConfig, recipe, [])
        assert not loaded.config.data.template.prerendered
        assert any("template" in change for change in changes) == is_changed


def test_overrides_come_after_shrinking(tmp_path: Path) -> None:
    config = small(tmp_path, FULL, "rollout.n=6", "training.steps=5")
    assert (config.rollout.n, config.training.steps) == (6, 5)


def test_defaults_are_shrunk_like_values_that_were_given(tmp_path: Path) -> None:
    text = "model: {path: m}\ndata: {train: {path: d}}\nreward: {parts: math}\nalgorithm: {preset: r1_zero, shaping: [repetition]}\n"
    config = small(tmp_path, text)
    assert (config.rollout.prompts, config.rollout.n, config.rollout.max_tokens) == (4, 4, 10)
    assert config.algorithm.kl.reference.every == 1
    assert config.algorithm.shaping[0].ngram < 10
    assert config.training.mini_batches == 1


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_nothing_of_a_recipe_s_algorithm_is_dropped(path: Path) -> None:
    if command_of(path) == "sft":
        config = load_shrunk(SftConfig, path)[0].config
        assert (config.sft.updates, config.model.path) == (2, None)
        return
    if command_of(path) == "reward-model":
        whole_scorer, small_scorer = (
            load(RewardModelConfig, path).config,
            load_shrunk(RewardModelConfig, path)[0].config,
        )
        assert small_scorer.reward_model.updates == 2
        assert small_scorer.reward_model.centre == whole_scorer.reward_model.centre
        assert small_scorer.reward_model.steps == whole_scorer.reward_model.steps
        return
    if path.stem in PREFERENCES:
        whole, small_one = (
            load(PreferConfig, path).config.preference,
            load_shrunk(PreferConfig, path)[0].config.preference,
        )
        assert small_one.loss == whole.loss
        assert (small_one.updates, small_one.data[0].task) == (2, "sort_digits")
        return
    if "\nstages:\n" in path.read_text(encoding="utf-8"):
        wholes, smalls = load(StagesConfig, path), load_shrunk_stages(path)[0]
        assert list(smalls.config.stages) == list(wholes.config.stages)
        pairs = zip(*(load_stage_configs(one, path, Path()).values() for one in (wholes, smalls)), strict=True)
        algorithms = [[one.config.algorithm for one in two] for two in pairs if isinstance(two[0].config, TrainConfig)]
        assert all(choices(before) == choices(after) for before, after in algorithms)
        return
    full, shrunk = load(TrainConfig, path).config, load_shrunk(TrainConfig, path)[0].config
    shown = [("kl.context", "demonstration")] if path.stem == "gold" else []  # the tiny model is its own teacher
    assert [one for one in choices(shrunk.algorithm) if one not in shown] == choices(full.algorithm)
    for section in ("kl", "critic", "auxiliary", "entropy", "refill"):
        before, after = getattr(full.algorithm, section), getattr(shrunk.algorithm, section)
        assert (before is None) == (after is None), section
        assert (before == type(before)()) == (after == type(after)()) if before is not None else True, section
    assert shrunk.algorithm.aggregation.name == full.algorithm.aggregation.name
    assert len(shrunk.rollout.stages) == len(full.rollout.stages)
    assert (shrunk.data.budget is None) == (full.data.budget is None)
    assert shrunk.rollout.temperature == full.rollout.temperature


def test_the_changes_are_listed_and_the_values_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(FULL)
    values = load(TrainConfig, path).resolved
    before = copy.deepcopy(values)
    _, changes = shrink(values)
    assert values == before
    assert "rollout.n: 64 -> 4" in changes
    assert "data.train: a.parquet, b.parquet -> sort_digits" in changes
    assert not any(change.startswith(("training.optimizer.lr", "algorithm.clip")) for change in changes)
    _, changes = shrink(load_shrunk(TrainConfig, path)[0].resolved)
    assert not any(change.startswith(("rollout", "training", "algorithm", "reward", "run")) for change in changes)


def test_what_is_wrong_with_a_recipe_is_still_said(tmp_path: Path) -> None:
    wrong = "model: {path: m}\ndata: {train: {path: d}}\nalgorithm: {preset: dapo, shaping: 3}\n"
    with pytest.raises(UserError, match="shaping"):
        small(tmp_path, wrong)


def test_the_command_line_says_what_was_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(RECIPES / "dapo.yaml"), "--shrink", "--dry-run", "training.mini_batches=1"]) == 0
    printed = capsys.readouterr().out
    assert "shrunk: rollout.n: 16 -> 4\n" in printed
    assert "shrunk: model: models/Qwen2.5-32B -> " in printed
    assert "16 (4 prompts x 4 samples)" in printed
    assert "shrunk: training.mini_batches" not in printed, "an override has the last word"
    assert main(["train", str(RECIPES / "sort_digits.yaml"), "--shrink", "--dry-run"]) == 0
    changes = dict(
        line.removeprefix("shrunk: ").split(": ", 1)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("shrunk: ")
    )
    assert "sort_digits -> sort_digits" not in changes.values()
    assert "options.max_digits unset -> 3" in changes["data.train"]
    assert "new.num_layers 2 -> 1" in changes["model"]
    assert "updates 250 -> 20" in changes["warm_start"]
    assert "1 (mini_batches 1 x epochs 1)" in printed


def test_games_keep_their_rules_and_tools_become_a_calculator() -> None:
    game = load_shrunk(TrainConfig, RECIPES / "ragen_sokoban.yaml")[0].config
    assert (game.environment.name, game.environment.max_turns) == ("sokoban", 5)
    assert game.environment.options == {"observation": "grid_coord", "words": False, "format": "last_word"}
    assert [source.task for source in game.data.train] == ["sokoban"]
    agent = load_shrunk(TrainConfig, RECIPES / "retool.yaml")[0].config
    assert (agent.environment.name, [tool.name for tool in agent.environment.tools]) == ("tags", ["calculator"])
    assert ([source.task for source in agent.data.train], agent.reward.parts[0].name) == (["calculator"], "task")
    twice = load_shrunk(TrainConfig, RECIPES / "multi_turn_correction.yaml")[0].config
    assert (twice.environment.name, twice.environment.options["alpha"]) == ("multi_turn_correction", 10.0)


@pytest.mark.parametrize(("name", "options"), [("count_shapes", {}), ("click_target", {"grid": 2, "side": 32})])
def test_drawn_tasks_keep_their_pictures(name: str, options: dict[str, object]) -> None:
    config = load_shrunk(TrainConfig, RECIPES / f"{name}.yaml")[0].config
    sources = [config.data.train[0], config.data.validation[0]]
    assert [(source.task, source.options) for source in sources] == [(name, options)] * 2
    assert config.model.new is not None
    assert config.model.new.family == "qwen3_vl"
    assert config.warm_start is not None
    assert config.warm_start.data[0].task == name
    assert config.rollout.max_tokens == config.validation.modes["greedy"].max_tokens == 24
    large = load(TrainConfig, RECIPES / f"{name}.yaml", ["data.train.0.options.side=512"]).resolved
    assert shrink(large)[0]["data"]["train"][0]["options"]["side"] == 64
