"""LoRA on the fused decoder: new, disabled and merged adapters, and gradients against transformers' unfused layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.config.model import PROJECTIONS, Lora
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel
from burnish.models.kernels.exact import exact_linear
from burnish.models.lora.adapters import (
    LoraLinear,
    adapter_weights,
    adapters,
    adapters_disabled,
    add_lora,
    merged_tensors,
    swapped_adapter_weights,
)
from burnish.models.weight_files import load_decoder, load_tensors
from burnish.models.weight_layout import lora_targets, num_lora_parameters, projections

TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]
CPU = torch.device("cpu")
LENGTHS, WANTED = [6, 1, 15, 3], torch.tensor([1, 5, 8, 21, 24])
SOME = Lora(rank=3, alpha=5, targets=["q_proj", "v_proj", "o_proj", "up_proj"])
ALL = Lora(rank=2, alpha=3, rslora=True)


def native(tiny_model: TinyModel, variant: str, lora: Lora | None, dtype: torch.dtype = torch.float64) -> Decoder:
    """The decoder of a tiny model, with new adapters."""
    model = load_decoder(tiny_model(variant, dtype=torch.float64)[1], dtype, CPU)
    if lora is not None:
        add_lora(model, lora, seed=0)
    return model


def trained(model: Decoder, seed: int = 5) -> Decoder:
    """A decoder with adapters whose B is not 0, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_weights(model).values():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return model


def logp(model: Decoder, packed: Packed) -> Tensor:
    return model.token_logprobs(*packed(LENGTHS), WANTED, 0.9)[0]


# --- values --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "llama-bias"])
def test_new_adapters_change_nothing_bit_for_bit(
    variant: str, dtype: torch.dtype, tiny_model: TinyModel, packed: Packed
) -> None:
    base = native(tiny_model, variant, None, dtype)
    for lora in (SOME, ALL):
        model = native(tiny_model, variant, lora, dtype)
        assert torch.equal(logp(model, packed), logp(base, packed))
        with torch.no_grad():
            assert torch.equal(logp(model, packed), logp(base, packed))


@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
def test_switched_off_it_is_the_base_bit_for_bit_and_then_itself_again(
    lora: Lora, tiny_model: TinyModel, packed: Packed
) -> None:
    base = logp(native(tiny_model, "qwen2", None, torch.float32), packed)
    model = trained(native(tiny_model, "qwen2", lora, torch.float32))
    before = logp(model, packed)
    with adapters_disabled(model):
        assert torch.equal(logp(model, packed), base)
    assert torch.equal(logp(model, packed), before)
    assert (before - base).abs().min() > 1e-4


@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "llama-bias", "mistral-window", "gemma2", "gemma3"])
def test_merged_weights_give_the_same_logprobs(variant: str, lora: Lora, tiny_model: TinyModel, packed: Packed) -> None:
    model = trained(native(tiny_model, variant, lora))
    merged = native(tiny_model, variant, None)
    assert (logp(model, packed) - logp(merged, packed)).abs().max() > 1e-3
    load_tensors(merged, merged_tensors(model), "merged")
    torch.testing.assert_close(logp(merged, packed), logp(model, packed), atol=1e-12, rtol=0)


def test_merging_in_a_half_type_rounds_once(tiny_model: TinyModel) -> None:
    model = trained(native(tiny_model, "qwen2", ALL, torch.bfloat16))
    wide = copy.deepcopy(model).float()
    for (name, ours), (_, theirs) in zip(merged_tensors(model), merged_tensors(wide), strict=True):
        assert torch.equal(ours, theirs.to(torch.bfloat16)), name


# --- gradients -----------------------------------------------------------------------------------------------------------


class Separate(nn.Module):
    """A fused layer as separate projections, each with its W, A and B, by plain autograd."""

    def __init__(
        self, fused: nn.Linear, rows: list[int], adapters: list[tuple[Tensor, Tensor] | None], scale: float
    ) -> None:
        super().__init__()
        biases = [None] * len(rows) if fused.bias is None else list(fused.bias.detach().split(rows))
        self.parts = list(zip(fused.weight.detach().split(rows), biases, adapters, strict=True))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for weight, bias, adapter in self.parts:
            y = x @ weight.t() + (0.0 if bias is None else bias)
            found.append(y if adapter is None else y + self.scale * (x @ adapter[0].t()) @ adapter[1].t())
        return torch.cat(found, 1)


