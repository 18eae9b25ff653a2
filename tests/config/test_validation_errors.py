"""Error messages name the key, the given and the expected value, and the nearest valid name."""

import re
from pathlib import Path

import pytest

from burnish.config.errors import UserError, hub_dataset_hint, is_hub_id
from burnish.config.foreign_keys.counterparts import has_key, leading_key
from burnish.config.foreign_keys.openrlhf_keys import OPENRLHF
from burnish.config.foreign_keys.trl_keys import TRL
from burnish.config.foreign_keys.verl_keys import VERL
from burnish.config.loading import load
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig, TrainConfig

MINIMAL = ("model.new.num_layers=1", "data.train.task=sort_digits")


def error_of(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(TrainConfig, None, [*MINIMAL, *overrides])
    text = str(caught.value)
    assert not any(
        jargon in text for jargon in ("pydantic", "http", "type=", "input_", "union", "discriminator", "Extra")
    )
    return text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.tempreture=1", "rollout.tempreture: unknown key; did you mean 'temperature'?"),
        ("rolout.n=1", "rolout: unknown key; did you mean 'rollout'?"),
        (
            "rollout.lr=1",
            "rollout.lr: unknown key; 'lr' is a key elsewhere: algorithm.critic.optimizer.lr, algorithm.process.optimizer.lr, training.optimizer.lr",
        ),
        ("run.qqq=1", "run.qqq: unknown key (keys here: directory, name,"),
        ("data.train.0.pth=x", "data.train.0.pth: unknown key; did you mean 'path'?"),
        ("validation.modes.greedy.tmp=1", "validation.modes.greedy.tmp: unknown key"),
        ("algorithm.advantge=x", "algorithm.advantge: unknown key; did you mean 'advantage'?"),
        ("algorithm.advantage.sdt=1", "algorithm.advantage.sdt: grpo has no option 'sdt'; did you mean 'std'?"),
        (
            "algorithm.advantage.gamma=1",
            "grpo has no option 'gamma'; it belongs to advantage reinforce (takes std, eps, singleton, ddof)",
        ),
        ("algorithm.clip.epsilon_high=1", "(takes low, high, dual, drift); TRL's epsilon_high is algorithm.clip.high"),
        (
            "training.learning_rate=1",
            "training.learning_rate: unknown key; TRL's learning_rate is training.optimizer.lr",
        ),
        ("num_generations=8", "num_generations: unknown key; TRL's num_generations is rollout.n"),
        (
            "actor_rollout_ref={rollout: {n: 8}, actor: {optim: {lr: 1}, clip_ratio: 0.2}}",
            "actor_rollout_ref: unknown key; verl's actor_rollout_ref.rollout.n is rollout.n; verl's "
            "actor_rollout_ref.actor.optim.lr is training.optimizer.lr; verl's actor_rollout_ref.actor.clip_ratio is algorithm.clip.low",
        ),
        ("data.train_files=x", "data.train_files: unknown key; verl's data.train_files is data.train.path"),
        ("trainer.total_training_steps=9", "verl's trainer.total_training_steps is training.steps"),
        ("rollout.n_samples_per_prompt=8", "OpenRLHF's n_samples_per_prompt is rollout.n"),
        ("algorithm.ratio.x=1", "algorithm.ratio.x: token has no option 'x' (takes none)"),
        ("algorithm.advantage={name: a.py:f, x: 1}", "a plug-in has no option 'x' (takes options)"),
    ],
)
def test_an_unknown_key_names_the_nearest(override: str, words: str) -> None:
    assert words in error_of(override)


@pytest.mark.parametrize(
    ("kind", "key", "ours"),
    [
        (SftConfig, "max_steps", "sft.updates"),
        (PreferConfig, "beta", "preference.loss.beta"),
        (RewardModelConfig, "per_device_train_batch_size", "reward_model.batch_size"),
        (SftConfig, "num_generations", "rollout.n (of `burnish train`)"),
        (SftConfig, "eval_steps", "validation.every (of `burnish train`)"),
    ],
)
def test_another_system_s_word_is_the_key_of_the_command_that_was_given(kind: type, key: str, ours: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"TRL's {key} is {ours}")):
        load(kind, None, [f"{key}=1"])


