"""Loading and saving Hugging Face directories, and modules on the meta device."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from burnish.config.errors import UserError
from burnish.config.model import NewModel
from burnish.models import weight_files
from burnish.models.architecture import Architecture, new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.nf4 import quantise_layers
from burnish.models.transformers_model import TransformersPolicy
from burnish.models.weight_files import (
    hf_tensors,
    load_decoder,
    load_tensors,
    materialise,
    on_meta_device,
    plan_files,
    save_decoder,
)

CPU = torch.device("cpu")
TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]


def load(directory: Path) -> Decoder:
    return load_decoder(directory, torch.float32, CPU)


def load_theirs(directory: Path) -> Any:
    """transformers' model of a directory, and its loading report."""
    return AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)


@pytest.fixture
def copy(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A Qwen2 directory that a test may damage."""
    return Path(shutil.copytree(tiny_model("qwen2")[1], tmp_path / "model"))


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a directory's one weight file."""
    file = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def load_theirs_through_us(directory: Path) -> Any:
    return TransformersPolicy.load(directory, torch.float32, torch.device("cpu"))


def reconfigure(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v != "remove"}))


# --- saving and loading ---


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "variant",
    ["llama3", "llama-bias", "qwen2", "qwen3", "mistral-window", "deepseek-moe", "deepseek-plain", "gemma2", "gemma3"],
)
def test_a_saved_decoder_is_the_same_model_to_transformers(
    tiny_model: TinyModel, tmp_path: Path, variant: str, tied: bool
) -> None:
    theirs, directory = tiny_model(variant, tied)
    save_decoder(load(directory), tmp_path, source=directory)
    again, info = load_theirs(tmp_path)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = theirs.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    saved, original = (json.loads((d / "config.json").read_text()) for d in (tmp_path, directory))
    assert saved == original
    assert (tmp_path / "generation_config.json").read_bytes() == (directory / "generation_config.json").read_bytes()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "olmoe"]
)
def test_a_new_decoder_is_the_same_model_to_transformers(
    packed: Packed, tmp_path: Path, family: Any, tied: bool
) -> None:
    new = NewModel(family=family, hidden_size=32, num_heads=4, num_kv_heads=2, mlp_size=48, max_positions=64, tied=tied)
    ours = Decoder(new_architecture(new, vocab_size=61))
    initialise(ours, seed=1, std=0.2)
    save_decoder(ours, tmp_path, source=None, eos_ids=(1,), pad_id=0)
    theirs, info = load_theirs(tmp_path)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.config.eos_token_id == 1
    assert theirs.config.max_position_embeddings == 64
    assert sum(p.numel() for p in theirs.parameters()) == ours.arch.num_parameters
    if ours.arch.experts is None:
        for name, tensor in hf_tensors(ours):
            assert torch.equal(theirs.state_dict()[name], tensor), name
    copied = Decoder(ours.arch)
    load_tensors(copied, theirs.state_dict().items(), "transformers, whose experts are stacked")
    assert all(torch.equal(a, b) for a, b in zip(copied.parameters(), ours.parameters(), strict=True))
    tokens, offsets = packed([50])
    with torch.no_grad():
        gap = theirs(input_ids=tokens[None]).logits[0] - ours.logits(ours.hidden(tokens, offsets))
    assert gap.abs().max() < 1e-4
    again = load(tmp_path)
    assert again.arch == ours.arch
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), ours.parameters(), strict=True))


def test_the_dtype_a_model_now_has_is_the_one_its_config_says(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = tiny_model("llama")[1]
    save_decoder(load_decoder(directory, torch.bfloat16, CPU), tmp_path, source=directory)
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_sharded_weights_are_read_and_written(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    theirs, whole = tiny_model("qwen3", tied)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 2
    ours = load(tmp_path / "in")
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), load(whole).parameters(), strict=True))

    monkeypatch.setattr(weight_files, "FILE_BYTES", 20_000)
    (tmp_path / "out").mkdir()
    save_decoder(ours, tmp_path / "out", source=whole)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1].name == f"model-{len(files):05d}-of-{len(files):05d}.safetensors"
    sizes = [sum(t.numel() * 4 for t in load_file(f).values()) for f in files]
    assert max(sizes) <= 20_000
    assert all(a + b > 20_000 for a, b in itertools.pairwise(sizes)), "two neighbours would have fitted into one file"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = theirs.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())


def test_saved_tensors_are_those_of_the_model_itself(tiny_model: TinyModel) -> None:
    model: Any = load(tiny_model("qwen2")[1])
    views = dict(hf_tensors(model))
    model.layers[0].qkv.weight.data.fill_(3.0)
    assert all((views[f"model.layers.0.self_attn.{x}_proj.weight"] == 3).all() for x in "qkv")


