"""Slot `loss`: the function of each choice.

A loss takes a view, the anchor's log-probs [M], advantages [M] and the options of its record. It returns the loss of each
token [M] and token metrics. A loss that is one number per sequence has that number at each of the sequence's tokens.
z_i = sum_t (logp - anchor) is the log-ratio of a sequence: a sum, not a mean, with gradient and not clamped.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from burnish.algorithms.losses.distillation_losses import divergence, gold, teacher_surrogate
from burnish.algorithms.losses.loss_view import LossView, TokenLoss
from burnish.algorithms.losses.preference_losses import PREFERENCE_LOSSES
from burnish.algorithms.losses.ratios_and_clips import log_ratio, token_ratio
from burnish.config.errors import UserError
from burnish.core.segments import compact_ids, segment_count, segment_max, segment_min, segment_sum

DEVIATION_EPS = 1e-6
"""Added to a group's deviation before dividing by it."""
AUTHOR_EPS = 1e-6
"""Added to an author's probability before dividing by it."""
MAX_LOGGED_LOG_RATIO = 50.0
"""z grows with length, so it is clipped to +- this in metrics, and only there."""


def logprob(view: LossView, anchor: Tensor, advantages: Tensor) -> TokenLoss:
    """[M] -A logp: plain policy gradient. Williams (1992)."""
    return -advantages * view.policy_logp, {}


def nll(view: LossView, anchor: Tensor, advantages: Tensor) -> TokenLoss:
    """[M] -logp: negative log-likelihood of every token in the loss, whatever its reward."""
    loss = -view.policy_logp
    return loss, {"nll": loss.detach()}


def omd_sq(view: LossView, anchor: Tensor, advantages: Tensor, *, tau: float) -> TokenLoss:
    """[M] -A z + tau/2 z^2, one number per sequence: online mirror descent. Kimi k1.5 (2501.12599).

    It is (A - tau z)^2 / (2 tau) without its constant, with the minimum tau z = A whichever policy sampled. A is the reward
    minus its group's mean (advantage grpo with std none), or minus tau log mean exp(r / tau) (softmean with beta 1 / tau).
    """
    z = sequence_log_ratio(view, anchor)
    return view.spread(-view.mean(advantages) * z + 0.5 * tau * z**2), _log_ratio_metric(view, z)


def sppo_sq(view: LossView, anchor: Tensor, advantages: Tensor, *, eta: float) -> TokenLoss:
    """[M] (z - eta A)^2, one number per sequence: self-play preference optimisation. SPPO (2405.00675).

    A is P_i - 1/2, with P_i the probability of beating the other samples (advantage win_rate), or a reward minus its soft
    mean (softmean). The minimum does not depend on which policy sampled.
    """
    z = sequence_log_ratio(view, anchor)
    return view.spread((z - eta * view.mean(advantages)) ** 2), _log_ratio_metric(view, z)


def astar_sq(view: LossView, anchor: Tensor, advantages: Tensor, *, beta: float) -> TokenLoss:
    """[M] (beta z - A)^2, one number per sequence. A*-PO (2505.20686).

    A is the reward minus the optimal value of the prompt (advantage offline_value), the anchor is the reference. At the optimum the
    log-ratio of every answer is A / beta. It is `sppo_sq` with eta = 1 / beta, times beta^2.
    """
    z = sequence_log_ratio(view, anchor)
    return view.spread((beta * z - view.mean(advantages)) ** 2), _log_ratio_metric(view, z)


def dro(view: LossView, anchor: Tensor, advantages: Tensor, *, beta: float) -> TokenLoss:
    """[M] -A logp + beta/2 l^2 with l = logp - anchor, not clamped. Offline regularised RL (2405.19107), token by token."""
    return -advantages * view.policy_logp + 0.5 * beta * log_ratio(view, anchor) ** 2, {}


def opmd_loss(view: LossView, anchor: Tensor, advantages: Tensor, *, tau: float) -> TokenLoss:
    """[M] -A logp / (1 + tau): online policy mirror descent in its simple form, as in Trinity-RFT."""
    return -advantages * view.policy_logp / (1 + tau), {}


