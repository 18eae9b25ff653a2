"""What losses of whole sequences share: the log-ratio of a sequence, and metrics that are means over sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.policy.ratios_and_clips import log_ratio, token_ratio
from burnish.config.errors import UserError
from burnish.core.segments import compact_ids, segment_count, segment_max, segment_min, segment_sum


def policy_logp(view: LossView) -> Tensor:
    """[M] the policy's log-probs, which every loss here has."""
    assert view.logp is not None, "a policy's view has log-probs"
    return view.logp


def sequence_log_ratio(view: LossView, anchor: Tensor) -> Tensor:
    """[S] z_i = sum_t (logp - anchor), with gradient: a sum, not a mean; 0 for a sequence that has no token."""
    return view.sum(log_ratio(view, anchor))


def sequence_mean_metric(view: LossView, values: Tensor) -> Tensor:
    """[S] to [M]: a mark whose mean over tokens is the mean of `values` over the sequences that have a token.

    Only for a view of the whole mini-batch (scope group or batch): elsewhere neither count is known.
    """
    scale = view.num_tokens / (view.lengths > 0).sum().clamp(min=1)
    return view.spread(values / view.lengths.clamp(min=1)) * scale


# --- Slot `loss`: right or wrong as a classification problem, whose logit is how much likelier an answer has become.

DEVIATION_EPS = 1e-6
"""Added to a group's deviation before dividing by it."""


def bce(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    beta: float = 1.0,
    normalise: str = "rloo",
    class_weights: bool = True,
    per_token: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] cross-entropy between accuracy and a score relative to the group, one number a sequence.

    psi_i = beta z_i, or beta mean_t logp with `per_token`; s_i = psi_i - mean_{j != i} psi_j (`rloo`), or less the
    group's mean and over its deviation (`grpo`), or psi_i (`naive`); L_i = w_i BCE(sigmoid(s_i), accuracy_i). The
    gradient goes through all samples of the group. Reads `accuracy` (0 or 1) and `group_ids`. PACS (2509.02522).
    """
    alive = view.lengths > 0
    psi = beta * (view.mean(policy_logp(view)) if per_token else sequence_log_ratio(view, anchor))
    labels = _accuracy_labels(view, alive)
    groups, num = compact_ids(view.sequence["group_ids"])
    scores = relative_scores(psi, groups, num, alive, normalise)
    weights = balanced_weights(labels, groups, num, alive) if class_weights else torch.ones_like(labels)
    loss = binary_cross_entropy_with_logits(scores, labels, weights, reduction="none")
    right = ((scores > 0) == (labels > 0)).to(loss.dtype)
    return view.spread(loss), {"bce_accuracy": sequence_mean_metric(view, right)}


def relative_scores(psi: Tensor, groups: Tensor, num: int, alive: Tensor, normalise: str) -> Tensor:
    """[S] each sequence's score relative to the others of its group that are `alive`, with gradient through them all.

    A group of one keeps its raw score. A group whose scores are all equal is centred but not divided: so is every group
    of the first update on a batch, and dividing there by a deviation of 0 would make the gradient a million times larger.
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
    """[S] G / (2 n_c) for a sample of class c in a group of G that has both classes, 1 in a group that has one."""
    size = segment_count(groups, num, alive)
    positive = segment_count(groups, num, alive & (labels > 0))
    mixed = ((positive > 0) & (positive < size))[groups]
    same = torch.where(labels > 0, positive[groups], (size - positive)[groups]).clamp(min=1)
    return torch.where(mixed, size[groups] / (2 * same), torch.ones_like(labels)).to(labels.dtype)


def _accuracy_labels(view: LossView, alive: Tensor) -> Tensor:
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


# --- Slot `loss`: squared losses, which pull a log-ratio towards a multiple of the advantage.
#
# They stay valid on samples of an older policy: their minimum does not depend on who sampled. `z_i` is the sum of a
# sequence's log-ratios to the anchor, with gradient and unclamped.

