"""The critic's loss and how well its values explain the returns (PPO, 1707.06347; the clip is that of its code)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from burnish.algorithms.view import View


def value_loss(value: Tensor, returns: Tensor, old: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """[M] .5 max((v - ret)^2, (clip(v, v_old - c, v_old + c) - ret)^2), and where the second is the larger.

    A value that has left the range around the one before the batch's first update gets no gradient further out, unless
    it comes nearer to the return by going back. Without a `clip` it is half the squared error.
    """
    plain = (value - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (torch.clamp(value, old - clip, old + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor) -> float:
    """1 - Var(ret - v) / Var(ret) over the tokens of the mask; nan where all returns are the same.

    1 is a perfect critic, 0 one no better than a constant (VC-PPO, 2503.01491, watches it during value pre-training).
    """
    returns, values = returns[mask].double(), values[mask].double()
    if returns.numel() == 0 or bool((returns == returns[0]).all()):
        return math.nan
    return float(1 - (returns - values).var(correction=0) / returns.var(correction=0))


@dataclass(frozen=True)
class ValueLoss:
    """Regression of a critic's values on returns.

    Columns it reads, [M] each: `weight`, `returns`, and `values` (from before the batch's first update) if it clips.
    """

    clip: float | None = 0.5
    """How far a value may move from the old one before its gradient stops; None is no limit."""

    needs: ClassVar[frozenset[str]] = frozenset({"value"})
    scope: ClassVar[str] = "token"

    def __call__(self, view: View) -> tuple[Tensor, dict[str, Tensor]]:
        value = view.value
        assert value is not None, "the learner gives what `needs` names"
        old = value if self.clip is None else view.column("values")
        per_token, outside = value_loss(value, view.column("returns"), old, self.clip)
        sums = {"vf_clipfrac": outside.to(value.dtype).sum(), "value_mean": value.detach().sum()}
        return (view.column("weight") * per_token).sum(), sums
