"""Slots `aggregation`, `kl`, `entropy` and `auxiliary`: how per-token losses are averaged, and the terms added to the policy loss."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import per_sequence, sampled_token_mask, trajectory_offsets
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.segments import (
    compact_ids,
    contiguous_count,
    ids_from_offsets,
    kth_smallest,
    segment_broadcast,
    segment_count,
    segment_mean,
)

# --- Aggregation
#
# The weights are fixed on the whole mini-batch and hold every denominator. The loss is then a plain weighted sum, and its
# gradient is the same for any split of the mini-batch into micro-batches or ranks.


def aggregation_weights(batch: Batch, mode: str, horizon: int | None = None) -> Tensor:
    """[N] float64 weights such that the loss is sum(weights * loss per token); 0 outside the loss mask."""
    each = sequence_aggregation_weights(batch, mode, horizon)
    return torch.repeat_interleave(each, batch.lengths).masked_fill_(~batch.loss_mask, 0)


def sequence_aggregation_weights(batch: Batch, mode: str, horizon: int | None = None) -> Tensor:
    """[S] float64 weight of every token in the loss of each sequence.

    - token-mean: 1 / all tokens
    - token-sum: 1
    - seq-mean-token-sum: 1 / trajectories
    - seq-mean-token-mean: 1 / (trajectories x the trajectory's tokens)
    - seq-mean-token-sum-norm: 1 / (trajectories x horizon), with a constant horizon (Dr.GRPO)
    - prompt-mean: 1 / (groups x the tokens of all the group's trajectories) (SkyRL)

    Only tokens in the loss count, and trajectories and groups with at least one of them. The sequences of a trajectory count as one.
    The batch holds whole groups (`trainers/minibatches.py` never splits one), which prompt-mean needs.
    """
    if mode == "prompt-mean":
        return _group_weights(batch)
    counts = contiguous_count(batch.loss_mask, trajectory_offsets(batch))  # [T]
    return per_sequence(batch, _trajectory_weights(counts, mode, horizon))


def _group_weights(batch: Batch) -> Tensor:
    """[S] float64 weight of every token in the loss: 1 / (groups with a token x tokens of the sequence's group)."""
    groups, num = compact_ids(batch.sequence["group_ids"])
    counts = segment_count(groups[batch.sequence_ids], num, batch.loss_mask)  # [G]
    num_groups = max(int((counts > 0).sum()), 1)
    return (1 / (num_groups * counts.clamp(min=1).double())).index_select(0, groups)


def _trajectory_weights(counts: Tensor, mode: str, horizon: int | None) -> Tensor:
    """[T] float64 weight of every token in the loss of each trajectory, which has `counts` of them."""
    tokens, sequences = max(int(counts.sum()), 1), max(int((counts > 0).sum()), 1)
    ones = torch.ones(counts.shape, dtype=torch.float64, device=counts.device)
    if mode == "seq-mean-token-mean":
        return ones / sequences / counts.clamp(min=1)
    if mode == "token-mean":
        return ones / tokens
    if mode == "token-sum":
        return ones
    if mode == "seq-mean-token-sum":
        return ones / sequences
    if mode == "seq-mean-token-sum-norm":
        if horizon is None:
            raise ValueError("seq-mean-token-sum-norm divides by a constant horizon, and none was given")
        return ones / sequences / horizon
    raise ValueError(f"unknown aggregation {mode!r}")


# --- KL to the reference


def kl_estimate(logp: Tensor, ref: Tensor, estimator: str) -> Tensor:
    """Estimate of KL(policy || reference) per token, with d = logp - ref (Schulman, 2020).

    k1 = d, abs = |d|, k2 = d^2/2, k3 = exp(-d) + d - 1; `X+` has the value of X and the gradient of k2. On-policy the gradient
    of k2 is the gradient of the KL, that of k1 is zero in expectation and that of k3 is biased. k3 clamps its exponent to +-20
    and its value to 10, without gradient where a clamp acts.
    """
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
    """[..., V] to [...]: exact KL sum_v p_v (log p_v - log q_v) with gradient, in float32 at least."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    log_p, log_q = logits.to(dtype).log_softmax(-1), ref_logits.to(dtype).log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


# --- KL in the reward


def kl_reward(
    batch: Batch,
    rewards: Tensor,
    estimator: str,
    coef: float,
    center: str = "none",
    policy: str = "old",
    clamp: float | None = None,
) -> tuple[Tensor, float]:
    """[N] rewards minus coef * KL(old || ref) at action tokens, and the mean over trajectories of their mean KL per token.

    `center` subtracts a mean from the KL first, which leaves the relative signal. `token` subtracts the mean over all action
    tokens, so that longer answers do not pay more (T1, 2501.11651). `sequence` subtracts the mean over trajectories of their
    summed KL from each sum, in equal shares over its tokens.

    `policy` says whose log-probs are compared: those of the trainer (`old`) or those that the engine sampled with (`rollout`).
    `clamp` bounds each token's KL before all of this.

    The subtracted means and the returned KL cover only the policy's own samples: the estimate is not valid for demonstrations.
    The returned KL is not centred. It is nan if the batch has only demonstrations.
    """
    offsets = trajectory_offsets(batch)
    mask, ids, num = batch.action_mask, ids_from_offsets(offsets), offsets.numel() - 1
    logp = batch.token["behaviour_logp" if policy == "rollout" else "old_logp"]
    kl = _clamped(kl_estimate(logp, batch.token["ref_logp"], estimator).to(rewards.dtype), clamp)
    kl = torch.where(mask, kl, torch.zeros_like(kl))
    length = segment_count(ids, num, mask)
    sampled = mask & sampled_token_mask(batch)
    own = segment_count(ids, num, sampled)
    mean = segment_mean(kl, ids, num, mask)[own > 0].mean()
    centre = _kl_center(torch.where(sampled, kl, 0.0).sum(), own, length, ids, center)
    return rewards - coef * torch.where(mask, kl - centre, torch.zeros_like(kl)), float(mean)


def kl_advantages(batch: Batch, advantages: Tensor, coef: float, clamp: float | None = None) -> Tensor:
    """[N] A_it - coef (old - ref) at action tokens, for advantages per sequence or per token (multi-teacher distillation of slime)."""
    spread = advantages if advantages.shape == (batch.num_tokens,) else advantages[batch.sequence_ids]
    kl = _clamped((batch.token["old_logp"] - batch.token["ref_logp"]).to(spread.dtype), clamp)
    return torch.where(batch.action_mask, spread - coef * kl, torch.zeros_like(spread))


def _clamped(kl: Tensor, clamp: float | None) -> Tensor:
    return kl if clamp is None else kl.clamp(-clamp, clamp)


def _kl_center(total: Tensor, own: Tensor, length: Tensor, ids: Tensor, center: str) -> Tensor:
    """The number, or [N] numbers, subtracted from each token's KL.

    `total` is the summed KL of the policy's own samples, `own` [T] their tokens, `length` [T] the tokens of all trajectories.
    """
    if center == "none":
        return total.new_zeros(())
    if center == "token":
        return total / own.sum().clamp(min=1)
    if center == "sequence":
        mean = total / (own > 0).sum().clamp(min=1)
        return segment_broadcast(mean / length.clamp(min=1), ids)
    raise ValueError(f"center is {center!r}; expected none, token or sequence")


def adapt_kl_coefficient(coef: float, kl: float, target: float, horizon: float, count: int) -> float:
    """coef (1 + e count / horizon), e = clip(kl / target - 1, -0.2, 0.2), at least 0. Ziegler et al. (1909.08593).

    The coefficient after a batch of `count` sequences with mean KL `kl`: larger above the target, smaller below.
    """
    if target <= 0 or horizon <= 0:
        raise ValueError(f"an adaptive KL coefficient needs target > 0 and horizon > 0, not {target} and {horizon}")
    error = min(max(kl / target - 1, -0.2), 0.2)
    return max(0.0, coef * (1 + error * count / horizon))


# --- The reference


@torch.no_grad()
def ema_update(reference_tensors: Iterable[Tensor], tensors: Iterable[Tensor], eta: float) -> None:
    """reference <- (1 - eta) reference + eta tensor, in place; eta 1 is exactly a copy, eta 0 exactly no change.

    The reference must be float32 at least: in half precision most of an addition with eta = 0.01 is lost to rounding.
    """
    for reference, tensor in zip(reference_tensors, tensors, strict=True):
        if torch.finfo(reference.dtype).bits < 32:
            raise ValueError(f"a moving average in {reference.dtype} loses what is added to it; keep it in float32")
        reference.lerp_(tensor.to(reference), eta)


# --- Imitation of right answers


def positive_nll_weights(batch: Batch, mu: float) -> Tensor:
    """[N] float64 weights w such that sum(w * -logp) is mu times the mean NLL of the tokens of right answers. VAPO (2504.05118).

    w = mu / (tokens in the loss of all sequences with accuracy 1); zeros if there are none. Shaping does not change accuracy.
    """
    accuracy = batch.sequence["accuracy"]
    if bool(accuracy.isnan().any()):
        raise UserError(
            f"auxiliary.positive_nll imitates right answers, but {int(accuracy.isnan().sum())} of "
            f"{accuracy.numel()} samples have no accuracy: use a reward that says right or wrong, or set correct_at of its part to the value from which an answer is right"
        )
    tokens = (batch.loss_mask & segment_broadcast(accuracy == 1, batch.sequence_ids)).to(torch.float64)
    return mu * tokens / tokens.sum().clamp(min=1)


def chord_weight(step: int, peak: float, valley: float, warmup: int, decay: int) -> float:
    """mu of CHORD at a step, counted from 0: a linear rise to `peak`, then a cosine to `valley` (Trinity-RFT)."""
    if step < warmup:
        return step / warmup * peak
    if step >= warmup + decay:
        return valley
    return valley + (peak - valley) * (1 + math.cos(math.pi * (step - warmup) / decay)) / 2


# --- Entropy


def adapt_entropy_coefficient(coef: float, entropy: float, target: float, delta: float) -> tuple[float, bool]:
    """coef + delta if entropy <= target, else max(0, coef - delta); and whether the bonus applies. Skywork-OR1 (2505.22312).

    The bonus applies only at or below the target.
    """
    low = entropy <= target
    return (coef + delta if low else max(0.0, coef - delta)), low


def top_entropy_mask(entropy: Tensor, share: float) -> Tensor:
    """[M] bool: the tokens whose entropy is in the top `share`. High-entropy minority tokens (2506.01939).

    The threshold is the (1 - share) quantile, so about share * M tokens are at or above it, at least one. All tokens that tie
    with the threshold are kept, also if rounding separates them: samples of a prompt begin with the same entropy, and the
    choice among them must not depend on the rest of the batch.
    """
    num = entropy.numel()
    if num == 0:
        return torch.zeros_like(entropy, dtype=torch.bool)
    # The smallest value at or above the interpolated quantile. 1e-9 absorbs products such as 0.3 * 10 = 3.0000000000000004.
    rank = math.ceil((1 - share) * (num - 1) - 1e-9)
    threshold = kth_smallest(entropy, rank)
    return entropy >= threshold - 1e-6 * (1 + threshold.abs())
