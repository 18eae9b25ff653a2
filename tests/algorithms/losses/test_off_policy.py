"""VESPO, TOPR, M2PO, REC, OPMD and the squared anchor: the worked numbers of ALGORITHMS-2026.md N1.3 and N3, and the invariants of N9."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.off_policy_spec import SecondMomentClip
from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.losses.ratios_and_clips import SECOND_MOMENT_KEPT, second_moment_mask
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import aggregation_weights, kl_estimate
from burnish.core.batch import Batch
from burnish.trainers.minibatches import with_second_moment_mask
from tests.algorithms.correction.conftest import ROLLOUT
from tests.algorithms.functions_with_defaults import gamma_clip

Look = Callable[..., Any]
LENGTHS = [4, 2, 3, 4]
PLAIN = {"ratio": "none", "clip": "none", "loss": "logprob"}
VESPO = {"clip": "gamma", "loss": "sg_logprob", "scope": "sequence"}
TAPER = {"clip": "taper", "loss": "sg_logprob", "scope": "sequence"}
REC = {"ratio": "none", "clip": "none", "loss": "rec"}
GAMMA_GRADIENT = [-0.049069] * 4 + [0.095503] * 2 + [0.067311] * 3 + [-0.001968] * 4


@pytest.fixture(scope="module")
def sampled(f1: Batch) -> Batch:
    """F1 with the engine's log-probs."""
    rows = [x for row in ROLLOUT for x in [float("nan"), *row]]
    return f1.with_token(behaviour_logp=torch.tensor(rows, dtype=torch.float64))


