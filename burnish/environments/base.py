"""The `Environment` protocol: it answers the completions of one trajectory, turn by turn. Each trajectory has its own object.

`start()` returns the prompt. After every completion, `observe` returns `Turn`, with tokens to append after the completion, or `Done`.
The model does not write these tokens, so they are not trained. Environments work with token ids: sampled
tokens are never tokenised again, so training sees exactly what was sampled.

An environment runs in the main process, between two steps of the engine, so a slow one delays all samples. An exception ends its
sample, which then has no reward and is not trained on (metric `rollout/environment_errors`). A `UserError` ends the run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from burnish.data.prompt_pool import Prompt
from burnish.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turn:
    """Tokens to append to the trajectory. The model writes its next completion after them."""

    tokens: tuple[int, ...]
    state: str | None = None
    """The state before the model's next completion, as text. GiGPO compares turns of a group that begin in equal states, so the text
    must not contain counters. Report it in every turn or in none."""
    reward: float = 0.0
    """Reward of the completion before this turn."""


@dataclass(frozen=True)
class Done:
    """The end of a trajectory."""

    reward: float | None = None
    """Reward of the last completion. The trajectory's reward is the sum over its turns.

    With None the configured reward scores the trajectory. An earlier turn with a reward is then an error."""


class Environment(Protocol):
    """Responds to the completions of one trajectory.

    A class may have two more attributes:

    - `gives_rewards = True`: a truncated trajectory (too many turns or tokens) keeps the rewards of its turns. By default the configured
      reward scores it.
    - `correct_at`: a trajectory with at least this reward counts as correct in accuracy, pass@k and filters by accuracy. By default
      trajectories have no accuracy.
    """

    def start(self) -> Turn:
        """Return the prompt."""

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        """Return the turn after the model's last completion, or the end. The completion is given as tokens and as text."""


class SingleTurn:
    """The default environment. A trajectory is the prompt and one completion."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.prompt = prompt

    def start(self) -> Turn:
        return Turn(self.prompt.start)

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        return Done()


MakeEnvironment = Callable[[Prompt], Environment]
"""Builds the environment of one trajectory of a prompt."""
