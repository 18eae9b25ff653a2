"""Settings of a search for one question (`burnish solve`, `Policy.solve`), and their checks. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from burnish.config.data import Reward, RewardPart
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.loading import load_tree
from burnish.config.records import Record, Slot
from burnish.evaluation.answers import verifier_of
from burnish.evaluation.strategies.spec import ORACLE, Majority, Strategy

READERS = ("number", "math", "choice", "exact")
"""Verifiers whose way to find an answer in a completion a question without a row can use."""
DEFAULT_READER = "math"
r"""Reads the answer in `\boxed{}`, in an `<answer>` block or after `####`."""


class SolveSettings(Record):
    """The strategy of a question and its budget."""

    strategy: Strategy = Majority()
    """How candidates are sampled and how one of them is chosen."""
    budget: int | None = Field(None, ge=1)
    """Most tokens that the search may sample. null: as many as the strategy asks for."""


def solve_settings(strategy: str | Mapping[str, Any], budget: int | None, options: Mapping[str, Any]) -> SolveSettings:
    """Return the settings of a call in Python: the strategy by name or as a section, with further options."""
    section = {"name": strategy} if isinstance(strategy, str) else dict(strategy)
    if twice := sorted(section.keys() & options.keys()):
        raise UserError(f"{twice[0]} is given twice: in strategy and as an argument")
    tree: dict[str, Any] = {"strategy": section | dict(options)}
    return load_tree(SolveSettings, tree if budget is None else tree | {"budget": budget}, None).config


def reader_reward(name: str | None, of_run: Any = None, option: str = "reward") -> Reward:
    """Return the reward whose first verifier says where an answer is: `name`, else that of a run, else `DEFAULT_READER`."""
    if name is not None:
        if name not in READERS:
            raise unknown_name_error(option, name, READERS)
        return Reward(parts=[RewardPart(name=name)])
    if of_run:
        reward = Reward.model_validate(of_run)
        if verifier_of(reward.parts, "", {}):
            return reward
    return Reward(parts=[RewardPart(name=DEFAULT_READER)])


def check_strategy(strategy: Slot, temperature: float) -> None:
    """Refuse what makes no sense for a question without a key, and several samples that would be identical."""
    from burnish.evaluation.strategies.registry import strategy_verifier

    verifier = strategy_verifier(strategy)
    if verifier is not None and verifier.name == ORACLE:
        raise UserError(
            "strategy.verifier=oracle compares with the expected answer, and a question here has none; burnish eval measures with it"
        )
    # Answers of a number that no option names are several.
    num = next((getattr(strategy, key) for key in ("n", "chains") if hasattr(strategy, key)), 2)
    if temperature == 0 and getattr(strategy, "needs_variety", False) and num > 1:
        raise UserError(
            f"strategy {strategy.name} compares several answers, and at temperature 0 they are all alike; raise the temperature, or use the "
            "strategy single"
        )
