"""The decoder's forward pass without gradient over a paged KV cache, on the same parameters.

The same arithmetic as `Decoder.forward` in fewer memory passes: residual and norm together, rotation together with the
write to the cache. A test holds the two to the same numbers for every family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from burnish.models.decoder import GATES, Decoder, Layer
from burnish.models.ops.exact import exact_swiglu
from burnish.models.ops.gated import gated_linear
from burnish.models.ops.geglu import exact_geglu
from burnish.models.ops.paged import Norms, add_norm
from burnish.models.ops.partial_sums import partial_linear
from burnish.models.ops.quantised import Cache

EXACT_GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": exact_swiglu, "gelu_tanh": exact_geglu}
PagedAttend = Callable[[int, Tensor, Norms | None, Any, Any], Tensor]
"""(layer, fused projections [N, all heads * D], head norms, keys, values of the layer's `Pages`) -> [N, heads * D]; the new keys and
values are in the pages afterwards."""


Project = Callable[[nn.Linear, Tensor], Tensor]
"""How a linear layer is applied to rows [N, in]."""


def paged_forward(
    model: Decoder,
    tokens: Tensor,
    cache: Cache,
    attend: PagedAttend,
    linear: Project | None = None,
    which: Tensor | None = None,
) -> Tensor:
    """Final hidden states [N, hidden] of the tokens, or of some of them; `cache` is [layers, 2, P, kv_heads, page, D].

    Behind the last layer's keys and values the tokens that are not asked for have no part in anything.
    What goes into the residual may come in parts, which the norm adds up (`ops/partial_sums.py`), unless a `linear` is given:
    then everything is exact (`ops/exact.py`).
    """
    arch = model.arch
    activate = GATES[arch.activation] if linear is None else EXACT_GATES[arch.activation]
    is_exact = linear is not None
    # What is normed before it goes into the residual must be whole.
    into_residual = linear or (nn.Linear.__call__ if arch.out_norms else partial_linear)
    linear = linear or nn.Linear.__call__
    eps, shift = arch.norm_eps, arch.norm_shift
    x, delta = model.embedded(tokens), None
    for index, module in enumerate(model.layers):
        layer = cast(Layer, module)
        keys, values = cache[index]
        qkv = linear(layer.qkv, add_norm(x, delta, layer.attention_norm.weight, eps, shift))
        mixed = attend(index, qkv, head_norms(layer), keys, values)
        if which is not None and index == arch.num_layers - 1:
            x, mixed = x[which], mixed[which]
            if not which.shape[0]:  # pieces of prompts, none of them the last
                return x
        delta = into_residual(layer.out, mixed)
        delta = layer.attention_out_norm(delta) if arch.out_norms else delta
        normed = add_norm(x, delta, layer.mlp_norm.weight, eps, shift)
        if is_exact:
            activated = activate(linear(layer.gate_up, normed))
        else:
            activated = gated_linear(layer.gate_up, normed, arch.activation, activate)
        delta = into_residual(layer.down, activated)
        delta = layer.mlp_out_norm(delta) if arch.out_norms else delta
    return add_norm(x, delta, model.norm.weight, eps, shift)


def head_norms(layer: Layer) -> Norms | None:
    """The norms of a layer's query and key heads, where it has any."""
    arch = layer.arch
    if not arch.qk_norm:
        return None
    return Norms(layer.q_norm.weight, layer.k_norm.weight, arch.norm_eps, arch.norm_shift, arch.query_scale)
