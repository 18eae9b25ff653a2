"""CISPO and DPPO: ALGORITHMS.md 5.7, 9.7 and 16, and the stop-gradient they live by."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.losses.ratios_and_clips import token_ratio
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import dppo_kl_clip, dppo_tv_clip, is_weight_clip

Look = Callable[..., Any]
CISPO = [-0.092308, -0.051563, -0.092308, -0.076923, 0.062979, 0.092308, 0.073846, 0.013731, 0.073846, -0.055385, -0.046154, -0.051008, -0.034192]  # fmt: skip
TV_KEPT = [1, 1, 1, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1]
KL_KEPT = [1, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1]


def sg(clip: str, ratio: str = "token", **options: Any) -> dict[str, Any]:
    return {"ratio": ratio, "clip": clip, "clip_options": options, "loss": "sg_logprob"}


def weight_of(view: LossView, function: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    anchor = view.column("old_logp")
    return function(view, token_ratio(view, anchor), view.column("advantages"), anchor, **options)


def one(new: float, old: float, advantage: float) -> LossView:
    columns = {k: torch.tensor([v], dtype=torch.float64) for k, v in (("old_logp", old), ("advantages", advantage))}
    return LossView(torch.tensor([0, 1]), columns, {}, torch.tensor([new], dtype=torch.float64, requires_grad=True))


# --- CISPO -----------------------------------------------------------------------------------------------------------


def test_cispo(f1: Batch, look: Look) -> None:
    loss, gradient, metrics = look(f1).run(**sg("is_weight"))
    assert loss == pytest.approx(0.143066, abs=1e-6)
    assert gradient == pytest.approx(CISPO, abs=1e-6)
    assert metrics["pg_clipfrac"] == pytest.approx(6 / 13)  # r above 1.2
    assert look(f1).run(**sg("is_weight", cap=5.0))[0] == pytest.approx(0.178252, abs=1e-6)


def test_cispo_without_its_stop_gradient_fails_the_oracle(f1: Batch, look: Look) -> None:
    seen = look(f1)
    view = seen.view
    r = token_ratio(view, view.column("old_logp")).clamp(max=1.2)
    loss = (-r * view.column("advantages") * view.logp).mean()
    gradient = seen.gradient(loss)[view.token["index"]].tolist()
    assert loss.item() == pytest.approx(0.143066, abs=1e-6)
    assert gradient[:4] == pytest.approx([-0.092308, -0.005156, -0.092308, -0.069231], abs=1e-6)
    assert gradient != pytest.approx(CISPO, abs=1e-3)


@pytest.mark.parametrize("function", [is_weight_clip, dppo_tv_clip, dppo_kl_clip])
def test_weights_carry_no_gradient(f1: Batch, look: Look, function: Any) -> None:
    view = look(f1).view
    assert view.logp.requires_grad
    assert not weight_of(view, function)[0].requires_grad


def test_the_lower_bound_of_the_weight(f1: Batch, look: Look) -> None:
    weight, marks = weight_of(look(f1).view, is_weight_clip, low=0.2)
    expected = [1.2, 0.8, 1.2, 1, 0.818731, 1.2, 1.2, 0.8, 1.2, 1.2, 1, 1.105171, 0.8]
    assert weight.tolist() == pytest.approx(expected, abs=1e-6)
    assert int(marks["pg_clipfrac"].sum()) == 9


def test_the_ratio_of_whole_sequences_truncated(f1: Batch, look: Look) -> None:
    """Anchored at the sampler this is bypass mode's policy gradient with truncated sequence weights (9.7)."""
    sampled = [-1.05, -0.45, -2.1, -0.1, -0.7, -1.3, -1.75, -0.9, -2.6, -2.2, -0.4, -0.5, -1.2]
    old = f1.token["old_logp"].clone()
    old[f1.loss_mask] = torch.tensor(sampled, dtype=torch.float64)
    seen = look(f1.with_token(old_logp=old), "seq-mean-token-sum")
    loss, gradient, _ = seen.run(**sg("is_weight", "seq_prod", cap=2.0))
    assert loss == pytest.approx(-0.037515, abs=1e-6)
    a, b, c, d = (-w * x / 4 for w, x in ((1.491825, 1), (1.648721, -1), (2, -0.8), (2, 0.6)))
    assert gradient == pytest.approx([a] * 4 + [b] * 2 + [c] * 3 + [d] * 4, abs=1e-6)


