"""What answers a completion, and whether it fits the rest of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from burnish.config.slots.base import Record

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig

SINGLE_TURN, GUESS_NUMBER = "single_turn", "guess_number"


def named(value: Any) -> Any:
    """`environment: name` for `environment: {name: name}`."""
    return {"name": value} if isinstance(value, str) else value


class Environment(Record):
    """What answers a completion."""

    name: str = SINGLE_TURN
    """single_turn; guess_number, for the task of that name; or `path/to/file.py:Class` (`package.module:Class`)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    max_turns: int = Field(1, ge=1)
    """Most completions in one trajectory; one whose environment wants more is cut off (`rollout/out_of_turns` counts them). guess_number,
    and algorithms that compare states, take 2 or more."""
    max_tokens: int | None = Field(None, ge=2)
    """Most tokens of one trajectory, prompt and observations included: a turn that might not fit is not begun, a prompt whose first turn
    might not is an error, and a sample whose environment begins with more than its prompt, and might not fit then, is lost. null is what
    the model has positions for."""


def check_turns(environment: Environment) -> None:
    """Refuse a game of several turns that may have but one."""
    if environment.name == GUESS_NUMBER and environment.max_turns == 1:
        raise ValueError(
            "environment guess_number is a game of several turns, and environment.max_turns=1 ends it after the first guess: set "
            "environment.max_turns, such as 3 for its 7 numbers"
        )


def check_environment_fits(config: TrainConfig) -> None:
    """Refuse an environment that cannot play with the data, or settings that nothing would come of."""
    environment = config.environment
    if environment.name == SINGLE_TURN and environment.max_turns != 1:
        raise ValueError("environment.max_turns has no effect on single_turn, which ends after one completion")
    if environment.max_tokens is not None and environment.max_turns == 1:
        raise ValueError(
            "environment.max_tokens has no effect with environment.max_turns=1: rollout.max_tokens limits a completion"
        )
    sources = [*config.data.train, *config.data.validation]
    if environment.name == SINGLE_TURN and any(source.task == GUESS_NUMBER for source in sources):
        raise ValueError(
            "task guess_number is a game of several turns: set environment=guess_number and environment.max_turns"
        )
    check_turns(environment)
    if environment.name == GUESS_NUMBER:
        other = next((source for source in sources if source.task != GUESS_NUMBER), None)
        if other is not None:
            what = other.task or other.path or other.plugin
            raise ValueError(
                f"environment guess_number plays with numbers of the task guess_number, and data has {what}"
            )
        if [part.name for part in config.reward.parts] != ["task"]:
            raise ValueError(
                "reward.parts has no effect: environment guess_number gives the rewards itself; leave it out"
            )
    if config.algorithm.needs("states") and environment.name == SINGLE_TURN:
        raise ValueError(
            f"{', '.join(config.algorithm.needs('states'))} compares turns that begin in the same state, and single_turn has one turn of "
            "each sample: give an environment that reports its state, such as guess_number, or use grpo"
        )
    if config.algorithm.needs("states") and environment.max_turns == 1:
        raise ValueError(
            f"{', '.join(config.algorithm.needs('states'))} compares turns that begin in the same state, and environment.max_turns=1 "
            "leaves each sample its first: set environment.max_turns to the most that the environment may ask for, or use grpo"
        )
