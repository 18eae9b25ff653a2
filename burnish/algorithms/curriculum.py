"""Formulas of curricula and schedules: which prompts, in what order, how long, at what rate.

Pure functions of counts and rates; samplers, trainers and stages hold the state they are fed from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# --- which prompts -----------------------------------------------------------------------------------------------------


def prioritised(success: Tensor) -> Tensor:
    """[P] chance of each prompt in one draw, proportional to 1 - success rate; uniform when all are solved.

    A prompt never seen has success 0. Kimi k1.5 (2501.12599), prioritised sampling.
    """
    failure = 1 - success.double()
    total = failure.sum()
    return failure / total if total > 0 else torch.full_like(failure, 1 / max(1, failure.numel()))


def difficulty_buckets(difficulty: Tensor, num: int) -> Tensor:
    """[P] int64: bucket 0 (easiest) to num - 1 of each prompt, by rank, in sizes that differ by at most one.

    Of equally difficult prompts the earlier one is taken for the easier.
    """
    rank = torch.empty_like(difficulty, dtype=torch.int64)
    order = difficulty.argsort(stable=True)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return rank * num // max(1, order.numel())


def easy_to_hard(difficulty: Tensor, num: int) -> Tensor:
    """[P] int64: the prompts, easiest bucket first, in their own order within a bucket (Kimi k1.5, curriculum sampling)."""
    return difficulty_buckets(difficulty, num).argsort(stable=True)


def hard_prompts(correct: Tensor, tried: Tensor, below: float = 4 / 64) -> Tensor:
    """[P] bool: prompts tried at least once with a success rate under `below`, to anneal on.

    Open-Reasoner-Zero (2503.24290) takes those with fewer than 4 right of 64.
    """
    return correct < below * tried


# --- schedules ---------------------------------------------------------------------------------------------------------


def has_plateaued(rewards: Sequence[float], window: int, gain: float) -> bool:
    """Whether the mean of the last `window` rewards is less than `gain` above that of the window before.

    False until there are two windows.
    """
    if len(rewards) < 2 * window:
        return False
    last, before = rewards[-window:], rewards[-2 * window : -window]
    return (sum(last) - sum(before)) / window < gain


def linear_anneal(done: int, steps: int, start: float, end: float) -> float:
    """start + (end - start) min(1, done / steps): the learning rate after `done` steps of annealing.

    Open-Reasoner-Zero (2503.24290) anneals from 1e-6 to 3e-7 over about 100 steps.
    """
    return start + (end - start) * min(1.0, done / steps)


def weight_after_warmup(step: int, weight: float, warmup_steps: int) -> float:
    """0 for the first `warmup_steps` steps (counted from 1), then `weight` (Kimi k1.5, the length reward's weight)."""
    return weight if step > warmup_steps else 0.0


# --- partial rollouts --------------------------------------------------------------------------------------------------


def iteration_of(written: Tensor, budget: int) -> Tensor:
    """The iteration that wrote the token number `written` (from 0) of a response, at `budget` tokens an iteration.

    A response not finished within an iteration goes on in the next one under the policy of then. Kimi k1.5
    (2501.12599), partial rollouts.
    """
    return written // budget


def partial_mask(written: Tensor, budget: int, iteration: int) -> Tensor:
    """bool: tokens written in this iteration, the only ones trained on; older ones are context."""
    return iteration_of(written, budget) == iteration


def emitted(length: int, budget: int) -> list[int]:
    """How many tokens each iteration writes of a response: 10 at 4 are 4, 4, 2; it is rewarded after the last."""
    return [min(budget, length - start) for start in range(0, length, budget)]
