"""Decoders with NF4 layers and adapters: loading, and agreement with dense weights of the same numbers in every pass."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from burnish.config.errors import UserError
from burnish.config.model import Lora, LoraBase, Model
from burnish.memory_plan.learner_bytes import meta_policy
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel
from burnish.models.lora.adapters import adapter_weights, adapters_disabled, add_lora, merged_tensors
from burnish.models.lora.peft_files import BASE_FORMAT_FILE, load_adapter, read_lora_config, save_adapter
from burnish.models.nf4 import DenseWeights, Nf4Weight, dense_weight, nf4_linear, quantised_weights, weight_bytes
from burnish.models.policy import PolicyModel, full_hf_tensors, load_policy, save_merged
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import hf_tensors, load_decoder, load_tensors, stored_tensors
from burnish.models.weight_layout import layer_matrices
from burnish.training.auxiliary_models import trainable_copy
from tests.alive import Alive

TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]
CPU = torch.device("cpu")
LENGTHS, WANTED = [6, 1, 15, 3], torch.tensor([1, 5, 8, 21, 24])
SOME = Lora(rank=3, alpha=5, targets=["q_proj", "v_proj", "o_proj", "up_proj"], base="nf4")
ALL = Lora(rank=2, alpha=3, rslora=True, base="nf4-double")
BASES: tuple[LoraBase, ...] = ("nf4", "nf4-double")


def moved(model: Decoder, seed: int = 5) -> Decoder:
    """A decoder with adapters whose B is not 0, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in adapter_weights(model).values():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return model


def in_4_bits(directory: Path, lora: Lora, dtype: torch.dtype = torch.float64) -> Decoder:
    model = load_decoder(directory, dtype, CPU, lora.base)
    add_lora(model, lora, seed=0)
    return moved(model)


def plain_twin(directory: Path, model: Decoder) -> Decoder:
    """The same numbers as dense weights, with the same adapters."""
    assert model.lora is not None
    twin = load_decoder(directory, model.embedding.weight.dtype, CPU)
    load_tensors(twin, hf_tensors(model), "the numbers of the 4 bits")
    add_lora(twin, model.lora.model_copy(update={"base": "dtype"}), seed=0)
    return moved(twin)


def logp(model: Decoder, packed: Packed) -> Tensor:
    return model.token_logprobs(*packed(LENGTHS), WANTED, 0.9)[0]


def bits_of(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(("codes", "scales", "ranges"))}


# --- loading -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
def test_the_bits_are_those_of_the_files_numbers_whatever_the_models_type(
    base: LoraBase, tiny_model: TinyModel
) -> None:
    directory = tiny_model("llama-bias")[1]
    first = bits_of(load_decoder(directory, torch.float32, CPU, base))
    assert len(first) == 2 * 4 * (2 if base == "nf4" else 3)
    for dtype in (torch.bfloat16, torch.float64):
        again = bits_of(load_decoder(directory, dtype, CPU, base))
        assert all(torch.equal(first[name], bits) for name, bits in again.items())
    later = load_decoder(directory, torch.float32, CPU)
    add_lora(later, Lora(rank=2, base=base), 0)
    assert all(torch.equal(first[name], bits) for name, bits in bits_of(later).items())


def test_everything_but_the_layers_matrices_stays_in_the_models_type(tiny_model: TinyModel) -> None:
    directory = tiny_model("qwen2", tied=True)[1]
    model, plain = (load_decoder(directory, torch.float32, CPU, base) for base in ("nf4", "dtype"))
    names = {f"layers.{i}.{module}.weight" for i in range(2) for module in layer_matrices(model.arch, i)}
    own, all_of_it = dict(model.named_parameters()), dict(plain.named_parameters())
    assert own.keys() == all_of_it.keys() - names
    assert all(torch.equal(parameter, all_of_it[name]) for name, parameter in own.items())
    assert model.head_weight is model.embedding.weight
    numbers = DenseWeights(model)
    assert set(numbers) == all_of_it.keys()
    for name in names:
        gap = (numbers[name] - all_of_it[name]).abs()
        assert 0 < gap.max() < 0.2
        assert gap.mean() < 0.04  # of weights of size 0.2


def test_loading_holds_the_matrices_of_one_layer_at_most_beside_the_4_bits(tiny_model: TinyModel) -> None:
    directory = tiny_model("qwen3")[1]
    model = load_decoder(directory, torch.float32, CPU, "nf4")
    layer = sum(
        w.shape[0] * w.shape[1] for w in (getattr(model.layers[0], m).weight for m in layer_matrices(model.arch, 0))
    )
    with Alive(*model.parameters(), *model.buffers()) as alive:
        load_tensors(model, stored_tensors(directory), "files")
    assert alive.bytes == 0
    assert alive.peak <= (4 + 20) * layer  # float32 weights, and temporaries of quantising one of them
    held = sum(w.numel() for w in bits_of(model).values())
    assert held < layer * 2  # and there are two layers


