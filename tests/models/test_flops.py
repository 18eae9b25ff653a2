"""FLOPs against torch's counter for every family, and the pairs of attention against a mask."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from burnish.config.model import Lora
from burnish.models.activation_checkpointing import set_activations
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.expert_shape import ExpertShape
from burnish.models.flops import (
    Flops,
    ForwardCounts,
    backward_flops,
    causal_pairs,
    forward_flops,
    packed_counts,
    recomputed_flops,
)
from burnish.models.heads import ValueModel
from burnish.models.kernels.shared_prefix import computed_rows
from burnish.models.latent_shape import LatentShape
from burnish.models.lora.adapters import add_lora

pytestmark = pytest.mark.usefixtures("in_torch")  # whose products torch can count

BASE = Architecture("llama", 61, 32, 2, 4, 2, 8, 48, 512)
FAMILIES = {
    "llama": BASE,
    "llama-bias": replace(BASE, qkv_bias=True, out_bias=True, mlp_bias=True),
    "qwen2-tied": replace(BASE, family="qwen2", qkv_bias=True, tied=True),
    "qwen3": replace(BASE, family="qwen3", qk_norm=True, head_dim=16),
    "mistral-window": replace(BASE, family="mistral", window=5),
    # Values as wide as keys, since torch counts their padding too.
    "deepseek": replace(
        BASE, family="deepseek_v3", num_kv_heads=4, head_dim=10, latent=LatentShape(10, 9, 6, 4, 10), qkv_bias=True
    ),
    "gemma3": replace(
        BASE, family="gemma3_text", window=5, local_layers=(True, False), out_norms=True, norm_shift=1.0, qk_norm=True
    ),
}
FAMILIES |= {
    "qwen3_moe": replace(
        BASE, family="qwen3_moe", num_layers=3, qk_norm=True, experts=ExpertShape(6, 2, 20, (False, True, True))
    ),
    "olmoe": replace(BASE, family="olmoe", wide_qk_norm=True, experts=ExpertShape(6, 3, 20)),
}
SEQUENCES, LENGTH = 3, 12


def batch_of(sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, offsets and the wanted positions: every second token."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (sequences * length,), generator=generator)
    offsets = torch.arange(sequences + 1) * length
    positions = torch.arange(sequences * length)
    return tokens, offsets, positions[(positions % length > 0) & (positions % 2 == 1)]


def model_of(arch: Architecture) -> Decoder:
    model = Decoder(arch)
    initialise(model, seed=0)
    return model


def counted(counter: FlopCounterMode) -> dict[str, int]:
    """torch's counts, split into products of weights and of attention, which are batched on short sequences."""
    found = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    batched = sum(count for op, count in found.items() if "bmm" in op)
    return {"weights": sum(found.values()) - batched, "attention": batched}


