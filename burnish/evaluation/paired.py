"""Two models on the same questions: the difference, its interval and a test, from one difference a question.

The question is the unit. Each question's difference is between two means over samples, so it holds for one greedy sample
a question and for many drawn ones. Pure functions; nothing is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from burnish.evaluation.statistics import Z95, Estimate, student95

MAX_STEPS = (
    1000  # finest grid of differences in the exact test; samples a question rarely have a larger common multiple
)


def difference(values: Sequence[float]) -> Estimate:
    """The mean difference with its 95% interval.

    Where every difference is -1, 0 or 1 (one sample each) it is the adjusted interval of Bonett and Price (2012), which
    adds a question gained and one lost and so holds when few changed; else Student's over the questions.
    """
    n = len(values)
    if not n:
        raise ValueError("no questions in common")
    mean = math.fsum(values) / n
    if all(v in (-1, 0, 1) for v in values):
        centre = math.fsum(values) / (n + 2)
        variance = (math.fsum(v * v for v in values) + 2) / (n + 2) - centre * centre
        half = Z95 * math.sqrt(variance / (n + 2))
        return Estimate(mean, max(-1.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))
    if n == 1:
        return Estimate(mean, -1.0, 1.0)  # one difference says nothing of how they vary
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = student95(n - 1) * math.sqrt(variance / n)
    return Estimate(mean, max(-1.0, mean - half), min(1.0, mean + half))


def sign_flip_test(values: Sequence[float]) -> float:
    """Two-sided p-value of the permutation test that swaps the two models on every question by a coin.

    If the models are equally good, each difference may as well have the other sign. The chance that the sum with random
    signs is at least as far from 0 is counted exactly, over all 2^n choices, by adding one question after the other to
    the distribution of the sum. With one sample each it is McNemar's exact test.
    """
    steps = _on_a_grid([v for v in values if v])
    if not steps:
        return 1.0
    observed, total = abs(sum(steps)), sum(map(abs, steps))
    chance = np.zeros(2 * total + 1)  # of each sum from -total to total
    chance[total] = 1.0
    reach = 0
    for step in map(abs, steps):
        old = chance[total - reach : total + reach + 1] / 2
        reach += step
        new = np.zeros(2 * reach + 1)
        new[: len(old)] += old
        new[2 * step :] += old
        chance[total - reach : total + reach + 1] = new
    tails = chance[: total - observed + 1].sum() + chance[total + observed :].sum()
    return min(1.0, float(tails if observed else 1.0))


def _on_a_grid(values: Sequence[float]) -> list[int]:
    """The values as whole multiples of their common step, or of 1/MAX_STEPS where that is finer still."""
    exact = [Fraction(v).limit_denominator(MAX_STEPS) for v in values]
    common = math.lcm(*(f.denominator for f in exact)) if exact else 1
    scale = min(common, MAX_STEPS)
    return [round(f * scale) for f in exact]
