"""Clip-Cov and KL-Cov: ALGORITHMS.md 5.9, 5.10 and 17.23, and picks that depend on identity alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.ratios_and_clips import covariances, token_ratio
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import covariance_clip, covariance_kl

Look = Callable[..., Any]
COV = [0.11716, 0.032544, -0.475148, 0.709467, -0.044379, -0.390533, -0.418225, 1.394083, 0.249467, -0.027456, 0.240237, 0.195621, -0.205917]  # fmt: skip
ELIGIBLE = [3, 8, 10, 11]
BAND = {"low": 0.2, "high": 0.2, "low_cov": 0.1, "high_cov": 5.0}


def cov(clip: str, **options: Any) -> dict[str, Any]:
    return {"clip": clip, "clip_options": options, "scope": "batch"}


def drawn(view: LossView, **options: float) -> set[tuple[int, int]]:
    """(key, position) of the tokens Clip-Cov draws."""
    anchor = view.column("old_logp")
    _, marks = covariance_clip(
        view, token_ratio(view, anchor), view.column("advantages"), anchor, **{**BAND, **options}
    )
    mask = marks["pg_clipfrac"]
    return set(zip(view.column("key")[mask].tolist(), view.column("position")[mask].tolist(), strict=True))


def penalised(view: LossView, **options: float) -> set[tuple[int, int]]:
    """(key, position) of the tokens KL-Cov penalises: those where the coefficient matters."""
    anchor = view.column("old_logp")
    ratio, advantages = token_ratio(view, anchor), view.column("advantages")
    mask = covariance_kl(view, ratio, advantages, anchor, **options)[0] != -advantages * ratio
    return set(zip(view.column("key")[mask].tolist(), view.column("position")[mask].tolist(), strict=True))


def test_covariances(keyed: Batch, look: Look) -> None:
    view = look(keyed).view
    got = covariances(view, view.column("advantages"))
    assert got.tolist() == pytest.approx(COV, abs=1e-6)
    assert not got.requires_grad


# --- Clip-Cov --------------------------------------------------------------------------------------------------------


def test_clip_cov_with_all_eligible_tokens_drawn(keyed: Batch, look: Look) -> None:
    loss, gradient, metrics = look(keyed).run(**cov("clip_cov", share=1.0, **BAND))
    assert loss == pytest.approx(0.152421, abs=1e-6)
    assert metrics["pg_clipfrac"] == pytest.approx(4 / 13)
    assert metrics["cov_mean"] == pytest.approx(0.105917, abs=1e-6)
    plain = look(keyed).run()[1]
    assert gradient == [0 if i in ELIGIBLE else g for i, g in enumerate(plain)]
    assert all(plain[i] != 0 for i in ELIGIBLE)


@pytest.mark.parametrize(("share", "num"), [(1e-9, 1), (0.2, 2), (0.24, 3)])
def test_a_share_of_all_tokens_is_drawn_and_at_least_one(keyed: Batch, look: Look, share: float, num: int) -> None:
    view = look(keyed).view
    assert len(drawn(view, share=share)) == num
    assert drawn(view, share=share) < drawn(view, share=1.0)


def test_without_an_eligible_token_it_is_ppo(keyed: Batch, look: Look) -> None:
    loss, gradient, metrics = look(keyed).run(**cov("clip_cov", share=1.0, low=0.2, high=0.2, low_cov=2.0))
    assert metrics["pg_clipfrac"] == 0
    assert (loss, gradient) == look(keyed).run()[:2]


def test_the_band_is_open_at_both_ends(keyed: Batch, look: Look) -> None:
    view = look(keyed).view
    edge = float(covariances(view, view.column("advantages"))[8])
    everything = drawn(view, share=1.0)
    assert len(everything - drawn(view, share=1.0, low_cov=edge)) == 3  # 8, and 10 and 11 below it
    assert len(everything - drawn(view, share=1.0, high_cov=edge)) == 2  # 8, and 3 above it


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [1, 3, 0, 2]])
def test_what_is_drawn_does_not_depend_on_the_order_of_the_batch(keyed: Batch, look: Look, order: list[int]) -> None:
    for share in (1e-9, 0.2, 0.24):
        mixed = look(keyed.select(torch.tensor(order))).view
        assert drawn(mixed, share=share) == drawn(look(keyed).view, share=share)


def test_other_identities_draw_other_tokens(keyed: Batch, look: Look) -> None:
    seen = set()
    for k in range(40):
        keys = torch.tensor([0, 1, 2, 3]) + 4 * k
        picked = drawn(look(keyed.with_sequence(key=keys)).view, share=1e-9)
        seen |= {(key - 4 * k, position) for key, position in picked}
    assert seen == {(0, 4), (2, 3), (3, 2), (3, 3)}  # every eligible token, sooner or later


# --- KL-Cov ----------------------------------------------------------------------------------------------------------


def test_kl_cov(keyed: Batch, look: Look) -> None:
    loss, gradient, metrics = look(keyed).run(**cov("kl_cov", share=0.2))
    plain, plain_gradient, _ = look(keyed).run(clip="none")
    assert loss == pytest.approx(0.007275, abs=1e-6)
    assert plain == pytest.approx(-0.10811, abs=1e-6)
    assert metrics["cov_mean"] == pytest.approx(0.105917, abs=1e-6)
    # Tokens [2,1] (l = -1.5) and [0,3] (l = 0, where |l| has no slope).
    change = [b - a for a, b in zip(plain_gradient, gradient, strict=True)]
    assert change == pytest.approx([-1 / 13 if i == 7 else 0 for i in range(13)], abs=1e-12)


def test_the_coefficient_of_kl_cov(keyed: Batch, look: Look) -> None:
    plain, one, three = (
        look(keyed).run(clip="none")[0],
        *(look(keyed).run(**cov("kl_cov", coef=c))[0] for c in (1.0, 3.0)),
    )
    assert three - plain == pytest.approx(3 * (one - plain))
    assert one > plain


def test_between_equal_covariances_identity_decides(keyed: Batch, look: Look) -> None:
    """Tokens the policy is certain of have logp 0 and, with the highest advantage, all the highest covariance."""
    batch = keyed.with_token(new=torch.zeros(17, dtype=torch.float64), old_logp=torch.full((17,), -0.5).double())
    # logp is constant, so all covariances are 0: everything is a tie.
    picked = penalised(look(batch).view, share=0.24)
    assert len(picked) == 3
    for order in ([3, 2, 1, 0], [1, 3, 0, 2]):
        assert penalised(look(batch.select(torch.tensor(order))).view, share=0.24) == picked
    others = batch.with_sequence(key=torch.tensor([5, 6, 7, 8]))
    assert {p for _, p in penalised(look(others).view, share=0.24)} != {p for _, p in picked}


def test_tokens_above_a_tie_are_always_taken(keyed: Batch, look: Look) -> None:
    new = torch.full((17,), -1.0).double()
    new[1] = -0.5  # the first token of the first sequence, whose advantage is highest
    batch = keyed.with_token(new=new, old_logp=torch.full((17,), -2.0).double())
    for num, share in ((1, 0.08), (2, 0.16), (5, 0.39)):
        picked = penalised(look(batch).view, share=share)
        assert len(picked) == num
        assert (11, 1) in picked


def test_an_absurd_token_does_not_run_away(keyed: Batch, look: Look) -> None:
    """l = 31 at one token would make the loss 1e13 without the clamp; the penalty sees the clamped l too."""
    far = keyed.token["old_logp"].clone()
    far[10] = -2.4 - 31  # token [2,1], the one with the largest covariance
    batch = keyed.with_token(old_logp=far)
    for name in ("clip_cov", "kl_cov"):
        loss, gradient, metrics = look(batch).run(**cov(name))
        assert abs(loss) < 1e8
        assert gradient[7] == 0
        assert abs(metrics["ppo_kl"]) < 20
    with_penalty, without = look(batch).run(**cov("kl_cov"))[0], look(batch).run(clip="none")[0]
    assert with_penalty - without == pytest.approx(20 / 13, rel=1e-6)
