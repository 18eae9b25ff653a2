"""The learner on batches with pictures: shared prefixes, activation policies, what is trained of the tower, references."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from burnish.algorithms.losses.policy_loss import PolicyLoss
from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.errors import UserError
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.segments import offsets_from_lengths
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import ValueModel, load_score_model, new_score_model
from burnish.models.lora.adapters import add_lora, trained_tower_weights, wrap_with_lora
from burnish.models.lora.peft_files import load_adapter, read_lora_config, save_adapter
from burnish.models.vision.axis_rotation import AxisRotation
from burnish.models.vision.qwen_shape import QwenVisionShape
from burnish.models.vision.training import blank_pass
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.training.forward import Packing, micro_batches_of
from burnish.training.learner import Learner
from burnish.training.reference import make_reference
from tests.made_tokenizers import byte_level

VOCAB, IMAGE = 19, 17


def decoder(deep: bool = True) -> Decoder:
    """Qwen3-VL with two deep-stack layers, or Qwen2.5-VL with windows."""
    own = (
        {"num_position_embeddings": 9, "deep_layers": (0, 1), "activation": "gelu_pytorch_tanh"}
        if deep
        else {"window_size": 8, "full_layers": (1,)}
    )
    rotation = AxisRotation((2, 1, 1), is_interleaved=deep)
    shape = QwenVisionShape(8, 2, 2, 12, 16, 2, 2, 2, rotation, IMAGE, 18, 15, 16, **own)
    arch = Architecture(
        "qwen3_vl" if deep else "qwen2_5_vl",
        VOCAB,
        16,
        3,
        4,
        2,
        8,
        24,
        256,
        qk_norm=deep,
        qkv_bias=not deep,
        vision=shape,
    )
    model = Decoder(arch).double()
    initialise(model, 3, std=0.4)
    return model


def drawn(seed: int = 0) -> Batch:
    """Two groups of three samples behind prompts with one and two images, and a group of text."""
    random = np.random.default_rng(seed)

    def picture(rows: int, columns: int) -> Picture:
        shape = (1, rows * 4, columns * 4, 3)
        return Picture(random.integers(0, 256, shape, dtype=np.uint8), (1, rows, columns))

    def text(count: int) -> list[int]:
        return random.integers(0, 15, count).tolist()

    first, second, third = picture(2, 3), picture(3, 1), picture(2, 3)
    prompts: list[tuple[list[int], list[PictureSpan]]] = [
        ([*text(3), *[IMAGE] * 6, *text(2)], [PictureSpan(3, first)]),
        ([*[IMAGE] * 3, *text(1), *[IMAGE] * 6, *text(3)], [PictureSpan(0, second), PictureSpan(4, third)]),
        (text(7), []),
    ]
    sequences = [(g, prompts[g][0] + text(length), length) for g in range(3) for length in (4, 1, 6)]
    mask = torch.tensor([k >= len(t) - n for _, t, n in sequences for k in range(len(t))])
    batch = Batch(
        torch.tensor([token for _, tokens, _ in sequences for token in tokens]),
        offsets_from_lengths(torch.tensor([len(tokens) for _, tokens, _ in sequences])),
        {"action_mask": mask, "loss_mask": mask},
        {
            "group_ids": torch.tensor([g for g, _, _ in sequences]),
            "advantages": torch.linspace(-1, 1, len(sequences), dtype=torch.float64),
        },
    )
    batch = batch.with_token(weight=aggregation_weights(batch, "token-mean").double())
    return batch.with_pictures([prompts[g][1] for g, _, _ in sequences])


def gradients(
    model: Decoder | ValueModel, batch: Batch, shares: bool, budget: int, activations: str = "keep"
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients of all trained parameters, and the outputs."""
    own = copy.deepcopy(model)
    set_activations(own, activations)
    learner = Learner(own, Optimizer(lr=1e-3, clip_norm=1e9), 1, budget, 0.9, share_prefixes=shares)
    name = "value" if isinstance(model, ValueModel) else "logp"
    slopes = torch.linspace(-1, 1, batch.num_tokens, dtype=torch.float64)
    learner.backward(batch, {name: slopes})
    seen = learner.outputs(batch, frozenset({"value"} if name == "value" else ()))[name]
    found = {name: p.grad.clone() for name, p in own.named_parameters() if p.grad is not None}
    return found, seen


@pytest.mark.parametrize("deep", [True, False], ids=["qwen3", "qwen25"])
def test_gradients_are_the_same_for_any_packing_and_activation_policy(deep: bool) -> None:
    model, batch = decoder(deep), drawn()
    expected, seen = gradients(model, batch, shares=False, budget=1)
    assert expected.keys() == dict(model.named_parameters()).keys()
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    shared = micro_batches_of(batch, Packing.of(model, 1000), "loss_mask")
    assert any(micro_batch.shared_prefix is not None for micro_batch in shared)
    for activations, budget in (("keep", 1000), ("recompute", 1000), ("selective", 40), ("offload", 60)):
        found, again = gradients(model, batch, True, budget, activations)
        torch.testing.assert_close(again, seen, atol=1e-9, rtol=1e-9)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-9, rtol=1e-7, msg=name)


