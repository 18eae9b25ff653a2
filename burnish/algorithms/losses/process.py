"""Losses of an implicit process reward model: a policy whose log-ratio to its reference is read as a reward (PRIME, 2502.01456).

With q_t = log pi_phi(y_t) - log pi_ref(y_t) and Q = beta sum_t q_t, the model is trained on outcome labels alone; its
token rewards beta q_t are what `advantages.process.prime_rloo` takes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from burnish.algorithms.view import View
from burnish.core.segments import compact_ids, segment_mean, segment_sum


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
class OutcomeLoss:
    """Either loss on the answers of a batch, whose weights are fixed before it is split; groups stay together.

    Columns it reads: `prior_logp` [M], log-probs under the model's frozen start; `answer_ids` [S], which sequences are one
    answer; `outcome` and `weight` [S], the same in all sequences of an answer.
    """

    kind: str = "cross_entropy"
    beta: float = 0.05

    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "groups"

    def __call__(self, view: View) -> tuple[Tensor, dict[str, Tensor]]:
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


def verdicts(log_ratio: Tensor, right: Tensor, rounding: float) -> dict[str, float]:
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
