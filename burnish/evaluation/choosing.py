"""What choosing one of k samples gives, by a vote (maj@k) or by a score (best@k), exactly.

n samples of a question are drawn and k of them are put to the choice. Both functions give the expectation over every
k of the n samples, as pass@k does: by counting, not by drawing subsets at random, so there is no seed and no noise
besides that of the samples themselves.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

FLOATS_UP_TO = 500  # C(n, n/2) of many more is no float; then logarithms


def maj_at_k(votes: Sequence[Hashable | None], right: Hashable, k: int) -> float:
    """Chance that the answer `right` wins the vote of k of the samples; a None has no vote.

    The answer with most votes wins; of several with as many, each wins equally often (which is what taking the first
    one drawn comes to). k samples without a single vote are wrong. Self-consistency: Wang et al., 2203.11171.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n, got n={n}, k={k}")
    counts = Counter(vote for vote in votes if vote is not None)
    wrong = sorted(count for answer, count in counts.items() if answer != right)
    return _vote(counts[right], tuple(wrong), n - sum(counts.values()), k)


@functools.lru_cache(maxsize=1 << 14)
def _vote(right: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """The same of counts: samples that are right, that gave each wrong answer, and that gave none.

    Drawing k of n is drawing each with the chance k/n, given that k were drawn. So the numbers drawn of each answer are
    independent binomials, divided by the chance of k in all: sums of products of chances, which no n makes overflow.
    """
    n = right + sum(wrong) + silent
    if right == 0:
        return 0.0
    p = k / n
    others = [_not_beaten(wrong, silent, k - j, j, p) for j in range(1, min(right, k) + 1)]
    wins = [_binomial(right, j, p) * other for j, other in enumerate(others, start=1)]
    return min(1.0, math.fsum(wins) / _binomial(n, k, p))


def _not_beaten(wrong: tuple[int, ...], silent: int, size: int, votes: int, p: float) -> float:
    """Chance that `size` samples besides the right ones are drawn and no wrong answer has more than `votes` votes.

    Each case counts 1 / (1 + answers that have exactly `votes`), the share of its ties that the right answer wins. A
    table over (samples drawn, answers tied) is filled answer by answer.
    """
    chance = np.zeros((size + 1, size // votes + 1))
    for drawn in range(min(silent, size) + 1):
        chance[drawn, 0] = _binomial(silent, drawn, p)
    for count in wrong:
        after = chance * _binomial(count, 0, p)
        for drawn in range(1, min(count, votes, size) + 1):
            tied = int(drawn == votes)
            after[drawn:, tied:] += _binomial(count, drawn, p) * chance[: size + 1 - drawn, : chance.shape[1] - tied]
        chance = after
    return math.fsum(x / (1 + tied) for tied, x in enumerate(chance[size]))


@functools.lru_cache(maxsize=1 << 16)
def _binomial(n: int, k: int, p: float) -> float:
    """Chance of k successes in n trials."""
    if n > FLOATS_UP_TO and 0 < p < 1:
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def best_at_k(scores: Sequence[float], values: Sequence[float], k: int) -> float:
    """Expected value of the sample with the highest score among k of the samples; ties are broken evenly.

    With the scores themselves as values this is the expected highest score; with accuracies, how often the choice of
    that scorer is right. A sample is chosen when no better-scored one is among the k.
    """
    n = len(scores)
    if not 1 <= k <= n or len(values) != n:
        raise ValueError(f"best@k needs 1 <= k <= n and a value a score, got n={n}, {len(values)} values, k={k}")
    by_score: dict[float, list[float]] = {}
    for score, value in zip(scores, values, strict=True):
        by_score.setdefault(score, []).append(value)
    total, not_better = 0.0, n
    for score in sorted(by_score, reverse=True):
        level = by_score[score]
        # All k among those not better, less all k among those worse: the best of the k is of this level.
        chance = (math.comb(not_better, k) - math.comb(not_better - len(level), k)) / math.comb(n, k)
        total += chance * math.fsum(level) / len(level)
        not_better -= len(level)
    return total
