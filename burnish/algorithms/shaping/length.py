"""Shapers that look at how much was written: `[S] float64`, the new reward.

Lengths are the tokens the model wrote in a trajectory, so that tool results and prompts cost nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.curriculum import weight_after_warmup
from burnish.algorithms.filters.columns import is_correct, written_lengths
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import compact_ids, segment_max, segment_min


def soft_overlong(
    batch: Batch, step: int, *, max_tokens: int | None = None, cache: int | None = None, factor: float = 1.0
) -> Tensor:
    """[S] the reward less a penalty that grows over the last `cache` tokens before the limit.

    0 up to max_tokens - cache, then linear down to -factor at max_tokens and beyond: truncation becomes a slope, not a
    cliff. A cache of None is a fifth of max_tokens, at least 1. DAPO's soft overlong punishment (2503.14476).
    """
    limit = _limit(max_tokens, "soft_overlong")
    cache = max(1, limit // 5) if cache is None else cache
    if not 0 < cache <= limit:
        raise UserError(f"soft_overlong.cache is {cache}; expected 1 to max_tokens ({limit})")
    over = (written_lengths(batch).double() - (limit - cache)) / cache
    return batch.sequence["reward"] - factor * over.clamp(0, 1)


def kimi_length(batch: Batch, step: int, *, weight: float = 1.0, warmup_steps: int = 0) -> Tensor:
    """[S] the reward plus `weight` times a length reward relative to the group, off for the first `warmup_steps` steps.

    lambda_i = 1/2 - (len_i - min_g) / (max_g - min_g); a right answer gets lambda_i, a wrong one min(0, lambda_i), and
    a group of equal lengths 0. Kimi k1.5 (2501.12599).
    """
    correct = is_correct(batch, "shaper kimi_length")
    groups, num = compact_ids(batch.sequence["group_ids"])
    lengths = written_lengths(batch).double()
    shortest, longest = segment_min(lengths, groups, num)[groups], segment_max(lengths, groups, num)[groups]
    relative = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1)
    bonus = torch.where(correct, relative, relative.clamp(max=0))
    bonus = torch.where(longest > shortest, bonus, torch.zeros_like(bonus))
    return batch.sequence["reward"] + weight_after_warmup(step, weight, warmup_steps) * bonus


def cosine(
    batch: Batch,
    step: int,
    *,
    max_tokens: int | None = None,
    correct: tuple[float, float] = (2.0, 1.0),
    wrong: tuple[float, float] = (-10.0, 0.0),
    exceeded: float = -10.0,
    margin: int = 0,
) -> Tensor:
    """[S] a reward from correctness and length alone, in place of the old one.

    x_T + (x_0 - x_T) (1 + cos(pi t / T)) / 2 with T = max_tokens and (x_0, x_T) = `correct` or `wrong`; `exceeded` from
    T - margin tokens on. Short right beats long right, long wrong beats short wrong. Demystifying long chain-of-thought
    (2502.03373), whose code has a margin of 16.
    """
    limit = _limit(max_tokens, "cosine")
    right = is_correct(batch, "shaper cosine")
    lengths = written_lengths(batch)
    fade = (1 + torch.cos(torch.pi * lengths.double() / limit)) / 2
    value = torch.where(right, _between(correct, fade), _between(wrong, fade))
    return torch.where(lengths + margin >= limit, torch.full_like(value, exceeded), value)


def lcpo_exact(batch: Batch, step: int, *, alpha: float = 0.0003) -> Tensor:
    """[S] 1[right] - alpha |budget - length|, in place of the old reward: as long as asked. LCPO, L1 (2503.04697)."""
    correct = is_correct(batch, "shaper lcpo_exact").double()
    return correct - alpha * (_budget(batch, "lcpo_exact") - written_lengths(batch)).abs()


def lcpo_max(batch: Batch, step: int, *, alpha: float = 0.0003, delta: float = 0.5) -> Tensor:
    """[S] 1[right] clip(alpha (budget - length) + delta, 0, 1), in place of the old reward: at most as long as asked.

    LCPO, L1-Max (2503.04697), with the slope of the paper; its code has half of it.
    """
    correct = is_correct(batch, "shaper lcpo_max").double()
    return correct * (alpha * (_budget(batch, "lcpo_max") - written_lengths(batch)) + delta).clamp(0, 1)


def _between(ends: tuple[float, float], fade: Tensor) -> Tensor:
    """The first end where `fade` is 1, the second where it is 0."""
    return ends[1] + (ends[0] - ends[1]) * fade


def _limit(max_tokens: int | None, name: str) -> int:
    if max_tokens is None:
        raise ValueError(f"{name}.max_tokens is null here; the caller fills in rollout.max_tokens")
    return max_tokens


def _budget(batch: Batch, name: str) -> Tensor:
    budget = batch.sequence["budget"]
    missing = int(budget.isnan().sum())
    if missing:
        raise UserError(
            f"shaper {name} needs a token budget for every prompt, but {missing} of {budget.numel()} samples have none: "
            "give each row a budget (LCPO draws it and asks for it in the prompt)"
        )
    return budget
