"""KL: the worked numbers of ALGORITHMS.md 3, the estimators' gradients by enumeration, and the records of the slot."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from burnish.algorithms.losses.loss_view import LossView, loss_view
from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import (
    adapt_kl_coefficient,
    aggregation_weights,
    ema_update,
    full_kl,
    kl_estimate,
    kl_reward,
)
from burnish.algorithms.terms.spec import EmaReference, IterateReference, Kl, KlLoss, KlReward, ReferenceSlot
from burnish.core.batch import Batch

P = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64)
Q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
TRUE_GRADIENT = [0.175945, -0.098118, -0.077827]


def number(logp: float, ref: float, estimator: str) -> float:
    return float(
        kl_estimate(torch.tensor(logp, dtype=torch.float64), torch.tensor(ref, dtype=torch.float64), estimator)
    )


def close(got: Tensor, expected: list[float], atol: float = 1e-6) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), atol=atol, rtol=0)


@pytest.mark.parametrize(
    ("estimator", "above", "below"),
    [("k1", 0.5, -0.5), ("abs", 0.5, 0.5), ("k2", 0.125, 0.125), ("k3", 0.106531, 0.148721)],
)
def test_values_on_either_side_of_the_reference(estimator: str, above: float, below: float) -> None:
    for name in (estimator, estimator + "+") if estimator != "k2" else (estimator,):
        assert number(-1.0, -1.5, name) == pytest.approx(above, abs=1e-6)
        assert number(-1.5, -1.0, name) == pytest.approx(below, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "mean"), [("k1", 0.1), ("abs", 0.438462), ("k2", 0.178077), ("k3", 0.209463), ("k3+", 0.209463)]
)
def test_token_means_on_f1(f1: Batch, estimator: str, mean: float) -> None:
    values = kl_estimate(f1.token["new"], f1.token["ref_logp"], estimator)[f1.action_mask]
    assert float(values.mean()) == pytest.approx(mean, abs=1e-6)


def test_k3_under_the_mean_of_sequence_means(f1: Batch) -> None:
    weights = aggregation_weights(f1, "seq-mean-token-mean")
    values = kl_estimate(f1.token["new"], f1.token["ref_logp"], "k3")
    assert float((weights * values)[f1.action_mask].sum()) == pytest.approx(0.217444, abs=1e-6)


K2_GRADIENT = [0.3, -0.3, 0.3, 0.1, -0.1, 0.4, 1, -1.4, 0.2, 1, 0.1, 0.1, -0.4]
K3_GRADIENT = [0.259182, -0.349859, 0.259182, 0.095163, -0.105171, 0.32968, 0.632121, -3.0552, 0.181269, 0.632121, 0.095163, 0.095163, -0.491825]  # fmt: skip


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k3", K3_GRADIENT), ("k2", K2_GRADIENT), ("k1+", K2_GRADIENT), ("abs+", K2_GRADIENT), ("k3+", K2_GRADIENT)],
)
def test_gradients_on_f1(f1: Batch, estimator: str, expected: list[float]) -> None:
    logp = f1.token["new"][f1.action_mask].requires_grad_()
    kl_estimate(logp, f1.token["ref_logp"][f1.action_mask], estimator).sum().backward()
    assert logp.grad is not None
    close(logp.grad, expected)


@pytest.mark.parametrize("estimator", ["k3", "k3+"])
@pytest.mark.parametrize(("logp", "ref"), [(-4.0, -1.0), (-1e4, -1.0), (-1.0, -1e4), (-1.0, -31.0)])
def test_k3_is_at_most_10_however_far_the_policies_are(estimator: str, logp: float, ref: float) -> None:
    assert number(logp, ref, estimator) == 10


@pytest.mark.parametrize(("logp", "ref"), [(-4.0, -1.0), (-1e4, -1.0), (-1.0, -1e4)])
def test_k3_has_no_gradient_where_it_is_clipped(logp: float, ref: float) -> None:
    x = torch.tensor(logp, dtype=torch.float64, requires_grad=True)
    kl_estimate(x, torch.tensor(ref, dtype=torch.float64), "k3").backward()
    assert x.grad == 0


def expected_gradient(estimator: str) -> Tensor:
    """The gradient in the policy's logits, averaged exactly over the samples the policy would draw."""
    logits = P.log().requires_grad_()
    logp = logits.log_softmax(0)
    (P * kl_estimate(logp, Q.log(), estimator)).sum().backward()
    assert logits.grad is not None
    return logits.grad


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k2", TRUE_GRADIENT),
        ("k1+", TRUE_GRADIENT),
        ("abs+", TRUE_GRADIENT),
        ("k3+", TRUE_GRADIENT),
        ("k1", [0.0, 0.0, 0.0]),
        ("k3", [0.2, -0.1, -0.1]),
    ],
)
def test_expected_gradients_by_enumeration(estimator: str, expected: list[float]) -> None:
    close(expected_gradient(estimator), expected)