# --- DPPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "function", "bound", "kept", "expected"),
    [("dppo_tv", dppo_tv_clip, 0.2, TV_KEPT, 0.057971), ("dppo_kl", dppo_kl_clip, 0.02, KL_KEPT, -0.132266)],
)
def test_dppo(f1: Batch, look: Look, name: str, function: Any, bound: float, kept: list[int], expected: float) -> None:
    seen = look(f1)
    weight, marks = weight_of(seen.view, function, low=bound, high=bound)
    ratio = token_ratio(seen.view, seen.view.column("old_logp")).tolist()
    assert weight.tolist() == pytest.approx([r * k for r, k in zip(ratio, kept, strict=True)], abs=1e-12)
    assert marks["pg_clipfrac"].tolist() == [not k for k in kept]
    loss, gradient, metrics = seen.run(**sg(name, low=bound, high=bound))
    assert loss == pytest.approx(expected, abs=1e-6)
    weights = [-w * a / 13 for w, a in zip(weight.tolist(), seen.view.column("advantages").tolist(), strict=True)]
    assert gradient == pytest.approx(weights, abs=1e-12)
    assert metrics["pg_clipfrac"] == pytest.approx(kept.count(0) / 13)


def test_the_cap_of_a_kept_ratio(f1: Batch, look: Look) -> None:
    weight, marks = weight_of(look(f1).view, dppo_tv_clip, cap=1.5)
    assert float(weight.max()) == 1.5
    # Rows 0 and 1 have a kept ratio above 1.5 each, row 2 another; that of row 3 is not kept.
    assert marks["pg_clipfrac_lower"].nonzero().squeeze(1).tolist() == [2, 5, 6]


@pytest.mark.parametrize("function", [dppo_tv_clip, dppo_kl_clip])
@pytest.mark.parametrize(("advantage", "far", "kept"), [(1, 0.95, 0), (1, 0.05, 1), (-1, 0.05, 0), (-1, 0.95, 1)])
def test_only_moving_further_away_is_stopped(function: Any, advantage: float, far: float, kept: float) -> None:
    view = one(math.log(far), math.log(0.5), advantage)
    assert float(weight_of(view, function)[0] > 0) == kept


@pytest.mark.parametrize("function", [dppo_tv_clip, dppo_kl_clip])
def test_each_side_has_its_own_bound(function: Any) -> None:
    up, down = one(math.log(0.9), math.log(0.5), 1.0), one(math.log(0.1), math.log(0.5), -1.0)
    kept = [float(weight_of(v, function, low=lo, high=hi)[0] > 0) for lo, hi in ((0, 9), (9, 0)) for v in (up, down)]
    assert kept == [1, 0, 0, 1]


def test_a_rare_token_may_move_by_a_large_ratio() -> None:
    view = one(math.log(0.01), math.log(0.0001), 1.0)
    assert float(weight_of(view, dppo_tv_clip)[0]) == pytest.approx(20)  # r = 100 is kept, at the cap
    assert PolicyLoss(clip_options={"low": 0.2})(with_terms(view))[0].item() == pytest.approx(-1.2)


def with_terms(view: LossView) -> LossView:
    return LossView(view.offsets, {**view.token, "weight": torch.ones(1)}, {}, view.logp, torch.zeros(1))


@pytest.mark.parametrize("new", [0.0, -1e-12, -60.0])
@pytest.mark.parametrize("old", [0.0, -1e-12, -60.0])
@pytest.mark.parametrize("function", [dppo_tv_clip, dppo_kl_clip])
def test_certain_and_impossible_tokens_stay_finite(function: Any, new: float, old: float) -> None:
    for dtype in (torch.float32, torch.float64):
        view = one(new, old, 1.0)
        columns = {k: v.to(dtype) for k, v in view.token.items()}
        assert view.logp is not None
        weight, _ = weight_of(LossView(view.offsets, columns, {}, view.logp.to(dtype)), function)
        assert bool(torch.isfinite(weight).all())
        assert float(weight) <= 20


def test_a_log_prob_that_rounds_above_zero_is_a_certain_token() -> None:
    view = one(1e-6, -1e-3, 1.0)
    assert float(weight_of(view, dppo_kl_clip)[0]) == pytest.approx(1.001, abs=1e-3)
