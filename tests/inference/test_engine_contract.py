"""The engine contract, on the engines that need no extra packages."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.transformers_engine import TransformersEngine
from burnish.models.transformers_model import TransformersPolicy
from tests.inference.engine_contract import *  # noqa: F403
from tests.inference.engine_contract import Subject, spell

ROWS = 4


@pytest.fixture(params=["dense", "paged", "transformers"])
def subject(request: pytest.FixtureRequest, tools: Any) -> Subject:
    if request.param == "transformers":
        return of_transformers()
    model = tools.decoder(torch.float32)
    make = DenseEngine if request.param == "dense" else PagedEngine
    engine = make(model, ROWS, spell)

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return model.logits(model.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)])))

    def change(version: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        engine.load(version, ())

    return Subject(engine, logits, change, ROWS, model.arch.max_positions)


def of_transformers() -> Subject:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 256}
    inner = GPT2LMHeadModel(GPT2Config(vocab_size=13, bos_token_id=None, eos_token_id=None, pad_token_id=0, **sizes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise + (1.0 if "ln_" in name and name.endswith("weight") else 0.0))
    policy = TransformersPolicy(inner)
    engine = TransformersEngine(policy, ROWS, spell, pad_id=0)

    def logits(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return policy.inner(torch.tensor([tokens])).logits[0]

    def change(version: int) -> None:
        engine.load(version, [(name, 0.9 * p.detach()) for name, p in inner.named_parameters()])

    return Subject(engine, logits, change, ROWS, 256, stops_at_work=False)
