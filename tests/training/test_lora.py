"""A learner, a critic and references on a model with adapters: only the adapters are trained, copied and saved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel
from burnish.models.lora.adapters import adapter_weights, add_lora
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.training.auxiliary_models import Critic
from burnish.training.learner import Learner
from burnish.training.reference import EmaReference, Reference, make_reference

MakeModel = Callable[..., Decoder]
MakeBatch = Callable[..., Batch]
SHAPES = [(7, 2, 4), (3, 1, 3), (7, 3, 5), (3, 1, 1), (3, 2, 2), (9, 1, 4)]
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {},
    "ema": {"eta": 0.25},
    "hard_sync": {"every": 2},
    "iterate": {"every": 2},
}
LORA = Lora(rank=2, alpha=4)


def adapted(model: Decoder, is_trained: bool = False) -> Decoder:
    add_lora(model, LORA, seed=0)
    if is_trained:
        generator = torch.Generator().manual_seed(3)
        for parameter in adapter_weights(model).values():
            parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return model


def learner(model: Decoder) -> Learner:
    return Learner(model, Optimizer(lr=0.01), 10, 9, 0.8)


def reference(name: str, model: Decoder) -> Reference:
    return make_reference(name, model, token_budget=9, temperature=0.8, **KINDS[name])


def train(it: Learner, ref: Reference, batch: Batch, steps: int) -> list[dict[str, Tensor]]:
    """Steps of one update each; the adapters after each of them."""
    seen = []
    for step in range(1, steps + 1):
        it.update(batch, NllLoss())
        ref.after_update(it.model)
        ref.after_step(it.model, step)
        seen.append({name: p.detach().clone() for name, p in adapter_weights(it.model).items()})
    return seen


def bits(model: Decoder) -> dict[str, tuple[int, Tensor]]:
    return {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}


def assert_untouched(model: Decoder, before: dict[str, tuple[int, Tensor]]) -> None:
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0], name
        assert torch.equal(parameter, before[name][1]), name


def test_only_adapters_move_and_have_optimizer_state(
    make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    it, batch = learner(adapted(make_model())), make_batch(SHAPES)
    before = bits(it.model)
    for _ in range(2):
        assert it.update(batch, NllLoss()).skipped is None
    moved = {name for name, p in it.model.named_parameters() if not torch.equal(p, before[name][1])}
    assert moved == adapter_weights(it.model).keys()
    write_contents(tmp_path, it.contents(keep_in_place))
    saved = {name for file in tmp_path.rglob("*.safetensors") for name in load_file(file)}
    assert saved
    assert all(name.endswith((".lora_a", ".lora_b")) for name in saved)
    assert all(any(name.endswith(own) for name in saved) for own in adapter_weights(it.model))


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_frozen_reference_is_the_start_and_copies_no_more_than_the_adapter(
    is_trained: bool, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    it, batch = learner(adapted(make_model(), is_trained)), make_batch(SHAPES)
    ref = reference("frozen", it.model)
    assert ref.model is it.model
    assert ref.weights.weights.keys() == (adapter_weights(it.model).keys() if is_trained else set())
    start = it.logprobs(batch)
    if not is_trained:
        assert torch.equal(learner(make_model()).logprobs(batch), start)
    train(it, ref, batch, 3)
    before, own = bits(it.model), it.logprobs(batch)
    assert torch.equal(ref.logprobs(batch), start)
    assert_untouched(it.model, before)
    assert torch.equal(it.logprobs(batch), own)
    assert not torch.allclose(own, start)


@pytest.mark.parametrize("name", ["ema", "hard_sync", "iterate"])
def test_a_reference_that_follows_holds_adapters_alone(
    name: str, make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    it, batch = learner(adapted(make_model())), make_batch(SHAPES)
    ref = reference(name, it.model)
    held = {n: p.detach().clone() for n, p in adapter_weights(it.model).items()}
    for step, weights in enumerate(train(it, ref, batch, 3), 1):
        if name == "ema":
            held = {n: 0.75 * h + 0.25 * weights[n] for n, h in held.items()}
        elif step % 2 == 0:
            held = weights
    other = adapted(make_model())
    for n, parameter in adapter_weights(other).items():
        parameter.data.copy_(held[n])
    expected = learner(other).logprobs(batch)
    before = bits(it.model)
    torch.testing.assert_close(ref.logprobs(batch), expected, atol=1e-12, rtol=0)
    assert_untouched(it.model, before)
    assert not torch.allclose(it.logprobs(batch), expected)
    write_contents(tmp_path, ref.contents(keep_in_place))
    assert load_file(tmp_path / "reference.safetensors").keys() == held.keys()
    again = reference(name, adapted(make_model()))
    again.load(tmp_path)
    assert torch.equal(again.logprobs(batch), ref.logprobs(batch))


def test_the_average_of_a_half_type_is_kept_in_float32(make_model: MakeModel, make_batch: MakeBatch) -> None:
    model, batch = adapted(make_model(dtype=torch.bfloat16), is_trained=True), make_batch(SHAPES)
    ref = make_reference("ema", model, 9, 0.8, eta=1e-4)
    assert isinstance(ref, EmaReference)
    start = {n: p.detach().float() for n, p in adapter_weights(model).items()}
    before = bits(model)
    other = adapted(make_model(dtype=torch.bfloat16))
    for _ in range(100):
        ref.after_update(other)
    for name, parameter in adapter_weights(other).items():
        expected = torch.lerp(start[name], parameter.detach().float(), 1 - 0.9999**100)
        torch.testing.assert_close(ref.shadow[name], expected, atol=1e-5, rtol=1e-4)
    ref.logprobs(batch)
    assert_untouched(model, before)


@pytest.mark.parametrize("is_trained", [False, True])
def test_the_policys_graph_outlives_a_pass_of_the_reference(
    is_trained: bool, make_model: MakeModel, make_batch: MakeBatch
) -> None:
    gradients = []
    for asks in (False, True):
        it, batch = learner(adapted(make_model(), is_trained)), make_batch(SHAPES)
        ref = reference("frozen", it.model)
        train(it, ref, batch, 1)
        logp, _ = it.model.token_logprobs(batch.tokens, batch.offsets, batch.loss_mask.nonzero().squeeze(1))
        if asks:
            ref.logprobs(batch)
        it.optimizer.zero_grad()
        logp.sum().backward()
        gradients.append([p.grad for p in adapter_weights(it.model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_policy_itself_as_reference_needs_no_copy(make_model: MakeModel, make_batch: MakeBatch) -> None:
    it, batch = learner(adapted(make_model())), make_batch(SHAPES)
    ref = make_reference("iterate", it.model, 9, 0.8, every=1)
    train(it, ref, batch, 2)
    assert ref.is_policy
    assert torch.equal(ref.logprobs(batch), it.logprobs(batch))


def test_a_critic_trains_adapters_and_head_on_the_policys_weights_and_comes_back(
    make_model: MakeModel, make_batch: MakeBatch, tmp_path: Path
) -> None:
    policy, batch = adapted(make_model(), is_trained=True), make_batch(SHAPES)

    def critic() -> Critic:
        return Critic(ValueModel(policy), Optimizer(lr=0.02), 10, 9, None)

    before, it = bits(policy), critic()
    losses = [it.update(batch).stats["loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]
    assert_untouched(policy, before)
    write_contents(tmp_path, it.contents(keep_in_place))
    saved = load_file(tmp_path / "critic" / "model.safetensors")
    assert saved.keys() == {"head", *adapter_weights(it.model)}
    again = critic()
    again.load(tmp_path)
    assert torch.equal(again.values(batch), it.values(batch))
    assert [again.update(batch).stats["loss"] for _ in range(3)] == [it.update(batch).stats["loss"] for _ in range(3)]
