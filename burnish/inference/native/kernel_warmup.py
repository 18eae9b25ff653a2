"""Parallel compilation of an engine's kernels before their first use.

A kernel takes a second or more to compile for the first time on a machine, mostly in other programs (the assembler, the C
compiler of the launcher). In threads all kernels together take about as long as the slowest. Later starts only read them from
disk. The libraries of matmuls and of prefill attention are loaded at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import cast

import torch
from torch import Tensor

from burnish.inference.native.device_state import DeviceRows, SamplerFlags
from burnish.memory_plan.kv_cache import MAX_PREFILL_TOKENS
from burnish.models.cached_forward import head_norms
from burnish.models.decoder import Decoder, Layer
from burnish.models.kernels.attention import has_varlen_kernel, varlen_attention
from burnish.models.kernels.cuda.products import (
    all_partial_tiles,
    all_tiles,
    compile_product,
    has_gated_product,
    has_partial_product,
    num_processors,
)
from burnish.models.kernels.exact import exact_attention, exact_logits
from burnish.models.kernels.fp8 import quantise_rows
from burnish.models.kernels.inference_ops import add_norm, decode_attention, has_gated_kernel, rotate_store
from burnish.models.kernels.latent_ops import LatentHeads, latent_decode
from burnish.models.kernels.paged_cache import KVCache, LatentCache, Pages, Placement
from burnish.models.latent_attention import LatentProjection
from burnish.models.layer_products import Fp8Products, LayerProducts
from burnish.models.nf4 import quantised_weights


def warm_up_kernels(
    model: Decoder,
    layer_products: LayerProducts,
    cache: KVCache,
    rotations: tuple[Tensor, Tensor],
    state: DeviceRows,
    place: Placement,
    flags: SamplerFlags,
    exact: bool,
) -> None:
    """Call every operation of a decode step on the inactive rows of `state` and `place`, in parallel threads."""
    from triton.runtime import driver

    arch, layer = model.arch, cast(Layer, model.layers[0])
    kinds: dict[bool, tuple[Pages, Pages]] = {}
    """The pages of a layer in the model's dtype (True) and of one in 8 bits."""
    for index in range(arch.num_layers):
        keys, values = cache[index]
        kinds[isinstance(keys, Tensor)] = keys, values
    weight, rows = model.embedding.weight, place.position.shape[0]
    windows = set(arch.windows) if isinstance(arch.windows, tuple) else {arch.windows}

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=weight.dtype, device=weight.device)

    def norm() -> None:
        modules = (layer.out,) if layer.experts is not None else (layer.out, layer.down)
        into_residual = (layer_products.into_residual(module, zeros(rows, module.in_features)) for module in modules)
        for delta in (None, *into_residual):
            x = zeros(rows, arch.hidden_size)
            add_norm(x, delta, layer.attention_norm.weight, arch.norm_eps, arch.norm_shift)

    def projection() -> Tensor:
        return zeros(rows, (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim)

    def rotate(in_place: bool, pages: tuple[Pages, Pages]) -> None:
        rotate_store(projection(), *rotations, place, head_norms(layer), *pages, in_place)

    def attend_exact() -> None:
        assert isinstance(cache, Tensor), "exact mode has no 8-bit cache"
        for window in windows:
            q = zeros(rows, arch.num_heads, arch.head_dim)
            exact_attention(q, cache[0, 0], cache[0, 1], place, window, arch.score_softcap)

    def attend(splits: int) -> None:
        for window, (keys, values) in product(windows, kinds.values()):
            norms, softcap = head_norms(layer), arch.score_softcap
            decode_attention(projection(), *rotations, place, norms, keys, values, window, splits, softcap=softcap)

    def attend_latents(splits: int) -> None:
        project, shape = layer.qkv, arch.latent
        assert isinstance(project, LatentProjection)
        assert shape is not None
        # The projections are slices of one tensor, as in the model: kernels are compiled for the divisibility of strides.
        _, latent, k_rope = zeros(rows, shape.latent_size).split([shape.query_rank or 0, shape.rank, shape.rope_dim], 1)
        q = zeros(rows, arch.num_heads, arch.head_dim)
        heads = LatentHeads(q, latent.contiguous(), k_rope, project.kv_up, shape, arch.query_scale)
        latents, shared_keys = cache[0]
        latent_decode(heads, *rotations, place, latents, shared_keys, splits)

    def draw() -> None:
        state.draw(zeros(rows, arch.vocab_size), place.owner, place.owner, flags)

    def matmuls() -> None:
        layer_products.attention_input(layer, zeros(rows, arch.hidden_size), None, isinstance(cache, LatentCache))
        if exact:
            exact_logits(zeros(rows, arch.hidden_size), model.head_weight, arch.logit_softcap)
        else:
            model.logits(zeros(rows, arch.hidden_size))

    def prefill() -> None:
        q, k = zeros(1, arch.num_heads, arch.head_dim), zeros(1, arch.num_kv_heads, arch.head_dim)
        bounds = torch.arange(2, dtype=torch.int32, device=weight.device)
        if arch.score_softcap is not None:
            from burnish.models.kernels.triton.packed_attention import packed_attention

            packed_attention(q, k, k, (bounds, bounds), (1, 1), arch.window, arch.score_softcap)
        elif has_varlen_kernel(q):
            for window in windows:
                varlen_attention(q, k, k, (bounds, bounds), (1, 1), window)

    def gate() -> None:
        layer_products.mlp(layer, zeros(rows, arch.hidden_size), zeros(rows, arch.hidden_size))

    def product_kernels() -> list[Callable[[], None]]:  # for all batch sizes, not only the first
        if exact or layer.experts is not None:
            return []
        x, compiled = zeros(rows, arch.hidden_size), list[Callable[[], None]]()
        matrices = layer_products.matrices if isinstance(layer_products, Fp8Products) else {}
        matrix, processors = matrices.get(id(layer.gate_up)), num_processors(weight.device)
        with torch.inference_mode():
            if matrix is None:
                is_one = has_gated_kernel(layer.gate_up, x, arch.activation)
            else:
                is_one = has_gated_product(quantise_rows(x), matrix, arch.activation)
        most = max(MAX_PREFILL_TOKENS, state.size)
        if is_one:
            tiles = all_tiles(most, arch.mlp_size, processors)
            kind = matrix is not None, arch.activation, weight.device
            compiled += [partial(compile_product, tile, *kind) for tile in tiles]
        for module in (layer.out, layer.down):
            matrix = matrices.get(id(module))
            if matrix is not None and has_partial_product(quantise_rows(zeros(rows, module.in_features)), matrix):
                tiles = all_partial_tiles(most, module.in_features, module.out_features, processors)
                compiled += [partial(compile_product, tile, True, "none", weight.device) for tile in tiles]
        return compiled

    def all_matmuls() -> None:  # in one thread: they use the same kernel, which two threads would both compile
        matmuls()
        norm()
        gate()

    is_one_kernel = exact or bool(quantised_weights(model)) or isinstance(layer_products, Fp8Products)
    ahead = product_kernels()
    products = [all_matmuls, *ahead] if is_one_kernel else [matmuls, norm, *(ahead or [gate])]
    chosen = attend_latents if isinstance(cache, LatentCache) else attend
    attention = (
        [attend_exact] if exact else [partial(chosen, 1), partial(chosen, 2), prefill]
    )  # 2: any number of splits
    rotate_kernels = list[Callable[[], None]]()
    for is_wide, pages in kinds.items() if not isinstance(cache, LatentCache) else ():
        rotate_kernels += [partial(rotate, at, pages) for at in ((True, False) if is_wide and not exact else (False,))]
    work = [draw, *attention, *rotate_kernels, *products]
    driver.active.get_current_device()  # load Triton's driver library first: all kernels need it
    _run_in_threads(work, weight.device)


def _run_in_threads(work: list[Callable[[], None]], device: torch.device) -> None:
    def run(one: Callable[[], None]) -> None:
        with torch.cuda.device(device), torch.inference_mode():  # both are local to a thread
            one()

    with ThreadPoolExecutor(min(len(work), os.cpu_count() or 1)) as threads:
        for result in [threads.submit(run, one) for one in work]:
            result.result()
