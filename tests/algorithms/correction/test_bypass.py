"""Bypass: the engine as anchor, weights and rejection made inside the loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView, loss_view
from burnish.algorithms.losses.ratios_and_clips import token_ratio
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import bypass_correction, decoupled_correction, ppo_clip

GEOMETRIC = {"seq_mean_k1": (0.8, 1.25)}
SETTINGS: list[dict[str, Any]] = [
    {"loss": loss, "weights": weights, "threshold": threshold, "reject": reject}
    for loss, weights, threshold in (
        ("ppo_clip", None, 2.0),
        ("reinforce", None, 2.0),
        ("reinforce", "token", (0.5, 5.0)),
        ("reinforce", "sequence", 2.0),
    )
    for reject in ({}, GEOMETRIC, {"token_k3": 0.05, "seq_max_k2": 2.0})
]


def run(
    batch: Batch, mode: str | None = "token-mean", **options: Any
) -> tuple[float, Tensor, dict[str, float], Tensor]:
    """The loss, its gradient [N] by the log-probs, the metrics, and the loss of each token."""
    if mode is not None:
        batch = batch.with_token(weight=aggregation_weights(batch, mode, 4))
    theta = batch.token["new"].clone().requires_grad_()
    view = loss_view(batch, theta[batch.loss_mask])
    anchor, advantages = view.column("behaviour_logp"), view.column("advantages")
    surrogate = clip(view, anchor, advantages) if options.get("loss", "ppo_clip") == "ppo_clip" else None
    per_token, marks = bypass_correction(view, anchor, advantages, surrogate, **options)
    loss = (view.column("weight") * per_token).sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    metrics = {k.removeprefix("rollout_corr/"): float(v.double().mean()) for k, v in marks.items()}
    return loss.item(), gradient, metrics, per_token.detach()


def clip(view: LossView, anchor: Tensor, advantages: Tensor) -> Tensor:
    return ppo_clip(view, token_ratio(view, anchor), advantages, anchor, dual=3.0)[0]


# --- the worked numbers ------------------------------------------------------------------------------------------------


def test_reinforce_with_sequence_weights(sampled: Batch) -> None:
    loss, gradient, metrics, _ = run(sampled, "seq-mean-token-sum", loss="reinforce", weights="sequence")
    assert loss == pytest.approx(-0.037515, abs=1e-5)
    w = torch.tensor([1.491825, 1.648721, 2, 2], dtype=torch.float64)
    expected = -(w * sampled.sequence["advantages"])[sampled.sequence_ids] / 4
    # The gradient is that of logp alone: a weight that carried one would add w A logp to it.
    assert gradient[sampled.loss_mask].tolist() == pytest.approx(expected[sampled.loss_mask].tolist(), abs=1e-6)
    assert bool((gradient[~sampled.loss_mask] == 0).all())
    assert metrics["rollout_is_mean"] == pytest.approx((4 * 1.491825 + 2 * 1.648721 + 14) / 13, abs=1e-5)


def test_ppo_clip_around_the_engine(sampled: Batch) -> None:
    loss, _, metrics, _ = run(sampled)
    assert loss == pytest.approx(0.140278, abs=1e-5)
    assert "rollout_rs_masked_fraction" not in metrics


def test_without_weights_reinforce_is_the_plain_policy_gradient(sampled: Batch) -> None:
    _, _, _, per_token = run(sampled, loss="reinforce")
    mask = sampled.loss_mask
    expected = -sampled.sequence["advantages"][sampled.sequence_ids][mask] * sampled.token["new"][mask]
    assert per_token.tolist() == expected.tolist()


# --- rejection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_rejected_tokens_have_no_loss_and_stay_in_the_denominator(sampled: Batch, loss: str) -> None:
    plain, full, _, every = run(sampled, loss=loss)
    _, gradient, metrics, per_token = run(sampled, loss=loss, reject={"seq_sum_k1": (0.5, 1.5)})
    kept = torch.tensor([True] * 4 + [False] * 9)  # the sums of new - behaviour are 0.4, 0.5, 1.15, 1.0
    assert per_token.tolist() == torch.where(kept, every, 0.0).tolist()
    where = sampled.loss_mask
    assert gradient[where].tolist() == torch.where(kept, full[where], 0.0).tolist()
    assert metrics["rollout_rs_masked_fraction"] == pytest.approx(9 / 13)
    assert plain != 0


# --- the rest ----------------------------------------------------------------------------------------------------------


def policies(ragged: Callable[..., Batch], seed: int, far: bool = True) -> Batch:
    """A ragged batch with a current policy, advantages, and the last sequence out of the loss."""
    batch = ragged(seed, far)
    out = batch.loss_mask.clone()
    out[batch.offsets[-2] :] = False
    generator = torch.Generator().manual_seed(seed + 1)
    return batch.with_token(new=batch.token["old_logp"], loss_mask=out).with_sequence(
        advantages=torch.randn(batch.num_sequences, generator=generator, dtype=torch.float64)
    )


@given(
    seed=st.integers(0, 10_000),
    options=st.sampled_from(SETTINGS),
    mode=st.sampled_from(["token-mean", "seq-mean-token-mean"]),
)
@settings(max_examples=40, deadline=None)
def test_the_gradient_is_the_same_for_any_split(
    ragged: Callable[..., Batch], seed: int, options: dict[str, Any], mode: str
) -> None:
    batch = policies(ragged, seed)
    batch = batch.with_token(weight=aggregation_weights(batch, mode))
    loss, gradient, _, _ = run(batch, None, **options)
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed))
    index = batch.with_token(index=torch.arange(batch.num_tokens))
    total, summed = 0.0, torch.zeros_like(gradient)
    for part in index.split(list(order.split([3, 1, 2, 1]))):
        one, slope, _, _ = run(part, None, **options)
        total += one
        summed[part.token["index"]] += slope
    assert total == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert summed.tolist() == pytest.approx(gradient.tolist(), rel=1e-9, abs=1e-12)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_marks_are_the_metrics_of_the_decoupled_form(ragged: Callable[..., Batch], seed: int) -> None:
    batch = policies(ragged, seed, far=False)
    batch = batch.select(torch.arange(batch.num_sequences - 1))  # without what is out of the loss
    reject = {"token_k2": 0.1}
    _, _, metrics, _ = run(batch, loss="reinforce", weights="token", reject=reject)
    expected = decoupled_correction(batch, weights="token", reject=reject).metrics
    assert metrics == pytest.approx({k: expected[f"rollout_corr/{k}"] for k in metrics}, rel=1e-9, abs=1e-12)
    assert len(metrics) == 7


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_normalised_weights_have_mean_1(sampled: Batch, level: str) -> None:
    batch = sampled.with_sequence(advantages=torch.ones(4, dtype=torch.float64))
    mode = "token-mean" if level == "token" else "seq-mean-token-mean"
    _, gradient, _, _ = run(batch, mode, loss="reinforce", weights=level, batch_normalise=True)
    assert float(gradient.sum()) == pytest.approx(-1)
    _, plain, _, _ = run(batch, mode, loss="reinforce", weights=level)
    assert float(plain.sum()) != pytest.approx(-1, abs=0.01)


def test_a_view_without_tokens_has_no_loss(sampled: Batch) -> None:
    empty = sampled.with_token(loss_mask=torch.zeros_like(sampled.loss_mask))
    view = loss_view(empty, torch.zeros(0, dtype=torch.float64, requires_grad=True))
    per_token, marks = bypass_correction(view, torch.zeros(0), torch.zeros(0), None, loss="reinforce")
    assert per_token.shape == (0,)
    assert marks == {}


def test_an_absurd_token_stays_finite(sampled: Batch) -> None:
    for far in (-100.0, -torch.inf):
        behaviour = sampled.token["behaviour_logp"].clone()
        behaviour[1] = far
        batch = sampled.with_token(behaviour_logp=behaviour)
        for weights in (None, "token", "sequence"):
            loss, gradient, metrics, _ = run(batch, loss="reinforce", weights=weights)
            assert all(map(math.isfinite, [loss, *gradient.tolist(), *metrics.values()]))
