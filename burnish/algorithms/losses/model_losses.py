"""Losses of models other than the policy: the critic, PRIME's implicit process reward model, and reward models of answers and of steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.preference_losses import bradley_terry, chosen_minus_rejected, pairs_of
from burnish.core.segments import compact_ids, segment_mean, segment_sum

# --- Critic


@dataclass(frozen=True)
class ValueLoss:
    """Regression of a critic's values on returns.

    Columns it reads, [M] each: `weight`, `returns`, and `values` (from before the batch's first update) if it clips.
    """

    clip: float | None = 0.5
    """How far a value may move from the old one before its gradient stops; None sets no limit."""

    needs: ClassVar[frozenset[str]] = frozenset({"value"})
    scope: ClassVar[str] = "token"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        value = view.value
        assert value is not None, "the learner gives what `needs` names"
        old = value if self.clip is None else view.column("values")
        per_token, outside = value_loss(value, view.column("returns"), old, self.clip)
        sums = {"vf_clipfrac": outside.to(value.dtype).sum(), "value_mean": value.detach().sum()}
        return (view.column("weight") * per_token).sum(), sums


def value_loss(value: Tensor, returns: Tensor, old: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """[M] 0.5 max((v - ret)^2, (clip(v, v_old - c, v_old + c) - ret)^2), and where the second is larger. PPO (1707.06347).

    A value outside the range around `old` gets no gradient further out, only back towards the return. Without `clip` the loss
    is half the squared error.
    """
    plain = (value - returns).square()
    if clip is None:
        return 0.5 * plain, torch.zeros_like(plain, dtype=torch.bool)
    clipped = (torch.clamp(value, old - clip, old + clip) - returns).square()
    return 0.5 * torch.maximum(plain, clipped), clipped > plain


def explained_variance(returns: Tensor, values: Tensor, mask: Tensor) -> float:
    """1 - Var(ret - v) / Var(ret) over the tokens of the mask; nan if all returns are equal.

    1 is a perfect critic, 0 is no better than a constant. VC-PPO (2503.01491) watches it during value pre-training.
    """
    returns, values = returns[mask].double(), values[mask].double()
    if returns.numel() == 0 or bool((returns == returns[0]).all()):
        return math.nan
    return float(1 - (returns - values).var(correction=0) / returns.var(correction=0))


# --- Implicit process reward model (PRIME, 2502.01456)
#
# The model is a policy whose log-ratio to its frozen start is read as a reward. With q_t = log pi_phi(y_t) - log pi_ref(y_t)
# and Q = beta sum_t q_t it is trained on outcome labels alone. Its token rewards beta q_t are the process rewards of
# advantage `prime_rloo`.


@dataclass(frozen=True)
class ImplicitPrmLoss:
    """Cross-entropy or contrast loss of the implicit process reward model on the outcomes of answers. A view holds whole groups.

    Columns it reads: `prior_logp` [M], log-probs under the model's frozen start; `answer_ids` [S], the answer of each sequence;
    `outcome` and `weight` [S], equal in all sequences of an answer.
    """

    kind: str = "cross_entropy"
    beta: float = 0.05

    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "groups"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        logp = view.policy_logp
        assert logp is not None, "the learner gives log-probs"
        answer_ids, num = compact_ids(view.sequence["answer_ids"])

        def per_answer(name: str) -> Tensor:
            return segment_mean(view.sequence[name].to(logp.dtype), answer_ids, num)

        log_ratio, right = (
            segment_sum(view.sum(logp - view.column("prior_logp")), answer_ids, num),
            per_answer("outcome"),
        )
        if self.kind == "contrast":
            groups = torch.zeros(num, dtype=torch.int64, device=answer_ids.device)
            groups[answer_ids] = view.sequence["group_ids"]
            losses = outcome_contrast(log_ratio, right > 0.5, groups, self.beta)
        else:
            losses = outcome_cross_entropy(log_ratio, right, self.beta)
        return (per_answer("weight") * losses).sum(), {}


def outcome_cross_entropy(log_ratio: Tensor, right: Tensor, beta: float) -> Tensor:
    """[S] binary cross-entropy of sigmoid(beta * summed log-ratio) against right (1) or wrong (0)."""
    return binary_cross_entropy_with_logits(beta * log_ratio, right.to(log_ratio.dtype), reduction="none")


def outcome_contrast(log_ratio: Tensor, right: Tensor, group_ids: Tensor, beta: float) -> Tensor:
    """[S] -log sigmoid(s (Q - mean Q of the group's answers with the other outcome)), s = 1 if right, else -1.

    It is 0 if the group has no answer with the other outcome.
    """
    groups, num = compact_ids(group_ids)
    score, right = beta * log_ratio, right.bool()
    means = [segment_mean(score, groups, num, mask) for mask in (~right, right)]
    present = [
        torch.zeros_like(means[0], dtype=torch.bool).index_fill(0, groups[mask], True) for mask in (~right, right)
    ]
    other = torch.where(right, means[0][groups], means[1][groups])
    has_other = torch.where(right, present[0][groups], present[1][groups])
    sign = torch.where(right, 1.0, -1.0).to(score.dtype)
    return torch.where(has_other, -logsigmoid(sign * (score - other)), torch.zeros_like(score))


def outcome_prediction_metrics(log_ratio: Tensor, right: Tensor, rounding: float) -> dict[str, float]:
    """How well summed log-ratios [T] separate right answers from wrong ones.

    - `accuracy`: how often the sign matches the outcome.
    - `ranking`: share of (right, wrong) pairs with the right answer ahead; missing if all outcomes are equal.
    - `share_right`: the accuracy of always predicting "right".

    A log-ratio of at most `rounding` in size is taken as 0 and counts as half a match.
    """
    right = right > 0.5
    score = torch.where(log_ratio.abs() <= rounding, torch.zeros_like(log_ratio), log_ratio).double()
    hits = torch.where(score == 0, 0.5, ((score > 0) == right).double())
    found = {"accuracy": float(hits.mean()), "share_right": float(right.double().mean())}
    if (ranking := share_ahead(score, right)) is not None:
        found["ranking"] = ranking
    return found


def share_ahead(score: Tensor, right: Tensor) -> float | None:
    """Share of (right, wrong) pairs whose right member has the higher score, the area under the ROC curve; a tie is half a pair.

    None if all are right or all are wrong.
    """
    wrong = score[~right].sort().values
    if not wrong.numel() or not bool(right.any()):
        return None
    below, upto = (torch.searchsorted(wrong, score[right], side=side) for side in ("left", "right"))
    return float((below + upto).double().mean() / (2 * wrong.numel()))


# --- Reward model


@dataclass(frozen=True)
class RewardModelLoss:
    """Mean over pairs of -log sigmoid(r_c - r_r - m) + centre (r_c + r_r)^2, m = the pair's margin + `margin`.

    The first term depends only on differences. The second keeps scores around 0 (Eisenstein et al., 2312.09244). Each sequence
    has one token in the loss, at which its score is read. Columns it reads, [S] each: `group_ids` (the pair), `chosen`,
    `margin`, `weight` (1 / number of pairs of the whole mini-batch).
    """

    margin: float = 0.0
    """By how much every chosen answer must be ahead, besides its pair's margin."""
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
        difference = ahead.detach()
        # Metrics are divided by the tokens in the loss, and a pair has two.
        sums = {
            "accuracy": 2 * (difference > 0).to(difference.dtype).sum(),
            "margin": 2 * difference.sum(),
            "score": both.detach().sum(),
        }
        return (weight * loss).sum(), sums


# --- Process reward model of single steps


@dataclass(frozen=True)
class StepValueLoss:
    """Mean over labelled steps of -v log sigmoid(s) - (1 - v) log sigmoid(-s), with v the value of the step.

    v is an estimate of the probability that the answer ends right (Math-Shepherd, 2312.08935), or a label of 0 or 1 (2305.20050). The
    tokens in the loss are those at which labelled steps are scored. Columns it reads: `step_value` [M], and `weight` [S] (1 / number of
    labelled steps of the whole mini-batch).
    """

    needs: ClassVar[frozenset[str]] = frozenset({"value"})
    scope: ClassVar[str] = "token"

    def __call__(self, view: LossView) -> tuple[Tensor, dict[str, Tensor]]:
        score = view.value
        assert score is not None, "the learner gives what `needs` names"
        wanted = view.column("step_value")
        loss = binary_cross_entropy_with_logits(score, wanted, reduction="none")
        sums = {"predicted": score.detach().sigmoid().sum(), "value": wanted.sum()}
        return (view.column("weight") * loss).sum(), sums
