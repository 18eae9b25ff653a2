"""Choosing prompts before training and samples after it: learning impact, label noise, guessing, the shortest right.

Sample functions take one row a sample with the group (prompt) it belongs to and work on all prompts at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from burnish.algorithms.merging import average
from burnish.config.errors import UserError, nearest
from burnish.core.segments import compact_ids, segment_min

BASE = "base"


# --- prompts -----------------------------------------------------------------------------------------------------------


def limr_scores(rewards: Tensor) -> Tensor:
    """[P] how well each prompt's reward curve follows the average learning curve; -inf for what cannot be scored.

    `rewards` is [P, K], the mean reward of a prompt in an epoch, nan where it was not seen: such an epoch takes the
    next one's value, and a prompt that still has a gap leaves the average too. With a_k the average of epoch k,
    s_i = 1 - sum_k (r_ik - a_k)^2 / sum_k (1 - a_k)^2. An average of 1 throughout has nothing to teach. LIMR
    (2502.11886), which keeps scores of 0.6 and above.
    """
    filled = filled_from_next(rewards.double())
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


def filled_from_next(values: Tensor) -> Tensor:
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
    return {k: average([v, short[k]], [weight, 1 - weight]).to(v.dtype) for k, v in long.items()}


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
            why = "which has not run by then" if later else f"which no stage is called{nearest(source, [BASE, *made])}"
            known = ", ".join([BASE, *made])
            raise UserError(f"stages[{index}] ({name}): it starts from {source!r}, {why} (it can start from: {known})")
        sources.append(made.get(source))
        made[name] = index
    return sources
