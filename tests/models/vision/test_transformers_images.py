"""Image-text models through transformers: learner and engine read the pictures that the model's own processor makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.pictures import Picture, PictureSpan, shifted
from burnish.inference.transformers_engine import TransformersEngine
from burnish.models.policy import load_policy
from burnish.models.transformers_model import TransformersBackbone, TransformersPolicy
from burnish.models.vision.interfaces import ImageProcessor, PixelLimits
from burnish.models.vision.processors import load_processor
from tests.made_tokenizers import byte_level

SIDE = 8


def random_image(seed: int, height: int = 11, width: int = 14) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save_llava(path: Path) -> Path:
    tokenizer: PreTrainedTokenizerFast = byte_level(
        eos="<|end|>", extra_special_tokens={"image_token": "<image>"}
    )._inner
    token = tokenizer.convert_tokens_to_ids("<image>")
    torch.manual_seed(0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24, image_size=SIDE, patch_size=4
        ),
        text_config=LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=48, max_position_embeddings=128,
        ),
        image_token_id=token,
        vision_feature_layer=-1,
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    size = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(size=size, crop_size=size)
    model.save_pretrained(str(path))
    LlavaProcessor(
        images, tokenizer, patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(str(path))
    return path


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def policy(llava: Path) -> TransformersPolicy:
    return TransformersPolicy.load(llava, torch.float64, torch.device("cpu"))


@pytest.fixture(scope="module")
def processor(llava: Path) -> ImageProcessor:
    found = load_processor(llava)
    assert found is not None
    return found


def prompt(processor: ImageProcessor, *pieces: str | np.ndarray) -> tuple[list[int], tuple[PictureSpan, ...]]:
    """Tokens and spans of texts and images in turn; a letter is its code."""
    tokens: list[int] = []
    spans: tuple[PictureSpan, ...] = ()
    for piece in pieces:
        if isinstance(piece, str):
            tokens += [ord(letter) for letter in piece]
            continue
        expansion = processor.image(piece)
        spans += shifted(expansion.pictures, len(tokens))
        tokens += expansion.tokens
    return tokens, spans


def their_logprobs(policy: TransformersPolicy, tokens: list[int], images: list[np.ndarray]) -> Tensor:
    """Log-probs of all tokens but the first of one sequence, by the model of transformers itself."""
    assert policy.pixel_inputs is not None
    extra: dict[str, Any] = {}
    if images:
        found = policy.pixel_inputs.processor.image_processor(images, return_tensors="pt")
        extra = {"pixel_values": found["pixel_values"].double()}
    ids = torch.tensor([tokens])
    logits = policy.inner(input_ids=ids, **extra).logits[0]
    return logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]


def test_the_learner_computes_what_transformers_computes(policy: TransformersPolicy, processor: ImageProcessor) -> None:
    first, second, third = (random_image(seed) for seed in range(3))
    rows = [([first], ("ab", first, "cd")), ([], ("text only",)), ([second, third], ("x", second, "y", third, "zz"))]
    rows.append(([third], (third, "another one")))
    prompts = [prompt(processor, *pieces) for _, pieces in rows]
    tokens = torch.tensor([token for row, _ in prompts for token in row])
    offsets = torch.tensor([0, *np.cumsum([len(row) for row, _ in prompts])])
    wanted = torch.cat([torch.arange(a + 1, b) for a, b in zip(offsets, offsets[1:], strict=False)])
    with policy.with_pictures([[span.picture for span in spans] for _, spans in prompts]), torch.no_grad():
        found, _ = policy.token_logprobs(tokens, offsets, wanted)
        backbone = TransformersBackbone(policy)
        with backbone.with_pictures(policy.pictures):
            hidden, _ = backbone.states(tokens, offsets, wanted - 1)
        expected = torch.cat(
            [their_logprobs(policy, row, images) for (images, _), (row, _) in zip(rows, prompts, strict=True)]
        )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    again = policy.inner.lm_head(hidden).log_softmax(-1).gather(1, tokens[wanted][:, None])[:, 0]
    torch.testing.assert_close(again, expected, rtol=1e-9, atol=1e-9)
    plain, _ = policy.token_logprobs(tokens[:9], torch.tensor([0, 9]), torch.arange(1, 9))
    assert not torch.allclose(plain, expected[:8])  # without pictures


def test_the_engine_samples_with_pictures_and_never_a_placeholder(
    policy: TransformersPolicy, processor: ImageProcessor
) -> None:
    first, second = random_image(0), random_image(1, 20, 9)
    prompts = [
        prompt(processor, "ab", first, "cd"),
        prompt(processor, "text only"),
        prompt(processor, second, "q", first),
        prompt(processor, "abcdefg", second),
    ]
    (placeholder,) = processor.placeholder_tokens
    engine = TransformersEngine(policy, 8, lambda tokens: "", pad_id=0)
    options = SamplingOptions(max_tokens=6)
    with torch.no_grad():
        policy.inner.lm_head.weight[placeholder] *= 3  # otherwise it is too rare for the test to fail
    engine.submit(
        [
            Request(f"{copy}-{number}", tokens, options, key=17 * copy + number, pictures=spans)
            for number, (tokens, spans) in enumerate(prompts)
            for copy in range(8)
        ]
    )
    found: dict[str, Completion] = {completion.id: completion for completion in engine.stream()}
    assert len(found) == 32
    assert all(placeholder not in completion.tokens for completion in found.values())
    for number, (tokens, spans) in enumerate(prompts):
        completion = found[f"3-{number}"]
        whole = [*tokens, *completion.tokens.tolist()]
        wanted = torch.arange(len(tokens), len(whole))
        with policy.with_pictures([[span.picture for span in spans]]), torch.no_grad():
            logp, _ = policy.token_logprobs(torch.tensor(whole), torch.tensor([0, len(whole)]), wanted)
        torch.testing.assert_close(torch.from_numpy(completion.logp).double(), logp, rtol=1e-5, atol=1e-5)


def test_limits_and_videos(llava: Path, policy: TransformersPolicy) -> None:
    small = load_processor(llava, PixelLimits(None, 50))
    large = load_processor(llava, PixelLimits(1000, None))
    assert small is not None
    assert large is not None
    sizes = [found.image(random_image(0)).pictures[0].picture.pixels.shape[1:3] for found in (small, large)]
    assert sizes[0][0] * sizes[0][1] <= 50
    assert sizes[1][0] * sizes[1][1] >= 1000
    with pytest.raises(UserError, match="frames as images"):
        small.video([random_image(0)], 1.0)
    assert policy.pixel_inputs is not None
    video = Picture(np.stack([random_image(0)] * 2), (1, 1, 4), seconds_per_frame=1.0)
    with pytest.raises(UserError, match="reads no videos"):
        policy.pixel_inputs.of([video])
    text_only = TransformersPolicy(policy.inner)
    engine = TransformersEngine(text_only, 8, lambda tokens: "", pad_id=0)
    tokens, spans = prompt(small, random_image(0))
    with pytest.raises(UserError, match="reads text only"):
        engine.submit([Request("a", tokens, SamplingOptions(max_tokens=2), key=0, pictures=spans)])


def test_a_saved_policy_has_its_image_processor(llava: Path, tmp_path: Path) -> None:
    policy = load_policy(Model(path=str(llava), dtype="float32", device="cpu"), llava, None, 0)
    assert "forward by transformers" in policy.note
    assert policy.tokenizer.image_processor is not None
    policy.save(tmp_path)
    again = load_processor(tmp_path)
    assert again is not None
    assert again.image(random_image(0)).tokens == policy.tokenizer.image_processor.image(random_image(0)).tokens
    read = TransformersPolicy.load(tmp_path, torch.float32, torch.device("cpu"))
    assert read.pixel_inputs is not None
    assert read.pixel_inputs.of([again.image(random_image(0)).pictures[0].picture])["pixel_values"].shape == (
        1,
        3,
        8,
        8,
    )