def test_a_tensor_that_does_not_fit_or_misses_is_named(tiny_model: TinyModel) -> None:
    directory = tiny_model("qwen2")[1]
    model = load_decoder(directory, torch.float32, CPU, "nf4")
    tensors = {name: tensor.clone() for name, tensor in hf_tensors(model)}
    missing = {n: t for n, t in tensors.items() if n != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(UserError, match=r"1 tensors are missing, first model.layers.1.mlp.up_proj.weight"):
        load_tensors(model, missing.items(), "it")
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(UserError, match=rf"{name} is \(3, 32\) but config.json implies \(16, 32\)"):
        load_tensors(model, {**tensors, name: torch.zeros(3, 32)}.items(), "it")


# --- passes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
@pytest.mark.parametrize("variant", ["qwen2", "qwen3", "llama-bias", "gemma2", "gemma3"])
def test_logprobs_and_gradients_are_those_of_plain_weights_of_the_same_numbers(
    variant: str, lora: Lora, tiny_model: TinyModel, packed: Packed
) -> None:
    directory = tiny_model(variant)[1]
    model = in_4_bits(directory, lora)
    twin = plain_twin(directory, model)
    slopes = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
    for one in (model, twin):
        (logp(one, packed) * slopes).sum().backward()
    torch.testing.assert_close(logp(model, packed), logp(twin, packed), atol=1e-12, rtol=0)
    theirs = adapter_weights(twin)
    for name, parameter in adapter_weights(model).items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=1e-10, rtol=1e-10)
    assert {n for n, p in model.named_parameters() if p.grad is not None} == adapter_weights(model).keys()
    original = load_decoder(directory, torch.float64, CPU)
    assert (logp(original, packed) - logp(model, packed)).abs().max() > 1e-3


