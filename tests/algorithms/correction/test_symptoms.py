"""What tells causes of a gap apart, by hand and at the edges."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from burnish.algorithms.correction.symptoms import symptoms
from burnish.core.batch import Batch

Build = Callable[..., Batch]


def of(batch: Batch, version: int | None = None) -> dict[str, float]:
    return {name.removeprefix("mismatch/"): value for name, value in symptoms(batch, version).items()}


def test_first_tokens_rest_and_far_tokens_by_hand(build: Build) -> None:
    found = of(build([[-1.0, -2.0, -3.0], [-5.0, -1.0]], [[-1.5, -2.0, -3.0], [-1.0, -1.2]]))
    assert found["gap_first"] == pytest.approx((0.5 + 4) / 2)
    assert found["gap_rest"] == pytest.approx(0.2 / 3)
    assert found["far_share"] == pytest.approx(0.2)
    assert found["gap_median"] == pytest.approx(0.2)


def test_balance_is_minus_one_where_the_engine_is_always_surer_and_nought_where_masses_agree(build: Build) -> None:
    assert of(build([[-1.0, -2.0]], [[-0.9, -1.8]]))["balance"] == pytest.approx(-1)
    up, down = math.log(1.2), math.log(0.8)
    even = [up, down] * 50  # e^l is 1 on average
    assert of(build([[x - 3 for x in even]], [[-3.0] * 100]))["balance"] == pytest.approx(0, abs=1e-9)


def test_one_absurd_token_does_not_decide_the_balance(build: Build) -> None:
    even = [1e-3, -1e-3] * 50
    assert abs(of(build([[-9.0, *[x - 3 for x in even]]], [[-1.0, *[-3.0] * 100]]))["balance"]) < 0.05


def test_a_temperature_in_one_context_correlates_wholly(build: Build) -> None:
    behaviour = [-0.1, -0.5, -1.0, -2.0, -4.0] * 20
    hot = of(build([[1.2 * x + 0.3 for x in behaviour]], [behaviour]))["surprise_corr"]
    cold = of(build([[0.8 * x - 0.3 for x in behaviour]], [behaviour]))["surprise_corr"]
    assert hot > 0.95
    assert cold < -0.95


def test_slope_with_the_version_lag_by_hand(build: Build) -> None:
    old = [[-1.0] * 4, [-1.0] * 4]
    batch = build(old, [[-1.1] * 4, [-1.4] * 4]).with_token(version=torch.tensor([7] * 4 + [5] * 4))
    found = of(batch, version=8)
    assert (found["lag_mean"], found["lag_slope"], found["lag_corr"]) == pytest.approx((2, 0.15, 1))
    assert of(batch)["lag_mean"] == pytest.approx(1)  # to the newest of the batch
    assert "lag_mean" not in of(build(old, old))


def test_a_constant_correlates_with_nothing(build: Build) -> None:
    same = build([[-0.1] * 7], [[-0.4] * 7]).with_token(version=torch.arange(7))
    found = of(same)
    assert (found["surprise_corr"], found["lag_corr"], found["lag_slope"]) == (0, 0, 0)


def test_the_same_policy_has_no_symptoms(build: Build) -> None:
    rows = [[-1.0, -2.0], [-0.5]]
    batch = build(rows, rows).with_token(version=torch.zeros(3, dtype=torch.int64))
    assert set(of(batch).values()) == {0.0}


@pytest.mark.parametrize("seed", range(3))
def test_every_symptom_is_finite_for_any_batch(ragged: Callable[..., Batch], seed: int) -> None:
    batch = ragged(seed)
    assert all(math.isfinite(v) for v in of(batch).values())
    old = batch.token["old_logp"].clone()
    old[batch.action_mask.nonzero()[2]] = -math.inf
    assert all(math.isfinite(v) for v in of(batch.with_token(old_logp=old)).values())


def test_rows_of_one_token_have_nothing_after_the_first(build: Build) -> None:
    found = of(build([[-1.0], [-2.0]], [[-1.5], [-2.0]]))
    assert (found["gap_first"], found["gap_rest"], found["surprise_corr"]) == (0.25, 0, 0)


def test_what_the_model_did_not_write_is_not_looked_at(build: Build) -> None:
    masks = [[False, True, False, True], [False, False]]
    found = of(build([[0, -1.0, 0, -2.0], [0, 0]], [[0, -1.5, 0, -2.1], [0, 0]], masks))
    assert (found["gap_first"], found["gap_rest"]) == pytest.approx((0.5, 0.1))
