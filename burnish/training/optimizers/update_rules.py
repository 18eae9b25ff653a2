"""The optimizers: AdamW, 8-bit Adam and Muon, the function that makes one from a config, and learning-rate schedules."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Optimizer as Config
from burnish.core.pipeline_stage import stage_of
from burnish.core.sharded_tensors import local_tensor
from burnish.models.kernels.device import use_triton
from burnish.training.optimizers.base_optimizer import (
    BaseOptimizer,
    MeanOverRanks,
    ParameterPart,
    gather_whole,
    local_part,
)
from burnish.training.optimizers.offload import TensorSpec
from burnish.training.optimizers.parameter_groups import FusedMatrices, fused_matrices, hf_names, parameter_settings
from burnish.training.optimizers.stochastic_rounding import block_size, dequantise, quantise

MIN_QUANTISED_SIZE = 4096
"""Parameters with fewer elements have float32 moments, as in the paper of 8-bit Adam."""
MIN_BLOCK = 16
"""Shortest block. With shorter ones the scales would need nearly as much memory as the codes."""
MOMENTUM = 0.95
UPDATE_RMS = 0.2
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients that bring every singular value above 0.001 to between 0.68 and 1.14 in five steps."""
EMBEDDING_OR_HEAD = re.compile(r"(^|[._])(embed\w*|emb|wte|wpe|score|\w*head)($|[._])")
"""Names of embeddings and heads: matrices that do not map hidden states to hidden states."""


def make_optimizer(
    model: nn.Module, parameters: Mapping[str, Tensor], config: Config, reduce: MeanOverRanks | None = None
) -> BaseOptimizer:
    """The configured optimizer for the trained parameters of a model, under the model's names."""
    stage = stage_of(model)
    # Groups may match parameters of other stages only, so settings are made for the whole model.
    whole = parameters if stage is None else {name: stage.tensors[name].meta() for name in stage.trained_names}
    settings = parameter_settings(whole, config, hf_names(model))
    optimizer: BaseOptimizer
    if config.name == "muon":
        optimizer = Muon(parameters, config, settings, reduce, fused=fused_matrices(model))
    else:
        optimizer = {"adamw": AdamW, "adam8bit": Adam8bit}[config.name](parameters, config, settings, reduce)
    optimizer.copies = [] if stage is None else [name for name in parameters if not stage.owns(name)]
    return optimizer


# --- AdamW -------------------------------------------------------------------------------------------------------------


def fused_adamw(parts: Sequence[ParameterPart], config: Config) -> None:
    """Update parts whose state has `exp_avg` and `exp_avg_sq`; their `step` already counts this update."""
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


class AdamW(BaseOptimizer):
    """AdamW (Loshchilov and Hutter, 1711.05101), with moments in float32, or in the parameter's type if that is wider.

    The arithmetic is that of `torch.optim.AdamW(fused=True)`, bit for bit. The class itself is not used, because its first use imports
    torch's compiler, which takes 2.5 seconds.
    """

    def moments(self, name: str) -> dict[str, TensorSpec]:
        """Two moments per element."""
        return adam_moments(self, name)

    def update(self, parts: Sequence[ParameterPart]) -> None:
        """One fused call for all parts with the same learning rate and decay."""
        fused_adamw(parts, self.config)


def adam_moments(optimizer: BaseOptimizer, name: str) -> dict[str, TensorSpec]:
    """State of a parameter that AdamW updates."""
    spec = tuple(local_tensor(optimizer.parameters[name]).shape) or (1,), optimizer.wide_type(name)
    return {"exp_avg": spec, "exp_avg_sq": spec}


# --- 8-bit Adam ----------------------------------------------------------------------------------------------------------


