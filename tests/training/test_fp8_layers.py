"""A learner whose linear layers multiply in 8 bits: what changes, what must not, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.config.errors import UserError
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.models.activation_bytes import ActivationEstimate
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.fp8_layers import set_fp8
from burnish.models.lora.adapters import adapter_weights, adapters_disabled, add_lora
from burnish.models.model_families import FAMILIES
from burnish.training.learner import Learner
from burnish.training.reference import make_reference
from tests.kernels import error
from tests.models.test_activation_bytes import (
    LENGTH,
    OFFSETS,
    POLICIES,
    ROWS_SHARED,
    SHARED,
    TOKENS,
    arch_of,
    kept,
    made,
)

MakeBatch = Callable[..., Batch]
SHAPES = [(7, 2, 4), (3, 1, 3), (7, 3, 5), (3, 1, 1), (3, 2, 2), (9, 1, 4)]


def make(layers: str = "fp8", dtype: torch.dtype = torch.float32, seed: int = 0) -> Decoder:
    model = Decoder(Architecture("qwen2", 11, 32, 2, 4, 2, 8, 48, 64, qkv_bias=True, tied=True))
    initialise(model, seed, std=0.2)
    set_fp8(model.to(dtype), layers == "fp8")
    return model


def gradients(model: Decoder, batch: Batch, budget: int = 1000, share_prefixes: bool = True) -> dict[str, Tensor]:
    """The gradients of a mini-batch before clipping."""
    learner = Learner(model, Optimizer(lr=0.01), 10, budget, share_prefixes=share_prefixes)
    learner.optimizer.zero_grad()
    learner._one_pass(batch, NllLoss(), frozenset())
    return {name: g.clone() for name, g in learner.optimizer.gradients().items()}


def flat(named: dict[str, Tensor]) -> Tensor:
    return torch.cat([named[name].flatten() for name in sorted(named)])


def test_gradients_of_a_model_are_near_those_of_its_dtype(make_batch: MakeBatch) -> None:
    batch = make_batch(SHAPES)
    truth, found = gradients(make("plain", torch.float64), batch), gradients(make(), batch)
    assert (
        0.01 < error(flat(found), flat(truth)) < 0.3
    )  # every product adds 4%, in a model with logits far from uniform
    assert torch.cosine_similarity(flat(found).double(), flat(truth), dim=0) > 0.97


def test_no_split_into_micro_batches_changes_the_gradient(make_batch: MakeBatch) -> None:
    batch = make_batch(SHAPES)
    for share_prefixes, bound in (
        (False, 1e-5),
        (True, 0.06),
    ):  # a prefix in two micro-batches has two gradients to round
        whole = flat(gradients(make(), batch, share_prefixes=share_prefixes))
        for budget in (1, 9):
            assert error(flat(gradients(make(), batch, budget, share_prefixes)), whole.double()) < bound


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_every_activation_policy_gives_the_same_gradient_to_the_bit(make_batch: MakeBatch, policy: str) -> None:
    batch, model = make_batch(SHAPES), make()
    expected = gradients(copy.deepcopy(model), batch)
    set_activations(model, policy)
    found = gradients(model, batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_only_the_learner_multiplies_in_8_bits(make_batch: MakeBatch) -> None:
    batch, model, plain = make_batch(SHAPES), make(), make("plain")
    wanted = batch.loss_mask.nonzero()[:, 0]

    def logp(it: Decoder) -> Tensor:
        return it.token_logprobs(batch.tokens, batch.offsets, wanted)[0].detach()

    with torch.no_grad():
        without_gradient = logp(model)
    assert torch.equal(logp(model), without_gradient)  # old log-probs and those of the update are of one policy
    assert not torch.equal(logp(model), logp(plain))
    with torch.inference_mode():
        assert torch.equal(logp(model), logp(plain))
    set_fp8(model, False)
    assert torch.equal(logp(model), logp(plain))


def test_a_copy_of_the_policy_rounds_as_it_does(make_batch: MakeBatch) -> None:
    batch, model = make_batch(SHAPES), make()
    reference = make_reference("ema", model, token_budget=1000, temperature=1.0, eta=0.5)
    learner = Learner(model, Optimizer(lr=0.01), 10, 1000)
    before = learner.logprobs(batch)
    assert torch.equal(reference.logprobs(batch), before)
    learner.update(batch, NllLoss())
    assert torch.equal(reference.logprobs(batch), before)  # its layers read its own weights
    assert not torch.equal(learner.logprobs(batch), before)


def test_adapters_train_on_a_base_that_multiplies_in_8_bits(make_batch: MakeBatch) -> None:
    batch, found = make_batch(SHAPES), {}
    for layers, dtype in (("plain", torch.float64), ("fp8", torch.float32)):
        model = make("plain", dtype)
        add_lora(model, Lora(rank=2), seed=0)
        for parameter in adapter_weights(model).values():
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        set_fp8(model, layers == "fp8")
        found[layers] = flat(gradients(model, batch))
        with adapters_disabled(model):
            disabled = Learner(model, Optimizer(), 1, 1000).logprobs(batch)
        base = make(layers, dtype)
        assert torch.equal(disabled, Learner(base, Optimizer(), 1, 1000).logprobs(batch))
    assert 0.01 < error(found["fp8"], found["plain"]) < 0.3


def test_the_loss_falls_as_it_does_in_float32(make_batch: MakeBatch) -> None:
    batch, curves = make_batch(SHAPES), {}
    for name, layers, dtype in (
        ("float32", "plain", torch.float32),
        ("bfloat16", "plain", torch.bfloat16),
        ("fp8", "fp8", torch.bfloat16),
    ):
        learner = Learner(make(layers, dtype), Optimizer(lr=3e-3), 30, 20)
        curves[name] = [learner.update(batch, NllLoss()).stats["loss"] for _ in range(30)]
    first, last = curves["float32"][0], curves["float32"][-1]
    assert last < 0.7 * first
    for name in ("bfloat16", "fp8"):
        assert abs(curves[name][-1] - last) < 0.1 * (first - last), name


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text"])
def test_a_layer_keeps_what_the_formula_says(family: str) -> None:
    model = made(family, 4, torch.float32, None)
    set_fp8(model, True)
    for policy in POLICIES:
        for shared_prefix in (None, SHARED):
            rows = ROWS_SHARED if shared_prefix is not None else TOKENS.numel()
            forward = ActivationEstimate(model.arch, 4, False, None, shared_prefix is not None, LENGTH, in_fp8=True)
            expected = forward.layer("recompute" if policy == "offload" else policy).of(rows, TOKENS.numel())
            assert kept(model, policy, shared_prefix) == expected, (policy, shared_prefix)
    assert OFFSETS[-1] == TOKENS.numel()


def test_what_cannot_multiply_in_8_bits_is_refused() -> None:
    experts = next(name for name in FAMILIES if name == "qwen3_moe")
    with pytest.raises(UserError, match="products of experts"):
        set_fp8(Decoder(arch_of(experts, 2)), True)
    quantised = make("plain")
    add_lora(quantised, Lora(rank=2, base="nf4"), seed=0)
    with pytest.raises(UserError, match=r"set model\.lora\.base=dtype"):
        set_fp8(quantised, True)
    with pytest.raises(UserError, match="needs the native decoder"):
        set_fp8(torch.nn.Linear(2, 2), True)
