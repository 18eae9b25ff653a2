"""The keys of `burnish stages`: several commands in a row, each starting from what earlier ones made.

What a stage makes is named in later ones by `stage:NAME` (the model of a training stage or a merge, the file of a data command, the
completions of an evaluation), and a training stage's run folder by `run:NAME`. `stage:base` is the model that all begins with.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, model_validator

from burnish.config.data import Template
from burnish.config.errors import nearest
from burnish.config.model import Model, check_trainable
from burnish.config.references import references
from burnish.config.schema import Run
from burnish.config.slots import Record

Command = Literal[
    "train", "sft", "prefer", "reward-model", "eval", "merge", "export", "data prepare", "data decontaminate",
    "data filter", "data bucket", "data impact", "data reject", "data pairs",
]  # fmt: skip
TRAINED = ("train", "sft", "prefer", "reward-model")
"""Commands whose stages are runs of their own, with a config."""
POLICIES = ("train", "sft", "prefer", "merge", "export")
"""Commands that make a model a later stage can start from."""
STARTING = (*TRAINED, "eval")
"""Commands that begin with a model."""
BASE, PREVIOUS = "base", "previous"
NAME = re.compile(r"[A-Za-z][\w-]*")


class Stage(Record):
    """One command and what it begins with."""

    command: Command
    """What the stage does, as `burnish COMMAND` would."""
    start: str | None = None
    """The model to begin with: base, previous (the last stage before it that made a policy, or base), or a stage's name. null is previous."""
    take: Literal["best", "last"] = "best"
    """Which checkpoint of a training stage is its model: the best by its run.best_by (the last where nothing was measured), or the last."""
    recipe: str | None = None
    """A YAML file of the command to begin the config with, relative to this one (training stages)."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the command's own config (training stages); seed, run, model and template are those of the whole unless it says otherwise."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of other commands by their names on the command line, and what they read: `data` of eval, `models` of merge, `source` of data."""

    @model_validator(mode="after")
    def _fits(self) -> Stage:
        is_trained = self.command in TRAINED
        if self.options and is_trained:
            raise ValueError(f"options are for commands without a config; {self.command} takes config")
        if (self.config or self.recipe is not None) and not is_trained:
            raise ValueError(f"{self.command} has no config: give options")
        if self.take != "best" and not is_trained:
            raise ValueError(f"take=last has no effect: {self.command} makes one thing")
        if self.start is not None and self.command not in STARTING:
            raise ValueError(f"start has no effect on {self.command}; what it reads stands in options")
        return self


class StagesConfig(Record):
    """`burnish stages`."""

    seed: int = Field(0, ge=0)
    """All randomness of all stages follows from it."""
    run: Run = Run()
    """Where the stages live (a folder each in `directory`/`name`) and what each keeps."""
    model: Model = Model()
    """The base: the model that the first stage begins with. A new one is made once, before the first stage."""
    template: Template = Template()
    """How prompts become text, in every stage."""
    measure: dict[str, Any] = Field(default_factory=dict)
    """Options of an evaluation (data, limit, n, ...) made of the base and of every policy on the way; empty makes none."""
    stages: dict[str, Stage] = Field(min_length=1)
    """The stages by name, in order."""

    @model_validator(mode="after")
    def _combinations(self) -> StagesConfig:
        check_trainable(self.model)
        if self.measure and "data" not in self.measure:
            raise ValueError("measure needs data: a benchmark, a file, or task:NAME")
        for name in self.stages:
            if not NAME.fullmatch(name) or name in (BASE, PREVIOUS, "lock"):
                raise ValueError(
                    f"a stage cannot be called {name!r}: use letters, digits, _ and -, not {BASE}, {PREVIOUS} or lock"
                )
            self._check_references(name)
        return self

    def _check_references(self, name: str) -> None:
        stage, before = self.stages[name], list(self.stages)[: list(self.stages).index(name)]
        if stage.start not in (None, BASE, PREVIOUS):
            where = f"stages.{name}.start={stage.start}"
            if stage.start not in before:
                raise ValueError(f"{where}: {_why_not(str(stage.start), name, before, list(self.stages))}")
            if self.stages[str(stage.start)].command not in POLICIES:
                raise ValueError(f"{where}: {self.stages[str(stage.start)].command} makes no policy to begin with")
        for kind, other in references([stage.config, stage.options]):
            if other == BASE and kind == "stage":
                continue
            where = f"stages.{name}: {kind}:{other}"
            if other not in before:
                raise ValueError(f"{where}: {_why_not(other, name, before, list(self.stages))}")
            if kind == "run" and self.stages[other].command not in TRAINED:
                raise ValueError(
                    f"{where}: {self.stages[other].command} has no run folder; what it makes is stage:{other}"
                )

    def start_of(self, name: str) -> str | None:
        """The stage whose model a stage begins with, or `base`; None for a command that begins with none."""
        stage = self.stages[name]
        if stage.command not in STARTING:
            return None
        if stage.start not in (None, PREVIOUS):
            return stage.start
        before = list(self.stages)[: list(self.stages).index(name)]
        policies = [other for other in before if self.stages[other].command in POLICIES]
        return policies[-1] if policies else BASE


def _why_not(other: str, name: str, before: list[str], names: list[str]) -> str:
    """Why a stage cannot be referred to."""
    if other == name:
        return "a stage cannot begin with what it makes itself"
    if other in names:
        return f"stage {other} comes later"
    return f"there is no stage {other}{nearest(other, [BASE, *before])}"
