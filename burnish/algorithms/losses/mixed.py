"""Slot `loss`: samples of the policy and demonstrations of a stronger one in the same group."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.algorithms.losses.sequences import logp_of
from burnish.algorithms.ratios import token as token_ratio
from burnish.algorithms.view import View

EPS = 1e-6
"""Added to a teacher's probability before dividing by it."""


def mixed_offpolicy(
    view: View, anchor: Tensor, advantages: Tensor, gamma: float = 0.1, teacher: bool = False
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A r on the policy's own tokens, -A f(p) on demonstrated ones; nothing is clipped but the logarithm of r.

    f(p) = p / (p + gamma), p the policy's probability of the token: its gradient is largest near p = gamma, so that
    unlikely tokens of a demonstration are learned rather than lost. With `teacher` the probabilities q of the one who
    demonstrated are known, and f is the ratio p / (q + 1e-6). Reads the sequence column `demonstration` (bool) and, with
    `teacher`, the token column `teacher_logp`. LUFFY (2504.14945).
    """
    logp, demonstrated = logp_of(view), view.column("demonstration")
    if teacher:
        # The policy's own tokens may hold anything there, and NaN would leak into the gradient through the exponential.
        known = torch.where(demonstrated, view.column("teacher_logp"), torch.zeros_like(logp))
        shaped = logp.exp() / (known.exp() + EPS)
    else:
        shaped = (logp - math.log(gamma)).sigmoid()
    return -advantages * torch.where(demonstrated, shaped, token_ratio(view, anchor)), {}
