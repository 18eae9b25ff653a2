"""Bytes that a forward pass saves for the backward pass: the formulas of `activation_checkpointing.py` for every device and dtype.

Tensors are counted by their storage: a view of a projection keeps all of it. In half types on a CPU torch has other kernels
than on a GPU; there the numbers are those of a GPU and approximate.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.model import Lora
from burnish.models.architecture import Architecture
from burnish.models.kernels import tree_attention
from burnish.models.kernels.cpu.c_library import c_kernels_expected
from burnish.models.kernels.cpu.cpu_ops import MAX_C_ATTENTION_LENGTH
from burnish.models.weight_layout import lora_targets

EXPLICIT_SCORES_LENGTH = 256
"""On a CPU without C kernels, sequences up to this length compute explicit scores (`kernels/attention.py`)."""


@dataclass(frozen=True)
class ActivationBytes:
    """Bytes per computed row and per token of the packing; with shared prefixes there are fewer rows than tokens.

    Only where attention expands shared rows does it save something per token.
    """

    row: int
    token: int = 0
    fixed: int = 0
    """Bytes that depend on neither."""

    def of(self, rows: int, tokens: int) -> int:
        return self.row * rows + self.token * tokens + self.fixed

    def times(self, number: int) -> ActivationBytes:
        return ActivationBytes(number * self.row, number * self.token, number * self.fixed)

    def plus(self, other: ActivationBytes) -> ActivationBytes:
        return ActivationBytes(self.row + other.row, self.token + other.token, self.fixed + other.fixed)


@dataclass(frozen=True)
class ActivationEstimate:
    """Sizes of a forward pass's saved tensors, from the architecture and the setting."""

    arch: Architecture
    element: int
    """Bytes per element."""
    on_gpu: bool
    lora: Lora | None = None
    is_shared: bool = False
    """Whether sequences share prefixes."""
    length: int = 1
    """Sequence length; explicit scores grow with it."""
    in_fp8: bool = False
    """Whether the linear layers multiply in 8 bits (`kernels/fp8_linear.py`)."""

    @property
    def is_half(self) -> bool:
        return self.element == 2

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Widths of the residual stream, all query heads, all key heads, and the MLP."""
        arch = self.arch
        return (
            arch.hidden_size,
            arch.num_heads * arch.head_dim,
            arch.num_kv_heads * arch.head_dim,
            arch.mlp_size,
        )

    def layer(self, policy: str, index: int = 0) -> ActivationBytes:
        """Bytes that one layer saves for its backward pass."""
        if policy == "keep":
            return self._keep(index)
        if policy == "selective":
            return self._selective(index)
        return ActivationBytes(self.arch.hidden_size * self.element if policy == "recompute" else 0)

    def _keep(self, index: int) -> ActivationBytes:
        h, q, k, m = self.widths
        norms = (4 if self.arch.out_norms else 2) * self._norm(h, 1)
        inputs = self._latent(index) if self.arch.latent is not None else self._input("qkv", h, index)
        if self.arch.has_experts(index):
            mlp, fixed = self._experts(index)
        else:
            mlp, fixed = self._input("gate_up", h, index) + self._input("down", m, index) + self._gate(m), 0
        attention = self._attention(index)
        raw = (q + 2 * k) * self.element  # the fused projection, of which attention reads the values
        has_raw = self._by_kernel and not self._expands
        if self.arch.qk_norm:
            has_raw |= self.is_half
            norms += self._norm(0 if self.is_half else q + k, self.arch.num_heads + self.arch.num_kv_heads)
        if self.arch.wide_qk_norm:
            has_raw |= self.is_half
            norms += self._norm(0 if self.is_half else q + k, 2)
        turned = (q + k) * self.element if self._by_kernel else 0
        rows = norms + inputs + raw * has_raw + turned + attention.row + mlp + self._adapters(index)
        return ActivationBytes(rows, attention.token, fixed)

    def _selective(self, index: int) -> ActivationBytes:
        h, q, k, m = self.widths
        attention = self._attention(index)
        mlp, fixed = self._routing() if self.arch.has_experts(index) else (0, 0)
        if self.arch.experts is not None and self.arch.has_experts(index):
            shape = self.arch.experts
            m = shape.experts_per_token * shape.expert_size + shape.shared_size
            mlp += shape.experts_per_token * self._wide  # the weights, in the order of the slots
        rows = (2 * h + q + 2 * k + 2 * m) * self.element + mlp + attention.row + self._adapters(index)
        if self._saves_quantised:
            rows += self._quantised(h, h, m)
        if self.arch.latent is not None:
            rows += self._latent(index, is_input_recomputed=True)
        return ActivationBytes(rows + (2 * self._norm(h, 1) if self.arch.out_norms else 0), attention.token, fixed)

    @property
    def _wide(self) -> int:
        """Bytes per element of scores and weights of experts."""
        return max(4, self.element)

    def _routing(self) -> tuple[int, int]:
        """Bytes that the choice of experts saves, per row and per layer."""
        shape = self.arch.experts
        assert shape is not None
        # The chosen experts, and the three index columns of a dispatch; then the scores.
        row = 4 * 8 * shape.experts_per_token + shape.num_experts * self._wide
        if shape.normalised:  # the division by the sum
            row += (shape.experts_per_token + 1) * self._wide
        return row, 4 * shape.num_experts

    def _experts(self, index: int) -> tuple[int, int]:
        """Bytes that experts save, per row and per layer: the router's input, the routing, the input of the gate and of `down`."""
        shape = self.arch.experts
        assert shape is not None
        row, fixed = self._routing()
        row += self._input("experts.gate_up", self.arch.hidden_size, index)
        row += shape.experts_per_token * (2 * shape.expert_size * self.element + self._wide)
        if shape.shared_size:
            row += self._input("down", shape.shared_size, index) + self._gate(shape.shared_size)
        return row + self._input("experts.down", shape.experts_per_token * shape.expert_size, index), fixed

    def _latent(self, index: int, is_input_recomputed: bool = False) -> int:
        """The projections of latent attention save the inputs of their products and norms, and attention's output without padding."""
        latent = self.arch.latent
        assert latent is not None
        reads_input = ("qkv.latent",) if latent.query_rank is not None else ("qkv.latent", "qkv.q_up")
        is_saved = not is_input_recomputed and any(self._input(name, 1, index) for name in reads_input)
        queries = latent.query_rank or 0
        total = self._norm(latent.rank, 1) + (self._norm(queries, 1) if queries else 0)
        total += self._input("qkv.q_up", queries, index) + self._input("qkv.kv_up", latent.rank, index)
        total += self._input("out", self.arch.num_heads * latent.value_dim, index)
        return total + self.arch.hidden_size * self.element * is_saved

    def _norm(self, width: int, scales: int) -> int:
        """A norm saves its input (in full precision its normalised input) and one scale per vector."""
        return width * self.element + scales * (4 if self.is_half else self.element)

    def _input(self, module: str, width: int, index: int) -> int:
        """A linear layer saves its input for the gradient of its weight or of its adapter."""
        trained = self.lora is None or module in self._adapted(index)
        return (self._quantised(width) if self._saves_quantised else width * self.element) if trained else 0

    @property
    def _saves_quantised(self) -> bool:
        """Whether linear layers save their inputs in 8 bits; adapters read theirs unrounded."""
        return self.in_fp8 and self.lora is None

    def _quantised(self, *widths: int) -> int:
        """Inputs in 8 bits with a float32 scale each."""
        return sum(width + 4 for width in widths)

    def _adapted(self, index: int) -> set[str]:
        return set() if self.lora is None else {target.module for target in lora_targets(self.arch, self.lora, index)}

    def _adapters(self, index: int) -> int:
        """Adapters also save A x; those of experts for the rows of the token."""
        if self.lora is None:
            return 0
        shape, targets = self.arch.experts, lora_targets(self.arch, self.lora, index)
        of_experts = sum(target.module.startswith("experts.") for target in targets)
        rows = len(targets) - of_experts
        rows += 0 if shape is None else of_experts * shape.experts_per_token // shape.num_experts
        return rows * self.lora.rank * self.element

    @property
    def _by_kernel(self) -> bool:
        """Whether attention saves views of its inputs."""
        return (
            (self.on_gpu and (self.is_half or self.arch.score_softcap is not None))
            or (self.length > EXPLICIT_SCORES_LENGTH and not self.on_gpu)
            or self._saves_own_rows
        )

    @property
    def in_c(self) -> bool:
        """Whether the C kernels of norms and gates run."""
        return not self.on_gpu and not self.is_half and c_kernels_expected()

    @property
    def attends_in_c(self) -> bool:
        """Whether the C kernel of attention runs, which also takes bfloat16."""
        return not self.on_gpu and self.length <= MAX_C_ATTENTION_LENGTH and c_kernels_expected()

    @property
    def _saves_own_rows(self) -> bool:
        """Whether attention on a CPU reads shared rows in place: in C, or with soft-capped scores (`softcap_attention.py`)."""
        if self.on_gpu:
            return False
        return self.arch.score_softcap is not None or self.attends_in_c

    @property
    def _expands(self) -> bool:
        """Whether attention expands shared rows to all tokens of the packing (`kernels/attention.py`)."""
        if not self.is_shared or self._saves_own_rows:
            return False
        if self.on_gpu:
            in_pieces = self.is_half and tree_attention.PIECES_ON_GPU and self.length >= tree_attention.MIN_DENSE_ROWS
        else:
            in_pieces = self.length > MAX_C_ATTENTION_LENGTH
        return not (in_pieces and self.arch.windows is None and self.arch.score_softcap is None)

    def _attention(self, index: int) -> ActivationBytes:
        """Bytes that attention saves besides views of rotated queries and keys and of the projection."""
        _, q, k, _ = self.widths
        heads, element = self.arch.num_heads, self.element
        out = q * element + (self._quantised(q) if self._saves_quantised else 0)
        if self._saves_own_rows:
            return ActivationBytes(out + heads * self._wide)
        if self._by_kernel:
            return ActivationBytes(out + 4 * heads, 2 * k * element if self._expands else 0)
        # The output without padding, which latent attention saves, is counted there.
        result = 0 if self.arch.latent is not None else self._input("out", q, index)
        if not self.on_gpu:
            stacked = (q + 2 * k + heads * self.length) * element
        else:  # in full precision torch repeats keys and values for every query head, and saves scores and weights
            stacked = (4 * q + 2 * heads * self.length) * element
        return ActivationBytes(result, stacked) if self._expands else ActivationBytes(result + stacked)

    def _gate(self, size: int) -> int:
        """The gated activation saves its input, and without a kernel also the activated gate."""
        by_kernel = self.in_c or (self.on_gpu and self.arch.activation == "silu")
        return (2 if by_kernel else 3) * size * self.element

    def layers(self, policy: str) -> ActivationBytes:
        """Bytes saved by all layers when the backward pass begins."""
        if policy == "offload":
            return ActivationBytes(2 * self.arch.hidden_size * self.element)  # the last inputs are still on the device
        dense, experts = self._layer_counts()
        total = ActivationBytes(0)
        for number, index in (dense, experts):
            total = total.plus(self.layer(policy, index).times(number)) if number else total
        return total

    def _layer_counts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(number, index of one of them) of the dense layers and of those with experts."""
        has_experts = [self.arch.has_experts(index) for index in range(self.arch.num_layers)]
        first = [has_experts.index(kind) if kind in has_experts else 0 for kind in (False, True)]
        return (has_experts.count(False), first[0]), (has_experts.count(True), first[1])

    def recomputed(self, policy: str) -> ActivationBytes:
        """Bytes recomputed for the one layer whose backward is running, besides what was saved."""
        if policy not in ("recompute", "offload"):
            return ActivationBytes(0)
        number, index = self._layer_counts()[1]
        kept = self._keep(index if number else 0)
        # The first norm in C saves its input, which is the layer's input and is saved already.
        is_there = policy == "recompute" and self.in_c
        return (
            ActivationBytes(kept.row - self.arch.hidden_size * self.element, kept.token, kept.fixed)
            if is_there
            else kept
        )

    def outside_layers(self) -> ActivationBytes:
        """Bytes saved outside the layers: the final norm's input, and rotations."""
        tables = 1 if self.arch.local_theta is None else 2
        return ActivationBytes(self._norm(self.arch.hidden_size, 1) + 2 * tables * self.arch.head_dim * self.element)