def by_row(values: list[float]) -> list[list[float]]:
    starts = [0, 4, 6, 9, 13]
    return [values[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def with_sign(batch: Batch, sign: float) -> Batch:
    return batch.with_sequence(advantages=sign * batch.sequence["advantages"].abs())


# --- VESPO -------------------------------------------------------------------------------------------------------------


def test_vespo(f1: Batch, look: Look) -> None:
    loss, gradient, metrics = look(f1).run(**VESPO)
    assert loss == pytest.approx(-0.250805, abs=1e-5)
    assert gradient == pytest.approx(GAMMA_GRADIENT, abs=1e-5)
    weights = [0.637898, 1.241538, 1.0938, 0.042645]
    assert metrics["sequence_weight"] == pytest.approx(
        sum(w * n for w, n in zip(weights, LENGTHS, strict=True)) / 13, abs=1e-5
    )


def test_the_gradient_of_vespo_does_not_go_through_its_weight(f1: Batch, look: Look) -> None:
    seen = look(f1)
    z = seen.view.sum(seen.view.logp - seen.view.column("old_logp"))
    phi = torch.where(
        seen.view.mean(seen.view.column("advantages")) >= 0, 3 + 2 * z - 3 * z.exp(), 2 + 3 * z - 2 * z.exp()
    ).exp()
    loss = (-seen.view.spread(phi) * seen.view.column("advantages") * seen.view.logp).mean()
    assert loss.item() == pytest.approx(-0.250805, abs=1e-5)
    assert seen.gradient(loss)[seen.view.token["index"]].tolist()[:4] != pytest.approx(GAMMA_GRADIENT[:4], abs=1e-3)


def test_correction_weights_are_part_of_the_ratio_of_vespo_and_not_a_second_factor(sampled: Batch, look: Look) -> None:
    weight = (sampled.token["old_logp"] - sampled.token["behaviour_logp"]).exp()
    batch = sampled.with_token(rollout_weight=weight)
    loss, _, metrics = look(batch).run(**VESPO)
    assert loss == pytest.approx(-0.111698, abs=1e-5)
    weights = [0.508915, 1.22453, 0.420468, 0.042645]
    mean = sum(w * n for w, n in zip(weights, LENGTHS, strict=True)) / 13
    assert metrics["sequence_weight"] == pytest.approx(mean, abs=1e-5)
    rejected = weight.masked_fill(torch.arange(weight.numel()) == 1, 0.0)
    assert look(sampled.with_token(rollout_weight=rejected)).run(**VESPO)[1][:4] == pytest.approx([0] * 4, abs=1e-9)


@pytest.mark.parametrize(
    ("sign", "ratios", "expected"),
    [
        (1, [0.25, 0.5, 2 / 3, 1, 2, 4], [0.592983, 1.120422, 1.208125, 1, 0.199148, 0.001975]),
        (-1, [0.25, 0.5, 1, 1.5, 2, 4], [0.070026, 0.339785, 1, 1.241593, 1.082682, 0.15864]),
    ],
)
def test_the_weight_of_vespo_by_ratio(sign: float, ratios: list[float], expected: list[float]) -> None:
    zeros = torch.zeros(6, dtype=torch.float64)
    columns = {"advantages": torch.full_like(zeros, sign)}
    view = LossView(torch.arange(7), columns, {}, torch.tensor(ratios, dtype=torch.float64).log())
    found, _ = gamma_clip(view, zeros, columns["advantages"], zeros)
    assert found.tolist() == pytest.approx(expected, abs=1e-5)
    far = LossView(torch.tensor([0, 2]), {}, {}, torch.tensor([300.0, -3.0]))
    assert gamma_clip(far, zeros[:2], torch.ones(2), torch.zeros(2))[0].tolist() == [0, 0]


# --- TOPR --------------------------------------------------------------------------------------------------------------


def test_topr_by_token_and_by_sequence(f1: Batch, sampled: Batch, look: Look) -> None:
    loss, gradient, _ = look(f1).run(ratio="token", **TAPER)
    assert loss == pytest.approx(0.165749, abs=1e-5)
    rows, plain = by_row(gradient), by_row(look(f1).run(**PLAIN)[1])
    assert rows[1] == pytest.approx([0.062979, 0.076923], abs=1e-5)
    assert rows[2] == pytest.approx([0.061538, 0.013731, 0.061538], abs=1e-5)
    assert (rows[0], rows[3]) == (pytest.approx(plain[0]), pytest.approx(plain[3]))
    anchored = sampled.with_token(old_logp=sampled.token["behaviour_logp"])
    loss, gradient, metrics = look(anchored, "seq-mean-token-sum").run(ratio="seq_prod", **TAPER)
    assert loss == pytest.approx(0.125, abs=1e-5)
    assert metrics["pg_clipfrac"] == 0
    lower = anchored.token["new"].clone()
    lower[6] -= 0.9  # the sum of row 1's log-ratios becomes -0.4
    found = look(anchored.with_token(new=lower), "seq-mean-token-sum").run(ratio="seq_prod", **TAPER)
    assert by_row(found[1])[1] == pytest.approx([0.67032 / 4] * 2, abs=1e-5)
    assert found[2]["pg_clipfrac"] == pytest.approx(2 / 13)


@pytest.mark.parametrize("ratio", ["token", "seq_prod"])
def test_topr_is_plain_policy_gradient_on_policy_and_for_good_answers(f1: Batch, look: Look, ratio: str) -> None:
    for batch in (f1.with_token(new=f1.token["old_logp"]), with_sign(f1, 1)):
        found, plain = (look(batch).run(**options) for options in ({"ratio": ratio, **TAPER}, PLAIN))
        assert found[:2] == (pytest.approx(plain[0]), pytest.approx(plain[1]))


# --- M2PO --------------------------------------------------------------------------------------------------------------

M2 = {"clip": "second_moment"}


def squares(batch: Batch) -> Tensor:
    return ((batch.token["behaviour_logp"] - batch.token["old_logp"]) ** 2)[batch.loss_mask]


@pytest.mark.parametrize(
    ("tau", "kept", "left"),
    [
        (1.0, [1] * 13, 0.096731),
        (0.04, [1] * 8 + [0] + [1] * 4, 0.003958),
        (0.01, [1] * 8 + [0] + [1] * 4, 0.003958),
        (0.002, [1, 1, 0, 1, 1, 0, 1, 1, 0, 1, 1, 0, 1], 0.001944),
        (1e-9, None, 0.0),
    ],
)
def test_the_second_moment_mask(sampled: Batch, tau: float, kept: list[int] | None, left: float) -> None:
    q = squares(sampled)
    mask = second_moment_mask(q, tau)
    if kept is None:  # five tokens have q = 0: their mean is below any tau
        assert mask.tolist() == (q == 0).tolist()
    else:
        assert mask.tolist() == [bool(k) for k in kept]
    assert float(q[mask].mean()) == pytest.approx(left, abs=1e-6)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, 4.0]), min_size=1, max_size=9), st.floats(0.01, 5))
