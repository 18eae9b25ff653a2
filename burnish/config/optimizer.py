"""The optimizer and its schedule, for every learner: the policy, the critic, a supervised stage."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from burnish.config.slots.base import Record

FALLING = 0.2
"""Default of `decay`, which only wsd reads."""


class ParameterGroup(Record):
    """Parameters that are trained differently from the rest."""

    match: str = Field(min_length=1)
    """A regular expression found anywhere in the name of a parameter, Hugging Face's or ours (`embed`, `layers\\.0\\.`, `lora_b`)."""
    lr_scale: float = Field(1.0, ge=0)
    """Their learning rate, as a factor of lr; 0 keeps them as they are."""
    weight_decay: float | None = Field(None, ge=0)
    """Their weight decay, that of norms and biases too; null keeps the optimizer's, which is for matrices."""

    @model_validator(mode="after")
    def _changes(self) -> ParameterGroup:
        try:
            re.compile(self.match)
        except re.error as error:
            raise ValueError(f"match {self.match!r} is not a regular expression: {error}") from error
        if self.lr_scale == 1 and self.weight_decay is None:
            raise ValueError(f"the group of {self.match!r} changes nothing: give lr_scale or weight_decay")
        return self


class Optimizer(Record):
    """The optimizer and its schedule."""

    name: Literal["adamw", "adam8bit", "muon"] = "adamw"
    """adamw; adam8bit (moments of a byte each); muon (orthogonalised momentum for the matrices of layers, adamw for the rest)."""
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam's decay rates."""
    eps: float = Field(1e-8, gt=0)
    """Adam's denominator constant."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay of matrices."""
    clip_norm: float = Field(1.0, gt=0)
    """Global gradient norm limit."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the decay after warm-up; wsd (warm-up, stable, decay) stays at the peak and falls linearly at the end."""
    warmup: int | float = Field(0, ge=0)
    """Linear warm-up: a number of updates, or a fraction of all (below 1)."""
    decay: float = Field(FALLING, gt=0, le=1)
    """Fraction of all updates, the last ones, in which wsd falls."""
    final: float = Field(0.0, ge=0, le=1)
    """Where linear, cosine and wsd end, as a fraction of lr."""
    precision: Literal["master", "stochastic"] = "master"
    """How a bfloat16 model keeps updates too small for it: a float32 master copy, or stochastic rounding and no copy."""
    offload: bool = False
    """Keep moments and master copies in host memory; an update brings them through the GPU piece by piece."""
    groups: list[ParameterGroup] = Field(default_factory=list)
    """Parameters with a learning rate or a weight decay of their own; the first group that matches counts."""

    @model_validator(mode="after")
    def _acts(self) -> Optimizer:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} are decay rates: each from 0 up to, but not including, 1")
        if self.schedule == "constant" and self.final:
            raise ValueError("final has no effect on a constant schedule: set schedule to linear, cosine or wsd")
        if self.schedule != "wsd" and self.decay != FALLING:
            raise ValueError(f"decay has no effect on schedule {self.schedule}: it is the falling part of wsd")
        if isinstance(self.warmup, float) and self.warmup >= 1:
            raise ValueError(f"warmup {self.warmup} is neither a whole number of updates nor a fraction below 1")
        if self.schedule == "wsd" and 0 < self.warmup < 1 and self.warmup + self.decay > 1:
            raise ValueError(
                f"warmup {self.warmup} and decay {self.decay} are more than the whole run: nothing is left of wsd's peak"
            )
        return self


def check_optimizer_fits(optimizer: Optimizer, where: str, dtype: str, device: str) -> None:
    """Refuse what would have no effect on a model of this type on this device."""
    if optimizer.precision == "stochastic" and dtype != "bfloat16":
        raise ValueError(
            f"{where}.precision=stochastic rounds weights to bfloat16, but model.dtype={dtype} needs no rounding: "
            "set model.dtype=bfloat16 or leave precision at master"
        )
    if optimizer.offload and device == "cpu":
        raise ValueError(f"{where}.offload has no effect with model.device=cpu: host memory is all there is")
