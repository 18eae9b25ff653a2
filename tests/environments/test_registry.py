"""Built-in environments, environments from a user's file, and their configuration errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.environment import Environment
from burnish.config.errors import UserError
from burnish.data.prompt_pool import Prompt
from burnish.data.row import Row
from burnish.environments.base import Done, Turn
from burnish.environments.registry import environment_factory
from burnish.models.tokenizer import Tokenizer

GAME = """
from burnish.environments.base import Done, Turn


class Game:
    def __init__(self, prompt, tokenizer, hint="0", reward=None):
        self.prompt, self.tokenizer, self.hint, self.reward, self.seen = prompt, tokenizer, hint, reward, []

    def start(self):
        return Turn(tuple(self.prompt.tokens))

    def observe(self, completion, text):
        self.seen.append(text)
        return Done(self.reward) if len(self.seen) == 2 else Turn(tuple(self.tokenizer.encode(self.hint)))


class Mute:
    def __init__(self, prompt, tokenizer):
        pass

    def start(self):
        return Turn((1,))
"""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters("0123456789>")


@pytest.fixture(scope="module")
def prompt(tokenizer: Tokenizer) -> Prompt:
    return Prompt(Row("rows/0", "31>", "rows", "13"), "31>", tokenizer.encode("31>"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "game.py").write_text(GAME)
    return tmp_path


def test_a_single_turn_is_the_prompt_and_the_end(tokenizer: Tokenizer, prompt: Prompt) -> None:
    environment = environment_factory(Environment(), tokenizer)(prompt)
    assert environment.start() == Turn((5, 3, 12))
    assert environment.observe([3, 5], "13") == Done(reward=None)


def test_the_samples_of_a_prompt_begin_with_the_very_same_tokens(tokenizer: Tokenizer, prompt: Prompt) -> None:
    one, other = (environment_factory(Environment(), tokenizer)(prompt).start() for _ in range(2))
    assert one.tokens is other.tokens  # to see that they are equal takes no look at them


def test_an_environment_from_a_file_gets_its_options_and_its_own_state(
    folder: Path, tokenizer: Tokenizer, prompt: Prompt
) -> None:
    config = Environment(name="game.py:Game", options={"hint": "7>", "reward": 0.5}, max_turns=2)
    make = environment_factory(config, tokenizer, folder)
    one, other = make(prompt), make(prompt)
    assert one.start() == Turn((5, 3, 12))
    assert one.observe([2], "0") == Turn((9, 12))
    assert other.observe([2], "0") == Turn((9, 12)), "a trajectory has an environment of its own"
    assert one.observe([2], "0") == Done(0.5)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("single_trun", {}, r"unknown environment 'single_trun'.*single_turn"),
        ("single_turn", {"hint": "1"}, "environment single_turn: unknown option 'hint'"),
        ("game.py:Game", {"hnt": "1"}, r"environment game\.py:Game: unknown option 'hnt'; did you mean 'hint'\?"),
        ("game.py:Gaem", {}, r"defines no 'Gaem'; did you mean 'Game'\?"),
        ("gone.py:Game", {}, r"'gone\.py:Game': no such file"),
        ("game.py:Mute", {}, r"environment game\.py:Mute: no convention of environments fits"),
    ],
)
def test_mistakes_are_found_before_anything_runs(
    folder: Path, tokenizer: Tokenizer, name: str, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        environment_factory(Environment(name=name, options=options), tokenizer, folder)