@settings(max_examples=80, deadline=None)
def test_the_mask_keeps_as_much_as_the_bound_allows(values: list[float], tau: float) -> None:
    q = torch.tensor(values, dtype=torch.float64)
    mask = second_moment_mask(q, tau)
    kept, num = q[mask], int(mask.sum())
    assert num >= 1
    assert kept.mean() < tau or num == 1
    assert float(kept.max()) <= min((float(x) for x in q[~mask]), default=float("inf"))
    if num < len(values):  # one more, the smallest of the dropped, would reach the bound
        assert (kept.sum() + q[~mask].min()) / (num + 1) >= tau
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(len(values)))
    assert sorted(q[order][second_moment_mask(q[order], tau)].tolist()) == sorted(kept.tolist())
    ties = second_moment_mask(torch.full((4,), 1.0), 0.5)
    assert ties.tolist() == [False, False, False, True]


def test_m2po_drops_tokens_from_the_gradient_and_by_choice_from_the_mean(sampled: Batch, look: Look) -> None:
    batch = with_second_moment_mask(sampled, SecondMomentClip(tau=0.04))
    plain, unclipped = look(sampled).run(clip="none")[:2]
    loss, gradient, metrics = look(batch).run(**M2)
    assert gradient == pytest.approx([g if k != 8 else 0 for k, g in enumerate(unclipped)], abs=1e-12)
    assert loss == pytest.approx(plain - 0.8 * 1.349859 / 13, abs=1e-5)
    assert metrics["second_moment_dropped"] == pytest.approx(1 / 13)
    kept = look(with_second_moment_mask(sampled, SecondMomentClip(tau=0.04, denominator="kept"))).run(**M2)
    assert kept[0] == pytest.approx(loss * 13 / 12)
    assert kept[1] == pytest.approx([g * 13 / 12 for k, g in enumerate(gradient) if k != 8])
    bounds = {"low": 0.2, "high": 0.2}
    clipped = look(batch).run(clip="second_moment", clip_options=bounds)[1]
    ppo = look(sampled).run(clip="ppo", clip_options=bounds)[1]
    assert clipped == pytest.approx([g if k != 8 else 0 for k, g in enumerate(ppo)], abs=1e-12)
    assert SECOND_MOMENT_KEPT not in sampled.token


@pytest.mark.parametrize("denominator", ["all", "kept"])
def test_the_gradient_of_m2po_is_the_same_for_any_micro_batch_split(
    sampled: Batch, look: Look, denominator: Any
) -> None:
    """The bound drops four tokens of the whole mini-batch; on its parts alone it would drop others."""
    batch = with_second_moment_mask(sampled, SecondMomentClip(tau=0.002, denominator=denominator))
    weighted = batch.with_token(weight=aggregation_weights(batch, "prompt-mean"), index=torch.arange(batch.num_tokens))
    theta = weighted.token["new"].clone().requires_grad_()

    def gradient(parts: list[Batch]) -> Tensor:
        total = sum(PolicyLoss(**M2)(look(part, None, theta).view)[0] for part in parts)
        return torch.autograd.grad(total, theta)[0]

    whole = gradient([weighted])
    assert int((whole[batch.loss_mask] == 0).sum()) == (4 if denominator == "all" else 0)
    for split in ([[0], [1, 2, 3]], [[3, 1], [2, 0]], [[0], [1], [2], [3]]):
        found = gradient([weighted.select(torch.tensor(part)) for part in split])
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-12)


