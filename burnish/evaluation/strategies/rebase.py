"""REBASE, reward-balanced search (2408.00724): every open path gets children in proportion to the softmax of its score.

Equation 1 of the paper rounds B softmax(v / T)_j to the nearest integer, so the sum may miss B. The published program goes from the best path
down and rounds up each path's share of what is left, so that the sum is exactly B. This file does the same. Of equal paths the earlier one
is first. A path whose scoring failed counts as the worst of the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.spec import Rebase
from burnish.evaluation.strategies.step_tree import StepTree, repeated

ROUNDING = 1e-9
"""A share that exceeds an integer by less counts as that integer, so that rounding errors of sums make no child."""


async def rebase(search: Search, options: Rebase) -> Choice:
    """Sample n first steps. Then share out as many children as there are unfinished answers, until all are finished."""
    tree = StepTree(search, options)
    paths, widths = [search.root], [options.n]
    while paths and tree.may_branch:
        ranked = await tree.score(await tree.expand(repeated(paths, widths)))
        if not ranked:
            break  # the budget is spent
        paths = [path for path in ranked if path.is_open]
        worst = min((path.score for path in paths if path.score is not None), default=0.0)
        scores = [worst if path.score is None else path.score for path in paths]
        widths = balanced_widths(scores, options.n - len(tree.answers), options.temperature)
        for path, width in zip(paths, widths, strict=True):
            path.notes["width"] = width
        paths, widths = [path for path in paths if path.notes["width"]], [width for width in widths if width]
    return await tree.choose(options.choose, paths)


def balanced_widths(scores: Sequence[float], total: int, temperature: float) -> list[int]:
    """Return the number of children of each path, from scores in falling order. They add up to `total`."""
    weights = [math.exp((score - scores[0]) / temperature) for score in scores]
    widths: list[int] = []
    for rank, weight in enumerate(weights):
        rest = math.fsum(weights[rank:])
        share = (total - sum(widths)) * (weight / rest if rest else 1.0)  # 0 of 0: far below the best
        widths.append(math.ceil(share - ROUNDING))
    return widths
