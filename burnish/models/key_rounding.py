"""Which layers of a decoder can keep their keys and values in 8 bits.

An 8-bit float (e4m3) has three bits behind its first one, so each number of a key is off by 2.6% of itself (root mean square). For most layers
the score of a query and a key, a sum of 128 such products, is off by a tenth. Where some numbers of the keys are large it is off by
whole units, and the softmax of that layer is noise: the bias of the keys of Qwen2.5-1.5B is up to 354 in its first layer, and with all
28 layers in 8 bits its accuracy on GSM8K falls from 63% to 19% (Qwen2.5-Coder-1.5B-Instruct). Three of its layers cause this.

The size of the error follows from the weights, without data: the input of a projection is a normed vector, whose numbers are taken
as independent with the norm's weights as their sizes.

    E[q_d^2] = b_d^2 + sum_j (W_dj g_j)^2       and so for a key
    error    = 0.026 * sqrt(sum_d E[q_d^2] E[k_d^2]) / sqrt(D)

The rotation mixes a number with its partner in the other half of the head, so the mean of both stands for each.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from burnish.models.decoder import Decoder, Layer
from burnish.models.nf4 import dense_weight

E4M3_ERROR = 0.026
"""Root mean square of the relative rounding error of e4m3."""
MAX_SCORE_ERROR = 0.5
"""Largest error of a head's scores with which a layer is in 8 bits. Layers of Qwen2.5-1.5B are below 0.3 or above 0.8."""


def eight_bit_layers(model: Decoder) -> tuple[bool, ...]:
    """For each layer, whether its keys may be rounded to 8 bits. Layers with latents always are: they have no bias."""
    if model.arch.latent is not None:
        return (True,) * model.arch.num_layers
    return tuple(score_error(cast(Layer, layer)) <= MAX_SCORE_ERROR for layer in model.layers)


@torch.no_grad()
def score_error(layer: Layer) -> float:
    """Estimated error of a score when the layer's keys are rounded: the largest of its query heads."""
    arch = layer.arch
    heads, key_heads, dim = arch.num_heads, arch.num_kv_heads, arch.head_dim
    if arch.qk_norm or arch.wide_qk_norm:
        queries, keys = (_normed_squares(norm, arch.norm_shift) for norm in (layer.q_norm, layer.k_norm))
        queries, keys = (x.view(-1, dim).expand(n, dim) for x, n in ((queries, heads), (keys, key_heads)))
    else:
        rows = _projected_squares(layer)[: (heads + key_heads) * dim].view(-1, dim)
        queries, keys = rows.split([heads, key_heads])
    queries, keys = (
        x.view(-1, 2, dim // 2).mean(1, keepdim=True).expand(-1, 2, -1).flatten(1) for x in (queries, keys)
    )
    products = queries.view(key_heads, -1, dim) * keys[:, None]
    return E4M3_ERROR * float((products.sum(-1).amax() / dim).sqrt()) * arch.query_scale


def _projected_squares(layer: Layer) -> Tensor:
    """Mean squares of the outputs of the layer's projection."""
    project = cast(nn.Linear, layer.qkv)
    inputs = _normed_squares(layer.attention_norm, layer.arch.norm_shift)
    squares = dense_weight(project.weight, inputs.dtype).float().square() @ inputs
    return squares if project.bias is None else squares + project.bias.float().square()


def _normed_squares(norm: nn.Module, shift: float) -> Tensor:
    """Mean squares of the outputs of a norm."""
    return (cast(Tensor, norm.weight).float() + shift).square()
