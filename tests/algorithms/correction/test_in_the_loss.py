"""Corrections through the policy loss: the worked numbers of a whole objective, and one path for every loss."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from burnish.algorithms.correction.weights_and_rejection import CorrectionResult
from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch
from tests.algorithms.functions_with_defaults import CORRECTIONS

DUAL = {"clip_options": {"low": 0.2, "high": 0.2, "dual": 3.0}}


def corrected(batch: Batch, name: str, **options: Any) -> Batch:
    """What the trainer does before advantages."""
    found: CorrectionResult = CORRECTIONS[name](batch, **options)
    batch = batch.with_token(loss_mask=batch.loss_mask & found.keep)
    return batch if found.weights is None else batch.with_token(rollout_weight=found.weights)


def loss_of(batch: Batch, loss: PolicyLoss, mode: str = "token-mean") -> tuple[float, torch.Tensor]:
    batch = batch.with_token(weight=aggregation_weights(batch, mode))
    logp = batch.token["new"][batch.loss_mask].clone().requires_grad_()
    total, _ = loss(loss_view(batch, logp, torch.zeros_like(logp)))
    return total.item(), torch.autograd.grad(total, logp)[0]


@pytest.mark.parametrize(
    ("name", "options", "value"),
    [
        ("seed", {"threshold": 2.0}, 0.098355),
        ("seed", {"threshold": 2.0, "mode": "mask"}, -0.067782),
        ("seed", {"threshold": 2.0, "mode": "mask", "target": "mask"}, -0.07343),
        ("decoupled", {"weights": "token"}, 0.098355),
        ("decoupled", {"reject": {"token_k1": (0.5, 2.0)}}, -0.068089),
    ],
)
def test_dual_clip_with_a_correction(sampled: Batch, name: str, options: dict[str, Any], value: float) -> None:
    assert loss_of(corrected(sampled, name, **options), PolicyLoss(**DUAL))[0] == pytest.approx(value, abs=1e-5)


def test_the_geometric_mean_takes_the_geometric_mean_of_the_weights(sampled: Batch) -> None:
    loss = PolicyLoss(ratio="sequence", clip="log_geo", clip_options={"low": 0.4, "high": 0.4}, scope="sequence")
    found = loss_of(corrected(sampled, "seed", threshold=10.0), loss, "seq-mean-token-mean")[0]
    rho, weights = [1.051271, 1.221403, 1.491825, 1.051271], [1.025315, 1.051271, 1.419068, 1]
    advantages = [1.0, -1.0, -0.8, 0.6]
    expected = -sum(a * r * w for a, r, w in zip(advantages, rho, weights, strict=True)) / 4
    assert found == pytest.approx(expected, abs=1e-5)


def test_bypass_clips_around_the_engine(sampled: Batch) -> None:
    anchored = sampled.with_token(old_logp=sampled.token["behaviour_logp"])
    loss = PolicyLoss(**DUAL, bypass={"loss": "ppo_clip"}, scope="sequence")
    assert loss_of(anchored, loss)[0] == pytest.approx(0.140278, abs=1e-5)


def test_bypass_reinforce_weights_log_probs(sampled: Batch) -> None:
    anchored = sampled.with_token(old_logp=sampled.token["behaviour_logp"])
    options = {"loss": "reinforce", "weights": "sequence", "threshold": 2.0}
    loss = PolicyLoss(ratio="none", clip="none", loss="logprob", bypass=options, scope="sequence")
    value, gradient = loss_of(anchored, loss, "seq-mean-token-sum")
    assert value == pytest.approx(-0.037515, abs=1e-5)
    weights = [1.491825, 1.648721, 2, 2]
    expected = [
        -w * a / 4 for w, a, n in zip(weights, [1.0, -1.0, -0.8, 0.6], [4, 2, 3, 4], strict=True) for _ in range(n)
    ]
    assert gradient.tolist() == pytest.approx(expected, abs=1e-5)


def one_rejected(**columns: float) -> Batch:
    """One answer of four tokens with A = 1, whose last token the engine thought far less likely."""
    values = {"new": [-1.0] * 4, "old_logp": [-1.1, -1.1, -1.1, -4.0], "ref_logp": [-1.5] * 4}
    mask = torch.ones(4, dtype=torch.bool)
    token = {name: torch.tensor(column, dtype=torch.float64) for name, column in values.items()}
    token |= {name: torch.full((4,), value, dtype=torch.float64) for name, value in columns.items()}
    sequence = {"advantages": torch.ones(1, dtype=torch.float64), "key": torch.tensor([3])}
    masks = {"action_mask": mask, "loss_mask": mask}
    return Batch(torch.arange(4), torch.tensor([0, 4]), {**token, **masks}, sequence)


REJECTS = {"loss": "ppo_clip", "reject": {"token_k1": (0.5, 2.0)}}


@pytest.mark.parametrize(("ratio", "clip"), [("sequence", "none"), ("sequence", "log_geo"), ("seq_token", "none")])
def test_a_token_that_bypass_rejects_leaves_the_ratio_of_its_sequence(ratio: str, clip: str) -> None:
    batch = one_rejected()
    loss = PolicyLoss(ratio=ratio, clip=clip, bypass=REJECTS, scope="sequence")
    value, gradient = loss_of(batch, loss, "seq-mean-token-mean")
    assert value == pytest.approx(-0.828878, abs=1e-5)
    assert gradient.tolist() == pytest.approx([-0.276293] * 3 + [0], abs=1e-5)
    everything = PolicyLoss(ratio=ratio, clip="none", bypass={"loss": "ppo_clip"}, scope="sequence")
    value, gradient = loss_of(batch, everything, "seq-mean-token-mean")
    assert value == pytest.approx(-2.281881, abs=1e-5)  # mean l = 0.825: the last token is in the ratio
    assert gradient.tolist() == pytest.approx([-0.570470] * 4, abs=1e-5)


def test_a_token_that_bypass_rejects_has_no_kl_entropy_or_imitation_term() -> None:
    terms = {"kl_coef": 0.5, "kl_estimator": "k2", "entropy_coef": 0.1}
    batch = one_rejected(nll_weight=0.25).with_token(weight=torch.full((4,), 0.25, dtype=torch.float64))
    logp, entropy = (torch.full((4,), x, dtype=torch.float64, requires_grad=True) for x in (-1.0, 2.0))
    loss = PolicyLoss(clip="none", bypass=REJECTS, scope="sequence", **terms)
    total, _ = loss(loss_view(batch, logp, entropy))
    slopes = torch.autograd.grad(total, [logp, entropy])
    each = -1.105171 / 4 + 0.25 * 0.5 * 0.5 - 0.25
    assert slopes[0].tolist() == pytest.approx([each] * 3 + [0], abs=1e-5)
    assert slopes[1].tolist() == pytest.approx([-0.025] * 3 + [0], abs=1e-9)
    top = PolicyLoss(clip="none", bypass=REJECTS, scope="batch", entropy_top=0.34)
    entropies = torch.tensor([0.1, 0.5, 0.2, 9.0], dtype=torch.float64)  # the rejected token's is no top entropy
    slope = torch.autograd.grad(top(loss_view(batch, logp, entropies))[0], logp)[0]
    assert slope.tolist() == pytest.approx([-0.25, -0.25 - 1.105171 / 4, -0.25, 0], abs=1e-5)


def test_the_k3_estimate_of_bypass_is_not_clamped_and_summed_in_float64() -> None:
    batch = one_rejected()
    far = batch.with_token(old_logp=torch.tensor([-1.1, -1.1, -1.1, -101.0], dtype=torch.float64))
    for dtype in (torch.float64, torch.float32):
        logp = torch.full((4,), -1.0, dtype=dtype, requires_grad=True)
        view = loss_view(far.with_token(weight=torch.ones(4)), logp, torch.zeros_like(logp))
        _, sums = PolicyLoss(clip="none", bypass={"loss": "ppo_clip"}, scope="sequence")(view)
        assert float(sums["rollout_corr/k3_kl"]) == pytest.approx(math.exp(100), rel=1e-4)  # above the largest float32


EVERY: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(**DUAL),
    "gspo": PolicyLoss(ratio="sequence", scope="sequence"),
    "gpg": PolicyLoss(ratio="none", clip="none", loss="logprob"),
    "clip_cov": PolicyLoss(clip="clip_cov", scope="batch"),
    "kl_cov": PolicyLoss(clip="kl_cov", scope="batch"),
    "cispo": PolicyLoss(clip="is_weight", loss="sg_logprob"),
    "sapo": PolicyLoss(clip="soft"),
    "dppo_tv": PolicyLoss(clip="dppo_tv", loss="sg_logprob"),
    "dro": PolicyLoss(ratio="none", clip="none", loss="dro"),
}


@pytest.mark.parametrize("name", EVERY)
def test_a_weight_scales_the_policy_term_of_every_loss_and_nothing_else(sampled: Batch, name: str) -> None:
    batch = sampled.with_sequence(key=torch.arange(4))
    plain, gradient = loss_of(batch, EVERY[name])
    twice = batch.with_token(rollout_weight=torch.full((batch.num_tokens,), 2.0, dtype=torch.float64))
    value, scaled = loss_of(twice, EVERY[name])
    assert value == pytest.approx(2 * plain)
    torch.testing.assert_close(scaled, 2 * gradient)
    kl = {"kl_coef": 0.5, "kl_estimator": "k2"}
    with_kl = [loss_of(b, PolicyLoss(**{**vars(EVERY[name]), **kl}))[0] for b in (batch, twice)]
    assert with_kl[1] - with_kl[0] == pytest.approx(plain)


def test_identical_policies_leave_the_loss_bit_for_bit(sampled: Batch) -> None:
    same = sampled.with_token(behaviour_logp=sampled.token["old_logp"])
    plain = loss_of(same, PolicyLoss(**DUAL))
    for name, options in (("seed", {}), ("seed", {"level": "sequence"}), ("decoupled", {"weights": "token"})):
        value, gradient = loss_of(corrected(same, name, **options), PolicyLoss(**DUAL))
        assert value == plain[0]
        assert torch.equal(gradient, plain[1])


def test_measuring_alone_leaves_the_loss_bit_for_bit(sampled: Batch) -> None:
    plain = loss_of(sampled, PolicyLoss(**DUAL))
    for name, options in (("seed", {"apply": False}), ("decoupled", {})):
        value, gradient = loss_of(corrected(sampled, name, **options), PolicyLoss(**DUAL))
        assert math.isfinite(value)
        assert value == plain[0]
        assert torch.equal(gradient, plain[1])
