"""Estimates from n samples of each question, with 95% intervals over questions: mean@k, pass@k, maj@k and best@k.

`groups` has one sequence of accuracies per question. Questions are independent and the samples of one question are not,
so every interval is over questions. All shares use Wilson's interval, with the effective number of independent trials that
matches the variance between questions. With one greedy sample per question, this is Wilson's own interval. Unlike a
normal interval, it stays inside 0..1.

maj@k is the exact expectation over every choice of k different samples among the n, like pass@k. best@k is the exact expectation
over k draws with replacement, so it is a little lower. Nothing is random, so the same completions give the same digits on any machine.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

Z95 = 1.959963984540054  # two-sided 95% point of the normal distribution
Groups = Sequence[Sequence[float]]
MAX_EXACT_BINOMIAL = 500
"""Largest n for which C(n, n/2) is computed as a float; beyond it, logarithms are used."""


class Estimate(NamedTuple):
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float


def wilson_interval(mean: float, n: float) -> Estimate:
    """Return Wilson's score interval for a share of n independent trials (Wilson, 1927). It is never outside 0..1."""
    z2 = Z95 * Z95
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def student_t95(freedom: int) -> float:
    """Return the two-sided 95% point of Student's t: from a table up to 9 degrees of freedom, then the Cornish-Fisher series."""
    small = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 5: 2.5706, 6: 2.4469, 7: 2.3646, 8: 2.3060, 9: 2.2622}
    if freedom in small:
        return small[freedom]
    z, v = Z95, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def clustered_interval(values: Sequence[float], trials: float) -> Estimate:
    """Return the mean of one value per question, with its interval. `trials` is the largest possible number of independent trials.

    For values in 0..1, this is Wilson's interval with the effective number of trials (Kish, 1965): the number of independent
    trials with the variance seen between questions. It is at least the number of questions, because values in 0..1 cannot
    vary more, and at most `trials`. A Student factor accounts for the uncertain variance of few questions. If all values are
    0 or all are 1, the number of questions is used. Values outside 0..1 (graded rewards) get a normal interval.
    """
    if not values:
        raise ValueError("no samples")
    mean = math.fsum(values) / len(values)
    variance = math.fsum((v - mean) ** 2 for v in values) / len(values)
    if any(not 0 <= v <= 1 for v in values):
        half = Z95 * math.sqrt(variance / len(values))
        return Estimate(mean, mean - half, mean + half)
    n, spread = len(values), mean * (1 - mean)
    if spread <= 0 or n == 1:
        return wilson_interval(mean, n)
    if variance == 0:
        return wilson_interval(mean, trials)
    effective = spread * (n - 1) / variance * (Z95 / student_t95(n - 1)) ** 2
    return wilson_interval(mean, min(trials, max(n, effective)))


def ratio_interval(hits: Sequence[float], trials: Sequence[float]) -> Estimate:
    """Return sum(hits) / sum(trials) with its interval, where each question has several trials that are not independent of each other.

    The interval is Wilson's with the effective number of trials, as in `clustered_interval`, to which this is equal if every question
    has one trial. The variance is that of the linearised ratio: n / (n-1) sum_i (hits_i - R trials_i)^2 / sum(trials)^2 (Cochran 1977, 6.3).
    """
    if not trials:
        raise ValueError("no samples")
    total, n = math.fsum(trials), len(trials)
    ratio = math.fsum(hits) / total
    fewest = total**2 / math.fsum(t * t for t in trials)  # questions, if they differ in their weights (Kish, 1965)
    spread = ratio * (1 - ratio)
    if spread <= 0 or n == 1:
        return wilson_interval(ratio, fewest)
    squares = math.fsum((h - ratio * t) ** 2 for h, t in zip(hits, trials, strict=True))
    if squares == 0:
        return wilson_interval(ratio, total)
    effective = spread * (n - 1) * total**2 / (n * squares) * (Z95 / student_t95(n - 1)) ** 2
    return wilson_interval(ratio, min(total, max(fewest, effective)))


