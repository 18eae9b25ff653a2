"""The contract of an environment: a state machine of turns, one object a trajectory.

`start()` gives the tokens the model sees first; after every completion `observe` gives either the next turn (tokens
put behind the completion, not written by the model) or the end. Token ids only: what the model wrote is never
tokenised again, so training sees exactly what was sampled.

An environment runs in the process of the driver, between two steps of the engine: one that is slow holds all samples up. What it
raises ends its sample, which then has no reward and no place in the loss (counted as `rollout/environment_errors` and shown);
a `UserError` ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from burnish.data.prompt_pool import Prompt
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
