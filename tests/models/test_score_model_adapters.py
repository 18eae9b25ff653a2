"""Score models with adapters: gradients against a full model, PEFT directories, and merged models."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from burnish.algorithms.losses.model_losses import RewardModelLoss
from burnish.config.errors import UserError
from burnish.config.model import Lora, LoraBase, Model, Optimizer
from burnish.models.export_and_merge import merge_adapter
from burnish.models.heads import ScoreModel, load_score_model, new_score_model
from burnish.models.lora.adapters import adapter_weights, adapters, add_lora
from burnish.models.lora.peft_files import read_lora_config, save_adapter
from burnish.models.policy import load_policy
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import load_decoder
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.trainers.reward_model import pack_pairs
from burnish.training.learner import Learner
from tests.models.test_score_model import our_scores, their_scores
from tests.trainers.test_reward_model import pairs

TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]
CPU = torch.device("cpu")
SOME = Lora(rank=3, alpha=5, targets=["q_proj", "v_proj", "o_proj", "up_proj"])
ALL = Lora(rank=2, alpha=3, rslora=True)
BASES: list[LoraBase] = ["dtype", "nf4", "nf4-double"]


def scorer(base: Path, lora: Lora, dtype: torch.dtype = torch.float32) -> ScoreModel:
    """A score model with adapters whose B is not 0, as after training."""
    decoder = load_decoder(base, dtype, CPU, lora.base)
    add_lora(decoder, lora, seed=0)
    generator = torch.Generator().manual_seed(5)
    for parameter in adapter_weights(decoder).values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
    return new_score_model(decoder, seed=3)


def saved(model: ScoreModel, folder: Path, source: Path | None) -> Path:
    folder.mkdir()
    write_contents(folder, model.contents(keep_in_place, source, Tokenizer.from_characters("0123456789>")))
    return folder


def merged(model: ScoreModel, folder: Path, source: Path) -> Path:
    """The merged model of its PEFT directory."""
    (folder / "merged").mkdir(parents=True)
    merge_adapter(saved(model, folder / "adapter", source), folder / "merged", None)
    return folder / "merged"


# --- gradients -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
def test_gradients_are_those_of_the_whole_model(
    lora: Lora, base: LoraBase, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """For y = (W + s B A) x with full gradient G: dA = s B^T G, dB = s G A^T, and the head's gradient is the same."""
    source = tiny_model("qwen2", dtype=torch.float64)[1]
    model = scorer(source, lora.model_copy(update={"base": base}), torch.float64)
    whole = load_score_model(merged(model, tmp_path / "it", source), torch.float64, CPU)
    batch, loss, losses = pack_pairs(pairs(), 0), RewardModelLoss(margin=0.2, centre=0.05), []
    for one in (model, whole):
        losses.append(Learner(one, Optimizer(), 10, 13)._accumulate(batch, loss)[0])
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert model.head.grad is not None
    torch.testing.assert_close(model.head.grad, whole.head.grad, atol=1e-10, rtol=0)
    found = 0
    for index, projection, a, b in adapters(model.backbone):
        layer, dense = (getattr(one.backbone.layers[index], projection.module) for one in (model, whole))
        slope = dense.weight.grad[projection.start : projection.stop]
        slot = [start for start, _ in layer.spans].index(projection.start)
        row = sum(stop - start for start, stop in layer.spans[:slot])
        ours = layer.lora_a.grad.split(lora.rank)[slot], layer.lora_b.grad[row : row + projection.num_outputs]
        expected = lora.scale * b.detach().t() @ slope, lora.scale * slope @ a.detach().t()
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=0)
        assert min(float(one.abs().max()) for one in expected) > 1e-4
        found += 1
    assert found == 2 * (7 if lora.targets == "all-linear" else len(lora.projections))


def test_the_adapters_and_the_head_alone_are_trained(tiny_model: TinyModel) -> None:
    model = scorer(tiny_model("qwen2")[1], SOME)
    learner = Learner(model, Optimizer(lr=0.1), 10, 1000)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    learner.update(pack_pairs(pairs(), 0), RewardModelLoss(0.0, 0.0), columns=False)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == learner.names.keys() == {"head", *adapter_weights(model)}


# --- directories ---------------------------------------------------------------------------------------------------------


