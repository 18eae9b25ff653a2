"""The table of strategies: the function of every record of `spec.py`, and plug-ins.

A plug-in is `async def strategy(search, **options) -> Choice`. Its options may have a `verifier`, which the search then scores with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.plugins import check_options, load_plugin
from burnish.config.records import Plugin, Slot
from burnish.evaluation.strategies import votes
from burnish.evaluation.strategies.beam_search import beam_search, dvts
from burnish.evaluation.strategies.budget_forcing import budget_forcing
from burnish.evaluation.strategies.by_difficulty import by_difficulty
from burnish.evaluation.strategies.early_stopping import early_stopping
from burnish.evaluation.strategies.mcts import mcts
from burnish.evaluation.strategies.rebase import rebase
from burnish.evaluation.strategies.revise import revise
from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import (
    LIKELIHOOD,
    SELF_CERTAINTY,
    STRATEGY_RECORDS,
    ByDifficulty,
    Revise,
    StrategyRecord,
    VerifierPart,
)
from burnish.evaluation.strategies.step_values import step_values

StrategyFunction = Callable[[Search, Any], Coroutine[Any, Any, Choice]]
StartStrategy = Callable[[Search], Coroutine[Any, Any, Choice]]
PLUGIN_WIDTH = 16
"""Requests at the same time that a plug-in is expected to have. It sets the size of an engine's batches and no result."""

CONFIDENCE = (LIKELIHOOD, SELF_CERTAINTY)
"""Verifiers that score an answer by the model's own probabilities."""

STRATEGIES: Mapping[str, StrategyFunction] = {
    "single": votes.single,
    "majority": votes.majority,
    "weighted_vote": votes.weighted_vote,
    "best_of_n": votes.best_of_n,
    "revise": revise,
    "budget_forcing": budget_forcing,
    "early_stopping": early_stopping,
    "beam_search": beam_search,
    "dvts": dvts,
    "rebase": rebase,
    "mcts": mcts,
    "by_difficulty": lambda search, options: by_difficulty(search, options, STRATEGIES),
    "step_values": step_values,
}


def strategy_record(name: str, **options: Any) -> StrategyRecord:
    """Return the record of a strategy with these options."""
    known = {record.model_fields["name"].default: record for record in STRATEGY_RECORDS}
    return known[name](**options)


def strategy_verifier(strategy: Slot) -> VerifierPart | None:
    """Return the verifier of a strategy; None if it scores nothing with these options."""
    if isinstance(strategy, Plugin):
        given = strategy.options.get("verifier")
        return (
            None if given is None else VerifierPart.model_validate({"name": given} if isinstance(given, str) else given)
        )
    assert isinstance(strategy, StrategyRecord)
    return getattr(strategy, "verifier", None) if strategy.scores else None


def strategy_width(strategy: Slot) -> int:
    """Return the requests that one search of a strategy is expected to have at the same time."""
    return strategy.width if isinstance(strategy, StrategyRecord) else PLUGIN_WIDTH


def strategy_needs(strategy: Slot) -> set[str]:
    """Return what a strategy needs from the rest of the system, such as `chat`: a chat template."""
    inner = [level.strategy for level in strategy.levels] if isinstance(strategy, ByDifficulty) else []
    return {need for one in (strategy, *inner) for need in one.needs}


def check_feedback(strategy: Slot) -> None:
    """Refuse revisions that quote the score of a verifier that only measures how sure the model was, such as a mean log-prob."""
    part = strategy_verifier(strategy)
    inner = [level.strategy for level in strategy.levels] if isinstance(strategy, ByDifficulty) else []
    for one in (strategy, *inner):
        if isinstance(one, Revise) and one.feedback == "verifier" and part is not None and part.name in CONFIDENCE:
            raise UserError(
                f"revise.feedback=verifier tells the model the score of its answer, and the verifier {part.name} measures how sure the model was "
                "of its own tokens: a log-prob such as -0.785 says nothing about a mistake. Set strategy.verifier to one that judges the answer "
                "(model, judge, a function of yours), or strategy.feedback to self or none"
            )


def load_strategy(strategy: Slot, base: Path | None = None) -> StartStrategy:
    """Return the function that starts a strategy on a search."""
    check_feedback(strategy)
    if not isinstance(strategy, Plugin):
        function = STRATEGIES[strategy.name]
        return lambda search: function(search, strategy)
    user = load_plugin(strategy.name, base)
    if not inspect.iscoroutinefunction(user):
        raise UserError(
            f"strategy {strategy.name}: expected `async def {strategy.name.rpartition(':')[2]}(search, **options)`"
        )
    options = {name: value for name, value in strategy.options.items() if name != "verifier"}
    check_options(user, options, f"strategy {strategy.name}")

    async def checked(search: Search) -> Choice:
        choice = await user(search, **options)
        if not isinstance(choice, Choice) or not isinstance(choice.node, SearchNode):
            raise UserError(
                f"strategy {strategy.name} returned {choice!r:.80}, expected a Choice with a node of the search: Choice(node)"
            )
        return choice

    return checked
