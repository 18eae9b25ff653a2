"""A run goes on with the models it was begun with, and says where the code of plug-ins is new."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.config.loading import Loaded, load
from burnish.config.requirements import plugins_of
from burnish.config.schema import TrainConfig
from burnish.run.checkpoint import contents
from burnish.run.checkpoint.contents import file_sums
from burnish.trainers import input_checks
from burnish.trainers.input_checks import FILE

RECIPE = """
model: {path: model}
data: {train: {task: sort_digits}}
reward: {parts: [{name: 'mine.py:judge'}, math]}
"""


def keep_inputs(loaded: Loaded[TrainConfig]) -> list[str]:
    return input_checks.keep_inputs(loaded.base / "runs", loaded.config, loaded.resolved, loaded.base)


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
    assert (tmp_path / "runs" / FILE).is_file()
    was_read: list[str] = []

    def counted(path: Path) -> dict[str, Any]:
        was_read.append(path.name)
        return file_sums(path)

    for module in (input_checks, contents):
        monkeypatch.setattr(module, "file_sums", counted)
    assert keep_inputs(loaded) == []
    assert was_read == ["model.safetensors"]


def test_other_numbers_in_the_models_place_are_refused_and_nothing_is_written(
    tmp_path: Path, loaded: Loaded[TrainConfig]
) -> None:
    keep_inputs(loaded)
    before = (tmp_path / "runs" / FILE).read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"others!")
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot resume: the model of model\.path=model is not the one"):
            keep_inputs(loaded)
    assert (tmp_path / "runs" / FILE).read_bytes() == before


def test_new_code_is_told_of_once(tmp_path: Path, loaded: Loaded[TrainConfig]) -> None:
    keep_inputs(loaded)
    (tmp_path / "mine.py").write_text("def judge(): return 1\n")
    (note,) = keep_inputs(loaded)
    assert note == "mine.py has changed since the run was begun: from here on the new code counts"
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
    (note,) = input_checks.keep_inputs(again.base / "runs", again.config, again.resolved, again.base, forget)
    assert note.startswith("module_that_changes has changed since the run was begun")
    assert bool(forgotten) == (not override.startswith("reward"))


def test_text_that_looks_like_a_module_is_none(tmp_path: Path, loaded: Loaded[TrainConfig]) -> None:
    named = ["data.train.name=sys:path", "data.train.options.name=sys:path", "data.template.text=sys:path{prompt}"]
    assert plugins_of(load(TrainConfig, tmp_path / "recipe.yaml", named).resolved) == ["mine.py:judge"]


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
        input_checks.keep_inputs(
            tmp_path / "runs", loaded.config, resolved, loaded.base, lambda: forgotten.append(True)
        )

    keep()
    (tmp_path / "mine.py").write_text("def judge(): return 1\n")
    keep()
    keep()
    assert forgotten == ([] if is_reward else [True])