@pytest.mark.parametrize("policy", ["selective", "recompute", "offload"])
def test_every_activation_policy_has_the_same_gradient(policy: str, tiny_model: TinyModel, packed: Packed) -> None:
    directory, found = tiny_model("qwen3")[1], []
    for one in ("keep", policy):
        model = in_4_bits(directory, SOME)
        set_activations(model, one)
        logp(model, packed).sum().backward()
        found.append([p.grad for p in adapter_weights(model).values()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


def test_switched_off_it_is_the_base_in_4_bits(tiny_model: TinyModel, packed: Packed) -> None:
    directory = tiny_model("qwen2")[1]
    base = load_decoder(directory, torch.float32, CPU, "nf4").requires_grad_(False)
    model = in_4_bits(directory, SOME, torch.float32)
    before = logp(model, packed)
    with adapters_disabled(model), torch.no_grad():
        assert torch.equal(logp(model, packed), logp(base, packed))
    assert torch.equal(logp(model, packed), before)


def test_each_base_is_another_computation(tiny_model: TinyModel, packed: Packed) -> None:
    directory = tiny_model("qwen2")[1]
    found = []
    for base in ("dtype", *BASES):
        model = load_decoder(directory, torch.float64, CPU)
        add_lora(model, Lora(rank=2, base=base), 0)
        found.append(logp(model, packed))
    assert all((a - b).abs().max() > 1e-5 for k, a in enumerate(found) for b in found[:k])


@pytest.mark.parametrize("base", BASES)
def test_a_critic_has_adapters_of_its_own_on_the_very_4_bits(
    base: LoraBase, tiny_model: TinyModel, packed: Packed
) -> None:
    policy = in_4_bits(tiny_model("qwen2")[1], Lora(rank=2, base=base))
    critic = ValueModel(policy)
    theirs = {name: bits.data_ptr() for name, bits in bits_of(policy).items()}
    assert {name.removeprefix("backbone."): bits.data_ptr() for name, bits in bits_of(critic).items()} == theirs
    assert isinstance(critic.backbone, Decoder)
    tokens, offsets = packed(LENGTHS)
    assert torch.equal(critic.backbone.hidden(tokens, offsets), policy.hidden(tokens, offsets))
    assert all(p.requires_grad == (n == "head" or n in adapter_weights(critic)) for n, p in critic.named_parameters())


def test_a_twin_has_adapters_of_its_own_on_the_very_4_bits(tiny_model: TinyModel, packed: Packed) -> None:
    policy = in_4_bits(tiny_model("qwen2")[1], SOME)
    twin = trainable_copy(policy)
    before = logp(policy, packed)
    assert torch.equal(logp(twin, packed), before)
    assert {n: b.data_ptr() for n, b in bits_of(twin).items()} == {n: b.data_ptr() for n, b in bits_of(policy).items()}
    moved(twin, seed=9)
    assert torch.equal(logp(policy, packed), before)
    assert not torch.equal(logp(twin, packed), before)


# --- out -----------------------------------------------------------------------------------------------------------------


def policy_of(model: Decoder, source: Path) -> PolicyModel:
    return PolicyModel(model, Tokenizer.from_characters("ab"), source, "")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_merged_weights_are_the_4_bits_numbers_with_the_adapters_added(
    dtype: torch.dtype, tiny_model: TinyModel, packed: Packed, tmp_path: Path
) -> None:
    directory = tiny_model("qwen2")[1]
    model = in_4_bits(directory, ALL, dtype)
    twin = plain_twin(directory, model)
    for (name, ours), (_, theirs) in zip(merged_tensors(model), merged_tensors(twin), strict=True):
        assert torch.equal(ours, theirs), name
    assert [name for name, _ in full_hf_tensors(policy_of(model, directory))] == [name for name, _ in hf_tensors(twin)]
    save_merged(policy_of(model, directory), tmp_path)
    merged = load_decoder(tmp_path, dtype, CPU)
    tolerance = 1e-12 if dtype == torch.float64 else 0.2
    torch.testing.assert_close(logp(merged, packed), logp(model, packed), atol=tolerance, rtol=0)


@pytest.mark.parametrize("base", ["dtype", *BASES])
def test_an_adapter_says_what_it_was_trained_on_and_is_loaded_so(
    base: LoraBase, tiny_model: TinyModel, tmp_path: Path
) -> None:
    directory = tiny_model("qwen2", dtype=torch.float32)[1]
    Tokenizer.from_characters("ab").save(directory)
    lora = Lora(rank=2, alpha=3, base=base)
    model = in_4_bits(directory, lora, torch.float32)
    save_adapter(model, tmp_path, directory)
    usual = {"adapter_config.json", "adapter_model.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == usual | (set() if base == "dtype" else {BASE_FORMAT_FILE})
    assert "base" not in {key for key in json.loads((tmp_path / "adapter_config.json").read_text())}
    assert read_lora_config(tmp_path) == lora
    again = load_policy(Model(device="cpu"), tmp_path, None, 0)
    assert again.lora == lora
    assert isinstance(again.module, Decoder)
    assert len(quantised_weights(again.module)) == (0 if base == "dtype" else 8)
    for (name, ours), (_, theirs) in zip(merged_tensors(again.module), merged_tensors(model), strict=True):
        assert torch.equal(ours, theirs), name


def test_an_adapter_of_another_base_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = tiny_model("qwen2")[1]
    save_adapter(in_4_bits(directory, SOME, torch.float32), tmp_path, directory)
    other = load_decoder(directory, torch.float32, CPU)
    add_lora(other, SOME.model_copy(update={"base": "dtype"}), 0)
    with pytest.raises(UserError, match=r"of another kind: .* over weights in 4 bits \(nf4\), not LoRA of rank 3"):
        load_adapter(other, tmp_path)
    (tmp_path / BASE_FORMAT_FILE).write_text('{"base": "int3"}')
    with pytest.raises(UserError, match="base is 'int3'; expected one of dtype, nf4, nf4-double"):
        read_lora_config(tmp_path)


@pytest.mark.parametrize(("base", "bits"), [("nf4", 4.5), ("nf4-double", 4.13)])
def test_bytes_are_those_of_4_bits(base: LoraBase, bits: float) -> None:
    arch = Architecture("qwen2", 152064, 3584, 28, 28, 4, 128, 18944, 32768, qkv_bias=True)
    model = meta_policy(arch, torch.bfloat16, Lora(rank=8, base=base))
    inside = sum(w.shape[0] * w.shape[1] for w in quantised_weights(model).values())
    assert inside == 28 * 3584 * (4608 + 3584 + 3 * 18944)
    adapters = sum(p.nbytes for p in adapter_weights(model).values())
    rest = 2 * (arch.num_parameters - inside)
    assert weight_bytes(model) == pytest.approx(inside * bits / 8 + adapters + rest, rel=1e-3)


def test_a_weight_in_4_bits_reads_as_the_product_uses_it() -> None:
    weight = Nf4Weight((6, 10), False)
    weight.write(torch.arange(60.0).view(6, 10))
    x = torch.eye(10)
    assert torch.equal(nf4_linear(x, weight.matrix, None), functional.linear(x, dense_weight(weight, torch.float32)))
