"""The contract of an environment: a state machine of turns, one object a trajectory.

`start()` gives the tokens the model sees first; after every completion `observe` gives either the next turn (tokens
put behind the completion, not written by the model) or the end. Token ids only: what the model wrote is never
tokenised again, so training sees exactly what was sampled.

An environment runs in the process of the driver, between two steps of the engine: one that is slow holds all samples up. What it
raises ends its sample, which then has no reward and no place in the loss (counted as `rollout/environment_errors` and shown);
a `UserError` ends the run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from burnish.config.data import Template
from burnish.config.environment import Environment as EnvironmentConfig
from burnish.config.errors import UserError, unknown
from burnish.config.plugins import check_options, is_plugin, load_plugin
from burnish.data.prompts import Prompt
from burnish.data.template import kind_of
from burnish.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turn:
    """Tokens to put behind what is there; then the model speaks."""

    tokens: tuple[int, ...]
    state: str | None = None
    """What the model acts in now, as text without counters: turns of a prompt's samples that begin in equal states can be compared.
    In every turn or in none."""
    reward: float = 0.0
    """What the completion before it earned."""


@dataclass(frozen=True)
class Done:
    """The end."""

    reward: float | None = None
    """What the last completion earned: the trajectory's reward is the sum over its turns. None, where no turn earned anything: the
    configured reward scores the trajectory."""


class Environment(Protocol):
    """What answers the completions of one trajectory.

    One that gives all rewards itself may say so by an attribute `gives_rewards = True`: then a trajectory that is cut off (too
    many turns, too many tokens) has what it earned until then; without it the configured reward scores it.

    Its rewards are graded unless an attribute `correct_at` says from which reward on a trajectory counts as correct. Accuracy, pass@k and filters
    by accuracy go by that.
    """

    def start(self) -> Turn:
        """The prompt."""

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        """What follows the model's last completion, given as tokens and as text."""


class SingleTurn:
    """The prompt, one completion, the end."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.prompt = prompt

    def start(self) -> Turn:
        return Turn(self.prompt.start)

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        return Done()


MakeEnvironment = Callable[[Prompt], Environment]


def environment_factory(config: EnvironmentConfig, tokenizer: Tokenizer, base: Any = None) -> MakeEnvironment:
    """A function that makes the environment of one prompt: built in, or a class from a user's file."""
    kind = _kind(config.name, base)
    check_options(kind, config.options, f"environment {config.name}")
    return lambda prompt: kind(prompt, tokenizer, **config.options)


def check_turns_fit(config: EnvironmentConfig, tokenizer: Tokenizer, template: Template, base: Any = None) -> None:
    """Refuse an environment of several turns with a chat template that cannot go on, before anything is sampled.

    An environment that makes its tokens without `Dialogue` may go on in its own way.
    """
    from burnish.environments import dialogue

    if config.max_turns == 1:
        return
    if template.prerendered and tokenizer.has_chat_template:
        raise UserError(
            "environment.max_turns is above 1 and data.prerendered is true: replies would stand behind the model's answers without the markup "
            "of the chat template; give messages or plain prompts in the rows, which the template renders, or set environment.max_turns=1"
        )
    if kind_of(tokenizer, template) == "plain":
        return
    known = vars(sys.modules[_kind(config.name, base).__module__]).values()
    if any(value is dialogue or value is dialogue.Dialogue for value in known):
        dialogue.check_only_adds(tokenizer)


def _kind(name: str, base: Any) -> Any:
    from burnish.environments.guess_number import GuessNumber  # which is made of what is here

    built_in = {"single_turn": SingleTurn, "guess_number": GuessNumber}
    if name in built_in:
        return built_in[name]
    if not is_plugin(name):
        raise unknown("environment", name, [*built_in, "path/to/file.py:Class"])
    kind = load_plugin(name, base)
    for method in ("start", "observe"):
        if not callable(getattr(kind, method, None)):
            raise UserError(
                f"environment {name}: the class has no method {method!r} (needs start() and observe(completion, text))"
            )
    return kind