def mean_at_k(groups: Groups) -> Estimate:
    """Return the mean over questions of each question's mean over its samples (mean@k).

    All samples are used: fewer would have the same expectation and a wider interval.
    """
    groups = [g for g in groups if g]
    return clustered_interval([math.fsum(g) / len(g) for g in groups], sum(map(len, groups)))


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k samples is right, drawn without replacement from n with `correct` right ones.

    The unbiased estimate is 1 - C(n-c, k) / C(n, k), computed as a product that does not overflow (Chen et al., 2107.03374).
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, got n={n}, correct={correct}, k={k}")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def mean_pass_at_k(groups: Groups, k: int) -> Estimate | None:
    """Return pass@k over the questions with at least k samples; None if there are none. An accuracy of 1 is right.

    n samples contain n/k independent draws of k samples, so a question counts as at most n/k trials.
    """
    usable = [g for g in groups if len(g) >= k]
    if not usable:
        return None
    return clustered_interval(
        [pass_at_k(len(g), sum(a >= 1 for a in g), k) for g in usable], sum(len(g) / k for g in usable)
    )


def powers_up_to(n: int) -> list[int]:
    """Return 1, 2, 4, ... and n itself."""
    powers = [1 << i for i in range(n.bit_length())]
    return powers if powers[-1] == n else [*powers, n]


def maj_at_k(votes: Sequence[Hashable | None], right: Hashable, k: int) -> float:
    """Return the probability that the answer `right` wins the vote of k random samples. None is no vote.

    The answer with most votes wins. Tied answers win equally often, which is the same as taking the first one sampled. k
    samples without any vote count as wrong. Self-consistency: Wang et al., 2203.11171.
    """
    n = len(votes)
    if not 1 <= k <= n:
        raise ValueError(f"maj@k needs 1 <= k <= n, got n={n}, k={k}")
    counts = Counter(vote for vote in votes if vote is not None)
    wrong = sorted(count for answer, count in counts.items() if answer != right)
    return _majority_chance(counts[right], tuple(wrong), n - sum(counts.values()), k)


@functools.lru_cache(maxsize=1 << 14)
def _majority_chance(right: int, wrong: tuple[int, ...], silent: int, k: int) -> float:
    """`maj_at_k` from counts: right samples, samples of each wrong answer, and samples without an answer.

    Choosing k of n samples equals choosing each with probability k/n, given that k were chosen. So the numbers chosen of each
    answer are independent binomials, divided by the probability of k in total. These sums of products never overflow.
    """
    n = right + sum(wrong) + silent
    if right == 0:
        return 0.0
    p = k / n
    others = [_not_beaten(wrong, silent, k - j, j, p) for j in range(1, min(right, k) + 1)]
    wins = [_binomial(right, j, p) * other for j, other in enumerate(others, start=1)]
    return min(1.0, math.fsum(wins) / _binomial(n, k, p))


def _not_beaten(wrong: tuple[int, ...], silent: int, size: int, votes: int, p: float) -> float:
    """Return the probability that `size` other samples are chosen and no wrong answer has more than `votes` votes.

    Each case is weighted with 1 / (1 + number of answers with exactly `votes`), the share of ties that the right answer
    wins. A table over (samples chosen, answers tied) is filled answer by answer.
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
    """Return the probability of k successes in n trials."""
    if n > MAX_EXACT_BINOMIAL and 0 < p < 1:
        ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
        return math.exp(ways + k * math.log(p) + (n - k) * math.log1p(-p))
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def best_at_k(scores: Sequence[float], values: Sequence[float], k: int) -> float:
    """Return the expected value of the sample with the highest score among k draws with replacement. Ties are broken evenly.

    On sorted scores s_1 <= ... <= s_n it is sum_i s_i (i^k - (i-1)^k) / n^k, as in verl's bootstrap, without its noise. If the values are the scores, this is the expected highest score. If they are accuracies, it is the accuracy of the
    scorer's choice.
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
        # P(all k are not better than this level) - P(all k are worse) = P(the best of the k has this level).
        chance = (not_better / n) ** k - ((not_better - len(level)) / n) ** k
        total += chance * math.fsum(level) / len(level)
        not_better -= len(level)
    return total
