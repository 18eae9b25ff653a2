"""How many bytes of a forward pass wait for the backward pass: the formulas of `models/activation_checkpointing.py` for every device and type.

Counted are tensors, by the storage they lie in: a view of a projection holds all of it. In half types on a CPU torch has
other kernels than on a GPU; there the numbers are those of a GPU, and only near.
"""

from __future__ import annotations

from dataclasses import dataclass

from burnish.config.model import Lora
from burnish.models.architecture import Architecture
from burnish.models.kernels.cpu.c_library import c_kernels_expected
from burnish.models.kernels.cpu.cpu_ops import MAX_C_ATTENTION_LENGTH
from burnish.models.weight_layout import lora_targets

EXPLICIT_SCORES_LENGTH = 256
"""Up to this length attention on a CPU has explicit scores (`ops/attention.py`), where there are no C kernels."""


@dataclass(frozen=True)
class ActivationBytes:
    """For each row that goes through the layers, and for each token of the packing: with shared beginnings there are more of those."""

    row: int
    token: int = 0

    def of(self, rows: int, tokens: int) -> int:
        return self.row * rows + self.token * tokens


@dataclass(frozen=True)
class ActivationEstimate:
    """What the tensors of a forward pass depend on, besides the number of tokens."""

    arch: Architecture
    element: int
    """Bytes of a number."""
    on_gpu: bool
    lora: Lora | None = None
    is_shared: bool = False
    """Whether sequences share their beginnings."""
    length: int = 1
    """Of a sequence: explicit scores grow with it."""

    @property
    def is_half(self) -> bool:
        return self.element == 2

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Residual stream, all query heads, all key heads, MLP."""
        arch = self.arch
        return (
            arch.hidden_size,
            arch.num_heads * arch.head_dim,
            arch.num_kv_heads * arch.head_dim,
            arch.mlp_size,
        )

    # --- a layer -------------------------------------------------------------------------------------------------------

    def layer(self, policy: str) -> ActivationBytes:
        """Kept of one layer until it is differentiated."""
        if policy == "keep":
            return self._keep()
        if policy == "selective":
            return self._selective()
        return ActivationBytes(self.arch.hidden_size * self.element if policy == "recompute" else 0)

    def _keep(self) -> ActivationBytes:
        h, q, k, m = self.widths
        norms = (4 if self.arch.out_norms else 2) * self._norm(h, 1)
        inputs = self._input("qkv", h) + self._input("gate_up", h) + self._input("down", m)
        attention = self._attention()
        raw = (q + 2 * k) * self.element  # the projection: its values are read as they are
        has_raw = self._by_kernel and not (self.is_shared and not self._attends_in_c)
        if self.arch.qk_norm:
            has_raw |= self.is_half
            norms += self._norm(0 if self.is_half else q + k, self.arch.num_heads + self.arch.num_kv_heads)
        turned = (q + k) * self.element if self._by_kernel else 0
        rows = norms + inputs + raw * has_raw + turned + attention.row + self._gate() + self._adapters()
        return ActivationBytes(rows, attention.token)

    def _selective(self) -> ActivationBytes:
        h, q, k, m = self.widths
        attention = self._attention()
        rows = (2 * h + q + 2 * k + 2 * m) * self.element + attention.row + self._adapters()
        return ActivationBytes(rows + (2 * self._norm(h, 1) if self.arch.out_norms else 0), attention.token)

    def _norm(self, width: int, scales: int) -> int:
        """A norm keeps its input or, in wide types, its result before the weight; and a scale for each vector."""
        return width * self.element + scales * (4 if self.is_half else self.element)

    def _input(self, module: str, width: int) -> int:
        """A linear layer keeps its input for the gradient of its weight or of its adapter."""
        trained = self.lora is None or module in self._adapted
        return width * self.element if trained else 0

    @property
    def _adapted(self) -> set[str]:
        return set() if self.lora is None else {target.module for target in lora_targets(self.arch, self.lora)}

    def _adapters(self) -> int:
        """What adapters keep besides: A x."""
        return 0 if self.lora is None else len(lora_targets(self.arch, self.lora)) * self.lora.rank * self.element

    @property
    def _by_kernel(self) -> bool:
        """Whether attention keeps views of what it is given."""
        return (
            (self.on_gpu and self.is_half)
            or (self.length > EXPLICIT_SCORES_LENGTH and not self.on_gpu)
            or self._attends_in_c
        )

    @property
    def in_c(self) -> bool:
        """Whether the C kernels run."""
        return not self.on_gpu and not self.is_half and c_kernels_expected()

    @property
    def _attends_in_c(self) -> bool:
        return self.in_c and self.length <= MAX_C_ATTENTION_LENGTH

    def _attention(self) -> ActivationBytes:
        """Kept by attention, besides views of rotated queries and keys and of the projection."""
        _, q, k, _ = self.widths
        heads, element = self.arch.num_heads, self.element
        out = q * element
        if self._attends_in_c:  # beginnings that sequences share are read where they are
            return ActivationBytes(out + heads * element)
        if self._by_kernel:
            return ActivationBytes(out + 4 * heads, 2 * k * element if self.is_shared else 0)
        result = out if self.lora is None or "out" in self._adapted else 0
        if not self.on_gpu:
            stacked = (q + 2 * k + heads * self.length) * element
        else:  # in a wide type torch repeats keys and values for every query head, and keeps scores and weights
            stacked = (4 * q + 2 * heads * self.length) * element
        return ActivationBytes(result, stacked) if self.is_shared else ActivationBytes(result + stacked)

    def _gate(self) -> int:
        """The gated activation keeps its input, and the activated gate where it is no kernel."""
        by_kernel = self.in_c or (self.on_gpu and self.arch.activation == "silu")
        return (2 if by_kernel else 3) * self.arch.mlp_size * self.element

    # --- all of it -----------------------------------------------------------------------------------------------------

    def layers(self, policy: str) -> ActivationBytes:
        """Kept of all layers when the backward pass begins."""
        one = self.layer(policy)
        if policy == "offload":
            one = ActivationBytes(2 * self.arch.hidden_size * self.element)  # the last inputs have not left yet
            return one
        return ActivationBytes(one.row * self.arch.num_layers, one.token * self.arch.num_layers)

    def again(self, policy: str) -> ActivationBytes:
        """Made again for the one layer that is being differentiated, besides what was kept."""
        if policy not in ("recompute", "offload"):
            return ActivationBytes(0)
        kept = self._keep()
        # In C the first norm keeps its input, which is the layer's and waits already.
        is_there = policy == "recompute" and self.in_c
        return ActivationBytes(kept.row - self.arch.hidden_size * self.element, kept.token) if is_there else kept

    def around(self) -> ActivationBytes:
        """Kept outside the layers for each row: the final norm's input, rotations."""
        tables = 1 if self.arch.local_theta is None else 2
        return ActivationBytes(self._norm(self.arch.hidden_size, 1) + 2 * tables * self.arch.head_dim * self.element)