# --- REC and OPMD --------------------------------------------------------------------------------------------------------


def test_rec_on_one_side(f1: Batch, look: Look) -> None:
    keep = [0, 1, 0, 1, 1, 1, 1, 0, 1, 0, 1, 1, 1]
    loss, gradient, metrics = look(f1).run(**REC, loss_options={"keep": "one_side"})
    assert loss == pytest.approx(-0.036923, abs=1e-5)
    plain = look(f1).run(**PLAIN)[1]
    assert gradient == pytest.approx([g * k for g, k in zip(plain, keep, strict=True)])
    assert metrics["pg_clipfrac"] == pytest.approx(4 / 13)
    loss, gradient, _ = look(f1).run(**REC, loss_options={"keep": "one_side", "weight": "ratio"})
    assert loss == pytest.approx(-0.20743, abs=1e-5)
    assert gradient == pytest.approx(look(f1).run(clip="ppo")[1])  # PPO's gradient, with its default bounds of 0.2


@pytest.mark.parametrize(
    ("options", "keep"),
    [
        ({"keep": "two_side"}, [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 0]),
        ({"keep": "ring", "outer_low": 0.3, "outer_high": 0.7}, [0, 1, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0]),
        ({"keep": "all"}, [1] * 13),
    ],
)
def test_the_other_members_of_rec(f1: Batch, look: Look, options: dict[str, Any], keep: list[int]) -> None:
    plain = look(f1).run(**PLAIN)[1]
    found = look(f1).run(**REC, loss_options=options)[1]
    assert found == pytest.approx([g * k for g, k in zip(plain, keep, strict=True)])
    weighted = look(f1).run(**REC, loss_options={**options, "weight": "advantage", "temperature": 2.0})[1]
    factors = [[1.648721] * 4, [0.606531] * 2, [0.67032] * 3, [1.349859] * 4]
    assert weighted == pytest.approx([g * w for g, w in zip(found, chain(*factors), strict=True)], abs=1e-6)
    more = look(f1).run(**REC, loss_options={**options, "square": 0.1, "imitation": 0.2})[1]
    mask = f1.loss_mask
    gap = (f1.token["new"] - f1.token["old_logp"])[mask].tolist()
    assert more == pytest.approx([g + (0.2 * x - 0.2) / 13 for g, x in zip(found, gap, strict=True)])


def test_opmd_halves_the_policy_gradient_at_tau_1(f1: Batch, look: Look) -> None:
    found, plain = (look(f1).run(**options) for options in ({**PLAIN, "loss": "opmd"}, PLAIN))
    assert found[0] == pytest.approx(0.019231, abs=1e-5)
    assert plain[0] == pytest.approx(0.038462, abs=1e-5)
    assert found[1] == pytest.approx([g / 2 for g in plain[1]])


# --- the squared anchor ------------------------------------------------------------------------------------------------


def test_the_squared_anchor_is_k2_to_the_policy_that_sampled_on_every_token(sampled: Batch, look: Look) -> None:
    gap = (sampled.token["new"] - sampled.token["behaviour_logp"])[sampled.loss_mask]
    assert float(gap.square().mean()) == pytest.approx(0.646731, abs=1e-6)
    batch = sampled.with_token(ref_logp=sampled.token["behaviour_logp"])
    tv = {"clip": "dppo_tv", "loss": "sg_logprob", "clip_options": {"low": 0.0, "high": 0.0}}  # drops most tokens
    plain, anchored = (look(batch).run(**tv, kl_estimator="k2", kl_coef=coef) for coef in (0.0, 0.002))
    assert anchored[0] - plain[0] == pytest.approx(0.001 * 0.646731, abs=1e-8)
    more = [a - p for a, p in zip(anchored[1], plain[1], strict=True)]
    assert more == pytest.approx((0.002 * gap / 13).tolist(), abs=1e-12)
    assert kl_estimate(torch.tensor(1.0), torch.tensor(0.5), "k2") == 0.125