def test_the_gradient_called_true_is_that_of_the_exact_kl() -> None:
    logits = (P.log() + 3.0).requires_grad_()  # logits are the same up to a constant
    exact = full_kl(logits, Q.log() - 1.0)
    exact.backward()
    assert float(exact.detach()) == pytest.approx(0.085123, abs=1e-6)
    assert logits.grad is not None
    close(logits.grad, TRUE_GRADIENT)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_values(estimator: str) -> None:
    exact = sum(p * math.log(p / q) for p, q in zip(P.tolist(), Q.tolist(), strict=True))
    assert float((P * kl_estimate(P.log(), Q.log(), estimator)).sum()) == pytest.approx(exact, abs=1e-12)


@given(st.floats(-50, 0), st.floats(-50, 0))
def test_k3_is_never_negative_and_zero_at_the_reference(logp: float, ref: float) -> None:
    assert number(logp, ref, "k3") >= 0
    assert number(ref, ref, "k3") == 0


def test_the_exact_kl_of_half_precision_logits_is_computed_in_float32() -> None:
    logits, ref = (x.log().to(torch.bfloat16).expand(2, 3) for x in (P, Q))
    got = full_kl(logits, ref)
    assert (got.shape, got.dtype) == ((2,), torch.float32)
    torch.testing.assert_close(got, full_kl(logits.float(), ref.float()), atol=0, rtol=0)


# --- corrected for samples of an older policy ------------------------------------------------------------------------

CORRECTED = PolicyLoss(ratio="token", clip="none", kl_coef=1.0, kl_estimator="k3", kl_is_corrected=True)


def test_the_corrected_estimate_on_f1(f1: Batch) -> None:
    quiet = f1.with_sequence(advantages=torch.zeros(4, dtype=torch.float64))
    quiet = quiet.with_token(weight=aggregation_weights(f1, "token-mean"))
    logp = f1.token["new"][f1.loss_mask]
    assert float(CORRECTED(loss_view(quiet, logp, torch.zeros_like(logp)))[0]) == pytest.approx(0.256297, abs=1e-6)


def test_corrected_k3_is_unbiased_in_value_and_gradient_under_the_policy_that_sampled() -> None:
    old = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)  # far from both: its samples are weighted by its own p
    logits = P.log().requires_grad_()
    logp = logits.log_softmax(0)
    columns = {"weight": old, "old_logp": old.log(), "ref_logp": Q.log(), "advantages": torch.zeros_like(old)}
    value, _ = CORRECTED(LossView(torch.tensor([0, 3]), columns, {}, logp, torch.zeros_like(old)))
    value.backward()
    assert float(value.detach()) == pytest.approx(0.085123, abs=1e-6)
    assert logits.grad is not None
    close(logits.grad, TRUE_GRADIENT)


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="'k4'"):
        number(-1, -1, "k4")


# --- in the reward -----------------------------------------------------------------------------------------------------

SHAPED = [-0.01, -0.01, 0.02, 0.99, -0.01, 0.02, 0.03, -0.01, 0.01, 0.02, -0.01, 0, 1.01]


def test_kl_in_the_reward_on_f1(f1: Batch) -> None:
    rewards, current = kl_reward(f1, f1.token["token_rewards"], "k1", 0.1)
    close(rewards[f1.action_mask], SHAPED)
    assert rewards[~f1.action_mask].tolist() == [0.0] * 4
    assert current == pytest.approx(-0.04375, abs=1e-9)


def test_the_logged_kl_does_not_depend_on_the_coefficient_and_leaves_out_rows_nothing_was_written_in(f1: Batch) -> None:
    emptied = f1.with_token(action_mask=f1.action_mask & (f1.sequence_ids != 3))
    # Row means of OLD - REF are 0.025, -0.05, -0.1, -0.05; without the last row their mean is -0.125 / 3.
    for coef in (0.1, 5.0):
        assert kl_reward(emptied, f1.token["token_rewards"], "k1", coef)[1] == pytest.approx(-0.125 / 3, abs=1e-9)


