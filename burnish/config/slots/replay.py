"""Section `replay`: groups of earlier steps that are learnt from again."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from burnish.config.slots.base import Record


class Replay(Record):
    """Groups of earlier steps are learnt from again beside the new ones (PF-PPO, 2409.06957; SPO-tree, 2505.23564)."""

    share: float = Field(0.5, gt=0)
    """Old groups in a step, as a multiple of rollout.prompts, rounded up; fewer while there are not so many."""
    uses: int = Field(2, ge=2)
    """Steps in whose loss a group may be, the first one included."""
    max_age: int = Field(4, ge=1)
    """Most steps between the weights that wrote a group's oldest token and those that are trained."""
    capacity: int = Field(1024, ge=1)
    """Most groups held, in memory and in every checkpoint; the oldest leave first."""
    pick: Literal["random", "newest", "oldest"] = "random"
    """Which of them come back in a step: any, those nearest to the policy of now, or those that will be too old first."""

    @model_validator(mode="after")
    def _all_act(self) -> Replay:
        if self.uses > self.max_age + 1:
            raise ValueError(
                f"replay.uses={self.uses} cannot be reached: a group comes back once a step, and after max_age={self.max_age} steps never"
            )
        return self