def test_a_symmetric_trust_region_bounds_both_ways_of_moving(f1: Batch, look: Look) -> None:
    mask = f1.loss_mask
    rise = (f1.token["new"].exp() - f1.token["old_logp"].exp())[mask]
    options = {"low": 0.1, "high": 0.1, "symmetric": True}
    gradient = look(f1).run(clip="dppo_tv", loss="sg_logprob", clip_options=options)[1]
    assert [g != 0 for g in gradient] == (rise.abs() <= 0.1).tolist()
    for sign in (1, -1):
        one = look(with_sign(f1, sign)).run(clip="dppo_tv", loss="sg_logprob", clip_options=options)[1]
        assert [g != 0 for g in one] == (rise.abs() <= 0.1).tolist()


# --- what is refused ---------------------------------------------------------------------------------------------------

GAMMA = {"clip": "gamma", "loss": "sg_logprob"}
TOPR = {"clip": "taper", "ratio": "seq_prod", "loss": "sg_logprob"}
BARE = {"ratio": "none", "clip": "none"}


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({**TOPR, "correction": "decoupled_token_is"}, "would multiply the loss by another"),
        ({**TOPR, "correction": {"name": "budget", "ess": 0.9}}, "would multiply the loss by another"),
        ({**GAMMA, "correction": "decoupled_seq_is"}, "adds up the weights of single tokens"),
        ({**GAMMA, "correction": {"name": "seed", "level": "geometric"}}, "adds up the weights of single tokens"),
        ({**GAMMA, "correction": {"name": "decoupled", "weights": "token", "batch_normalise": True}}, "single tokens"),
        ({**GAMMA, "ratio": "sequence"}, "clip gamma bounds ratio token"),
        ({"clip": "second_moment", "correction": "bypass"}, "compares the log-probs of engine and trainer"),
        ({"filters": ["seq_error"], "correction": "bypass"}, "filter seq_error compares the log-probs"),
        ({"clip": "second_moment", "replay": {}}, "replayed samples are anchored at the engine's"),
        ({"clip": {"name": "second_moment", "low": 0.2}}, "set both, or neither"),
        ({**BARE, "loss": {"name": "rec", "low": 0.1}}, "keep is all: set keep=one_side"),
        ({**BARE, "loss": {"name": "rec", "keep": "one_side", "outer_low": 0.7}}, "belong to keep ring"),
        ({**BARE, "loss": {"name": "rec", "keep": "ring", "outer_low": 0.1}}, "must be at least low and high"),
        ({**BARE, "loss": {"name": "rec", "temperature": 2.0}}, "belongs to weight advantage"),
        (
            {"kl": {"loss": {"estimator": "full", "coef": 0.1}, "reference": "rollout"}},
            "knows the sampled tokens alone",
        ),
        ({"kl": {"reward": {"coef": 0.1}, "reference": "rollout"}}, "would compare the sampling policy with itself"),
        (
            {**BARE, "advantage": "none", "loss": "dpo", "kl": {"reference": "rollout"}},
            "set algorithm.kl.reference=frozen",
        ),
        ({"filters": ["clip_b"], **BARE, "advantage": "none", "loss": "nll"}, "clip_b chooses by the advantages"),
    ],
)
def test_what_does_not_go_together_is_refused(tree: dict[str, Any], text: str) -> None:
    with pytest.raises(ValidationError, match=text):
        Algorithm.model_validate(tree)


def test_vespo_and_topr_take_the_corrections_that_fit() -> None:
    for tree in (
        {**GAMMA, "correction": "decoupled_token_is"},
        {**GAMMA, "correction": {"name": "seed", "mode": "mask"}},
        {**GAMMA, "correction": "bypass"},
        {**TOPR, "correction": "bypass"},
        {**TOPR, "correction": "decoupled_geo_rs"},
    ):
        assert Algorithm.model_validate(tree)
    assert PolicyLoss(**VESPO).scope == "sequence"
