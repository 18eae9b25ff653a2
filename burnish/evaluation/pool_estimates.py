"""What voting strategies would answer with k samples, estimated from one pool of n samples of each question.

`single`, `majority` and `best_of_n` have exact formulas: the mean over all choices of k different samples among the n. `weighted_vote` has
none that is cheap, so its estimate is the mean over the n // k disjoint blocks of the pool, in order. With k = n both are what the strategy
does on the pool. Nothing is random, and all strategies see the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from burnish.config.records import Slot
from burnish.evaluation.statistics import maj_at_k
from burnish.evaluation.strategies.search import SearchFailed
from burnish.evaluation.strategies.spec import BestOfN, Majority, Single, WeightedVote
from burnish.evaluation.strategies.votes import elected, vote_weights

EXACT, BLOCKS = "exact", "blocks"


@dataclass(frozen=True)
class PooledQuestion:
    """The samples of one question, in order."""

    answers: Sequence[str | None]
    """Normalised answers, which votes are counted by."""
    accuracies: Sequence[float]
    lengths: Sequence[int]
    scores: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """By verifier; None where it failed."""
    verifier_tokens: Mapping[str, float | None] = field(default_factory=dict)
    """By verifier: mean tokens that it read and wrote for a sample; None if it did not say so of all."""


def is_pooled(strategy: Slot) -> bool:
    """Whether a strategy looks at parallel samples alone, so that a pool is all it needs."""
    return type(strategy) in (Single, Majority, WeightedVote, BestOfN)


def estimate_kind(strategy: Slot) -> str:
    """Return how the accuracy of a pooled strategy is estimated."""
    return BLOCKS if isinstance(strategy, WeightedVote) else EXACT


def pooled_accuracy(strategy: Slot, question: PooledQuestion, k: int, scores: str, is_logp: bool) -> float | None:
    """Return the expected accuracy of a strategy with k samples; None if its verifier failed for all that it could choose.

    `scores` names the verifier's scores in the question. `is_logp`: they are log-probs.
    """
    if isinstance(strategy, WeightedVote):
        return weighted_vote_at_k(question, question.scores[scores], k, strategy.borda, is_logp)
    if isinstance(strategy, BestOfN):
        return best_of_k(question.scores[scores], question.accuracies, k)
    return majority_at_k(question.answers, question.accuracies, k if isinstance(strategy, Majority) else 1)


def majority_at_k(answers: Sequence[str | None], accuracies: Sequence[float], k: int) -> float:
    """Return the expected accuracy of the majority's answer among k of n samples: sum_a P(a wins) mean accuracy of the samples with a.

    Unlike maj@k, it does not join right answers whose normalised texts differ, because a strategy cannot know that they are right. Without any
    vote the first sample counts.
    """
    n, total = len(answers), 0.0
    by_answer: dict[str | None, list[float]] = {}
    for answer, accuracy in zip(answers, accuracies, strict=True):
        by_answer.setdefault(answer, []).append(accuracy)
    silent = by_answer.pop(None, [])
    for answer, values in by_answer.items():
        if any(values):
            total += maj_at_k(answers, answer, k) * math.fsum(values) / len(values)
    if any(silent):
        total += math.comb(len(silent), k) / math.comb(n, k) * math.fsum(silent) / len(silent)
    return total


def best_of_k(scores: Sequence[float | None], accuracies: Sequence[float], k: int) -> float | None:
    """Return the expected accuracy of the sample with the highest score among k of n different samples. Ties are broken evenly.

    With m samples in better levels and l in a level, it holds the best with probability [C(n - m, k) - C(n - m - l, k)] / C(n, k). Samples
    whose scoring failed are never the best. Choices of k without any score are left out, as failed searches are; None if all are.
    """
    n = len(scores)
    if not 1 <= k <= n or len(accuracies) != n:
        raise ValueError(f"best of k needs 1 <= k <= n and an accuracy a score, got n={n}, {len(accuracies)}, k={k}")
    levels: dict[float, list[float]] = {}
    for score, accuracy in zip(scores, accuracies, strict=True):
        if score is not None:
            levels.setdefault(score, []).append(accuracy)
    ways, left, total = math.comb(n, k), n, 0.0
    for score in sorted(levels, reverse=True):
        level = levels[score]
        chance = (math.comb(left, k) - math.comb(left - len(level), k)) / ways
        total += chance * math.fsum(level) / len(level)
        left -= len(level)
    scored = 1 - math.comb(left, k) / ways
    return total / scored if scored else None


def weighted_vote_at_k(
    question: PooledQuestion, scores: Sequence[float | None], k: int, borda: float | None, is_logp: bool
) -> float | None:
    """Return the mean accuracy of weighted votes over the disjoint blocks of k samples. Blocks without any score are left out."""
    found = []
    for start in range(0, len(scores) - k + 1, k):
        block = slice(start, start + k)
        if all(score is None for score in scores[block]):
            continue
        weights = vote_weights(scores[block], borda, is_logp)
        index, _ = elected(question.answers[block], weights)
        found.append(question.accuracies[start + index])
    return math.fsum(found) / len(found) if found else None


def check_weights(strategy: Slot, questions: Sequence[PooledQuestion], scores: str, is_logp: bool) -> str | None:
    """Return why the scores of a pool cannot weigh votes; None if they can."""
    if isinstance(strategy, WeightedVote):
        try:
            for question in questions:
                vote_weights(question.scores[scores], strategy.borda, is_logp)
        except SearchFailed as failure:
            return str(failure)
    return None


def independent_trials(kind: str, questions: Sequence[PooledQuestion], k: int) -> float:
    """Return how many independent runs of a strategy with k samples a pool holds, for the interval."""
    sizes = [len(question.answers) for question in questions]
    return sum(size // k for size in sizes) if kind == BLOCKS else sum(size / k for size in sizes)
