"""The critic learns for any token budget, independently of the policy it was copied from, and resumes bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.losses.model_losses import explained_variance
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.errors import UserError
from burnish.config.model import Optimizer
from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.training.auxiliary_models import Critic

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
SHAPES = [(7, 2, 4), (3, 1, 3), (7, 3, 5), (3, 1, 1), (3, 2, 2), (9, 1, 4)]


def critic(model: Decoder, budget: int = 9, lr: float = 0.01, clip: float | None = 0.5) -> Critic:
    return Critic(ValueModel(model), Optimizer(lr=lr, clip_norm=1e9, eps=1e-3), 10, budget, clip)


def off_zero(one: Critic) -> Critic:
    """With a head that is not 0, so that the backbone has a gradient."""
    with torch.no_grad():
        one.model.head.copy_(torch.linspace(-1, 1, 8)[None])
    return one


def test_it_learns_what_the_returns_are_and_leaves_the_policy_alone(
    make_model: MakeModel, make_batch: MakeBatch
) -> None:
    policy = make_model()
    before = copy.deepcopy(policy.state_dict())
    batch = make_batch([(k, 2, 8) for k in range(12)])
    # The return is known from the token before: 1 after an even one, -0.5 after an odd one.
    returns = torch.where(batch.tokens.roll(1) % 2 == 0, 1.0, -0.5).double()
    batch = batch.with_token(returns=returns, weight=aggregation_weights(batch, "token-mean"))
    it = critic(policy, budget=50, lr=0.02, clip=None)
    losses = [it.update(batch).stats["loss"] for _ in range(40)]
    values = it.values(batch)
    assert losses[-1] < losses[0] / 50
    assert explained_variance(returns, values, batch.action_mask) > 0.9
    assert all(torch.equal(t, before[name]) for name, t in policy.state_dict().items())


def test_values_are_zero_where_the_model_did_not_write(make_model: MakeModel, make_batch: MakeBatch) -> None:
    batch, it = make_batch(SHAPES), off_zero(critic(make_model(), budget=5))
    wanted = batch.action_mask.nonzero().squeeze(1)
    expected = torch.zeros(batch.num_tokens, dtype=torch.float64)
    expected[wanted] = it.model.token_values(batch.tokens, batch.offsets, wanted).detach()
    values = it.values(batch)
    torch.testing.assert_close(values, expected, atol=1e-12, rtol=0)
    assert not values.requires_grad
    assert not torch.equal(values, torch.zeros_like(values))


@pytest.mark.parametrize("budget", [1, 9, 64])
def test_its_gradient_and_metrics_are_the_same_for_any_token_budget(
    budget: int, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch, it = make_batch(SHAPES), off_zero(critic(make_model(), budget, clip=0.3))
    whole = copy.deepcopy(it.model)
    wanted = batch.loss_mask.nonzero().squeeze(1)
    value = whole.token_values(batch.tokens, batch.offsets, wanted)
    loss, sums = it.loss(loss_view(batch, value=value))
    loss.backward()
    update = it.update(batch)
    assert update.stats["loss"] == pytest.approx(loss.item(), abs=1e-12)
    for name, amount in sums.items():
        assert update.stats[name] == pytest.approx(amount.item() / wanted.numel(), abs=1e-12)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(it.learner.optimizer.gradients()[name], parameter.grad, atol=1e-12, rtol=0)
    assert update.logp is None  # a critic's columns are not used, so they are not returned


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_critic_goes_on_bit_for_bit(
    dtype: torch.dtype, tmp_path: Path, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    batch, it = make_batch(SHAPES), critic(make_model(dtype=dtype))
    for _ in range(3):
        it.update(batch)
    write_contents(tmp_path, it.contents(keep_in_place))
    assert sorted(p.name for p in (tmp_path / "critic").iterdir()) == [
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
    ]
    other = critic(make_model(seed=1, dtype=dtype))
    address = other.model.head.data_ptr()
    other.load(tmp_path)
    assert other.learner.updates == 3
    assert other.model.head.data_ptr() == address
    for _ in range(2):
        assert other.update(batch).stats == it.update(batch).stats
    assert torch.equal(other.values(batch), it.values(batch))
    theirs = other.model.state_dict()
    assert all(torch.equal(t, theirs[name]) for name, t in it.model.state_dict().items())


def test_a_missing_or_foreign_critic_is_refused_by_name(tmp_path: Path, make_model: MakeModel) -> None:
    with pytest.raises(UserError, match=r"critic/model\.safetensors is not there"):
        critic(make_model()).load(tmp_path)
    write_contents(tmp_path, critic(make_model(dtype=torch.float32)).contents(keep_in_place))
    with pytest.raises(UserError, match=r"critic/model\.safetensors does not fit.*float32.*float64"):
        critic(make_model()).load(tmp_path)
    (tmp_path / "critic" / "model.safetensors").write_bytes(b"x" * 100)
    with pytest.raises(UserError, match=r"critic/model\.safetensors cannot be read"):
        critic(make_model()).load(tmp_path)
