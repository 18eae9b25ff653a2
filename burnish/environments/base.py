"""The contract of an environment: a state machine of turns, one object a trajectory.

`start()` gives the tokens the model sees first; after every completion `observe` gives either the next turn (tokens
put behind the completion, not written by the model) or the end. Token ids only: what the model wrote is never
tokenised again, so training sees exactly what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from burnish.config.errors import UserError, unknown
from burnish.config.plugins import check_options, is_plugin, load_plugin
from burnish.config.schema import Environment as EnvironmentConfig
from burnish.data.prompts import Prompt
from burnish.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turn:
    """Tokens to put behind what is there; then the model speaks."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Done:
    """The end. `reward` is the environment's own; without it the configured reward scores the trajectory."""

    reward: float | None = None


class Environment(Protocol):
    """What answers the completions of one trajectory."""

    def start(self) -> Turn:
        """The prompt."""

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        """What follows the model's last completion, given as tokens and as text."""


class SingleTurn:
    """The prompt, one completion, the end."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.prompt = prompt

    def start(self) -> Turn:
        return Turn(tuple(self.prompt.tokens))

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        return Done()


MakeEnvironment = Callable[[Prompt], Environment]


def environment_factory(config: EnvironmentConfig, tokenizer: Tokenizer, base: Any = None) -> MakeEnvironment:
    """A function that makes the environment of one prompt: built in, or a class from a user's file."""
    if config.name == "single_turn":
        kind: Any = SingleTurn
    elif is_plugin(config.name):
        kind = load_plugin(config.name, base)
        for method in ("start", "observe"):
            if not callable(getattr(kind, method, None)):
                raise UserError(
                    f"environment {config.name}: the class has no method {method!r} (needs start() and observe(completion, text))"
                )
    else:
        raise unknown("environment", config.name, ["single_turn", "path/to/file.py:Class"])
    check_options(kind, config.options, f"environment {config.name}")
    return lambda prompt: kind(prompt, tokenizer, **config.options)
