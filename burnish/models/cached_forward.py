"""Forward passes of the decoder over a KV cache, without gradient, on the same parameters as the learner.

- `paged_forward`: over a paged cache on any device. Residual and norm are fused, as are rotation and cache write.
- `DecodeStep`: one new token per row on a CPU in torch. For a hundred rows of a small model the calls cost as much as the
  arithmetic, so views of the weights are created once for many steps, and the residual is updated in place.
- `CDecodeStep`: the whole step in one call of a C kernel (`kernels/cpu/decode.c`), or several steps with the draws between them.
  Threads synchronise once per call. The kernel reads its own packed copy of the weights, which is renewed when weights were
  written. The weights, keys and values of a bfloat16 model stay in bfloat16; the arithmetic is in float32, and so are the logits.
- `exact_logprobs`: log-probs by the batch-invariant operations of an exact engine, bit for bit.

All have the arithmetic of `Decoder.forward`; tests compare them for every family.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from burnish.models.decoder import Decoder, Layer
from burnish.models.kernels.attention import window_of
from burnish.models.kernels.cpu.c_library import STORED_TYPES, address, c_kernels, num_threads
from burnish.models.kernels.exact import exact_attention, exact_logits, token_logp
from burnish.models.kernels.half_products import PLAIN_LINEARS, is_slow_half
from burnish.models.kernels.inference_ops import add_norm, rotate_store
from burnish.models.kernels.paged_cache import HeadNorms, KVCache, LatentCache, Placement
from burnish.models.kernels.picture_attention import packed_blocks, tokens_ahead
from burnish.models.kernels.shared_prefix import Attend
from burnish.models.latent_attention import LatentProjection, value_heads
from burnish.models.layer_products import ExactProducts, LayerProducts
from burnish.models.weight_layout import layer_matrices

PagedAttend = Callable[[int, Any, HeadNorms | None, Any, Any], Tensor]
"""(layer, fused projections [N, all heads * D], head norms, the layer's key pages, value pages) -> [N, heads * D].
It also writes the new keys and values to the pages. Over a cache of latents it takes `LatentHeads` and pages of latents and of rotated
keys, and returns [N, heads * value dimensions]."""
ProjectRows = Callable[[Tensor], Tensor]
MAX_C_BYTES = 1 << 30
"""Largest weights of the C decode step, whose packed copy takes as much memory again."""
PAGE = 16
"""Page size of `exact_logprobs`, the same as the engine's: attention sums page by page."""
MAX_LOGITS = 1 << 25
"""Logits held at once."""
Pointer, Long = ctypes.c_void_p, ctypes.c_long


def paged_forward(
    model: Decoder,
    tokens: Tensor,
    cache: KVCache,
    attend: PagedAttend,
    products: LayerProducts,
    which: Tensor | None = None,
) -> Tensor:
    """Final hidden states [N, hidden] of the tokens, or of those `which`; `cache` is [layers, 2, P, kv_heads, page, D],
    or holds latents.

    After the last layer's keys and values are stored, only the tokens `which` are computed further. What `products` adds to the
    residual may be partial sums, which the next norm adds up.
    """
    arch = model.arch
    has_latents = isinstance(cache, LatentCache)
    features = None if model.pictures is None else model.picture_features(model.pictures)
    x, delta = model.embedded(tokens), None
    if features is not None:
        x = model.with_embeddings(x, features)
    for index, module in enumerate(model.layers):
        layer = cast(Layer, module)
        keys, values = cache[index]
        if features is not None and 0 < index <= len(features.deep):
            x = model.with_deep(x, features, index - 1)  # the delta is not yet added
        qkv = products.attention_input(layer, x, delta, has_latents)
        if arch.wide_qk_norm:
            normed_projection(layer, cast(Tensor, qkv))
        mixed = attend(index, qkv, head_norms(layer), keys, values)
        if which is not None and index == arch.num_layers - 1:
            x, mixed = x[which], mixed[which]
            if not which.shape[0]:  # prefill chunks, none of them the last of its prompt
                return x
        mixed = mixed if arch.latent is None or has_latents else value_heads(mixed, arch.latent)
        delta = products.into_residual(layer.out, mixed)
        delta = layer.attention_out_norm(delta) if arch.out_norms else delta
        delta = products.mlp(layer, x, delta)
        delta = layer.mlp_out_norm(delta) if arch.out_norms else delta
    return add_norm(x, delta, model.norm.weight, arch.norm_eps, arch.norm_shift)


def head_norms(layer: Layer) -> HeadNorms | None:
    """The norms of a layer's query and key heads; None if it has none."""
    arch = layer.arch
    if not arch.qk_norm:
        return None
    return HeadNorms(layer.q_norm.weight, layer.k_norm.weight, arch.norm_eps, arch.norm_shift, arch.query_scale)


def normed_projection(layer: Layer, qkv: Tensor) -> None:
    """Norm all queries and all keys of a fused projection [N, all heads * D] as two vectors, in place (OLMoE)."""
    arch = layer.arch
    q, k = (heads * arch.head_dim for heads in (arch.num_heads, arch.num_kv_heads))
    qkv[:, :q] = layer.q_norm(qkv[:, :q])
    qkv[:, q : q + k] = layer.k_norm(qkv[:, q : q + k])


def decode_step_of(model: Decoder) -> Callable[[Tensor, Tensor, Attend, int], Tensor]:
    """The forward pass of a model for one token per row: a `DecodeStep`, or the model itself if it overrides `forward`."""
    return DecodeStep(model) if type(model).forward is Decoder.forward else model


class DecodeStep:
    """One token per row in torch. Valid while the model's modules are the same; weights may be written in place."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.layers = [_LayerDecodeStep(cast(Layer, layer)) for layer in model.layers]

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend, num_positions: int) -> Tensor:
        """Final hidden states [N, hidden], as `Decoder.forward` gives them."""
        model, rotation_rows = self.model, dict[bool, tuple[Tensor, Tensor]]()
        x = model.embedded(tokens)
        for index, layer in enumerate(self.layers):
            is_local = model.arch.is_local(index)
            if is_local not in rotation_rows:
                cos, sin = model.rotations(num_positions, index)
                rotation_rows[is_local] = cos[positions], sin[positions]
            layer.add_to(x, *rotation_rows[is_local], attend)
        return model.norm.functional(x)


class _LayerDecodeStep:
    """A decoder layer with its linear layers as functions on views of the weights."""

    def __init__(self, layer: Layer) -> None:
        self.layer = layer
        self.qkv, self.out = _project(layer.qkv), _project(layer.out)
        if layer.experts is None:
            self.gate_up, self.down = _project(layer.gate_up), _project(layer.down)

    def add_to(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """Apply the layer to x [N, hidden] in place."""
        layer, has_out_norms = self.layer, self.layer.arch.out_norms
        qk, v = layer.split_heads(self.qkv(layer.attention_norm.functional(x)))
        attended = self.out(layer.attention(layer.rotate_heads(qk, cos, sin), v, attend))
        x += layer.attention_out_norm.functional(attended) if has_out_norms else attended
        if layer.experts is not None:
            x += layer.mlp(layer.mlp_norm.functional(x))
            return
        computed = self.down(layer.gated_activation(self.gate_up(layer.mlp_norm.functional(x))))
        x += layer.mlp_out_norm.functional(computed) if has_out_norms else computed


def _project(module: nn.Linear | LatentProjection) -> ProjectRows:
    """A function that applies a linear layer to rows [N, in]; a plain `nn.Linear` through views of its tensors."""
    if not isinstance(module, nn.Linear) or type(module) not in PLAIN_LINEARS or is_slow_half(module.weight):
        return module
    weight = module.weight.detach().t()
    if module.bias is None:
        return lambda x: torch.mm(x, weight)
    bias = module.bias.detach()
    return lambda x: torch.addmm(bias, x, weight)


class _CLinear(ctypes.Structure):
    _fields_ = [("weight", Pointer), ("bias", Pointer)]


class _CLayer(ctypes.Structure):
    _fields_ = [
        *((name, Pointer) for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_out_norm", "mlp_out_norm")),
        *((name, _CLinear) for name in ("qkv", "out", "gate_up", "down")),
        *((name, Pointer) for name in ("cos", "sin", "keys", "values")),
        ("window", Long),
    ]  # fmt: skip


class _CDecoder(ctypes.Structure):
    _fields_ = [
        *((name, Long) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab", "is_gelu")),
        *((name, ctypes.c_double) for name in ("eps", "shift", "query_scale", "embedding_scale")),
        ("embedding", Pointer), ("norm", Pointer), ("head", _CLinear), ("layers", ctypes.POINTER(_CLayer)),
    ]  # fmt: skip


def c_decode_step(model: Decoder) -> CDecodeStep | None:
    """The C decode step of a model; None if the model is too large or not plain, or there is no C kernel."""
    arch = model.arch
    is_plain = (
        type(model).forward is Decoder.forward
        and arch.experts is None
        and arch.latent is None
        and not arch.wide_qk_norm
        and arch.score_softcap is None
        and arch.logit_softcap is None
        and all(type(linear) in PLAIN_LINEARS for linear in _linears(model))
    )
    parameters = list(model.parameters())
    is_small = sum(p.nbytes for p in parameters) <= MAX_C_BYTES
    has_versions = not any(p.is_inference() for p in parameters)  # inference tensors have no version counter
    if not (is_plain and is_small and has_versions):
        return None
    library = c_kernels(*parameters, stored_in=STORED_TYPES)
    return None if library is None else CDecodeStep(model, library)


class Sampled(NamedTuple):
    """Tokens that rows drew one after the other."""

    tokens: Tensor  # [n, K]
    logp: Tensor
    counts: Tensor  # [n]; the tokens after so many are not set


class CDecodeStep:
    """One token per row in one C call, or several in one call of `sample`.

    Valid while the model's modules are the same; weights may be written in place.
    """

    def __init__(self, model: Decoder, library: ctypes.CDLL) -> None:
        self.model, self.dtype = model, model.embedding.weight.dtype
        suffix = "_bfloat16" if self.dtype == torch.bfloat16 else ""
        self.decode, self.pack = library["decode" + suffix], library["pack" + suffix]
        self.decode_and_draw = library["decode_and_draw" + suffix]
        self.workspace_size, panel_width = (
            library["decode_workspace_size" + suffix],
            library["panel_width" + suffix],
        )
        self.workspace_size.restype = panel_width.restype = Long
        self.panel = panel_width()
        self.packed: dict[int, Tensor] = {}
        self.vectors: dict[int, tuple[Tensor, Tensor]] = {}
        """Norms, biases and rotation tables in the type of the arithmetic: (what was converted, the result)."""
        self.parameters = list(model.parameters())
        self.addresses = _parameter_addresses(model)
        self.packed_versions = self._versions()
        self.layers = (_CLayer * model.arch.num_layers)()
        self.decoder = self._describe()
        self.workspace = torch.empty(0, dtype=_arithmetic(self.dtype))

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        longest: int,
        rotation: Tensor | None = None,
    ) -> Tensor:
        """Logits [n, vocab] of the token after each row's last token; `longest` is the largest of the positions [n].

        `rotation` [n] are the rows of the rotation tables, if other than the positions and not above `longest`.
        Keys are [layers, rows, kv_heads, head_dim, capacity], values [layers, rows, kv_heads, capacity, head_dim].
        """
        threads, workspace_size = self._prepare(keys, values, longest)
        logits = self.workspace.new_empty(tokens.shape[0], self.decoder.vocab)
        self.decode(
            ctypes.byref(self.decoder), Long(tokens.shape[0]), address(tokens), address(positions),
            address(positions if rotation is None else rotation), Long(keys.shape[-1]), address(logits),
            address(self.workspace), Long(workspace_size), Long(threads),
        )  # fmt: skip
        return logits

    def sample(
        self,
        tokens: Tensor,
        positions: Tensor,
        keys: Tensor,
        values: Tensor,
        longest: int,
        uniforms: Tensor,
        temperatures: Tensor | None,
        limits: Tensor,
        stops: Tensor,
        never: Tensor | None,
    ) -> Sampled:
        """Draw up to K tokens of each row one after the other, with `uniforms` [n, K], and without a pause between them.

        `longest` is the largest position that a row can reach. A row ends with its limit [n] or a token of `stops`. Temperatures [n]
        are 1 if there are none, and tokens of `never` are not drawn.
        """
        threads, workspace_size = self._prepare(keys, values, longest)
        rows, steps = uniforms.shape
        logits = self.workspace.new_empty(rows, self.decoder.vocab)
        drawn, counts = tokens.new_empty(rows, steps), tokens.new_zeros(rows)
        logp = self.workspace.new_empty(rows, steps)
        self.decode_and_draw(
            ctypes.byref(self.decoder), Long(rows), Long(steps), address(tokens), address(positions), Long(keys.shape[-1]),
            address(uniforms), address(temperatures), address(limits), address(never),
            Long(0 if never is None else never.shape[0]), address(stops), Long(stops.shape[0]), address(drawn), address(logp),
            address(counts), address(logits), address(self.workspace), Long(workspace_size), Long(threads),
        )  # fmt: skip
        return Sampled(drawn, logp, counts)

    def _prepare(self, keys: Tensor, values: Tensor, longest: int) -> tuple[int, int]:
        """Bring weights and addresses up to date for positions up to `longest`; returns threads and the working memory of each."""
        self.refresh()
        for index, layer in enumerate(self.layers):
            cos, sin = self.model.rotations(longest + 1, index)
            layer.cos, layer.sin = self._vector(cos), self._vector(sin)
            layer.keys, layer.values = keys[index].data_ptr(), values[index].data_ptr()
        threads = num_threads()
        workspace_size = self.workspace_size(ctypes.byref(self.decoder), Long(longest))
        if self.workspace.numel() < threads * workspace_size:
            self.workspace = self.workspace.new_empty(threads * workspace_size)
        return threads, workspace_size

    @property
    def is_current(self) -> bool:
        """Whether the model still has the same parameters at the same addresses."""
        return _parameter_addresses(self.model) == self.addresses

    def refresh(self) -> None:
        """Pack the weights again if any was written since."""
        versions = self._versions()
        if versions == self.packed_versions:
            return
        for linear in _linears(self.model):
            self._pack(linear.weight)
        self._pack(self.model.head_weight)
        for source, converted in self.vectors.values():
            if isinstance(source, nn.Parameter) and converted.dtype != source.dtype:
                converted.copy_(source.detach())
        self.packed_versions = versions

    def _versions(self) -> list[int]:
        return [parameter._version for parameter in self.parameters]

    def _pack(self, weight: Tensor) -> int:
        """Copy a matrix into the kernel's packed layout; returns the address of the copy."""
        outputs, inputs = weight.shape
        into = self.packed.get(id(weight))
        if into is None:
            self.packed[id(weight)] = into = weight.new_empty(-(-outputs // self.panel) * self.panel * inputs).detach()
        self.pack(
            Pointer(weight.data_ptr()), Pointer(into.data_ptr()), Long(outputs), Long(inputs), Long(num_threads())
        )
        return into.data_ptr()

    def _vector(self, source: Tensor) -> int:
        """The address of a small tensor in the type of the arithmetic."""
        if id(source) not in self.vectors:
            self.vectors[id(source)] = source, source.detach().to(_arithmetic(self.dtype))
        return self.vectors[id(source)][1].data_ptr()

    def _linear(self, linear: nn.Linear) -> _CLinear:
        return _CLinear(self._pack(linear.weight), None if linear.bias is None else self._vector(linear.bias))

    def _describe(self) -> _CDecoder:
        model, arch = self.model, self.model.arch
        for index, (entry, module) in enumerate(zip(self.layers, model.layers, strict=True)):
            layer = cast(Layer, module)
            for name in ("qkv", "out", "gate_up", "down"):
                setattr(entry, name, self._linear(getattr(layer, name)))
            for name in ("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_out_norm", "mlp_out_norm"):
                norm = getattr(layer, name, None)
                setattr(entry, name, None if norm is None else self._vector(norm.weight))
            entry.window = window_of(arch.windows, index) or 0
        scale = torch.tensor(arch.hidden_size**0.5, dtype=self.dtype).item() if arch.scaled_embedding else 1.0
        return _CDecoder(
            arch.num_layers, arch.hidden_size, arch.num_heads, arch.num_kv_heads, arch.head_dim, arch.mlp_size, arch.vocab_size,
            arch.activation == "gelu_tanh", arch.norm_eps, arch.norm_shift, arch.query_scale, scale,
            model.embedding.weight.data_ptr(), self._vector(model.norm.weight), _CLinear(self._pack(model.head_weight), None), self.layers,
        )  # fmt: skip


def _arithmetic(dtype: torch.dtype) -> torch.dtype:
    """The type that the C decode step computes in, given that of the weights."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _parameter_addresses(model: Decoder) -> list[tuple[int, int]]:
    return [(id(parameter), parameter.data_ptr()) for parameter in model.parameters()]


def _linears(model: Decoder) -> list[nn.Linear]:
    """The linear layers of all decoder layers."""
    return [
        cast(nn.Linear, layer.get_submodule(name))
        for index, layer in enumerate(model.layers)
        for name in layer_matrices(model.arch, index)
    ]


def pass_rotations(model: Decoder, num_positions: int) -> list[tuple[Tensor, Tensor]]:
    """The rotation tables of the layers for a pass over text or with pictures.

    If the pictures of the pass have rotation positions, the tables have a row for each row of the pass.
    """
    pictures = model.pictures
    if pictures is None or pictures.rotation is None:
        return [model.rotations(num_positions, layer) for layer in range(model.arch.num_layers)]
    every = pictures.index  # positions are not read
    tables = {kind: model.row_rotations(every, num_positions, layer) for kind, layer in _layer_kinds(model).items()}
    return [tables[model.arch.is_local(layer)] for layer in range(model.arch.num_layers)]


def _layer_kinds(model: Decoder) -> dict[bool, int]:
    """A layer with local and one with global attention, as far as there are any."""
    return {model.arch.is_local(layer): layer for layer in range(model.arch.num_layers)}


@torch.no_grad()
def exact_logprobs(model: Decoder, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0) -> Tensor:
    """log p(token | its past) at the `wanted` positions [M] (never the first of a sequence), as an exact engine computes it.

    The packed sequences get pages of their own and run through `paged_forward` with batch-invariant operations, every
    token as a query over its row, as in decoding. This is slower than the learner's forward, which gives the gradient.
    """
    lengths = offsets.diff()
    owner = torch.repeat_interleave(torch.arange(lengths.shape[0], device=tokens.device), lengths)
    position = torch.arange(tokens.shape[0], device=tokens.device) - offsets[:-1][owner]
    longest = int(lengths.max())
    pages = -(-lengths // PAGE)
    width = -(-longest // PAGE)
    first = pages.cumsum(0) - pages + 1  # page 0 is unused
    table = (first[:, None] + torch.arange(width, device=tokens.device)).int()
    table = torch.where(torch.arange(width, device=tokens.device) < pages[:, None], table, 0)
    arch = model.arch
    pictures = model.pictures
    is_rotated = pictures is not None and pictures.rotation is not None
    last = None
    if pictures is not None and arch.attends_both_ways:
        blocks = packed_blocks(pictures.index.cpu().numpy(), offsets.cpu().numpy(), None)
        last = position + torch.from_numpy(tokens_ahead(blocks, tokens.shape[0])).to(tokens.device)
    placement = Placement(
        owner, position, table, torch.arange(tokens.shape[0], device=tokens.device) if is_rotated else None, last
    )
    rotations = pass_rotations(model, longest)
    shape = (int(pages.sum()) + 1, arch.num_kv_heads, PAGE, arch.head_dim)
    store = torch.zeros(2, *shape, dtype=model.embedding.weight.dtype, device=tokens.device)
    cache = store.expand(
        arch.num_layers, *store.shape
    )  # all layers share the memory: a layer's keys are not needed after it

    def attend(layer: int, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor) -> Tensor:
        q = rotate_store(qkv, *rotations[layer], placement, norms, keys, values)
        return exact_attention(q, keys, values, placement, window_of(arch.windows, layer), arch.score_softcap)

    hidden = paged_forward(model, tokens, cache, attend, ExactProducts())[wanted - 1]
    size = max(1, MAX_LOGITS // arch.vocab_size)
    parts = zip(hidden.split(size), tokens[wanted].split(size), strict=True)
    head, softcap = model.head_weight, arch.logit_softcap
    return torch.cat([token_logp(exact_logits(h, head, softcap), t, temperature) for h, t in parts])
