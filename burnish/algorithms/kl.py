"""Slot `kl`: estimates of KL(policy || reference) from the sampled token, and the reward they are taken off.

With d = logp - ref: k1 = d, abs = |d|, k2 = d^2/2, k3 = exp(-d) + d - 1 (Schulman, 2020). On-policy the gradient of
k2 is the gradient of the KL, that of k1 is zero in expectation and that of k3 is biased; `X+` has the value of X and
the gradient of k2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.segments import segment_count, segment_mean


def kl_estimate(logp: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Per-token estimate. k3 clamps its exponent to +-20 and itself to 10, with no gradient where that acts."""
    d = logp - ref
    if estimator.endswith("+"):
        value, slope = kl_estimate(logp, ref, estimator[:-1]), 0.5 * d**2
        return value.detach() + slope - slope.detach()
    if estimator == "k1":
        return d
    if estimator == "abs":
        return d.abs()
    if estimator == "k2":
        return 0.5 * d**2
    if estimator == "k3":
        x = (-d).clamp(-20, 20)
        return (x.exp() - x - 1).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {estimator!r}")


def kl_reward(batch: Batch, rewards: Tensor, estimator: str, coef: float) -> tuple[Tensor, float]:
    """[N] rewards minus coef * KL(old || ref) at the tokens the model wrote, and the mean over sequences of that KL."""
    mask, ids = batch.action_mask, batch.sequence_ids
    kl = kl_estimate(batch.token["old_logp"], batch.token["ref_logp"], estimator).to(rewards.dtype)
    kl = torch.where(mask, kl, torch.zeros_like(kl))
    written = segment_count(ids, batch.num_sequences, mask) > 0
    mean = segment_mean(kl, ids, batch.num_sequences, mask)[written].mean()
    return rewards - coef * kl, float(mean)