def rec(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    *,
    keep: Literal["all", "one_side", "two_side", "ring"],
    low: float,
    high: float,
    outer_low: float,
    outer_high: float,
    weight: Literal["none", "ratio", "advantage"],
    temperature: float,
    square: float,
    imitation: float,
) -> TokenLoss:
    """[M] -A w logp at kept tokens, + square l^2 - imitation logp at all. REINFORCE with clipping (2509.24203), as in Trinity-RFT.

    r = exp(l) with l = logp - anchor, without gradient. w is 1, r or exp(A / temperature). Tokens are kept by their ratio:

    - one_side: r <= 1 + high if A >= 0, or r >= 1 - low if A <= 0, so a token at A = 0 is kept. With w = r it has PPO's gradient.
    - two_side: 1 - low <= r <= 1 + high.
    - ring: two_side, or r <= 1 - outer_low if A >= 0, or r >= 1 + outer_high if A <= 0.
    """
    logp, log_ratios = view.policy_logp, log_ratio(view, anchor)
    r = token_ratio(view, anchor).detach()
    is_inside = (r >= 1 - low) & (r <= 1 + high)
    kept = {
        "all": torch.ones_like(is_inside),
        "one_side": ((advantages >= 0) & (r <= 1 + high)) | ((advantages <= 0) & (r >= 1 - low)),
        "two_side": is_inside,
        "ring": is_inside | ((advantages >= 0) & (r <= 1 - outer_low)) | ((advantages <= 0) & (r >= 1 + outer_high)),
    }[keep]
    weights = {"none": torch.ones_like(r), "ratio": r, "advantage": (advantages / temperature).exp()}[weight]
    loss = (-advantages * weights * logp).masked_fill(~kept, 0)
    if square > 0:
        loss = loss + square * log_ratios**2
    if imitation > 0:
        loss = loss - imitation * logp
    return loss, {"pg_clipfrac": ~kept}


def bce(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    *,
    beta: float,
    normalise: str,
    class_weights: bool,
    per_token: bool,
) -> TokenLoss:
    """[M] w_i BCE(sigmoid(s_i), accuracy_i), one number per sequence: classification of right and wrong. PACS (2509.02522).

    psi_i = beta z_i, or beta mean_t logp with `per_token`. s_i is psi_i - mean_{j != i} psi_j (`normalise` rloo),
    (psi_i - mean_g) / std_g (grpo) or psi_i (naive). The gradient goes through all samples of the group. Reads `accuracy`
    (0 or 1) and `group_ids`.
    """
    alive = view.lengths > 0
    psi = beta * (view.mean(view.policy_logp) if per_token else sequence_log_ratio(view, anchor))
    labels = _accuracy_labels(view, alive)
    groups, num = compact_ids(view.sequence["group_ids"])
    scores = relative_scores(psi, groups, num, alive, normalise)
    weights = balanced_weights(labels, groups, num, alive) if class_weights else torch.ones_like(labels)
    loss = binary_cross_entropy_with_logits(scores, labels, weights, reduction="none")
    right = ((scores > 0) == (labels > 0)).to(loss.dtype)
    return view.spread(loss), {"bce_accuracy": view.sequence_mean_metric(right)}


def mixed_offpolicy(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    *,
    weight: Literal["shaped", "author", "mixture"],
    gamma: float,
    focus: float,
    clip: float | None,
) -> TokenLoss:
    """[M] -A r on the policy's own tokens and -A w on demonstrated ones, r and w with gradient. LUFFY (2504.14945).

    With p and q the probabilities of a demonstrated token under the policy and its author, `weight` defines w:

    - shaped: p / (p + gamma). Its gradient is largest near p = gamma, so unlikely tokens are learnt too.
    - author: p / (q + 1e-6), with q from the column `author_logp`.
    - mixture: 2 p / (p_old + q), as if the token came from either policy, with (p_old + 1) / 2 for the unknown q. RL-PLUS
      (2508.00222), which also has `focus`: A (1 - sg(p))^focus reduces tokens that are likely already.

    `clip` bounds the ratio of the policy's own tokens as PPO does. Reads the bool sequence column `demonstration`; a batch
    without demonstrations need not have it. The log-ratio of r is clamped.
    """
    logp, ratio = view.policy_logp, token_ratio(view, anchor)
    own_loss = -advantages * ratio
    if clip is not None:
        own_loss = torch.maximum(own_loss, -advantages * ratio.clamp(1 - clip, 1 + clip))
    if not view.has("demonstration"):
        return own_loss, {"demonstrated": torch.zeros_like(logp, dtype=torch.bool)}
    is_demonstrated = view.column("demonstration")
    if weight == "shaped":
        weights = (logp - math.log(gamma)).sigmoid()
    elif weight == "author":
        # The column may be NaN at the policy's own tokens, which would leak into the gradient through the exponential.
        author_logp = torch.where(is_demonstrated, view.column("author_logp"), torch.zeros_like(logp))
        weights = logp.exp() / (author_logp.exp() + AUTHOR_EPS)
    else:
        old = torch.where(is_demonstrated, anchor, torch.zeros_like(anchor)).exp()
        weights = 2 * logp.exp() / (old + (old + 1) / 2)
    focused = advantages * (1 - logp.detach().exp()).clamp(min=0) ** focus if focus > 0 else advantages
    return torch.where(is_demonstrated, -focused * weights, own_loss), {"demonstrated": is_demonstrated}


