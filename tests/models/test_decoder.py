from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from burnish.models.decoder import Decoder, initialise
from burnish.models.weight_files import load_decoder

VARIANTS = [
    "llama", "llama-theta", "llama-linear", "llama3", "llama-bias", "qwen2", "qwen3", "qwen3-bias", "mistral-window", "mistral",
    "llama-yarn", "deepseek", "deepseek-moe", "deepseek-plain", "gemma2", "gemma3", "gemma3-linear", "qwen3-moe", "qwen3-moe-sparse", "mixtral", "olmoe",
]  # fmt: skip
CPU = torch.device("cpu")
TinyModel = Callable[..., tuple[Any, Path]]
Packed = Callable[..., tuple[Tensor, Tensor]]


def their_logits(model: Any, tokens: Tensor, offsets: Tensor) -> Tensor:
    """Logits of transformers, one sequence at a time, without padding or packing."""
    bounds = offsets.tolist()
    parts = [tokens[a:b][None] for a, b in itertools.pairwise(bounds)]
    with torch.no_grad():
        return torch.cat([model(input_ids=part, use_cache=False).logits[0] for part in parts])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_packed_sequences_equal_those_of_transformers(
    tiny_model: TinyModel, packed: Packed, variant: str, tied: bool
) -> None:
    theirs, directory = tiny_model(variant, tied)
    ours = load_decoder(directory, torch.float32, CPU)
    tokens, offsets = packed([7, 1, 40, 12, 2, 13, 1])
    logits = ours.logits(ours.hidden(tokens, offsets)).detach()
    expected = their_logits(theirs, tokens, offsets)
    assert expected.std() > 0.5, "flat logits would prove nothing"
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_arithmetic_agrees_to_float64_precision(tiny_model: TinyModel, packed: Packed, variant: str) -> None:
    theirs, directory = tiny_model(variant, False, torch.float64)
    ours = load_decoder(directory, torch.float64, CPU)
    tokens, offsets = packed([7, 1, 40, 12])
    # transformers computes RMS norms in float32 for every dtype, so 1e-12 cannot be reached here.
    gap = (ours.logits(ours.hidden(tokens, offsets)).detach() - their_logits(theirs, tokens, offsets)).abs().max()
    assert gap < 1e-5


def test_variants_compute_different_things(tiny_model: TinyModel, packed: Packed) -> None:
    """Guards the test above: an option that both sides ignored would agree as well."""
    tokens, offsets = packed([40])
    by_variant = {v: their_logits(tiny_model(v)[0], tokens, offsets) for v in VARIANTS}
    for other in ("llama-theta", "llama-linear", "llama3", "llama-bias"):
        assert (by_variant["llama"] - by_variant[other]).abs().max() > 0.05
    assert (by_variant["mistral"] - by_variant["mistral-window"]).abs().max() > 0.05
    assert (by_variant["gemma3"] - by_variant["gemma3-linear"]).abs().max() > 0.05


@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=5), data=st.data())
@pytest.mark.parametrize(("variant", "grad"), [("qwen3", True), ("qwen3", False), ("mistral-window", True)])
def test_a_sequence_never_sees_its_neighbour(
    tiny_model: TinyModel, packed: Packed, variant: str, grad: bool, lengths: list[int], data: st.DataObject
) -> None:
    model = load_decoder(tiny_model(variant)[1], torch.float32, CPU)
    tokens, offsets = packed(lengths)
    which = data.draw(st.integers(0, len(lengths) - 1))
    inside = torch.zeros(len(tokens), dtype=torch.bool)
    inside[int(offsets[which]) : int(offsets[which + 1])] = True
    changed = torch.where(inside, (tokens + 17) % 61, tokens)
    with torch.set_grad_enabled(grad):
        before, after = model.hidden(tokens, offsets), model.hidden(changed, offsets)
    assert torch.equal(before[~inside], after[~inside])
    assert not torch.equal(before[inside], after[inside])


