"""Loss records: ratio, clip, KL and entropy put together, on the worked numbers of ALGORITHMS.md 5, 6.8 and 11.3."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.aggregation import aggregation_weights
from burnish.algorithms.filters import overlong
from burnish.algorithms.losses import NllLoss, Outputs, PolicyLoss
from burnish.core.batch import Batch

PLAIN: dict[str, Any] = {"ratio": "none", "clip": "none", "loss": "logprob"}


def columns(batch: Batch, mode: str = "token-mean", *names: str) -> dict[str, Tensor]:
    """What a learner hands over: values at the tokens in the loss."""
    mask = batch.loss_mask
    result = {"weight": aggregation_weights(batch, mode, 4)[mask]}
    result["advantages"] = batch.sequence["advantages"][batch.sequence_ids[mask]]
    return result | {name: batch.token[name][mask] for name in names}


def outputs(batch: Batch, entropy: Tensor | None = None) -> Outputs:
    return Outputs(batch.token["new"][batch.loss_mask].clone().requires_grad_(), entropy)


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of)[0]


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


def test_ppo_with_its_metrics(f1: Batch) -> None:
    loss, sums = PolicyLoss()(outputs(f1), columns(f1, "token-mean", "old_logp"))
    assert loss.item() == pytest.approx(0.061405, abs=1e-6)
    assert float(sums["pg_clipfrac"]) / 13 == pytest.approx(0.307692, abs=1e-6)
    assert float(sums["ppo_kl"]) / 13 == pytest.approx(-0.138462, abs=1e-6)


def test_dual_clip_reaches_the_clip_through_its_options(f1: Batch) -> None:
    loss, sums = PolicyLoss(clip_options={"dual": 3.0})(outputs(f1), columns(f1, "token-mean", "old_logp"))
    assert loss.item() == pytest.approx(0.020217, abs=1e-6)
    assert float(sums["pg_clipfrac_lower"]) / 13 == pytest.approx(0.076923, abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 0.038462),
        ("token-sum", 0.5),
        ("seq-mean-token-sum", 0.125),
        ("seq-mean-token-mean", -0.130833),
        ("seq-mean-token-sum-norm", 0.03125),
    ],
)
def test_plain_policy_gradient_under_every_aggregation(f1: Batch, mode: str, expected: float) -> None:
    loss, _ = PolicyLoss(**PLAIN)(outputs(f1), columns(f1, mode))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_plain_policy_gradient_has_the_advantage_as_gradient(f1: Batch) -> None:
    out = outputs(f1)
    loss, _ = PolicyLoss(**PLAIN)(out, columns(f1))
    a, b, c, d = -0.076923, 0.076923, 0.061538, -0.046154
    close(gradient(loss, out.logp), [a, a, a, a, b, b, c, c, c, d, d, d, d])


def test_composition_of_policy_kl_and_entropy(f1: Batch) -> None:
    entropy = torch.full((13,), 0.9, dtype=torch.float64, requires_grad=True)
    record = PolicyLoss(clip_options={"dual": 3.0}, kl_estimator="k3", kl_coef=0.001, entropy_coef=0.01)
    out = outputs(f1, entropy)
    loss, sums = record(out, columns(f1, "token-mean", "old_logp", "ref_logp"))
    assert loss.item() == pytest.approx(0.011427, abs=1e-6)
    assert float(sums["kl_ref"]) / 13 == pytest.approx(0.209463, abs=1e-6)
    assert float(sums["entropy"]) / 13 == pytest.approx(0.9, abs=1e-12)
    close(gradient(loss, entropy), [-0.01 / 13] * 13, atol=1e-15)


def test_kl_is_aggregated_like_the_policy_term(f1: Batch) -> None:
    quiet = f1.with_sequence(advantages=torch.zeros(4, dtype=torch.float64))
    record = PolicyLoss(kl_estimator="k3", kl_coef=2.0)
    loss, _ = record(outputs(quiet), columns(quiet, "seq-mean-token-mean", "old_logp", "ref_logp"))
    assert loss.item() == pytest.approx(2 * 0.217444, abs=2e-6)


def test_without_old_log_probs_the_policy_is_its_own_anchor(f1: Batch) -> None:
    out = outputs(f1)
    loss, sums = PolicyLoss()(out, columns(f1, "seq-mean-token-mean"))
    plain_out = outputs(f1)
    plain, _ = PolicyLoss(**PLAIN)(plain_out, columns(f1, "seq-mean-token-mean"))
    # The ratio is 1, so the value is the weighted mean of -A, and the gradient that of plain policy gradient.
    assert loss.item() == pytest.approx(-(1.0 - 1.0 - 0.8 + 0.6) / 4, abs=1e-12)
    torch.testing.assert_close(gradient(loss, out.logp), gradient(plain, plain_out.logp), atol=1e-14, rtol=0)
    assert (float(sums["pg_clipfrac"]), float(sums["ppo_kl"])) == (0, 0)


@pytest.mark.parametrize("name", ["pg_clipfrac", "ppo_kl"])
def test_metrics_add_over_micro_batches(f1: Batch, name: str) -> None:
    whole = PolicyLoss()(outputs(f1), columns(f1, "token-mean", "old_logp"))[1][name]
    parts = [f1.select(torch.tensor(i)) for i in ([2, 0], [1], [3])]
    total = sum(float(PolicyLoss()(outputs(p), columns(p, "token-sum", "old_logp"))[1][name]) for p in parts)
    assert total == pytest.approx(float(whole), abs=1e-12)


def test_the_drift_metric_sees_the_clamped_log_ratio() -> None:
    out = Outputs(torch.tensor([-50.0, -1.0]), None)
    given = {"weight": torch.ones(2), "advantages": torch.ones(2), "old_logp": torch.tensor([-1.0, -1.5])}
    assert float(PolicyLoss()(out, given)[1]["ppo_kl"]) == pytest.approx(20 - 0.5)


def test_overlong_filtering_renormalises_the_mean(f1: Batch) -> None:
    kept = f1.with_token(loss_mask=overlong(f1))
    loss, _ = PolicyLoss()(outputs(kept), columns(kept, "token-mean", "old_logp"))
    assert loss.item() == pytest.approx(0.358428, abs=1e-6)


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 0.938462), ("seq-mean-token-mean", 0.941667)])
def test_negative_log_likelihood(f1: Batch, mode: str, expected: float) -> None:
    loss, sums = NllLoss()(outputs(f1), columns(f1, mode))
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert float(sums["nll"]) / 13 == pytest.approx(0.938462, abs=1e-6)


def test_a_micro_batch_without_a_token_in_the_loss_adds_exactly_nothing() -> None:
    empty = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    nothing = {name: empty.detach() for name in ("weight", "advantages", "old_logp", "ref_logp")}
    for record in (NllLoss(), PolicyLoss(kl_coef=0.1, entropy_coef=0.1)):
        loss, sums = record(Outputs(empty, empty), nothing)
        assert loss.item() == 0
        assert all(float(v) == 0 for v in sums.values())


def squared(logp: Tensor, anchor: Tensor, advantages: Tensor, scale: float = 1.0) -> Tensor:
    return scale * (logp - anchor - advantages) ** 2


def test_a_users_loss_replaces_the_policy_term_and_nothing_else(f1: Batch) -> None:
    record = PolicyLoss(custom=squared, custom_options={"scale": 0.5}, kl_estimator="k2", kl_coef=0.25)
    out = outputs(f1)
    loss, sums = record(out, columns(f1, "token-mean", "old_logp", "ref_logp"))
    new, old, ref = (f1.token[k][f1.loss_mask] for k in ("new", "old_logp", "ref_logp"))
    a = f1.sequence["advantages"][f1.sequence_ids[f1.loss_mask]]
    expected = 0.5 * (new - old - a) ** 2 + 0.25 * 0.5 * (new - ref) ** 2
    assert loss.item() == pytest.approx(float(expected.mean()), abs=1e-12)
    close(gradient(loss, out.logp), (((new - old - a) + 0.25 * (new - ref)) / 13).tolist(), atol=1e-12)
    assert "pg_clipfrac" not in sums


def test_a_loss_can_cross_a_process(f1: Batch) -> None:
    record = PolicyLoss(clip_options={"dual": 3.0}, custom=None, kl_coef=0.1)
    copy = pickle.loads(pickle.dumps(record))
    assert copy == record
    given = columns(f1, "token-mean", "old_logp", "ref_logp")
    assert torch.equal(copy(outputs(f1), given)[0], record(outputs(f1), given)[0])
    assert pickle.loads(pickle.dumps(NllLoss())) == NllLoss()


def test_a_loss_says_whether_it_needs_entropies() -> None:
    assert "entropy" in PolicyLoss(entropy_coef=0.1).needs
    assert NllLoss().needs == frozenset()
