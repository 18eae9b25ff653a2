"""Models that read what the policy wrote are refused where they are made for fewer positions than that has tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.models.architecture import positions_of
from burnish.trainers.input_checks import check_positions, check_readers
from tests.trainers.tiny import TINY, run_of

TEACHER = ["algorithm=on_policy_distillation", "algorithm.kl.reference.path=it"]
PROCESS = ["algorithm=prime", "algorithm.process.path=it"]
TASK = ["model.new.num_layers=1", "data.train.task=sort_digits", "rollout.max_tokens=20"]
GAME = ["model.new.num_layers=1", "environment={name: guess_number, max_turns: 3}", "data.train.task=guess_number"]


def with_positions(directory: Path, positions: int) -> Path:
    """A model directory that says what it is made for."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": positions}))
    return directory


def reader(base: Path, positions: int) -> None:
    (base / "it").mkdir()
    (base / "it" / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with_positions(base / "it", positions)


def check(base: Path, overrides: list[str], held_out: int = 0, most: int | None = None) -> None:
    """Training prompts of 10 tokens, and one to hold out."""
    config = load(TrainConfig, None, [*overrides, "validation.modes={greedy: {max_tokens: 20}}"]).config
    prompts = [Prompt(Row("a", "?", "s", None), "?", [0] * held_out)] if held_out else []
    check_readers(config, base, 10, prompts, most)


@pytest.mark.parametrize("reads", [TEACHER, PROCESS])
def test_a_prompt_and_its_answer_must_have_positions(reads: list[str], tmp_path: Path) -> None:
    reader(tmp_path, 30)
    check(tmp_path, [*TASK, *reads])
    with_positions(tmp_path / "it", 29)
    words = r"rollout.max_tokens=20 more make 30, but algorithm\..*path=it is made for 29 positions; lower rollout.max_tokens"
    with pytest.raises(UserError, match=words):
        check(tmp_path, [*TASK, *reads])


def test_an_adapter_has_the_positions_of_its_base(tmp_path: Path) -> None:
    reader(tmp_path, 29)
    (tmp_path / "it").rename(tmp_path / "base")
    (tmp_path / "it").mkdir()
    (tmp_path / "it" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "../base"}))
    with pytest.raises(UserError, match="path=it is made for 29 positions"):
        check(tmp_path, [*TASK, *PROCESS])


def test_held_out_answers_are_read_by_a_process_reward_model_alone(tmp_path: Path) -> None:
    reader(tmp_path, 30)
    check(tmp_path, [*TASK, *TEACHER], held_out=11)
    with pytest.raises(UserError, match=r"validation.modes.greedy.max_tokens=20 more make 31"):
        check(tmp_path, [*TASK, *PROCESS], held_out=11)


def test_the_first_turn_must_fit_what_the_environment_allows() -> None:
    limited = [
        *GAME,
        "environment.max_tokens=30",
        "rollout.max_tokens=20",
        "validation.modes={greedy: {max_tokens: 25}}",
    ]
    config = load(TrainConfig, None, limited).config
    held_out = [Prompt(Row("a", "?", "s", None), "?", [0] * 6)]
    assert check_positions(config, None, 10, []) == 30
    with pytest.raises(
        UserError, match=r"rollout.max_tokens=20 more make 31, but environment.max_tokens=30 is for all"
    ):
        check_positions(config, 300, 11, [])
    with pytest.raises(
        UserError, match=r"greedy.max_tokens=25 more make 31, but environment.max_tokens=30 .* lower validation.modes"
    ):
        check_positions(config, 300, 10, held_out)


def test_all_turns_together_must_have_positions(tmp_path: Path) -> None:
    reader(tmp_path, 300)
    check(tmp_path, [*GAME, *TEACHER], most=300)
    with pytest.raises(
        UserError, match=r"3 turns of a trajectory may come to 301 tokens.*environment.max_tokens=300 or less"
    ):
        check(tmp_path, [*GAME, *TEACHER], most=301)


def test_a_directory_says_what_it_is_made_for(tmp_path: Path, warm: Path) -> None:
    assert positions_of(warm) == 64
    for config, expected in (({"text_config": {"max_position_embeddings": 7}}, 7), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", **config}))
        assert positions_of(tmp_path) == expected


def test_a_run_with_a_short_teacher_is_refused_before_anything_is_made(tmp_path: Path, warm: Path) -> None:
    short = with_positions(Path(shutil.copytree(warm, tmp_path / "short")), 7)
    taught = ["model.new=null", f"model.path={warm}", TEACHER[0], f"algorithm.kl.reference.path={short}"]
    with pytest.raises(
        UserError, match=r"has 4 tokens, and rollout.max_tokens=4 more make 8, but .*short is made for 7"
    ):
        run_of(tmp_path / "run", TINY, taught)
    assert not (tmp_path / "run" / "it").exists()
