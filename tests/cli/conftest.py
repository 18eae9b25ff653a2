"""Fixtures of the tests of `burnish train`. A test module that needs others defines its own `here` or `model`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.train_recipes import ENVIRONMENTS, FROM_FILES, PLUGINS, RECIPE, make_model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with recipes, plug-ins and data."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "new.yaml").write_text(RECIPE)
    (tmp_path / "files.yaml").write_text(FROM_FILES)
    (tmp_path / "plug.py").write_text(PLUGINS)  # without torch, which every process that scores would import
    (tmp_path / "games.py").write_text(ENVIRONMENTS)
    sums = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a in range(3) for b in range(3)]
    (tmp_path / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in sums))
    return tmp_path


@pytest.fixture
def model(here: Path) -> Path:
    return make_model(here / "model")
