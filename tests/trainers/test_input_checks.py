"""Checks of a run's inputs: changed models are refused, changed plug-ins get a note, and sequences must fit the models."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import Loaded, load
from burnish.config.requirements import plugin_names
from burnish.config.schema import TrainConfig
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.models.architecture import max_positions_of
from burnish.run.checkpoint import snapshot
from burnish.run.checkpoint.snapshot import file_checksum
from burnish.trainers import input_checks
from burnish.trainers.input_checks import INPUTS_FILE, check_positions, check_reader_positions
from tests.trainers.tiny import TINY, run_of

RECIPE = """
model: {path: model}
data: {train: {task: sort_digits}}
reward: {parts: [{name: 'mine.py:judge'}, math]}
"""


def keep_inputs(loaded: Loaded[TrainConfig]) -> list[str]:
    return input_checks.record_inputs(loaded.base / "runs", loaded.config, loaded.resolved, loaded.base)


@pytest.fixture
def loaded(tmp_path: Path) -> Loaded[TrainConfig]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"numbers")
    (tmp_path / "mine.py").write_text("def judge(): ...\n")
    (tmp_path / "runs").mkdir()
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return load(TrainConfig, tmp_path / "recipe.yaml", [])


def test_the_same_inputs_are_gone_on_with_in_silence_and_read_once(
    tmp_path: Path, loaded: Loaded[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keep_inputs(loaded) == []
    assert (tmp_path / "runs" / INPUTS_FILE).is_file()
    was_read: list[str] = []

    def counted(path: Path) -> dict[str, Any]:
        was_read.append(path.name)
        return file_checksum(path)

    for module in (input_checks, snapshot):
        monkeypatch.setattr(module, "file_checksum", counted)
    assert keep_inputs(loaded) == []
    assert was_read == ["model.safetensors"]


def test_other_numbers_in_the_models_place_are_refused_and_nothing_is_written(
    tmp_path: Path, loaded: Loaded[TrainConfig]
) -> None:
    keep_inputs(loaded)
    before = (tmp_path / "runs" / INPUTS_FILE).read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"others!")
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot resume: the model of model\.path=model is not the one"):
            keep_inputs(loaded)
    assert (tmp_path / "runs" / INPUTS_FILE).read_bytes() == before


def test_new_code_is_told_of_once(tmp_path: Path, loaded: Loaded[TrainConfig]) -> None:
    keep_inputs(loaded)
    (tmp_path / "mine.py").write_text("def judge(): return 1\n")
    (note,) = keep_inputs(loaded)
    assert note == "mine.py has changed since the run began: from here on the new code counts"
    assert keep_inputs(loaded) == []


@pytest.mark.parametrize(
    "override",
    [
        "reward.parts=module_that_changes:judge",
        "data.train=[{plugin: 'module_that_changes:judge'}]",
        "data.sampler=module_that_changes:judge",
        "environment.name=module_that_changes:judge",
        "algorithm.advantage=module_that_changes:judge",
    ],
)
def test_new_code_of_a_module_is_told_of_and_makes_rollouts_old_where_it_trains(
    override: str, tmp_path: Path, loaded: Loaded[TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    module, forgotten = tmp_path / "module_that_changes.py", list[bool]()
    module.write_text("def judge(): ...\n")
    again = load(TrainConfig, tmp_path / "recipe.yaml", [override])
    assert keep_inputs(again) == []
    module.write_text("def judge(): return 1\n")
    forget = partial(forgotten.append, True)
    (note,) = input_checks.record_inputs(again.base / "runs", again.config, again.resolved, again.base, forget)
    assert note.startswith("module_that_changes has changed since the run began")
    assert bool(forgotten) == (not override.startswith("reward"))


def test_text_that_looks_like_a_module_is_none(tmp_path: Path, loaded: Loaded[TrainConfig]) -> None:
    named = ["data.train.name=sys:path", "data.train.options.name=sys:path", "data.template.text=sys:path{prompt}"]
    assert plugin_names(load(TrainConfig, tmp_path / "recipe.yaml", named).resolved) == ["mine.py:judge"]


def test_what_is_not_there_is_for_others_to_say(tmp_path: Path, loaded: Loaded[TrainConfig]) -> None:
    (tmp_path / "mine.py").unlink()
    (tmp_path / "model").rename(tmp_path / "elsewhere")
    assert keep_inputs(loaded) == []


def test_a_single_bit_of_a_large_model_is_noticed(tmp_path: Path, loaded: Loaded[TrainConfig]) -> None:
    file = tmp_path / "model" / "model.safetensors"
    content = bytearray(3 << 20)
    file.write_bytes(content)
    keep_inputs(loaded)
    content[100_001] = 1  # between the samples that a digest takes
    file.write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors has another checksum than when it was written"):
        keep_inputs(loaded)


@pytest.mark.parametrize("is_reward", [True, False])
def test_new_code_that_trains_makes_the_rollouts_of_the_journal_old(
    tmp_path: Path, loaded: Loaded[TrainConfig], is_reward: bool
) -> None:
    resolved = loaded.resolved if is_reward else {**loaded.resolved, "algorithm": {"advantage": "mine.py:judge"}}
    forgotten: list[bool] = []

    def keep() -> None:
        input_checks.record_inputs(
            tmp_path / "runs", loaded.config, resolved, loaded.base, lambda: forgotten.append(True)
        )

    keep()
    (tmp_path / "mine.py").write_text("def judge(): return 1\n")
    keep()
    keep()
    assert forgotten == ([] if is_reward else [True])


# --- Sequence lengths ---------------------------------------------------------------------------------------------------

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
    check_reader_positions(config, base, 10, prompts, most)


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
    assert max_positions_of(warm) == 64
    for config, expected in (({"text_config": {"max_position_embeddings": 7}}, 7), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "other", **config}))
        assert max_positions_of(tmp_path) == expected


def test_a_run_with_a_short_teacher_is_refused_before_anything_is_made(tmp_path: Path, warm: Path) -> None:
    short = with_positions(Path(shutil.copytree(warm, tmp_path / "short")), 7)
    taught = ["model.new=null", f"model.path={warm}", TEACHER[0], f"algorithm.kl.reference.path={short}"]
    with pytest.raises(
        UserError, match=r"has 4 tokens, and rollout.max_tokens=4 more make 8, but .*short is made for 7"
    ):
        run_of(tmp_path / "run", TINY, taught)
    assert not (tmp_path / "run" / "it").exists()
