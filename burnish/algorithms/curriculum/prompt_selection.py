"""Formulas that choose prompts and samples: curricula, learning impact and long2short pairs.

They are pure functions of counts, rates and lengths; samplers and trainers hold the state. P is prompts, G groups. Sample
functions take one row per sample, with its group, and work on all groups at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.segments import compact_ids, segment_min

# --- Curricula


def prioritised_probabilities(success: Tensor) -> Tensor:
    """[P] p_i = (1 - s_i) / sum_j (1 - s_j), s the success rate; uniform if all are 1. Kimi k1.5 (2501.12599).

    A prompt that was never drawn has success rate 0.
    """
    failure = 1 - success.double()
    total = failure.sum()
    return failure / total if total > 0 else torch.full_like(failure, 1 / max(1, failure.numel()))


def difficulty_buckets(difficulty: Tensor, num: int) -> Tensor:
    """[P] int64: bucket 0 (easiest) to num - 1 of each prompt, by rank; sizes differ by at most one.

    Of equally difficult prompts the earlier counts as easier.
    """
    rank = torch.empty_like(difficulty, dtype=torch.int64)
    order = difficulty.argsort(stable=True)
    rank[order] = torch.arange(order.numel(), device=order.device)
    return rank * num // max(1, order.numel())


def hard_prompts(correct: Tensor, tried: Tensor, below: float) -> Tensor:
    """[P] bool: prompts tried at least once with a success rate under `below`. Open-Reasoner-Zero (2503.24290)."""
    return correct < below * tried


def linear_anneal(done: int, steps: int, start: float, end: float) -> float:
    """start + (end - start) min(1, done / steps): the learning rate of Open-Reasoner-Zero (2503.24290)."""
    return start + (end - start) * min(1.0, done / steps)


# --- Learning impact


def limr_scores(rewards: Tensor) -> Tensor:
    """[P] s_i = 1 - sum_k (r_ik - a_k)^2 / sum_k (1 - a_k)^2: how well a prompt follows the average learning curve. LIMR (2502.11886).

    `rewards` [P, K] is the mean reward of a prompt in epoch k, nan if it was not drawn; a_k is the average of epoch k. A nan
    takes the next epoch's value. A prompt that still has a nan scores -inf and leaves the average. If the average is 1
    throughout, all prompts score -inf. The paper keeps scores of 0.6 and above.
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


def backfill_nan(values: Tensor) -> Tensor:
    """Each nan of a row replaced by the next value that is not nan."""
    num = values.shape[1]
    column = torch.arange(num, device=values.device).expand_as(values)
    known = torch.where(values.isnan(), num, column)
    source = known.flip(1).cummin(1).values.flip(1)
    return torch.where(source < num, values.gather(1, source.clamp(max=num - 1)), torch.nan)


# --- Samples of finished runs


def shortest_correct(lengths: Tensor, correct: Tensor, groups: Tensor) -> Tensor:
    """[G] int64: the shortest right sample of each group in order of id, the first of ties; -1 if none is right.

    Kimi k1.5 (2501.12599), shortest rejection sampling: the samples to fine-tune a short model on.
    """
    groups, num = compact_ids(groups)
    length = torch.where(correct.bool(), lengths.double(), torch.inf)
    is_shortest = (length == segment_min(length, groups, num)[groups]) & correct.bool()
    index = torch.arange(lengths.numel(), device=lengths.device).double()
    first = segment_min(torch.where(is_shortest, index, torch.inf), groups, num)
    return torch.where(first.isinf(), -1, first).long()


def long2short_pairs(lengths: Tensor, correct: Tensor, groups: Tensor, ratio: float = 1.5) -> tuple[Tensor, Tensor]:
    """[Q], [Q] int64: chosen and rejected samples. Kimi k1.5 (2501.12599), long2short DPO.

    Chosen is the shortest right sample of a group. Rejected are wrong samples longer than it, and right samples at least
    `ratio` times as long.
    """
    chosen = shortest_correct(lengths, correct, groups)[compact_ids(groups)[0]]  # [S]
    own = lengths[chosen.clamp(min=0)]
    longer = torch.where(correct.bool(), lengths >= ratio * own, lengths > own)
    index = torch.arange(lengths.numel(), device=lengths.device)
    rejected = (longer & (chosen >= 0) & (index != chosen)).nonzero().squeeze(1)
    return chosen[rejected], rejected
