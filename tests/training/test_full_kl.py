"""The KL over the whole vocabulary in the loss: the reference is computed in the same pass, and the gradient is the KL's own."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.spec import Algorithm
from burnish.algorithms.terms.loss_terms import full_kl
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.training.learner import Learner
from burnish.training.reference import EmaReference, Reference, make_reference
from tests.training.test_loss_scopes import SHAPES, TEMPERATURE, assert_same

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
COEF = 0.7


def one_update(policy: Decoder, reference: Reference, batch: Batch, loss: PolicyLoss, budget: int) -> Learner:
    learner = Learner(policy, Optimizer(lr=1e-3, clip_norm=1e9), 10, budget, TEMPERATURE)
    learner.reference = reference.distribution
    learner._accumulate(batch, loss)
    return learner


@pytest.mark.parametrize("scope", ["token", "batch"])
@pytest.mark.parametrize("budget", [1000, 14, 1])
def test_the_gradient_is_that_of_the_kl_over_all_tokens(
    scope: str, budget: int, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    policy, batch = make_model(1), make_batch(SHAPES)
    reference = make_reference("frozen", make_model(2), 14, TEMPERATURE)
    with_kl = PolicyLoss(scope=scope, kl_coef=COEF, kl_estimator="full")
    got = one_update(copy.deepcopy(policy), reference, batch, with_kl, budget).optimizer.gradients()
    plain = one_update(copy.deepcopy(policy), reference, batch, PolicyLoss(scope=scope), budget).optimizer.gradients()
    oracle, where = copy.deepcopy(policy), batch.loss_mask.nonzero().squeeze(1)
    logits = [
        model.logits(model.hidden(batch.tokens, batch.offsets))[where - 1] / TEMPERATURE
        for model in (oracle, reference.model)
    ]
    (COEF * batch.token["weight"][where] * full_kl(*logits)).sum().backward()
    expected = {n: plain[n] + (0 if p.grad is None else p.grad) for n, p in oracle.named_parameters()}
    assert_same(dict(got), expected)


def test_an_average_that_moved_is_the_one_asked(make_model: MakeModel, make_batch: MakeBatch) -> None:
    policy, batch = make_model(1), make_batch(SHAPES)
    reference = make_reference("ema", make_model(2), 100, TEMPERATURE, eta=0.5)
    assert isinstance(reference, EmaReference)
    loss = PolicyLoss(kl_coef=COEF, kl_estimator="full")
    before = one_update(copy.deepcopy(policy), reference, batch, loss, 100).optimizer.gradients()
    reference.after_update(policy)
    after = one_update(copy.deepcopy(policy), reference, batch, loss, 100).optimizer.gradients()
    assert any(not torch.equal(before[name], after[name]) for name in before)


def test_the_metric_is_the_mean_kl(make_model: MakeModel, make_batch: MakeBatch) -> None:
    policy, batch = make_model(1), make_batch(SHAPES)
    learner = Learner(policy, Optimizer(lr=1e-3), 10, 14, TEMPERATURE)
    learner.reference = make_reference("frozen", policy, 14, TEMPERATURE).distribution
    stats = learner.update(batch, PolicyLoss(kl_coef=COEF, kl_estimator="full")).stats
    assert stats["kl_ref"] == pytest.approx(0, abs=1e-12)
    assert learner.update(batch, PolicyLoss(kl_coef=COEF, kl_estimator="full")).stats["kl_ref"] > 1e-9


@pytest.mark.parametrize(
    ("kl", "named"),
    [
        ({"loss": {"coef": 0.1, "estimator": "full", "is_corrected": True}, "reference": "frozen"}, "is_corrected"),
        ({"loss": {"coef": 0.1, "estimator": "full"}, "reference": {"name": "iterate", "every": 1}}, "iterate"),
        ({"reward": {"coef": 0.1, "estimator": "full"}, "reference": "frozen"}, "estimator"),
    ],
)
def test_what_makes_no_sense_is_refused(kl: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Algorithm.model_validate({"kl": kl})
