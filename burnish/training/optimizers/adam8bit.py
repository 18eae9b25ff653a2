"""AdamW with moments of one byte each, quantised in blocks (Dettmers et al., 2110.02861; `quantise.py`).

The second moment is kept as its root, which is what an update divides by. An update is computed in float32 from the
moments as they were stored and the gradient; what is stored of them afterwards is rounded. Parameters too small to be
worth it keep float32 moments, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from burnish.config.errors import UserError
from burnish.core.sharded_tensors import local
from burnish.models.kernels.device import use_kernels
from burnish.training.optimizers.adamw import adam_moments, fused_adamw
from burnish.training.optimizers.offload import Spec
from burnish.training.optimizers.optimizer import BaseOptimizer
from burnish.training.optimizers.parameter_rows import Part
from burnish.training.optimizers.rounding import block_size, decode, encode

SMALL = 4096
"""Parameters of fewer numbers keep float32 moments."""
SHORTEST = 16
"""Rows that divide only into shorter blocks than this would need nearly as much memory for scales as for codes."""


class Adam8bit(BaseOptimizer):
    """2 bytes of moments a parameter and 8 a block, where AdamW has 8 a parameter."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not any(self.is_quantised(name) for name in self.parameters):
            raise UserError(
                f"optimizer.name=adam8bit: no parameter that is trained is a matrix of {SMALL} numbers or more; use adamw"
            )

    def is_quantised(self, name: str) -> bool:
        """Whether a parameter's moments are bytes."""
        parameter = self.parameters[name]
        columns = local(parameter).shape[-1] if parameter.dim() >= 2 else 1
        return parameter.numel() >= SMALL and block_size(columns) >= SHORTEST

    def moments(self, name: str) -> dict[str, Spec]:
        """Codes as the parameter is shaped, scales with a column for each block."""
        if not self.is_quantised(name):
            return adam_moments(self, name)
        shape = tuple(local(self.parameters[name]).shape)
        scales = *shape[:-1], shape[-1] // block_size(shape[-1])
        return {
            "exp_avg": (shape, torch.uint8),
            "exp_avg_scale": (scales, torch.float32),
            "root": (shape, torch.uint8),
            "root_scale": (scales, torch.float32),
        }

    def update(self, parts: Sequence[Part]) -> None:
        """Bytes part by part, the rest together."""
        fused_adamw([part for part in parts if "root" not in part.state], self.config)
        for part in parts:
            if "root" in part.state:
                self._update_quantised(part)

    def _update_quantised(self, part: Part) -> None:
        if use_kernels(part.weight) and self._update_by_kernel(part):
            return
        beta1, beta2 = self.config.betas
        gradient, state = part.gradient.float(), part.state
        mean = decode(state["exp_avg"], state["exp_avg_scale"], signed=True).lerp_(gradient, 1 - beta1)
        root = decode(state["root"], state["root_scale"], signed=False)
        root = root.square_().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
        generator = part.generator("moments")
        for key, numbers, signed in (("exp_avg", mean, True), ("root", root, False)):
            codes, scales = encode(numbers, signed, generator)
            state[key].copy_(codes)
            state[f"{key}_scale"].copy_(scales)
        if part.decay:
            part.weight.mul_(1 - part.lr * part.decay)
        size = part.lr / (1 - beta1**part.updates)
        divisor = root.mul_(1 / math.sqrt(1 - beta2**part.updates)).add_(self.config.eps)
        part.weight.addcdiv_(mean.to(part.weight.dtype), divisor.to(part.weight.dtype), value=-size)

    def _update_by_kernel(self, part: Part) -> bool:
        """The same in one pass over the part; False where it does not lie as the kernel reads it."""
        from burnish.training.optimizers import adam8bit_triton as kernel

        mean, root = ((part.state[key], part.state[f"{key}_scale"]) for key in ("exp_avg", "root"))
        gradient = part.gradient.contiguous()
        if not kernel.can_update(part.weight, gradient, *mean, *root):
            return False
        beta1, beta2 = self.config.betas
        size, correction = part.lr / (1 - beta1**part.updates), 1 / math.sqrt(1 - beta2**part.updates)
        keep, seed = 1 - part.lr * part.decay, part.seed("moments")
        kernel.update(part.weight, gradient, mean, root, seed, (beta1, beta2), keep, size, correction, self.config.eps)
        return True
