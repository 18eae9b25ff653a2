"""The losses of PRIME's implicit process reward model."""

from __future__ import annotations

import math

import pytest
import torch

from burnish.algorithms.losses.model_losses import outcome_contrast, outcome_cross_entropy

Q = torch.tensor([0.4 - 0.2 + 0.6 + 0.2, -0.3 + 0.1, 0.2 + 0.5 - 0.4, -0.6 + 0.1 + 0.2 + 0.3], dtype=torch.float64)
RIGHT = torch.tensor([1, 0, 0, 1])


def test_cross_entropy_of_the_worked_example() -> None:
    assert float(outcome_cross_entropy(Q, RIGHT, beta=0.05).mean()) == pytest.approx(0.68761, abs=1e-5)


def test_contrast_is_with_the_mean_of_the_other_label_of_the_group() -> None:
    found = outcome_contrast(Q, RIGHT, torch.zeros(4, dtype=torch.int64), beta=0.5)
    score = (0.5 * Q).tolist()
    wrong, right = (score[1] + score[2]) / 2, (score[0] + score[3]) / 2
    gaps = [score[0] - wrong, right - score[1], right - score[2], score[3] - wrong]
    assert found.tolist() == pytest.approx([math.log1p(math.exp(-gap)) for gap in gaps])


def test_a_group_of_one_label_has_nothing_to_contrast() -> None:
    groups = torch.tensor([7, 3, 3, 7])
    assert outcome_contrast(Q, RIGHT, groups, beta=0.05).tolist() == [0, 0, 0, 0]
    assert float(outcome_contrast(Q, torch.tensor([1, 0, 1, 1]), groups, beta=0.05)[1]) > 0


def test_raising_right_answers_lowers_both_losses() -> None:
    group_ids = torch.zeros(4, dtype=torch.int64)
    for loss in (
        lambda q, r: outcome_cross_entropy(q, r, beta=0.05),
        lambda q, r: outcome_contrast(q, r, group_ids, beta=0.05),
    ):
        q = Q.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(q, RIGHT).sum(), q)
        assert bool((gradient[RIGHT == 1] < 0).all())
        assert bool((gradient[RIGHT == 0] > 0).all())
