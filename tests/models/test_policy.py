"""Loading and saving policies on both backends, and their weights under Hugging Face's names."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from burnish.algorithms.losses.policy_loss import NllLoss
from burnish.config.errors import UserError
from burnish.config.model import Lora, Model, NewModel, Optimizer, Vision
from burnish.core.batch import Batch
from burnish.models import policy as policy_module
from burnish.models.decoder import Decoder
from burnish.models.lora.adapters import adapter_weights, add_lora
from burnish.models.policy import (
    PolicyModel,
    choose_trained_vision,
    full_hf_tensors,
    load_policy,
    resolve_device,
    save_merged,
)
from burnish.models.tokenizer import Tokenizer
from burnish.models.transformers_model import TransformersPolicy
from burnish.models.vision.interfaces import ImageFeatures, VisionTower
from burnish.models.weight_files import load_decoder, stored_tensors
from burnish.run.checkpoint.saver import HostCopy
from burnish.training.learner import Learner

TinyModel = Callable[..., tuple[Any, Path]]
TinyOther = Callable[..., Any]
Packed = Callable[..., tuple[Tensor, Tensor]]
OTHERS = ["gpt2", "gpt_neox", "gemma3"]


@pytest.fixture
def directory(tiny_model: TinyModel, tmp_path: Path) -> Path:
    """A Qwen2 directory with a tokenizer."""
    path = Path(shutil.copytree(tiny_model("qwen2")[1], tmp_path / "qwen2"))
    Tokenizer.from_characters("0123456789>").save(path)
    return path


def test_weights_and_tokenizer_are_read_at_the_same_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the two waits for the other one to begin."""
    both = threading.Barrier(2, timeout=60)

    def waiting(inner: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any) -> Any:
            both.wait()
            return inner(*args)

        return read

    for name in ("load_decoder", "_load_tokenizer"):
        monkeypatch.setattr(policy_module, name, waiting(getattr(policy_module, name)))
    loaded = load_policy(Model(device="cpu", dtype="float32"), directory, None, 0)
    assert isinstance(loaded.module, Decoder)
    expected = load_decoder(directory, torch.float32, torch.device("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(loaded.module.parameters(), expected.parameters(), strict=True))


def test_a_tokenizer_that_is_missing_is_reported_before_weights_that_are(directory: Path) -> None:
    (directory / "tokenizer.json").unlink()
    for file in directory.glob("*.safetensors"):
        file.write_bytes(b"damaged")
    with pytest.raises(UserError, match="no tokenizer in"):
        load_policy(Model(device="cpu", dtype="float32"), directory, None, 0)


@pytest.fixture
def other(tiny_other: TinyOther, tmp_path: Path) -> Path:
    """A GPT-2 directory with a tokenizer."""
    path = tmp_path / "gpt2"
    tiny_other("gpt2").save_pretrained(path)
    Tokenizer.from_characters("0123456789>").save(path)
    return path


def supervised(tokens: Tensor, offsets: Tensor) -> Batch:
    """A batch whose loss is the mean over all tokens that have a past."""
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[offsets[:-1]] = False
    weight = mask.float() / mask.sum()
    return Batch(tokens, offsets, token={"action_mask": mask, "loss_mask": mask, "weight": weight})


# --- which backend -------------------------------------------------------------------------------------------------------


def test_auto_takes_the_native_decoder_where_the_family_is_known(directory: Path) -> None:
    policy = load_policy(Model(device="cpu"), directory, None, seed=0)
    assert isinstance(policy.module, Decoder)
    assert policy.note == f"native decoder, {policy.module.arch.num_parameters:,} parameters"


def test_auto_takes_transformers_elsewhere_and_says_that_it_is_slower(other: Path) -> None:
    policy = load_policy(Model(device="cpu"), other, None, seed=0)
    assert isinstance(policy.module, TransformersPolicy)
    assert "slower" in policy.note
    assert "architecture 'gpt2' is not one of" in policy.note


def test_each_backend_can_be_asked_for_and_they_agree(directory: Path, packed: Packed) -> None:
    native, hf = (
        load_policy(Model(device="cpu", backend=b), directory, None, seed=0).module for b in ("native", "transformers")
    )
    assert isinstance(native, Decoder)
    assert isinstance(hf, TransformersPolicy)
    tokens, offsets = packed([6, 1, 15, 3])
    wanted = torch.tensor([1, 5, 8, 21, 24])
    for a, b in zip(*(m.token_logprobs(tokens, offsets, wanted, 0.8, True) for m in (native, hf)), strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, atol=1e-4)


def test_native_for_an_unknown_architecture_is_refused(other: Path) -> None:
    with pytest.raises(UserError, match=r"model\.backend=native.*'gpt2' is not one of llama"):
        load_policy(Model(device="cpu", backend="native"), other, None, seed=0)


def test_a_new_model_needs_an_alphabet_and_the_native_backend() -> None:
    with pytest.raises(UserError, match="needs a task with a known alphabet"):
        load_policy(Model(new=NewModel(), device="cpu"), None, None, seed=0)
    with pytest.raises(UserError, match="makes a native decoder"):
        load_policy(Model(new=NewModel(), device="cpu", backend="transformers"), None, "01", seed=0)
    with pytest.raises(UserError, match="no model"):
        load_policy(Model(), None, "01", seed=0)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="'gpu' is not a device"):
        resolve_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="no GPU here"):
            resolve_device("cuda")


