"""The decoder's forward pass without gradient over a paged KV cache, on the same parameters.

The same arithmetic as `Decoder.forward` in fewer memory passes: residual and norm together, rotation together with the
write to the cache. A test holds the two to the same numbers for every family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from burnish.models.decoder import Decoder, Layer
from burnish.models.ops.exact import exact_swiglu
from burnish.models.ops.paged import Norms, add_norm
from burnish.models.ops.partial_sums import partial_linear
from burnish.models.ops.quantised import Cache
from burnish.models.ops.swiglu import swiglu

PagedAttend = Callable[[Tensor, Norms | None, Any, Any], Tensor]
"""(fused projections [N, all heads * D], head norms, keys, values of the layer's `Pages`) -> [N, heads * D]; the new keys and
values are in the pages afterwards."""


Project = Callable[[nn.Linear, Tensor], Tensor]
"""How a linear layer is applied to rows [N, in]."""


def paged_forward(
    model: Decoder, tokens: Tensor, cache: Cache, attend: PagedAttend, linear: Project | None = None
) -> Tensor:
    """Final hidden states [N, hidden] of the tokens; `cache` is [layers, 2, P, kv_heads, page, D].

    What goes into the residual may come in parts, which the norm adds up (`ops/partial_sums.py`), unless a `linear` is given:
    then everything is exact (`ops/exact.py`).
    """
    into_residual, activate = (partial_linear, swiglu) if linear is None else (linear, exact_swiglu)
    linear = nn.Linear.__call__ if linear is None else linear
    eps = model.arch.norm_eps
    x, delta = model.embedding(tokens), None
    for index, module in enumerate(model.layers):
        layer = cast(Layer, module)
        keys, values = cache[index]
        norms = (layer.q_norm.weight, layer.k_norm.weight, eps) if model.arch.qk_norm else None
        qkv = linear(layer.qkv, add_norm(x, delta, layer.attention_norm.weight, eps))
        delta = into_residual(layer.out, attend(qkv, norms, keys, values))
        gate_up = linear(layer.gate_up, add_norm(x, delta, layer.mlp_norm.weight, eps))
        delta = into_residual(layer.down, activate(gate_up))
    return add_norm(x, delta, model.norm.weight, eps)
