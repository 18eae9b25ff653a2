"""The decoder: one definition for the learner's forward and for the native engine.

Pre-norm, grouped-query attention with rotary positions, gated MLP; what families change of that are fields of
`Architecture`. It sees packed tokens [N] with their positions;
who attends to whom is the business of the `attend` callable handed in, so the same layers serve training (packed
sequences), prefill (packed, writing the cache) and decoding (one token a row against the cache). Query, key and
value projections are one matrix, as are gate and up: fewer, larger matmuls. `models/weight_files.py` maps them to
Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.architecture import Architecture
from burnish.models.kernels.attention import PackedAttention
from burnish.models.kernels.elementwise import RMSNorm, geglu, inverse_frequencies, rotate, rotation_table, swiglu
from burnish.models.kernels.logprob import Distribution, head_kl, head_logprob, head_statistics
from burnish.models.kernels.shared_prefix import (
    Attend,
    RowShard,
    ShardRows,
    SharedPrefixes,
    UnshardedRows,
    computed_rows,
)

if TYPE_CHECKING:
    from burnish.config.model import Lora

LayerPolicy = Callable[["Layer", Tensor, Tensor, Tensor, Attend], Tensor]
GATED_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": swiglu, "gelu_tanh": geglu}
ExactLogprobs = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(tokens [N], offsets [S + 1], wanted [M], temperature) -> log-probs [M]."""


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, arch: Architecture, index: int) -> None:
        super().__init__()
        self.arch, self.index = arch, index
        heads = arch.num_heads + 2 * arch.num_kv_heads
        self.gated = GATED_ACTIVATIONS[arch.activation]
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
        self.qkv = nn.Linear(arch.hidden_size, heads * arch.head_dim, bias=arch.qkv_bias)
        self.out = nn.Linear(arch.num_heads * arch.head_dim, arch.hidden_size, bias=arch.out_bias)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
        self.gate_up = nn.Linear(arch.hidden_size, 2 * arch.mlp_size, bias=arch.mlp_bias)
        self.down = nn.Linear(arch.mlp_size, arch.hidden_size, bias=arch.mlp_bias)
        if arch.qk_norm:
            self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps, arch.norm_shift)
            self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps, arch.norm_shift)
        if arch.out_norms:
            self.attention_out_norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
            self.mlp_out_norm = RMSNorm(arch.hidden_size, arch.norm_eps, arch.norm_shift)
        self.policy: LayerPolicy | None = None
        """How a forward pass with gradient is made where not all is kept (`models/activation_checkpointing.py`)."""
        self.body: LayerPolicy | None = None
        """What runs instead of the code below (`models/compiled_layers.py`)."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.policy is not None and torch.is_grad_enabled():
            return self.policy(self, x, cos, sin, attend)
        return self.run(x, cos, sin, attend)

    def run(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The forward pass, with all that the backward pass reads kept."""
        return self.plain(x, cos, sin, attend) if self.body is None else self.body(self, x, cos, sin, attend)

    def plain(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """The same as it is written."""
        qk, v = self.heads(self.qkv(self.attention_norm(x)))
        x = x + self.attended(self.mix(self.rotated(qk, cos, sin), v, attend))
        return x + self.computed(self.gated(self.gate_up(self.mlp_norm(x))))

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Of a projection [N, all heads * D]: query and key heads [N, q + k, D], value heads."""
        arch = self.arch
        qk, v = qkv.view(qkv.shape[0], -1, arch.head_dim).split(
            [arch.num_heads + arch.num_kv_heads, arch.num_kv_heads], 1
        )
        return qk, v

    def rotated(self, qk: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Query and key heads by their positions, normed before where the family does so."""
        arch = self.arch
        if arch.qk_norm:
            q, k = qk.split([arch.num_heads, arch.num_kv_heads], 1)
            q = self.q_norm(q) if arch.query_scale == 1.0 else self.q_norm(q) * arch.query_scale
            qk = torch.cat([q, self.k_norm(k)], 1)
        return rotate(qk, cos, sin)

    def mix(self, qk: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """[N, query heads * D]: attention of rotated queries and keys over the values."""
        q, k = qk.split([self.arch.num_heads, self.arch.num_kv_heads], 1)
        return attend(self.index, q, k, v).reshape(qk.shape[0], -1)

    def attended(self, mixed: Tensor) -> Tensor:
        """What attention adds to the residual stream."""
        out: Tensor = self.out(mixed)
        return self.attention_out_norm(out) if self.arch.out_norms else out

    def computed(self, activated: Tensor) -> Tensor:
        """What the MLP adds to it."""
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
        self._tables: dict[bool, tuple[Tensor, Tensor]] = {}
        self.activations = "keep"
        """What its layers keep for the backward pass (`models/activation_checkpointing.py`)."""
        self.lora: Lora | None = None
        """The adapters of its layers (`models/lora/adapters.py`), where they have any."""
        self.exact: ExactLogprobs | None = None
        """Where set, log-probs have the values it gives (`models/cached_forward.py`), and the gradient of the usual forward."""
        self.shard_rows: ShardRows | None = None
        """Where set, this process computes some rows of a micro-batch, and its peers the others."""

    @property
    def attention_cost(self) -> float:
        """What attention costs: a sequence of L tokens takes L + attention_cost L^2 times the matmuls of one token."""
        arch = self.arch
        width = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        matmuls = arch.hidden_size * (width + arch.num_heads * arch.head_dim + 3 * arch.mlp_size)
        return arch.num_heads * arch.head_dim / matmuls

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, num_positions: int) -> Tensor:
        """Final hidden states [N, hidden]. `num_positions` bounds `positions`, known to the caller without a sync."""
        turns: dict[bool, tuple[Tensor, Tensor]] = {}
        x = self.embedded(tokens)
        for index, layer in enumerate(self.layers):
            is_local = self.arch.is_local(index)
            if is_local not in turns:
                cos, sin = self.rotations(num_positions, index)
                turns[is_local] = cos[positions], sin[positions]
            x = layer(x, *turns[is_local], attend)
        return self.norm(x)

    def embedded(self, tokens: Tensor) -> Tensor:
        """[N, hidden] what goes into the first layer."""
        x: Tensor = self.embedding(tokens)
        if not self.arch.scaled_embedding:
            return x
        # In the model's own type, as it was trained: in bfloat16 the root of 640 is 25.25.
        return x * torch.tensor(self.arch.hidden_size**0.5, dtype=x.dtype).item()

    def rotations(self, num_positions: int, layer: int = 0) -> tuple[Tensor, Tensor]:
        """The rotation table of a layer for at least so many positions."""
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
            inverse = inverse_frequencies(arch.head_dim, theta, scaling)
            # Made on the CPU: a GPU's sines differ in the last bit, and one model has one table.
            cos, sin = rotation_table(size, inverse, weight.dtype)
            self._tables[is_local] = table = cos.to(weight.device), sin.to(weight.device)
        return table

    def hidden(
        self, tokens: Tensor, offsets: Tensor, at: Tensor | None = None, shared_prefix: SharedPrefixes | None = None
    ) -> Tensor:
        """Final hidden states of packed sequences, of all tokens or of those `at` [M]; beginnings in common are computed once."""
        everywhere = torch.arange(tokens.shape[0], device=tokens.device)
        return self.states(tokens, offsets, everywhere if at is None else at, shared_prefix)[0]

    def states(
        self, tokens: Tensor, offsets: Tensor, at: Tensor, shared_prefix: SharedPrefixes | None = None
    ) -> tuple[Tensor, RowShard]:
        """Final hidden states [m] of those of the tokens `at` [M] that this process computes, and which those are."""
        lengths = offsets.diff()
        starts = torch.repeat_interleave(offsets[:-1], lengths)
        positions = torch.arange(tokens.shape[0], device=tokens.device) - starts
        rows = None if shared_prefix is None else computed_rows(offsets, shared_prefix)
        attend = PackedAttention(offsets, self.arch.windows, rows)
        if rows is not None:
            tokens, positions, at = tokens[rows.own], positions[rows.own], rows.row_of[at]
        shard = UnshardedRows(at) if self.shard_rows is None else self.shard_rows(tokens.shape[0], at)
        hidden = self(shard.rows(tokens), shard.rows(positions), shard.attention(attend), int(lengths.max()))
        return hidden[shard.at], shard

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, vocab]; for a few rows at a time."""
        return functional.linear(hidden, self.head_weight)

    def token_logprobs(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = False,
        shared_prefix: SharedPrefixes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token given its past) at the `wanted` positions [M] (none may be first in its sequence), and entropies."""
        exact = self.exact(tokens, offsets, wanted, temperature) if self.exact is not None else None
        if exact is not None and not torch.is_grad_enabled() and not with_entropy:
            return exact, None
        hidden, shard = self.states(tokens, offsets, wanted - 1, shared_prefix)
        targets = shard.select_wanted(tokens[wanted])
        logp, entropy = head_logprob(hidden, self.head_weight, targets, temperature, with_entropy)
        logp, entropy = shard.gather_wanted(logp), shard.gather_wanted(entropy)
        # The exact value with this forward's gradient: what is added is 0.
        return (logp if exact is None else exact + (logp - logp.detach())), entropy

    @torch.no_grad()
    def distribution(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, shared_prefix: SharedPrefixes | None = None
    ) -> Distribution:
        """What may stand at the `wanted` positions that this process computes, as hidden states and an output head, without gradient."""
        return Distribution(self.hidden(tokens, offsets, wanted - 1, shared_prefix), self.head_weight)

    def token_kl(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        reference: Distribution,
        temperature: float = 1.0,
        shared_prefix: SharedPrefixes | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and the KL to a reference's distributions at the `wanted` positions, in one pass."""
        hidden, shard = self.states(tokens, offsets, wanted - 1, shared_prefix)
        found = head_kl(hidden, self.head_weight, shard.select_wanted(tokens[wanted]), reference, temperature)
        logp, entropy, kl = map(shard.gather_wanted, found)
        exact = self.exact(tokens, offsets, wanted, temperature) if self.exact is not None else None
        return (logp if exact is None else exact + (logp - logp.detach())), entropy, kl

    @torch.no_grad()
    def token_statistics(
        self,
        tokens: Tensor,
        offsets: Tensor,
        wanted: Tensor,
        temperature: float = 1.0,
        shared_prefix: SharedPrefixes | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities at the `wanted` positions, without gradient."""
        hidden, shard = self.states(tokens, offsets, wanted - 1, shared_prefix)
        found = head_statistics(hidden, self.head_weight, shard.select_wanted(tokens[wanted]), temperature)
        logp, entropy, squares = map(shard.gather_wanted, found)
        exact = self.exact(tokens, offsets, wanted, temperature) if self.exact is not None else logp
        return exact, entropy, squares


def initialise(model: Decoder, seed: int, std: float = 0.02) -> None:
    """Random weights from a seed: normal with `std`, residual outputs scaled by depth (GPT-2), biases 0, norms 1 in all."""
    generator = torch.Generator().manual_seed(seed)
    scale = (2 * model.arch.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 2:
                width = std * (scale if name.endswith(("out.weight", "down.weight")) else 1.0)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0 - model.arch.norm_shift)
