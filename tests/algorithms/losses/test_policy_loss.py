"""Loss records: what they add up, on the worked numbers of ALGORITHMS.md 3.1, 5.11 to 5.14, 6.8, 8.3 and 11.3."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView
from burnish.algorithms.losses.policy_loss import NllLoss, PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.core.batch import Batch

Look = Callable[..., Any]
PLAIN: dict[str, Any] = {"ratio": "none", "clip": "none", "loss": "logprob"}


def without(batch: Batch, name: str) -> Batch:
    return Batch(batch.tokens, batch.offsets, {k: v for k, v in batch.token.items() if k != name}, batch.sequence)


def test_ppo_with_its_metrics(f1: Batch, look: Look) -> None:
    loss, _, metrics = look(f1).run()
    assert loss == pytest.approx(0.061405, abs=1e-6)
    assert metrics["pg_clipfrac"] == pytest.approx(0.307692, abs=1e-6)
    assert metrics["ppo_kl"] == pytest.approx(-0.138462, abs=1e-6)


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
def test_plain_policy_gradient_under_every_aggregation(f1: Batch, look: Look, mode: str, expected: float) -> None:
    assert look(f1, mode).run(**PLAIN)[0] == pytest.approx(expected, abs=1e-6)


def test_plain_policy_gradient_has_the_advantage_as_gradient(f1: Batch, look: Look) -> None:
    a, b, c, d = -0.076923, 0.076923, 0.061538, -0.046154
    assert look(f1).run(**PLAIN)[1] == pytest.approx([a] * 4 + [b] * 2 + [c] * 3 + [d] * 4, abs=1e-6)


def test_composition_of_policy_kl_and_entropy(f1: Batch, look: Look) -> None:
    entropy = torch.full((17,), 0.9, dtype=torch.float64, requires_grad=True)
    view = look(f1.with_token(entropy=entropy)).view
    record = PolicyLoss(clip_options={"dual": 3.0}, kl_estimator="k3", kl_coef=0.001, entropy_coef=0.01)
    loss, sums = record(view)
    assert loss.item() == pytest.approx(0.011427, abs=1e-6)
    assert float(sums["kl_ref"]) / 13 == pytest.approx(0.209463, abs=1e-6)
    assert float(sums["entropy"]) / 13 == pytest.approx(0.9, abs=1e-12)
    gradient = torch.autograd.grad(loss, entropy)[0][f1.loss_mask]
    assert gradient.tolist() == pytest.approx([-0.01 / 13] * 13, abs=1e-15)


def quiet(batch: Batch) -> Batch:
    return batch.with_sequence(advantages=torch.zeros(batch.num_sequences, dtype=torch.float64))


def test_kl_is_aggregated_like_the_policy_term(f1: Batch, look: Look) -> None:
    loss = look(quiet(f1), "seq-mean-token-mean").run(kl_estimator="k3", kl_coef=2.0)[0]
    assert loss == pytest.approx(2 * 0.217444, abs=2e-6)


def test_the_corrected_kl_is_weighted_by_the_ratio_with_gradient(f1: Batch, look: Look) -> None:
    seen = look(quiet(f1))
    loss, gradient, metrics = seen.run(kl_coef=1.0, kl_is_corrected=True)
    assert loss == pytest.approx(0.256297, abs=1e-6)
    assert metrics["kl_ref"] == pytest.approx(0.256297, abs=1e-6)
    gap, d = (seen.view.logp.detach() - seen.view.column(k) for k in ("old_logp", "ref_logp"))
    k3 = (-d).exp() + d - 1
    expected = gap.exp() * (k3 + 1 - (-d).exp()) / 13
    assert gradient == pytest.approx(expected.tolist(), abs=1e-12)
    assert seen.run(kl_coef=1.0)[0] == pytest.approx(0.209463, abs=1e-6)


def test_without_old_log_probs_the_policy_is_its_own_anchor(f1: Batch, look: Look) -> None:
    seen = look(without(f1, "old_logp"), "seq-mean-token-mean")
    loss, gradient, metrics = seen.run()
    # The ratio is 1, so the value is the weighted mean of -A, and the gradient that of plain policy gradient.
    assert loss == pytest.approx(-(1.0 - 1.0 - 0.8 + 0.6) / 4, abs=1e-12)
    assert gradient == pytest.approx(seen.run(**PLAIN)[1], abs=1e-14)
    assert (metrics["pg_clipfrac"], metrics["ppo_kl"]) == (0, 0)


def test_the_drift_metric_sees_the_log_ratio_as_the_loss_does(f1: Batch, look: Look) -> None:
    old = f1.token["old_logp"].clone()
    old[1] = -0.8 - 50  # l of the first token: 50 instead of .2
    batch = f1.with_token(old_logp=old)
    others = 0.138462 * 13 - 0.2
    assert look(batch).run()[2]["ppo_kl"] * 13 == pytest.approx(-(20 + others), abs=1e-5)
    for record in (PLAIN, {"ratio": "sequence"}):
        assert look(batch).run(**record)[2]["ppo_kl"] * 13 == pytest.approx(-(50 + others), abs=1e-5)


def test_overlong_filtering_renormalises_the_mean(f1: Batch, look: Look) -> None:
    mask = f1.loss_mask & (f1.sequence_ids != 3)
    assert look(f1.with_token(loss_mask=mask)).run()[0] == pytest.approx(0.358428, abs=1e-6)


# --- imitated tokens -------------------------------------------------------------------------------------------------


def test_imitation_has_its_own_weights_and_no_advantage(f1: Batch, look: Look) -> None:
    """Positive examples T = {0, 3} with mu = .1: PPO's loss + .1 * .825."""
    ids = f1.sequence_ids
    weights = ((ids == 0) | (ids == 3)).double() * 0.1 / 8
    loss, gradient, _ = look(f1.with_token(nll_weight=weights)).run()
    plain, plain_gradient, _ = look(f1).run()
    assert loss == pytest.approx(plain + 0.1 * 0.825, abs=1e-9)
    change = [b - a for a, b in zip(plain_gradient, gradient, strict=True)]
    assert change == pytest.approx((-weights[f1.loss_mask]).tolist(), abs=1e-12)


