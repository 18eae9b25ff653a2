"""Recognising by shape what a class was written for."""

import importlib
from typing import Any

import pytest

from burnish.config.plugins import load_plugin
from burnish.environments.adapters import openenv_modules, verl_modules
from burnish.environments.adapters.recognise import ADAPTERS, adapter_for
from burnish.environments.adapters.trl import TrlEnvironment
from burnish.environments.base import Environment
from burnish.environments.guess_number import GuessNumber
from tests.environments.adapters.episodes import USER_FILES


@pytest.mark.parametrize(
    ("target", "adapter"),
    [
        ("trl_env.py:Safe", "trl"),
        ("trl_more.py:Notebook", "trl"),
        ("trl_more.py:Unscored", "trl"),
        ("lock_env.py:Lock", "gymnasium"),
        ("gym_more.py:Doors", "gymnasium"),
        ("sky_plain.py:Echo", "skyrl_gym"),
        ("arena_game.py:Race", "textarena"),
        ("echo_client.py:Echo", "openenv_client"),
        ("verl_tool.py:Ledger", "verl"),
        ("verl_old.py:Counter", "verl"),
    ],
)
def test_user_classes_are_recognised(target: str, adapter: str):
    verl_modules.install()
    openenv_modules.install()
    assert adapter_for(load_plugin(target, USER_FILES)) == adapter


class Ragen:
    def reset(self, seed: int, mode: str) -> str: ...

    def step(self, action: str) -> Any: ...


class Both:
    """A class with gymnasium's `reset` and TRL's `get_reward`."""

    def reset(self, seed: int | None = None) -> str: ...

    def step(self, action: str) -> Any: ...

    def get_reward(self) -> float: ...


class StepOnly:
    def reset(self) -> str: ...

    def step(self, action: str) -> Any: ...


@pytest.mark.parametrize("cls", [Ragen, Both, StepOnly, TrlEnvironment, Environment, GuessNumber, dict, len, 3])
def test_what_is_ambiguous_or_ours_is_not_guessed(cls: Any):
    assert adapter_for(cls) is None


def test_table_names_environments():
    for path in ADAPTERS.values():
        module, _, name = path.partition(":")
        assert issubclass(getattr(importlib.import_module(module), name), Environment)
