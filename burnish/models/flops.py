"""Floating-point operations (FLOPs) of a decoder, counted exactly from its architecture and the shape of a packed batch.

A product of [a, b] and [b, c] takes 2 a b c operations. The counts include the matmuls of every layer (qkv, out, gate and
up, down; of experts only those that compute a token, and the router), the scores and weighted values of attention over the visible pairs, and the output head at the tokens whose
log-prob is needed. Norms, activations, rotations and the optimizer are left out: they are below one percent and bound by
memory.

`forward_flops` and `backward_flops` are what the mathematics needs; divided by a device's peak they give MFU (PaLM,
2204.02311). `recomputed_flops` are computed a second time to save memory; with them the quotient is HFU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.model import Lora
from burnish.models.architecture import Architecture, Windows
from burnish.models.weight_layout import layer_matrices, lora_targets


@dataclass(frozen=True)
class ForwardCounts:
    """The sizes that the FLOPs of a forward pass depend on."""

    tokens: int = 0
    """Tokens that go through the layers."""
    pairs: float = 0
    """Visible (query, key) pairs per attention head, averaged over the layers."""
    outputs: int = 0
    """Tokens that go through the output head."""

    def __add__(self, other: ForwardCounts) -> ForwardCounts:
        return ForwardCounts(self.tokens + other.tokens, self.pairs + other.pairs, self.outputs + other.outputs)


@dataclass(frozen=True)
class Flops:
    """FLOPs by kind of operation."""

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
    """Visible pairs of a causal sequence: position i attends to itself and the i before it, at most `window` in all."""
    full = length if window is None else min(length, window)
    return full * (full + 1) // 2 + (length - full) * full


def packed_counts(
    lengths: Sequence[int], num_outputs: int, windows: Windows = None, shared: Sequence[int] | None = None
) -> ForwardCounts:
    """Counts of packed sequences; the first `shared[s]` tokens of sequence s belong to a prefix computed elsewhere."""
    prefixes = [0] * len(lengths) if shared is None else shared
    tokens = sum(lengths) - sum(prefixes)

    def pairs(window: int | None) -> int:
        spans = zip(lengths, prefixes, strict=True)
        return sum(causal_pairs(length, window) - causal_pairs(start, window) for length, start in spans)

    if not isinstance(windows, tuple):
        return ForwardCounts(tokens, pairs(windows), num_outputs)
    layers = Counter(windows)
    mean = sum(times * pairs(window) for window, times in layers.items()) / len(windows)
    return ForwardCounts(tokens, mean, num_outputs)


def matrix_sizes(arch: Architecture, layer: int = 0) -> dict[str, int]:
    """Elements of each matrix of a layer that one token is multiplied by, in the order of the forward pass."""
    hidden, attention = arch.hidden_size, arch.attention_matrices
    if arch.experts is not None and arch.has_experts(layer):
        width = arch.experts.experts_per_token * arch.experts.expert_size
        router = {"experts.router": hidden * arch.experts.num_experts}
        attention |= router | {"experts.gate_up": hidden * 2 * width, "experts.down": width * hidden}
    size = arch.dense_size(layer)
    return attention | ({"gate_up": hidden * 2 * size, "down": size * hidden} if size else {})


def _matrix_elements(arch: Architecture) -> int:
    """Elements of all layers' matrices that one token is multiplied by."""
    return sum(sum(matrix_sizes(arch, layer).values()) for layer in range(arch.num_layers))


def _adapter_share(arch: Architecture, module: str) -> float:
    """The share of a matrix's adapters that compute one token."""
    if arch.experts is None or not module.startswith("experts."):
        return 1.0
    return arch.experts.experts_per_token / arch.experts.num_experts


def _adapter_elements(arch: Architecture, lora: Lora) -> int:
    """Elements of all layers' adapters that one token is multiplied by."""
    targets = (target for layer in range(arch.num_layers) for target in lora_targets(arch, lora, layer))
    return round(lora.rank * sum((t.num_inputs + t.num_outputs) * _adapter_share(arch, t.module) for t in targets))


def forward_flops(
    arch: Architecture, counts: ForwardCounts, head_size: int | None = None, lora: Lora | None = None
) -> Flops:
    """FLOPs of one forward pass. `head_size` is the number of outputs per token if not the vocabulary size: 1 for a critic."""
    size = arch.vocab_size if head_size is None else head_size
    return Flops(
        matmul=2 * counts.tokens * _matrix_elements(arch),
        attention=_pair_product(arch, counts, arch.head_dim) + _pair_product(arch, counts, arch.value_dim),
        head=2 * counts.outputs * arch.hidden_size * size,
        adapters=0 if lora is None else 2 * counts.tokens * _adapter_elements(arch, lora),
    )


def backward_flops(
    arch: Architecture, counts: ForwardCounts, head_size: int | None = None, lora: Lora | None = None
) -> Flops:
    """FLOPs of one backward pass: gradients of both factors of every product, so twice the forward.

    Frozen weights below adapters only need the gradient of the activations. In the first layer nothing below the lowest
    adapter is trained, so no gradient is computed there.
    """
    once = forward_flops(arch, counts, head_size, lora)
    if lora is None:
        return once + once
    adapted = lora_targets(arch, lora)
    lowest = next(name for name in layer_matrices(arch, 0) if any(target.module == name for target in adapted))
    weights = matrix_sizes(arch)
    names = list(weights)
    frozen = sum(weights[name] for name in names[: names.index(lowest) + 1])
    share = _adapter_share(arch, lowest)
    inputs = round(sum(target.num_inputs for target in adapted if target.module == lowest) * share)
    attended = arch.num_layers if lowest.startswith("qkv") else arch.num_layers - 1
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
    """FLOPs that the backward recomputes: layers (by activation policy), scores of a fused attention kernel, and logits.

    A layer is recomputed up to the last tensor that its backward reads, the input of `down`; with an adapter there, a norm
    after it, or experts, it is recomputed to its end. A critic's single output is saved; logits of a vocabulary never are.
    """
    whole = forward_flops(arch, counts, head_size, lora)
    scores = _pair_product(arch, counts, arch.head_dim) * fused_attention
    head = whole.head if head_size is None else 0
    if activations in ("keep", "selective"):
        return Flops(attention=scores, head=head)
    runs_to_end = arch.out_norms or (lora is not None and any(t.module == "down" for t in lora_targets(arch, lora)))
    num_dense = arch.num_layers - arch.num_expert_layers
    skipped = 0 if runs_to_end else 2 * counts.tokens * num_dense * arch.mlp_size * arch.hidden_size
    return Flops(whole.matmul - skipped, whole.attention + scores, head, whole.adapters)


def _pair_product(arch: Architecture, counts: ForwardCounts, dim: int) -> int:
    """FLOPs of one product over the pairs with heads of this size, such as the scores, in all layers."""
    return round(2 * counts.pairs * arch.num_layers * arch.num_heads * dim)
