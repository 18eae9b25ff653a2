"""Keys of the reward: its parts, and the processes they are computed in."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from burnish.config.lists import listed, named
from burnish.config.slots import Record


class RewardPart(Record):
    """One term of the reward."""

    name: str
    """exact, number, choice, math, format, think_format, language, rule_scores, task, qa, ifeval, code, row, model, judge, `path/to/file.py:function` or `package.module:function`."""
    weight: float = 1.0
    """Its weight in the sum."""
    correct_at: float | None = None
    """Values of this or more count as correct: accuracy, pass@k and filters by accuracy go by it. null: 1 for the built-in verifiers; a function says it
    itself (it returns True or False, or a dict with `acc`), and any other function, `model` and a judge's score are graded: no answer counts as correct."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the verifier, such as `pattern` for format."""
    sources: list[str] | None = None
    """Only for rows of these data sources; null means all."""


RewardParts = Annotated[
    list[Annotated[RewardPart, BeforeValidator(named)]],
    BeforeValidator(listed),
]


class Reward(Record):
    """What is rewarded, and the processes it is computed in."""

    parts: RewardParts = Field(default_factory=lambda: [RewardPart(name="task")])
    """Terms of the weighted sum: a name, a record, or a list of them. `task` asks the generated task's own checker."""
    timeout_s: float = Field(10.0, gt=0)
    """Deadline of one call; past it the process is killed and the answer counts as incorrect."""
    workers: int = Field(2, ge=1)
    """Worker processes."""
    max_answer_chars: int = Field(20_000, ge=1)
    """Longer completions are cut to their last characters before verifying."""
    memory_gib: float = Field(2.0, gt=0)
    """Address-space limit of a verifier process; of a program of the `code` reward with all it starts."""
    sandbox: Literal["namespaces", "unsafe"] = "namespaces"
    """Where programs of the `code` reward run: namespaces (no files, no network), or unsafe: as you, with only the limits on resources."""

    @model_validator(mode="after")
    def _sandbox_has_an_effect(self) -> Reward:
        if self.sandbox == "unsafe" and not any(part.name in ("code", "row") for part in self.parts):
            raise ValueError("reward.sandbox=unsafe has no effect: no part of the reward runs programs (code, row)")
        return self
