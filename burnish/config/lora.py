"""LoRA: which projections get an adapter, and how large."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from burnish.config.slots.base import Record

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: tuple[Projection, ...] = get_args(Projection)
"""The linear layers of a decoder layer by their Hugging Face names, in the order of the forward pass."""
Base = Literal["dtype", "nf4", "nf4-double"]


class Lora(Record):
    """Low-rank adapters (2106.09685): each target W becomes W + scale B A, with A and B trained and W frozen."""

    rank: int = Field(16, ge=1)
    """Rows of each A and columns of each B."""
    alpha: float = Field(32.0, gt=0)
    """The adapters' scale is alpha / rank."""
    targets: Literal["all-linear"] | Annotated[list[Projection], Field(min_length=1)] = "all-linear"
    """Which projections: all seven of every layer, or a list of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""
    rslora: bool = False
    """Scale by alpha / sqrt(rank) instead, so that a higher rank does not learn more slowly (rsLoRA, 2312.03732)."""
    base: Base = "dtype"
    """The frozen matrices below: in model.dtype; nf4, in 4 bits with a scale for every 64 numbers (QLoRA, 2305.14314: 4.5 bits each); or
    nf4-double, whose scales are in 8 bits (4.13). A product makes one of them plain for a moment: less memory, more time."""

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (self.rank**0.5 if self.rslora else self.rank)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The targets by name, in the order of the forward pass."""
        return PROJECTIONS if self.targets == "all-linear" else tuple(p for p in PROJECTIONS if p in self.targets)

    @model_validator(mode="after")
    def _once(self) -> Lora:
        if self.targets != "all-linear" and len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets names a projection twice: {', '.join(self.targets)}")
        return self
