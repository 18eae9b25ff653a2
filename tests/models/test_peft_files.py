"""Loading and saving PEFT directories: names and shapes written by hand, and the peft library if it is installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.model import PROJECTIONS, Lora, Model, NewModel
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import adapter_weights, add_lora, merged_tensors
from burnish.models.lora.peft_files import base_model_of, load_adapter, read_lora_config, save_adapter
from burnish.models.policy import PolicyModel, load_policy, save_merged
from burnish.models.weight_files import load_decoder

TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]
CPU = torch.device("cpu")
SOME = Lora(rank=3, alpha=5, targets=["k_proj", "o_proj", "up_proj", "down_proj"])
ALL = Lora(rank=2, alpha=2.5, rslora=True)
WIDTHS = {  # inputs and outputs of the tiny qwen2: width 32, MLP 48, 4 heads and 2 key/value heads of 8
    "self_attn.q_proj": (32, 32),
    "self_attn.k_proj": (32, 16),
    "self_attn.v_proj": (32, 16),
    "self_attn.o_proj": (32, 32),
    "mlp.gate_proj": (32, 48),
    "mlp.up_proj": (32, 48),
    "mlp.down_proj": (48, 32),
}


def adapted(directory: Path, lora: Lora, dtype: torch.dtype = torch.float32) -> Decoder:
    """A model with adapters whose B is not 0."""
    model = load_decoder(directory, dtype, CPU)
    add_lora(model, lora, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapter_weights(model).values():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator).to(parameter)
    return model


def all_logits(model: Decoder, tokens: Tensor) -> Tensor:
    return model.logits(model.hidden(tokens, torch.tensor([0, len(tokens)]))).detach()


@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
def test_the_files_are_those_peft_writes(lora: Lora, tiny_model: TinyModel, tmp_path: Path) -> None:
    _, base = tiny_model("qwen2")
    save_adapter(adapted(base, lora), tmp_path, base)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    found = load_file(tmp_path / "adapter_model.safetensors")
    expected = {}
    for layer in range(2):
        for path, (inputs, outputs) in WIDTHS.items():
            if path.split(".")[1] in lora.projections:
                name = f"base_model.model.model.layers.{layer}.{path}"
                expected[f"{name}.lora_A.weight"] = (lora.rank, inputs)
                expected[f"{name}.lora_B.weight"] = (outputs, lora.rank)
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == expected
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA"
    assert config["task_type"] == "CAUSAL_LM"
    assert config["r"] == lora.rank
    assert config["lora_alpha"] == lora.alpha
    assert config["use_rslora"] is lora.rslora
    assert config["target_modules"] == [name for name in PROJECTIONS if name in lora.projections]
    assert config["base_model_name_or_path"] == str(base.resolve())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
def test_what_is_saved_is_loaded_bit_for_bit_in_place(
    lora: Lora, dtype: torch.dtype, tiny_model: TinyModel, tmp_path: Path
) -> None:
    _, base = tiny_model("qwen2")
    model, again = adapted(base, lora, dtype), load_decoder(base, dtype, CPU)
    save_adapter(model, tmp_path, base)
    assert read_lora_config(tmp_path) == lora
    assert base_model_of(tmp_path) == base.resolve()
    add_lora(again, lora, seed=3)
    addresses = [p.data_ptr() for p in again.parameters()]
    load_adapter(again, tmp_path)
    assert [p.data_ptr() for p in again.parameters()] == addresses
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_directory_and_an_adapter_become_a_policy_with_it(tmp_path: Path) -> None:
    base, adapter, merged = (tmp_path / name for name in ("base", "adapter", "merged"))
    for folder in (base, adapter, merged):
        folder.mkdir()
    new = NewModel(hidden_size=16, num_layers=2, num_heads=2, mlp_size=24)
    load_policy(Model(new=new, device="cpu", dtype="float64"), None, "0123456789>", 5).save(base)
    plain = Model(device="cpu", dtype="float64")
    first = load_policy(Model(device="cpu", dtype="float64", lora=SOME), base, None, 0)
    assert first.lora == SOME
    assert "LoRA of rank 3 x 1.66667 on k_proj, o_proj, up_proj, down_proj" in first.note
    for parameter in adapter_weights(first.module).values():
        parameter.data.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    first.save(adapter)
    save_merged(first, merged)
    policies = [
        load_policy(plain, adapter, None, 9),
        load_policy(plain, None, None, 9, adapter),
        load_policy(plain, base, None, 9, adapter),
        load_policy(plain, merged, None, 9),
    ]
    assert [policy.lora for policy in policies] == [SOME, SOME, SOME, None]
    assert all(policy.tokenizer.vocab_size == first.tokenizer.vocab_size for policy in policies)
    tokens = torch.tensor([3, 1, 4, 1, 5, 9])
    expected = all_logits(module_of(first), tokens)
    for policy in policies:
        torch.testing.assert_close(all_logits(module_of(policy), tokens), expected, atol=1e-12, rtol=0)
    assert (all_logits(module_of(load_policy(plain, base, None, 0)), tokens) - expected).abs().max() > 0.01


def module_of(policy: PolicyModel) -> Decoder:
    assert isinstance(policy.module, Decoder)
    return policy.module


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern="),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save="),
        ({"bias": "all"}, "bias='all'"),
        ({"something_new": 1}, "something_new=1"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "no target 'lm_head'"),
        ({"target_modules": ".*q_proj"}, "expected a list of q_proj"),
        ({"target_modules": []}, "expected a list of q_proj"),
        ({"r": None}, "r=None"),
        ({"lora_alpha": 0}, "lora_alpha=0"),
    ],
    ids=str,
)
def test_an_adapter_our_layers_cannot_be_is_refused_by_the_key(
    change: dict[str, Any], words: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    _, base = tiny_model("qwen2")
    save_adapter(adapted(base, SOME), tmp_path, base)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(UserError, match=words) as error:
        read_lora_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_what_only_tells_how_an_adapter_was_made_is_read_over(tiny_model: TinyModel, tmp_path: Path) -> None:
    _, base = tiny_model("qwen2")
    save_adapter(adapted(base, ALL), tmp_path, base)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    told = {"lora_dropout": 0.05, "peft_version": "0.21.2", "megatron_core": "megatron.core", "revision": "main"}
    nothing = {"use_dora": False, "rank_pattern": {}, "layers_to_transform": None, "init_lora_weights": "gaussian"}
    paths = [f"model.layers.{layer}.{path}" for layer in range(2) for path in WIDTHS]
    for names in ("all-linear", paths):
        text = json.dumps(config | told | nothing | {"target_modules": names})
        (tmp_path / "adapter_config.json").write_text(text)
        assert read_lora_config(tmp_path) == ALL


def test_tensors_that_do_not_fit_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    _, base = tiny_model("qwen2")
    model = adapted(base, SOME)
    save_adapter(model, tmp_path, base)
    whole = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight"
    for tensors, words in (
        ({n: t for n, t in whole.items() if n != name}, f"1 tensors are missing, first {name}"),
        (whole | {name: whole[name][:2].contiguous()}, r"up_proj.lora_A.weight is \(2, 32\) but .* imply \(3, 32\)"),
        (whole | {name.replace("lora_A", "lora_C"): whole[name].clone()}, "unexpected tensor .*lora_C.*did you mean"),
    ):
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        with pytest.raises(UserError, match=words):
            load_adapter(model, tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"no adapter_model.safetensors; loading a pickle can run any code"):
        load_adapter(model, tmp_path)


def test_a_base_is_looked_for_beside_the_adapter_before_where_we_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter, here = tmp_path / "run" / "adapter", tmp_path / "here"
    for folder in (adapter, here / "base"):
        folder.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "base"}))
    monkeypatch.chdir(here)
    assert base_model_of(adapter).resolve() == here / "base"
    (adapter / "base").mkdir()
    assert base_model_of(adapter) == adapter / "base"


def test_what_cannot_have_an_adapter_says_so(tiny_model: TinyModel, tmp_path: Path) -> None:
    _, base = tiny_model("qwen2")
    model = adapted(base, SOME)
    with pytest.raises(UserError, match=r"not a PEFT adapter directory: it has no adapter_config.json"):
        load_adapter(model, tmp_path)
    save_adapter(model, tmp_path, tmp_path / "gone")
    with pytest.raises(UserError, match=r"gone.*no such directory here.*model.path as well as model.adapter"):
        base_model_of(tmp_path)
    with pytest.raises(UserError, match=r"the model has none: set model.lora or model.adapter"):
        load_adapter(load_decoder(base, torch.float32, CPU), tmp_path)
    with pytest.raises(UserError, match=r"another kind: LoRA of rank 3 .* not LoRA of rank 2 .* on all projections"):
        load_adapter(adapted(base, ALL), tmp_path)


def test_a_model_that_runs_through_transformers_cannot(tiny_other: Callable[..., Any], tmp_path: Path) -> None:
    tiny_other("gpt2").save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"adapters need the native decoder, .*architecture 'gpt2'"):
        load_policy(Model(device="cpu", lora=SOME), tmp_path, None, 0)


# --- peft itself ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
def test_peft_loads_what_we_save(lora: Lora, tiny_model: TinyModel, packed: Packed, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    _, base = tiny_model("qwen2")
    model = adapted(base, lora)
    save_adapter(model, tmp_path, base)
    tokens, _ = packed([12])
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path).eval()
    expected = theirs(input_ids=tokens[None]).logits[0].detach()
    torch.testing.assert_close(all_logits(model, tokens), expected, atol=1e-4, rtol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(base)(input_ids=tokens[None]).logits[0]
    assert (plain - expected).abs().max() > 0.1
    merged = dict(theirs.merge_and_unload().named_parameters())
    for name, tensor in merged_tensors(model):
        torch.testing.assert_close(tensor, merged[name].detach(), atol=1e-6, rtol=1e-6)


def test_we_load_what_peft_saves(tiny_model: TinyModel, packed: Packed, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForCausalLM

    _, base = tiny_model("qwen2")
    options = {"r": 4, "lora_alpha": 6, "use_rslora": True, "lora_dropout": 0.1, "target_modules": "all-linear"}
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    theirs.save_pretrained(tmp_path)
    assert read_lora_config(tmp_path) == Lora(rank=4, alpha=6, rslora=True)
    assert base_model_of(tmp_path) == base
    model = load_decoder(base, torch.float32, CPU)
    add_lora(model, read_lora_config(tmp_path), seed=0)
    load_adapter(model, tmp_path)
    tokens, _ = packed([12])
    expected = theirs(input_ids=tokens[None]).logits[0].detach()
    torch.testing.assert_close(all_logits(model, tokens), expected, atol=1e-4, rtol=1e-4)
