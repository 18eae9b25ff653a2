"""Floating-point operations of a decoder, counted exactly from its architecture and the shape of a packed batch.

A product of [a, b] and [b, c] is 2 a b c operations. Counted are the products of every layer (qkv, out, gate and up, down),
the scores and weighted values of attention over the pairs that causality and the window leave, and the output head at the
tokens whose log-prob is wanted. Norms, activations, rotations and the optimizer are left out: they are below a
hundredth, and bound by memory.

`forward` and `backward` are what the mathematics needs; `recomputed` is what is calculated a second time to save memory.
Their quotient with a device's peak are MFU (PaLM, 2204.02311) without the latter, and the share of executed operations
with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.model import Lora
from burnish.models.architecture import Architecture, Windows
from burnish.models.weight_layout import lora_targets, num_lora_parameters

LAYER_MATRICES = ("qkv", "out", "gate_up", "down")
"""The matrices of a layer in the order of the forward pass; attention comes after the first."""


@dataclass(frozen=True)
class ForwardCounts:
    """How much of everything a forward pass computes."""

    tokens: int = 0
    """Rows that go through the layers."""
    pairs: float = 0
    """(query, key) pairs that each head of attention looks at, in the mean over the layers."""
    outputs: int = 0
    """Rows that go through the output head."""

    def __add__(self, other: ForwardCounts) -> ForwardCounts:
        return ForwardCounts(self.tokens + other.tokens, self.pairs + other.pairs, self.outputs + other.outputs)


@dataclass(frozen=True)
class Flops:
    """Operations by what they are for."""

    matmul: int = 0
    attention: int = 0
    head: int = 0
    adapters: int = 0

    @property
    def total(self) -> int:
        return self.matmul + self.attention + self.head + self.adapters

    def __add__(self, other: Flops) -> Flops:
        return Flops(
            self.matmul + other.matmul,
            self.attention + other.attention,
            self.head + other.head,
            self.adapters + other.adapters,
        )


def causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a sequence: position i looks at itself and the i before it, or the `window` - 1 before it."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def packed_counts(
    lengths: Sequence[int], num_outputs: int, windows: Windows = None, shared: Sequence[int] | None = None
) -> ForwardCounts:
    """Counts of packed sequences; the first `shared[s]` tokens of sequence s are another's, and computed there."""
    begun = [0] * len(lengths) if shared is None else shared
    tokens = sum(lengths) - sum(begun)

    def pairs(window: int | None) -> int:
        spans = zip(lengths, begun, strict=True)
        return sum(causal_pairs(length, window) - causal_pairs(start, window) for length, start in spans)

    if not isinstance(windows, tuple):
        return ForwardCounts(tokens, pairs(windows), num_outputs)
    layers = Counter(windows)
    mean = sum(times * pairs(window) for window, times in layers.items()) / len(windows)
    return ForwardCounts(tokens, mean, num_outputs)


def matrix_sizes(arch: Architecture) -> dict[str, int]:
    """Weights of a layer that a token is multiplied with, by matrix."""
    hidden, heads = arch.hidden_size, arch.num_heads * arch.head_dim
    return {
        "qkv": hidden * (heads + 2 * arch.num_kv_heads * arch.head_dim),
        "out": heads * hidden,
        "gate_up": hidden * 2 * arch.mlp_size,
        "down": arch.mlp_size * hidden,
    }


def forward_flops(
    arch: Architecture, counts: ForwardCounts, head_size: int | None = None, lora: Lora | None = None
) -> Flops:
    """One forward pass. `head_size` is the number of outputs a token has, if not the vocabulary: 1 for a critic."""
    size = arch.vocab_size if head_size is None else head_size
    return Flops(
        matmul=2 * counts.tokens * arch.num_layers * sum(matrix_sizes(arch).values()),
        attention=2 * _pair_product(arch, counts),
        head=2 * counts.outputs * arch.hidden_size * size,
        adapters=0 if lora is None else 2 * counts.tokens * num_lora_parameters(arch, lora),
    )


def backward_flops(
    arch: Architecture, counts: ForwardCounts, head_size: int | None = None, lora: Lora | None = None
) -> Flops:
    """The gradients of one forward pass: of every product's two factors, so twice the forward.

    Of weights that adapters leave frozen it is the gradient of the activations alone, and in the first layer none from the
    lowest adapter down: nothing below it learns.
    """
    once = forward_flops(arch, counts, head_size, lora)
    if lora is None:
        return once + once
    adapted = lora_targets(arch, lora)
    lowest = next(name for name in LAYER_MATRICES if any(target.module == name for target in adapted))
    weights = matrix_sizes(arch)
    frozen = sum(weights[name] for name in LAYER_MATRICES[: LAYER_MATRICES.index(lowest) + 1])
    inputs = sum(target.num_inputs for target in adapted if target.module == lowest)
    attended = arch.num_layers if lowest == "qkv" else arch.num_layers - 1
    return Flops(
        matmul=once.matmul - 2 * counts.tokens * frozen,
        attention=2 * once.attention // arch.num_layers * attended,
        head=once.head if head_size is None else 2 * once.head,
        adapters=2 * once.adapters - 2 * counts.tokens * lora.rank * inputs,
    )


def recomputed_flops(
    arch: Architecture,
    counts: ForwardCounts,
    head_size: int | None = None,
    lora: Lora | None = None,
    activations: str = "keep",
    fused_attention: bool = False,
) -> Flops:
    """What the backward calculates again: the layers, by the policy for activations; scores in a fused kernel; logits.

    A layer that is recomputed is so up to the last tensor that its backward reads, the input of `down` (a layer with an
    adapter there, or a norm behind it, runs to its end). A critic's single output is kept; the logits of a vocabulary never are.
    """
    whole, scores = forward_flops(arch, counts, head_size, lora), _pair_product(arch, counts) * fused_attention
    head = whole.head if head_size is None else 0
    if activations in ("keep", "selective"):
        return Flops(attention=scores, head=head)
    to_the_end = arch.out_norms or (lora is not None and any(t.module == "down" for t in lora_targets(arch, lora)))
    skipped = 0 if to_the_end else 2 * counts.tokens * arch.num_layers * matrix_sizes(arch)["down"]
    return Flops(whole.matmul - skipped, whole.attention + scores, head, whole.adapters)


def _pair_product(arch: Architecture, counts: ForwardCounts) -> int:
    """One product over the pairs, such as the scores, in all layers."""
    return round(2 * counts.pairs * arch.num_layers * arch.num_heads * arch.head_dim)
