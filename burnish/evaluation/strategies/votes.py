"""Majority and weighted votes over parallel samples (self-consistency, 2203.11171; weighted, 2206.02336; Borda, 2502.18581).

Answers are compared by their normalised text. A completion without an answer has no vote.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from burnish.evaluation.strategies.search import Choice, Search, SearchFailed
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import BestOfN, Majority, Single, WeightedVote

A = TypeVar("A", bound=Hashable)


def count_votes(answers: Sequence[A | None], weights: Sequence[float | None] | None = None) -> dict[A, float]:
    """Return the sum of weights of each answer, in the order in which answers first occur. None has no vote."""
    votes: dict[A, float] = {}
    for answer, weight in zip(answers, [1.0] * len(answers) if weights is None else weights, strict=True):
        if answer is not None and weight is not None:
            votes[answer] = votes.get(answer, 0.0) + weight
    return votes


def winner(votes: Mapping[A, float]) -> A | None:
    """Return the answer with the most votes, the first one of several; None without votes."""
    return max(votes, key=lambda answer: votes[answer], default=None)


def borda_weights(scores: Sequence[float | None], power: float) -> list[float | None]:
    """Return (n - rank + 1)^power of each score, with rank 1 for the highest. Equal scores share the mean of their ranks."""
    known = sorted((score for score in scores if score is not None), reverse=True)
    first = {score: known.index(score) for score in known}
    last = {score: place for place, score in enumerate(known)}
    n = len(known)
    return [None if s is None else (n - (first[s] + last[s]) / 2) ** power for s in scores]


def vote_weights(
    scores: Sequence[float | None], borda: float | None, is_logp: bool, instead: str = "set strategy.borda"
) -> list[float | None]:
    """Return the weight of each vote from the verifier's scores. `instead` says what a user can do where scores are negative."""
    if borda is not None:
        return borda_weights(scores, borda)
    if is_logp:
        return [None if score is None else math.exp(score) for score in scores]
    if negative := next((score for score in scores if score is not None and score < 0), None):
        raise SearchFailed(
            f"the verifier gave {negative:g}, and votes weighed by negative scores are meaningless: {instead}, or use a verifier with "
            "scores from 0"
        )
    return list(scores)


def elected(answers: Sequence[A | None], weights: Sequence[float | None] | None = None) -> tuple[int, dict[A, float]]:
    """Return the index of the sample that wins a vote, and the votes. Of the samples with the answer, it has the largest weight.

    Without any vote, it is the first sample.
    """
    votes = count_votes(answers, weights)
    won = winner(votes)
    if won is None:
        return 0, votes
    given = [1.0] * len(answers) if weights is None else weights
    voters = [(w, -k) for k, (a, w) in enumerate(zip(answers, given, strict=True)) if a == won and w is not None]
    return -max(voters)[1], votes


def elect(search: Search, nodes: Sequence[SearchNode], weights: Sequence[float | None] | None = None) -> Choice:
    """Return the answer that wins the vote of finished nodes (`elected`)."""
    if not nodes:
        raise SearchFailed("the budget is spent, and no answer was sampled")
    index, votes = elected([search.answer(node) for node in nodes], weights)
    return Choice(nodes[index], votes)


def best_scored(nodes: Sequence[SearchNode]) -> SearchNode:
    """Return the node with the highest score, the first one of several. Nodes whose scoring failed are no candidates."""
    scored = [node for node in nodes if node.score is not None]
    if not scored:
        raise SearchFailed(
            "the verifier failed for every candidate" if nodes else "the budget is spent, and no answer was sampled"
        )
    return max(scored, key=lambda node: (node.score, -node.index))


async def single(search: Search, options: Single) -> Choice:
    """Sample one answer."""
    return elect(search, await search.sample(search.root))


async def majority(search: Search, options: Majority) -> Choice:
    """Sample n answers and take the most frequent one."""
    return elect(search, await search.sample(search.root, options.n))


async def weighted_vote(search: Search, options: WeightedVote) -> Choice:
    """Sample n answers and take the one with the largest sum of scores."""
    nodes = await search.sample(search.root, options.n)
    scores = await search.score(nodes)
    if nodes and all(score is None for score in scores):
        raise SearchFailed("the verifier failed for every candidate")
    return elect(search, nodes, vote_weights(scores, options.borda, search.log_scores))


async def best_of_n(search: Search, options: BestOfN) -> Choice:
    """Sample n answers and take the one with the highest score."""
    nodes = await search.sample(search.root, options.n)
    await search.score(nodes)
    return Choice(best_scored(nodes))