def test_the_logged_kl_is_of_the_policys_own_samples(f1: Batch) -> None:
    shown = f1.with_sequence(demonstration=torch.tensor([False, False, False, True]))
    rewards, current = kl_reward(shown, f1.token["token_rewards"], "k1", 0.1)
    close(rewards[f1.action_mask], SHAPED)
    assert current == pytest.approx(-0.125 / 3, abs=1e-9)
    alone = f1.with_sequence(demonstration=torch.tensor([True] * 4))
    assert math.isnan(kl_reward(alone, f1.token["token_rewards"], "k1", 0.1)[1])


@pytest.mark.parametrize("center", ["token", "sequence"])
def test_what_is_taken_off_is_the_mean_of_the_policys_own_samples(center: str) -> None:
    ref = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -8.0, -8.0], dtype=torch.float64)
    columns = {"action_mask": torch.tensor([False, True, True, False, True, True, True]), "old_logp": torch.zeros(7), "ref_logp": ref}  # fmt: skip
    batch = Batch(torch.arange(7), torch.tensor([0, 3, 7]), {**columns, "loss_mask": columns["action_mask"]})
    shown = batch.with_sequence(demonstration=torch.tensor([False, True]))
    nothing = torch.zeros(7, dtype=torch.float64)
    rewards, _ = kl_reward(shown, nothing, "k1", 0.5, center)
    assert rewards.tolist() == [0, 0, 0, 0, 0, -4, -4]
    assert kl_reward(batch, nothing, "k1", 0.5, center)[0][1] > 0


def test_centring_by_token_on_f1(f1: Batch) -> None:
    rewards, current = kl_reward(f1, f1.token["token_rewards"], "k1", 0.1, "token")
    expected = [-0.013846, -0.013846, 0.016154, 0.986154, -0.013846, 0.016154, 0.026154, -0.013846, 0.006154, 0.016154, -0.013846, -0.003846, 1.006154]  # fmt: skip
    close(rewards[f1.action_mask], expected)
    assert rewards[~f1.action_mask].tolist() == [0.0] * 4
    assert current == pytest.approx(-0.04375, abs=1e-9)  # what is logged is not centred


@pytest.mark.parametrize("center", ["token", "sequence"])
def test_a_centred_penalty_sums_to_zero_over_the_batch(f1: Batch, center: str) -> None:
    for estimator in ("k1", "k3"):
        rewards, _ = kl_reward(f1, torch.zeros(f1.num_tokens, dtype=torch.float64), estimator, 0.7, center)
        assert float(rewards.sum()) == pytest.approx(0, abs=1e-12)
        assert float(rewards.abs().sum()) > 0.01


def test_centring_by_sequence_moves_every_sum_by_the_same_amount(f1: Batch) -> None:
    def sums(center: str) -> Tensor:
        rewards, _ = kl_reward(f1, f1.token["token_rewards"], "k1", 0.1, center)
        return torch.zeros(4, dtype=torch.float64).index_add(0, f1.sequence_ids, rewards)

    # Summed OLD - REF of the rows is 0.1, -0.1, -0.3, -0.2: their mean is -0.125.
    close(sums("sequence") - sums("none"), [-0.0125] * 4, atol=1e-12)
    rewards, _ = kl_reward(f1, f1.token["token_rewards"], "k1", 0.1, "sequence")
    plain, _ = kl_reward(f1, f1.token["token_rewards"], "k1", 0.1)
    close((rewards - plain)[f1.action_mask & (f1.sequence_ids == 1)], [-0.00625] * 2, atol=1e-12)


@pytest.mark.parametrize("center", ["token", "sequence"])
def test_centring_leaves_out_rows_nothing_was_written_in(f1: Batch, center: str) -> None:
    emptied = f1.with_token(action_mask=f1.action_mask & (f1.sequence_ids != 3))
    scores = torch.zeros(f1.num_tokens, dtype=torch.float64)
    rewards, _ = kl_reward(emptied, scores, "k1", 0.1, center)
    left = f1.select(torch.tensor([0, 1, 2]))
    expected, _ = kl_reward(left, scores[: left.num_tokens], "k1", 0.1, center)
    torch.testing.assert_close(rewards[: left.num_tokens], expected, atol=1e-12, rtol=0)
    assert rewards[left.num_tokens :].tolist() == [0.0] * 5