# --- save and load -------------------------------------------------------------------------------------------------------


def test_a_new_policy_is_saved_as_a_directory_that_loads_as_the_same_policy(tmp_path: Path) -> None:
    policy = load_policy(Model(new=NewModel(hidden_size=32), device="cpu", dtype="float64"), None, "0123456789>", 5)
    policy.save(tmp_path)
    again = load_policy(Model(device="cpu", dtype="float64"), tmp_path, None, seed=0)
    assert again.tokenizer.eos_ids == policy.tokenizer.eos_ids
    assert all(torch.equal(a, b) for a, b in zip(policy.module.parameters(), again.module.parameters(), strict=True))
    assert AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").dtype == torch.float64


@pytest.mark.parametrize("kind", ["native", *OTHERS])
def test_weights_are_loaded_in_place(tiny_other: TinyOther, directory: Path, tmp_path: Path, kind: str) -> None:
    source = directory
    if kind != "native":
        source = tmp_path / kind
        tiny_other(kind).save_pretrained(source)
        Tokenizer.from_characters("0123456789>").save(source)
    policy = load_policy(Model(device="cpu"), source, None, seed=0)
    before = {name: p.detach().clone() for name, p in policy.module.named_parameters()}
    (tmp_path / "saved").mkdir()
    policy.save(tmp_path / "saved")
    addresses = [p.data_ptr() for p in policy.module.parameters()]
    with torch.no_grad():
        for parameter in policy.module.parameters():
            parameter.add_(1.0)
    policy.load_weights(tmp_path / "saved")
    assert [p.data_ptr() for p in policy.module.parameters()] == addresses
    assert all(torch.equal(p, before[name]) for name, p in policy.module.named_parameters())


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_of_transformers_is_saved_as_it_was_taken_in_its_own_files(
    tiny_other: TinyOther, tmp_path: Path, kind: str
) -> None:
    inner = tiny_other(kind)
    inner.save_pretrained(tmp_path / "theirs")
    taken = TransformersPolicy(inner).contents(HostCopy())
    with torch.no_grad():
        for parameter in inner.parameters():
            parameter.add_(1.0)
    (tmp_path / "ours").mkdir()
    sums = taken.write(tmp_path / "ours")
    theirs = {file.name: file.read_bytes() for file in (tmp_path / "theirs").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "ours").iterdir()} == theirs
    assert {name: entry["size"] for name, entry in sums.items()} == {name: len(data) for name, data in theirs.items()}


def test_weights_of_another_model_are_refused(other: Path, directory: Path) -> None:
    policy = load_policy(Model(device="cpu"), other, None, seed=0)
    with pytest.raises(UserError, match=r"does not fit the model: unexpected \['model\.embed"):
        policy.load_weights(directory)


def test_weights_of_the_wrong_shape_are_refused(other: Path, tmp_path: Path) -> None:
    policy = load_policy(Model(device="cpu"), other, None, seed=0)
    damaged = Path(shutil.copytree(other, tmp_path / "damaged"))
    tensors = load_file(other / "model.safetensors")
    save_file(tensors | {"transformer.ln_f.weight": torch.ones(3)}, damaged / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        UserError, match=r"damaged: transformer\.ln_f\.weight is \(3,\) but config\.json implies \(32,\)"
    ):
        policy.load_weights(damaged)


