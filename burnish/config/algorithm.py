"""An algorithm as a value: one choice per slot, and the table of presets by name."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from burnish.config.errors import unknown
from burnish.config.slots import (
    AdvantageSlot,
    Aggregation,
    AggregationSlot,
    ClipSlot,
    Entropy,
    FilterSlot,
    Kl,
    LossSlot,
    Plugin,
    RatioSlot,
    Record,
)
from burnish.config.slots.advantages import GrpoAdvantage
from burnish.config.slots.policy import PpoClip, SurrogateLoss, TokenRatio


class Algorithm(Record):
    """One choice per slot. `algorithm: grpo` names a preset; its slots can be overridden one by one."""

    preset: str = "grpo"
    """The row of the table this started from."""
    advantage: AdvantageSlot = GrpoAdvantage()
    """How rewards become advantages."""
    ratio: RatioSlot = TokenRatio()
    """The importance ratio between the current policy and the one that sampled."""
    clip: ClipSlot = PpoClip()
    """What bounds the ratio."""
    loss: LossSlot = SurrogateLoss()
    """What is minimised at each token."""
    aggregation: AggregationSlot = Aggregation(name="seq-mean-token-mean")
    """How tokens are averaged: token-mean, token-sum, seq-mean-token-sum, seq-mean-token-mean, seq-mean-token-sum-norm."""
    kl: Kl = Kl()
    """Staying near a reference."""
    entropy: Entropy = Entropy()
    """Entropy bonus."""
    filters: list[FilterSlot] = Field(default_factory=list)
    """Group and sample filters, in order."""

    @model_validator(mode="after")
    def _combinations(self) -> Algorithm:
        uses_kl = self.kl.loss.coef > 0 or self.kl.reward.coef > 0
        if uses_kl and self.kl.reference == "none":
            raise ValueError("kl has a coefficient above 0 but kl.reference is none: set algorithm.kl.reference=frozen")
        if not uses_kl and self.kl.reference != "none":
            raise ValueError(
                "kl.reference is loaded but both kl coefficients are 0: set algorithm.kl.loss.coef or algorithm.kl.reference=none"
            )
        if self.kl.reward.estimator.endswith("+"):
            raise ValueError(
                "kl.reward has no gradient, so a '+' estimator (which changes only the gradient) does nothing there"
            )
        if isinstance(self.loss, Plugin) and (self.ratio.name != "none" or self.clip.name != "none"):
            raise ValueError(
                "a loss of your own makes its ratio and clip itself: set algorithm.ratio=none and algorithm.clip=none"
            )
        if self.loss.name == "logprob" and (self.ratio.name != "none" or self.clip.name != "none"):
            raise ValueError("loss logprob uses no ratio: set algorithm.ratio=none and algorithm.clip=none")
        if self.loss.name == "surrogate" and self.ratio.name == "none":
            raise ValueError(
                "loss surrogate is ratio times advantage, but ratio is none: set algorithm.ratio=token or algorithm.loss=logprob"
            )
        if self.aggregation.horizon is not None and self.aggregation.name != "seq-mean-token-sum-norm":
            raise ValueError(f"aggregation.horizon only divides seq-mean-token-sum-norm, not {self.aggregation.name}")
        if self.kl.reward.coef > 0 and self.advantage.name == "reinforce" and self.advantage.gamma == 0:
            raise ValueError("gamma 0 discards every reward after the next token; with KL in the reward use gamma > 0")
        return self


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantage": {"name": "grpo", "std": "group"},
        "clip": {"name": "ppo", "low": 0.2, "high": 0.2},
        "aggregation": {"name": "seq-mean-token-mean"},
        "kl": {"loss": {"estimator": "k3", "coef": 0.001}, "reference": "frozen"},
    },
    "dr_grpo": {
        "advantage": {"name": "grpo", "std": "none"},
        "clip": {"name": "ppo", "low": 0.2, "high": 0.2},
        "aggregation": {"name": "seq-mean-token-sum-norm"},
    },
    "reinforce": {
        "advantage": {"name": "reinforce"},
        "ratio": {"name": "none"},
        "clip": {"name": "none"},
        "loss": {"name": "logprob"},
        "aggregation": {"name": "seq-mean-token-sum"},
    },
}
"""Each preset as the slots that differ from the defaults above."""

PAPERS = {
    "grpo": "DeepSeekMath, Shao et al. 2024 (2402.03300)",
    "dr_grpo": "Understanding R1-Zero-like training, Liu et al. 2025 (2503.20783)",
    "reinforce": "Williams 1992",
}


def preset(name: str) -> dict[str, Any]:
    """A preset's slots as a plain dictionary; the error for an unknown name lists the table."""
    if name not in PRESETS:
        raise unknown("algorithm", name, PRESETS)
    return {"preset": name, **PRESETS[name]}
