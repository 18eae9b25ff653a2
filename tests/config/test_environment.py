"""Environments beside the rest of a run: what fits, and what is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import load, load_small
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
        ([*ONE_TURN], "task guess_number is a game of several turns"),
        (["environment=single_turn", "data.train={task: sort_digits}"], "max_turns has no effect on single_turn"),
        (["data.train={task: sort_digits}"], "environment guess_number plays with numbers of the task guess_number"),
        (["data.validation={path: a.jsonl}"], "and data has a.jsonl"),
        (["reward.parts=[exact]"], "reward.parts has no effect: environment guess_number gives the rewards itself"),
        (["environment.max_turns=1", "environment.max_tokens=9"], "max_tokens has no effect with environment.max_turns=1"),
        ([*ONE_TURN, "data.train={task: sort_digits}"], "gigpo compares turns that begin in the same state"),
        (["environment.max_turns=1"], "max_turns=1 ends it after the first guess: set environment.max_turns"),
        (["environment={name: game.py:Game, max_turns: 1}"], "gigpo compares turns that begin in the same state, and environment.max_turns=1"),
        (["rollout.n=1"], "compares samples of one prompt"),
        (["algorithm.advantage=spo_tree"], "cannot be brought back to there"),
        (
            ["algorithm=luffy", "data.demonstrations_per_group=1", "data.demonstration_column=answer"],
            "a demonstration is one answer, and environment guess_number may ask for several",
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
    config = load_small(TrainConfig, tmp_path / "recipe.yaml", [])[0].config
    assert (config.environment.name, config.environment.max_turns) == ("guess_number", 3)
    assert [source.task for source in (*config.data.train, *config.data.validation)] == ["guess_number"] * 2
    assert config.warm_start is not None
    assert config.warm_start.data[0].task == "guess_number"


def test_an_environment_of_one_turn_shrinks_to_a_game_of_two(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "{model: {path: m}, data: {train: {path: a.jsonl}}, environment: game.py:Game, reward: {parts: exact}, algorithm: dr_grpo}"
    )
    assert load_small(TrainConfig, tmp_path / "recipe.yaml", [])[0].config.environment.max_turns == 2