def test_the_files_are_those_peft_writes_of_a_scorer(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("qwen2")[1]
    folder = saved(scorer(source, SOME), tmp_path / "it", source)
    assert not {"config.json", "model.safetensors"} & {file.name for file in folder.iterdir()}
    found = load_file(folder / "adapter_model.safetensors")
    rest = {name for name in found if ".lora_A." not in name and ".lora_B." not in name}
    assert rest == {"base_model.model.score.weight"}
    assert found["base_model.model.score.weight"].shape == (1, 32)
    assert len(found) == 1 + 2 * 2 * 4
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("base", BASES)
def test_what_is_saved_is_loaded_with_the_same_scores(
    base: LoraBase, dtype: torch.dtype, tied: bool, tiny_model: TinyModel, packed: Packed, tmp_path: Path
) -> None:
    source = tiny_model("qwen2", tied)[1]
    model = scorer(source, ALL.model_copy(update={"base": base}), dtype)
    again = load_score_model(saved(model, tmp_path / "it", source), dtype, CPU)
    assert again.backbone.lora == model.backbone.lora
    tokens, offsets = packed([6, 2, 15, 3])
    scores = our_scores(model, tokens, offsets)
    assert scores.std() > 0.05
    assert torch.equal(our_scores(again, tokens, offsets), scores)
    plain = our_scores(ScoreModel(load_decoder(source, dtype, CPU), model.head.detach()), tokens, offsets)
    assert (plain - scores).abs().max() > 0.01
    addresses = [p.data_ptr() for p in again.parameters()]
    with torch.no_grad():
        for name in ("head", *adapter_weights(again)):
            again.get_parameter(name).zero_()
    again.load_weights(tmp_path / "it")
    assert [p.data_ptr() for p in again.parameters()] == addresses
    assert torch.equal(our_scores(again, tokens, offsets), scores)


@pytest.mark.parametrize(("variant", "base"), [("qwen2", "nf4"), ("qwen3", "dtype"), ("gemma3", "dtype")])
def test_the_merged_model_is_whole_and_transformers_gives_its_scores(
    variant: str, base: LoraBase, tiny_model: TinyModel, packed: Packed, tmp_path: Path
) -> None:
    source = tiny_model(variant, variant == "gemma3")[1]
    model = scorer(source, ALL.model_copy(update={"base": base}))
    (folder := tmp_path / "it").mkdir()
    saved(model, folder / "adapter", source)
    (folder / "adapter" / "scores.json").write_text('{"mean": 1.0, "std": 2.0}')
    (folder / "merged").mkdir()
    merge_adapter(folder / "adapter", folder / "merged", None)
    assert (folder / "merged" / "scores.json").read_text() == '{"mean": 1.0, "std": 2.0}'
    assert not (folder / "merged" / "adapter_config.json").exists()
    tokens, offsets = packed([6, 2, 15, 3])
    tokens = tokens.clamp(min=2)
    ours = our_scores(model, tokens, offsets)
    assert torch.allclose(ours, their_scores(folder / "merged", tokens, offsets), atol=5e-5)
    assert torch.allclose(
        ours, our_scores(load_score_model(folder / "merged", torch.float32, CPU), tokens, offsets), atol=5e-5
    )


def test_the_base_may_be_a_scorer_whose_own_head_is_not_used(
    tiny_model: TinyModel, packed: Packed, tmp_path: Path
) -> None:
    source = tiny_model("qwen2")[1]
    below = saved(new_score_model(load_decoder(source, torch.float32, CPU), seed=9), tmp_path / "below", source)
    model, tokens = scorer(source, SOME), packed([5, 4])
    again = load_score_model(saved(model, tmp_path / "it", below), torch.float32, CPU)
    assert torch.equal(our_scores(again, *tokens), our_scores(model, *tokens))


# --- errors ---


def test_an_adapter_of_the_other_kind_is_refused(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("qwen2")[1]
    Tokenizer.from_characters("0123456789>").save(source)
    folder = saved(scorer(source, SOME), tmp_path / "scorer", source)
    with pytest.raises(UserError, match=r"the adapter of a reward model .* generates no text.* part `model`"):
        load_policy(Model(device="cpu"), folder, None, 0)
    (tmp_path / "policy").mkdir()
    save_adapter(scorer(source, SOME).backbone, tmp_path / "policy", source)
    with pytest.raises(UserError, match=r"adapter of a language model, not of a reward model.*`burnish reward-model`"):
        load_score_model(tmp_path / "policy", torch.float32, CPU)


def test_a_head_that_is_not_one_number_or_misses_is_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    source, name = tiny_model("qwen2")[1], "base_model.model.score.weight"
    folder = saved(scorer(source, SOME), tmp_path / "it", source)
    whole = load_file(folder / "adapter_model.safetensors")
    for tensors, words in (
        (whole | {name: torch.zeros(2, 32)}, r"score.weight is \(2, 32\) but .* imply \(1, 32\)"),
        ({key: tensor for key, tensor in whole.items() if key != name}, f"1 tensors are missing, first {name}"),
    ):
        save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises(UserError, match=words):
            load_score_model(folder, torch.float32, CPU)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"modules_to_save": ["score", "embed_tokens"]}))
    with pytest.raises(UserError, match=r"modules_to_save=\['score', 'embed_tokens'\] is not supported"):
        load_score_model(folder, torch.float32, CPU)


# --- peft itself ---------------------------------------------------------------------------------------------------------


def peft_scores(model: Any, tokens: Tensor, offsets: Tensor) -> Tensor:
    found = [model(input_ids=tokens[a:b][None]).logits[0, 0].detach() for a, b in offsets.unfold(0, 2, 1).tolist()]
    return torch.stack(found)


@pytest.mark.parametrize("lora", [SOME, ALL], ids=["some", "all"])
def test_peft_loads_what_we_save(lora: Lora, tiny_model: TinyModel, packed: Packed, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    source = tiny_model("qwen2")[1]
    model = scorer(source, lora)
    folder = saved(model, tmp_path / "it", source)
    theirs = peft.AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    tokens, offsets = packed([6, 2, 15, 3])
    tokens = tokens.clamp(min=2)
    torch.testing.assert_close(
        our_scores(model, tokens, offsets), peft_scores(theirs, tokens, offsets), atol=1e-4, rtol=1e-4
    )


def test_we_load_what_peft_saves(tiny_model: TinyModel, packed: Packed, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from transformers import AutoModelForSequenceClassification

    source = tiny_model("qwen2")[1]
    options = {"r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "target_modules": "all-linear"}
    config = peft.LoraConfig(task_type="SEQ_CLS", init_lora_weights=False, **options)
    below = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
    theirs = peft.get_peft_model(below, config).eval()
    theirs.save_pretrained(tmp_path)
    assert read_lora_config(tmp_path, scores=True) == Lora(rank=4, alpha=6)
    tokens, offsets = packed([6, 2, 15, 3])
    tokens = tokens.clamp(min=2)
    ours = our_scores(load_score_model(tmp_path, torch.float32, CPU), tokens, offsets)
    torch.testing.assert_close(ours, peft_scores(theirs, tokens, offsets), atol=1e-4, rtol=1e-4)