# --- any other architecture ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_logprobs_through_transformers_are_those_of_each_sequence_alone(
    tiny_other: TinyOther, packed: Packed, name: str
) -> None:
    inner = tiny_other(name)
    tokens, offsets = packed([6, 1, 15, 3])
    wanted = torch.tensor([1, 5, 8, 9, 21, 24])
    logp, entropy = TransformersPolicy(inner).token_logprobs(tokens, offsets, wanted, 0.8, with_entropy=True)
    bounds = offsets.tolist()
    with torch.no_grad():
        parts = [inner(tokens[a:b][None]).logits[0] for a, b in itertools.pairwise(bounds)]
    log_p = (torch.cat(parts)[wanted - 1] / 0.8).log_softmax(-1)
    assert torch.allclose(logp, log_p.gather(1, tokens[wanted, None]).squeeze(1), rtol=0, atol=1e-5)
    assert entropy is not None
    assert torch.allclose(entropy, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_a_learner_step_through_transformers_lowers_the_loss(tiny_other: TinyOther, packed: Packed, name: str) -> None:
    learner = Learner(TransformersPolicy(tiny_other(name)), Optimizer(lr=1e-3), total_updates=3, token_budget=16)
    batch = supervised(*packed([6, 15, 3]))
    losses = [learner.update(batch, NllLoss()).stats["loss"] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_dropout_is_off_while_training(tiny_other: TinyOther, packed: Packed) -> None:
    inner = tiny_other("gpt2")
    assert inner.config.resid_pdrop > 0
    policy = TransformersPolicy(inner.train())
    tokens, offsets = packed([12])
    first, again = (policy.token_logprobs(tokens, offsets, torch.arange(1, 12))[0] for _ in range(2))
    assert torch.equal(first, again)


def test_pickle_and_missing_weights_are_refused_on_this_path_too(other: Path) -> None:
    tensors = load_file(other / "model.safetensors")
    tensors.pop("transformer.h.1.mlp.c_fc.weight")
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing.*transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_policy(Model(device="cpu"), other, None, seed=0)
    (other / "model.safetensors").rename(other / "pytorch_model.bin")
    with pytest.raises(UserError, match="can run any code"):
        load_policy(Model(device="cpu"), other, None, seed=0)


def test_a_truncated_file_is_refused_on_this_path_too(other: Path) -> None:
    file = other / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match="gpt2"):
        load_policy(Model(device="cpu"), other, None, seed=0)


def test_a_format_whose_package_is_missing_is_refused_with_its_name(other: Path) -> None:
    config = json.loads((other / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"cannot load .*GPTQ"):
        load_policy(Model(device="cpu"), other, None, seed=0)


# --- full_hf_tensors ---

TinyModelMaker = Callable[..., tuple[Any, Path]]
CPU = torch.device("cpu")


def policy_of(module: Decoder | TransformersPolicy, source: Path | None = None) -> PolicyModel:
    return PolicyModel(module, Tokenizer.from_characters("ab"), source, "")


def check(policy: PolicyModel, folder: Path) -> None:
    stored = {name: tensor.whole() for name, tensor in stored_tensors(folder)}
    given = dict(full_hf_tensors(policy))
    assert given.keys() == stored.keys()
    for name, tensor in given.items():
        assert torch.equal(tensor, stored[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_they_are_those_of_the_directory(tiny_model: TinyModelMaker, tied: bool) -> None:
    model, folder = tiny_model("qwen2", tied)
    check(policy_of(load_decoder(folder, torch.float32, CPU)), folder)
    check(policy_of(TransformersPolicy(model)), folder)


def test_adapters_are_added_in(tiny_model: TinyModelMaker, tmp_path: Path) -> None:
    _, folder = tiny_model("qwen2")
    module = load_decoder(folder, torch.float32, CPU)
    add_lora(module, Lora(rank=2), seed=0)
    for parameter in adapter_weights(module).values():
        nn.init.normal_(parameter)
    policy = policy_of(module, folder)
    save_merged(policy, tmp_path)
    check(policy, tmp_path)
    name = "model.layers.0.self_attn.q_proj.weight"
    (plain,) = [tensor.whole() for known, tensor in stored_tensors(folder) if known == name]
    assert not torch.equal(dict(full_hf_tensors(policy))[name], plain)


class LinearTower(VisionTower):
    """A tower of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.merger = nn.Linear(3, 4), nn.Linear(4, 8)

    def forward(self, pictures: Any) -> ImageFeatures:
        raise NotImplementedError

    @property
    def projector(self) -> nn.ModuleList:
        return nn.ModuleList([self.merger])


@pytest.mark.parametrize(
    ("vision", "trained"), [("frozen", []), ("projector", ["merger"]), ("trained", ["encoder", "merger"])]
)
def test_what_of_the_tower_is_trained_can_be_chosen(vision: Vision, trained: list[str]) -> None:
    policy = load_policy(Model(new=NewModel(num_layers=1)), None, "01", 0)
    assert isinstance(policy.module, Decoder)
    decoder = [name for name, _ in policy.module.named_parameters()]
    policy.module.vision = LinearTower()
    choose_trained_vision(policy.module, vision)
    learner = Learner(policy.module, Optimizer(), 1, token_budget=64)
    expected = [f"vision.{name}.{part}" for name in trained for part in ("weight", "bias")]
    assert list(learner.names) == [*decoder, *expected]


@pytest.mark.parametrize(("key", "value"), [("vision", "projector"), ("image_pixels", (64, 4096))])
def test_keys_of_vision_are_refused_for_a_text_model(directory: Path, key: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"model\.{key} has no effect: .* reads text only"):
        load_policy(Model(**{key: value}), directory, None, 0)
