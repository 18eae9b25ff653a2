"""Accuracy against the tokens spent on a question, for several strategies: the points, the envelope, and comparisons with majority.

A budget of k is the work of k parallel answers (`StrategyRecord.at_budget`). What a strategy really spent is measured: the axis of the
chart is the mean of the sampled tokens of a question. Intervals are over questions. Every strategy is compared with majority at the same
budget, and with majority at the tokens that it really spent, by a paired bootstrap over the questions that both have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from burnish.core.random_keys import fold
from burnish.evaluation.statistics import Estimate

NUM_RESAMPLES = 2000
"""Resamples of the paired bootstrap."""
BEYOND_POOL = 0.02
"""A strategy that costs at most this share more than the whole pool is compared with all of the pool."""
Values = Mapping[str, float]
"""The expected accuracy of each question, by its id."""
DIFFERENCES = ("versus_majority", "versus_equal_tokens")
"""Fields of a point that compare it with majority."""


@dataclass(frozen=True)
class ScalingPoint:
    """One strategy at one budget. Numbers of tokens, requests and calls are means over questions."""

    strategy: str
    """Its label, such as `best_of_n@self_certainty`."""
    budget: int
    estimate: str
    """exact: a formula over the pool. blocks: disjoint blocks of the pool. search: it was run."""
    accuracy: Estimate
    tokens: float
    times_one_answer: float
    requests: float
    verifier_calls: float
    verifier_failures: int
    """In all questions."""
    wall_s: float | None
    """Mean seconds of a search; None for what the pool answers."""
    cache_hit_rate: float | None
    num_questions: int
    num_failed: int
    """Questions without a result, because the search failed or its answer could not be scored. They are left out."""
    is_oracle: bool
    versus_majority: Estimate | None = None
    """Accuracy minus that of majority at the same budget, on the same questions; None for majority itself."""
    num_compared: int = 0
    verifier_tokens: float | None = None
    """Tokens that the verifier read and wrote; None if it does not say."""
    versus_equal_tokens: Estimate | None = None
    """Accuracy minus that of majority with the same mean tokens (`equal_samples`); None for majority, and beyond the pool."""
    equal_samples: float | None = None
    """How many samples of majority that is. Between two whole numbers its accuracy is interpolated."""

    @property
    def name(self) -> str:
        """Return the label, marked if the strategy chose by the expected answers."""
        return self.strategy + (" (oracle)" if self.is_oracle and "oracle" not in self.strategy else "")


@dataclass(frozen=True)
class Scaling:
    """The result of `burnish eval --scaling`."""

    name: str
    """The data set."""
    model: str
    num_questions: int
    pool_size: int
    answer_tokens: float
    """Mean tokens of one answer."""
    points: list[ScalingPoint]

    @property
    def strategies(self) -> list[str]:
        """Return the labels in order."""
        return list(dict.fromkeys(point.strategy for point in self.points))


def paired_bootstrap(a: Values, b: Values, seed: int, *names: str | int) -> tuple[Estimate, int]:
    """Return the mean of b - a over the questions that both have, with the 2.5% and 97.5% points of its bootstrap, and their number.

    Questions are drawn with replacement, `NUM_RESAMPLES` times, by a generator that follows from the seed and the names.
    """
    ids = [question for question in a if question in b]
    if not ids:
        raise ValueError("no questions in common")
    changes = np.array([b[question] - a[question] for question in ids])
    generator = np.random.default_rng(fold(seed, "bootstrap", *names) & (2**63 - 1))
    means = np.array([changes[generator.integers(0, len(ids), len(ids))].mean() for _ in range(NUM_RESAMPLES)])
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(float(changes.mean()), float(low), float(high)), len(ids)


def samples_at_equal_tokens(times_one_answer: float, pool_size: int) -> float | None:
    """Return how many samples cost what a strategy did: at least one, because no vote costs less. None if the pool has fewer."""
    if times_one_answer > pool_size * (1 + BEYOND_POOL):
        return None
    return min(max(times_one_answer, 1.0), float(pool_size))


def interpolated(curve: Callable[[int], Values], k: float) -> dict[str, float]:
    """Return the values at k samples, of `curve` at the whole numbers around it.

    This is the exact value of drawing the larger number with the probability that makes k samples on average.
    """
    few, share = int(k), k - int(k)
    if not share:
        return dict(curve(few))
    more = curve(few + 1)
    return {question: (1 - share) * value + share * more[question] for question, value in curve(few).items()}


def envelope(points: Iterable[ScalingPoint]) -> list[ScalingPoint]:
    """Return the compute-optimal points: each has a higher accuracy than all that cost no more. Oracles are no candidates."""
    found: list[ScalingPoint] = []
    for point in sorted((p for p in points if not p.is_oracle), key=lambda p: (p.tokens, -p.accuracy.mean)):
        if not found or point.accuracy.mean > found[-1].accuracy.mean:
            found.append(point)
    return found


def scaling_table(scaling: Scaling) -> str:
    """Return all points as text, and the envelope."""
    head = [
        "strategy",
        "budget",
        "accuracy",
        "95% interval",
        "- majority",
        "95% interval",
        "- at equal tokens",
        "95% interval",
    ]
    head += ["tokens", "x one", "requests", "calls", "call tokens", "failed", "wall s", "cache", "estimate"]
    body = [head, *(_cells(point) for point in scaling.points)]
    widths = [max(len(row[i]) for row in body) for i in range(len(head))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in body]
    lines += ["", "best accuracy at each cost:"]
    lines += [
        f"  {p.tokens:>10,.1f} tokens ({p.times_one_answer:.1f} times one answer)  {p.accuracy.mean:.3f}  {p.name}, budget {p.budget}"
        for p in envelope(scaling.points)
    ]
    return "\n".join(lines)


def _cells(p: ScalingPoint) -> list[str]:
    return [
        p.name,
        str(p.budget),
        f"{p.accuracy.mean:.3f}",
        f"{p.accuracy.low:.3f} to {p.accuracy.high:.3f}",
        *_difference(p.versus_majority),
        *_difference(p.versus_equal_tokens),
        f"{p.tokens:,.1f}",
        f"{p.times_one_answer:.1f}",
        f"{p.requests:,.1f}",
        f"{p.verifier_calls:,.1f}",
        "-" if p.verifier_tokens is None else f"{p.verifier_tokens:,.1f}",
        str(p.num_failed),
        "-" if p.wall_s is None else f"{p.wall_s:,.2f}",
        "-" if p.cache_hit_rate is None else f"{p.cache_hit_rate:.1%}",
        p.estimate,
    ]


def _difference(versus: Estimate | None) -> list[str]:
    return ["-", "-"] if versus is None else [f"{versus.mean:+.3f}", f"{versus.low:+.3f} to {versus.high:+.3f}"]


def scaling_json(scaling: Scaling) -> dict[str, Any]:
    """Return all numbers as plain values."""
    return {
        "name": scaling.name,
        "model": scaling.model,
        "num_questions": scaling.num_questions,
        "pool_size": scaling.pool_size,
        "answer_tokens": scaling.answer_tokens,
        "bootstrap_resamples": NUM_RESAMPLES,
        "points": [_point_json(point) for point in scaling.points],
        "envelope": [{"strategy": point.strategy, "budget": point.budget} for point in envelope(scaling.points)],
    }


def _point_json(point: ScalingPoint) -> dict[str, Any]:
    versus = {name: getattr(point, name) for name in DIFFERENCES}
    found = {name: None if value is None else value._asdict() for name, value in versus.items()}
    return asdict(point) | {"accuracy": point.accuracy._asdict(), **found}


def scaling_of_json(found: Mapping[str, Any]) -> Scaling:
    """Read what `scaling_json` returned."""
    points: Sequence[dict[str, Any]] = found["points"]
    made = [
        ScalingPoint(**{**point, **{name: _estimate(point.get(name)) for name in ("accuracy", *DIFFERENCES)}})
        for point in points
    ]
    return Scaling(
        **{key: found[key] for key in ("name", "model", "num_questions", "pool_size", "answer_tokens")}, points=made
    )


def _estimate(found: Mapping[str, float] | None) -> Estimate | None:
    return None if found is None else Estimate(**found)
