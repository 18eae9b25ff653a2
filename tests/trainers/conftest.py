"""A trained model that several tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainers.sorter import make_sorter
from tests.trainers.tiny import TINY, WARM, run_of


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is right now and then."""
    return run_of(tmp_path_factory.mktemp("warm") / "run", TINY + WARM, ["training.steps=1"]) / "warm_start"


@pytest.fixture(scope="session")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is sure of most of its tokens."""
    return make_sorter(tmp_path_factory.mktemp("sorter"))
