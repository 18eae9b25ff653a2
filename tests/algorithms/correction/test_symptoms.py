"""Symptoms of a mismatch: worked by hand, and degenerate cases."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from burnish.algorithms.correction.mismatch_diagnostics import symptom_metrics
from burnish.core.batch import Batch

Build = Callable[..., Batch]


def of(batch: Batch, version: int | None = None) -> dict[str, float]:
    return {name.removeprefix("mismatch/"): value for name, value in symptom_metrics(batch, version).items()}


def test_median_far_tokens_and_shares_by_hand(build: Build) -> None:
    found = of(build([[-1.0, -2.0, -3.0], [-5.0, -1.0]], [[-1.5, -2.0, -3.0], [-1.0, -1.2]]))
    assert found["gap_median"] == pytest.approx(0.2)
    assert found["far_share"] == pytest.approx(0.2)
    assert found["share"] == pytest.approx((0.5 / 12.5 + 4.2 / 8.2) / 2)  # of the two rows
    assert found["first_share"] == pytest.approx(4.5 / (2.5 + 6))
    assert found["late_share"] == pytest.approx(0.2 / (6 + 2.2))  # the last of three, the second of two
    assert found["share_before"] == pytest.approx(0.5 / 12.5)
    assert found["share_behind"] == pytest.approx(0.2 / 2.2)


def test_shares_around_the_first_far_token_of_each_row(build: Build) -> None:
    # Rows that meet at a far token, one that is far twice, one that ends with its far token.
    old = [[-1.0, -8.0, -2.0], [-8.0, -1.0, -8.0, -3.0], [-1.0, -1.0], [-2.0, -9.0]]
    engine = [[-1.5, -1.0, -4.0], [-1.0, -2.0, -1.0, -3.0], [-1.0, -1.25], [-2.0, -1.0]]
    found = of(build(old, engine))
    assert found["share_before"] == pytest.approx((0.5 + 0 + 0.25 + 0) / (2.5 + 2 + 2.25 + 4))
    assert found["share_behind"] == pytest.approx((2 + 1 + 7 + 0) / (6 + 3 + 9 + 6))
    last = of(build([[-1.0, -9.0]], [[-1.5, -1.0]]))
    assert last["share_before"] == pytest.approx(0.5 / 2.5)
    assert "share_behind" not in last
    assert "share_before" not in of(build([[-1.0]], [[-1.5]]))


def test_a_share_is_that_of_most_rows(build: Build) -> None:
    old, engine = [[-1.0, -1.0]] * 5, [[-1.0, -1.0]] * 3 + [[-7.0, -9.0]] * 2
    assert of(build(old, engine))["share"] == 0


def test_balance_is_minus_one_where_the_engine_is_always_surer_and_nought_where_masses_agree(build: Build) -> None:
    assert of(build([[-1.0, -2.0]], [[-0.9, -1.8]]))["balance"] == pytest.approx(-1)
    up, down = math.log(1.2), math.log(0.8)
    even = [up, down] * 50  # e^l is 1 on average
    assert of(build([[x - 3 for x in even]], [[-3.0] * 100]))["balance"] == pytest.approx(0, abs=1e-9)


def test_an_absurd_token_does_not_make_a_gap_one_sided_and_a_rare_one_can_balance_it(build: Build) -> None:
    even = [1e-3, -1e-3] * 50
    assert abs(of(build([[-9.0, *[x - 3 for x in even]]], [[-1.0, *[-3.0] * 100]]))["balance"]) < 0.05
    # A colder engine: nearly every token is a likely one and falls short, the rest makes up for all of them.
    most, rest = [math.log(0.98)] * 98, [math.log(1.98)] * 2
    assert of(build([[x - 3 for x in most + rest]], [[-3.0] * 100]))["balance"] == pytest.approx(0, abs=1e-9)


def test_likely_tokens_all_lean_one_way_under_a_temperature(build: Build) -> None:
    logits = torch.linspace(-3, 3, 40, dtype=torch.float64)
    places = torch.stack([logits, -logits], 1)  # two tokens to choose from at each of 40 places
    own = places.log_softmax(-1)
    for temperature, lean in ((1.3, 1), (0.7, -1)):
        engine = (places / temperature).log_softmax(-1)
        for token in (0, 1):
            found = of(build([own[:, token].tolist()], [engine[:, token].tolist()]))
            assert found["sure_lean"] == pytest.approx(lean)
    up_and_down = of(build([[-0.2, -0.3, -4.0]], [[-0.3, -0.2, -9.0]]))
    assert up_and_down["sure_lean"] == pytest.approx(0)


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
    assert (found["lag_corr"], found["lag_slope"]) == (0, 0)


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


def test_a_share_is_never_above_one(build: Build) -> None:
    found = of(build([[-math.inf, -0.0], [-1.0, -0.0]], [[-1.0, -math.inf], [-math.inf, -0.0]]))
    assert all(0 <= v <= 1 for k, v in found.items() if "share" in k)


def test_rows_of_one_token_have_no_second_half(build: Build) -> None:
    found = of(build([[-1.0], [-2.0]], [[-1.5], [-2.0]]))
    assert (found["first_share"], found["late_share"]) == pytest.approx((0.5 / 6.5, 0))


def test_what_the_model_did_not_write_is_not_looked_at(build: Build) -> None:
    masks = [[False, True, False, True], [False, False]]
    found = of(build([[0, -1.0, 0, -2.0], [0, 0]], [[0, -1.5, 0, -2.1], [0, 0]], masks))
    assert (found["first_share"], found["late_share"]) == pytest.approx((0.5 / 2.5, 0.1 / 4.1))
