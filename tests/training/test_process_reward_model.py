"""The implicit process reward model learns outcomes for any token budget, and resumes bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.model_losses import (
    ImplicitPrmLoss,
    outcome_contrast,
    outcome_cross_entropy,
    outcome_prediction_metrics,
)
from burnish.config.errors import UserError
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import contiguous_sum
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import adapter_weights, add_lora
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.trainers.process_rewards import outcome_batch, outcome_mini_batches
from burnish.training.auxiliary_models import ProcessRewardModel, trainable_copy
from burnish.training.reference import Reference

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
SHAPES = [(7, 2, 4), (3, 1, 3), (7, 3, 5), (3, 1, 1), (3, 2, 2), (9, 1, 4), (9, 2, 3)]


def process(model: Decoder, budget: int = 9, lr: float = 0.01) -> ProcessRewardModel:
    own = trainable_copy(model)
    return ProcessRewardModel(own, Reference(own, budget, 1.0), Optimizer(lr=lr, clip_norm=1e9, eps=1e-3), 10, budget)


def labelled(batch: Batch, prior: Tensor) -> Batch:
    """The answers of a batch with their outcomes; those of group 9 are one answer of two sequences."""
    owner = torch.tensor([0, 1, 2, 3, 4, 5, 5])[: batch.num_sequences]
    right = torch.tensor([1, 0, 0, 1, 1, 0, 0], dtype=torch.float64)[: batch.num_sequences]
    batch = batch.with_sequence(trajectory_ids=owner, accuracy=right)
    (mini,) = outcome_mini_batches(outcome_batch(batch, prior), 1)
    return mini


def test_it_learns_which_answers_are_right_and_leaves_the_policy_and_its_start_alone(
    make_model: MakeModel, make_batch: MakeBatch
) -> None:
    policy = make_model()
    before = copy.deepcopy(policy.state_dict())
    batch = make_batch([(k // 4, 2, 6) for k in range(24)])
    # Right is what begins with an even token: a rule of the first written token, which the model can learn.
    right = (batch.tokens[batch.offsets[:-1] + 2] % 2 == 0).double()
    batch = batch.with_sequence(trajectory_ids=torch.arange(24), accuracy=right)
    it = process(policy, budget=500, lr=0.02)
    start = it.prior(batch)
    (mini,) = outcome_mini_batches(outcome_batch(batch, start), 1)
    losses = [it.update(mini, ImplicitPrmLoss(beta=1.0)).stats["loss"] for _ in range(40)]
    assert losses[0] == pytest.approx(0.693147, abs=1e-6)
    assert losses[-1] < 0.1
    ratio = contiguous_sum(it.logprobs(batch) - start, batch.offsets)
    assert outcome_prediction_metrics(ratio, right, 0.0)["accuracy"] == 1.0
    assert torch.equal(it.prior(batch), start)
    assert all(torch.equal(t, before[name]) for name, t in policy.state_dict().items())


@pytest.mark.parametrize("kind", ["cross_entropy", "contrast"])
@pytest.mark.parametrize("budget", [1, 9, 64])
def test_its_gradient_is_the_same_for_any_token_budget(
    budget: int, kind: str, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    it, batch = process(make_model(), budget), make_batch(SHAPES)
    mini = labelled(batch, process(make_model(seed=3)).logprobs(batch))  # not its start: every log-ratio is something
    whole = copy.deepcopy(it.model)
    wanted = mini.loss_mask.nonzero().squeeze(1)
    logp = torch.zeros(mini.num_tokens, dtype=torch.float64)
    logp[wanted] = whole.token_logprobs(mini.tokens, mini.offsets, wanted)[0]
    ratios = [
        (logp - mini.token["prior_logp"])[a:b].sum() for a, b in zip(mini.offsets, mini.offsets[1:], strict=False)
    ]
    score = torch.stack([*ratios[:5], ratios[5] + ratios[6]])
    right = torch.tensor([1, 0, 0, 1, 1, 0], dtype=torch.float64)
    if kind == "contrast":
        loss = outcome_contrast(score, right, torch.tensor([7, 3, 7, 3, 3, 9]), beta=0.5).mean()
    else:
        loss = outcome_cross_entropy(score, right, beta=0.5).mean()
    loss.backward()
    update = it.update(mini, ImplicitPrmLoss(kind, beta=0.5))
    assert update.stats["loss"] == pytest.approx(loss.item(), abs=1e-12)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(it.learner.optimizer.gradients()[name], parameter.grad, atol=1e-12, rtol=0)
    assert update.logp is not None
    torch.testing.assert_close(update.logp, logp.detach(), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_goes_on_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch, it = make_batch(SHAPES), process(make_model(dtype=dtype))
    mini, loss = labelled(batch, it.prior(batch)), ImplicitPrmLoss(beta=1.0)
    for _ in range(3):
        it.update(mini, loss)
    write_contents(tmp_path, it.contents(keep_in_place))
    names = sorted(p.name for p in (tmp_path / "process").iterdir())
    assert names == ["model.safetensors", "optimizer.json", "optimizer.safetensors"]
    other = process(make_model(dtype=dtype))  # from the run's start, as every life makes it
    other.load(tmp_path)
    assert other.learner.updates == 3
    for _ in range(2):
        assert other.update(mini, loss).stats == it.update(mini, loss).stats
    assert torch.equal(other.logprobs(batch), it.logprobs(batch))
    assert torch.equal(other.prior(batch), it.prior(batch))
    with pytest.raises(UserError, match=r"process/model\.safetensors is not there"):
        other.load(tmp_path / "elsewhere")


def test_of_a_policy_with_adapters_only_these_are_copied(make_model: MakeModel, make_batch: MakeBatch) -> None:
    policy = make_model()
    add_lora(policy, Lora(rank=2, alpha=4), seed=0)
    it, batch = process(policy), make_batch(SHAPES)
    mine, theirs, own = dict(it.model.named_parameters()), dict(policy.named_parameters()), adapter_weights(policy)
    assert {name for name in mine if mine[name] is not theirs[name]} == own.keys()
    mini = labelled(batch, it.prior(batch))
    frozen = {name: p.detach().clone() for name, p in theirs.items()}
    for _ in range(3):
        it.update(mini, ImplicitPrmLoss(beta=1.0))
    assert all(torch.equal(p, frozen[name]) for name, p in theirs.items())
    assert not torch.equal(it.logprobs(batch), it.prior(batch))


def test_verdicts_count_ties_half_and_say_nothing_of_pairs_that_are_not_there() -> None:
    ratio, right = torch.tensor([2.0, -1.0, 0.5, 1e-9, 0.5]), torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0])
    found = outcome_prediction_metrics(ratio, right, rounding=1e-6)
    assert found["accuracy"] == pytest.approx((1 + 1 + 0 + 0.5 + 1) / 5)
    assert found["ranking"] == pytest.approx((2 + 1 + 1.5) / 6)
    assert found["share_right"] == pytest.approx(0.6)
    assert "ranking" not in outcome_prediction_metrics(ratio, torch.ones(5), rounding=0.0)
