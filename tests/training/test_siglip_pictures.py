"""The learner on batches with pictures: Gemma 3, whose tokens of a picture attend to each other, Idefics3, and transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from burnish.algorithms.terms.loss_terms import aggregation_weights
from burnish.config.model import Lora, Optimizer
from burnish.core.batch import Batch
from burnish.core.segments import offsets_from_lengths
from burnish.models.architecture import architecture_from_hf
from burnish.models.decoder import Decoder, initialise
from burnish.models.lora.adapters import add_lora, wrap_with_lora
from burnish.models.lora.peft_files import load_adapter, read_lora_config, save_adapter
from burnish.models.transformers_model import TransformersPolicy
from burnish.models.vision.processor_files import siglip_processor_config
from burnish.models.vision.siglip_shape import SiglipShape
from burnish.models.weight_files import load_decoder
from burnish.training.forward import Packing, micro_batches_of
from burnish.training.learner import Learner
from tests.models.vision.test_siglip_processors import NAMES, byte_tokenizer
from tests.models.vision.tiny_siglip import row, rows_of, siglip_model
from tests.training.test_pictures import gradients


def decoder(family: str) -> Decoder:
    model = Decoder(architecture_from_hf(siglip_model(family).config.to_dict())).double()
    initialise(model, 3, std=0.4)
    return model


def drawn(family: str) -> Batch:
    """Three samples behind each of four prompts with one image, several, and none."""
    prompts = rows_of(family)
    answers = [(g, row(10 * g + length, length)[0]) for g in range(len(prompts)) for length in (4, 1, 6)]
    sequences = [prompts[g][0] + answer for g, answer in answers]
    mask = torch.tensor(
        [k >= len(tokens) - len(answer) for (_, answer), tokens in zip(answers, sequences, strict=True) for k in range(len(tokens))]
    )  # fmt: skip
    batch = Batch(
        torch.tensor([token for tokens in sequences for token in tokens]),
        offsets_from_lengths(torch.tensor([len(tokens) for tokens in sequences])),
        {"action_mask": mask, "loss_mask": mask},
        {"group_ids": torch.tensor([g for g, _ in answers])},
    )
    batch = batch.with_token(weight=aggregation_weights(batch, "token-mean").double())
    return batch.with_pictures([prompts[g][1] for g, _ in answers])


@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
def test_gradients_are_the_same_for_any_packing_and_activation_policy(family: str) -> None:
    model, batch = decoder(family), drawn(family)
    expected, seen = gradients(model, batch, shares=False, budget=1)
    assert expected.keys() == dict(model.named_parameters()).keys()
    shared = micro_batches_of(batch, Packing.of(model, 1000), "loss_mask")
    assert any(micro_batch.shared_prefix is not None for micro_batch in shared)
    for activations, budget in (("keep", 1000), ("recompute", 1000), ("selective", 60)):
        found, again = gradients(model, batch, True, budget, activations)
        torch.testing.assert_close(again, seen, atol=1e-9, rtol=1e-9)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, atol=1e-8, rtol=1e-6, msg=name)


@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
@pytest.mark.parametrize("part", ["frozen", "projector", "trained"])
def test_adapters_are_saved_with_what_is_trained_of_the_tower(family: str, part: str, tmp_path: Path) -> None:
    model, lora = decoder(family), Lora(rank=2, alpha=4.0, targets=["q_proj", "down_proj"])
    add_lora(model, lora, 0)
    assert model.vision is not None
    model.vision.requires_grad_(part == "trained")
    model.vision.projector.requires_grad_(part != "frozen")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1)
    save_adapter(model, tmp_path, tmp_path)
    again = decoder(family)
    wrap_with_lora(again, read_lora_config(tmp_path))
    load_adapter(again, tmp_path)
    for (name, p), q in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name


@pytest.mark.parametrize("family", ["gemma3", "idefics3"])
def test_a_learner_through_transformers_computes_the_native_log_probs(family: str, tmp_path: Path) -> None:
    """The pictures are those of the native processor: `model.backend` does not change what a batch is."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
    from transformers.models.idefics3.processing_idefics3 import Idefics3Processor

    siglip_model(family).save_pretrained(tmp_path)
    native = load_decoder(tmp_path, torch.float32, torch.device("cpu"))
    assert isinstance(native.arch.vision, SiglipShape)
    config = siglip_processor_config(native.arch.vision)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    names = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    if family == "gemma3":
        tokenizer = byte_tokenizer([*names.values()], extra_special_tokens=names)
        images = Gemma3ImageProcessorPil(**config)
        Gemma3Processor(images, tokenizer, image_seq_length=9).save_pretrained(tmp_path)
    else:
        images = Idefics3ImageProcessorPil(**{**config, "do_image_splitting": True, "size": {"longest_edge": 96}})
        Idefics3Processor(images, byte_tokenizer(NAMES), image_seq_len=16).save_pretrained(tmp_path)
    policy = TransformersPolicy.load(tmp_path, torch.float32, torch.device("cpu"))
    batch = drawn(family)
    found = Learner(policy, Optimizer(lr=1e-3), 1, 1000).logprobs(batch)
    expected = Learner(native, Optimizer(lr=1e-3), 1, 1000).logprobs(batch)
    torch.testing.assert_close(found, expected, atol=3e-4, rtol=1e-4)
    assert batch.needed_pictures
