"""Preference losses: DPO, IPO, SimPO, ORPO on pairs of answers, and KTO on answers with labels.

A pair is a group of two sequences, one of them `chosen` (bool sequence column). Its loss is placed on both, so that the
mean over sequences is the mean over pairs. KTO's answers are `desirable` or not. Each has a second sequence with the same
`group_ids`, `mismatched`: the same prompt followed by the answer to another prompt. Log-probs under the reference are the column
`ref_logp`: of each token, or the mean over the answer's tokens as a sequence column.

A preference loss takes a view, the anchor's log-probs and advantages, like every loss of the slot, but reads neither of
the last two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from burnish.algorithms.losses.loss_view import LossView, TokenLoss
from burnish.core.segments import segment_count, segment_sum

LOGP_ROUNDING_ULPS = 16
"""Units in the last place by which the log-probs of two passes over the same answer may differ."""


def dpo(
    view: LossView, anchor: Tensor, advantages: Tensor, *, beta: float, smoothing: float, average: bool
) -> TokenLoss:
    """[M] -(1-e) log sigmoid(beta h) - e log sigmoid(-beta h), h = (logp_c - ref_c) - (logp_r - ref_r). DPO (2305.18290).

    e = `smoothing` is the share of preferences taken to be wrong. Log-ratios are summed over each answer's tokens. With
    `average` they are means, so that length does not decide (as in Tulu 3, 2411.15124).
    """
    pairs, num = pairs_of(view)
    log_ratio = _reference_log_ratio(view)
    h = chosen_minus_rejected(view, view.mean(log_ratio) if average else view.sum(log_ratio), pairs, num)
    loss = -(1 - smoothing) * logsigmoid(beta * h) - smoothing * logsigmoid(-beta * h)
    return _pair_loss(view, pairs, loss, beta * h)


def ipo(view: LossView, anchor: Tensor, advantages: Tensor, *, beta: float, average: bool) -> TokenLoss:
    """[M] (h - 1 / (2 beta))^2 with h as in DPO, of log-ratios summed or averaged over each answer. IPO (2310.12036)."""
    pairs, num = pairs_of(view)
    log_ratio = _reference_log_ratio(view)
    h = chosen_minus_rejected(view, view.mean(log_ratio) if average else view.sum(log_ratio), pairs, num)
    return _pair_loss(view, pairs, (h - 1 / (2 * beta)) ** 2, h)


def simpo(view: LossView, anchor: Tensor, advantages: Tensor, *, beta: float, margin: float) -> TokenLoss:
    """[M] -log sigmoid(beta (mean logp_c - mean logp_r) - margin), without a reference. SimPO (2405.14734)."""
    pairs, num = pairs_of(view)
    h = beta * chosen_minus_rejected(view, view.mean(view.policy_logp), pairs, num)
    return _pair_loss(view, pairs, -logsigmoid(h - margin), h)


def orpo(view: LossView, anchor: Tensor, advantages: Tensor, *, coef: float) -> TokenLoss:
    """[M] -mean logp_c - coef log sigmoid(log odds_c - log odds_r), odds = p / (1 - p), p = exp(mean logp).

    ORPO (2403.07691). It imitates the chosen answer and prefers it in one loss, without a reference.
    """
    pairs, num = pairs_of(view)
    mean = view.mean(view.policy_logp)
    chosen = torch.where(view.sequence["chosen"], mean, torch.zeros_like(mean))
    likelihood = segment_sum(chosen, pairs, num)
    h = chosen_minus_rejected(view, log_odds(mean), pairs, num)
    return _pair_loss(view, pairs, -likelihood - coef * logsigmoid(h), h)


def kto(
    view: LossView, anchor: Tensor, advantages: Tensor, *, beta: float, desirable: float, undesirable: float
) -> TokenLoss:
    """[M] desirable (1 - sigmoid(beta (u - z0))) for good answers, undesirable (1 - sigmoid(beta (z0 - u))) for bad.

    KTO (2402.01306). u = logp - ref of an answer; z0 = max(0, mean u of mismatched rows), without gradient. Mismatched rows
    are used for z0 only: they have no loss, and the mean loss is over the other rows.
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


