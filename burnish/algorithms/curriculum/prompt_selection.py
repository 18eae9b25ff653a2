"""Formulas of curricula and schedules: which prompts, in what order, how long, at what rate.

Pure functions of counts and rates; samplers, trainers and stages hold the state they are fed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from burnish.config.errors import UserError, did_you_mean
from burnish.core.segments import compact_ids, segment_min

# --- which prompts -----------------------------------------------------------------------------------------------------


def prioritised_probabilities(success: Tensor) -> Tensor:
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


# --- The scores of an answer's steps as one number.

STEP_SCORE_AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {
        "last": lambda scores: scores[-1],
        "min": min,
        "prod": math.prod,
        "mean": lambda scores: sum(scores) / len(scores),
    }
)
"""last: the state that the answer ends in. min: no better than its worst step. prod: the chance that all steps are right. mean: of all."""


def aggregate_step_scores(scores: Sequence[float], how: str) -> float:
    """One score of the scores of steps, of which there is one at least."""
    return float(STEP_SCORE_AGGREGATIONS[how](scores))


# --- One model out of several, tensor by tensor and without training: averages and spherical interpolation.
#
# Kimi k1.5 (2501.12599) averages a long-thinking model with a short one (long2short). Sums are made in float32 at least,
# whatever the tensors' type; a weight of 0 leaves a tensor out, so that weights 1 and 0 give the first one bit for bit.

PARALLEL_ANGLE = 1e-6
"""Angles below this are interpolated along a line, which is the same there and divides by nothing."""


def weighted_average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i tensor_i, in float32 (float64 for such tensors)."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    used = [(t.to(wide), w) for t, w in zip(tensors, weights, strict=True) if w != 0]
    total = used[0][0] * used[0][1]
    for tensor, weight in used[1:]:
        total += tensor * weight
    return total


def angle_between(dot: float, square_a: float, square_b: float) -> float:
    """The angle between two vectors of which a.b, a.a and b.b are known; 0 where one of them is all zeros."""
    norms = math.sqrt(square_a) * math.sqrt(square_b)
    return math.acos(max(-1.0, min(1.0, dot / norms))) if norms else 0.0


def slerp_weights(theta: float, share: float) -> tuple[float, float]:
    """The weights of a and b on the arc between them, `share` of the way to b (Shoemake 1985).

    sin((1 - t) theta) / sin(theta) and sin(t theta) / sin(theta). Opposite vectors have no one arc: those too go along
    the line.
    """
    if share in (0.0, 1.0) or min(theta, math.pi - theta) < PARALLEL_ANGLE:
        return 1 - share, share
    return math.sin((1 - share) * theta) / math.sin(theta), math.sin(share * theta) / math.sin(theta)


# --- Choosing prompts before training and samples after it: learning impact, label noise, guessing, the shortest right.
#
# Sample functions take one row a sample with the group (prompt) it belongs to and work on all prompts at once.

BASE = "base"


# --- prompts -----------------------------------------------------------------------------------------------------------


def limr_scores(rewards: Tensor) -> Tensor:
    """[P] how well each prompt's reward curve follows the average learning curve; -inf for what cannot be scored.

    `rewards` is [P, K], the mean reward of a prompt in an epoch, nan where it was not seen: such an epoch takes the
    next one's value, and a prompt that still has a gap leaves the average too. With a_k the average of epoch k,
    s_i = 1 - sum_k (r_ik - a_k)^2 / sum_k (1 - a_k)^2. An average of 1 throughout has nothing to teach. LIMR
    (2502.11886), which keeps scores of 0.6 and above.
    """
    filled = backfill_nan(rewards.double())
    whole = ~filled.isnan().any(1)
    scores = torch.full((rewards.shape[0],), -torch.inf, dtype=torch.float64, device=rewards.device)
    average = filled[whole].mean(0)
    scale = ((1 - average) ** 2).sum()
    if not bool(whole.any()) or scale == 0:
        return scores
    scores[whole] = 1 - ((filled[whole] - average) ** 2).sum(1) / scale
    return scores


def limr(rewards: Tensor, threshold: float = 0.6) -> Tensor:
    """[P] bool: the prompts worth training on by learning impact."""
    return limr_scores(rewards) >= threshold


def backfill_nan(values: Tensor) -> Tensor:
    """Each nan of a row replaced by the next value that is none."""
    num = values.shape[1]
    column = torch.arange(num, device=values.device).expand_as(values)
    known = torch.where(values.isnan(), num, column)
    source = known.flip(1).cummin(1).values.flip(1)
    return torch.where(source < num, values.gather(1, source.clamp(max=num - 1)), torch.nan)


def agreement(agreed: Tensor, at_least: int = 1, at_most: int | None = None) -> Tensor:
    """[P] bool: prompts whose label so many of a reference model's answers agree with.

    None agreeing says the label is probably wrong, all of them that there is nothing to learn. Demystifying long
    chain-of-thought (2502.03373), noise reduction.
    """
    keep = agreed >= at_least
    return keep if at_most is None else keep & (agreed <= at_most)


def guessable(correct: Tensor) -> Tensor:
    """[P] bool: prompts whose answer one of the tries without reasoning [P, tries] got right: easy to hack, to be dropped.

    Kimi k1.5 (2501.12599) tries eight times.
    """
    return correct.bool().any(1)


# --- samples -----------------------------------------------------------------------------------------------------------


def shortest_correct(lengths: Tensor, correct: Tensor, groups: Tensor) -> Tensor:
    """[G] int64: the shortest right sample of each group in order of id, the first of equals; -1 where none is right.

    Kimi k1.5 (2501.12599), shortest rejection sampling: the samples to fine-tune a short model on.
    """
    groups, num = compact_ids(groups)
    length = torch.where(correct.bool(), lengths.double(), torch.inf)
    is_shortest = (length == segment_min(length, groups, num)[groups]) & correct.bool()
    index = torch.arange(lengths.numel(), device=lengths.device).double()
    first = segment_min(torch.where(is_shortest, index, torch.inf), groups, num)
    return torch.where(first.isinf(), -1, first).long()


def long2short_pairs(lengths: Tensor, correct: Tensor, groups: Tensor, ratio: float = 1.5) -> tuple[Tensor, Tensor]:
    """([Q], [Q]) int64: chosen and rejected samples. Chosen is the shortest right one of a group.

    Rejected are wrong ones longer than it, and right ones at least `ratio` times as long. Kimi k1.5 (2501.12599),
    long2short DPO.
    """
    chosen = shortest_correct(lengths, correct, groups)[compact_ids(groups)[0]]  # [S]
    own = lengths[chosen.clamp(min=0)]
    longer = torch.where(correct.bool(), lengths >= ratio * own, lengths > own)
    index = torch.arange(lengths.numel(), device=lengths.device)
    rejected = (longer & (chosen >= 0) & (index != chosen)).nonzero().squeeze(1)
    return chosen[rejected], rejected


# --- weights and stages ------------------------------------------------------------------------------------------------


def merge_weights(long: Mapping[str, Tensor], short: Mapping[str, Tensor], weight: float = 0.5) -> dict[str, Tensor]:
    """weight * long + (1 - weight) * short, computed in float32, in the types of `long`; no training.

    Kimi k1.5 (2501.12599), model merging. Both must be the same architecture.
    """
    if differing := sorted(set(long) ^ set(short)):
        raise UserError(f"the models to merge differ in their weights: only one has {differing[0]!r}")
    for name in long:
        if long[name].shape != short[name].shape:
            raise UserError(
                f"the models to merge differ in the shape of {name!r}: {tuple(long[name].shape)} and {tuple(short[name].shape)}"
            )
    return {k: weighted_average([v, short[k]], [weight, 1 - weight]).to(v.dtype) for k, v in long.items()}


def resolve_stages(stages: Sequence[tuple[str, str]]) -> list[int | None]:
    """For each stage (its name, what it starts from) the index of the stage whose checkpoint that is; None for `base`.

    Stages run as they are listed, so one can start from the base model or from an earlier stage only. DeepSeek-R1
    (2501.12948) fine-tunes `base` again in its third stage, on what the second one's checkpoint wrote.
    """
    made: dict[str, int] = {}
    sources: list[int | None] = []
    for index, (name, source) in enumerate(stages):
        if name in made or name == BASE:
            raise UserError(f"stages[{index}]: the name {name!r} is taken; every stage needs its own")
        if source != BASE and source not in made:
            later = source in [other for other, _ in stages[index:]]
            why = (
                "which has not run by then"
                if later
                else f"which no stage is called{did_you_mean(source, [BASE, *made])}"
            )
            known = ", ".join([BASE, *made])
            raise UserError(f"stages[{index}] ({name}): it starts from {source!r}, {why} (it can start from: {known})")
        sources.append(made.get(source))
        made[name] = index
    return sources
