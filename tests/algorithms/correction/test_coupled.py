"""Coupled correction: the worked numbers, its bounds and its veto."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.correction.weights_and_rejection import CorrectionResult, sequence_weights
from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.losses.ratios_and_clips import token_ratio
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import coupled_correction, ppo_clip

PLAIN = [[1.051271, 0.951229, 1.105171, 1], [1, 1.105171], [0.951229, 1, 2], [1, 1, 0.904837, 1.105171]]
TOKEN = {
    "rollout_is_veto_fraction": 0,
    "rollout_is_catastrophic_token_fraction": 0,
    "rollout_is_mean": 1.167557,
    "rollout_is_max": 3.004166,
    "rollout_is_min": 0.904837,
    "rollout_is_ratio_fraction_high": 0.076923,
    "rollout_is_ratio_fraction_low": 0,
    "rollout_is_std": 0.269414,
    "rollout_is_eff_sample_size": 0.942456,
    "rollout_is_seq_mean": 1.183451,
    "rollout_is_seq_std": 0.312901,
    "rollout_is_seq_max": 1.651798,
    "rollout_is_seq_min": 1.002502,
    "rollout_is_seq_max_deviation": 0.651798,
    "rollout_is_seq_fraction_high": 0,
    "rollout_is_seq_fraction_low": 0,
    "rollout_is_p25": 1,
    "rollout_is_p50": 1,
    "rollout_is_p75": 1.105171,
    "rollout_is_p95": 1.864769,
    "rollout_is_p99": 2.776287,
}
DIVERGENCE = {
    "mismatch_training_ppl": 3.007626,
    "mismatch_training_log_ppl": 1.08125,
    "mismatch_rollout_ppl": 3.481186,
    "mismatch_rollout_log_ppl": 1.1875,
    "mismatch_kl": -0.096154,
    "mismatch_k3_kl": 0.071404,
    "mismatch_log_ppl_diff": -0.10625,
    "mismatch_log_ppl_abs_diff": 0.10625,
    "mismatch_log_ppl_diff_max": 0,
    "mismatch_log_ppl_diff_min": -0.35,
    "mismatch_ppl_ratio": 0.907807,
}
MASKED = ("mismatch/rollout_is_masked_fraction", "mismatch/rollout_is_seq_masked_fraction")
LEVELS: list[dict[str, Any]] = [
    {"level": level, "mode": mode, "target": target, "threshold": threshold}
    for level, threshold in (("token", 2.0), ("sequence", 3.0), ("geometric", 1.05))
    for mode in ("truncate", "mask")
    for target in ("weight", "mask")
]
Rows = Callable[[Batch, torch.Tensor], list[list[float]]]


def has(found: dict[str, float], expected: dict[str, float]) -> None:
    assert {k: found[f"mismatch/{k}"] for k in expected} == pytest.approx(expected, abs=1e-5)


def weights_of(found: CorrectionResult) -> torch.Tensor:
    assert found.weights is not None
    return found.weights


def near(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(r) for r in found] == [len(r) for r in expected]
    assert [x for r in found for x in r] == pytest.approx([x for r in expected for x in r], abs=1e-5)


# --- the worked numbers ------------------------------------------------------------------------------------------------


def test_token_weights_truncated(sampled: Batch, rows: Rows) -> None:
    found = coupled_correction(sampled)
    near(rows(sampled, weights_of(found)), PLAIN)
    has(found.metrics, TOKEN | DIVERGENCE)
    assert set(found.metrics) == {f"mismatch/{k}" for k in TOKEN | DIVERGENCE}
    assert found.keep.tolist() == sampled.action_mask.tolist()


def test_token_weights_masked(sampled: Batch, rows: Rows) -> None:
    found = coupled_correction(sampled, mode="mask")
    near(rows(sampled, weights_of(found)), [*PLAIN[:2], [0.951229, 1, 0], PLAIN[3]])
    has(found.metrics, TOKEN | DIVERGENCE)
    assert [found.metrics[k] for k in MASKED] == pytest.approx([0.076923, 0.25], abs=1e-5)


def test_sequence_weights(sampled: Batch, rows: Rows) -> None:
    found = coupled_correction(sampled, level="sequence")
    near([r[:1] for r in rows(sampled, weights_of(found))], [[1.105171], [1.105171], [2], [1]])
    assert all(len(set(r)) == 1 for r in rows(sampled, weights_of(found)))
    expected = {"mean": 1.477229, "max": 2.857651, "min": 1, "std": 0.397316, "eff_sample_size": 0.912031}
    expected |= {"ratio_fraction_high": 0.25, "seq_std": 0.895143, "p95": 2.857651}
    has(found.metrics, {f"rollout_is_{k}": v for k, v in expected.items()})
    found = coupled_correction(sampled, level="sequence", mode="mask")
    near([r[:1] for r in rows(sampled, weights_of(found))], [[1.105171], [1.105171], [0], [1]])
    assert [found.metrics[k] for k in MASKED] == pytest.approx([0.230769, 0.25], abs=1e-5)


def test_geometric_weights(sampled: Batch, rows: Rows) -> None:
    found = coupled_correction(sampled, level="geometric", threshold=1.05)
    near([r[:1] for r in rows(sampled, weights_of(found))], [[1.025315], [1.05], [1.05], [1]])
    expected = {"mean": 1.112385, "max": 1.419068, "eff_sample_size": 0.999594, "ratio_fraction_high": 0.384615}
    has(found.metrics, {f"rollout_is_{k}": v for k, v in expected.items()})
    found = coupled_correction(sampled, level="geometric", threshold=1.05, mode="mask")
    near([r[:1] for r in rows(sampled, weights_of(found))], [[1.025315], [0], [0], [1]])
    assert found.metrics[MASKED[0]] == pytest.approx(0.384615, abs=1e-5)


@pytest.mark.parametrize("target", ["weight", "mask"])
def test_a_veto_rejects_the_whole_row(sampled: Batch, rows: Rows, target: str) -> None:
    old = sampled.token["old_logp"].clone()
    old[7] = -11.0
    batch = sampled.with_token(old_logp=old)
    found = coupled_correction(batch, target=target)
    near(rows(batch, weights_of(found)), [PLAIN[0], [0, 0], *PLAIN[2:]])
    expected = {"veto_fraction": 0.25, "catastrophic_token_fraction": 0.076923, "eff_sample_size": 0.918084}
    has(found.metrics, {f"rollout_is_{k}": v for k, v in expected.items()})
    assert found.metrics["mismatch/rollout_is_min"] == pytest.approx(6.1e-5, abs=1e-6)
    assert rows(batch, found.keep)[1] == ([True, True] if target == "weight" else [False, False])
    assert rows(batch, found.keep)[0] == [True] * 4
    spared = coupled_correction(batch, veto=None)
    assert rows(batch, weights_of(spared))[1] == pytest.approx([1, 6.128e-5], abs=1e-6)
    assert spared.metrics["mismatch/rollout_is_veto_fraction"] == 0
    assert spared.metrics["mismatch/rollout_is_catastrophic_token_fraction"] == 0


def test_the_veto_looks_at_tokens_at_every_level(build: Callable[..., Batch]) -> None:
    batch = build([[-12.0, -0.5], [-1.0]], [[-2.0, -10.5], [-1.0]])  # l = -10, 10: the row's own ratio is 1
    for level in ("token", "sequence", "geometric"):
        assert weights_of(coupled_correction(batch, level=level)).tolist() == [0, 0, 1]


def dual_clip(batch: Batch, found: CorrectionResult, weighted: bool = True) -> float:
    """Dual-clip PPO (c=3), token-mean, with the correction."""
    batch = batch.with_token(loss_mask=batch.loss_mask & found.keep)
    view = loss_view(batch, batch.token["new"][batch.loss_mask])
    anchor, advantages = view.column("old_logp"), view.column("advantages")
    per_token, _ = ppo_clip(view, token_ratio(view, anchor), advantages, anchor, dual=3.0)
    if weighted:
        per_token = per_token * weights_of(found)[batch.loss_mask]
    return float((aggregation_weights(batch, "token-mean")[batch.loss_mask] * per_token).sum())


def test_the_loss_with_weights(sampled: Batch) -> None:
    assert dual_clip(sampled, coupled_correction(sampled)) == pytest.approx(0.098355, abs=1e-5)


def test_what_is_rejected_is_counted_or_not(sampled: Batch) -> None:
    assert dual_clip(sampled, coupled_correction(sampled, mode="mask")) == pytest.approx(-0.067782, abs=1e-5)
    out = coupled_correction(sampled, mode="mask", target="mask")
    assert dual_clip(sampled, out) == pytest.approx(-0.07343, abs=1e-5)
    assert dual_clip(sampled, out, weighted=False) == pytest.approx(-0.068089, abs=1e-5)


def test_a_loss_of_sequences_takes_the_geometric_mean_of_the_weights(sampled: Batch) -> None:
    weights = weights_of(coupled_correction(sampled))[sampled.action_mask]
    offsets = torch.tensor([0, 4, 6, 6, 9, 13])  # with a sequence that has no token
    expected = [1.025315, 1.051271, 1, 1.239096, 1]
    assert sequence_weights(weights, offsets).tolist() == pytest.approx(expected, abs=1e-5)
    assert sequence_weights(torch.zeros(2), torch.tensor([0, 2])).tolist() == pytest.approx([1e-10], rel=1e-3)


# --- what it is not ----------------------------------------------------------------------------------------------------


def test_not_applied_it_only_reports(sampled: Batch) -> None:
    found = coupled_correction(sampled, apply=False, mode="mask", target="mask")
    assert found.weights is None
    assert found.keep is sampled.action_mask
    assert found.metrics == coupled_correction(sampled, mode="mask").metrics


def test_the_lower_bound_is_of_masks_and_metrics(sampled: Batch, rows: Rows) -> None:
    found = coupled_correction(sampled, lower=0.96, mode="mask")
    assert rows(sampled, weights_of(found))[0] == pytest.approx([1.051271, 0, 1.105171, 1], abs=1e-5)
    assert found.metrics["mismatch/rollout_is_ratio_fraction_low"] == pytest.approx(3 / 13)
    assert (
        weights_of(coupled_correction(sampled, lower=0.96)).tolist() == weights_of(coupled_correction(sampled)).tolist()
    )


def test_a_weight_at_a_bound_is_kept(build: Callable[..., Batch]) -> None:
    # The ratios are exactly 1; bounds of exactly 1 keep them.
    batch = build([[-1.0, -2.0]], [[-1.0, -2.0]])
    found = coupled_correction(batch, threshold=1.0, lower=1.0, mode="mask")
    assert weights_of(found).tolist() == [1, 1]
    assert found.metrics["mismatch/rollout_is_ratio_fraction_high"] == 0


def test_weights_come_in_the_type_of_the_log_probs(sampled: Batch) -> None:
    narrow = sampled.with_token(**{k: sampled.token[k].float() for k in ("old_logp", "behaviour_logp")})
    assert weights_of(coupled_correction(narrow)).dtype == torch.float32
    assert weights_of(coupled_correction(sampled)).dtype == torch.float64
    half = sampled.with_token(**{k: sampled.token[k].bfloat16() for k in ("old_logp", "behaviour_logp")})
    assert weights_of(coupled_correction(half)).dtype == torch.float32


# --- invariants --------------------------------------------------------------------------------------------------------


@given(seed=st.integers(0, 10_000), options=st.sampled_from(LEVELS))
@settings(max_examples=40, deadline=None)
def test_bounds_only_lower_weights_and_masks_only_reject(
    ragged: Callable[..., Batch], seed: int, options: dict[str, Any]
) -> None:
    batch = ragged(seed)
    raw = weights_of(coupled_correction(batch, level=options["level"], threshold=1e30, veto=None))
    cut = weights_of(coupled_correction(batch, level=options["level"], threshold=options["threshold"]))
    found = coupled_correction(batch, **options)
    weights = weights_of(found)
    assert bool((cut <= raw).all())
    assert not bool(((weights > 0) & (cut == 0)).any()), "what a mask keeps, truncation keeps"
    assert bool((weights <= options["threshold"]).all())
    assert bool((weights[~batch.action_mask] == 0).all())
    assert not bool(found.keep[~batch.action_mask].any())
    assert bool(((weights > 0) == found.keep).all()) or options["target"] == "weight"


@given(seed=st.integers(0, 10_000), options=st.sampled_from(LEVELS))
@settings(max_examples=25, deadline=None)
def test_the_order_of_sequences_does_not_matter(
    ragged: Callable[..., Batch], seed: int, options: dict[str, Any]
) -> None:
    batch = ragged(seed)
    order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(seed))
    one, other = coupled_correction(batch, **options), coupled_correction(batch.select(order), **options)
    moved = batch.with_token(weights=weights_of(one), keep=one.keep).select(order)
    assert moved.token["weights"].tolist() == pytest.approx(weights_of(other).tolist(), rel=1e-9)
    assert moved.token["keep"].tolist() == other.keep.tolist()
    assert one.metrics == pytest.approx(other.metrics, rel=1e-9, abs=1e-12)


def test_no_gradient_reaches_a_weight(sampled: Batch) -> None:
    old = sampled.token["old_logp"].clone().requires_grad_()
    assert not weights_of(coupled_correction(sampled.with_token(old_logp=old))).requires_grad
