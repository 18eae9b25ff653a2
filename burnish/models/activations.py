"""What of a layer's forward pass waits for the backward pass, and what is made again there: memory against time.

Bytes per token and layer, `b` the bytes of a number, h the width of the residual stream, q and k the widths of all query and
of all key heads, H the number of query heads, m the width of the MLP; attention and activation by the kernels of a GPU, in a
half type (`training/planner.py` has the same for every device and type, a test counts):

    keep       b (4 h + 3 q + 3 k + 3 m) + 4 (H + 2)    everything that a formula of the backward pass reads
    selective  b (2 h + 2 q + 2 k + 2 m) + 4 H          results of matmuls and of attention; norms, rotations and gates again
    recompute  b h                                      the layer's input; its whole forward again, a third more arithmetic
    offload    0                                        as recompute, the inputs in pinned host memory

and with the last two one layer's `keep` once, for the layer that is being differentiated. Samples that share a prompt
(`ops/trunks.py`) keep another 2 k b for each token of the packing, except with the last two. With a norm on queries and keys
`keep` has 4 more for every such head. Gradients are the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.models.decoder import Attend, Decoder, Layer
from burnish.models.offload import Queue
from burnish.models.recompute import as_leaf, lent, recomputed

Around = Callable[..., Any]
"""(forward of a layer, its input, anything else) -> its output."""


def selective(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    """The layer's forward; what is cheap is made again when it is needed."""
    with lent(layer.attention_norm, x) as normed:
        qk, v = layer.heads(layer.qkv(normed))
    with lent(layer.rotated, qk, cos, sin) as turned:
        mixed = layer.mix(turned, v, attend)
    x = x + layer.attended(mixed)
    with lent(layer.mlp_norm, x) as normed:
        gate_up = layer.gate_up(normed)
    with lent(layer.gated, gate_up) as activated:
        return x + layer.computed(activated)


class Offload:
    """`recomputed` with the layer's first input in host memory; one of these for all layers of a model."""

    def __init__(self) -> None:
        self.queue = Queue()

    def __call__(self, function: Callable[..., Any], x: Tensor, *others: Any) -> Any:
        waiting, asks = self.queue.put(x.detach()), x.requires_grad
        rest = tuple(as_leaf(other) for other in others)
        return recomputed(function, x, *others, held=lambda: (waiting.get().requires_grad_(asks), *rest))


def check_activations(model: nn.Module, policy: str) -> None:
    """Raise where the model's layers cannot do what is asked."""
    if policy == "keep" or any(isinstance(module, Layer) for module in model.modules()):
        return
    if policy == "selective":
        raise UserError(
            "activations=selective needs the native decoder, and this model runs through transformers: use recompute, offload or keep"
        )
    if not _of_transformers(model):
        raise UserError(f"activations={policy}: transformers does not say what the layers of this model are: use keep")


def set_activations(model: nn.Module, policy: str) -> None:
    """Have every layer of the model keep its activations by a policy: keep, selective, recompute or offload."""
    check_activations(model, policy)
    ways: dict[str, Around] = {"recompute": recomputed, "offload": Offload()}
    around = ways.get(policy)
    for module in model.modules():
        if isinstance(module, Decoder):
            module.activations = policy
        if isinstance(module, Layer):
            module.policy = selective if policy == "selective" else None if around is None else partial(_native, around)
    for layer in _of_transformers(model):
        vars(layer).pop("forward", None)
        if around is not None:
            layer.forward = partial(_transformers, around, layer.forward)


def _native(around: Around, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
    return around(layer.run, x, cos, sin, attend)


def _transformers(around: Around, forward: Callable[..., Any], hidden: Tensor, *others: Any, **options: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(hidden, *others, **options)
    return around(partial(forward, **options), hidden, *others)


def _of_transformers(model: nn.Module) -> list[nn.Module]:
    """The layers that transformers itself would checkpoint.

    Its own way acts in training mode only, in which some models drop out: the log-probs would not be those sampled from.
    """
    from burnish.models.hf import TransformersBackbone, TransformersPolicy

    inner = [m.inner for m in model.modules() if isinstance(m, TransformersPolicy | TransformersBackbone)]
    if not inner:
        return []
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for one in inner for m in one.modules() if isinstance(m, GradientCheckpointingLayer)]
