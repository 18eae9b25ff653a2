"""DeepSeek-V3's latent attention: gradients, files, adapters and configs; logits are in `test_decoder.py`."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.models.architecture import architecture_from_hf, architecture_to_hf, why_not_native
from burnish.models.kernels.elementwise import inverse_frequencies, rotation_factor
from burnish.models.lora.adapters import add_lora, merged_tensors
from burnish.models.lora.peft_files import load_adapter, save_adapter
from burnish.models.weight_files import hf_tensors, load_decoder, load_tensors, save_decoder
from burnish.training.parallel.tensor_parallel import check_divisible

CPU = torch.device("cpu")
TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]
CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "first_k_dense_replace": 61,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}


def logprobs(model: Any, packed: Packed) -> Tensor:
    tokens, offsets = packed([23])
    logp: Tensor = model.token_logprobs(tokens, offsets, torch.arange(1, 23))[0]
    return logp


@pytest.mark.parametrize("variant", ["deepseek", "deepseek-plain"])
def test_gradients_are_those_of_transformers(tiny_model: TinyModel, packed: Packed, variant: str) -> None:
    theirs, directory = tiny_model(variant, False, torch.float64)
    ours: Any = load_decoder(directory, torch.float64, CPU)
    logprobs(ours, packed).sum().backward()
    theirs.zero_grad()
    tokens, _ = packed([23])
    log_p = theirs(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
    log_p[torch.arange(22), tokens[1:]].sum().backward()
    own = ours.layers[0].qkv
    expected = theirs.model.layers[0].self_attn
    pairs = [
        (own.kv_up.weight, expected.kv_b_proj.weight),
        (own.kv_norm.weight, expected.kv_a_layernorm.weight),
        (own.q_up.weight, (expected.q_proj if variant == "deepseek-plain" else expected.q_b_proj).weight),
        (ours.layers[0].out.weight, expected.o_proj.weight),
    ]
    for mine, yours in pairs:  # transformers computes norms in float32
        torch.testing.assert_close(mine.grad, yours.grad, atol=1e-5 * float(yours.grad.abs().max()), rtol=1e-4)


def test_saved_weights_are_theirs_bit_for_bit_and_layers_of_mtp_are_left_out(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    theirs, directory = tiny_model("deepseek-moe", False, torch.bfloat16)
    source = tmp_path / "source"
    source.mkdir()
    config = json.loads((directory / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(3)}, source / "model.safetensors")
    ours = load_decoder(source, torch.bfloat16, CPU)
    assert {name for name, _ in hf_tensors(ours)} == set(tensors)
    for name, tensor in hf_tensors(ours):
        assert torch.equal(tensor, tensors[name].to(torch.bfloat16)), name
    save_decoder(ours, tmp_path / "saved", source=source)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), theirs.parameters(), strict=True))


LORAS = [Lora(rank=3), Lora(rank=2, targets=["q_b_proj", "kv_a_proj_with_mqa", "o_proj"]), Lora(rank=2, base="nf4")]


@pytest.mark.parametrize("variant", ["deepseek", "deepseek-moe"])
@pytest.mark.parametrize("lora", LORAS, ids=["all", "some", "nf4"])
def test_adapters_are_trained_saved_and_merged(
    tiny_model: TinyModel, packed: Packed, tmp_path: Path, lora: Lora, variant: str
) -> None:
    directory = tiny_model(variant)[1]
    model = load_decoder(directory, torch.float64, CPU, lora.base)
    before = logprobs(model, packed).detach()
    add_lora(model, lora, seed=0)
    torch.testing.assert_close(logprobs(model, packed), before)
    logprobs(model, packed).sum().backward()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert (parameter.grad is not None) == name.endswith((".lora_a", ".lora_b"))
            if name.endswith(".lora_b"):
                assert parameter.grad is not None
                parameter -= 0.01 * parameter.grad
    after = logprobs(model, packed).detach()
    assert (after - before).abs().max() > 1e-3
    save_adapter(model, tmp_path, directory)
    again = load_decoder(directory, torch.float64, CPU, lora.base)
    add_lora(again, lora, seed=1)
    load_adapter(again, tmp_path)
    torch.testing.assert_close(logprobs(again, packed), after)
    merged = load_decoder(directory, torch.float64, CPU)
    load_tensors(merged, merged_tensors(model), "merged")
    torch.testing.assert_close(logprobs(merged, packed), after, atol=1e-12, rtol=0)


def test_a_target_that_the_model_does_not_have_is_named(tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model("deepseek")[1], torch.float32, CPU)
    with pytest.raises(UserError, match="a deepseek_v3 model has no k_proj; its projections are q_a_proj, kv_a_proj"):
        add_lora(model, Lora(targets=["q_b_proj", "k_proj"]), seed=0)


def test_the_published_sizes_and_yarn() -> None:
    assert why_not_native(CONFIG) is None
    arch = architecture_from_hf(CONFIG)
    assert (arch.head_dim, arch.value_dim, arch.num_kv_heads) == (192, 128, 128)
    assert arch.query_scale == pytest.approx(1.3689**2, rel=1e-4)  # (0.1 ln 40 + 1)^2
    assert rotation_factor(arch.rope_scaling) == 1.0
    frequencies, plain = (inverse_frequencies(64, 10000.0, scaling) for scaling in (arch.rope_scaling, None))
    assert torch.equal(frequencies[:10], plain[:10])
    torch.testing.assert_close(frequencies[-8:], plain[-8:] / 40)
    assert architecture_from_hf(architecture_to_hf(arch, "bfloat16", (1,), None)) == arch
    whole = architecture_from_hf({**CONFIG, "first_k_dense_replace": 3})
    assert round(whole.num_parameters / 1e9) == 671
    assert round(whole.num_active_parameters / 1e9) == 38  # 37 without the embedding
    assert architecture_from_hf(architecture_to_hf(whole, "bfloat16", (1,), None)) == whole


def test_the_bias_of_the_choice_keeps_its_digits_in_a_half_type(tiny_model: TinyModel, tmp_path: Path) -> None:
    """In bfloat16 biases near 4 would be multiples of 1/32. Neither a conversion nor a saved directory rounds them."""
    directory = tiny_model("deepseek-moe")[1]
    wide = load_decoder(directory, torch.float32, CPU)
    name = "layers.1.experts.score_bias"
    bias = dict(wide.named_parameters())[name]
    with torch.no_grad():
        bias.copy_(torch.linspace(3.99, 4.01, len(bias)))
    half = copy.deepcopy(wide).to(torch.bfloat16)
    save_decoder(half, tmp_path, source=directory)
    again = load_decoder(tmp_path, torch.bfloat16, CPU)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = [dict(model.named_parameters())[name] for model in (half, again)]
    for one in (*found, theirs.model.layers[1].mlp.gate.e_score_correction_bias):
        assert one.dtype == torch.float32
        assert torch.equal(one, bias)
    assert again.embedding.weight.dtype == torch.bfloat16
    assert dict(half.double().named_parameters())[name].dtype == torch.float64


def test_a_step_trains_all_but_the_bias_of_the_choice(tiny_model: TinyModel, packed: Packed) -> None:
    model = load_decoder(tiny_model("deepseek-moe")[1], torch.float64, CPU)
    logprobs(model, packed).sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {"layers.1.experts.score_bias", "layers.2.experts.score_bias"}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first_k_dense_replace": 3, "n_group": 7}, "its 256 experts are not 7 groups"),
        ({"first_k_dense_replace": 3, "topk_group": 9}, "chooses 9 groups"),
        ({"first_k_dense_replace": 3, "n_routed_experts": 0, "n_group": 1, "topk_group": 1}, "num_experts is 0"),
        ({"v_head_dim": 256}, "wider than its key heads"),
        ({"qk_nope_head_dim": 127}, "must be even"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_with_the_reason(change: dict[str, Any], reason: str) -> None:
    assert reason in str(why_not_native({**CONFIG, **change}))


def test_groups_that_a_config_does_not_give_are_checked_with_their_default() -> None:
    config = {key: value for key, value in CONFIG.items() if key not in ("n_group", "topk_group")}
    config["first_k_dense_replace"] = 3
    assert why_not_native(config) is None
    assert "12 experts are not 8 groups" in str(why_not_native({**config, "n_routed_experts": 12}))


def test_null_is_no_shared_expert_and_no_dense_layer() -> None:
    config = {**CONFIG, "n_shared_experts": None, "first_k_dense_replace": None}
    assert why_not_native(config) is None
    experts = architecture_from_hf(config).experts
    assert experts is not None
    assert (experts.shared_size, experts.layers) == (0, None)


def test_tensor_parallelism_is_refused() -> None:
    with pytest.raises(UserError, match="does not divide latent attention"):
        check_divisible(architecture_from_hf(CONFIG), 2)