# --- what other exporters write ----------------------------------------------------------------------------------------


def test_a_tied_checkpoint_that_repeats_its_head_loads(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("qwen2", True)[1], tmp_path / "model"))
    rewrite(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert torch.equal(load(directory).head_weight, load(tiny_model("qwen2", True)[1]).head_weight)


def test_old_config_keys_mean_the_same(tiny_model: TinyModel, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(tiny_model("llama3")[1], tmp_path / "model"))
    parameters = json.loads((directory / "config.json").read_text())["rope_parameters"]
    theta = parameters.pop("rope_theta")
    parameters["type"] = parameters.pop("rope_type")
    reconfigure(directory, rope_parameters="remove", rope_theta=theta, rope_scaling=parameters, head_dim="remove")
    new, old = load(tiny_model("llama3")[1]).arch, load(directory).arch
    assert (old.rope_theta, old.head_dim) == (new.rope_theta, new.head_dim)
    assert old.rope_scaling is not None
    assert new.rope_scaling is not None
    assert {k: v for k, v in old.rope_scaling.items() if k != "type"} == {
        k: v for k, v in new.rope_scaling.items() if k != "rope_theta"
    }


# --- errors ---


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_are_refused_with_the_reason(copy: Path, name: str) -> None:
    (copy / "model.safetensors").rename(copy / name)
    with pytest.raises(UserError, match=rf"{name}.*can run any code.*safetensors"):
        load(copy)


def test_a_directory_without_weights_says_what_it_expected(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"has no weights: expected model\.safetensors"):
        load(copy)


def test_missing_tensors_are_counted_and_the_first_named(copy: Path) -> None:
    rewrite(copy, lambda t: [t.pop(f"model.layers.1.self_attn.{x}_proj.bias") for x in "qk"])
    with pytest.raises(UserError, match=r"2 tensors are missing, first model\.layers\.1\.self_attn\.k_proj\.bias"):
        load(copy)


def test_an_unexpected_tensor_is_named_with_the_nearest_known_one(copy: Path) -> None:
    rewrite(copy, lambda t: t.update({"model.layers.0.mlp.gates_proj.weight": torch.zeros(2)}))
    with pytest.raises(UserError, match=r"'model\.layers\.0\.mlp\.gates_proj\.weight'; did you mean .*gate_proj"):
        load(copy)


def test_a_tensor_of_the_wrong_shape_names_both_shapes(copy: Path) -> None:
    rewrite(copy, lambda t: t.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(UserError, match=r"model\.norm\.weight is \(31,\) but config\.json implies \(32,\)"):
        load(copy)


@pytest.mark.parametrize("keep", [0, 4, 200, -100])
def test_a_truncated_weight_file_is_named(copy: Path, keep: int) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"model\.safetensors cannot be read as safetensors"):
        load(copy)


def test_a_missing_shard_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    tiny_model("llama")[0].save_pretrained(tmp_path, max_shard_size="20KB")
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    with pytest.raises(UserError, match=rf"names files that are not there: {first.name}"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"metadata": {}}', '{"weight_map": 3}'])
def test_a_broken_index_is_named(copy: Path, content: str) -> None:
    (copy / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=r"model\.safetensors\.index\.json"):
        load(copy)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", 3, None])
@pytest.mark.parametrize("reader", [load, load_theirs_through_us], ids=["native", "transformers"])
def test_an_index_names_files_beside_it_alone(copy: Path, name: Any, reader: Any) -> None:
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(UserError, match=r"index\.json names .*expected the name of a file in the same folder"):
        reader(copy)


def test_shards_may_be_links_to_elsewhere(tiny_model: TinyModel, tmp_path: Path) -> None:
    tiny_model("llama")[0].save_pretrained(tmp_path / "snapshots", max_shard_size="20KB")
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted((tmp_path / "snapshots").iterdir())):
        file.rename(tmp_path / f"blobs/{number}")
        file.symlink_to(f"../blobs/{number}")
    load(tmp_path / "snapshots")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 100_000}, "num_hidden_layers is 100,000, and no model has more than 4,096"),
        ({"num_hidden_layers": 4000}, "config.json implies 4,000 layers, but the weights have 2"),
        ({"intermediate_size": -1}, "intermediate_size should be a whole number of 1 or more, got -1"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads should be a whole number"),
        ({"model_type": ["llama"]}, "model_type should be text"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps should be a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters should be an object"),
        ({"vocab_size": 10**13}, r"is \(\d+, \d+\) but config.json implies \(10000000000000, "),
    ],
)
def test_a_config_that_does_not_fit_the_weights_is_refused_before_anything_is_built(
    copy: Path, changes: dict[str, Any], words: str
) -> None:
    reconfigure(copy, **changes)
    with pytest.raises(UserError, match=words):
        load(copy)


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        load(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"it has no config\.json"):
        load(tmp_path)


