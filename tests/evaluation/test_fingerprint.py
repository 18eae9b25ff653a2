"""What an evaluation was made with: content counts, places do not."""

from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.evaluation.evaluate import fingerprint
from burnish.evaluation.settings import settings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("m", "copy"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(bytes(100))
    (tmp_path / "d.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    (tmp_path / "r.py").write_text("def f(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n")
    return tmp_path


def made(model: str = "m", *overrides: str) -> dict[str, Any]:
    loaded = settings("d.jsonl", {"reward.parts": ["r.py:f"]}, overrides, {})
    return fingerprint(loaded.resolved, loaded.base, Path(model))


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [key for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)]


def test_what_leaves_completions_as_they_are_does_not_count(folder: Path) -> None:
    assert changed(made(), made("copy", "max_rows=7", "reward.workers=5", "model.device=cpu")) == []


def test_an_environment_whose_file_is_not_there_is_named(folder: Path) -> None:
    own = ("environment.name=game.py:Game", "environment.max_turns=2")
    with pytest.raises(UserError, match=r"environment game\.py:Game: there is no file game\.py in .* or here"):
        made("m", *own)
    (folder / "game.py").write_text("class Game: ...\n")
    before = made("m", *own)
    (folder / "game.py").write_text("class Game: pass\n")
    assert changed(before, made("m", *own)) == ["environment.content of game.py:Game"]


def test_settings_and_contents_count(folder: Path) -> None:
    before = made()
    assert changed(before, made("m", "sampling.temperature=0.5", "seed=3")) == ["sampling.temperature", "seed"]
    (folder / "d.jsonl").write_text('{"question": "2", "answer": "1"}\n')
    (folder / "r.py").write_text((folder / "r.py").read_text().replace("1.0", "0.0"))
    (folder / "m" / "config.json").write_text('{"a": 1}')
    assert changed(before, made()) == ["data.source.content", "model.content", "reward.content of r.py:f"]
