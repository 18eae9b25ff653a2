"""Losses of an implicit process reward model: a policy whose log-ratio to its reference is read as a reward (PRIME, 2502.01456).

With q_t = log pi_phi(y_t) - log pi_ref(y_t) and Q = beta sum_t q_t, the model is trained on outcome labels alone; its
token rewards beta q_t are what `advantages.process.prime_rloo` takes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, logsigmoid

from burnish.core.segments import compact_ids, segment_mean


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