def product_in_place(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    """FLOPs of the in-place addmm, which torch's counter does not support."""
    return int(2 * left[0] * left[1] * right[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_forward_and_backward_are_what_torch_counts(name: str) -> None:
    arch = FAMILIES[name]
    model = model_of(arch)
    tokens, offsets, wanted = batch_of(SEQUENCES, LENGTH)
    # The explicit scores on a CPU are full squares, masked afterwards.
    squares = ForwardCounts(tokens.numel(), SEQUENCES * LENGTH**2, wanted.numel())
    with FlopCounterMode(display=False) as counter:
        logp, _ = model.token_logprobs(tokens, offsets, wanted)
    expected = forward_flops(arch, squares)
    assert counted(counter) == {"weights": expected.matmul + expected.head, "attention": expected.attention}
    with FlopCounterMode(display=False) as counter:
        logp.sum().backward()
    expected = backward_flops(arch, squares) + recomputed_flops(arch, squares)
    assert counted(counter) == {"weights": expected.matmul + expected.head, "attention": expected.attention}


def test_long_sequences_cost_the_same_products_of_weights() -> None:
    model = model_of(BASE)
    tokens, offsets, wanted = batch_of(1, 300)  # too long for explicit scores: torch's counter does not see the kernel
    with FlopCounterMode(display=False) as counter:
        model.token_logprobs(tokens, offsets, wanted)[0].sum().backward()
    counts = packed_counts([300], wanted.numel())
    expected = forward_flops(BASE, counts) + backward_flops(BASE, counts) + recomputed_flops(BASE, counts)
    assert counter.get_total_flops() == expected.matmul + expected.head


def test_a_critic_has_one_output_a_token_and_keeps_it() -> None:
    critic = ValueModel(model_of(BASE))
    tokens, offsets, wanted = batch_of(SEQUENCES, LENGTH)
    with FlopCounterMode(display=False) as counter:
        critic.token_values(tokens, offsets, wanted).sum().backward()
    squares = ForwardCounts(tokens.numel(), SEQUENCES * LENGTH**2, wanted.numel())
    expected = forward_flops(BASE, squares, 1) + backward_flops(BASE, squares, 1) + recomputed_flops(BASE, squares, 1)
    assert counter.get_total_flops() == expected.total


def test_a_shared_prompt_goes_through_the_layers_once() -> None:
    model = model_of(BASE)
    tokens, offsets, wanted = batch_of(SEQUENCES, LENGTH)
    shared_prefix = torch.tensor([0, 5, 0])
    tokens[LENGTH : LENGTH + 5] = tokens[:5]
    with FlopCounterMode(display=False) as counter:
        model.token_logprobs(tokens, offsets, wanted, shared_prefix=shared_prefix)[0].sum().backward()
    counts = packed_counts([LENGTH] * SEQUENCES, wanted.numel(), shared=[0, 5, 0])
    assert counts.tokens == computed_rows(offsets, shared_prefix).num_rows == 3 * LENGTH - 5
    expected = forward_flops(BASE, counts) + backward_flops(BASE, counts) + recomputed_flops(BASE, counts)
    assert counted(counter)["weights"] == expected.matmul + expected.head


@pytest.mark.parametrize("activations", ["keep", "selective", "recompute", "offload"])
@pytest.mark.parametrize(
    "targets", [None, "all-linear", ["q_proj", "v_proj"], ["o_proj"], ["up_proj", "gate_proj"], ["down_proj"]]
)
def test_adapters_and_recomputation_are_what_torch_counts(targets: Any, activations: str) -> None:
    model, lora = model_of(BASE), None if targets is None else Lora(rank=3, targets=targets)
    if lora is not None:
        add_lora(model, lora, seed=0)
    set_activations(model, activations)
    tokens, offsets, wanted = batch_of(SEQUENCES, LENGTH)
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product_in_place}) as counter:
        model.token_logprobs(tokens, offsets, wanted)[0].sum().backward()
    squares = ForwardCounts(tokens.numel(), SEQUENCES * LENGTH**2, wanted.numel())
    expected = forward_flops(BASE, squares, lora=lora) + backward_flops(BASE, squares, lora=lora)
    expected += recomputed_flops(BASE, squares, lora=lora, activations=activations)
    assert counted(counter)["attention"] == expected.attention
    assert counter.get_total_flops() == expected.total


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 40), st.integers(1, 40) | st.none())
def test_pairs_are_those_that_causality_and_the_window_leave(length: int, window: int | None) -> None:
    visible = torch.ones(length, length).tril()
    assert causal_pairs(length, window) == int((visible if window is None else visible.triu(1 - window)).sum())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 11)), max_size=5), st.integers(1, 6) | st.none())
def test_shared_beginnings_leave_the_queries_of_the_rest(rows: list[tuple[int, int]], window: int | None) -> None:
    rows = [(length, min(start, length - 1)) for length, start in rows]
    counts = packed_counts([length for length, _ in rows], 7, window, [start for _, start in rows])
    tokens = [position for length, start in rows for position in range(start, length)]
    looks = [min(position + 1, window or position + 1) for position in tokens]
    assert counts == ForwardCounts(len(tokens), sum(looks), 7)


def test_layers_of_two_kinds_count_the_pairs_of_each() -> None:
    counts = packed_counts([10, 3], 7, (4, 4, None))
    near, far = causal_pairs(10, 4) + causal_pairs(3, 4), causal_pairs(10) + causal_pairs(3)
    assert counts == ForwardCounts(13, (2 * near + far) / 3, 7)
    arch = replace(BASE, num_layers=3, window=4, local_layers=(True, True, False))
    assert forward_flops(arch, counts).attention == 4 * (2 * near + far) * arch.num_heads * arch.head_dim


def test_the_sums_add_up() -> None:
    assert ForwardCounts(1, 2, 3) + ForwardCounts(10, 20, 30) == ForwardCounts(11, 22, 33)
    both = Flops(1, 2, 3, 4) + Flops(10, 20, 30, 40)
    assert (both, both.total) == (Flops(11, 22, 33, 44), 110)


def test_the_1_5b_shape_by_hand() -> None:
    arch = Architecture("qwen2", 151936, 1536, 28, 12, 2, 128, 8960, 32768, qkv_bias=True, tied=True)
    body = 28 * (1536 * (12 + 4) * 128 + 1536 * 1536 + 3 * 1536 * 8960)
    counts = packed_counts([384] * 256, 256 * 256)
    once = forward_flops(arch, counts)
    assert once.matmul == 2 * 98304 * body
    assert once.head == 2 * 65536 * 1536 * 151936
    assert once.attention == 4 * 256 * (384 * 385 // 2) * 28 * 12 * 128
    assert backward_flops(arch, counts).total == 2 * once.total
