"""What n samples of each question say about a policy, and how sure it is: one value a question, an interval over questions.

Pure Python. `groups` is one sequence of accuracies a question. Questions are the independent draws and the samples of one
question are not, so every interval here is over questions. All shares use one interval: Wilson's, at the number of
independent trials that would vary as the questions' values do. With one greedy sample a question that is Wilson's own
interval; with many samples it is as narrow as the questions allow; near 0 and 1 it stays inside, where a normal one does not.
Nothing is drawn at random, so the same completions give the same digits on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

Z95 = 1.959963984540054  # two-sided 95% point of the normal distribution
Groups = Sequence[Sequence[float]]


class Estimate(NamedTuple):
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float


def wilson(mean: float, n: float) -> Estimate:
    """Wilson's score interval for a share of n independent trials (Wilson, 1927): never empty, never outside 0..1."""
    z2 = Z95 * Z95
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def student95(freedom: int) -> float:
    """Two-sided 95% point of Student's distribution: a table for few degrees, the Cornish-Fisher series from ten."""
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


def clustered(values: Sequence[float], trials: float) -> Estimate:
    """The mean of one value a question, with its interval; `trials` is the most independent trials there can have been.

    For values in 0..1 Wilson's interval at the effective number of trials (Kish, 1965): as many independent ones as would
    give the variance seen between questions, at least a trial a question (values in 0..1 cannot vary more) and at most
    `trials`. The variance of few questions is itself uncertain, so it counts as Student's interval would have it. Where
    every value is 1, or every one 0, only the questions count. Values outside 0..1, which graded rewards may be, get
    a normal interval.
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
        return wilson(mean, n)
    if variance == 0:
        return wilson(mean, trials)
    effective = spread * (n - 1) / variance * (Z95 / student95(n - 1)) ** 2
    return wilson(mean, min(trials, max(n, effective)))


def mean_at_k(groups: Groups) -> Estimate:
    """The mean over questions of each question's mean over its samples (mean@k).

    k is the samples there are: fewer would have the same expectation and a wider interval.
    """
    groups = [g for g in groups if g]
    return clustered([math.fsum(g) / len(g) for g in groups], sum(map(len, groups)))


# --- pass@k ----------------------------------------------------------------------------------------------------------


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from n of which `correct` are right, is right.

    Unbiased: 1 - C(n-c, k) / C(n, k), as the product that does not overflow (Chen et al., 2107.03374).
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, got n={n}, correct={correct}, k={k}")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def mean_pass_at_k(groups: Groups, k: int) -> Estimate | None:
    """pass@k over the questions that have k samples or more, None where none has; an accuracy of 1 is right.

    n samples hold n/k independent draws of k, so that many trials a question at most.
    """
    usable = [g for g in groups if len(g) >= k]
    if not usable:
        return None
    return clustered([pass_at_k(len(g), sum(a >= 1 for a in g), k) for g in usable], sum(len(g) / k for g in usable))


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... and n itself."""
    powers = [1 << i for i in range(n.bit_length())]
    return powers if powers[-1] == n else [*powers, n]
