"""Keys of environments, vLLM and SGLang: combinations that are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.foreign_engines import Vllm
from burnish.config.loading import load, load_shrunk
from burnish.config.schema import TrainConfig

GAME = [
    "model.new={}",
    "data.train={task: guess_number}",
    "environment={name: guess_number, max_turns: 3}",
    "algorithm={preset: gigpo, kl: {loss: {coef: 0}, reference: none}}",
]
ONE_TURN = ["environment=single_turn", "environment.max_turns=1"]
RECIPES = Path(__file__).parents[2] / "recipes"


def test_a_name_alone_is_an_environment() -> None:
    config = load(TrainConfig, None, [GAME[0], GAME[1], "environment=game.py:Game"]).config
    assert (config.environment.name, config.environment.max_turns) == ("game.py:Game", 1)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([*ONE_TURN], "task guess_number is a game"),
        (["environment=single_turn", "data.train={task: sort_digits}"], "max_turns has no effect on single_turn"),
        (["data.train={task: sort_digits}"], "environment guess_number needs rows of the task guess_number"),
        (["data.validation={path: a.jsonl}"], "but data has a.jsonl"),
        (["reward.parts=[exact]"], "reward.parts has no effect: environment guess_number gives the rewards itself"),
        (["environment.max_turns=1", "environment.max_tokens=9"], "max_tokens has no effect with environment.max_turns=1"),
        ([*ONE_TURN, "data.train={task: sort_digits}"], "gigpo compares turns that begin in the same state"),
        (["environment.max_turns=1"], "max_turns=1 ends it after the first answer: set environment.max_turns"),
        (["environment={name: game.py:Game, max_turns: 1}"], "gigpo compares turns that begin in the same state, but environment.max_turns=1"),
        (
            ["environment={name: game.py:Game, max_turns: 1}", "algorithm=ppo", "algorithm.advantage=bilevel_gae"],
            "bilevel_gae estimates from turn to turn, but environment.max_turns=1 gives each sample one turn",
        ),
        (["rollout.n=1"], "compares samples of one prompt"),
        (["algorithm.advantage=spo_tree"], "cannot be restored to such a state"),
        (
            ["algorithm=luffy", "data.demonstrations_per_group=1", "data.demonstration_column=answer"],
            "a demonstration is one answer, but environment guess_number may ask for several",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_reason(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        load(TrainConfig, None, [*GAME, *overrides])
    assert words in str(error.value)


def test_a_users_environment_may_have_states_any_data_and_any_reward() -> None:
    more = ["environment.name=game.py:Game", "data.train={task: sort_digits}", "reward.parts=[exact]"]
    assert load(TrainConfig, None, [*GAME, *more]).config.algorithm.preset == "gigpo"


@pytest.mark.parametrize("name", ["game.py:Game", "guess_number"])
def test_any_environment_shrinks_to_the_built_in_game(name: str, tmp_path: Path) -> None:
    recipe = (RECIPES / "gigpo.yaml").read_text().replace("name: guess_number", f"name: {name}")
    (tmp_path / "recipe.yaml").write_text(recipe)
    config = load_shrunk(TrainConfig, tmp_path / "recipe.yaml", [])[0].config
    assert (config.environment.name, config.environment.max_turns) == ("guess_number", 3)
    assert [source.task for source in (*config.data.train, *config.data.validation)] == ["guess_number"] * 2
    assert config.warm_start is not None
    assert config.warm_start.data[0].task == "guess_number"


def test_an_environment_of_one_turn_shrinks_to_a_game_of_two(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "{model: {path: m}, data: {train: {path: a.jsonl}}, environment: game.py:Game, reward: {parts: exact}, algorithm: dr_grpo}"
    )
    assert load_shrunk(TrainConfig, tmp_path / "recipe.yaml", [])[0].config.environment.max_turns == 2


# --- SGLang ----------------------------------------------------------------------------------------------------

MINIMAL = ["model.new.num_layers=1", "data.train.task=sort_digits"]
SGLANG = ["rollout.engine=sglang", "rollout.sglang.urls=http://localhost:30000"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=sglang"], "give the addresses of its servers in rollout.sglang.urls"),
        (SGLANG[1:], "rollout.sglang has no effect with rollout.engine=auto"),
        ([*SGLANG, "rollout.engine=native"], "rollout.sglang has no effect with rollout.engine=native"),
        ([*SGLANG, "rollout.exact=true"], "rollout.exact needs the native engine, but rollout.engine=sglang"),
        ([*SGLANG, "rollout.mismatch=noise"], "rollout.mismatch changes the learner's own tensors"),
        ([*SGLANG, "rollout.cache_gib=1"], "to the native engine, but rollout.engine=sglang"),
        ([*SGLANG, "rollout.cache_dtype=fp8"], "to the native engine, but rollout.engine=sglang"),
        (
            ["rollout.engine=sglang", "rollout.sglang.urls=[]"],
            "give the addresses of its servers in rollout.sglang.urls",
        ),
        (["rollout.engine=sglang", "rollout.sglang.urls=[http://a:1, http://a:1/]"], "names a server twice"),
    ],
)
def test_what_does_not_go_together_with_sglang_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as error:
        load(TrainConfig, None, [*MINIMAL, *overrides])
    assert words in str(error.value)


def test_one_address_or_several() -> None:
    for given, urls in (("http://a:1", ["http://a:1"]), ("[http://a:1, http://b:1]", ["http://a:1", "http://b:1"])):
        config = load(TrainConfig, None, [*MINIMAL, "rollout.engine=sglang", f"rollout.sglang.urls={given}"]).config
        assert config.rollout.sglang is not None
        assert config.rollout.sglang.urls == urls


def test_a_shrunk_recipe_needs_no_server(tmp_path: Path) -> None:
    text = "model: {path: a}\ndata: {train: {path: b.jsonl}}\nrollout: {engine: sglang, sglang: {urls: http://a:1}}\n"
    (tmp_path / "recipe.yaml").write_text(text)
    config = load_shrunk(TrainConfig, tmp_path / "recipe.yaml", [])[0].config
    assert (config.rollout.engine, config.rollout.sglang) == ("auto", None)


# --- vLLM ----------------------------------------------------------------------------------------------------

BASE = ["model.path=somewhere", "data.train.task=sort_digits", "rollout.engine=vllm"]


def test_a_section_given_in_part_keeps_its_defaults() -> None:
    rollout = load(TrainConfig, None, [*BASE, "rollout.vllm.engine.enforce_eager=true"]).config.rollout
    assert rollout.vllm == Vllm(engine={"enforce_eager": True})
    rollout = load(TrainConfig, None, [*BASE, "rollout.cache_gib=2"]).config.rollout
    assert (rollout.vllm, rollout.cache_gib) == (None, 2)
    rollout = load(TrainConfig, None, [*BASE, "rollout.vllm={url: http://there, weights_dir: /shared}"]).config.rollout
    assert rollout.vllm == Vllm(url="http://there", weights_dir="/shared")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.engine=native", "rollout.vllm={}"], "rollout.vllm has no effect with rollout.engine=native"),
        (
            ["rollout.engine=auto", "rollout.vllm.url=http://there"],
            "rollout.vllm has no effect with rollout.engine=auto",
        ),
        (["rollout.exact=true"], "rollout.exact needs the native engine, but rollout.engine=vllm"),
        (
            ["rollout.mismatch={name: noise}"],
            "rollout.mismatch changes the learner's own tensors",
        ),
        (["rollout.cache_dtype=fp8"], "rollout.cache_dtype=fp8 applies to the native engine"),
        (["rollout.cache_gib=1", "rollout.vllm.url=http://there"], "rollout.cache_gib has no effect on a server"),
        (
            ["rollout.vllm={url: http://there, engine: {max_model_len: 9}}"],
            "rollout.vllm.engine has no effect on a server",
        ),
        (["rollout.vllm.weights_dir=/shared"], "rollout.vllm.weights_dir applies to a server"),
        (["rollout.vllm.timeout_s=3"], "rollout.vllm.timeout_s applies to a server"),
        (["rollout.vllm.uri=http://there"], "uri"),
    ],
)
def test_what_makes_no_sense_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(TrainConfig, None, [*BASE, *overrides])
    assert words in str(caught.value)
