"""The settings of one evaluation, with the names a training recipe uses: `burnish eval DIR DATA reward.timeout_s=30`.

A run brings its own template, reward, seed and max_tokens, so that its checkpoint is asked the way it was trained;
whatever the command says wins. No torch here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field, model_validator

from burnish.config.errors import UserError
from burnish.config.load import Loaded, load
from burnish.config.schema import Data, Model, Reward, Source, Template, ValidationMode
from burnish.config.slots import Record
from burnish.rewards.verifiers import VERIFIERS

TASK = "task:"
TASK_LIMIT = 1000
"""Problems of a generated task, which has no end, when no limit is given."""


class EvalData(Record):
    """The prompts."""

    source: Source
    """A file or a task; `data.source.options` are the task's."""
    template: Template = Template()
    """How a prompt becomes text."""
    max_prompt_tokens: int | None = Field(None, ge=1)
    """Longest prompt; null means as long as the model's positions."""
    overlong_prompts: Literal["filter", "error"] = "error"
    """What to do with longer ones: stop, or leave them out (said on stderr, because it changes what is measured)."""


class EvalConfig(Record):
    """`burnish eval`."""

    seed: int = Field(0, ge=0)
    """Which problems a task generates, and all sampling noise."""
    model: Model = Model()
    """How the model runs; its path is the command's first argument."""
    data: EvalData
    """The prompts."""
    limit: int | None = Field(None, ge=1)
    """Most prompts; null means all rows of a file and 1000 problems of a task."""
    sampling: ValidationMode = ValidationMode()
    """How completions are drawn, and how many of each prompt."""
    reward: Reward = Reward()
    """What counts as right."""
    max_rows: int = Field(256, ge=1)
    """Most sequences decoded at once."""

    @model_validator(mode="after")
    def _combinations(self) -> EvalConfig:
        named = [key for key in ("path", "new", "lora", "adapter") if getattr(self.model, key) is not None]
        if named:
            raise ValueError(f"the model is the command's first argument; model.{named[0]} has no effect here")
        if self.sampling.n > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"n={self.sampling.n} samples at temperature 0 are all alike and tell no more than one; "
                "give --temperature above 0, or --n 1"
            )
        return self

    def prompts(self, positions: int | None) -> Data:
        """The data section as the prompt reader wants it; one position at least is left to answer in."""
        room = sys.maxsize if positions is None else positions - 1
        return Data(
            validation=[self.data.source],
            template=self.data.template,
            max_prompt_tokens=min(self.data.max_prompt_tokens or room, room),
            overlong_prompts=self.data.overlong_prompts,
        )


def settings(data: str, flags: dict[str, Any], overrides: Sequence[str], run: dict[str, Any]) -> Loaded[EvalConfig]:
    """The checked settings: defaults, then the run's own, then flags (by dotted key; None is not given), then overrides."""
    source = {"task": data.removeprefix(TASK)} if data.startswith(TASK) else {"path": data}
    given = {key: value for key, value in flags.items() if value is not None}
    laid = {**_of_run(run, bool(source.get("task"))), **given, "data.source": source}
    _require_reward(data, laid, overrides)
    if "task" in source:
        laid.setdefault("limit", TASK_LIMIT)
    return load(EvalConfig, None, [*(f"{key}={json.dumps(value)}" for key, value in laid.items()), *overrides])


def _of_run(run: dict[str, Any], is_task: bool) -> dict[str, Any]:
    """What a run's config says that holds for an evaluation too; its reward only where it can score this data."""
    found: dict[str, Any] = {}
    if "seed" in run:
        found["seed"] = run["seed"]
    template = run.get("template") or run.get("data", {}).get("template")
    if template:
        found["data.template"] = template
    if "rollout" in run:
        found["sampling.max_tokens"] = run["rollout"]["max_tokens"]
        found["sampling.stop"] = run["rollout"]["stop"]
    parts = run.get("reward", {}).get("parts", [])
    if parts and any(part["name"] == "task" for part in parts) == is_task:
        found["reward"] = run["reward"]
    return found


def _require_reward(data: str, laid: dict[str, Any], overrides: Sequence[str]) -> None:
    """A task brings its checker; what counts as right in a file only its user knows."""
    keys = [*laid, *(text.partition("=")[0] for text in overrides)]
    if not data.startswith(TASK) and not any(key == "reward" or key.startswith("reward.parts") for key in keys):
        names = ", ".join(name for name in VERIFIERS if name != "task")
        raise UserError(
            f"how are answers to {data} to be judged? give --reward with one of {names}, or path/to/file.py:function"
        )
