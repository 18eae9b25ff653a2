"""Ratios: the worked numbers of ALGORITHMS.md 1.4 and 5, and what the clamps do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.ratios_and_clips import (
    RATIOS,
    sequence_product_ratio,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths

Look = Callable[..., Any]


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got.detach(), torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


def of_log_ratios(rows: list[list[float]]) -> tuple[LossView, Tensor]:
    """A view whose log-ratios are these, and the leaf under its log-probs; the anchor is 0."""
    logp = torch.tensor([x for row in rows for x in row], dtype=torch.float64, requires_grad=True)
    return LossView(offsets_from_lengths(torch.tensor([len(row) for row in rows])), {}, {}, logp), logp


def ratio_and_gradient(name: str, rows: list[list[float]]) -> tuple[list[float], list[float]]:
    view, logp = of_log_ratios(rows)
    function = RATIOS[name]
    assert function is not None
    ratio = function(view, torch.zeros_like(logp))
    return ratio.tolist(), torch.autograd.grad(ratio.sum(), logp)[0].tolist()


def test_token_ratios(f1: Batch, look: Look) -> None:
    view = look(f1).view
    expected = [1.221403, 0.67032, 1.648721, 1, 0.818731, 1.822119, 3.669297, 0.22313, 1.349859, 3.320117, 1, 1.105171, 0.740818]  # fmt: skip
    close(token_ratio(view, view.column("old_logp")), expected)


@pytest.mark.parametrize("function", [sequence_ratio, sequence_token_ratio])
def test_a_sequence_has_the_geometric_mean_of_its_ratios(f1: Batch, look: Look, function: Any) -> None:
    view = look(f1).view
    a, b, c, d = 1.077884, 1.221403, 1.033895, 1.284025
    close(function(view, view.column("old_logp")), [a] * 4 + [b] * 2 + [c] * 3 + [d] * 4)


def test_a_sequence_product_has_the_sum_of_log_ratios(f1: Batch, look: Look) -> None:
    view = look(f1).view
    a, b, c, d = (math.exp(x) for x in (0.3, 0.4, 0.1, 1))
    close(sequence_product_ratio(view, view.column("old_logp")), [a] * 4 + [b] * 2 + [c] * 3 + [d] * 4, atol=1e-12)


def test_where_the_gradient_of_a_sequence_ratio_goes() -> None:
    s = math.exp(0.3)
    # Each token's ratio is the same s; the sum over the two tokens, differentiated:
    assert ratio_and_gradient("sequence", [[0.2, 0.4]])[1] == pytest.approx([s, s])
    assert ratio_and_gradient("seq_token", [[0.2, 0.4]])[1] == pytest.approx([s, s])
    assert ratio_and_gradient("seq_prod", [[0.2, 0.4]])[1] == pytest.approx([2 * math.exp(0.6)] * 2)
    view, logp = of_log_ratios([[0.2, 0.4]])
    first = torch.autograd.grad(sequence_token_ratio(view, torch.zeros_like(logp))[0], logp)[0]
    assert first.tolist() == pytest.approx([s, 0.0])


def test_without_its_stop_gradient_seq_token_would_have_twice_the_gradient() -> None:
    view, logp = of_log_ratios([[0.2, 0.4]])
    leaky = sequence_ratio(view, torch.zeros_like(logp)) * (logp - logp.detach()).exp()
    right = ratio_and_gradient("seq_token", [[0.2, 0.4]])[1]
    assert torch.autograd.grad(leaky.sum(), logp)[0].tolist() == pytest.approx([2 * x for x in right])


@pytest.mark.parametrize("gap", [20.1, 25.0, 1e6])
def test_an_absurd_token_neither_overflows_nor_has_a_gradient(gap: float) -> None:
    ratio, gradient = ratio_and_gradient("token", [[gap, -gap]])
    assert ratio == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-12)
    assert gradient == [0.0, 0.0]


def test_at_the_clamp_a_token_still_has_its_gradient() -> None:
    ratio, gradient = ratio_and_gradient("token", [[20.0, -20.0]])
    assert gradient == pytest.approx(ratio)


@pytest.mark.parametrize("name", ["sequence", "seq_token", "seq_prod"])
def test_an_absurd_sequence_neither_overflows_nor_has_a_gradient(name: str) -> None:
    ratio, gradient = ratio_and_gradient(name, [[1000.0, 0.0], [0.5, 0.5], [-1000.0, 0.0]])
    assert ratio[:2] == pytest.approx([math.exp(10)] * 2, rel=1e-12)
    assert gradient[:2] == [0.0, 0.0]
    assert gradient[2] > 0
    assert ratio[4:] == pytest.approx([0.0, 0.0], abs=1e-200)


@pytest.mark.parametrize("name", ["sequence", "seq_token"])
def test_a_long_sequence_is_judged_by_its_mean(name: str) -> None:
    ratio, _ = ratio_and_gradient(name, [[0.1] * 300])
    assert ratio == pytest.approx([math.exp(0.1)] * 300)


@pytest.mark.parametrize("name", ["token", "sequence", "seq_token", "seq_prod"])
def test_a_sequence_without_a_token_is_no_trouble(name: str) -> None:
    with_empty, gradient = ratio_and_gradient(name, [[], [0.2, 0.4], [], [-0.3], []])
    without, expected = ratio_and_gradient(name, [[0.2, 0.4], [-0.3]])
    assert with_empty == without
    assert gradient == expected
    assert ratio_and_gradient(name, [[]]) == ([], [])