@pytest.mark.parametrize("content", ["", "{'model_type': 'llama'}", "[1, 2]"])
def test_a_config_that_is_no_json_object_is_refused(copy: Path, content: str) -> None:
    (copy / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json"):
        load(copy)


def test_a_config_without_a_size_names_the_key(copy: Path) -> None:
    reconfigure(copy, hidden_size="remove")
    with pytest.raises(UserError, match=r"config\.json.*'hidden_size'"):
        load(copy)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "gpt2"}, "architecture 'gpt2' is not one of llama, qwen2"),
        ({"hidden_act": "gelu"}, "activation 'gelu' is not silu"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not one of default"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "YaRN scaling gives no original_max_position"),
        ({"use_sliding_window": True}, "mixes sliding-window and full attention"),
        ({"quantization_config": {"bits": 4}}, "weights are quantised"),
    ],
)
def test_what_the_decoder_does_not_do_is_refused_with_the_way_out(
    copy: Path, changes: dict[str, Any], reason: str
) -> None:
    reconfigure(copy, **changes)
    with pytest.raises(UserError, match=rf"{reason}.*model\.backend=transformers"):
        load(copy)


def test_a_new_model_whose_heads_do_not_divide_is_refused() -> None:
    with pytest.raises(UserError, match="hidden_size 30 is not a multiple of num_heads 4"):
        new_architecture(NewModel(hidden_size=30, num_heads=4), 61)
    with pytest.raises(UserError, match="num_heads 4 is not a multiple of num_kv_heads 3"):
        new_architecture(NewModel(hidden_size=32, num_heads=4, num_kv_heads=3), 61)


# --- plan_files ---


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40), num_parts=st.integers(1, 9))
def test_all_weights_are_written_once_in_order_and_about_evenly(sizes: list[int], num_parts: int) -> None:
    named = [(str(k), size) for k, size in enumerate(sizes)]
    files = plan_files(named, num_parts)
    assert [name for _, members in files for name in members] == [name for name, _ in named]
    owners = [owner for owner, _ in files]
    assert owners == sorted(set(owners)), "one file each"
    assert max(owners) < num_parts
    shares = [sum(dict(named)[name] for name in members) for _, members in files]
    assert max(shares) <= sum(sizes) / num_parts + max(sizes)


def test_no_file_is_larger_than_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "FILE_BYTES", 100)
    files = plan_files([(str(k), 30) for k in range(20)], 2)
    assert [(owner, len(members)) for owner, members in files] == [(0, 3)] * 3 + [(0, 1)] + [(1, 3)] * 3 + [(1, 1)]
    assert all(b >= a for (a, _), (b, _) in itertools.pairwise(files))
    assert plan_files([("one", 1000)], 3) == [(1, ["one"])], "a tensor is never cut"


# --- modules on the meta device ---

ARCH = Architecture("llama", 97, 64, 2, 2, 1, 32, 96, 256)


def test_tensors_keep_their_shapes_and_kinds_and_get_memory() -> None:
    with on_meta_device():
        model = Decoder(ARCH)
        quantise_layers(model, "nf4")
    model.embedding.weight.requires_grad_(False)
    before = {name: (t.shape, t.dtype) for name, t in model.state_dict().items()}
    assert all(tensor.is_meta for tensor in model.state_dict().values())
    materialise(model, torch.bfloat16, torch.device("cpu"))
    after = model.state_dict()
    assert list(after) == list(before)
    for name, tensor in after.items():
        shape, dtype = before[name]
        assert tensor.device.type == "cpu"
        assert tensor.shape == shape
        assert tensor.dtype == (torch.bfloat16 if dtype.is_floating_point else dtype)
    assert torch.uint8 in {tensor.dtype for tensor in after.values()}
    assert not model.embedding.weight.requires_grad
    assert model.norm.weight.requires_grad
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())


def test_torchs_compiler_is_not_imported_for_it() -> None:
    """Nor sympy, which it imports: half a second, or two without cached bytecode."""
    code = """
import sys, torch
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.weight_files import materialise, on_meta_device
with on_meta_device():
    model = Decoder(Architecture("llama", 97, 64, 2, 2, 1, 32, 96, 256))
materialise(model, torch.bfloat16, torch.device("cpu"))
assert not {"sympy", "torch._dynamo"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
