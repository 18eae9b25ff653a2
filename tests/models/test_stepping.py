"""The step of the CPU engine against the decoder's own forward, over its cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish.config.lora import Lora
from burnish.models.decoder import Decoder
from burnish.models.lora import add_lora
from burnish.models.stepping import Steps
from burnish.models.weights import load_decoder
from burnish.rollout.native.cache import DecodeAttention, KVCache

VARIANTS = ["llama-bias", "qwen2", "qwen3", "mistral-window", "gemma3"]
TinyModel = Callable[..., tuple[Any, Path]]


def compare(model: Decoder, start: list[int]) -> float:
    """The largest difference over some steps of rows that begin at these positions."""
    generator, worst = torch.Generator().manual_seed(0), 0.0
    steps, caches = Steps(model), [KVCache(model.arch, torch.float64, torch.device("cpu")) for _ in range(2)]
    positions = torch.tensor(start)
    with torch.inference_mode():
        for _ in range(9):
            tokens = torch.randint(model.arch.vocab_size, positions.shape, generator=generator)
            longest, shortest = int(positions.max()), int(positions.min())
            found = []
            for forward, cache in zip((model, steps), caches, strict=True):
                cache.reserve(len(start), longest + 1)
                found.append(
                    forward(tokens, positions, DecodeAttention(cache, positions, longest, shortest), longest + 1)
                )
            worst = max(worst, float((found[0] - found[1]).abs().max()))
            positions = positions + 1
    return worst


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_is_the_forward_of_every_family(variant: str, tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model(variant)[1], torch.float64, torch.device("cpu"))
    assert compare(model, [0, 0, 0]) < 1e-12
    assert compare(model, [0, 6, 3]) < 1e-12


def test_a_step_sees_adapters_and_weights_that_change_in_place(tiny_model: TinyModel) -> None:
    model = load_decoder(tiny_model("qwen2")[1], torch.float64, torch.device("cpu"))
    add_lora(model, Lora(rank=2), seed=0)
    steps, tokens, positions = Steps(model), torch.tensor([3, 5]), torch.tensor([0, 0])

    def both() -> list[torch.Tensor]:
        found = []
        with torch.inference_mode():
            for forward in (model, steps):
                cache = KVCache(model.arch, torch.float64, torch.device("cpu"))
                cache.reserve(2, 1)
                found.append(forward(tokens, positions, DecodeAttention(cache, positions, 0, 0), 1))
        return found

    before = both()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    after = both()
    assert torch.allclose(*before, atol=1e-12)
    assert torch.allclose(*after, atol=1e-12)
    assert not torch.allclose(before[0], after[0], atol=1e-3)
