"""The paged engine with pictures on CUDA, with kernels and graphs, against the learner's log-probs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.pictures import Picture, PictureSpan
from burnish.core.random_keys import fold
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.architecture import architecture_from_hf
from burnish.models.cached_forward import exact_logprobs
from burnish.models.decoder import Decoder
from burnish.models.vision.pieces import Piece, piece_pass
from tests.models.vision.conftest import SECTIONS, TEXT, TOKENS, VISION

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda")
# Heads of 64 in bfloat16 run Hopper's own kernel; float32 and fp8 run Triton's.
WIDE = TEXT | {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1}
QWEN25 = {"depth": 3, "window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 4, "out_hidden_size": 128}
QWEN3 = {"depth": 4, "num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2, 3], "out_hidden_size": 128}


def decoder(family: str, dtype: torch.dtype) -> Decoder:
    """A random model with heads of 64."""
    sections = SECTIONS | {"mrope_section": [16, 8, 8]}
    config: Any
    if family == "qwen2_5_vl":
        text = WIDE | {"rope_parameters": sections}
        config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=VISION | QWEN25, **TOKENS)
    else:
        text = WIDE | {"head_dim": 64, "rope_parameters": sections | {"mrope_interleaved": True}}
        config = transformers.Qwen3VLConfig(text_config=text, vision_config=VISION | QWEN3, **TOKENS)
    model = Decoder(architecture_from_hf(config.to_dict()))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.1 if parameter.dim() > 1 or name.endswith("bias") else 1 + 0.1 * noise)
    return model.to(DEVICE, dtype)


def requests() -> list[Request]:
    random = np.random.default_rng(0)
    found = []
    for i, grids in enumerate((((1, 4, 4),), ((1, 3, 5), (1, 20, 30)), (), ((1, 6, 2),))):
        tokens, spans = random.integers(2, 49, 5).tolist(), list[PictureSpan]()
        for grid in grids:
            pixels = random.integers(0, 256, (1, grid[1] * 8, grid[2] * 8, 3), dtype=np.uint8)
            spans.append(PictureSpan(len(tokens), Picture(pixels, grid)))
            tokens += [50] * spans[-1].picture.num_tokens + random.integers(2, 49, 7).tolist()
        for j in range(4):
            options = SamplingOptions(max_tokens=30 + 9 * j, temperature=0.8)
            found.append(Request(f"{i}.{j}", tuple(tokens), options, fold(i, j), pictures=tuple(spans)))
    return found


def learner_logprobs(model: Decoder, asked: list[Request], got: dict[str, Completion]) -> torch.Tensor:
    tokens: list[int] = []
    offsets, wanted = [0], list[int]()
    for request in asked:
        tokens += [*request.tokens, *got[request.id].tokens.tolist()]
        wanted += range(offsets[-1] + len(request.tokens), len(tokens))
        offsets.append(len(tokens))
    assert model.arch.vision is not None
    pieces = [Piece(0, b - a, r.pictures) for r, a, b in zip(asked, offsets, offsets[1:], strict=False)]
    device = model.embedding.weight.device
    packed, bounds, at = (torch.tensor(x, device=device) for x in (tokens, offsets, wanted))
    with torch.no_grad(), model.with_pictures(piece_pass(pieces, model.arch.vision, device)):
        return model.token_logprobs(packed, bounds, at, 0.8)[0].float().cpu()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize(
    ("dtype", "options", "tolerance"),
    [
        (torch.float32, {}, 2e-3),
        (torch.bfloat16, {}, 0.03),
        (torch.bfloat16, {"quantised": True}, 0.06),
        (torch.bfloat16, {"max_rows": 3}, 0.03),
    ],
    ids=str,
)
def test_log_probs_are_the_learners(family: str, dtype: torch.dtype, options: dict[str, Any], tolerance: float) -> None:
    model, asked = decoder(family, dtype), requests()
    engine = PagedEngine(model, **options)
    engine.submit(asked)
    got = {completion.id: completion for completion in engine.stream()}
    mine = torch.from_numpy(np.concatenate([got[r.id].logp for r in asked]))
    truth = learner_logprobs(model.float(), asked, got)
    assert (mine - truth).abs().mean() < tolerance
    assert not {50, 51} & {token for c in got.values() for token in c.tokens.tolist()}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_exact_mode_gives_the_learner_the_very_bits(family: str) -> None:
    model, asked = decoder(family, torch.bfloat16), requests()
    model.exact = partial(exact_logprobs, model)
    engine = PagedEngine(model, exact=True, max_rows=7)
    engine.submit(asked)
    got = {completion.id: completion for completion in engine.stream()}
    mine = torch.from_numpy(np.concatenate([got[r.id].logp for r in asked]))
    assert torch.equal(mine, learner_logprobs(model, asked, got))
    assert model.feature_cache is not None
    model.feature_cache.clear()
    assert torch.equal(mine, learner_logprobs(model, asked, got))