def test_two_samples_with_other_pictures_do_not_share_their_prefix() -> None:
    model, batch = decoder(), drawn()
    spans = batch.picture_spans()
    other = Picture(255 - spans[0][0].picture.pixels, (1, 2, 3))
    changed = batch.with_pictures([(PictureSpan(3, other),), *spans[1:]])
    assert not torch.equal(gradients(model, changed, True, 1000)[1], gradients(model, batch, True, 1000)[1])
    torch.testing.assert_close(
        gradients(model, changed, True, 1000)[1], gradients(model, changed, False, 1)[1], atol=1e-9, rtol=1e-9
    )


def test_a_critic_reads_pictures_and_a_text_model_refuses_them() -> None:
    batch = drawn()
    critic = ValueModel(decoder())
    critic.double()
    torch.nn.init.normal_(critic.head)
    found, values = gradients(critic, batch, True, 1000)
    assert found["backbone.vision.blocks.0.attn.qkv.weight"].abs().max() > 0
    assert values.abs().max() > 0
    frozen = decoder()
    assert frozen.vision is not None
    frozen.vision.requires_grad_(False)
    for scalar in (ValueModel(frozen), new_score_model(frozen, 0)):
        trained = {name for name, p in scalar.named_parameters() if p.requires_grad}
        assert trained == {name for name, _ in scalar.named_parameters() if ".vision." not in name}
    text = Decoder(Architecture("qwen3", VOCAB, 16, 2, 4, 2, 8, 24, 256, qk_norm=True)).double()
    initialise(text, 0)
    with pytest.raises(UserError, match="a qwen3 model reads text only"):
        Learner(text, Optimizer(lr=1e-3), 1, 100).logprobs(batch)


@pytest.mark.parametrize("part", ["frozen", "projector", "trained"])
def test_adapters_are_trained_and_saved_with_what_is_trained_of_the_tower(part: str, tmp_path: Path) -> None:
    model, batch, lora = decoder(), drawn(), Lora(rank=2, alpha=4.0, targets=["q_proj", "down_proj"])
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_lora(model, lora, 0)
    assert model.vision is not None
    model.vision.requires_grad_(part == "trained")
    model.vision.projector.requires_grad_(part != "frozen")
    reference = make_reference("frozen", model, 1000, 0.9)
    before = reference.logprobs(batch)
    learner = Learner(model, Optimizer(lr=0.05), 1, 1000, 0.9)
    for _ in range(2):
        learner.update(batch.with_token(old_logp=learner.logprobs(batch)), PolicyLoss())
    changed = {name for name, p in model.named_parameters() if name in start and not torch.equal(p, start[name])}
    assert changed == set(trained_tower_weights(model))
    assert {name.split(".")[1] for name in changed} == {
        "frozen": set(),
        "projector": {"merger", "deepstack_merger_list"},
        "trained": {"patch_embed", "blocks", "merger", "pos_embed", "deepstack_merger_list"},
    }[part]
    assert torch.equal(reference.logprobs(batch), before), "the reference is the model that the run started from"
    assert (learner.logprobs(batch) - before).abs().max() > 1e-3
    save_adapter(model, tmp_path, tmp_path)
    again = decoder()
    wrap_with_lora(again, read_lora_config(tmp_path))
    load_adapter(again, tmp_path)
    fresh = Learner(again, Optimizer(), 1, 1000, 0.9).logprobs(batch)
    assert torch.equal(learner.logprobs(batch), fresh), "features of the tower before an update are not used after it"
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


def test_a_blank_picture_gives_the_tower_a_gradient_of_zero_and_changes_nothing_else() -> None:
    model, tokens, offsets = decoder(), torch.arange(12) % 15, torch.tensor([0, 5, 12])
    plain = model.hidden(tokens, offsets)
    with model.with_pictures(blank_pass(model, offsets)):
        found = model.hidden(tokens, offsets)
    torch.testing.assert_close(found, plain, atol=1e-12, rtol=0)
    found.sum().backward()
    assert model.vision is not None
    for name, parameter in model.vision.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_a_reward_model_with_a_tower_is_saved_and_loaded(tmp_path: Path) -> None:
    model = new_score_model(decoder(), 3)
    write_contents(tmp_path, model.contents(keep_in_place, None, byte_level()))
    assert "Qwen3VLForSequenceClassification" in (tmp_path / "config.json").read_text()
    assert (tmp_path / "preprocessor_config.json").is_file()
    again = load_score_model(tmp_path, torch.float64, torch.device("cpu"))
    for (name, p), q in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name