MAX_LOGGED_LOG_RATIO = 50.0
"""z grows with length: metrics, and only they, see it clipped here."""


def omd_sq(view: LossView, anchor: Tensor, advantages: Tensor, tau: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] online mirror descent, one number a sequence: -A z + tau/2 z^2, whose minimum is tau z = A.

    This is (A - tau z)^2 / (2 tau) without its constant. A is the reward without its group's mean (advantage grpo with
    std none), or without tau log mean exp(r / tau) (softmean with beta 1 / tau). Kimi k1.5 (2501.12599).
    """
    z = sequence_log_ratio(view, anchor)
    return view.spread(-view.mean(advantages) * z + 0.5 * tau * z**2), _log_ratio_metric(view, z)


def sppo_sq(view: LossView, anchor: Tensor, advantages: Tensor, eta: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] self-play preference optimisation, one number a sequence: (z - eta A)^2.

    A is P_i - 1/2, P_i the probability to beat the other samples (advantage win_rate), or a reward without its soft
    mean (softmean). SPPO (2405.00675).
    """
    z = sequence_log_ratio(view, anchor)
    return view.spread((z - eta * view.mean(advantages)) ** 2), _log_ratio_metric(view, z)


def dro(view: LossView, anchor: Tensor, advantages: Tensor, beta: float = 0.1) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A logp + beta/2 l^2 with l = logp - anchor, unclamped: mirror descent token by token.

    Offline regularised RL (2405.19107).
    """
    return -advantages * policy_logp(view) + 0.5 * beta * log_ratio(view, anchor) ** 2, {}


def _log_ratio_metric(view: LossView, z: Tensor) -> dict[str, Tensor]:
    return {"seq_log_ratio": view.spread(z.detach().clamp(-MAX_LOGGED_LOG_RATIO, MAX_LOGGED_LOG_RATIO))}


# --- Slot `loss`: samples of the policy and demonstrations of a stronger one in the same group.

AUTHOR_EPS = 1e-6
"""Added to an author's probability before dividing by it."""


def mixed_offpolicy(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    weight: Literal["shaped", "author", "mixture"] = "shaped",
    gamma: float = 0.1,
    focus: float = 0.0,
    clip: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A r on the policy's own tokens, -A w on demonstrated ones, r and w with gradient; the logarithm of r is clamped.

    With p the policy's probability of a demonstrated token, `weight` says what w is:

    - shaped: p / (p + gamma), whose gradient is largest near p = gamma, so that unlikely tokens are learnt rather than lost.
      LUFFY (2504.14945);
    - author: p / (q + 1e-6), where the probabilities q of whoever wrote the demonstration are known (`author_logp`);
    - mixture: 2 p / (p_old + q), as if a token could have come from either, with (p_old + 1) / 2 in the place of a q that
      nobody knows. RL-PLUS (2508.00222), which also has a `focus`: A (1 - p)^focus, without gradient, looks away from tokens
      that are likely already.

    `clip` bounds the policy's own tokens as PPO does. Reads the sequence column `demonstration` (bool), which a batch without
    any need not have.
    """
    logp, ratio = policy_logp(view), token_ratio(view, anchor)
    own = -advantages * ratio
    if clip is not None:
        own = torch.maximum(own, -advantages * ratio.clamp(1 - clip, 1 + clip))
    if not view.has("demonstration"):
        return own, {"demonstrated": torch.zeros_like(logp, dtype=torch.bool)}
    shown = view.column("demonstration")
    if weight == "shaped":
        weights = (logp - math.log(gamma)).sigmoid()
    elif weight == "author":
        # The policy's own tokens may hold anything there, and NaN would leak into the gradient through the exponential.
        known = torch.where(shown, view.column("author_logp"), torch.zeros_like(logp))
        weights = logp.exp() / (known.exp() + AUTHOR_EPS)
    else:
        old = torch.where(shown, anchor, torch.zeros_like(anchor)).exp()
        weights = 2 * logp.exp() / (old + (old + 1) / 2)
    aimed = advantages * (1 - logp.detach().exp()).clamp(min=0) ** focus if focus > 0 else advantages
    return torch.where(shown, -aimed * weights, own), {"demonstrated": shown}


# --- Slot `loss`: imitation.


def nll(view: LossView, anchor: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -logp: negative log-likelihood of every token in the loss, whatever its reward."""
    loss = -policy_logp(view)
    return loss, {"nll": loss.detach()}


# --- Slot `loss`: preferences between answers.
#
# A pair is a group of two sequences, one of them `chosen` (a bool sequence column). Its loss stands on both, so that the
# mean over sequences is the mean over pairs. Log-probs under the reference are the token column `ref_logp`.

TokenLossAndMetrics = tuple[Tensor, dict[str, Tensor]]


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: float | Tensor = 0.0) -> Tensor:
    """[P] -log sigmoid(r_c - r_r - margin): how surprising the preference is, given a score of each answer."""
    return -logsigmoid(chosen - rejected - margin)


