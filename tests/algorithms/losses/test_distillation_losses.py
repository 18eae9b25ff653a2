"""Losses of the distillation family on the worked numbers of ALGORITHMS-2026.md N4 and N6.5, and their invariants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import aggregation_weights, chord_weight, kl_advantages
from burnish.config.loading import algorithm_from_preset
from burnish.core.batch import Batch
from burnish.trainers.minibatches import build_policy_loss, mini_batches, scaled_loss
from tests.algorithms.conftest import behind_prompts
from tests.algorithms.functions_with_defaults import distillation, non_stub

Look = Callable[..., Any]
ROLLOUT = [[-1.05, -0.45, -2.1, -0.1], [-0.7, -1.3], [-1.75, -0.9, -2.6], [-2.2, -0.4, -0.5, -1.2]]
SDPO_GRADIENT = [0, 0, 0, 0, -0.010234, 0.091106, 0.166667, -0.026032, 0.022498, 0.125, 0.00625, 0.006907, -0.01852]
OPSD_GRADIENT = [
    *(0.02967, -0.000069, 0.042141, 0.007692, -0.006329, 0.062069, 0.26868, -0.000231, 0.062603),
    *(0.255578, 0.007692, 0.007692, -0.025222),
]


@pytest.fixture(scope="module")
def taught(f1: Batch) -> Batch:
    """F1 with the engine's log-probs; its reference is the teacher."""
    rollout = behind_prompts(ROLLOUT, float("nan"))
    return f1.with_token(behaviour_logp=rollout, author_logp=rollout)


def of_preset(name: str, **slots: Any) -> dict[str, Any]:
    """The policy loss of a preset, as keyword arguments of `run`."""
    algorithm = Algorithm.model_validate({**algorithm_from_preset(name).model_dump(), **slots})
    made = build_policy_loss(algorithm, None)
    return {"ratio": made.ratio, "clip": made.clip, "loss": made.loss, "loss_options": made.loss_options}


@pytest.mark.parametrize(("active", "expected"), [([0, 1, 1, 1], -0.198332), ([1, 1, 1, 1], -0.252337)])
def test_sdpo_counts_rows_without_a_teacher_with_a_loss_of_zero(
    taught: Batch, look: Look, active: list[int], expected: float
) -> None:
    batch = taught.with_sequence(taught=torch.tensor(active).bool())
    loss, gradient, _ = look(batch, "seq-mean-token-mean").run(**of_preset("sdpo"))
    assert loss == pytest.approx(expected, abs=1e-5)
    if not active[0]:
        assert gradient == pytest.approx(SDPO_GRADIENT, abs=1e-5)
        alone = look(taught.select(torch.tensor([1, 2, 3])), "seq-mean-token-mean").run(**of_preset("sdpo"))[0]
        assert alone == pytest.approx(-0.264443, abs=1e-5)  # over active rows only, which is not what is meant


def test_sdpo_without_any_success_has_loss_and_gradient_zero(taught: Batch, look: Look) -> None:
    batch = taught.with_sequence(taught=torch.zeros(4, dtype=torch.bool))
    loss, gradient, _ = look(batch, "seq-mean-token-mean").run(**of_preset("sdpo"))
    assert loss == 0
    assert gradient == [0.0] * 13


def test_sdpo_beside_the_policy_loss_is_their_weighted_sum(taught: Batch, look: Look) -> None:
    mixed = {"name": "divergence", "support": "sampled", "cap": 2.0, "weight": 0.25}
    seen = look(taught)
    own, ppo = seen.run(**of_preset("sdpo"))[0], seen.run()[0]
    assert seen.run(**of_preset("sdpo", loss=mixed, advantage="grpo"))[0] == pytest.approx(0.75 * ppo + 0.25 * own)


def test_opsd(taught: Batch, look: Look) -> None:
    loss, gradient, metrics = look(taught).run(**of_preset("opsd"))
    assert loss == pytest.approx(0.712145, abs=1e-5)
    assert gradient == pytest.approx(OPSD_GRADIENT, abs=1e-5)
    assert metrics["kept_tokens"] == pytest.approx(11 / 13)


def test_iw_opd_weights_early_tokens_more(taught: Batch, look: Look) -> None:
    batch = taught.with_token(
        ref_logp=torch.where(taught.action_mask, taught.token["ref_logp"], 0.0),
        behaviour_logp=torch.where(taught.action_mask, taught.token["behaviour_logp"], 0.0),
    )
    gap = batch.token["ref_logp"] - batch.token["behaviour_logp"]
    batch = replace(batch, sequence={k: v for k, v in batch.sequence.items() if k != "advantages"})
    rewarded = batch.with_token(token_rewards=gap).with_sequence(reward=torch.zeros(4, dtype=torch.float64))
    weighted = distillation(rewarded, prefix_weight=0.5)
    expected = [
        *(1.5, 1.458333, 1.333333, 1.083333, 1.5, 1.375, 1.5, 1.419355, 1.387097),
        *(1.5, 1.333333, 1.25, 1.166667),
    ]
    mask = batch.action_mask
    assert (weighted[mask] / gap[mask]).tolist() == pytest.approx(expected, abs=1e-5)
    for advantages, value in ((weighted, 0.215377), (distillation(rewarded), 0.159231)):
        loss, gradient, _ = look(batch.with_token(advantages=advantages)).run(**of_preset("iw_opd"))
        assert loss == pytest.approx(value, abs=1e-5)
        if advantages is weighted:
            assert gradient[:4] == pytest.approx([0.005769, 0.016827, -0.030769, 0.008333], abs=1e-5)


