"""The decoder: one definition for the learner's forward and for the native engine.

Pre-norm, grouped-query attention with rotary positions, gated MLP. It sees packed tokens [N] with their positions;
who attends to whom is the business of the `attend` callable handed in, so the same layers serve training (packed
sequences), prefill (packed, writing the cache) and decoding (one token a row against the cache). Query, key and
value projections are one matrix, as are gate and up: fewer, larger matmuls. `models/weights.py` maps them to
Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from burnish.models.architecture import Architecture
from burnish.models.ops.attention import PackedAttention
from burnish.models.ops.logprob import head_logprob, head_statistics
from burnish.models.ops.norm import RMSNorm
from burnish.models.ops.rope import inverse_frequencies, rotate, rotation_table
from burnish.models.ops.swiglu import swiglu

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
ExactLogprobs = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(tokens [N], offsets [S + 1], wanted [M], temperature) -> log-probs [M]."""


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, arch: Architecture, index: int) -> None:
        super().__init__()
        self.arch, self.index = arch, index
        heads = arch.num_heads + 2 * arch.num_kv_heads
        self.attention_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.qkv = nn.Linear(arch.hidden_size, heads * arch.head_dim, bias=arch.qkv_bias)
        self.out = nn.Linear(arch.num_heads * arch.head_dim, arch.hidden_size, bias=arch.out_bias)
        self.mlp_norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.gate_up = nn.Linear(arch.hidden_size, 2 * arch.mlp_size, bias=arch.mlp_bias)
        self.down = nn.Linear(arch.mlp_size, arch.hidden_size, bias=arch.mlp_bias)
        if arch.qk_norm:
            self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps)
            self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        x = x + self.out(self._attention(self.attention_norm(x), cos, sin, attend))
        return x + self.down(swiglu(self.gate_up(self.mlp_norm(x))))

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        arch = self.arch
        heads = self.qkv(x).view(x.shape[0], -1, arch.head_dim)  # [N, q + k + v heads, D]
        qk, v = heads.split([arch.num_heads + arch.num_kv_heads, arch.num_kv_heads], 1)
        if arch.qk_norm:
            q, k = qk.split([arch.num_heads, arch.num_kv_heads], 1)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], 1)
        q, k = rotate(qk, cos, sin).split([arch.num_heads, arch.num_kv_heads], 1)
        return attend(self.index, q, k, v).reshape(x.shape[0], -1)


class Decoder(nn.Module):
    """Embedding, layers, final norm, output head."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.arch = arch
        self.embedding = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(Layer(arch, i) for i in range(arch.num_layers))
        self.norm = RMSNorm(arch.hidden_size, arch.norm_eps)
        self.head = None if arch.tied else nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        self._table: tuple[Tensor, Tensor] | None = None
        self.exact: ExactLogprobs | None = None
        """Where set, log-probs have the values it gives (`models/exact.py`), and the gradient of the usual forward."""

    @property
    def head_weight(self) -> Tensor:
        """[vocab, hidden]."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend, num_positions: int) -> Tensor:
        """Final hidden states [N, hidden]. `num_positions` bounds `positions`, known to the caller without a sync."""
        cos, sin = self.rotations(num_positions)
        cos, sin = cos[positions], sin[positions]
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, attend)
        return self.norm(x)

    def rotations(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """The rotation table of at least so many positions."""
        weight = self.embedding.weight
        table = self._table
        if (
            table is None
            or table[0].shape[0] < num_positions
            or table[0].device != weight.device
            or table[0].dtype != weight.dtype
        ):
            size = max(256, 1 << (num_positions - 1).bit_length())
            inverse = inverse_frequencies(self.arch.head_dim, self.arch.rope_theta, self.arch.rope_scaling)
            # Made on the CPU: a GPU's sines differ in the last bit, and one model has one table.
            cos, sin = rotation_table(size, inverse, weight.dtype)
            self._table = table = cos.to(weight.device), sin.to(weight.device)
        return table

    def hidden(self, tokens: Tensor, offsets: Tensor) -> Tensor:
        """Final hidden states of packed sequences."""
        lengths = offsets.diff()
        starts = torch.repeat_interleave(offsets[:-1], lengths)
        positions = torch.arange(tokens.shape[0], device=tokens.device) - starts
        attend = PackedAttention(offsets, self.arch.window)
        return self(tokens, positions, attend, int(lengths.max()))

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, vocab]; for a few rows at a time."""
        return functional.linear(hidden, self.head_weight)

    def token_logprobs(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0, with_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """log p(token given its past) at the `wanted` positions [M] (none may be first in its sequence), and entropies."""
        exact = self.exact(tokens, offsets, wanted, temperature) if self.exact is not None else None
        if exact is not None and not torch.is_grad_enabled() and not with_entropy:
            return exact, None
        hidden = self.hidden(tokens, offsets)
        logp, entropy = head_logprob(hidden[wanted - 1], self.head_weight, tokens[wanted], temperature, with_entropy)
        # The exact value with this forward's gradient: what is added is 0.
        return (logp if exact is None else exact + (logp - logp.detach())), entropy

    @torch.no_grad()
    def token_statistics(
        self, tokens: Tensor, offsets: Tensor, wanted: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and sums of squared probabilities at the `wanted` positions, without gradient."""
        hidden = self.hidden(tokens, offsets)
        logp, entropy, squares = head_statistics(hidden[wanted - 1], self.head_weight, tokens[wanted], temperature)
        exact = self.exact(tokens, offsets, wanted, temperature) if self.exact is not None else logp
        return exact, entropy, squares


def initialise(model: Decoder, seed: int, std: float = 0.02) -> None:
    """Random weights from a seed: normal with `std`, residual outputs scaled by depth (GPT-2), biases 0, norms 1."""
    generator = torch.Generator().manual_seed(seed)
    scale = (2 * model.arch.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 2:
                width = std * (scale if name.endswith(("out.weight", "down.weight")) else 1.0)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * width)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