class Adam8bit(BaseOptimizer):
    """AdamW with 8-bit moments, quantised in blocks (Dettmers et al., 2110.02861; `stochastic_rounding.py`).

    State takes 2 bytes per element and 8 per block, where AdamW needs 8 per element. The second moment is stored as its root, by
    which an update divides. An update is computed in float32 from the stored moments and the gradient; then the moments are rounded.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not any(self.is_quantised(name) for name in self.parameters):
            raise UserError(
                f"optimizer.name=adam8bit: no parameter that is trained is a matrix of {MIN_QUANTISED_SIZE} numbers or more; use adamw"
            )

    def is_quantised(self, name: str) -> bool:
        """Whether a parameter has 8-bit moments."""
        parameter = self.parameters[name]
        columns = local_tensor(parameter).shape[-1] if parameter.dim() >= 2 else 1
        return parameter.numel() >= MIN_QUANTISED_SIZE and block_size(columns) >= MIN_BLOCK

    def moments(self, name: str) -> dict[str, TensorSpec]:
        """Codes in the parameter's shape, and scales with one column per block."""
        if not self.is_quantised(name):
            return adam_moments(self, name)
        shape = tuple(local_tensor(self.parameters[name]).shape)
        scales = *shape[:-1], shape[-1] // block_size(shape[-1])
        return {
            "exp_avg": (shape, torch.uint8),
            "exp_avg_scale": (scales, torch.float32),
            "root": (shape, torch.uint8),
            "root_scale": (scales, torch.float32),
        }

    def update(self, parts: Sequence[ParameterPart]) -> None:
        """Update quantised parts one by one, and the rest in fused calls."""
        fused_adamw([part for part in parts if "root" not in part.state], self.config)
        for part in parts:
            if "root" in part.state:
                self._update_quantised(part)

    def _update_quantised(self, part: ParameterPart) -> None:
        if use_triton(part.weight) and self._update_by_kernel(part):
            return
        beta1, beta2 = self.config.betas
        gradient, state = part.gradient.float(), part.state
        mean = dequantise(state["exp_avg"], state["exp_avg_scale"], signed=True).lerp_(gradient, 1 - beta1)
        root = dequantise(state["root"], state["root_scale"], signed=False)
        root = root.square_().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2).sqrt_()
        generator = part.generator("moments")
        for key, numbers, signed in (("exp_avg", mean, True), ("root", root, False)):
            codes, scales = quantise(numbers, signed, generator)
            state[key].copy_(codes)
            state[f"{key}_scale"].copy_(scales)
        if part.decay:
            part.weight.mul_(1 - part.lr * part.decay)
        size = part.lr / (1 - beta1**part.updates)
        divisor = root.mul_(1 / math.sqrt(1 - beta2**part.updates)).add_(self.config.eps)
        part.weight.addcdiv_(mean.to(part.weight.dtype), divisor.to(part.weight.dtype), value=-size)

    def _update_by_kernel(self, part: ParameterPart) -> bool:
        """The same update in one Triton kernel; returns False if the tensors do not have the layout that it needs."""
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


# --- Muon --------------------------------------------------------------------------------------------------------------


class Muon(BaseOptimizer):
    """Muon (Jordan et al., 2024): orthogonalised momentum for the matrices of layers, AdamW for the rest.

        m <- m + (1 - 0.95) (g - m)
        u <- g + 0.95 (m - g)                                      Nesterov momentum
        w <- w - lr (0.2 sqrt(max(rows, columns)) orthogonal(u) + decay w)

    The factor gives an update the size of an AdamW update, so that learning rates and decays carry over (Moonlight, 2502.16982).
    Embedding, head, norms and biases use AdamW. `fused` lists the matrices of parameters that hold several, such as queries, keys
    and values: each is orthogonalised separately.
    """

    def __init__(self, *args: Any, fused: Mapping[str, FusedMatrices] | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.fused = dict(fused or {})
        if not any(self.is_whole(name) for name in self.parameters):
            raise UserError("optimizer.name=muon: no parameter that is trained is a matrix of a layer; use adamw")

    def is_whole(self, name: str) -> bool:
        """Whether a parameter is a matrix of a layer, which is orthogonalised as a whole."""
        parameter = self.parameters[name]
        return parameter.dim() == 2 and min(parameter.shape) > 1 and not EMBEDDING_OR_HEAD.search(name)

    def moments(self, name: str) -> dict[str, TensorSpec]:
        """One moment for the matrices of layers, where AdamW has two."""
        if not self.is_whole(name):
            return adam_moments(self, name)
        return {"momentum": (tuple(local_tensor(self.parameters[name]).shape), self.wide_type(name))}

    def update(self, parts: Sequence[ParameterPart]) -> None:
        """Update matrices of layers one by one, and the rest in fused calls."""
        fused_adamw([part for part in parts if "momentum" not in part.state], self.config)
        for part in parts:
            if "momentum" in part.state:
                self._update_matrix(part)

    def _update_matrix(self, part: ParameterPart) -> None:
        name, momentum = part.rows.name, part.state["momentum"]
        momentum.lerp_(part.gradient, 1 - MOMENTUM)
        ahead = gather_whole(part.gradient.lerp(momentum, MOMENTUM), self.parameters[name])
        fused = self.fused.get(name, FusedMatrices([len(ahead)]))
        update = fused.join([muon_update(matrix) for matrix in fused.split(ahead)])
        if part.decay:
            part.weight.mul_(1 - part.lr * part.decay)
        part.weight.add_(local_part(update, self.parameters[name]), alpha=-part.lr)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """U f(S) V^T of a matrix U S V^T, with all singular values f(S) near 1.

    The Newton-Schulz iteration uses matrix products only, in bfloat16 on a GPU: rounding is far below the spread of f(S).
    """
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix / torch.linalg.matrix_norm(matrix).clamp_min(torch.finfo(matrix.dtype).tiny)
    x = (x.T if is_tall else x).to(torch.bfloat16 if matrix.is_cuda else matrix.dtype)
    for _ in range(steps):
        square = x @ x.T
        x = torch.addmm(x, torch.addmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return (x.T if is_tall else x).to(matrix.dtype)


def muon_update(matrix: Tensor) -> Tensor:
    """The orthogonalised matrix, scaled to entries with a root mean square of `UPDATE_RMS`, the size of an AdamW update."""
    return orthogonalise(matrix).mul_(UPDATE_RMS * math.sqrt(max(matrix.shape)))


# --- Learning-rate schedules -------------------------------------------------------------------------------------------


def lr_factor(update: int, total: int, schedule: str, warmup: int | float, final: float, decay: float = 0.2) -> float:
    """Factor of the peak learning rate at an update: linear warm-up, then constant, or decay to `final` at the last of `total`.

    Warm-up over W updates has the factors 1/W, 2/W, ... 1: the first update counts, unlike in schedules that begin at 0.
    wsd (MiniCPM, 2404.06395) stays at the peak, and decays linearly during the last fraction `decay` of all updates. A single
    update after warm-up uses the peak rate.
    """
    warmup = num_warmup_updates(warmup, total)
    if update < warmup:
        return (update + 1) / warmup
    if schedule == "wsd":
        falling = max(1, round(decay * total))
        return 1 + (final - 1) * min(1.0, max(0, update - (total - falling) + 1) / falling)
    progress = min(1.0, (update - warmup) / max(1, total - warmup - 1))
    if schedule == "constant":
        return 1.0
    if schedule == "linear":
        return 1 + (final - 1) * progress
    if schedule == "cosine":
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    raise ValueError(f"unknown schedule {schedule!r}")


def num_warmup_updates(warmup: int | float, total: int) -> int:
    """Warm-up in updates; a value below 1 is a fraction of `total`."""
    return round(warmup * total) if warmup < 1 else int(warmup)


def describe_lr(optimizer: Config, update: int, total: int) -> str:
    """The learning rate of the next update in words, for a run whose length or schedule has changed."""
    scale = lr_factor(update, total, optimizer.schedule, optimizer.warmup, optimizer.final, optimizer.decay)
    return (
        f"learning rate of the next update: {optimizer.lr * scale:.3g}, that of update {update + 1} on the {optimizer.schedule} schedule of a "
        f"run of {total:,} updates with lr={optimizer.lr:g}"
    )
