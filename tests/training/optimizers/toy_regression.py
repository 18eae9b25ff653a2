"""Parameters, gradients and a regression for the tests of all optimizers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from burnish.config.model import Optimizer as Config
from burnish.training.optimizers.base_optimizer import BaseOptimizer
from burnish.training.optimizers.update_rules import Adam8bit, AdamW, Muon

CLASSES: dict[str, type[BaseOptimizer]] = {"adamw": AdamW, "adam8bit": Adam8bit, "muon": Muon}
VARIANTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    f"{name}-{kind}": (dtype, {"name": name, **options})
    for name in CLASSES
    for kind, dtype, options in (
        ("float32", torch.float32, {}),
        ("master", torch.bfloat16, {}),
        ("stochastic", torch.bfloat16, {"precision": "stochastic"}),
    )
}
"""Every optimizer with every way to keep weights."""

SHAPES = {"embedding.weight": (40, 128), "layers.0.down.weight": (96, 160), "layers.0.norm.weight": (96,)}
"""A table, a matrix of a layer (both large enough for moments of a byte) and a vector."""


def make(dtype: torch.dtype, options: Mapping[str, Any], seed: int = 0, device: str = "cpu") -> BaseOptimizer:
    """An optimizer of new parameters."""
    generator = torch.Generator().manual_seed(seed)
    parameters = {
        name: (0.3 * torch.randn(shape, generator=generator)).to(device, dtype).requires_grad_()
        for name, shape in SHAPES.items()
    }
    config = Config(**({"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95)} | dict(options)))
    return CLASSES[config.name](parameters, config)


def feed(optimizer: BaseOptimizer, update: int) -> None:
    """Gradients that depend on the number of the update alone."""
    generator = torch.Generator().manual_seed(1000 + update)
    for parameter in optimizer.parameters.values():
        gradient = torch.randn(parameter.shape, generator=generator) + 0.5
        parameter.grad = gradient.to(parameter.device, parameter.dtype)
    optimizer.accumulate_gradients()


def stepped(optimizer: BaseOptimizer, updates: range) -> BaseOptimizer:
    for update in updates:
        optimizer.zero_grad()
        feed(optimizer, update)
        optimizer.step(optimizer.config.lr, update)
    return optimizer


def weights(optimizer: BaseOptimizer) -> dict[str, Tensor]:
    return {name: parameter.detach().clone().cpu() for name, parameter in optimizer.parameters.items()}


def saved(optimizer: BaseOptimizer) -> dict[str, Tensor]:
    return {name: tensor.clone().cpu() for name, tensor in optimizer.tensors().items()}


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def regression(name: str, lr: float, updates: int, dtype: torch.dtype = torch.float32, **options: Any) -> list[float]:
    """The loss at each update of a linear map learnt from examples, batch by batch."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(64, 96, generator=generator) / 10
    parameter = torch.zeros(64, 96, dtype=dtype, requires_grad=True)
    optimizer = CLASSES[name]({"layers.0.out.weight": parameter}, Config(name=name, lr=lr, **options))
    losses = []
    for update in range(updates):
        x = torch.randn(32, 96, generator=generator)
        loss = (x @ (parameter.float() - target).T).square().mean()
        loss.backward()
        optimizer.accumulate_gradients()
        optimizer.step(lr, update)
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses
