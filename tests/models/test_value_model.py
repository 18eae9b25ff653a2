"""The value model: its own backbone without output head, and values of the state before each token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.models.decoder import Decoder
from burnish.models.heads import ValueModel
from burnish.models.kernels import logprob
from burnish.models.transformers_model import TransformersPolicy
from burnish.models.weight_files import load_decoder

TinyModel = Callable[..., tuple[Any, Path]]
TinyOther = Callable[..., Any]
Packed = Callable[..., tuple[Tensor, Tensor]]
CPU = torch.device("cpu")
LENGTHS, WANTED = [6, 1, 15, 3], torch.tensor([1, 5, 8, 21, 24])


def with_head(policy: Decoder | TransformersPolicy) -> ValueModel:
    """A value model whose head is not 0."""
    model = ValueModel(policy)
    with torch.no_grad():
        model.head.copy_(torch.linspace(-1, 1, model.head.numel())[None])
    return model


def native(tiny_model: TinyModel, tied: bool = False, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(tiny_model("qwen2", tied)[1], dtype, CPU)


@pytest.fixture(params=["native", "gpt2", "gpt_neox", "gemma3"])
def policy(request: pytest.FixtureRequest, tiny_model: TinyModel, tiny_other: TinyOther) -> Any:
    return native(tiny_model) if request.param == "native" else TransformersPolicy(tiny_other(request.param))


def test_values_start_at_zero_and_the_head_gets_a_gradient(policy: Any, packed: Packed) -> None:
    tokens, offsets = packed(LENGTHS)
    model = ValueModel(policy)
    values = model.token_values(tokens, offsets, WANTED)
    assert torch.equal(values, torch.zeros(5))
    values.sum().backward()
    assert model.head.grad is not None
    assert model.head.grad.abs().max() > 0


def test_a_value_depends_on_what_stands_before_its_token_and_on_nothing_else(policy: Any, packed: Packed) -> None:
    tokens, offsets = packed([7, 5])
    model = with_head(policy)
    wanted = torch.tensor([1, 2, 3, 4, 5, 6, 8, 9, 10, 11])
    changed = tokens.clone()
    changed[4] = (tokens[4] + 1) % 61
    before, after = (model.token_values(t, offsets, wanted) for t in (tokens, changed))
    moved = (before - after).abs() > 1e-6
    assert wanted[moved].tolist() == [5, 6]


def test_values_are_the_head_on_the_final_hidden_states(tiny_model: TinyModel, packed: Packed) -> None:
    tokens, offsets = packed(LENGTHS)
    theirs, _ = tiny_model("qwen2")
    model = with_head(native(tiny_model))
    rows = []
    for a, b in zip(offsets[:-1], offsets[1:], strict=True):
        states = theirs(input_ids=tokens[None, a:b], output_hidden_states=True).hidden_states[-1][0]
        rows.append(states @ model.head[0])
    torch.testing.assert_close(
        model.token_values(tokens, offsets, WANTED), torch.cat(rows)[WANTED - 1], atol=1e-5, rtol=0
    )


def test_both_backends_give_the_same_values(tiny_model: TinyModel, packed: Packed) -> None:
    tokens, offsets = packed(LENGTHS)
    ours, hf = with_head(native(tiny_model)), with_head(TransformersPolicy(tiny_model("qwen2")[0]))
    torch.testing.assert_close(
        ours.token_values(tokens, offsets, WANTED), hf.token_values(tokens, offsets, WANTED), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_no_output_head_is_kept_and_nothing_is_shared_with_the_policy(
    backend: str, tied: bool, tiny_model: TinyModel
) -> None:
    policy: Any = native(tiny_model, tied) if backend == "native" else TransformersPolicy(tiny_model("qwen2", tied)[0])
    model = ValueModel(policy)
    theirs = sum(p.numel() for p in policy.parameters())
    assert sum(p.numel() for p in model.parameters()) == theirs - (0 if tied else 61 * 32) + 32
    addresses = {p.data_ptr() for p in policy.parameters()}
    assert not addresses & {p.data_ptr() for p in model.parameters()}
    assert all(p.requires_grad and p.device == CPU for p in model.parameters())


def test_the_head_of_a_half_type_computes_in_float32(tiny_model: TinyModel, packed: Packed) -> None:
    tokens, offsets = packed(LENGTHS)
    model = with_head(native(tiny_model, dtype=torch.bfloat16))
    assert {p.dtype for p in model.backbone.parameters()} == {torch.bfloat16}
    values = model.token_values(tokens, offsets, WANTED)
    assert (model.head.dtype, values.dtype) == (torch.float32, torch.float32)
    exact = model.backbone.hidden(tokens, offsets)[WANTED - 1].double() @ model.head[0].double()
    torch.testing.assert_close(values.double(), exact, atol=1e-5, rtol=0)


def test_a_model_that_is_all_head_is_refused() -> None:
    class Alone(nn.Module):
        base_model = property(lambda self: self)

    with pytest.raises(UserError, match="Alone of transformers has no model below its output head"):
        ValueModel(TransformersPolicy(Alone()))


# --- statistics of the policy's own head -----------------------------------------------------------------------------------


def test_statistics_are_those_of_the_softmax_however_the_rows_are_chunked(
    tiny_model: TinyModel, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, offsets = packed(LENGTHS)
    theirs, _ = tiny_model("qwen2")
    hf, ours = TransformersPolicy(theirs), native(tiny_model)
    logits = torch.cat(
        [theirs(input_ids=tokens[None, a:b]).logits[0] for a, b in zip(offsets, offsets[1:], strict=False)]
    )
    p = (logits[WANTED - 1] / 0.8).softmax(1)
    expected = p.gather(1, tokens[WANTED, None])[:, 0].log(), -(p * p.log()).sum(1), (p * p).sum(1)
    for policy in (hf, ours):
        for chunk in (61, 200, 1 << 23):
            monkeypatch.setitem(logprob.CHUNK_ELEMENTS, "cpu", chunk)
            got = policy.token_statistics(tokens, offsets, WANTED, 0.8)
            for a, b in zip(got, expected, strict=True):
                assert not a.requires_grad
                torch.testing.assert_close(a, b, atol=2e-5, rtol=0)


def test_statistics_of_a_half_type_are_in_float32(tiny_model: TinyModel, packed: Packed) -> None:
    tokens, offsets = packed(LENGTHS)
    statistics = native(tiny_model, dtype=torch.bfloat16).token_statistics(tokens, offsets, WANTED)
    assert {t.dtype for t in statistics} == {torch.float32}
