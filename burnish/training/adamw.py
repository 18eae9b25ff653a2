"""AdamW (Loshchilov and Hutter, 1711.05101) on torch's fused kernel.

The same arithmetic as `torch.optim.AdamW(fused=True)`, bit for bit, without its class: the first use of that imports
the whole compiler, two and a half seconds of every start. Parameters in a half type have a master copy and moments in
float32: an update of 1e-6 is far below what bfloat16 can add to a weight, and would be lost every time. Their
gradients add up in float32 too: in bfloat16 the eighth micro-batch would be rounded to the sum's last bit or two.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from burnish.config.optimizer import Optimizer

HALF = (torch.bfloat16, torch.float16)


class AdamW:
    """Moments of named parameters, made when a parameter has its first gradient."""

    def __init__(self, parameters: Mapping[str, Tensor], config: Optimizer) -> None:
        self.parameters, self.config = dict(parameters), config
        self.state: dict[str, dict[str, Tensor]] = {}
        self.sums: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.sums = {}
        for parameter in self.parameters.values():
            parameter.grad = None

    def absorb(self) -> None:
        """Move the gradients of half-type parameters into float32 sums; to be called after each backward."""
        for name, parameter in self.parameters.items():
            if parameter.grad is not None and parameter.dtype in HALF:
                if name in self.sums:
                    self.sums[name] += parameter.grad
                else:
                    self.sums[name] = parameter.grad.float()
                parameter.grad = None

    def gradients(self) -> dict[str, Tensor]:
        """The gradient of every parameter that has one."""
        return self.sums | {name: p.grad for name, p in self.parameters.items() if p.grad is not None}

    @torch.no_grad()
    def clip(self, limit: float) -> float:
        """Scale all gradients together down to a norm of at most `limit`; returns the norm they had."""
        gradients = list(self.gradients().values())
        norm = nn.utils.get_total_norm(gradients, foreach=True)
        torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return float(norm)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every parameter that has a gradient.

        Norm scales and biases are not decayed: shrinking them is not regularisation.
        """
        gradients = self.gradients()
        for decay, wanted in ((self.config.weight_decay, True), (0.0, False)):
            named = [(n, p) for n, p in self.parameters.items() if n in gradients and (p.dim() >= 2) == wanted]
            if not named:
                continue
            states = [self._state(name, parameter) for name, parameter in named]
            masters = [s.get("master", p) for s, (_, p) in zip(states, named, strict=True)]
            steps = [s["step"] for s in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                masters,
                [gradients[n].to(m.dtype) for m, (n, _) in zip(masters, named, strict=True)],
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [],
                steps,
                lr=lr,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                weight_decay=decay,
                eps=self.config.eps,
                amsgrad=False,
                maximize=False,
            )
            for master, (_, parameter) in zip(masters, named, strict=True):
                if master is not parameter:
                    parameter.copy_(master)

    def reset(self) -> None:
        """Forget the moments. Master copies stay: they are the weights, more exactly than the parameters."""
        for state in self.state.values():
            for key, tensor in state.items():
                if key != "master":
                    tensor.zero_()

    def _state(self, name: str, parameter: Tensor) -> dict[str, Tensor]:
        if name not in self.state:
            is_half = parameter.dtype in HALF
            wide = parameter.detach().float() if is_half else parameter
            self.state[name] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(wide),
                "exp_avg_sq": torch.zeros_like(wide),
                **({"master": wide} if is_half else {}),
            }
        return self.state[name]

    def tensors(self) -> dict[str, Tensor]:
        """The whole state by flat names, for a file."""
        return {f"{key}/{name}": t for name, state in self.state.items() for key, t in state.items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `tensors`."""
        self.state = {}
        for flat, tensor in tensors.items():
            key, name = flat.split("/", 1)
            self.state.setdefault(name, {})[key] = tensor.to(self.parameters[name].device)