PREFERENCE_LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "dpo": dpo,
    "ipo": ipo,
    "simpo": simpo,
    "orpo": orpo,
    "kto": kto,
}
"""The function of each preference loss by name."""


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss by name: the mean over pairs or labelled answers, with the weights of `seq-mean-token-mean`."""

    needs: ClassVar[frozenset[str]] = frozenset()
    name: str = "dpo"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_paired(self) -> bool:
        """Whether the loss compares two answers to a prompt; KTO values single answers."""
        return self.name != "kto"

    @property
    def scope(self) -> str:
        """Pairs add up; KTO's z0 is of the whole batch."""
        return "groups" if self.is_paired else "batch"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        unused = torch.zeros_like(view.policy_logp)  # in place of anchor and advantages
        per_token, _ = PREFERENCE_LOSSES[self.name](view, unused, unused, **self.options)
        return (view.column("weight") * per_token).sum(), {}


def implicit_rewards(view: LossView, loss: PreferenceLoss) -> Tensor:
    """[S] the implicit reward of each answer, in the units of the loss's margin.

    dpo, ipo, kto: beta (logp - ref), summed or averaged over tokens as in the loss. simpo: beta mean logp. orpo: log odds of
    exp(mean logp).
    """
    logp, beta = view.policy_logp, loss.options.get("beta", 1.0)
    if loss.name == "orpo":
        return log_odds(view.mean(logp))
    if loss.name == "simpo":
        return beta * view.mean(logp)
    log_ratio = logp - view.column("ref_logp")
    return beta * (view.mean(log_ratio) if loss.options.get("average", False) else view.sum(log_ratio))


def preference_metrics(view: LossView, loss: PreferenceLoss) -> dict[str, float]:
    """Means over a whole batch: implicit rewards and summed log-probs of each kind of answer, their margin, the accuracy.

    The accuracy of pairs is how often the chosen answer has the higher implicit reward. That of labelled answers is how often
    a good one is above z0 and a bad one below. A difference within rounding is a tie and counts half, as before the first
    update, when policy and reference are the same.
    """
    rewards, logp = implicit_rewards(view, loss), view.sum(view.policy_logp)
    if loss.is_paired:
        pairs, num = pairs_of(view)
        ahead = chosen_minus_rejected(view, rewards, pairs, num)
        better = view.sequence["chosen"]
        kinds = {"chosen": better, "rejected": ~better}
    else:
        judged, good = ~view.sequence["mismatched"], view.sequence["desirable"]
        z0 = rewards[~judged].mean().clamp(min=0)
        ahead = torch.where(good, rewards - z0, z0 - rewards)[judged]
        kinds = {"good": judged & good, "bad": judged & ~good}
    rounding = (
        LOGP_ROUNDING_ULPS * torch.finfo(logp.dtype).eps * float(logp.abs().max()) * loss.options.get("beta", 1.0)
    )
    found = {"accuracy": _win_rate(ahead, rounding), "margin": float(ahead.mean())}
    for kind, which in kinds.items():
        if bool(which.any()):  # a batch may have no bad answer in it
            found |= {f"reward_{kind}": float(rewards[which].mean()), f"logp_{kind}": float(logp[which].mean())}
    return found if loss.is_paired else found | {"z0": float(z0)}


def _win_rate(ahead: Tensor, rounding: float) -> float:
    """Share of positive values; a value within rounding counts half."""
    return float(((ahead > rounding).double() + 0.5 * (ahead.abs() <= rounding)).mean())


# --- Pairs


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: float | Tensor = 0.0) -> Tensor:
    """[P] -log sigmoid(r_c - r_r - margin): negative log-likelihood of a preference. Bradley and Terry (1952)."""
    return -logsigmoid(chosen - rejected - margin)


def pairs_of(view: LossView) -> tuple[Tensor, int]:
    """[S] the pair of each sequence, and the number of pairs; raises for an incomplete pair."""
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
    """[S] to [P]: the chosen answer's value minus the rejected one's, with gradient."""
    return segment_sum(torch.where(view.sequence["chosen"], values, -values), pairs, num)


def log_odds(logp: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p. p = 1 is lowered by one rounding, so that its odds are finite."""
    certain = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return certain - torch.log(-torch.expm1(certain))


def _reference_log_ratio(view: LossView) -> Tensor:
    """[M] logp - ref_logp."""
    return view.policy_logp - view.column("ref_logp")


def _pair_loss(view: LossView, pairs: Tensor, loss: Tensor, margin: Tensor) -> TokenLoss:
    """A loss per pair [P] at the tokens of both answers, and metrics: how often and by how much the chosen answer is ahead."""
    ahead = margin.detach()
    metrics = {"pref_accuracy": (ahead > 0).to(loss.dtype), "pref_margin": ahead}
    spread = {name: view.sequence_mean_metric(metric.index_select(0, pairs)) for name, metric in metrics.items()}
    return view.spread(loss.index_select(0, pairs)), spread
