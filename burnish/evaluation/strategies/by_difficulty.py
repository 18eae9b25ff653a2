"""A mixture of strategies by predicted difficulty (compute-optimal scaling, 2408.03314).

A few answers are sampled first. Their agreement, or their mean score, predicts how hard the question is, and the strategy for such
questions goes on. The answers of the probe are the first samples of that strategy, so none is sampled twice.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from burnish.evaluation.strategies.search import Choice, Search, SearchFailed
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import ByDifficulty
from burnish.evaluation.strategies.votes import count_votes


async def by_difficulty(
    search: Search,
    options: ByDifficulty,
    strategies: Mapping[str, Callable[[Search, Any], Coroutine[Any, Any, Choice]]],
) -> Choice:
    """Sample the probe, then run the strategy of the first level that the prediction reaches."""
    probe = await search.sample(search.root, options.probe)
    if not probe:
        raise SearchFailed("the budget is spent, and no answer was sampled")
    predicted = agreement(search, probe) if options.predict == "agreement" else await mean_score(search, probe)
    number, level = next(
        (number, level)
        for number, level in enumerate(options.levels)
        if level.at_least is None or predicted >= level.at_least
    )
    search.reuse(probe)
    choice = await strategies[level.strategy.name](search, level.strategy)
    return replace(choice, numbers={**choice.numbers, "predicted": predicted, "level": float(number)})


def agreement(search: Search, nodes: list[SearchNode]) -> float:
    """Return the share of the answers that have the most frequent one. An answer without one agrees with none."""
    votes = count_votes([search.answer(node) for node in nodes])
    return max(votes.values(), default=0.0) / len(nodes)


async def mean_score(search: Search, nodes: list[SearchNode]) -> float:
    """Return the mean of the verifier's scores, without those that failed."""
    scores = [score for score in await search.score(nodes) if score is not None]
    if not scores:
        raise SearchFailed("the verifier failed for every answer of the probe, so there is no prediction")
    return sum(scores) / len(scores)
