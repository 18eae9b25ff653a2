"""Which part of every parameter a tensor-parallel rank holds (Megatron, 1909.08053), as blocks of the full tensor.

A rank has some query heads with the key/value heads they read, and some columns of the MLP. The fused matrices are divided by
their outputs and the matrices after them by their inputs. Latent attention is divided where latents become heads. Of a mixture of
experts a rank has some whole experts, and the router. An engine also divides the vocabulary: rows of the embedding and of the head.
Norms are whole on every rank, except those over all heads.

The full tensor has Hugging Face's order of rows. A rank's rows of a fused matrix are several blocks of it, which lie one after the
other in the rank's tensor. `layer_ranges` has the layers of pipeline stages. Nothing here needs torch: plans of weight transfers
(`inference/resharding.py`) are made from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from burnish.config.errors import UserError
from burnish.core.sharded_tensors import PlacedShard, Shard, full_shard
from burnish.models.architecture import Architecture
from burnish.models.vision.tensor_names import TOWER

ENGINE_KEY = "placement.engine_tensor"
"""The config key that sets the number of ranks of an engine."""
Range = tuple[int, int]
"""Rows or columns [start, stop)."""
VOCABULARY = ("embedding", "head")
"""Modules with a row for each token of the vocabulary."""
BY_INPUTS = ("out", "down")
"""Modules that are divided by their inputs."""
FROM_LATENTS = ("q_up", "kv_up")
"""Modules of latent attention with equal rows for each head."""


def check_engine_divisible(arch: Architecture, size: int) -> None:
    """Refuse a number of ranks of an engine that cannot have equal parts of the layers."""
    sizes = {"query heads": arch.num_heads}
    if arch.num_expert_layers < arch.num_layers:
        sizes["MLP columns"] = arch.mlp_size
    if arch.experts is not None:
        sizes["experts"] = arch.experts.num_experts
        sizes["columns of shared experts"] = arch.experts.shared_size
    for what, number in sizes.items():
        if number % size:
            raise UserError(f"{ENGINE_KEY}={size} does not divide the model's {number} {what}")
    kv_heads = arch.num_kv_heads
    if kv_heads % size and size % kv_heads:
        raise UserError(
            f"{ENGINE_KEY}={size} neither divides the model's {kv_heads} key/value heads nor is a multiple of them"
        )


def rank_architecture(arch: Architecture, size: int) -> Architecture:
    """The architecture of one rank's layers. With fewer key/value heads than ranks, several ranks hold the same one."""
    kv_heads, experts = max(1, arch.num_kv_heads // size), arch.experts
    if experts is not None:
        experts = replace(experts, num_experts=experts.num_experts // size, shared_size=experts.shared_size // size)
    heads, mlp_size = arch.num_heads // size, arch.mlp_size // size
    return replace(arch, num_heads=heads, num_kv_heads=kv_heads, mlp_size=mlp_size, experts=experts)


def layer_ranges(num_layers: int, num_stages: int, head_layers: float = 0.0) -> list[range]:
    """The layers of each stage: consecutive, such that the slowest stage has as little work as possible.

    The last stage also has the head, whose work is that of `head_layers` layers, so it may have fewer layers. No stage has more layers than in
    an even division, so that the memory of the largest stage stays the same.
    """
    if num_layers < num_stages:
        raise UserError(f"parallel.pipeline={num_stages} needs as many layers, and the model has {num_layers}")
    if num_stages == 1:
        return [range(num_layers)]
    most = -(-num_layers // num_stages)

    def slowest(last: int) -> float:
        return max(last + head_layers, -(-(num_layers - last) // (num_stages - 1)))

    candidates = range(max(1, num_layers - most * (num_stages - 1)), num_layers // num_stages + 1)
    last = min(candidates, key=lambda last: (slowest(last), -last))
    each, more = divmod(num_layers - last, num_stages - 1)
    starts = [stage * each + min(stage, more) for stage in range(num_stages)]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], num_layers], strict=True)]


def vocabulary_range(vocab_size: int, rank: int, size: int) -> Range:
    """The tokens whose embeddings and logits a rank has. All ranks but the last have equally many."""
    each = -(-vocab_size // size)
    return min(rank * each, vocab_size), min((rank + 1) * each, vocab_size)


def rank_ranges(arch: Architecture, projection: str, rank: int, size: int, layer: int = 0) -> Range:
    """The outputs of a Hugging Face projection (`q_proj`, `gate_proj`, ...) that a rank has, counted within the projection.

    The MLP of a `layer` with experts is that of its shared experts.
    """
    if projection in ("k_proj", "v_proj"):
        first = rank * arch.num_kv_heads // size
        return first * arch.head_dim, (first + max(1, arch.num_kv_heads // size)) * arch.head_dim
    total = arch.num_heads * arch.head_dim if projection == "q_proj" else arch.dense_size(layer)
    return rank * total // size, (rank + 1) * total // size


def fused_ranges(arch: Architecture, module: str, rank: int, size: int, layer: int = 0) -> list[Range]:
    """The rows of a fused matrix that a rank has, one range for each projection in it."""
    if module == "qkv":
        q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        parts = [("q_proj", 0), ("k_proj", q), ("v_proj", q + kv)]
    else:
        parts = [("gate_proj", 0), ("up_proj", arch.dense_size(layer))]
    return [_shifted(rank_ranges(arch, name, rank, size, layer), start) for name, start in parts]


def rank_blocks(
    arch: Architecture,
    name: str,
    shape: Sequence[int],
    rank: int,
    size: int,
    with_vocabulary: bool = True,
    lora_projections: Sequence[str] = (),
) -> list[PlacedShard]:
    """The blocks of the parameter `name` that a rank of `size` holds, with their places in the rank's tensor.

    `shape` is that of the full tensor. The B matrices of a fused layer stack those of its `lora_projections`, in that order.
    """
    owner, module, kind = ("", "", *name.split("."))[-3:]
    layer = int(name.split(".")[1]) if name.startswith("layers.") else 0
    if size == 1 or name.startswith(TOWER):
        return _whole(shape)
    if owner == "experts" and module in ("gate_up", "down"):  # experts are runs of rows of every tensor
        return _along(shape, 0, [_equal_part(shape[0], rank, size)])
    if with_vocabulary and module in VOCABULARY:
        return _along(shape, 0, [vocabulary_range(shape[0], rank, size)])
    if module in BY_INPUTS and kind in ("weight", "lora_a"):
        return _along(shape, 1, [_equal_part(shape[1], rank, size)])
    if module in FROM_LATENTS and kind != "lora_a":
        return _along(shape, 0, [_equal_part(shape[0], rank, size)])
    if module in ("qkv", "gate_up") and kind == "lora_b":
        return _along(shape, 0, _adapter_ranges(arch, lora_projections, rank, size, layer))
    if module in ("qkv", "gate_up") and kind != "lora_a":
        return _along(shape, 0, fused_ranges(arch, module, rank, size, layer))
    if arch.wide_qk_norm and module in ("q_norm", "k_norm"):
        return _along(shape, 0, [rank_ranges(arch, f"{module[0]}_proj", rank, size)])
    return _whole(shape)


def _equal_part(total: int, rank: int, size: int) -> Range:
    return rank * total // size, (rank + 1) * total // size


def _whole(shape: Sequence[int]) -> list[PlacedShard]:
    return [PlacedShard(full_shard(shape), (0,) * len(shape))]


def _adapter_ranges(arch: Architecture, projections: Sequence[str], rank: int, size: int, layer: int) -> list[Range]:
    ranges, start = [], 0
    for name in projections:
        ranges.append(_shifted(rank_ranges(arch, name, rank, size, layer), start))
        is_kv = name in ("k_proj", "v_proj")
        heads = arch.num_kv_heads if is_kv else arch.num_heads
        start += arch.dense_size(layer) if name in ("gate_proj", "up_proj") else heads * arch.head_dim
    return ranges


def _along(shape: Sequence[int], dim: int, ranges: Sequence[Range]) -> list[PlacedShard]:
    """Blocks that are whole but for one dimension, one after the other along it."""
    blocks, at = [], 0
    for start, stop in ranges:
        offsets, sizes, place = [0] * len(shape), list(shape), [0] * len(shape)
        offsets[dim], sizes[dim], place[dim] = start, stop - start, at
        blocks.append(PlacedShard(Shard(tuple(shape), tuple(offsets), tuple(sizes)), tuple(place)))
        at += stop - start
    return blocks


def _shifted(found: Range, start: int) -> Range:
    return start + found[0], start + found[1]
