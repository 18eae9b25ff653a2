"""Self-consistency with early stopping: answers are sampled in windows until their vote is decided.

Three rules decide: no sample that is left can change the winner (exact); a window is unanimous (ESC, 2401.10480); the posterior
probability that the winner stays ahead is high enough (Adaptive-Consistency, 2305.11860).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import EarlyStopping
from burnish.evaluation.strategies.votes import count_votes, elect, winner


async def early_stopping(search: Search, options: EarlyStopping) -> Choice:
    """Sample windows until the vote is decided, `n` answers are sampled or the budget is spent; take the most frequent answer."""
    nodes: list[SearchNode] = []
    while len(nodes) < options.n:
        size = min(options.window, options.n - len(nodes))
        found = await search.sample(search.root, size)
        nodes += found
        answers = [search.answer(node) for node in nodes]
        if len(found) < size or is_decided(answers, size, options):
            break
    return replace(elect(search, nodes), numbers={"stopped_after": float(len(nodes))})


def is_decided(answers: Sequence[str | None], window: int, options: EarlyStopping) -> bool:
    """Whether the rule stops sampling after these answers, the last `window` of which are new."""
    if options.rule == "certain":
        return is_certain(answers, options.n - len(answers))
    if options.rule == "unanimous":
        return answers[-1] is not None and len(set(answers[-window:])) == 1
    first, second = [*sorted(count_votes(answers).values(), reverse=True), 0, 0][:2]
    return lead_probability(int(first), int(second)) > options.confidence


def is_certain(answers: Sequence[str | None], num_left: int) -> bool:
    """Whether `num_left` further answers cannot change the winner of the vote. Of equal votes, the answer that came first wins."""
    votes = count_votes(answers)
    won = winner(votes)
    if won is None:
        return num_left == 0
    order = list(votes)
    # An answer that did not occur yet comes last, so it wins no tie.
    rivals = [votes[answer] + num_left + (order.index(answer) < order.index(won)) for answer in order if answer != won]
    return max([num_left, *rivals]) <= votes[won]


def lead_probability(first: int, second: int) -> float:
    """Return P(p > 1/2) for p ~ Beta(first + 1, second + 1): the posterior of the first answer's share among these two.

    With whole votes it is a sum of binomial terms, P(Binomial(first + second + 1, 1/2) <= first), which is exact.
    """
    num = first + second + 1
    return sum(math.comb(num, k) for k in range(first + 1)) / 2**num
