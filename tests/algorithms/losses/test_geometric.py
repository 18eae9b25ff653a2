"""GMPO's clip: ALGORITHMS.md 5.6 and 17.24."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.algorithms.losses.loss_view import LossView
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from tests.algorithms.functions_with_defaults import log_geo_clip

Look = Callable[..., Any]
GMPO = {"ratio": "sequence", "clip": "log_geo", "scope": "sequence"}


def test_gmpo(f1: Batch, look: Look) -> None:
    seen = look(f1, "seq-mean-token-mean")
    loss, gradient, metrics = seen.run(**GMPO)
    assert loss == pytest.approx(0.183207, abs=1e-6)
    a, b, c, d = -0.065704, 0.152675, 0.099455, -0.039423
    assert gradient == pytest.approx([a, a, 0, a, b, b, c, 0, c, 0, d, d, d], abs=1e-6)
    assert metrics["pg_clipfrac"] == pytest.approx(2 / 13)
    assert metrics["pg_clipfrac_lower"] == pytest.approx(1 / 13)


def test_each_sequence_has_its_clipped_geometric_mean(f1: Batch, look: Look) -> None:
    view = look(f1).view
    anchor = view.column("old_logp")
    loss, _ = log_geo_clip(view, torch.full_like(anchor, torch.nan), view.column("advantages"), anchor)
    rho = [1.051271, 1.221403, 1.491825, 1.051271]
    expected = [-a * r for a, r in zip((1.0, -1.0, -0.8, 0.6), rho, strict=True)]
    assert loss[[0, 4, 6, 9]].tolist() == pytest.approx(expected, abs=1e-6)
    assert loss.tolist() == view.spread(loss[[0, 4, 6, 9]]).tolist()


def one(
    log_ratios: list[float], advantages: list[float], **options: float
) -> tuple[float, list[float], dict[str, Any]]:
    logp = torch.tensor(log_ratios, dtype=torch.float64, requires_grad=True)
    view = LossView(offsets_from_lengths(torch.tensor([len(log_ratios)])), {}, {}, logp)
    a = torch.tensor(advantages, dtype=torch.float64)
    loss, marks = log_geo_clip(view, logp, a, torch.zeros_like(a), **options)
    return loss[0].item(), torch.autograd.grad(loss[0], logp)[0].tolist(), {k: v.tolist() for k, v in marks.items()}


def test_only_the_side_that_could_run_away_is_cut() -> None:
    """Asymmetric bounds: each side has its own."""
    loss, gradient, marks = one([0.5, -0.5], [1.0, 1.0], low=0.1, high=0.3)
    assert loss == pytest.approx(-math.exp((0.3 - 0.5) / 2))
    assert gradient == pytest.approx([0, loss / 2])
    assert marks == {"pg_clipfrac": [True, False], "pg_clipfrac_lower": [False, False]}
    loss, gradient, marks = one([0.5, -0.5], [-1.0, -1.0], low=0.1, high=0.3)
    assert loss == pytest.approx(math.exp((0.5 - 0.1) / 2))
    assert gradient == pytest.approx([loss / 2, 0])
    assert marks == {"pg_clipfrac": [False, False], "pg_clipfrac_lower": [False, True]}


def test_the_sequence_counts_with_its_mean_advantage_and_each_token_is_cut_by_its_own() -> None:
    loss, _, _ = one([0.5, -0.5], [2.0, -1.0], low=0.1, high=0.3)
    assert loss == pytest.approx(-0.5 * math.exp((0.3 - 0.1) / 2))


def test_a_token_at_the_bound_is_not_cut() -> None:
    _, gradient, marks = one([0.4], [1.0])
    assert gradient != [0.0]
    assert marks["pg_clipfrac"] == [False]


def test_log_ratios_are_used_as_they_are() -> None:
    """No clamp at 20: a positive token that fell far keeps its (vanishing) gradient."""
    loss, gradient, _ = one([-30.0], [1.0])
    assert loss == pytest.approx(-math.exp(-30), rel=1e-12)
    assert gradient == pytest.approx([-math.exp(-30)], rel=1e-12)
