"""Monte-Carlo values of the steps of answers: the share of continuations behind a step that the verifier finds right.

Math-Shepherd (2312.08935) continues every step; OmegaPRM (2406.06592) finds the first wrong step by bisection, which needs a logarithm of
the continuations. With the verifier `oracle` the values are labels for a step reward model (`burnish data steps`).
"""

from __future__ import annotations

from collections.abc import Sequence

from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import StepValueSearch
from burnish.evaluation.strategies.step_tree import special_step_token
from burnish.evaluation.strategies.votes import best_scored
from burnish.models.answer_steps import scored_positions

VALUE, COUNT = "value", "visits"
"""Notes of a node: the estimated probability that the answer ends right behind it, and how many continuations that is the mean of."""


async def step_values(search: Search, options: StepValueSearch) -> Choice:
    """Sample n answers, estimate the value of their steps, and return the answer with the highest score."""
    search.step_token = special_step_token(search, options.step)
    answers = await search.sample(search.root, options.n, may_continue=True)
    await search.score(answers)
    choice = best_scored(answers)
    ends: dict[int, SearchNode] = {}
    chains: list[list[SearchNode]] = []
    for answer in answers:
        chain = search.split(answer, step_lengths(search, answer, options.step))
        ends[answer.index] = chain[-1]
        chain[-1].notes |= {VALUE: chain[-1].score, COUNT: 1}
        chains.append(chain)
    estimate = _bisect if options.order == "bisect" else _every
    await search.gather(*(estimate(search, chain, options) for chain in chains))
    return Choice(ends[choice.index])


def step_lengths(search: Search, answer: SearchNode, delimiter: str) -> list[int]:
    """Return the number of tokens of each step of an answer, at the borders that a step reward model reads."""
    written = [True] * len(answer.tokens)
    ends = scored_positions(answer.tokens, written, search.tokenizer, delimiter)
    borders = [0, *(end + 1 for end in ends[:-1]), len(answer.tokens)]
    return [after - before for before, after in zip(borders, borders[1:], strict=False)]


async def _every(search: Search, chain: Sequence[SearchNode], options: StepValueSearch) -> None:
    """Estimate every step but the last, whose value is the score of the answer."""
    await search.gather(*(_estimate(search, node, options.rollouts) for node in chain[:-1]))


async def _bisect(search: Search, chain: Sequence[SearchNode], options: StepValueSearch) -> None:
    """Estimate the steps that a search for the first step without a right continuation visits. The others get no value.

    A right answer has no such step, and is not searched.
    """
    score = chain[-1].score
    if score is None or score >= 1:
        return
    good, bad = -1, len(chain) - 1  # the last step known to have a right continuation, and the first known to have none
    while bad - good > 1:
        middle = (good + bad) // 2
        value = await _estimate(search, chain[middle], options.rollouts)
        if value is None:
            return
        good, bad = (middle, bad) if value > 0 else (good, middle)


async def _estimate(search: Search, node: SearchNode, rollouts: int) -> float | None:
    """Continue an answer behind a step and note the mean score. None if the budget is spent or no score could be had."""
    if search.room(node) < 1:
        return None
    ends = await search.sample(node, rollouts)
    scores = [score for score in await search.score(ends) if score is not None]
    if not scores:
        return None
    value = sum(scores) / len(scores)
    node.notes |= {VALUE: value, COUNT: len(scores)}
    return value
