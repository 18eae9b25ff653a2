"""Rejection: the worked statistics, the sign of k1, and every metric against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.correction.rollout_mismatch import RolloutMismatch, batch_mismatch
from burnish.algorithms.correction.weights_and_rejection import (
    accepted_tokens,
    accepted_tokens_with_metrics,
    rejection_statistic,
)
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import decoupled_correction

Rows = Callable[[Batch, torch.Tensor], list[list[float]]]
OPTIONS = [f"{over}_{k}" for over in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3")]
OPTIONS.remove("seq_max_k1")
STATISTICS = {
    "seq_sum_k1": [-0.1, -0.1, -1.05, 0],
    "seq_mean_k1": [-0.025, -0.05, -0.35, 0],
    "seq_mean_k2": [0.001875, 0.0025, 0.202083, 0.0025],
    "seq_mean_k3": [0.001918, 0.002585, 0.301798, 0.002502],
    "seq_sum_k3": [0.007671, 0.005171, 0.905395, 0.010008],
    "seq_max_k2": [0.005, 0.005, 0.605, 0.005],
    "seq_max_k3": [0.005171, 0.005171, 0.904166, 0.005171],
    "token_k3": [0.001271, 0.001229, 0.005171, 0, 0, 0.005171, 0.001229, 0, 0.904166, 0, 0, 0.004837, 0.005171],
}


def gap(batch: Batch) -> RolloutMismatch:
    return batch_mismatch(batch)[1]


@pytest.mark.parametrize("option", STATISTICS)
def test_statistics(sampled: Batch, option: str) -> None:
    assert rejection_statistic(gap(sampled), option).tolist() == pytest.approx(STATISTICS[option], abs=1e-5)


@pytest.mark.parametrize(("option", "bounds"), [("seq_mean_k3", 0.01), ("seq_sum_k1", (0.5, 2.0)), ("seq_sum_k1", 2.0)])
def test_rows_are_kept_whole_or_not_at_all(sampled: Batch, rows: Rows, option: str, bounds: Any) -> None:
    found = rows(sampled, decoupled_correction(sampled, reject={option: bounds}).keep)
    assert found == [[True] * 4, [True] * 2, [False] * 3, [True] * 4]


def test_bounds_of_k1_are_on_the_ratio_of_trainer_to_engine(sampled: Batch, rows: Rows) -> None:
    def row(bounds: Any) -> list[float]:
        return rows(sampled, decoupled_correction(sampled, reject={"token_k1": bounds}).keep)[2]

    assert row((0.5, 4.0)) == [True, True, True]  # the ratio is 3.004
    assert row((0.25, 2.0)) == [True, True, False]  # what verl's code makes of 0.5_4


def test_metrics_of_seq_mean_k3(sampled: Batch) -> None:
    found = decoupled_correction(sampled, reject={"seq_mean_k3": 0.01}).metrics
    expected = {"mean": 0.071404, "max": 0.301798, "min": 0.001918, "fraction_high": 0.25, "fraction_low": 0}
    expected |= {"std": 0.003261, "seq_mean": 0.077201, "seq_std": 0.149732}
    expected |= {"masked_fraction": 0.230769, "seq_masked_fraction": 0.25}
    stem = "rollout_corr/rollout_rs_"
    assert {k: found[f"{stem}seq_mean_k3_{k}"] for k in expected} == pytest.approx(expected, abs=1e-5)
    assert found[f"{stem}masked_fraction"] == pytest.approx(0.230769, abs=1e-5)
    assert found[f"{stem}seq_masked_fraction"] == 0.25


def test_options_are_anded(sampled: Batch, rows: Rows) -> None:
    both = {"token_k3": 0.005, "seq_mean_k1": (0.96, 1.04)}
    keep = rows(sampled, decoupled_correction(sampled, reject=both).keep)
    assert keep == [[True, True, False, True], [False] * 2, [False] * 3, [True, True, True, False]]
    found = decoupled_correction(sampled, reject=both).metrics
    assert found["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(7 / 13)
    assert found["rollout_corr/rollout_rs_seq_masked_fraction"] == 1
    assert found["rollout_corr/rollout_rs_token_k3_seq_masked_fraction"] == 1
    assert found["rollout_corr/rollout_rs_seq_mean_k1_seq_masked_fraction"] == 0.5


def test_a_statistic_at_its_bound_is_kept_and_just_beyond_is_not(build: Callable[..., Batch]) -> None:
    batch = build([[-1.0], [-1.0]], [[-1.5], [-0.5]])  # l = 0.5, -0.5, exactly
    for option, bounds in (("token_k2", 0.125), ("seq_max_k2", 0.125), ("seq_sum_k2", 0.125)):
        assert decoupled_correction(batch, reject={option: bounds}).keep.tolist() == [True, True]
        assert decoupled_correction(batch, reject={option: bounds - 1e-9}).keep.tolist() == [False, False]
    lower = gap(batch)
    assert accepted_tokens(lower, {"token_k1": (0.1, math.exp(0.5) * (1 + 1e-9))}).tolist() == [True, True]
    assert accepted_tokens(lower, {"token_k1": (0.1, math.exp(0.5) * (1 - 1e-9))}).tolist() == [False, True]
    assert accepted_tokens(lower, {"token_k1": (math.exp(-0.5) * (1 + 1e-9), 9.0)}).tolist() == [True, False]


def test_divergences_are_those_of_the_clamped_ratio(build: Callable[..., Batch]) -> None:
    far = gap(build([[-1.0, -101.0]], [[-101.0, -1.0]]))
    assert rejection_statistic(far, "token_k1").tolist() == [-20, 20]
    assert rejection_statistic(far, "token_k2").tolist() == [200, 200]
    assert rejection_statistic(far, "token_k3").tolist() == pytest.approx([math.exp(20) - 21, math.exp(-20) + 19])
    assert rejection_statistic(far, "seq_sum_k1").tolist() == [0]


def test_weights_do_not_know_of_rejection(sampled: Batch) -> None:
    plain = decoupled_correction(sampled, weights="sequence", batch_normalise=True)
    both = decoupled_correction(sampled, weights="sequence", batch_normalise=True, reject={"seq_mean_k3": 0.01})
    assert plain.weights is not None
    assert both.weights is not None
    assert plain.weights.tolist() == both.weights.tolist()
    assert {k: both.metrics[k] for k in plain.metrics} == plain.metrics


def test_an_unknown_option_is_refused(sampled: Batch) -> None:
    with pytest.raises(ValueError, match="unknown rejection 'row_k1'"):
        decoupled_correction(sampled, reject={"row_k1": 2.0})


# --- against plain loops -----------------------------------------------------------------------------------------------

DIVERGENCES: dict[str, Callable[[Any], Any]] = {
    "k1": lambda x: -x,
    "k2": lambda x: x**2 / 2,
    "k3": lambda x: np.exp(x) - 1 - x,
}
OVER: dict[str, Callable[[Any], Any]] = {
    "token": lambda x: x,
    "seq_sum": np.sum,
    "seq_mean": np.mean,
    "seq_max": np.max,
}


def oracle(batch: Batch, option: str, bounds: Any) -> tuple[list[bool], dict[str, float]]:
    """The definitions, row by row: which tokens are kept, and what is said."""
    over, kind = option.rsplit("_", 1)
    old, behaviour = batch.token["old_logp"].numpy(), batch.token["behaviour_logp"].numpy()
    stats = []
    for start, end in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        mask = batch.action_mask[start:end].numpy()
        if mask.any():
            k = DIVERGENCES[kind](np.clip((old[start:end] - behaviour[start:end])[mask], -20, 20))
            stats.append(np.broadcast_to(OVER[over](k), k.shape))
    low, high = bounds if kind == "k1" else (None, bounds)

    def above(x: Any) -> Any:
        return np.exp(-x) > high if kind == "k1" else x > high

    def below(x: Any) -> Any:
        return np.exp(-x) < low if kind == "k1" else np.zeros(x.shape, dtype=bool)

    flat = np.concatenate(stats)
    own = flat if over == "token" else np.array([s[0] for s in stats])
    per_row = np.array([s.mean() for s in stats])
    rejected = [above(s) | below(s) for s in stats]
    c = flat.clip(-math.log(high), -math.log(low)) if kind == "k1" else flat.clip(0, high)
    said = {
        "mean": flat.mean(),
        "max": own.max(),
        "min": own.min(),
        "std": c.std(),
        "fraction_high": above(own).mean(),
        "fraction_low": below(own).mean(),
        "seq_mean": per_row.mean(),
        "seq_std": per_row.std(ddof=1),
        "seq_max": per_row.max(),
        "seq_min": per_row.min(),
        "seq_max_deviation": np.abs(per_row).max(),
        "seq_fraction_high": above(per_row).mean(),
        "seq_fraction_low": below(per_row).mean(),
        "masked_fraction": np.concatenate(rejected).mean(),
        "seq_masked_fraction": np.mean([r.any() for r in rejected]),
    }
    return [not x for r in rejected for x in r], {k: float(v) for k, v in said.items()}


@given(seed=st.integers(0, 10_000), option=st.sampled_from(OPTIONS), far=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_option_is_its_definition(ragged: Callable[..., Batch], seed: int, option: str, far: bool) -> None:
    batch = ragged(seed, far)
    bounds = (0.7, 1.9) if option.endswith("k1") else 0.2
    keep, metrics = accepted_tokens_with_metrics(gap(batch), {option: bounds})
    expected, said = oracle(batch, option, bounds)
    assert keep.tolist() == expected
    assert keep.tolist() == accepted_tokens(gap(batch), {option: bounds}).tolist()
    found = {k: float(metrics[f"rollout_rs_{option}_{k}"]) for k in said}
    assert found == pytest.approx(said, rel=1e-6, abs=1e-7)
    assert set(metrics) == {f"rollout_rs_{option}_{k}" for k in said} | {
        "rollout_rs_masked_fraction",
        "rollout_rs_seq_masked_fraction",
    }


@given(seed=st.integers(0, 10_000), options=st.sets(st.sampled_from(OPTIONS), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_all_options_together_keep_what_each_keeps(ragged: Callable[..., Batch], seed: int, options: set[str]) -> None:
    one = gap(ragged(seed))
    bounds: dict[str, Any] = {o: (0.6, 1.6) if o.endswith("k1") else 0.3 for o in options}
    together = torch.stack([accepted_tokens(one, {o: b}) for o, b in bounds.items()]).all(0)
    assert accepted_tokens(one, bounds).tolist() == together.tolist()
    assert accepted_tokens_with_metrics(one, bounds)[0].tolist() == together.tolist()