def test_every_counterpart_of_another_system_s_word_is_a_key() -> None:
    for ours in {*TRL.values(), *OPENRLHF.values(), *VERL.values()}:
        keys = [leading_key(text) for text in (ours.train,) if text is not None]
        assert all(has_key(TrainConfig, key) for key in keys), keys
        stage = None if ours.stage is None else leading_key(ours.stage)
        kinds = {"sft": SftConfig, "preference": PreferConfig, "reward_model": RewardModelConfig}
        found = [has_key(kind, stage.replace("{stage}", name)) for name, kind in kinds.items()] if stage else [True]
        assert any(found), stage
    assert not has_key(TrainConfig, "rollout.m")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.n=many", "rollout.n: got 'many', expected an integer of 1 or more"),
        ("rollout.n=0", "rollout.n: got 0, expected an integer of 1 or more"),
        ("rollout.n=1.5", "rollout.n: got 1.5, expected an integer"),
        ("rollout.top_p=2", "rollout.top_p: got 2, expected a number above 0, at most 1"),
        ("rollout.stop=5", "rollout.stop: got 5, expected a list of texts"),
        ("rollout.stop=[5]", "rollout.stop.0: got 5, expected text; put it in quotes"),
        ("rollout=5", "rollout: got 5, expected a section with the keys temperature, top_p"),
        ("rollout=null", "rollout: got null, expected a section"),
        (
            "model.dtype=float31",
            "got 'float31', expected one of float64, float32, bfloat16, float16; did you mean 'float32'?",
        ),
        (
            "run.trackers=[wand]",
            "run.trackers.0: got 'wand', expected one of tensorboard, wandb, mlflow, swanlab, trackio; did you mean 'wandb'?",
        ),
        ("training.optimizer.betas=[1]", "training.optimizer.betas: got [1], expected a list of 2 numbers"),
        ("reward.parts=[{weight: 1}]", "reward.parts.0.name: missing; expected text"),
        (
            "algorithm.advantage=grop",
            "algorithm.advantage: got 'grop', expected one of grpo, reinforce, rloo, ",
        ),
        (
            "algorithm.ratio=a.py:f",
            "algorithm.ratio: got 'a.py:f', expected one of token, sequence, seq_token, seq_prod, none",
        ),
        (
            "algorithm.advantage.std=grup",
            "algorithm.advantage.std: got 'grup', expected one of group, none, batch; did you mean 'group'?",
        ),
        ("algorithm.filters=[overlng]", "algorithm.filters.0: got 'overlng'"),
        ("algorithm=grop", "unknown algorithm 'grop'; did you mean 'grpo'?"),
        ("algorithm.preset=[1]", "algorithm"),
    ],
)
def test_a_wrong_value_says_what_was_given_and_expected(override: str, words: str) -> None:
    assert words in error_of(override)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.n=1", "grpo compares samples of one prompt and needs rollout.n of 2 or more"),
        ("algorithm.kl.reference=none", "algorithm: kl has a coefficient above 0 but kl.reference is none"),
        ("data.train.path=x", "data.train.0: a data source needs exactly one of path, task, plugin; got path, task"),
        ("training.optimizer.final=0.1", "training.optimizer: final has no effect on a constant schedule"),
        ("run.keep_best=false", "run.keep_best=false has no effect without validation.every"),
        ("validation.every=5", "validation.every has no effect without held-out prompts: give data.validation"),
        ("data.train.answer_key=target", "prompt_key and answer_key name columns of a file or a plug-in"),
    ],
)
def test_an_invalid_combination_says_why(override: str, words: str) -> None:
    assert words in error_of(override)


def test_all_problems_are_listed_at_once_one_line_each() -> None:
    lines = error_of("rollout.n=0", "rollout.tempreture=1", "seed=-1", "data.sampler=[1]").splitlines()
    assert lines[0] == "configuration: 3 problems"
    assert sorted(line.split(":")[0].strip() for line in lines[1:]) == ["rollout.n", "rollout.tempreture", "seed"]


def test_an_id_of_the_hub_is_told_from_a_local_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_hub_id("Qwen/Qwen2.5-0.5B")
    words = "`hf download openai/gsm8k --repo-type dataset --local-dir data/gsm8k`"
    assert words in hub_dataset_hint("openai/gsm8k")
    (tmp_path / "mine").mkdir()
    local = ("models/Qwen2.5-0.5B", "mine/model", "/a/b", "../a/b", "a/b/c", "gsm8k", "my/train.jsonl")
    assert [is_hub_id(path) or hub_dataset_hint(path) for path in local] == [""] * len(local)
