"""Slot `loss`: right or wrong as a classification problem, whose logit is how much likelier an answer has become."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from burnish.algorithms.losses.sequences import logp_of, over_sequences, sequence_log_ratio
from burnish.algorithms.view import View
from burnish.config.errors import UserError
from burnish.core.segments import compact_ids, segment_count, segment_max, segment_min, segment_sum

EPS = 1e-6
"""Added to a group's deviation before dividing by it."""


def bce(
    view: View,
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
    psi = beta * (view.mean(logp_of(view)) if per_token else sequence_log_ratio(view, anchor))
    labels = _labels(view, alive)
    groups, num = compact_ids(view.sequence["group_ids"])
    scores = relative_scores(psi, groups, num, alive, normalise)
    weights = balanced_weights(labels, groups, num, alive) if class_weights else torch.ones_like(labels)
    loss = binary_cross_entropy_with_logits(scores, labels, weights, reduction="none")
    right = ((scores > 0) == (labels > 0)).to(loss.dtype)
    return view.spread(loss), {"bce_accuracy": over_sequences(view, right)}


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
    return centred / torch.where(varied, torch.where(varied, variance, one).sqrt() + EPS, one)


def balanced_weights(labels: Tensor, groups: Tensor, num: int, alive: Tensor) -> Tensor:
    """[S] G / (2 n_c) for a sample of class c in a group of G that has both classes, 1 in a group that has one."""
    size = segment_count(groups, num, alive)
    positive = segment_count(groups, num, alive & (labels > 0))
    mixed = ((positive > 0) & (positive < size))[groups]
    same = torch.where(labels > 0, positive[groups], (size - positive)[groups]).clamp(min=1)
    return torch.where(mixed, size[groups] / (2 * same), torch.ones_like(labels)).to(labels.dtype)


def _labels(view: View, alive: Tensor) -> Tensor:
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