def test_a_demonstration_may_have_no_weight_in_the_policy_term(f1: Batch, look: Look) -> None:
    rest = aggregation_weights(f1, "token-mean") * (f1.sequence_ids != 1)
    demonstration = torch.where(f1.sequence_ids == 1, 0.5, 0.0).double()
    seen = look(f1.with_token(weight=rest, nll_weight=demonstration), None)
    gradient = seen.run()[1]
    assert gradient[4:6] == [-0.5, -0.5]


# --- top entropies ---------------------------------------------------------------------------------------------------


def test_only_tokens_of_high_entropy_have_a_policy_gradient(f1: Batch, look: Look) -> None:
    order = torch.tensor([4, 9, 1, 12, 0, 10, 3, 5, 2, 8, 11, 7, 6])
    entropy = torch.zeros(17, dtype=torch.float64)
    entropy[f1.loss_mask] = order.double()
    batch = f1.with_token(entropy=entropy)
    top = {"entropy_top": 4 / 13, "scope": "batch"}
    kept = [i for i, rank in enumerate(order.tolist()) if rank >= 9]
    gradient, plain = look(batch).run(**PLAIN, **top)[1], look(batch).run(**PLAIN)[1]
    assert gradient == [g if i in kept else 0 for i, g in enumerate(plain)]  # denominators stay
    # The other terms keep all their tokens.
    both, kl = (look(quiet(batch)).run(kl_coef=0.1, **o)[1] for o in (top, {}))
    assert both == kl
    assert all(kl)


def test_top_entropies_are_those_of_the_whole_batch() -> None:
    with pytest.raises(ValueError, match="whole batch, but the scope is token"):
        PolicyLoss(entropy_top=0.2)


# --- a user's own loss -----------------------------------------------------------------------------------------------


def squared(logp: Tensor, anchor: Tensor, advantages: Tensor, scale: float = 1.0) -> Tensor:
    return scale * (logp - anchor - advantages) ** 2


def test_a_users_loss_replaces_the_policy_term_and_nothing_else(f1: Batch, look: Look) -> None:
    seen = look(f1)
    record = {"custom": squared, "custom_options": {"scale": 0.5}, "kl_estimator": "k2", "kl_coef": 0.25}
    loss, gradient, metrics = seen.run(**record)
    new, old, ref, a = (seen.view.column(k) for k in ("new", "old_logp", "ref_logp", "advantages"))
    expected = 0.5 * (new - old - a) ** 2 + 0.25 * 0.5 * (new - ref) ** 2
    assert loss == pytest.approx(float(expected.mean()), abs=1e-12)
    assert gradient == pytest.approx((((new - old - a) + 0.25 * (new - ref)) / 13).tolist(), abs=1e-12)
    assert "pg_clipfrac" not in metrics


# --- likelihood ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [("token-mean", 0.938462), ("seq-mean-token-mean", 0.941667)])
def test_negative_log_likelihood(f1: Batch, look: Look, mode: str, expected: float) -> None:
    loss, sums = NllLoss()(look(f1, mode).view)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert float(sums["nll"]) / 13 == pytest.approx(0.938462, abs=1e-6)


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_loss_can_cross_a_process(f1: Batch, look: Look) -> None:
    record = PolicyLoss(clip_options={"dual": 3.0}, custom=None, kl_coef=0.1, scope="sequence")
    copy = pickle.loads(pickle.dumps(record))
    assert copy == record
    view: LossView = look(f1).view
    assert torch.equal(copy(view)[0], record(view)[0])
    assert pickle.loads(pickle.dumps(NllLoss())) == NllLoss()


def test_a_loss_says_what_it_needs() -> None:
    assert PolicyLoss().needs == {"entropy"}
    assert NllLoss().needs == frozenset()
    assert (PolicyLoss().scope, PolicyLoss(scope="batch").scope, NllLoss().scope) == ("token", "batch", "token")
