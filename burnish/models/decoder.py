"""The native decoder: one definition for the learner and the engine.

It is a pre-norm transformer with grouped-query attention, rotary positions and a gated MLP or experts; differences between families
are fields of `Architecture`. The input is packed tokens [N] with their positions. The `attend` callable decides what
attends to what, so the same layers serve training (packed sequences), prefill (packed, writing the cache) and decoding (one
token per row over the cache). Query, key and value projections are one matrix, as are gate and up, for fewer and larger
matmuls. `weight_files.py` maps them to Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.architecture import Architecture
from burnish.models.experts import ExpertMlp, RouterPass
from burnish.models.kernels.aligned_groups import AlignedGroups, head_aligned
from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.divergence import head_comparison
from burnish.models.kernels.elementwise import (
    RMSNorm,
    geglu,
    inverse_frequencies,
    rotate,
    rotation_factor,
    rotation_table,
    swiglu,
)
from burnish.models.kernels.half_products import Linear
from burnish.models.kernels.logprob import Distribution, Distributions, head_logprob, head_statistics, softcapped
from burnish.models.kernels.picture_attention import both_ways, packed_blocks
from burnish.models.kernels.shared_prefix import (
    Attend,
    RowShard,
    ShardRows,
    UnshardedRows,
    computed_rows,
)
from burnish.models.latent_attention import LatentProjection, value_heads
from burnish.models.vision.feature_cache import FeatureCache
from burnish.models.vision.interfaces import ImageFeatures, PicturePass, VisionTower, tower_features
from burnish.models.vision.positions import rotation_rows
from burnish.models.vision.towers import build_tower

if TYPE_CHECKING:
    from burnish.config.model import Lora
    from burnish.models.router_pass import LearnerRouting

LayerForward = Callable[["Layer", Tensor, Tensor, Tensor, Attend], Tensor]
"""(layer, x, cos, sin, attend) -> output of the layer."""
GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu_tanh": geglu}
ExactLogprobs = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(tokens [N], offsets [S + 1], wanted [M], temperature) -> log-probs [M]."""


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, arch: Architecture, index: int) -> None:
        super().__init__()
        self.arch, self.index = arch, index
        heads = arch.num_heads + 2 * arch.num_kv_heads
        self.gated_activation = GATED_ACTIVATIONS[arch.activation]
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
        self.qkv: nn.Linear | LatentProjection = (
            Linear(arch.hidden_size, heads * arch.head_dim, bias=arch.qkv_bias)
            if arch.latent is None
            else LatentProjection(arch, arch.latent)
        )
        self.out = Linear(arch.num_heads * arch.value_dim, arch.hidden_size, bias=arch.out_bias)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
        self.experts: ExpertMlp | None = None
        """Experts in place of `gate_up` and `down`."""
        if arch.experts is not None and arch.has_experts(index):
            place = sum(map(arch.has_experts, range(index)))
            self.experts = ExpertMlp(arch.hidden_size, arch.experts, self.gated_activation, place)
        self.has_dense_mlp = arch.dense_size(index) > 0
        """Whether the layer has `gate_up` and `down`: without experts, or beside them (shared experts)."""
        if self.has_dense_mlp:
            self.gate_up = Linear(arch.hidden_size, 2 * arch.dense_size(index), bias=arch.mlp_bias)
            self.down = Linear(arch.dense_size(index), arch.hidden_size, bias=arch.mlp_bias)
        if arch.wide_qk_norm:
            self.q_norm = RMSNorm(arch.num_heads * arch.head_dim, arch.norm_eps, arch.norm_shift)
            self.k_norm = RMSNorm(arch.num_kv_heads * arch.head_dim, arch.norm_eps, arch.norm_shift)
        if arch.qk_norm:
            self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps, arch.norm_shift)
            self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps, arch.norm_shift)
        if arch.out_norms:
            self.attention_out_norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
            self.mlp_out_norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
        self.activation_policy: LayerForward | None = None
        """The forward pass with gradient under an activation policy other than `keep` (`activation_checkpointing.py`)."""
        self.forward_override: LayerForward | None = None
        """A replacement of `eager_forward` (`compiled_layers.py`)."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.activation_policy is not None and torch.is_grad_enabled():
            return self.activation_policy(self, x, cos, sin, attend)
        return self.run(x, cos, sin, attend)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The forward pass that saves everything the backward pass reads."""
        return (
            self.eager_forward(x, cos, sin, attend)
            if self.forward_override is None
            else self.forward_override(self, x, cos, sin, attend)
        )

    def eager_forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The forward pass, not compiled."""
        qk, v = self.split_heads(self.qkv(self.attention_norm(x)))
        x = x + self.attention_output(self.attention(self.rotate_heads(qk, cos, sin), v, attend))
        return x + self.mlp(self.mlp_norm(x))

    def split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Split a fused projection [N, all heads * D] into query and key heads [N, q + k, D] and value heads [N, v, D]."""
        arch = self.arch
        qk, v = qkv.view(qkv.shape[0], -1, arch.head_dim).split(
            [arch.num_heads + arch.num_kv_heads, arch.num_kv_heads], 1
        )
        return qk, v

    def rotate_heads(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate query and key heads by their positions, after their norm if the family has one."""
        arch = self.arch
        if arch.qk_norm:
            q, k = qk.split([arch.num_heads, arch.num_kv_heads], 1)
            q = self.q_norm(q) if arch.query_scale == 1.0 else self.q_norm(q) * arch.query_scale
            qk = torch.cat([q, self.k_norm(k)], 1)
        elif arch.wide_qk_norm:
            q, k = (heads.flatten(1) for heads in qk.split([arch.num_heads, arch.num_kv_heads], 1))
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 1).view(qk.shape)
        return rotate(qk, cos, sin)

    def attention(self, qk: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Attention of rotated queries and keys [N, q + k, D] over values; [N, query heads * value dimensions]."""
        q, k = qk.split([self.arch.num_heads, self.arch.num_kv_heads], 1)
        mixed = attend(self.index, q, k, v).reshape(qk.shape[0], -1)
        return mixed if self.arch.latent is None else value_heads(mixed, self.arch.latent)

    def attention_output(self, mixed: Tensor) -> Tensor:
        """The output projection of attention, which is added to the residual."""
        out: Tensor = self.out(mixed)
        return self.attention_out_norm(out) if self.arch.out_norms else out

    def mlp(self, normed: Tensor) -> Tensor:
        """The MLP or the experts, whose output is added to the residual."""
        if self.experts is not None:
            computed = self.experts(normed)
            if self.has_dense_mlp:
                computed = computed + self.down(self.gated_activation(self.gate_up(normed)))
            return self.experts_output(computed)
        return self.mlp_output(self.gated_activation(self.gate_up(normed)))

    def experts_output(self, computed: Tensor) -> Tensor:
        """The experts' output after its norm if the family has one."""
        return self.mlp_out_norm(computed) if self.arch.out_norms else computed

    def mlp_output(self, activated: Tensor) -> Tensor:
        """The output projection of the MLP, which is added to the residual."""
        out: Tensor = self.down(activated)
        return self.mlp_out_norm(out) if self.arch.out_norms else out


class Decoder(nn.Module):
    """Embedding, layers, final norm, output head."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.embedding = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(Layer(arch, i) for i in range(arch.num_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
        self.head = None if arch.tied else nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        self.vision: VisionTower | None = None if arch.vision is None else build_tower(arch.vision)
        """The vision tower with its projector; None for a text model."""
        self.feature_cache = None if self.vision is None else FeatureCache(self.vision, arch.hidden_size)
        """The features of pictures that passes without a gradient for the tower read."""
        self.pictures: PicturePass | None = None
        """The pictures of the next passes; set by `with_pictures`."""
        self._tables: dict[bool, tuple[Tensor, Tensor]] = {}
        self.activations = "keep"
        """What the layers save for the backward pass (`activation_checkpointing.py`)."""
        self.lora: Lora | None = None
        """The config of the layers' adapters (`lora/adapters.py`); None without adapters."""
        self.exact: ExactLogprobs | None = None
        """If set, log-probs have the values of this function (`cached_forward.py`) and the gradient of the usual forward."""
        self.expert_ranks = 1
        """Number of processes that divide the experts of every layer (expert parallelism)."""
        self.shard_rows: ShardRows | None = None
        """If set, this process computes a shard of a micro-batch's rows (sequence or context parallelism)."""
        self.unloaded_from: Path | None = None
        """The directory of the weights, if the parameters are still on the meta device (`weight_files.load_deferred`)."""
        self.receive: Callable[[Tensor], Tensor] | None = None
        """If set, the input of the first layer comes from the stage before (`training/parallel/pipeline.py`)."""
        self.send: Callable[[Tensor], Tensor] | None = None
        """If set, the output of the last layer goes to the next stage, and what this returns has no values."""
        self.records_experts = False
        """Whether a paged engine on this model records the experts of every token (`router_pass.py`)."""
        self.routing: LearnerRouting | None = None
        """What the learner's routers do besides choosing; set by `set_routing`."""

    @property
    def attention_cost(self) -> float:
        """Relative cost of attention: L tokens cost L + attention_cost L^2 times the matmuls of one token."""
        arch = self.arch
        matmuls = sum(arch.attention_matrices.values()) + 3 * arch.hidden_size * arch.active_mlp_size
        return arch.num_heads * arch.head_dim / matmuls

    def set_routing(self, routing: LearnerRouting | None) -> None:
        """Set what the routers do in the learner's next passes; None lets them only choose."""
        self.routing = routing
        self.set_router_pass(routing)

    def set_router_pass(self, router_pass: RouterPass | None) -> None:
        """Set the router pass of all layers with experts."""
        for layer in self.layers:
            experts = cast(Layer, layer).experts
            if experts is not None:
                experts.router_pass = router_pass

    @property
    def head_weight(self) -> Tensor:
        """Weight of the output head, [vocab, hidden]."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, num_positions: int) -> Tensor:
        """Final hidden states [N, hidden]. `num_positions` is above all `positions`; the caller knows it without a device sync."""
        rotations: dict[bool, tuple[Tensor, Tensor]] = {}
        x = self.embedded(tokens) if self.receive is None else self.receive(tokens)
        features = None
        if self.pictures is not None and self.receive is None:
            features = self.picture_features(self.pictures)
            x = self.with_embeddings(x, features)
        for layer in cast("Iterable[Layer]", self.layers):
            is_local = self.arch.is_local(layer.index)
            if is_local not in rotations:
                rotations[is_local] = self.row_rotations(positions, num_positions, layer.index)
            x = layer(x, *rotations[is_local], attend)
            if features is not None and layer.index < len(features.deep):
                x = self.with_deep(x, features, layer.index)
        return self.norm(x) if self.send is None else self.send(x)

    def embedded(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens [N, hidden]: the input of the first layer, but for pictures."""
        x: Tensor = self.embedding(tokens)
        if not self.arch.scaled_embedding:
            return x
        # In the model's dtype, as it was trained: in bfloat16 the root of 640 is 25.25.
        return x * torch.tensor(self.arch.hidden_size**0.5, dtype=x.dtype).item()

    def with_embeddings(self, x: Tensor, features: ImageFeatures) -> Tensor:
        """Embeddings of the tokens of a pass with those of its pictures in place of their placeholders'."""
        assert self.pictures is not None
        rows, index = self.pictures.places
        return x.index_copy(0, rows, features.embeddings[index].to(x.dtype))

    def with_deep(self, x: Tensor, features: ImageFeatures, layer: int) -> Tensor:
        """Hidden states after a layer with its deep-stack features added."""
        assert self.pictures is not None
        rows, index = self.pictures.places
        return x.index_add(0, rows, features.deep[layer][index].to(x.dtype))

    def picture_features(self, pictures: PicturePass) -> ImageFeatures:
        """The features of a pass: those it has, or the tower's, from the cache if the tower gets no gradient.

        Exact mode computes every picture by itself.
        """
        if pictures.features is not None:
            return pictures.features
        assert self.vision is not None, "a text model gets no pictures"
        assert self.feature_cache is not None
        if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in self.vision.parameters()):
            return tower_features(self.vision, pictures.pictures, one_by_one=self.exact is not None)
        return self.feature_cache.features(pictures.pictures, one_by_one=self.exact is not None)

    def drop_features(self) -> None:
        """Forget cached features. Call it after a write to the tower's weights that their version counters may not see.

        Such are writes through `data`, and writes to shards that FSDP gathers later.
        """
        if self.feature_cache is not None:
            self.feature_cache.clear()

    @contextmanager
    def with_pictures(self, pictures: PicturePass | None) -> Iterator[PicturePass | None]:
        """Set the pictures of the passes within; None for text."""
        before, self.pictures = self.pictures, pictures
        try:
            yield pictures
        finally:
            self.pictures = before

    def row_rotations(self, positions: Tensor, num_positions: int, layer: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the rows of a pass, [N, 1, head_dim]: by their positions, or by the three axes of a pass with pictures."""
        pictures = self.pictures
        if pictures is None or pictures.rotation is None:
            cos, sin = self.rotations(num_positions, layer)
            return cos[positions], sin[positions]
        assert self.arch.vision is not None
        axes = self.arch.vision.rotation
        assert axes is not None
        cos, sin = self.rotations(pictures.num_positions, layer)
        return rotation_rows(cos, pictures.rotation, axes), rotation_rows(sin, pictures.rotation, axes)

    def rotations(self, num_positions: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """The rotation table of a layer, with at least `num_positions` positions."""
        weight, arch = self.embedding.weight, self.arch
        is_local = arch.is_local(layer) and arch.local_theta is not None
        table = self._tables.get(is_local)
        if (
            table is None
            or table[0].shape[0] < num_positions
            or table[0].device != weight.device
            or table[0].dtype != weight.dtype
        ):
            size = max(256, 1 << (num_positions - 1).bit_length())
            theta, scaling = (arch.local_theta, None) if is_local else (arch.rope_theta, arch.rope_scaling)
            assert theta is not None
            rotated = arch.head_dim if arch.latent is None else arch.latent.rope_dim
            inverse = inverse_frequencies(rotated, theta, scaling)
            # A norm of the queries applies their factor. Without one, queries and keys get the root of it each.
            scale = 1.0 if arch.qk_norm else arch.query_scale**0.5
            # Computed on the CPU: a GPU's sines differ in the last bit, and a model must have one table on all devices.
            still = (arch.head_dim - rotated) // 2
            cos, sin = rotation_table(size, inverse, weight.dtype, rotation_factor(scaling), still, scale)
            self._tables[is_local] = table = cos.to(weight.device), sin.to(weight.device)
        return table

    def hidden(
        self, tokens: Tensor, offsets: Tensor, at: Tensor | None = None, shared_prefix: Tensor | None = None
    ) -> Tensor:
        """Final hidden states of packed sequences, of all tokens or of those `at` [M]; shared prefixes are computed once."""
        everywhere = torch.arange(tokens.shape[0], device=tokens.device)
        return self.states(tokens, offsets, everywhere if at is None else at, shared_prefix)[0]

    def states(
        self, tokens: Tensor, offsets: Tensor, at: Tensor, shared_prefix: Tensor | None = None
    ) -> tuple[Tensor, RowShard]:
        """Final hidden states [m, hidden] of those of the tokens `at` [M] that this process computes, and the row shard."""
        lengths = offsets.diff()
        starts = torch.repeat_interleave(offsets[:-1], lengths)
        positions = torch.arange(tokens.shape[0], device=tokens.device) - starts
        rows = None if shared_prefix is None else computed_rows(offsets, shared_prefix)
        attend = PackedAttention(offsets, self.arch.windows, rows, self.arch.score_softcap)
        if rows is not None:
            tokens, positions, at = tokens[rows.own], positions[rows.own], rows.row_of[at]
        shard = UnshardedRows(at) if self.shard_rows is None else self.shard_rows(attend.lengths, rows, at)
        if self.routing is not None:
            self.routing.begin(offsets, rows, shard, self.exact is not None)
        pictures, attend_rows = self.pictures, cast(Attend, attend)
        if pictures is not None:
            if self.arch.attends_both_ways:
                blocks = packed_blocks(pictures.index.cpu().numpy(), offsets.cpu().numpy(), rows)
                attend_rows = both_ways(attend, blocks, self.arch.windows, tokens.device)
            pictures = pictures.select(lambda column: shard.rows(column if rows is None else column[rows.own]))
        with self.with_pictures(pictures):
            hidden = self(shard.rows(tokens), shard.rows(positions), shard.attention(attend_rows), int(lengths.max()))
        return hidden[shard.at], shard

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab], for a few rows at a time."""
        logits = functional.linear(hidden, self.head_weight)
        return logits if self.arch.logit_softcap is None else softcapped(logits, self.arch.logit_softcap)

    def exact_values(self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float) -> Tensor | None:
        """The log-probs of exact mode [M]; None in other modes. Call it before `states`, whose routing the backward pass reads."""
        if self.exact is None:
            return None
        if self.routing is not None:
            self.routing.begin(offsets, None, UnshardedRows(wanted), True, is_exact=True)
        return self.exact(tokens, offsets, wanted, temperature)

    def token_logprobs(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        shared_prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token | its past) at the `wanted` positions [M] (never the first of a sequence), and entropies if requested."""
        exact = self.exact_values(tokens, offsets, wanted, temperature)
        if exact is not None and not torch.is_grad_enabled() and not with_entropy:
            return exact, None
        hidden, shard = self.states(tokens, offsets, wanted - 1, shared_prefix)
        targets = shard.select_wanted(tokens[wanted])
        logp, entropy = head_logprob(
            hidden, self.head_weight, targets, temperature, with_entropy, self.arch.logit_softcap
        )
        logp, entropy = shard.gather_wanted(logp), shard.gather_wanted(entropy)
        # The exact value with the gradient of this forward: the added difference is 0.
        return (logp if exact is None else exact + (logp - logp.detach())), entropy

    @torch.no_grad()
    def distribution(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, shared_prefix: Tensor | None = None
    ) -> Distribution:
        """Next-token distributions at this process's `wanted` positions, as hidden states and output head, without gradient.

        They are those of a reference, which may share the policy's module: its routers are neither measured nor replayed.
        """
        routing = self.routing
        if routing is not None:
            self.set_routing(None)
        try:
            hidden = self.hidden(tokens, offsets, wanted - 1, shared_prefix)
        finally:
            if routing is not None:
                self.set_routing(routing)
        return Distribution(hidden, self.head_weight, softcap=self.arch.logit_softcap)

    def token_kl(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        reference: Distribution | Distributions | AlignedGroups,
        temperature: float = 1.0,
        shared_prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and the KL (or `reference.divergence`) to a reference's distributions at the `wanted` positions.

        With aligned groups, the loss of each group at its last token.
        """
        exact = self.exact_values(tokens, offsets, wanted, temperature)
        hidden, shard = self.states(tokens, offsets, wanted - 1, shared_prefix)
        states = hidden, self.head_weight, shard.select_wanted(tokens[wanted])
        if isinstance(reference, AlignedGroups):
            found = head_aligned(*states, reference, temperature, self.arch.logit_softcap)
        else:
            found = head_comparison(*states, reference, temperature, self.arch.logit_softcap)
        logp, entropy, kl = map(shard.gather_wanted, found)
        return (logp if exact is None else exact + (logp - logp.detach())), entropy, kl

    @torch.no_grad()
    def token_statistics(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        shared_prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities at the `wanted` positions, without gradient."""
        hidden, shard = self.states(tokens, offsets, wanted - 1, shared_prefix)
        targets = shard.select_wanted(tokens[wanted])
        found = head_statistics(hidden, self.head_weight, targets, temperature, self.arch.logit_softcap)
        logp, entropy, squares = map(shard.gather_wanted, found)
        exact = self.exact_values(tokens, offsets, wanted, temperature)
        return (logp if exact is None else exact), entropy, squares


def drop_features(model: nn.Module) -> None:
    """Forget the cached features of pictures of all decoders in a model."""
    for module in model.modules():
        if isinstance(module, Decoder):
            module.drop_features()


def initialise(model: Decoder, seed: int, std: float = 0.02) -> None:
    """Initialise weights from a seed: normal with `std`, residual outputs scaled by depth (GPT-2), biases 0, effective norms 1."""
    generator = torch.Generator().manual_seed(seed)
    scale = (2 * model.arch.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() >= 2:
                width = std * (scale if name.endswith(("out.weight", "down.weight")) else 1.0)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)
            else:
                shift = getattr(model.get_submodule(name.rpartition(".")[0]), "shift", 0.0)
                parameter.fill_(0.0 if name.endswith("bias") else 1.0 - shift)
