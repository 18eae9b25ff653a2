"""Decoupled correction: the worked numbers of weights, normalisation and divergences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.correction.weights_and_rejection import CorrectionResult
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import decoupled_correction

Rows = Callable[[Batch, torch.Tensor], list[list[float]]]
NAMES = ["mean", "max", "min", "ratio_fraction_high", "ratio_fraction_low", "std", "eff_sample_size", "seq_mean"]
NAMES += ["seq_std", "seq_max", "seq_min", "seq_max_deviation", "seq_fraction_high", "seq_fraction_low"]
TOKEN = [1.090314, 2, 0.904837, 0.076923, 0, 0.269414, 0.942456, 1.09977, 0.146307, 1.317076, 1.002502, 0.317076, 0, 0]
SEQUENCE = [1.27931, 2.857651, 1, 0.25, 0, 0.397316, 0.912031, 1.302585, 0.467579, 2, 1, 1, 0.25, 0]
DIVERGENCE = {
    "training_ppl": 3.007626,
    "training_log_ppl": 1.08125,
    "rollout_ppl": 3.481186,
    "rollout_log_ppl": 1.1875,
    "kl": -0.096154,
    "k3_kl": 0.071404,
    "log_ppl_diff": -0.10625,
    "log_ppl_abs_diff": 0.10625,
    "log_ppl_diff_max": 0,
    "log_ppl_diff_min": -0.35,
    "ppl_ratio": 0.907807,
    "chi2_token": 0.647908,
    "chi2_seq": 1.902244,
}


def importance(found: CorrectionResult) -> dict[str, float]:
    stem = "rollout_corr/rollout_is_"
    return {k.removeprefix(stem): v for k, v in found.metrics.items() if k.startswith(stem)}


def weights_of(found: CorrectionResult) -> torch.Tensor:
    assert found.weights is not None
    return found.weights


def test_without_weights_or_rejection_there_is_a_report(sampled: Batch) -> None:
    found = decoupled_correction(sampled)
    assert found.weights is None
    assert found.keep is sampled.action_mask
    assert found.metrics == pytest.approx({f"rollout_corr/{k}": v for k, v in DIVERGENCE.items()}, abs=1e-5)


def test_token_weights(sampled: Batch, rows: Rows) -> None:
    found = decoupled_correction(sampled, weights="token")
    assert importance(found) == pytest.approx(dict(zip(NAMES, TOKEN, strict=True)), abs=1e-5)
    assert rows(sampled, weights_of(found))[2] == pytest.approx([0.951229, 1, 2], abs=1e-5)


def test_sequence_weights(sampled: Batch, rows: Rows) -> None:
    found = decoupled_correction(sampled, weights="sequence")
    assert importance(found) == pytest.approx(dict(zip(NAMES, SEQUENCE, strict=True)), abs=1e-5)
    assert [r[0] for r in rows(sampled, weights_of(found))] == pytest.approx([1.105171, 1.105171, 2, 1], abs=1e-5)


def test_a_band_drops_weights_outside_and_keeps_their_tokens(sampled: Batch, rows: Rows) -> None:
    found = decoupled_correction(sampled, weights="token", threshold=(0.5, 2.0))
    expected = [[1.051271, 0.951229, 1.105171, 1], [1, 1.105171], [0.951229, 1, 0], [1, 1, 0.904837, 1.105171]]
    assert [x for r in rows(sampled, weights_of(found)) for x in r] == pytest.approx(
        [x for r in expected for x in r], abs=1e-5
    )
    said = importance(found)
    assert [said["mean"], said["eff_sample_size"]] == pytest.approx([0.936468, 0.91957], abs=1e-5)
    assert said["oob_ratio"] == pytest.approx(1 / 13)
    assert found.keep is sampled.action_mask


def test_normalised_token_weights(sampled: Batch, rows: Rows) -> None:
    found = decoupled_correction(sampled, weights="token", batch_normalise=True)
    said = importance(found)
    assert said.pop("batch_norm_factor") == pytest.approx(1.090314, abs=1e-5)
    assert rows(sampled, weights_of(found))[2] == pytest.approx([0.872436, 0.917167, 1.834334], abs=1e-5)
    assert float(weights_of(found)[sampled.action_mask].mean()) == pytest.approx(1)
    assert said == pytest.approx(dict(zip(NAMES, TOKEN, strict=True)), abs=1e-5), "metrics come before"


def test_normalised_sequence_weights_count_rows(sampled: Batch, rows: Rows) -> None:
    found = decoupled_correction(sampled, weights="sequence", batch_normalise=True)
    assert importance(found)["batch_norm_factor"] == pytest.approx(1.302585, abs=1e-5)
    assert sum(r[0] for r in rows(sampled, weights_of(found))) == pytest.approx(4)


def test_weights_that_are_all_dropped_are_not_normalised(build: Callable[..., Batch]) -> None:
    found = decoupled_correction(build([[-9.0]], [[-1.0]]), weights="token", threshold=(0.5, 2.0), batch_normalise=True)
    said = importance(found)
    assert weights_of(found).tolist() == [0]
    assert (said["batch_norm_factor"], said["eff_sample_size"], said["std"]) == (1, 0, 0)


# --- against plain loops -----------------------------------------------------------------------------------------------


def oracle(batch: Batch, level: str, threshold: Any) -> dict[str, float]:
    """The definitions, row by row."""
    low, high = threshold if isinstance(threshold, tuple) else (1 / threshold, threshold)
    old, behaviour = batch.token["old_logp"].numpy(), batch.token["behaviour_logp"].numpy()
    raw, logs = [], []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        mask = batch.action_mask[start:end].numpy()
        l = (old[start:end] - behaviour[start:end])[mask]  # noqa: E741
        if mask.any():
            u = l if level == "token" else np.full(l.shape, l.sum())
            logs.append(u)
            raw.append(np.exp(np.clip(u, -20, 20)))
    kept = [np.where((w >= low) & (w <= high), w, 0) if isinstance(threshold, tuple) else w.clip(max=high) for w in raw]
    tokens, flat = np.concatenate(kept), np.concatenate(raw)
    c = tokens.clip(0, high)
    sizes = np.array([u[0] for u in logs])
    s, r = np.array([w.mean() for w in kept]), np.array([w.mean() for w in raw])
    token = level == "token"
    found = {
        "mean": tokens.mean(),
        "max": tokens.max() if token else math.exp(min(sizes.max(), 20)),
        "min": tokens.min() if token else math.exp(sizes.min()),
        "ratio_fraction_high": np.mean(flat > high) if token else np.mean(sizes > math.log(high)),
        "ratio_fraction_low": np.mean(flat < low) if token else np.mean(sizes < math.log(low)),
        "std": c.std(),
        "eff_sample_size": c.mean() ** 2 / np.mean(c**2) if c.any() else 0.0,
        "seq_mean": s.mean(),
        "seq_std": s.std(ddof=1),
        "seq_max": s.max(),
        "seq_min": s.min(),
        "seq_max_deviation": np.abs(s - 1).max(),
        "seq_fraction_high": np.mean(r > high),
        "seq_fraction_low": np.mean(r < low),
    }
    if isinstance(threshold, tuple):
        found["oob_ratio"] = np.mean((flat < low) | (flat > high))
    return {k: float(v) for k, v in found.items()}


@given(seed=st.integers(0, 10_000), level=st.sampled_from(["token", "sequence"]), far=st.booleans(), band=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_metric_is_its_definition(
    ragged: Callable[..., Batch], seed: int, level: str, far: bool, band: bool
) -> None:
    batch, threshold = ragged(seed, far), (0.6, 1.7) if band else 1.3
    found = importance(decoupled_correction(batch, weights=level, threshold=threshold))
    assert found == pytest.approx(oracle(batch, level, threshold), rel=1e-6, abs=1e-7)
