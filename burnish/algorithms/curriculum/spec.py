"""Slot `curriculum`: records of which prompts a step draws; and the length budgets that prompts may ask for."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from burnish.config.records import Record, Slot, choice


class NoCurriculum(Slot):
    """No curriculum: prompts come in the order of data.sampler."""

    name: Literal["none"] = "none"


class PrioritisedCurriculum(Slot):
    """Draws prompts with a low success rate more often, with replacement."""

    formula: ClassVar[str] = (
        "P(i) = (1 - s_i) / sum_j (1 - s_j), s_i the moving success rate of prompt i, 0 before its first visit; "
        "uniform when every s is 1"
    )
    paper: ClassVar[str] = "Kimi k1.5 (2501.12599), prioritised sampling"
    needs: ClassVar[tuple[str, ...]] = ("accuracy",)
    name: Literal["prioritised"] = "prioritised"
    ema: float = Field(0.5, gt=0, le=1)
    """Weight of a visit's accuracy in the moving success rate; 1 uses only the last visit."""
    warmup_steps: int = Field(0, ge=0)
    """Number of first steps in which all prompts are equally likely."""


class EasyToHardCurriculum(Slot):
    """Draws from equal buckets of prompts in turn, from the easiest to the hardest."""

    formula: ClassVar[str] = (
        "prompts in order of a difficulty column, cut into equal buckets; step s draws from bucket "
        "min(buckets - 1, floor(buckets (s - warmup_steps - 1) / steps))"
    )
    paper: ClassVar[str] = "Kimi k1.5 (2501.12599), curriculum sampling"
    name: Literal["easy_to_hard"] = "easy_to_hard"
    column: str = Field(min_length=1)
    """Data column with a number per row, larger for harder."""
    buckets: int = Field(4, ge=2)
    """Number of buckets; at most the number of prompts."""
    steps: int = Field(100, ge=1)
    """Steps after the warm-up over which the buckets are used in turn; later steps stay with the hardest."""
    warmup_steps: int = Field(0, ge=0)
    """Number of first steps in which all prompts are equally likely."""

    @model_validator(mode="after")
    def _check_steps_per_bucket(self) -> EasyToHardCurriculum:
        if self.steps < self.buckets:
            raise ValueError(
                f"easy_to_hard: steps={self.steps} leaves no step for some of the {self.buckets} buckets; raise steps"
            )
        return self


class HardOnlyCurriculum(Slot):
    """From step `start` on draws only prompts with almost no right answers so far, and anneals the learning rate."""

    formula: ClassVar[str] = (
        "from step start: prompts with right / total < below, as counted before it; "
        "lr(s) = lr (1 + (lr_final - 1) min(1, (s - start) / steps))"
    )
    paper: ClassVar[str] = "Open-Reasoner-Zero (2503.24290), annealing"
    needs: ClassVar[tuple[str, ...]] = ("accuracy",)
    name: Literal["hard_only"] = "hard_only"
    start: int = Field(ge=2)
    """First step of the annealing; the steps before it count right answers."""
    below: float = Field(4 / 64, gt=0, le=1)
    """A prompt is hard if the share of right answers before `start` is below this; a prompt that was never drawn is not hard."""
    lr_final: float = Field(0.3, gt=0, le=1)
    """Final learning rate, as a share of the rate without annealing."""
    steps: int = Field(100, ge=1)
    """Steps from `start` over which the rate falls."""


CURRICULUM_RECORDS: tuple[type[Slot], ...] = (
    NoCurriculum,
    PrioritisedCurriculum,
    EasyToHardCurriculum,
    HardOnlyCurriculum,
)
CurriculumSlot = choice(*CURRICULUM_RECORDS, plugin=False)


class LengthBudget(Record):
    """Prompts that ask for n tokens (LCPO, 2503.04697). n is drawn uniformly from low to high, once per row for the whole run."""

    low: int = Field(100, ge=1)
    """Smallest number of tokens to ask for."""
    high: int = Field(4000, ge=1)
    """Largest number of tokens to ask for."""
    text: str = " Think for {n} tokens."
    """Appended to the last user message; `{n}` becomes the number."""

    @model_validator(mode="after")
    def _check_range_and_text(self) -> LengthBudget:
        if self.low > self.high:
            raise ValueError(f"budget.low={self.low} is more than budget.high={self.high}")
        if "{n}" not in self.text:
            raise ValueError(f"budget.text {self.text!r} has no {{n}} in it, so no prompt would say its budget")
        return self