@pytest.mark.parametrize("variant", ["llama", "mistral-window"])
def test_a_token_never_sees_its_future(tiny_model: TinyModel, packed: Packed, variant: str) -> None:
    model = load_decoder(tiny_model(variant)[1], torch.float32, CPU)
    tokens, offsets = packed([9, 20])
    changed = tokens.clone()
    changed[9 + 12] = (changed[9 + 12] + 1) % 61
    with torch.no_grad():
        before, after = model.hidden(tokens, offsets), model.hidden(changed, offsets)
    assert torch.equal(before[: 9 + 12], after[: 9 + 12])
    assert not torch.equal(before[9 + 12 :], after[9 + 12 :])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_num_parameters_is_the_real_count(tiny_model: TinyModel, variant: str, tied: bool) -> None:
    theirs, directory = tiny_model(variant, tied)
    ours = load_decoder(directory, torch.float32, CPU)
    assert ours.arch.num_parameters == sum(p.numel() for p in ours.parameters())
    score_biases = sum(b.numel() for name, b in theirs.named_buffers() if name.endswith("e_score_correction_bias"))
    assert ours.arch.num_parameters == sum(p.numel() for p in theirs.parameters()) + score_biases


def test_token_logprobs_are_those_of_the_logits(tiny_model: TinyModel, packed: Packed) -> None:
    theirs, directory = tiny_model("qwen2", True)
    ours = load_decoder(directory, torch.float32, CPU)
    tokens, offsets = packed([5, 9, 2])
    wanted = torch.tensor([1, 4, 6, 13, 15])
    logp, entropy = ours.token_logprobs(tokens, offsets, wanted, temperature=0.7, with_entropy=True)
    expected = (their_logits(theirs, tokens, offsets)[wanted - 1] / 0.7).log_softmax(-1)
    assert torch.allclose(logp, expected.gather(1, tokens[wanted, None]).squeeze(1), atol=1e-4)
    assert entropy is not None
    assert torch.allclose(entropy, torch.distributions.Categorical(logits=expected).entropy(), atol=1e-4)
    assert ours.token_logprobs(tokens, offsets, wanted)[1] is None


def test_gradients_reach_every_parameter_and_equal_those_of_transformers(tiny_model: TinyModel, packed: Packed) -> None:
    theirs, directory = tiny_model("qwen3", False, torch.float64)
    ours: Any = load_decoder(directory, torch.float64, CPU)
    tokens, offsets = packed([11])
    wanted = torch.arange(1, 11)
    logp, _ = ours.token_logprobs(tokens, offsets, wanted)
    logp.sum().backward()
    theirs.zero_grad()
    log_p = theirs(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)
    log_p[wanted - 1, tokens[wanted]].sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in ours.parameters())
    expected = theirs.model.layers[0].self_attn.q_proj.weight.grad
    got = ours.layers[0].qkv.weight.grad[: expected.shape[0]]
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))
    # Row 0 is the padding token, whose embedding transformers does not train.
    assert torch.allclose(ours.embedding.weight.grad[1:], theirs.model.embed_tokens.weight.grad[1:], atol=1e-4)


def test_initial_weights_follow_from_the_seed_alone(tiny_model: TinyModel) -> None:
    arch = load_decoder(tiny_model("llama-bias")[1], torch.float32, CPU).arch
    first: Any
    first, again, other = Decoder(arch), Decoder(arch), Decoder(arch)
    for model, seed in ((first, 3), (again, 3), (other, 4)):
        initialise(model, seed)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.embedding.weight, other.embedding.weight)
    assert first.layers[0].qkv.bias.abs().max() == 0
    assert torch.equal(first.norm.weight, torch.ones(arch.hidden_size))
    assert first.layers[0].qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert first.layers[0].down.weight.std().item() == pytest.approx(0.02 / (2 * arch.num_layers) ** 0.5, rel=0.1)
