"""verl's configs and launch scripts become recipes that load, and every key of theirs is in the table."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.foreign_keys.counterparts import has_key, leading_key
from burnish.config.foreign_keys.verl_keys import VERL
from burnish.config.importing.draft import DataFacts, Imported, TableRow
from burnish.config.importing.hydra_config import read_yaml_config
from burnish.config.importing.verl_algorithm import ADVANTAGES
from burnish.config.importing.verl_recipe import import_verl
from burnish.config.importing.verl_script import read_launch_script
from burnish.config.loading import load_tree
from burnish.config.schema import SftConfig, TrainConfig

SCRIPTS = Path(__file__).parent / "scripts"
SCRIPT_NAMES = ("verl_grpo.sh", "verl_dapo.sh", "verl_ppo.sh", "verl_gspo_lora.sh", "verl_multiturn.yaml")
ENVIRONMENT = {"HOME": "/home/me"}


def imported(name: str, facts: DataFacts | None = None) -> tuple[TrainConfig, Imported]:
    made = import_verl(SCRIPTS / name, ENVIRONMENT, facts or DataFacts())
    return load_tree(TrainConfig, made.tree, Path("recipe.yaml")).config, made


def from_keys(tmp_path: Path, *keys: str) -> tuple[TrainConfig, dict[str, TableRow]]:
    path = tmp_path / "run.sh"
    path.write_text(
        "python3 -m verl.trainer.main_ppo data.train_files=a.parquet actor_rollout_ref.model.path=m " + " ".join(keys)
    )
    made = import_verl(path, ENVIRONMENT, DataFacts())
    return load_tree(TrainConfig, made.tree, path).config, {row.key: row for row in made.rows}


@pytest.mark.parametrize("name", SCRIPT_NAMES)
def test_every_key_has_one_row(name: str) -> None:
    path = SCRIPTS / name
    given = (
        read_yaml_config(path, ENVIRONMENT) if name.endswith("yaml") else read_launch_script(path, ENVIRONMENT).values
    )
    rows = [row for row in imported(name)[1].rows if not row.is_default]
    assert sum(row.num_keys for row in rows) == len(given)
    assert {row.key for row in rows if row.num_keys == 1} <= set(given)


@pytest.mark.parametrize("name", SCRIPT_NAMES)
def test_translations_agree_with_the_table_of_counterparts(name: str) -> None:
    for row in imported(name)[1].rows:
        if row.verdict == "translated" and "=" in row.ours:
            key = re.sub(r"\.\d+|\.kwargs\..*|\.options\..*", "", leading_key(row.ours)).replace(
                "modes.sampled", "modes.greedy"
            )
            assert has_key(TrainConfig, key), row
            listed = key if row.key not in VERL else leading_key(VERL[row.key].train or "")
            assert key.startswith(listed) or listed.startswith(key), (row, listed)


def test_grpo() -> None:
    config, made = imported("verl_grpo.sh", DataFacts(lambda path: 7473))
    assert config.data.train[0].path == "/home/me/data/gsm8k/train.parquet"
    assert (config.rollout.prompts, config.rollout.n, config.rollout.max_tokens) == (1024, 5, 1024)
    assert (config.training.mini_batches, config.training.steps) == (4, 7 * 15)  # verl drops the last, incomplete batch
    assert config.training.activations == "recompute"
    algorithm = config.algorithm
    assert (algorithm.advantage.name, algorithm.aggregation.name) == ("grpo", "token-mean")
    assert (algorithm.clip.low, algorithm.clip.high, algorithm.clip.dual) == (0.2, 0.2, 3.0)
    assert (algorithm.kl.loss.coef, algorithm.kl.loss.estimator, algorithm.kl.reference.name) == (0.001, "k3", "frozen")
    assert config.training.optimizer.weight_decay == 0.01  # verl's default
    assert (config.placement.name, [tracker.name for tracker in config.run.trackers]) == ("ray", ["wandb"])
    assert [part.name for part in config.reward.parts] == ["number"]
    verdicts = {row.key: row.verdict for row in made.rows}
    assert verdicts["actor_rollout_ref.rollout.name"] == "differs"
    assert verdicts["actor_rollout_ref.model.use_remove_padding"] == "same"
    assert verdicts["actor_rollout_ref.rollout.tensor_model_parallel_size"] == "none"


def test_dapo_with_rollout_correction() -> None:
    config, made = imported("verl_dapo.sh")
    algorithm = config.algorithm
    assert algorithm.preset == "dapo"
    assert (algorithm.clip.low, algorithm.clip.high, algorithm.clip.dual) == (0.2, 0.28, 10.0)
    assert [(f.name, f.metric) for f in algorithm.filters] == [("zero_signal", "accuracy")]
    assert (algorithm.refill.rounds, algorithm.refill.oversample, algorithm.refill.short) == (10, 3, "error")
    assert [shaper.name for shaper in algorithm.shaping] == ["signed", "soft_overlong"]
    assert algorithm.shaping[1].cache == 4096
    assert (algorithm.correction.name, algorithm.correction.weights, algorithm.correction.threshold) == (
        "decoupled",
        "token",
        2.0,
    )
    assert algorithm.kl.reference.name == "none"
    assert config.training.optimizer.warmup == 10 * 16  # verl counts steps, burnish updates
    assert (config.parallel.context, config.parallel.offload) == (4, True)
    assert config.validation.modes["sampled"].n == 32
    row = {row.key: row for row in made.rows}["actor_rollout_ref.rollout.calculate_log_probs"]
    assert (row.verdict, "always recorded" in row.ours) == ("same", True)


def test_ppo_with_a_critic_and_a_reward_model() -> None:
    config, made = imported("verl_ppo.sh")
    algorithm = config.algorithm
    assert (algorithm.advantage.name, algorithm.advantage.lam) == ("gae", 0.95)
    assert (algorithm.kl.reward.coef, algorithm.kl.adaptive.target) == (0.01, 0.2)  # type: ignore[union-attr]
    assert algorithm.critic is not None
    assert (algorithm.critic.optimizer.lr, algorithm.critic.optimizer.warmup, algorithm.critic.warmup_steps) == (
        1e-5,
        0.05,
        5,
    )
    assert config.reward.parts[0].options == {"path": "models/reward"}
    assert config.placement.name == "local"
    rows = {row.key: row for row in made.rows}
    assert rows["my.own.key"] == TableRow("my.own.key", 7, "none", "")
    assert (
        rows["actor_rollout_ref.actor.clip_ratio"].verdict == "differs"
    )  # verl 0.9 reads clip_ratio_low and clip_ratio_high


def test_gspo_with_lora_and_a_function() -> None:
    config, made = imported("verl_gspo_lora.sh")
    assert config.model.lora is not None
    assert (config.model.lora.rank, config.model.lora.alpha, config.model.lora.targets) == (
        64,
        32,
        ["q_proj", "v_proj"],
    )
    assert (config.algorithm.ratio.name, config.algorithm.clip.low, config.algorithm.clip.high) == (
        "seq_token",
        3e-4,
        4e-4,
    )
    assert (config.reward.parts[0].name, config.reward.parts[0].options) == (
        "rewards/score.py:graded",
        {"strict": True},
    )
    assert (config.seed, config.data.sampler) == (7, "sequential")
    assert any("~critic.megatron" in note for note in made.notes)


def test_multi_turn_yaml_with_interpolations() -> None:
    config, _ = imported("verl_multiturn.yaml")
    environment = config.environment
    assert (environment.name, environment.max_turns, environment.max_tokens) == ("verl", 5, 3072)
    assert environment.options["tool_config_path"] == "config/tools.yaml"
    assert config.validation.modes["sampled"].n == 2  # oc.select with its default
    assert config.run.name == "tools-run-1"
    assert config.data.template.kwargs == {"enable_thinking": False}
    assert config.parallel.tensor == 2


@pytest.mark.parametrize("estimator", [name for name in ADVANTAGES if name != "gae"])
def test_every_estimator_loads(estimator: str, tmp_path: Path) -> None:
    config, _ = from_keys(tmp_path, f"algorithm.adv_estimator={estimator}", "actor_rollout_ref.rollout.n=4")
    assert config.algorithm.advantage.name == ADVANTAGES[estimator]
    assert config.algorithm.aggregation.name == "token-mean"
    assert config.algorithm.kl.reference.name == "none"


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("vanilla", ("token", "ppo", "surrogate", "token-mean")),
        ("gspo", ("seq_token", "ppo", "surrogate", "token-mean")),
        ("sapo", ("token", "soft", "surrogate", "token-mean")),
        ("gpg", ("none", "none", "logprob", "token-mean")),
        ("clip_cov", ("token", "clip_cov", "surrogate", "token-mean")),
        ("kl_cov", ("token", "kl_cov", "surrogate", "token-mean")),
        ("geo_mean", ("sequence", "log_geo", "surrogate", "seq-mean-token-mean")),
        ("cispo", ("token", "is_weight", "sg_logprob", "token-mean")),
        ("dppo_tv", ("token", "dppo_tv", "sg_logprob", "token-mean")),
        ("dro", ("none", "none", "dro", "token-mean")),
    ],
)
def test_every_loss_mode_has_its_slots(mode: str, expected: tuple[str, ...], tmp_path: Path) -> None:
    keys = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.n=4",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={mode}",
    ]
    config, _ = from_keys(tmp_path, *keys, "actor_rollout_ref.actor.policy_loss.dro_beta=0.2")
    a = config.algorithm
    assert (a.ratio.name, a.clip.name, a.loss.name, a.aggregation.name) == expected
    assert a.filters == []  # a preset's own filters must not slip in


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["rollout_is=token", "rollout_is_threshold=3.0"], {"name": "decoupled", "weights": "token", "threshold": 3.0}),
        (["bypass_mode=true", "rollout_is=token"], {"name": "bypass", "weights": None, "loss": "ppo_clip"}),
        (["bypass_mode=true", "loss_type=reinforce", "rollout_is=sequence"], {"name": "bypass", "loss": "reinforce"}),
        (["rollout_rs=token_k2", "rollout_rs_threshold=0.1"], {"name": "decoupled", "reject": {"token_k2": 0.1}}),
        (["rollout_is=null"], {"name": "none"}),
    ],
)
def test_rollout_correction(keys: list[str], expected: dict[str, Any], tmp_path: Path) -> None:
    given = [f"algorithm.rollout_correction.{key}" for key in keys]
    config, rows = from_keys(tmp_path, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", *given)
    assert expected.items() <= config.algorithm.correction.model_dump().items()
    assert all(key.partition("=")[0] in rows for key in given)


@pytest.mark.parametrize(
    ("keys", "expected", "verdict"),
    [
        (["router_replay.mode=R2", "ppo_mini_batch_size=64"], {"learner_experts": "replay"}, "translated"),
        (["router_replay.mode=R2", "ppo_mini_batch_size=256"], {"learner_experts": "ignore"}, "differs"),
        (["router_replay.mode=R3"], {"engine_experts": "replay"}, "translated"),
    ],
)
def test_router_replay(keys: list[str], expected: dict[str, str], verdict: str, tmp_path: Path) -> None:
    given = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "data.train_batch_size=256"]
    config, rows = from_keys(tmp_path, *given, *(f"actor_rollout_ref.actor.{key}" for key in keys))
    assert expected.items() <= config.algorithm.router.model_dump().items()
    assert rows["actor_rollout_ref.actor.router_replay.mode"].verdict == verdict


def test_what_cannot_be_translated_is_refused_with_the_names_that_can(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"adv_estimator=mine: burnish knows gae, grpo, .*algorithm.advantage=file.py:function"
    ):
        from_keys(tmp_path, "algorithm.adv_estimator=mine")
    (tmp_path / "other.sh").write_text("python3 -m verl.model_merger merge\n")
    with pytest.raises(UserError, match=r"other.sh: no command runs verl's trainer"):
        import_verl(tmp_path / "other.sh", ENVIRONMENT, DataFacts())


def test_a_value_that_is_no_number_is_noted_and_the_default_is_used(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.optim.lr=fast data.train_files=a")
    made = import_verl(path, ENVIRONMENT, DataFacts())
    assert made.tree["training"]["optimizer"]["lr"] == 1e-6
    assert "actor_rollout_ref.actor.optim.lr=fast is not a number; 1e-06 is used" in made.notes


def test_a_named_config_beside_the_script_is_read(tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "mine.yaml").write_text(
        "data: {train_batch_size: 32}\nactor_rollout_ref: {rollout: {n: 3}}\n"
    )
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo --config-path=config --config-name=mine actor_rollout_ref.rollout.n=6\n"
    )
    assert read_launch_script(script, {}).values == {"data.train_batch_size": 32, "actor_rollout_ref.rollout.n": 6}
    script.write_text("python3 -m verl.trainer.main_ppo --config-name absent algorithm.lam=0.9\n")
    found = read_launch_script(script, {})
    assert found.values == {"algorithm.lam": 0.9}
    assert "absent.yaml is not here" in found.notes[0]


def test_hydra_s_list_of_overrides_is_read(tmp_path: Path) -> None:
    (tmp_path / "overrides.yaml").write_text("- data.train_batch_size=32\n- '+a.b={c: 1}'\n")
    assert read_yaml_config(tmp_path / "overrides.yaml", {}) == {"data.train_batch_size": 32, "a.b.c": 1}


def test_the_sft_trainer_becomes_burnish_sft() -> None:
    made = import_verl(SCRIPTS / "verl_sft.sh", ENVIRONMENT, DataFacts())
    config = load_tree(SftConfig, made.tree, Path("recipe.yaml")).config
    assert (made.command, config.model.path) == ("sft", "Qwen/Qwen2.5-0.5B-Instruct")
    stage = config.sft
    assert (stage.batch_size, stage.max_tokens, stage.overlong, stage.updates) == (64, 2048, "filter", 20)
    assert (stage.optimizer.lr, stage.optimizer.schedule, stage.optimizer.warmup) == (1e-5, "cosine", 0.1)
    assert (stage.optimizer.clip_norm, stage.optimizer.weight_decay) == (0.5, 0.01)
    verdicts = {row.key: row.verdict for row in made.rows}
    assert (verdicts["data.val_files"], verdicts["data.truncation"]) == ("differs", "differs")
    given = read_launch_script(SCRIPTS / "verl_sft.sh", ENVIRONMENT).values
    assert sum(row.num_keys for row in made.rows if not row.is_default) == len(given)


def test_a_key_whose_value_is_empty_has_its_default(tmp_path: Path) -> None:
    config, rows = from_keys(tmp_path, "actor_rollout_ref.actor.optim.lr=$1", "actor_rollout_ref.rollout.n=$(nproc)")
    assert (config.training.optimizer.lr, config.rollout.n) == (1e-6, 1)
    assert rows["actor_rollout_ref.rollout.n"].is_default
