"""Layers through torch.compile: the same gradients as without, and no recompilation for another number of tokens."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.models import compiled_layers
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.compiled_layers import compile_layers
from burnish.models.decoder import Decoder, initialise
from burnish.models.expert_shape import ExpertShape
from burnish.models.lora.adapters import add_lora
from burnish.models.transformers_model import TransformersPolicy

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None,
    reason="torch.compile needs a C++ compiler on a CPU",
)


def make(lora: Lora | None = None, experts: ExpertShape | None = None) -> Decoder:
    model = Decoder(Architecture("qwen3", 61, 32, 2, 4, 2, 8, 48, 64, qkv_bias=True, qk_norm=True, experts=experts))
    initialise(model, 0, 0.1)
    if lora is not None:
        add_lora(model, lora, 0)
    return model


def gradients(model: Decoder, lengths: list[int]) -> dict[str, Tensor]:
    tokens = torch.arange(sum(lengths)) * 7 % 61
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    wanted = torch.arange(1, lengths[0])
    model.zero_grad()
    model.token_logprobs(tokens, offsets, wanted)[0].sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    "lora", [None, Lora(rank=2), Lora(rank=2, targets=["v_proj", "down_proj"], base="nf4")], ids=str
)
def test_compiled_layers_give_the_same_gradient_for_every_size_compiled_once(
    lora: Lora | None,
) -> None:
    from torch._dynamo.utils import counters

    plain = make(lora)
    fast = copy.deepcopy(plain)
    compile_layers(fast)
    counters.clear()
    compiled_layers._compiled_parts.cache_clear()
    graphs = []
    for policy, lengths in (("keep", [5, 9]), ("keep", [7, 30, 11]), ("keep", [20, 3]), ("recompute", [9, 8])):
        set_activations(fast, policy)
        expected, got = gradients(plain, lengths), gradients(fast, lengths)
        assert got.keys() == expected.keys()
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-4)
        graphs.append(counters["stats"]["unique_graphs"])
    # Two graphs; with adapters the first layer's input needs no gradient, which gives another graph of each.
    assert graphs[:3] == [4 if lora else 2] * 3
    assert not counters["graph_break"]


def test_a_model_of_transformers_is_refused(tiny_other: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"training\.layers=compiled needs the native decoder"):
        compile_layers(TransformersPolicy(tiny_other("gpt2")))


def test_a_machine_without_a_compiler_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="needs a C\\+\\+ compiler"):
        compile_layers(make())


def test_a_compiled_layer_runs_the_pieces_and_an_engine_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        compiled_layers,
        "_compiled_parts",
        lambda: (
            compiled_layers._before_attention,
            compiled_layers._after_attention,
            compiled_layers._after_attention_of_experts,
            lambda tensor, dim: None,
        ),
    )
    monkeypatch.setattr(compiled_layers.shutil, "which", lambda name: name)
    for experts in (None, ExpertShape(4, 2, 24)):
        plain, model = make(experts=experts), make(experts=experts)
        compile_layers(model)
        expected, got = gradients(plain, [6, 4]), gradients(model, [6, 4])
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], atol=1e-5, rtol=1e-4)
    monkeypatch.setattr(compiled_layers, "_compiled_parts", lambda: pytest.fail("compiled"))
    with torch.inference_mode():
        model.hidden(torch.arange(4), torch.tensor([0, 4]))