def dpo(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    beta: float = 0.1,
    smoothing: float = 0.0,
    average: bool = False,
) -> TokenLossAndMetrics:
    """[M] -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h), h = (logp_c - ref_c) - (logp_r - ref_r) over whole answers.

    e is the share of preferences taken to be the wrong way round. With `average` the log-ratios are means over each answer's
    tokens, so that length does not decide (as in Tulu 3, 2411.15124). DPO (2305.18290).
    """
    pairs, num = pairs_of(view)
    drift = _reference_log_ratio(view)
    h = chosen_minus_rejected(view, view.mean(drift) if average else view.sum(drift), pairs, num)
    loss = -(1 - smoothing) * logsigmoid(beta * h) - smoothing * logsigmoid(-beta * h)
    return _pair_loss(view, pairs, loss, beta * h)


def ipo(
    view: LossView, anchor: Tensor, advantages: Tensor, beta: float = 0.1, average: bool = True
) -> TokenLossAndMetrics:
    """[M] (h - 1 / (2 beta))^2 with h as in DPO, of log-ratios summed or averaged over each answer. IPO (2310.12036)."""
    pairs, num = pairs_of(view)
    drift = _reference_log_ratio(view)
    h = chosen_minus_rejected(view, view.mean(drift) if average else view.sum(drift), pairs, num)
    return _pair_loss(view, pairs, (h - 1 / (2 * beta)) ** 2, h)


def simpo(
    view: LossView, anchor: Tensor, advantages: Tensor, beta: float = 2.0, margin: float = 0.5
) -> TokenLossAndMetrics:
    """[M] -log sigmoid(beta (mean logp_c - mean logp_r) - margin): no reference. SimPO (2405.14734)."""
    pairs, num = pairs_of(view)
    h = beta * chosen_minus_rejected(view, view.mean(policy_logp(view)), pairs, num)
    return _pair_loss(view, pairs, -logsigmoid(h - margin), h)