def test_a_teacher_added_to_any_advantage(taught: Batch) -> None:
    found = kl_advantages(taught, taught.sequence["advantages"], 1.0)
    expected = [0.9, 0.9, 1.2, 0.9, -1.1, -0.8, -0.5, -0.9, -0.7, 0.8, 0.5, 0.6, 0.7]
    assert found[taught.action_mask].tolist() == pytest.approx(expected, abs=1e-9)
    assert not found[~taught.action_mask].any()
    clamped = kl_advantages(taught, taught.sequence["advantages"], 1.0, clamp=0.1)
    assert clamped[taught.action_mask].tolist()[2] == pytest.approx(1.1)


def test_joint_distillation_and_rl(taught: Batch, look: Look) -> None:
    """AReaL's k1 reproduces its number; the preset has k2, whose gradient is that of the KL."""
    seen, made = look(taught), build_policy_loss(algorithm_from_preset("kdrl"), None)
    assert seen.run(kl_estimator="k1", kl_coef=made.kl_coef)[0] == pytest.approx(0.061905, abs=1e-5)
    loss, _, metrics = seen.run(kl_estimator=made.kl_estimator, kl_coef=made.kl_coef)
    assert loss == pytest.approx(0.061405 + 0.005 * metrics["kl_ref"], abs=1e-6)
    clamped = seen.run(kl_estimator="k1", kl_coef=1.0, kl_clamp=0.2)[2]["kl_ref"]
    gaps = (taught.token["new"] - taught.token["ref_logp"])[taught.loss_mask]
    assert clamped == pytest.approx(float(gaps.clamp(-0.2, 0.2).mean()))


def test_the_gradient_does_not_depend_on_the_split(taught: Batch, look: Look) -> None:
    """Weights are fixed on the whole; parts add up, also one in which no row has a teacher."""
    batch = taught.with_sequence(taught=torch.tensor([False, True, True, False]), trajectory_ids=torch.arange(4))
    (whole,) = mini_batches(batch, algorithm_from_preset("sdpo"), 1, 1, 4)
    loss, gradient, _ = look(whole, None).run(**of_preset("sdpo"))
    parts = [look(whole.select(torch.tensor(rows)), None).run(**of_preset("sdpo")) for rows in ([0], [1, 2], [3])]
    assert sum(part[0] for part in parts) == pytest.approx(loss)
    assert [x for part in parts for x in part[1]] == pytest.approx(gradient)


# --- CHORD and SSD


def test_chord_weighs_demonstrations_by_what_the_policy_knows_of_them(f1: Batch, look: Look) -> None:
    logp = torch.tensor([-0.2, -1.0, -3.0], dtype=torch.float64)
    batch = Batch(
        tokens=torch.arange(4),
        offsets=torch.tensor([0, 4]),
        token={"new": torch.cat([torch.zeros(1), logp]), "loss_mask": torch.tensor([False, True, True, True])},
        sequence={"trajectory_ids": torch.zeros(1, dtype=torch.long)},
    )
    seen = look(batch)
    loss, _ = NllLoss("phi")(seen.view)
    assert loss.item() == pytest.approx(0.134717, abs=1e-5)
    gradient = seen.gradient(loss)[1:].tolist()
    assert gradient == pytest.approx([-0.04947, -0.077515, -0.015769], abs=1e-5)
    assert NllLoss()(seen.view)[0].item() == pytest.approx(1.4)
    weights = logp.exp()
    assert NllLoss("importance")(seen.view)[0].item() == pytest.approx(float((-weights * logp).mean()))
    mini = look(scaled_loss(f1.with_token(weight=aggregation_weights(f1, "token-mean")), 0.9), None)
    scaled = scaled_loss(batch.with_token(weight=aggregation_weights(batch, "token-mean")), 0.1)
    total = mini.run()[0] + NllLoss("phi")(look(scaled, None).view)[0].item()
    assert total == pytest.approx(0.068736, abs=1e-5)


def test_chords_share_rises_and_falls() -> None:
    found = [chord_weight(step, 0.5, 0.02, 200, 400) for step in (0, 100, 200, 400, 600, 1000)]
    assert found == pytest.approx([0, 0.25, 0.5, 0.26, 0.02, 0.02], abs=1e-9)
    assert chord_weight(0, 0.1, 0.1, 0, 0) == 0.1


def test_ssd_is_the_likelihood_of_what_is_no_stub(f1: Batch, look: Look) -> None:
    assert look(f1).run(**of_preset("ssd"))[0] == pytest.approx(0.938462, abs=1e-5)
    kept = non_stub(f1)  # empty, a line of 9 characters, two lines, a line of 10
    assert [bool(part.any()) for part in kept.split([5, 3, 4, 5])] == [False, False, True, True]
