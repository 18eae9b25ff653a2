"""Slot `kl`: estimates of KL(policy || reference), the reward they are taken off, and what moves coefficient and reference.

With d = logp - ref of the sampled token: k1 = d, abs = |d|, k2 = d^2/2, k3 = exp(-d) + d - 1 (Schulman, 2020). On-policy
the gradient of k2 is the gradient of the KL, that of k1 is zero in expectation and that of k3 is biased; `X+` has the
value of X and the gradient of k2.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from burnish.algorithms.demonstrations import sampled_tokens
from burnish.core.batch import Batch
from burnish.core.segments import broadcast, segment_count, segment_mean


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


def full_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """[..., V] to [...]: sum_v p_v (log p_v - log q_v), exact, with gradient; arithmetic in float32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = logits.to(dtype).log_softmax(-1), ref_logits.to(dtype).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


# --- in the reward -----------------------------------------------------------------------------------------------------


def kl_reward(batch: Batch, rewards: Tensor, estimator: str, coef: float, center: str = "none") -> tuple[Tensor, float]:
    """[N] rewards minus coef * KL(old || ref) at the tokens the model wrote, and the mean over sequences of that KL.

    `center` takes its mean off first, which leaves the relative signal: `token` the mean over all written tokens from
    each (T1, 2501.11651: then longer answers do not pay more); `sequence` the mean over sequences of their summed KL from
    each sum, in equal shares over its tokens. These means and the KL returned, which is never centred, are of the policy's
    own samples alone: at the tokens of a demonstration the estimate is of nothing. nan where there is no sample.
    """
    mask, ids, num = batch.action_mask, batch.sequence_ids, batch.num_sequences
    kl = kl_estimate(batch.token["old_logp"], batch.token["ref_logp"], estimator).to(rewards.dtype)
    kl = torch.where(mask, kl, torch.zeros_like(kl))
    length = segment_count(ids, num, mask)
    sampled = mask & sampled_tokens(batch)
    own = segment_count(ids, num, sampled)
    mean = segment_mean(kl, ids, num, mask)[own > 0].mean()
    centre = _centre(torch.where(sampled, kl, 0.0).sum(), own, length, ids, center)
    return rewards - coef * torch.where(mask, kl - centre, torch.zeros_like(kl)), float(mean)


def _centre(total: Tensor, own: Tensor, length: Tensor, ids: Tensor, center: str) -> Tensor:
    """What is taken off each token's KL; `total` is that of the policy's own samples, `own` [S] their tokens, `length` [S] those of
    demonstrations too."""
    if center == "none":
        return total.new_zeros(())
    if center == "token":
        return total / own.sum().clamp(min=1)
    if center == "sequence":
        mean = total / (own > 0).sum().clamp(min=1)
        return broadcast(mean / length.clamp(min=1), ids)
    raise ValueError(f"center is {center!r}; expected none, token or sequence")


def adapt_coefficient(coef: float, kl: float, target: float, horizon: float, count: int) -> float:
    """The coefficient after a batch of `count` sequences whose mean KL was `kl`: larger above the target, smaller below.

    coef (1 + e count / horizon), e = clip(kl / target - 1, -0.2, 0.2), and never below 0. Ziegler et al. (1909.08593).
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"an adaptive KL coefficient needs target > 0 and horizon > 0, not {target} and {horizon}")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return max(0.0, coef * (1 + error * count / horizon))


# --- the reference -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def ema_update(reference_tensors: Iterable[Tensor], tensors: Iterable[Tensor], eta: float) -> None:
    """reference <- (1 - eta) reference + eta tensor, in place; eta 1 is a copy and eta 0 leaves it, both exactly.

    The reference must be float32 at least: in a half type most of what eta = 0.01 adds is rounded away.
    """
    for reference, tensor in zip(reference_tensors, tensors, strict=True):
        if torch.finfo(reference.dtype).bits < 32:
            raise ValueError(f"a moving average in {reference.dtype} loses what is added to it; keep it in float32")
        reference.lerp_(tensor.to(reference), eta)
