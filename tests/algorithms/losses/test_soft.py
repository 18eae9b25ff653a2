"""SAPO's gate: ALGORITHMS.md 5.8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.algorithms.losses.loss_view import LossView
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import soft_clip

Look = Callable[..., Any]
GRADIENT = [-0.07541, -0.040777, -0.092921, -0.0625, 0.10142, 0.190097, 0.052746, 0.012651, 0.087022, -0.040571, -0.0375, -0.04133, -0.027319]  # fmt: skip


def gate(ratio: float, advantage: float, **options: float) -> tuple[float, float]:
    """The gate and its slope."""
    r = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    a = torch.tensor([advantage], dtype=torch.float64)
    loss, marks = soft_clip(LossView(torch.tensor([0, 1]), {}, {}, r), r, a, torch.zeros_like(a), **options)
    assert marks == {}
    return (-loss / a).item(), float(torch.autograd.grad(-(loss / a).sum(), r)[0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1, 1, 2), (1.5, 1, 2.489837), (1.5, -1, 2.393585), (0.5, -1, 1.415938)]
)
def test_gate(ratio: float, advantage: float, expected: float) -> None:
    assert gate(ratio, advantage)[0] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("advantage", [2.0, -0.5])
def test_the_slope_is_one_on_policy_and_falls_with_tau(advantage: float) -> None:
    assert gate(1.0, advantage, tau_positive=3.0, tau_negative=5.0)[1] == pytest.approx(1, abs=1e-12)
    mild, steep = (gate(2.0, advantage, tau_positive=t, tau_negative=t)[1] for t in (1.0, 3.0))
    assert 0 < steep < mild < 1


def test_sapo(f1: Batch, look: Look) -> None:
    seen = look(f1, "seq-mean-token-mean")
    loss, gradient, metrics = seen.run(clip="soft")
    assert loss == pytest.approx(0.129412, abs=1e-6)
    assert gradient == pytest.approx(GRADIENT, abs=1e-6)
    assert "pg_clipfrac" not in metrics


def test_sapo_on_policy(f1: Batch, look: Look) -> None:
    same = f1.with_token(new=f1.token["old_logp"])
    assert look(same, "seq-mean-token-mean").run(clip="soft")[0] == pytest.approx(0.057143, abs=1e-6)


def test_the_aggregation_is_obeyed(f1: Batch, look: Look) -> None:
    means = {mode: look(f1, mode).run(clip="soft")[0] for mode in ("token-mean", "seq-mean-token-mean", "token-sum")}
    assert means["token-sum"] == pytest.approx(13 * means["token-mean"])
    assert means["token-mean"] != pytest.approx(means["seq-mean-token-mean"], abs=1e-3)
