"""AdamW (Loshchilov and Hutter, 1711.05101) on torch's fused kernel.

The same arithmetic as `torch.optim.AdamW(fused=True)`, bit for bit, without its class: the first use of that imports
the whole compiler, two and a half seconds of every start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from burnish.config.optimizer import Optimizer as Config
from burnish.core.local import local
from burnish.training.optimizers.base import Optimizer
from burnish.training.optimizers.offload import Spec
from burnish.training.optimizers.parts import Part


def fused_adamw(parts: Sequence[Part], config: Config) -> None:
    """One update of parts whose state has `exp_avg` and `exp_avg_sq`; their `step` counts this update already."""
    for lr, decay in dict.fromkeys((part.lr, part.decay) for part in parts):
        same = [part for part in parts if (part.lr, part.decay) == (lr, decay)]
        torch._fused_adamw_(
            [part.weight for part in same],
            [part.gradient for part in same],
            [part.state["exp_avg"] for part in same],
            [part.state["exp_avg_sq"] for part in same],
            [],
            [part.state["step"] for part in same],
            lr=lr,
            beta1=config.betas[0],
            beta2=config.betas[1],
            weight_decay=decay,
            eps=config.eps,
            amsgrad=False,
            maximize=False,
        )


class AdamW(Optimizer):
    """Both moments in float32, or in the type of a parameter that is wider."""

    def moments(self, name: str) -> dict[str, Spec]:
        """One number of each for every number of the parameter."""
        return adam_moments(self, name)

    def update(self, parts: Sequence[Part]) -> None:
        """One call for all parts of a learning rate and decay."""
        fused_adamw(parts, self.config)


def adam_moments(optimizer: Optimizer, name: str) -> dict[str, Spec]:
    """The state of a parameter that AdamW updates."""
    spec = tuple(local(optimizer.parameters[name]).shape) or (1,), optimizer.wide_type(name)
    return {"exp_avg": spec, "exp_avg_sq": spec}
