"""Slot `loss`: the losses of the distillation family. The teacher is the reference, and its log-probs are `ref_logp`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.algorithms.batch_columns import TAUGHT
from burnish.algorithms.losses.loss_view import LossView, TokenLoss
from burnish.algorithms.losses.ratios_and_clips import log_ratio, token_ratio


def divergence(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    *,
    alpha: float,
    support: Literal["full", "student", "teacher", "sampled"],
    top: int | None,
    rest: Literal["renormalise", "tail", "raw"],
    cap: float | None,
    weight: float,
    clip: float,
) -> TokenLoss:
    """[M] D_t min(sg(r_t), cap): divergence between policy and teacher. GKD (2306.13649), SDPO (2601.20802), SDFT (2601.19897).

    The learner computes D over the vocabulary with `alpha`, `top` and `rest` (`models/kernels/divergence.py`). With support sampled it
    is sg(logp - teacher) logp, whose gradient is that of KL(policy || teacher) in expectation. Rows that are not `taught` have loss 0.
    With `weight` below 1 the loss is (1 - weight) PPO + weight D.
    """
    logp = view.policy_logp
    if support == "sampled":
        gap = (logp - view.column("ref_logp")).detach()
        per_token = gap * logp
    else:
        assert view.kl is not None, "the learner gives what the loss needs"
        per_token = view.kl
        gap = per_token.detach()
    if cap is not None:
        per_token = per_token * token_ratio(view, anchor).detach().clamp(max=cap)
    if view.has(TAUGHT):
        is_taught = view.column(TAUGHT)
        per_token, gap = (torch.where(is_taught, x, torch.zeros_like(x)) for x in (per_token, gap))
    if weight < 1:
        ratio = token_ratio(view, anchor)
        policy = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip, 1 + clip))
        per_token = (1 - weight) * policy + weight * per_token
    return per_token, {"divergence": gap}


def gold(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    *,
    alpha: float,
    merge: Literal["observed", "bayesian"],
    compare: Literal["hybrid", "sorted"],
    matched_weight: float | None,
    unmatched_weight: float | None,
) -> TokenLoss:
    """[M] the loss of each group of tokens that spell the same in both tokenizers, at the group's last token. GOLD (TRL).

    The learner computes it with these options (`models/kernels/aligned_groups.py`). The weights count groups in place of tokens.
    """
    assert view.kl is not None, "the learner gives what the loss needs"
    return view.kl, {}


def teacher_surrogate(
    view: LossView, anchor: Tensor, advantages: Tensor, *, fall: float | None, anchor_coef: float
) -> TokenLoss:
    """[M] -keep A exp(l) + coef l^2 with A = sg(teacher - logp), l = logp - rollout (`author_logp`). OPSD (prime-rl).

    The advantage is that of the current policy, so it goes to 0 as the policy reaches its teacher. `keep` leaves out tokens whose
    probability fell by more than `fall` since they were sampled; the square stays on them.
    """
    logp, rollout = view.policy_logp, view.column("author_logp")
    judged = (view.column("ref_logp") - logp).detach()
    policy = -judged * token_ratio(view, rollout)
    is_kept = torch.ones_like(logp, dtype=torch.bool)
    if fall is not None:
        is_kept = logp.detach().exp() - rollout.exp() >= -fall
        policy = torch.where(is_kept, policy, torch.zeros_like(policy))
    metrics = {"divergence": -judged, "kept_tokens": is_kept}
    return policy + anchor_coef * log_ratio(view, rollout) ** 2, metrics
