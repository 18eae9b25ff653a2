"""Identical policies, absurd log-probs, empty rows: coupled and decoupled correction."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.algorithms.correction.weights_and_rejection import CorrectionResult
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import coupled_correction, decoupled_correction

EVERY: dict[str, Any] = {
    **{f"{over}_k1": (0.5, 2.0) for over in ("token", "seq_sum", "seq_mean")},
    **{f"{over}_{k}": 0.1 for over in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k2", "k3")},
}
FORMS: list[Callable[[Batch], CorrectionResult]] = [
    *(
        lambda b, o=o: coupled_correction(b, **o)
        for o in (
            {"level": level, "mode": mode}
            for level in ("token", "sequence", "geometric")
            for mode in ("truncate", "mask")
        )
    ),
    *(
        lambda b, o=o: decoupled_correction(b, batch_normalise=True, reject=EVERY, **o)
        for o in (
            {"weights": level, "threshold": threshold}
            for level in ("token", "sequence")
            for threshold in (2.0, (0.5, 5.0))
        )
    ),
]
Build = Callable[..., Batch]


def finite(found: CorrectionResult) -> bool:
    assert found.weights is not None
    return bool(found.weights.isfinite().all()) and all(math.isfinite(v) for v in found.metrics.values())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_identical_policies_have_weight_1_and_no_divergence_exactly(
    form: Callable[[Batch], CorrectionResult], dtype: torch.dtype
) -> None:
    n = 1000
    logp = -5 * torch.rand(n, generator=torch.Generator().manual_seed(0), dtype=dtype)
    mask = torch.ones(n, dtype=torch.bool)
    columns = {"action_mask": mask, "loss_mask": mask, "old_logp": logp, "behaviour_logp": logp.clone()}
    found = form(Batch(torch.arange(n), torch.tensor([0, 1, 300, n]), columns))
    assert found.weights is not None
    assert bool((found.weights == 1).all())
    assert bool(found.keep.all())
    said = {k.split("/")[1].removeprefix("mismatch_"): v for k, v in found.metrics.items()}
    assert said["rollout_is_eff_sample_size"] == said["rollout_is_mean"] == said["ppl_ratio"] == 1
    assert said["kl"] == said["k3_kl"] == said["rollout_is_std"] == said["log_ppl_abs_diff"] == 0
    assert said.get("chi2_token", 0) == said.get("chi2_seq", 0) == 0
    assert said.get("rollout_rs_masked_fraction", 0) == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("gap", [100.0, -100.0, 299.0, -299.0])
def test_an_absurd_token_stays_finite(form: Callable[[Batch], CorrectionResult], gap: float, build: Build) -> None:
    old, behaviour = (-1.0 - max(0.0, -gap), -1.0 - max(0.0, gap))
    assert finite(form(build([[old, -0.5], [-1.0]], [[behaviour, -0.5], [-1.0]])))


def test_weights_are_clamped_at_e_to_the_20(build: Build) -> None:
    batch = build([[-0.5, -100.5]], [[-100.5, -0.5]])
    found = coupled_correction(batch, threshold=1e30, veto=None)
    assert found.weights is not None
    assert found.weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    assert found.metrics["mismatch/mismatch_k3_kl"] == pytest.approx((math.exp(100) - 2) / 2)
    low = coupled_correction(build([[-101.0]], [[-1.0]]), level="sequence", veto=None).metrics
    assert low["mismatch/rollout_is_min"] == pytest.approx(math.exp(-100), rel=1e-9)  # from u, which no clamp touches
    high = coupled_correction(build([[-1.0]], [[-101.0]]), level="sequence", veto=None).metrics
    assert high["mismatch/rollout_is_max"] == pytest.approx(math.exp(20), rel=1e-9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("old", [-1.0, -math.inf, math.inf])
@pytest.mark.parametrize("behaviour", [-1.0, -math.inf, math.inf])
def test_infinite_log_probs_stay_finite(
    form: Callable[[Batch], CorrectionResult], old: float, behaviour: float, build: Build
) -> None:
    assert finite(form(build([[old, -0.5], [-1.0]], [[behaviour, -0.5], [-1.0]])))


def test_a_sampled_token_of_probability_0_is_bounded_or_rejected(build: Build) -> None:
    batch = build([[-1.0, -0.5], [-1.0]], [[-math.inf, -0.5], [-1.0]])
    cut, masked = coupled_correction(batch), coupled_correction(batch, mode="mask", target="mask")
    assert cut.weights is not None
    assert masked.weights is not None
    assert cut.weights.tolist() == [2, 1, 1]
    assert masked.weights.tolist() == [0, 1, 1]
    assert masked.keep.tolist() == [False, True, True]
    rejected = decoupled_correction(batch, reject={"seq_mean_k3": 0.01})
    assert rejected.keep.tolist() == [False, False, True]


def test_a_token_the_trainer_finds_impossible_vetoes_its_row(build: Build) -> None:
    found = coupled_correction(build([[-math.inf, -0.5], [-1.0]], [[-1.0, -0.5], [-1.0]]))
    assert found.weights is not None
    assert found.weights.tolist() == [0, 0, 1]
    both = coupled_correction(build([[-math.inf, -0.5]], [[-math.inf, -0.5]]))
    assert both.weights is not None
    assert both.weights.tolist() == [1, 1]


def test_a_missing_log_prob_is_refused(build: Build) -> None:
    for old, behaviour, side in ((math.nan, -1.0, "trainer"), (-1.0, math.nan, "engine")):
        with pytest.raises(UserError, match=f"the {side}'s log-probs are nan in 1 of 2 places"):
            coupled_correction(build([[old, -0.5], [-1.0]], [[behaviour, -0.5], [-1.0]]))


def test_a_batch_without_a_written_token_is_refused(build: Build) -> None:
    with pytest.raises(ValueError, match="the batch has none"):
        coupled_correction(build([[-1.0]], [[-1.0]], [[False]]))


@pytest.mark.parametrize("form", FORMS)
def test_rows_and_tokens_the_model_did_not_write_change_nothing(
    form: Callable[[Batch], CorrectionResult], build: Build
) -> None:
    old, behaviour = [[-1.0, -0.5, -0.7], [-0.2], [-3.0, -0.1]], [[-1.1, -0.9, -0.3], [-0.4], [-2.0, -0.1]]
    plain = form(build(old, behaviour))
    pad = [[9.0, -1.0, 9.0, -0.5, -0.7], [9.0, 9.0], [-0.2], [-3.0, -0.1, 9.0], []]
    pad_behaviour = [[9.0, -1.1, 9.0, -0.9, -0.3], [9.0, 9.0], [-0.4], [-2.0, -0.1, 9.0], []]
    masks = [[x != 9.0 for x in row] for row in pad]
    batch = build(pad, pad_behaviour, masks)
    padded = form(batch)
    assert padded.metrics == pytest.approx(plain.metrics, rel=1e-12)
    assert plain.weights is not None
    assert padded.weights is not None
    assert padded.weights[batch.action_mask].tolist() == pytest.approx(plain.weights.tolist(), rel=1e-12)
    assert padded.keep[batch.action_mask].tolist() == plain.keep.tolist()
    assert bool((padded.weights[~batch.action_mask] == 0).all())


@pytest.mark.parametrize("form", FORMS)
def test_one_row_has_a_std_of_0(form: Callable[[Batch], CorrectionResult], build: Build) -> None:
    found = form(build([[-1.0, -0.3]], [[-1.2, -0.1]]))
    assert finite(found)
    assert [v for k, v in found.metrics.items() if k.endswith("seq_std")] != []
    assert all(v == 0 for k, v in found.metrics.items() if k.endswith("seq_std"))


def test_one_token_has_a_std_of_0(build: Build) -> None:
    found = coupled_correction(build([[-1.0]], [[-1.3]])).metrics
    assert found["mismatch/rollout_is_std"] == 0
    assert found["mismatch/rollout_is_eff_sample_size"] == 1
    assert found["mismatch/rollout_is_p99"] == pytest.approx(math.exp(0.3))


@pytest.mark.parametrize("form", FORMS)
def test_a_filter_that_ran_before_changes_nothing(form: Callable[[Batch], CorrectionResult], ragged: Build) -> None:
    batch = ragged(3)
    filtered = batch.with_token(loss_mask=torch.zeros_like(batch.loss_mask))
    assert form(batch).metrics == form(filtered).metrics


@pytest.mark.parametrize("form", FORMS)
def test_float32_log_probs_give_the_numbers_of_float64(
    form: Callable[[Batch], CorrectionResult], ragged: Build
) -> None:
    batch = ragged(5, far=False)
    narrow = batch.with_token(**{k: batch.token[k].float() for k in ("old_logp", "behaviour_logp")})
    wide = batch.with_token(**{k: narrow.token[k].double() for k in ("old_logp", "behaviour_logp")})
    assert form(narrow).metrics == form(wide).metrics


@given(gap=st.floats(-0.6, 0.6), num=st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_an_effective_sample_size_is_never_above_1(build: Build, gap: float, num: int) -> None:
    found = coupled_correction(build([[gap - 1.0] * num], [[-1.0] * num]))
    assert 1 - 1e-12 < found.metrics["mismatch/rollout_is_eff_sample_size"] <= 1