def test_an_unknown_centring_is_refused(f1: Batch) -> None:
    with pytest.raises(ValueError, match="expected none, token or sequence"):
        kl_reward(f1, f1.token["token_rewards"], "k1", 0.1, "group")


# --- controllers and references --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "expected"),
    [(9.0, 0.201024), (5.4, 0.199488), (6.0, 0.2), (1e9, 0.201024), (-3.0, 0.198976)],
)
def test_the_coefficient_follows_the_target(kl: float, expected: float) -> None:
    assert adapt_kl_coefficient(0.2, kl, target=6, horizon=1e4, count=256) == pytest.approx(expected, abs=1e-9)


def test_a_coefficient_never_turns_negative() -> None:
    assert adapt_kl_coefficient(0.2, 0.0, target=1, horizon=10, count=1000) == 0


@pytest.mark.parametrize(("target", "horizon"), [(0, 10), (-1, 10), (1, 0)])
def test_a_target_or_horizon_of_zero_is_refused(target: float, horizon: float) -> None:
    with pytest.raises(ValueError, match="target > 0 and horizon > 0"):
        adapt_kl_coefficient(0.2, 1.0, target, horizon, 8)


def test_a_moving_reference() -> None:
    reference, policy = [torch.tensor([1.0, -2.0])], [torch.tensor([2.0, 0.0], requires_grad=True)]
    ema_update(reference, policy, 0.01)
    assert reference[0].tolist() == pytest.approx([1.01, -1.98], abs=1e-6)
    assert not reference[0].requires_grad


@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=4), st.sampled_from([torch.float32, torch.bfloat16])
)
def test_eta_one_copies_and_eta_zero_freezes_bit_for_bit(values: list[float], dtype: torch.dtype) -> None:
    policy = torch.tensor(values, dtype=dtype)
    start = torch.linspace(-7.3, 11.1, policy.numel())
    for eta, expected in ((1.0, policy.float()), (0.0, start.clone())):
        reference = start.clone()
        ema_update([reference], [policy], eta)
        assert torch.equal(reference, expected)


def test_a_moving_reference_in_a_half_type_or_of_another_model_is_refused() -> None:
    half = [torch.zeros(2, dtype=torch.bfloat16)]
    with pytest.raises(ValueError, match="keep it in float32"):
        ema_update(half, half, 0.01)
    with pytest.raises(ValueError, match="zip"):
        ema_update([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)], 0.01)


# --- records ---------------------------------------------------------------------------------------------------------


def test_a_reference_is_a_bare_word_or_a_section_with_its_own_options() -> None:
    read = TypeAdapter(ReferenceSlot).validate_python
    assert [read(word).name for word in ("none", "frozen", "ema", "hard_sync", "iterate")] == [
        "none",
        "frozen",
        "ema",
        "hard_sync",
        "iterate",
    ]
    assert read({"name": "ema", "eta": 0.5}) == EmaReference(eta=0.5)
    assert (read("ema").eta, read("hard_sync").every, read("iterate")) == (0.01, 400, IterateReference(every=1))
    for wrong in ({"name": "frozen", "eta": 0.5}, {"name": "ema", "every": 4}, {"name": "ema", "eta": 0.0}, "fixed"):
        with pytest.raises(ValidationError):
            read(wrong)


def test_each_use_of_the_kl_has_its_own_options() -> None:
    assert (Kl().loss.estimator, Kl(reward=KlReward(coef=0.1)).reward.estimator) == ("k3", "k1")
    for wrong in ({"loss": {"center": "token"}}, {"reward": {"is_corrected": True}}):
        with pytest.raises(ValidationError, match="Extra inputs"):
            Kl.model_validate(wrong)


def test_a_correction_of_a_borrowed_gradient_is_refused() -> None:
    assert KlLoss(estimator="k3", is_corrected=True).is_corrected
    with pytest.raises(ValidationError, match="set estimator=k3 or is_corrected=false"):
        KlLoss(estimator="k3+", is_corrected=True)


def test_adapting_a_coefficient_of_zero_is_refused() -> None:
    assert Kl.model_validate({"reward": {"coef": 0.1}, "adaptive": {"target": 6}}).adaptive is not None
    with pytest.raises(ValidationError, match="would stay 0"):
        Kl.model_validate({"adaptive": {}})
