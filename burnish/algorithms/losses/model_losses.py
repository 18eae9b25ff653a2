"""The critic's loss and how well its values explain the returns (PPO, 1707.06347; the clip is that of its code)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from burnish.algorithms.losses.loss_functions import (
    LOSSES,
    bradley_terry,
    chosen_minus_rejected,
    log_odds,
    pairs_of,
    policy_logp,
)
from burnish.algorithms.losses.loss_view import LossView
from burnish.core.segments import compact_ids, segment_mean, segment_sum


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

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        value = view.value
        assert value is not None, "the learner gives what `needs` names"
        old = value if self.clip is None else view.column("values")
        per_token, outside = value_loss(value, view.column("returns"), old, self.clip)
        sums = {"vf_clipfrac": outside.to(value.dtype).sum(), "value_mean": value.detach().sum()}
        return (view.column("weight") * per_token).sum(), sums


# --- Losses of an implicit process reward model: a policy whose log-ratio to its reference is read as a reward (PRIME, 2502.01456).
#
# With q_t = log pi_phi(y_t) - log pi_ref(y_t) and Q = beta sum_t q_t, the model is trained on outcome labels alone; its
# token rewards beta q_t are what `advantages.process.prime_rloo` takes.


def outcome_cross_entropy(log_ratio: Tensor, right: Tensor, beta: float = 0.05) -> Tensor:
    """[S] cross-entropy of sigmoid(beta * summed log-ratio) against right (1) or wrong (0)."""
    return binary_cross_entropy_with_logits(beta * log_ratio, right.to(log_ratio.dtype), reduction="none")


def outcome_contrast(log_ratio: Tensor, right: Tensor, group_ids: Tensor, beta: float = 0.05) -> Tensor:
    """[S] -log sigmoid(+-(Q - mean Q of the group's answers of the other label)), plus where right; 0 without any such."""
    groups, num = compact_ids(group_ids)
    score, right = beta * log_ratio, right.bool()
    means = [segment_mean(score, groups, num, mask) for mask in (~right, right)]
    there = [torch.zeros_like(means[0], dtype=torch.bool).index_fill(0, groups[mask], True) for mask in (~right, right)]
    other = torch.where(right, means[0][groups], means[1][groups])
    has_other = torch.where(right, there[0][groups], there[1][groups])
    sign = torch.where(right, 1.0, -1.0).to(score.dtype)
    return torch.where(has_other, -logsigmoid(sign * (score - other)), torch.zeros_like(score))


@dataclass(frozen=True)
class ImplicitPrmLoss:
    """Either loss on the answers of a batch, whose weights are fixed before it is split; groups stay together.

    Columns it reads: `prior_logp` [M], log-probs under the model's frozen start; `answer_ids` [S], which sequences are one
    answer; `outcome` and `weight` [S], the same in all sequences of an answer.
    """

    kind: str = "cross_entropy"
    beta: float = 0.05

    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "groups"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        logp = view.logp
        assert logp is not None, "the learner gives log-probs"
        owner, num = compact_ids(view.sequence["answer_ids"])

        def of_answers(name: str) -> Tensor:
            return segment_mean(view.sequence[name].to(logp.dtype), owner, num)

        log_ratio, right = segment_sum(view.sum(logp - view.column("prior_logp")), owner, num), of_answers("outcome")
        if self.kind == "contrast":
            groups = torch.zeros(num, dtype=torch.int64, device=owner.device)
            groups[owner] = view.sequence["group_ids"]
            losses = outcome_contrast(log_ratio, right > 0.5, groups, self.beta)
        else:
            losses = outcome_cross_entropy(log_ratio, right, self.beta)
        return (of_answers("weight") * losses).sum(), {}


def outcome_prediction_metrics(log_ratio: Tensor, right: Tensor, rounding: float) -> dict[str, float]:
    """How well summed log-ratios [T] tell right answers from wrong ones.

    `accuracy`: how often the sign is that of the outcome. `ranking`: of all pairs of a right and a wrong answer, how many
    have the right one ahead (missing where all outcomes are alike). `share_right`: what saying "right" every time would
    score. What is no more than `rounding` is neither, and counts half.
    """
    right = right > 0.5
    score = torch.where(log_ratio.abs() <= rounding, torch.zeros_like(log_ratio), log_ratio).double()
    hits = torch.where(score == 0, 0.5, ((score > 0) == right).double())
    found = {"accuracy": float(hits.mean()), "share_right": float(right.double().mean())}
    wrong = score[~right].sort().values
    if wrong.numel() and bool(right.any()):
        below, upto = (torch.searchsorted(wrong, score[right], side=side) for side in ("left", "right"))
        found["ranking"] = float((below + upto).double().mean() / (2 * wrong.numel()))
    return found


# --- The loss of a reward model: which of two answers is the better one, as a difference of scores (Bradley and Terry, 1952).


@dataclass(frozen=True)
class RewardModelLoss:
    """Mean over pairs of -log sigmoid(r_c - r_r - m) + centre (r_c + r_r)^2, with m the pair's margin plus a constant.

    Only differences matter to the first term; the second keeps scores around 0 (Eisenstein et al., 2312.09244). Each
    sequence has one token in the loss, the one its score is read at. Columns it reads, [S] each: `group_ids` (the pair),
    `chosen`, `margin`, `weight` (1 / the pairs of the whole mini-batch).
    """

    margin: float = 0.0
    """By how much every chosen answer must be ahead, besides the margin of its pair."""
    centre: float = 0.0
    """Coefficient of the second term."""

    needs: ClassVar[frozenset[str]] = frozenset({"value"})
    scope: ClassVar[str] = "group"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        assert view.value is not None, "the learner gives what `needs` names"
        pairs, num = pairs_of(view)
        scores = view.sum(view.value)  # [S]
        ahead = chosen_minus_rejected(view, scores, pairs, num)  # [P]
        both = segment_sum(scores, pairs, num)
        # Both members of a pair have its margin and its weight.
        margin = segment_sum(view.sequence["margin"], pairs, num) / 2 + self.margin
        weight = segment_sum(view.sequence["weight"], pairs, num) / 2
        loss = bradley_terry(ahead, ahead.new_zeros(()), margin) + self.centre * both.square()
        told = ahead.detach()
        # Metrics are divided by the tokens in the loss, of which a pair has two.
        sums = {"accuracy": 2 * (told > 0).to(told.dtype).sum(), "margin": 2 * told.sum(), "score": both.detach().sum()}
        return (weight * loss).sum(), sums


# --- Preferences as the learner sees them: a loss record over answers in pairs or with labels, and what is told of it.
#
# A mini-batch holds two sequences of each unit, with the same `group_ids`. Of pairs these are the chosen answer and the
# rejected one (bool sequence column `chosen`). Of labelled answers (KTO) they are the answer (`desirable` says which are
# good) and another prompt's answer behind the same prompt (`mismatched`), which shows how far the policy has moved. The
# reference is the sequence column `ref_logp`: the mean log-prob of each answer's tokens under it.

LOGP_ROUNDING_ULPS = 16
"""Units in the last place of a log-prob by which two passes over the same answer may differ."""


@dataclass(frozen=True)
class PreferenceLoss:
    """A preference loss by name; the mean over pairs, or over labelled answers, with the weights of `seq-mean-token-mean`."""

    needs: ClassVar[frozenset[str]] = frozenset()
    name: str = "dpo"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_paired(self) -> bool:
        """Whether it compares two answers to one prompt; else it values single ones."""
        return self.name != "kto"

    @property
    def scope(self) -> str:
        """Pairs add up; z0 of KTO is of the whole batch."""
        return "groups" if self.is_paired else "batch"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        function = LOSSES[self.name]
        assert function is not None, "preferences have neither ratio nor clip"
        logp = policy_logp(view)
        nobody = torch.zeros_like(logp)  # these losses read neither an anchor nor advantages
        per_token, _ = function(view, nobody, nobody, **self.options)
        return (view.column("weight") * per_token).sum(), {}


def implicit_rewards(view: LossView, loss: PreferenceLoss) -> Tensor:
    """[S] how good the policy takes each answer to be, in the units of the loss's margin.

    dpo, ipo, kto: beta (logp - ref), of the whole answer or its mean over tokens as the loss has it. simpo: beta mean logp.
    orpo: log odds of exp(mean logp).
    """
    logp, beta = policy_logp(view), loss.options.get("beta", 1.0)
    if loss.name == "orpo":
        return log_odds(view.mean(logp))
    if loss.name == "simpo":
        return beta * view.mean(logp)
    drift = logp - view.column("ref_logp")
    return beta * (view.mean(drift) if loss.options.get("average", False) else view.sum(drift))


def preference_metrics(view: LossView, loss: PreferenceLoss) -> dict[str, float]:
    """Means over a whole batch: implicit rewards and summed log-probs of either kind of answer, their margin, the accuracy.

    The accuracy of pairs is how often the chosen answer has the higher implicit reward; that of labelled answers how often
    a good one is above z0 and a bad one below. A tie is half right; what is no more than rounding is one, as before the
    first update, when policy and reference are the same.
    """
    rewards, logp = implicit_rewards(view, loss), view.sum(policy_logp(view))
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
    return float(((ahead > rounding).double() + 0.5 * (ahead.abs() <= rounding)).mean())