LOSSES: dict[str, Callable[..., TokenLoss] | None] = {
    "surrogate": None,  # these two are made of ratio and clip by `PolicyLoss`
    "sg_logprob": None,
    "logprob": logprob,
    "omd_sq": omd_sq,
    "sppo_sq": sppo_sq,
    "dro": dro,
    "bce": bce,
    "mixed_offpolicy": mixed_offpolicy,
    "nll": nll,
    "divergence": divergence,
    "teacher_surrogate": teacher_surrogate,
    "gold": gold,
    "rec": rec,
    "opmd": opmd_loss,
    "astar_sq": astar_sq,
    **PREFERENCE_LOSSES,
}
"""The function of each choice of `algorithm.loss`."""


def sequence_log_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[S] z_i = sum_t (logp - anchor), with gradient; 0 for a sequence without tokens."""
    return view.sum(log_ratio(view, anchor))


def relative_scores(psi: Tensor, groups: Tensor, num: int, alive: Tensor, normalise: str) -> Tensor:
    """[S] each score relative to the others of its group that are `alive`, with gradient through all of them.

    A group of one keeps its raw score. A group of equal scores is centred but not divided: every group is like that in the
    first update on a batch, and a deviation of 0 would make the gradient a million times larger.
    """
    if normalise == "naive":
        return psi
    size = segment_count(groups, num, alive)[groups]
    total = segment_sum(torch.where(alive, psi, torch.zeros_like(psi)), groups, num)[groups]
    if normalise == "rloo":
        return psi - (total - psi) / (size - 1).clamp(min=1)
    if normalise != "grpo":
        raise ValueError(f"normalise is {normalise!r}; expected rloo, grpo or naive")
    centred = torch.where(size > 1, psi - total / size.clamp(min=1), psi)
    squares = torch.where(alive, centred**2, torch.zeros_like(psi))
    variance = segment_sum(squares, groups, num)[groups] / (size - 1).clamp(min=1)
    infinite = torch.full_like(psi, torch.inf)
    highest = segment_max(torch.where(alive, psi, -infinite), groups, num)
    lowest = segment_min(torch.where(alive, psi, infinite), groups, num)
    varied = (highest > lowest)[groups]
    one = torch.ones_like(psi)
    return centred / torch.where(varied, torch.where(varied, variance, one).sqrt() + DEVIATION_EPS, one)


def balanced_weights(labels: Tensor, groups: Tensor, num: int, alive: Tensor) -> Tensor:
    """[S] G / (2 n_c) for a sample of class c in a group of G with both classes, 1 in a group with one class."""
    size = segment_count(groups, num, alive)
    positive = segment_count(groups, num, alive & (labels > 0))
    mixed = ((positive > 0) & (positive < size))[groups]
    same = torch.where(labels > 0, positive[groups], (size - positive)[groups]).clamp(min=1)
    return torch.where(mixed, size[groups] / (2 * same), torch.ones_like(labels)).to(labels.dtype)


def _log_ratio_metric(view: LossView, z: Tensor) -> dict[str, Tensor]:
    return {"seq_log_ratio": view.spread(z.detach().clamp(-MAX_LOGGED_LOG_RATIO, MAX_LOGGED_LOG_RATIO))}


def _accuracy_labels(view: LossView, alive: Tensor) -> Tensor:
    """[S] accuracy 0 or 1; raises for any other value of a sequence in the loss."""
    accuracy = view.sequence["accuracy"]
    usable = (accuracy == 0) | (accuracy == 1) | ~alive
    if not bool(usable.all()):
        odd = accuracy[~usable]
        raise UserError(
            f"loss bce needs accuracy 0 or 1 for every sequence, but {odd.numel()} of {accuracy.numel()} have another value "
            f"(the first is {float(odd[0])}; nan means that no reward judged it): "
            "use a reward that says right or wrong, or set correct_at of its part to the value from which an answer is right"
        )
    return torch.where(alive, accuracy, torch.zeros_like(accuracy))
