"""Clip-Cov and KL-Cov: the few tokens whose log-prob and advantage move together most are what makes entropy collapse.

Both work on cov_t = (A_t - mean A)(logp_t - mean logp), the means over all tokens of the view, which is the whole
mini-batch. The entropy mechanism (2505.22617).
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.algorithms.clips.ppo import ppo
from burnish.algorithms.ratios import clamped, log_ratio
from burnish.algorithms.view import View
from burnish.core.noise import uniforms

TIE = 1e-6  # numbers this close, in parts of one, count as equal


def clip_cov(
    view: View,
    ratio: Tensor,
    advantages: Tensor,
    anchor: Tensor,
    share: float = 2e-4,
    low_cov: float = 1.0,
    high_cov: float = 5.0,
    low: float = 1.0,
    high: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] PPO's clip, and 0 at max(1, int(share*M)) tokens drawn from those with low_cov < cov < high_cov.

    Tokens that PPO has clipped are not drawn; drawn ones stay in the denominators. What is drawn depends on the `key`
    of its sequence and its position alone, not on the order of the batch.
    """
    cov = covariances(view, advantages)
    loss, marks = ppo(view, ratio, advantages, anchor, low, high)
    eligible = (cov > low_cov).logical_and_(cov < high_cov).logical_and_(~marks["pg_clipfrac"])
    drawn = _drawn(view, eligible, _count(share, view))
    return loss.masked_fill(drawn, 0), {"pg_clipfrac": drawn, **_marks(cov)}


def kl_cov(
    view: View, ratio: Tensor, advantages: Tensor, anchor: Tensor, share: float = 2e-3, coef: float = 1.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A r, plus coef |l| with gradient at the max(1, int(share*M)) tokens of largest cov.

    Equal covariances are common (every token the policy is certain of has logp 0, samples of a prompt start alike), and
    how they round depends on what they were computed beside; so identity decides between those that are nearly equal.
    """
    cov = covariances(view, advantages)
    num = _count(share, view)
    least = float(cov.topk(num).values.min()) if num else 0.0
    near = TIE * (1 + abs(least))
    above, level = cov > least + near, (cov - least).abs() <= near
    penalised = above.logical_or_(_drawn(view, level, num - int(above.count_nonzero()))).nonzero().squeeze(1)
    drift = log_ratio(view, anchor).index_select(0, penalised)
    return (-advantages * ratio).index_add(0, penalised, coef * clamped(drift).abs()), _marks(cov)


def covariances(view: View, advantages: Tensor) -> Tensor:
    """[M] each token's term of the covariance of advantage and log-prob, without gradient."""
    assert view.logp is not None, "a policy's view has log-probs"
    logp = view.logp.detach()
    return (advantages - advantages.mean()).mul_(logp - logp.mean())


def _marks(cov: Tensor) -> dict[str, Tensor]:
    """The mean covariance, and that of the largest 2e-4 of the tokens, the same at every token."""
    largest = cov.topk(max(1, int(2e-4 * cov.numel()))).values.mean() if cov.numel() else cov.sum()
    return {"cov_mean": cov, "cov_top": largest.expand_as(cov)}


def _count(share: float, view: View) -> int:
    """How many of the view's tokens a share is: at least one, unless there is none."""
    return min(max(int(share * view.num_tokens), 1), view.num_tokens)


def _drawn(view: View, among: Tensor, num: int) -> Tensor:
    """[M] bool, `num` of the tokens `among` [M], or all where there are fewer; what is drawn follows from identity alone."""
    index = among.nonzero().squeeze(1)
    keys = view.sequence["key"][view.ids[index]]
    noise = uniforms(keys, view.column("position")[index])
    taken = index[noise.topk(min(num, index.numel()), largest=False, sorted=False).indices]
    return torch.zeros_like(among).index_fill_(0, taken, True)