def unfused(base: Decoder, model: Decoder) -> tuple[Decoder, dict[tuple[int, str], tuple[Tensor, Tensor]]]:
    """`base` with separate projections that have the adapters of `model`, and these as leaves."""
    assert model.lora is not None
    leaves = {
        (i, p.name): (a.detach().clone().requires_grad_(), b.detach().clone().requires_grad_())
        for i, p, a, b in adapters(model)
    }
    for index, layer in enumerate(base.requires_grad_(False).layers):
        for module in ("qkv", "out", "gate_up", "down"):
            parts = [p for p in projections(base.arch) if p.module == module]
            own = [leaves.get((index, p.name)) for p in parts]
            rows = [p.num_outputs for p in parts]
            setattr(layer, module, Separate(getattr(layer, module), rows, own, model.lora.scale))
    return base, leaves


@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "llama-bias"])
def test_gradients_are_those_of_separate_projections(
    variant: str, lora: Lora, tiny_model: TinyModel, packed: Packed
) -> None:
    model = trained(native(tiny_model, variant, lora))
    other, leaves = unfused(native(tiny_model, variant, None), model)
    found, expected = logp(model, packed), logp(other, packed)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    slopes = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    (found * slopes).sum().backward()
    (expected * slopes).sum().backward()
    assert len(leaves) == 2 * len(lora_targets(model.arch, lora))
    for (index, name), (a, b) in leaves.items():
        projection = next(p for p in projections(model.arch) if p.name == name)
        layer = getattr(model.layers[index], projection.module)
        slot = [start for start, _ in layer.spans].index(projection.start)
        first = sum(stop - start for start, stop in layer.spans[:slot])
        ours = layer.lora_a.grad.split(lora.rank)[slot], layer.lora_b.grad[first : first + projection.num_outputs]
        torch.testing.assert_close(ours, (a.grad, b.grad), atol=1e-10, rtol=1e-10)
    own = dict(model.named_parameters())
    assert {name for name, p in own.items() if p.grad is not None} == adapter_weights(model).keys()
    assert {name for name, p in own.items() if p.requires_grad} == adapter_weights(model).keys()


def test_the_layer_passes_a_numerical_check_of_its_derivatives() -> None:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    layer = LoraLinear(nn.Linear(5, 9).double(), [(0, 4), (6, 9)], 2, 0.7)

    def run(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"lora_a": a, "lora_b": b}, (x,))

    assert torch.autograd.gradcheck(run, (rand(6, 5), rand(4, 5), rand(7, 2)))


def test_a_weight_that_is_to_be_trained_under_an_adapter_is_an_error() -> None:
    layer = LoraLinear(nn.Linear(4, 4), [(0, 4)], 2, 1.0)
    layer.weight.requires_grad_()
    with pytest.raises(RuntimeError, match="frozen"):
        layer(torch.ones(2, 4))


# --- parameters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
def test_the_number_of_parameters_is_known_beforehand(lora: Lora, tiny_model: TinyModel) -> None:
    model = native(tiny_model, "qwen3", lora)
    assert sum(p.numel() for p in adapter_weights(model).values()) == num_lora_parameters(model.arch, lora)
    assert (
        sum(p.numel() for p in model.parameters()) == num_lora_parameters(model.arch, lora) + model.arch.num_parameters
    )


