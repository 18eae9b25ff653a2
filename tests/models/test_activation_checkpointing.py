"""Activation policies: every policy gives the same gradient and saves exactly the bytes of the formulas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.models.activation_checkpointing import checkpointed, recomputed_output, set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import ValueModel
from burnish.models.kernels import attention
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import add_lora
from burnish.models.model_families import FAMILIES
from burnish.models.transformers_model import TransformersPolicy
from tests.alive import Alive

POLICIES = ("keep", "selective", "recompute", "offload")
TOKENS = torch.randint(0, 61, (24,), generator=torch.Generator().manual_seed(3))
OFFSETS = torch.tensor([0, 7, 20, 24])
WANTED = torch.tensor([1, 4, 6, 9, 15, 19, 22])


def make(family: str, dtype: torch.dtype = torch.float64, num_layers: int = 3) -> Decoder:
    kind = FAMILIES[family]
    window = {"window": 5 if family in ("mistral", "gemma2", "gemma3_text") else None}
    fields = {**kind.fixed, **kind.new_model_fields(num_layers), **window}
    arch = Architecture(family, 61, 32, num_layers, 4, 2, 8, 96, 64, **fields)
    if family == "deepseek_v3":
        arch = replace(arch, num_kv_heads=4, head_dim=18, latent=LatentShape(20, 12, 10, 8, 14))
    model = Decoder(arch)
    initialise(model, 0, 0.3)
    return model.to(dtype)


def gradients(model: nn.Module, policy: str, output: Callable[[Any], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """An output and the gradients of its sum of squares, on a copy of the model."""
    it = copy.deepcopy(model)
    set_activations(it, policy)
    found = output(it)
    found.square().sum().backward()
    return found.detach(), {name: p.grad for name, p in it.named_parameters() if p.grad is not None}


def assert_same(model: nn.Module, policy: str, output: Callable[[Any], Tensor]) -> None:
    value, expected = gradients(model, "keep", output)
    again, got = gradients(model, policy, output)
    assert torch.equal(value, again)
    assert expected
    assert got.keys() == expected.keys()
    for name in expected:
        assert torch.equal(got[name], expected[name]), name


# --- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_policy_gives_the_same_gradient_to_the_bit(family: str, dtype: torch.dtype, policy: str) -> None:
    assert_same(make(family, dtype), policy, lambda m: m.token_logprobs(TOKENS, OFFSETS, WANTED)[0])


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_also_with_shared_beginnings_adapters_and_below_a_critic(policy: str) -> None:
    tokens = torch.cat([TOKENS[:4], TOKENS[10:14], TOKENS[:4], TOKENS[16:20]])
    shared_prefix = torch.tensor([0, 4])
    where = tokens, torch.tensor([0, 8, 16]), torch.tensor([5, 13])
    model = make("qwen3")
    for longest_in_c in (attention.MAX_C_ATTENTION_LENGTH, 0):  # by the C kernel, and in pieces
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(attention, "MAX_C_ATTENTION_LENGTH", longest_in_c)
            assert_same(model, policy, lambda m: m.token_logprobs(*where, shared_prefix=shared_prefix)[0])
    critic = ValueModel(model)
    nn.init.normal_(critic.head, generator=torch.Generator().manual_seed(1))
    assert_same(critic, policy, lambda m: m.token_values(TOKENS, OFFSETS, WANTED))
    add_lora(model, Lora(rank=2), seed=0)
    assert_same(model, policy, lambda m: m.token_logprobs(TOKENS, OFFSETS, WANTED)[0])


@pytest.mark.parametrize("policy", ["recompute", "offload"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma3"])
def test_also_through_transformers(tiny_other: Callable[..., Any], name: str, policy: str) -> None:
    model = TransformersPolicy(tiny_other(name, torch.float64))
    assert_same(model, policy, lambda m: m.token_logprobs(TOKENS, OFFSETS, WANTED)[0])
    calls: list[int] = []
    set_activations(model, policy)
    first = next(m for m in model.inner.modules() if "forward" in vars(m))
    inside = next(m for m in first.modules() if m is not first)
    inside.register_forward_hook(lambda *_: calls.append(1))
    loss = model.token_logprobs(TOKENS, OFFSETS, WANTED)[0].sum()
    assert len(calls) == 1
    loss.backward()
    assert len(calls) == 2  # the layer ran again


def test_a_copy_of_a_model_of_transformers_recomputes_with_its_own_weights(tiny_other: Callable[..., Any]) -> None:
    model = TransformersPolicy(tiny_other("gpt2"))
    set_activations(model, "recompute")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert twin.token_logprobs(TOKENS, OFFSETS, WANTED)[0].std() > 0


def test_selective_is_refused_for_a_model_of_transformers(tiny_other: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="selective needs the native decoder"):
        set_activations(TransformersPolicy(tiny_other("gpt2")), "selective")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_can_be_changed_back(policy: str) -> None:
    model = make("llama")
    set_activations(model, policy)
    set_activations(model, "keep")
    assert model.activations == "keep"
    assert all(layer.activation_policy is None for layer in model.layers)


# --- saved bytes ---


def held(policy: str, num_layers: int) -> int:
    """Bytes saved by the forward pass, without its output."""
    model = make("llama", torch.float32, num_layers)
    set_activations(model, policy)
    model.rotations(16)
    with Alive(*model.parameters(), TOKENS, OFFSETS) as alive:
        out = model.hidden(TOKENS, OFFSETS)
        return alive.bytes - out.nbytes


def test_each_policy_keeps_less_than_the_one_before() -> None:
    kept, selected, input_only, offloaded = (held(policy, 3) - held(policy, 2) for policy in POLICIES)
    assert kept > selected > input_only
    assert input_only == offloaded == TOKENS.numel() * 32 * 4  # on a CPU the host's copy is counted with the rest


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_left_after_the_backward_pass(policy: str) -> None:
    model = make("llama", torch.float32)
    set_activations(model, policy)
    model.rotations(16)
    with Alive(*model.parameters(), TOKENS, OFFSETS) as alive:
        model.hidden(TOKENS, OFFSETS).square().sum().backward()
        assert alive.bytes == sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)


def test_a_pass_without_gradient_ignores_the_policy() -> None:
    model = make("llama")
    expected = model.hidden(TOKENS, OFFSETS).detach()
    for layer in model.layers:
        layer.activation_policy = lambda *_: pytest.fail("called")
    with torch.no_grad():
        torch.testing.assert_close(model.hidden(TOKENS, OFFSETS), expected)


# --- recomputation and offloading ---


def test_an_expensive_operation_behind_a_lent_result_runs_once() -> None:
    ran: list[str] = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ran.append("expensive")
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x * grads[0]

    def cheap(x: Tensor) -> Tensor:
        ran.append("cheap")
        return x.sin()

    x = torch.tensor([0.3, 0.7], dtype=torch.float64, requires_grad=True)
    with recomputed_output(cheap, x) as y:
        z = Square.apply(y)
    assert ran == ["cheap", "expensive"]
    z.sum().backward()
    assert ran == ["cheap", "expensive", "cheap"]
    torch.testing.assert_close(x.grad, (2 * x).sin().detach())


def test_recomputing_ends_before_the_last_product() -> None:
    weight = torch.eye(3, requires_grad=True)
    with Alive() as alive:
        x = torch.ones(1000, 3, requires_grad=True)
        y = checkpointed(lambda x: x.sin() @ weight, x)
        before = alive.bytes
        alive.peak = 0
        torch.autograd.grad(y, weight, torch.ones(1).expand(1000, 3))
    assert alive.peak - before < 2 * x.nbytes  # the sines are recomputed, the product is not


def test_a_forward_that_changes_between_its_runs_is_an_error() -> None:
    calls: list[int] = []

    def fickle(x: Tensor) -> Tensor:
        calls.append(1)
        return x.sin().exp() if len(calls) == 1 else x

    y = checkpointed(fickle, torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="saved 2 tensors, but 0 when it was recomputed"):
        y.sum().backward()


def test_reading_a_recomputed_tensor_twice_is_an_error() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            assert len(ctx.saved_tensors) == 1
            return grads[0] * ctx.saved_tensors[0]

    y = checkpointed(Twice.apply, torch.ones(2, requires_grad=True))
    with pytest.raises(RuntimeError, match="read twice"):
        y.sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_every_policy_gives_the_same_gradient_on_a_gpu(policy: str) -> None:
    model = make("qwen2", torch.bfloat16, 6).cuda()
    tokens, offsets, wanted = TOKENS.cuda(), OFFSETS.cuda(), WANTED.cuda()
    _, expected = gradients(model, "keep", lambda m: m.token_logprobs(tokens, offsets, wanted)[0])
    _, got = gradients(model, policy, lambda m: m.token_logprobs(tokens, offsets, wanted)[0])
    for name in expected:  # the attention kernel sums in no fixed order
        torch.testing.assert_close(got[name], expected[name], atol=2e-2, rtol=2e-2)
