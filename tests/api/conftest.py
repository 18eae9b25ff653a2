"""A tiny model in a working folder of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli.train_recipes import make_model

QUICK: dict[str, Any] = {
    "rollout": {"prompts": 4, "n": 4, "max_tokens": 4},
    "training": {"steps": 2, "optimizer": {"lr": 1e-2}},
    "run": {"threads": 1},
    "reward.workers": 1,
    "data.max_prompt_tokens": 16,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_model(tmp_path / "model")