def test_the_count_of_a_large_model_is_the_worked_number() -> None:
    """Qwen2.5-7B: 28 layers of 3584, 18944 in the MLP, keys and values of 512."""
    from burnish.models.architecture import Architecture

    arch = Architecture("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, 32768, qkv_bias=True)
    widths = (3584 + 3584) + 2 * (3584 + 512) + (3584 + 3584) + 3 * (3584 + 18944)
    assert num_lora_parameters(arch, Lora(rank=32)) == 28 * 32 * widths
    assert num_lora_parameters(arch, Lora(rank=8, targets=["q_proj", "v_proj"])) == 28 * 8 * (7168 + 4096)


def test_a_starts_uniform_from_the_seed_and_its_name_alone_and_b_at_zero(tiny_model: TinyModel) -> None:
    first, again, other = (native(tiny_model, "qwen2", None) for _ in range(3))
    add_lora(first, Lora(rank=8), seed=1)
    add_lora(again, Lora(rank=8, targets=["up_proj", "k_proj"]), seed=1)
    add_lora(other, Lora(rank=8), seed=2)
    whole = {(i, p.name): (a, b) for i, p, a, b in adapters(first)}
    assert len(whole) == 2 * len(PROJECTIONS)
    for index, projection, a, b in adapters(again):
        assert torch.equal(a, whole[index, projection.name][0])
        assert not b.any()
    for index, projection, a, b in adapters(other):
        bound = projection.num_inputs**-0.5
        assert not torch.equal(a, whole[index, projection.name][0])
        assert 0.9 * bound < a.abs().max() <= bound
        assert abs(float(a.detach().mean())) < 0.1 * bound
        assert not b.any()
    assert len({float(a.detach().sum()) for a, _ in whole.values()}) == len(whole)


@pytest.mark.parametrize(
    "change", [{"rank": 4}, {"alpha": 6.0}, {"rslora": False}, {"targets": ["q_proj", "down_proj"]}], ids=str
)
def test_every_option_changes_the_computation(change: dict[str, Any], tiny_model: TinyModel, packed: Packed) -> None:
    found = []
    for lora in (ALL, ALL.model_copy(update=change)):
        model = native(tiny_model, "qwen2", lora)
        with torch.no_grad():
            for _, _, _, b in adapters(model):
                b.copy_(torch.linspace(-1, 1, b.numel()).view(b.shape))
        found.append(logp(model, packed))
    assert (found[0] - found[1]).abs().max() > 1e-3


# --- two sets of weights on one base ---------------------------------------------------------------------------------------


def test_other_adapters_are_held_for_a_while_and_the_own_ones_come_back(tiny_model: TinyModel, packed: Packed) -> None:
    model = trained(native(tiny_model, "qwen2", SOME, torch.bfloat16))
    other = trained(native(tiny_model, "qwen2", SOME, torch.bfloat16), seed=6)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in model.named_parameters()}
    values = logp(model, packed)
    with swapped_adapter_weights(model, adapter_weights(other)):
        assert torch.equal(logp(model, packed), logp(other, packed))
    assert all(p.data_ptr() == before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters())
    assert torch.equal(logp(model, packed), values)
    assert not torch.equal(values, logp(other, packed))


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_shares_the_frozen_weights_and_has_adapters_of_its_own(
    tied: bool, tiny_model: TinyModel, packed: Packed
) -> None:
    policy = load_decoder(tiny_model("qwen2", tied)[1], torch.float32, CPU)
    add_lora(policy, SOME, seed=0)
    trained(policy)
    critic = ValueModel(policy)
    theirs = {p.data_ptr(): name for name, p in policy.named_parameters()}
    for name, parameter in critic.named_parameters():
        is_own = name == "head" or name in adapter_weights(critic)
        assert parameter.requires_grad == is_own, name
        assert (parameter.data_ptr() not in theirs) == is_own, name
    tokens, offsets = packed(LENGTHS)
    assert isinstance(critic.backbone, Decoder)
    assert torch.equal(critic.backbone.hidden(tokens, offsets), policy.hidden(tokens, offsets))
    before = copy.deepcopy(policy.state_dict())
    with torch.no_grad():
        critic.head.fill_(1.0)
    critic.token_values(tokens, offsets, WANTED).sum().backward()
    with torch.no_grad():
        for parameter in critic.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    assert all(torch.equal(t, before[name]) for name, t in policy.state_dict().items())
    assert not torch.equal(critic.backbone.hidden(tokens, offsets), policy.hidden(tokens, offsets))


# --- exact operations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_exact_layer_is_the_layer_to_rounding_and_its_rows_do_not_see_their_neighbours(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(100, 37), [(0, 20), (30, 37)], 4, 0.5)
    with torch.no_grad():
        layer.lora_a.normal_(0, 0.1)
        layer.lora_b.normal_()
        x = torch.randn(200, 100)
        expected = layer(x)
        assert (expected - nn.functional.linear(x, layer.weight, layer.bias)).abs().max() > 0.1
        layer, x = layer.to(dtype), x.to(dtype)
        whole = exact_linear(layer, x)
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(whole.float(), expected, atol=tolerance, rtol=tolerance)
        for some in ([5], [199, 0, 64], list(range(37))):
            assert torch.equal(exact_linear(layer, x[some]), whole[some])
        layer.is_on = False
        plain = nn.Linear(100, 37).to(dtype)
        plain.load_state_dict({"weight": layer.weight, "bias": layer.bias})
        assert torch.equal(exact_linear(layer, x), exact_linear(plain, x))
