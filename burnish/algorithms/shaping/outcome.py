"""Shapers that look at how an answer ended and whether it was right: `[S] float64`, the new reward."""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.filters.columns import is_correct, is_cut_short
from burnish.algorithms.shaping.ngrams import repeat_share
from burnish.config.errors import UserError
from burnish.core.batch import Batch


def signed(batch: Batch, step: int, *, right: float = 1.0, wrong: float = -1.0) -> Tensor:
    """[S] `right` or `wrong` by the accuracy, in place of the old reward (DAPO, 2503.14476, has 1 and -1)."""
    correct = is_correct(batch, "shaper signed").double()
    return right * correct + wrong * (1 - correct)


def stop_properly(batch: Batch, step: int, *, coef: float = 0.5) -> Tensor:
    """[S] the reward; of a truncated sample reward * coef, or coef itself where that is negative (ProRL, 2505.24864)."""
    reward = batch.sequence["reward"]
    cut = reward * coef if coef >= 0 else torch.full_like(reward, coef)
    return torch.where(is_cut_short(batch), cut, reward)


def t1_penalty(
    batch: Batch,
    step: int,
    *,
    ngram: int = 20,
    share: float = 0.2,
    script_part: str | None = None,
    script_low: float = 0.8,
) -> Tensor:
    """[S] -1 where the answer was truncated, repeats itself or mixes scripts; else the reward as it was.

    It repeats itself when more than `share` of its n-grams were there before, and mixes scripts when the reward part
    `script_part` (the verifier language, say) is below `script_low`. T1 (2501.11651).
    """
    reward = batch.sequence["reward"]
    unexpected = is_cut_short(batch) | (repeat_share(batch, ngram) > share)
    if script_part is not None:
        unexpected = unexpected | (_part(batch, script_part) < script_low)
    return torch.where(unexpected, torch.full_like(reward, -1.0), reward)


def _part(batch: Batch, name: str) -> Tensor:
    column = f"part/{name}"
    if column not in batch.sequence:
        parts = sorted(k.removeprefix("part/") for k in batch.sequence if k.startswith("part/"))
        raise UserError(f"t1_penalty.script_part is {name!r}, but the reward parts are: {', '.join(parts) or 'none'}")
    return batch.sequence[column]
