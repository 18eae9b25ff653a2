"""A trained model that several tests start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reused_reward_workers import end_all, reused_reward_workers
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


@pytest.fixture(scope="session")
def _reward_workers_end_with_the_tests() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module")
def shared_reward_workers(_reward_workers_end_with_the_tests: None) -> Iterator[None]:
    """The short runs of a file take one another's scoring processes, which cost more than they do."""
    with reused_reward_workers():
        yield
