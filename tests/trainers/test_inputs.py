"""A run goes on with the models it was begun with, and says where the code of plug-ins is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.trainers.inputs import FILE, keep_inputs


@pytest.fixture
def resolved(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"numbers")
    (tmp_path / "mine.py").write_text("def judge(): ...\n")
    (tmp_path / "runs").mkdir()
    return {
        "model": {"path": "model", "adapter": None},
        "reward": {"parts": [{"name": "mine.py:judge"}, {"name": "math"}]},
        "environment": {"name": "mine.py:Game"},
    }


def test_the_same_inputs_are_gone_on_with_in_silence(tmp_path: Path, resolved: dict[str, Any]) -> None:
    assert keep_inputs(tmp_path / "runs", resolved, tmp_path) == []
    assert (tmp_path / "runs" / FILE).is_file()
    assert keep_inputs(tmp_path / "runs", resolved, tmp_path) == []


def test_other_numbers_in_the_models_place_are_refused_and_nothing_is_written(
    tmp_path: Path, resolved: dict[str, Any]
) -> None:
    keep_inputs(tmp_path / "runs", resolved, tmp_path)
    before = (tmp_path / "runs" / FILE).read_bytes()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"others!")
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot resume: the model of model\.path=model is not the one"):
            keep_inputs(tmp_path / "runs", resolved, tmp_path)
    assert (tmp_path / "runs" / FILE).read_bytes() == before


def test_new_code_is_told_of_once(tmp_path: Path, resolved: dict[str, Any]) -> None:
    keep_inputs(tmp_path / "runs", resolved, tmp_path)
    (tmp_path / "mine.py").write_text("def judge(): return 1\n")
    (note,) = keep_inputs(tmp_path / "runs", resolved, tmp_path)
    assert note == "mine.py has changed since the run was begun: from here on the new code counts"
    assert keep_inputs(tmp_path / "runs", resolved, tmp_path) == []


def test_what_is_not_there_is_for_others_to_say(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    assert keep_inputs(tmp_path / "runs", {"model": {"path": "nowhere"}, "reward": "gone.py:f"}, tmp_path) == []
