"""The `Environment` protocol: a state machine of turns, one object per trajectory.

`start()` returns the prompt. After every completion, `observe` returns either the next turn (tokens appended after the completion, not
written by the model) or the end. Environments work with token ids: sampled tokens are never tokenised again, so training sees exactly
what was sampled.

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
    """Tokens to append; then the model writes a completion."""

    tokens: tuple[int, ...]
    state: str | None = None
    """The state in which the model acts now, as text without counters. GiGPO compares turns of a group that begin in equal states.
    Give it in every turn or in none."""
    reward: float = 0.0
    """Reward of the completion before this turn."""


@dataclass(frozen=True)
class Done:
    """The end of a trajectory."""

    reward: float | None = None
    """Reward of the last completion. The trajectory's reward is the sum over its turns. None: the configured reward scores the
    trajectory, and no turn may have given a reward."""


class Environment(Protocol):
    """Responds to the completions of one trajectory.

    Two attributes are optional. With `gives_rewards = True` a truncated trajectory (too many turns or tokens) keeps the rewards of its
    turns; without it the configured reward scores it. `correct_at` is the reward from which a trajectory counts as correct, for accuracy,
    pass@k and filters by accuracy; without it rewards are graded.
    """

    def start(self) -> Turn:
        """The prompt."""

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        """The turn after the model's last completion, which is given as tokens and as text."""


class SingleTurn:
    """The default environment: the prompt, one completion, the end."""

    def __init__(self, prompt: Prompt, tokenizer: Tokenizer) -> None:
        self.prompt = prompt

    def start(self) -> Turn:
        return Turn(self.prompt.start)

    def observe(self, completion: list[int], text: str) -> Turn | Done:
        return Done()


MakeEnvironment = Callable[[Prompt], Environment]
