"""What n samples of each prompt say about a policy: pass@k, the mean over samples, and how sure it is.

Pure Python. `groups` is one sequence of accuracies a prompt: prompts are the independent draws, the samples of one
prompt are not, and every interval here is over prompts.
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


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement from n of which `correct` are right, is right.

    Unbiased: 1 - C(n-c, k) / C(n, k), as the product that does not overflow (Chen et al., 2107.03374).
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= correct <= n and 1 <= k <= n, got n={n}, correct={correct}, k={k}")
    if n - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - correct + 1, n + 1))


def mean_pass_at_k(groups: Groups, k: int) -> float | None:
    """pass@k over the prompts that have k samples or more, None where no prompt has; an accuracy of 1 is right."""
    values = [pass_at_k(len(g), sum(a >= 1 for a in g), k) for g in groups if len(g) >= k]
    return math.fsum(values) / len(values) if values else None


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... up to n."""
    return [1 << i for i in range(n.bit_length())]


def wilson(mean: float, n: float) -> Estimate:
    """Wilson's score interval for a share of n independent trials (Wilson, 1927): never empty, never outside 0..1."""
    z2 = Z95 * Z95
    centre = (mean + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(mean * (1 - mean) / n + z2 / (4 * n * n))
    return Estimate(mean, max(0.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))


def mean_at_k(groups: Groups) -> Estimate:
    """The mean over prompts of each prompt's mean over its samples (mean@k), with an interval clustered by prompt.

    The interval is Wilson's at the effective number of samples (Kish, 1965): as many independent ones as would give
    the variance seen between prompts, at most the samples there are. With one sample a prompt that is Wilson's own
    interval. Where every sample is right, or every one wrong, only the prompts count. Accuracies outside 0..1, which
    a user's function may give, get a normal interval.
    """
    groups = [g for g in groups if g]
    if not groups:
        raise ValueError("no samples")
    means = [math.fsum(g) / len(g) for g in groups]
    mean = math.fsum(means) / len(means)
    variance = math.fsum((m - mean) ** 2 for m in means) / len(means)
    if any(not 0 <= a <= 1 for g in groups for a in g):
        half = Z95 * math.sqrt(variance / len(means))
        return Estimate(mean, mean - half, mean + half)
    spread = mean * (1 - mean)
    if spread == 0:
        return wilson(mean, len(groups))
    total = float(sum(len(g) for g in groups))
    return wilson(mean, total if variance == 0 else min(total, spread * len(means) / variance))