def orpo(view: LossView, anchor: Tensor, advantages: Tensor, coef: float = 0.1) -> TokenLossAndMetrics:
    """[M] -mean logp_c - coef log sigmoid(log odds_c - log odds_r), odds = p / (1 - p) of p = exp(mean logp).

    Imitation of the chosen answer and preference in one: no reference. ORPO (2403.07691).
    """
    pairs, num = pairs_of(view)
    mean = view.mean(policy_logp(view))
    chosen = torch.where(view.sequence["chosen"], mean, torch.zeros_like(mean))
    likelihood = segment_sum(chosen, pairs, num)
    h = chosen_minus_rejected(view, log_odds(mean), pairs, num)
    return _pair_loss(view, pairs, -likelihood - coef * logsigmoid(h), h)


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p. A probability of 1 has infinite odds; short of that by one rounding they are finite."""
    certain = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return certain - torch.log(-torch.expm1(certain))


def kto(
    view: LossView,
    anchor: Tensor,
    advantages: Tensor,
    beta: float = 0.1,
    desirable: float = 1.0,
    undesirable: float = 1.0,
) -> TokenLossAndMetrics:
    """[M] desirable (1 - sigmoid(beta (u - z0))) for good answers, undesirable (1 - sigmoid(beta (z0 - u))) for bad ones.

    u = logp - ref of an answer; z0 = max(0, mean u of mismatched rows), without gradient. Reads the bool sequence
    columns `desirable` and `mismatched` (an answer behind another prompt, there for z0 alone: it has no loss, and the
    mean is over the others). KTO (2402.01306).
    """
    alive, mismatched = view.lengths > 0, view.sequence["mismatched"]
    judged, others = alive & ~mismatched, alive & mismatched
    if not bool(judged.any()) or not bool(others.any()):
        raise ValueError(
            f"kto got {int(judged.sum())} answers and {int(others.sum())} mismatched rows with a token in the loss; it needs "
            "both in every mini-batch: the mismatched rows say how far the policy is from the reference"
        )
    u = view.sum(_reference_log_ratio(view))
    z0 = (u.detach() * others).sum().div(others.sum()).clamp(min=0)
    good = desirable * (beta * (z0 - u)).sigmoid()
    bad = undesirable * (beta * (u - z0)).sigmoid()
    loss = torch.where(view.sequence["desirable"], good, bad)
    loss = torch.where(judged, loss, torch.zeros_like(loss)) * (alive.sum() / judged.sum())
    return view.spread(loss), {"kto_z0": view.spread(z0.expand_as(u))}


def pairs_of(view: LossView) -> tuple[Tensor, int]:
    """[S] the pair of each sequence, and the number of pairs; an incomplete one is an error."""
    names, pairs = torch.unique(view.sequence["group_ids"], return_inverse=True)
    num = names.numel()
    whole = segment_count(pairs, num) == 2
    whole &= segment_count(pairs, num, view.sequence["chosen"]) == 1
    whole &= segment_count(pairs, num, view.lengths > 0) == 2
    if not bool(whole.all()):
        broken = names[~whole]
        raise ValueError(
            f"{broken.numel()} of {num} groups are not pairs (the first is group {int(broken[0])}): each needs one chosen "
            "and one rejected answer, both with a token in the loss"
        )
    return pairs, num


def chosen_minus_rejected(view: LossView, values: Tensor, pairs: Tensor, num: int) -> Tensor:
    """[S] to [P]: the chosen answer's value less the rejected one's, with gradient."""
    return segment_sum(torch.where(view.sequence["chosen"], values, -values), pairs, num)


def _reference_log_ratio(view: LossView) -> Tensor:
    return policy_logp(view) - view.column("ref_logp")


def _pair_loss(view: LossView, pairs: Tensor, loss: Tensor, margin: Tensor) -> TokenLossAndMetrics:
    """A loss per pair at the tokens of both answers, with how often and how much the chosen one is ahead."""
    ahead = margin.detach()
    marks = {"pref_accuracy": (ahead > 0).to(loss.dtype), "pref_margin": ahead}
    spread = {name: sequence_mean_metric(view, mark.index_select(0, pairs)) for name, mark in marks.items()}
    return view.spread(loss.index_select(0, pairs)), spread


# --- Slot `loss`: what is minimised, by name.
#
# A loss takes a view, the anchor's log-probs [M], advantages [M] and its options, and gives the loss of each token [M] and
# marks, as a clip does. A loss that is one number a sequence has it at each of the sequence's tokens.


def logprob(view: LossView, anchor: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """[M] -A logp: plain policy gradient. Williams (1992)."""
    return -advantages * policy_logp(view), {}


LOSSES: dict[str, Callable[..., tuple[Tensor, dict[str, Tensor]]] | None] = {
    "surrogate": None,  # these two are made of ratio and clip: see `PolicyLoss`
    "sg_logprob": None,
    "logprob": logprob,
    "omd_sq": omd_sq,
    "sppo_sq": sppo_sq,
    "dro": dro,
    "bce": bce,
    "mixed_offpolicy": mixed_offpolicy,
    "nll": nll,
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
}
