"""The settings of one evaluation, with the same keys as a training recipe: `burnish eval DIR DATA reward.timeout_s=30`.

A benchmark sets its file, reward and max_tokens, the same for every model, and `SHAPE:FILE` is asked as the benchmark of this shape. A run
sets its template and dtype. For data that is no benchmark, it also sets its reward, environment, seed and max_tokens, so that a checkpoint
is evaluated the way it was trained. The command line overrides all of these. This module does not import torch.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from burnish.config.data import Data, Reward, Source, Template
from burnish.config.environment import (
    ABSOLUTE_ZERO,
    GAME_TURNS,
    SINGLE_TURN,
    Environment,
    check_game_task,
    check_turns,
    replaces_environment,
)
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.loading import Loaded, load
from burnish.config.model import Model
from burnish.config.records import Record, name_to_record
from burnish.config.schema import ValidationMode
from burnish.data.files import find_files, read_records
from burnish.data.published_datasets import BENCHMARKS, benchmark_source, get_shape, split_shape
from burnish.evaluation.strategies.spec import Strategy
from burnish.rewards.verifiers import VERIFIERS

TASK_PREFIX = "task:"
USUAL_TURNS = {**GAME_TURNS, ABSOLUTE_ZERO: 1}
"""Turns of environments that tasks of the same name need. A held-out row of absolute_zero is one task to solve."""
TASK_LIMIT = 1000
"""Number of problems of a generated task, which is endless, if no limit is given."""


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
    environment: Annotated[Environment, BeforeValidator(name_to_record)] = Environment()
    """What answers a completion; of a run, the one it was trained in."""
    reward: Reward = Reward()
    """What counts as right, where the environment does not say."""
    strategy: Strategy | None = None
    """How several samples of a question, or a search, become one answer (test-time scaling); null evaluates single samples."""
    budget: int | None = Field(None, ge=1)
    """Most tokens that the strategy samples for a question, in all branches; null means what its options ask for."""
    keep_trees: bool = False
    """Store all nodes of every search with its row, under `search.tree`."""
    max_rows: int | None = Field(None, ge=1)
    """Most sequences decoded at once; null means as many as a GPU's memory holds, and 256 on a CPU."""

    @model_validator(mode="after")
    def _combinations(self) -> EvalConfig:
        named = [key for key in ("path", "new", "lora", "adapter") if getattr(self.model, key) is not None]
        if named:
            raise ValueError(f"the model is the command's first argument; model.{named[0]} has no effect here")
        source = self.data.source
        check_game_task(self.environment, source.task, str(source.task or source.path or source.plugin))
        check_turns(self.environment)
        if self.sampling.n > 1 and self.sampling.temperature == 0:
            raise ValueError(
                f"n={self.sampling.n} samples at temperature 0 are all alike and tell no more than one; "
                "give --temperature above 0, or --n 1"
            )
        self._check_strategy()
        return self

    def _check_strategy(self) -> None:
        strategy = self.strategy
        if strategy is None:
            unused = [key for key in ("budget", "keep_trees") if getattr(self, key)]
            if unused:
                raise ValueError(f"{unused[0]} belongs to a strategy, and none is set: give --strategy NAME")
            return
        if self.environment.name != SINGLE_TURN:
            raise ValueError(
                f"strategy {strategy.name} answers a question in one turn, and environment {self.environment.name} plays episodes; leave the "
                f"strategy out, or give --environment {SINGLE_TURN}"
            )
        if self.sampling.temperature == 0 and getattr(strategy, "needs_variety", False):
            raise ValueError(
                f"strategy {strategy.name} compares several answers, and at temperature 0 (the default) they are all alike; "
                "give --temperature above 0, such as 0.7 or 1"
            )

    def prompts(self, positions: int | None) -> Data:
        """Return the data section for the prompt reader. At least one position is left for the answer."""
        longest = sys.maxsize if positions is None else positions - 1
        return Data(
            validation=[self.data.source],
            template=self.data.template,
            max_prompt_tokens=min(self.data.max_prompt_tokens or longest, longest),
            overlong_prompts=self.data.overlong_prompts,
        )


def load_settings(
    data: str, flags: dict[str, Any], overrides: Sequence[str], run: dict[str, Any], folder: Path | None = None
) -> Loaded[EvalConfig]:
    """Return the checked settings: defaults, then those of the run and the benchmark, then flags, then overrides.

    Flags are by dotted key; None means not given. `folder` holds the files of the benchmarks.
    """
    source = _source(data, folder)
    given = {key: value for key, value in flags.items() if value is not None}
    shape = _given_shape(source, overrides)
    published = data if data in BENCHMARKS else shape
    brought = {**_from_run(run, source.get("task"), published in BENCHMARKS), **_from_published(published)}
    name = _given_environment(given, overrides)
    if name is not None and brought.get("environment", {}).get("name") != name:
        brought.pop("environment", None)  # the options of another environment
    if replaces_environment(overrides):
        brought.pop("environment", None)
    usual = usual_game(data, flags, overrides, run)
    laid = {**brought, **given, **usual, "data.source": source}
    is_played = name is not None or "environment" in brought or "environment" in _keys(overrides)
    if "path" in source and not _sets_reward(laid, overrides):
        parts = _reward_of_rows(data, is_played)
        laid |= {} if parts is None else {"reward.parts": parts}
    if "task" in source:
        laid.setdefault("limit", TASK_LIMIT)
    return load(EvalConfig, None, [*(f"{key}={json.dumps(value)}" for key, value in laid.items()), *overrides])


def usual_game(data: str, flags: dict[str, Any], overrides: Sequence[str], run: dict[str, Any]) -> dict[str, Any]:
    """Return the environment of a game or another task that needs one, and its turns, where command and run leave them open; else {}."""
    task = data.removeprefix(TASK_PREFIX) if data.startswith(TASK_PREFIX) else None
    given = {key: value for key, value in flags.items() if value is not None}
    of_run = _from_run(run, task, data in BENCHMARKS).get("environment", {})
    name = _given_environment(given, overrides)
    if name is None and "environment" not in _keys(overrides):
        name = of_run.get("name") or (task if task in USUAL_TURNS else None)
    if name not in USUAL_TURNS or name == of_run.get("name"):
        return {}
    keys = {"environment.name": name, "environment.max_turns": USUAL_TURNS[name]}
    return {key: value for key, value in keys.items() if key not in given and key not in _keys(overrides)}


def _given_environment(given: dict[str, Any], overrides: Sequence[str]) -> str | None:
    """Return the name of the environment that the command sets; None if it sets none, or sets the whole section."""
    last = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == "environment.name"]
    name = last[-1] if last else given.get("environment.name")
    return None if name is None else str(name)


def _keys(overrides: Sequence[str]) -> set[str]:
    return {text.partition("=")[0] for text in overrides}


def is_given(key: str, flags: dict[str, Any], overrides: Sequence[str], run: dict[str, Any]) -> bool:
    """Whether the command or the run sets a key. A key that is not set may get a default that depends on the machine."""
    section, _, name = key.partition(".")
    named = {text.partition("=")[0] for text in overrides} | {k for k, value in flags.items() if value is not None}
    return bool({key, section} & named) or name in run.get(section, {})


def _source(data: str, folder: Path | None) -> dict[str, Any]:
    """Resolve the data argument of the command: a task, the name of a benchmark, files, or `SHAPE:FILE`."""
    if data.startswith(TASK_PREFIX):
        return {"task": data.removeprefix(TASK_PREFIX)}
    if data in BENCHMARKS:
        return benchmark_source(data, folder)
    if re.fullmatch(r"[\w-]+", data) and not Path(data).exists():
        raise unknown_name_error("benchmark", data, BENCHMARKS)
    shape, path = split_shape(data)
    split = BENCHMARKS[shape].split if shape in BENCHMARKS else None
    return {"path": path} | ({} if shape is None else {"shape": shape}) | ({} if split is None else {"split": split})


def _given_shape(source: dict[str, Any], overrides: Sequence[str]) -> str | None:
    """Return the shape of a file's rows, from `SHAPE:FILE` or from the key `data.source.shape`; None if none is given."""
    given = [text.partition("=")[2] for text in overrides if text.partition("=")[0] == "data.source.shape"]
    name = given[-1] if given else source.get("shape")
    return None if name in (None, "null") else name


def _from_published(name: str | None) -> dict[str, Any]:
    """Return what a benchmark sets. The shape of a file has the settings of its benchmark, or else its verifier alone."""
    if name is None:
        return {}
    row = BENCHMARKS.get(name)
    if row is None:
        return {"reward.parts": [{"name": get_shape(name).verifier}]}
    timeout = {} if row.timeout_s is None else {"reward.timeout_s": row.timeout_s}
    return {"reward.parts": row.reward, "sampling.max_tokens": row.max_tokens, **timeout}


def _from_run(run: dict[str, Any], task: str | None, is_benchmark: bool) -> dict[str, Any]:
    """Return the settings of a run that apply to an evaluation; its reward and environment only if they fit the data."""
    found: dict[str, Any] = {}
    template = run.get("template") or run.get("data", {}).get("template")
    if template:
        found["data.template"] = template
    for key in ("dtype", "image_pixels"):
        if run.get("model", {}).get(key) is not None:
            found[f"model.{key}"] = run["model"][key]
    if is_benchmark:
        return found
    if "seed" in run:
        found["seed"] = run["seed"]
    if "rollout" in run:
        found["sampling.max_tokens"] = run["rollout"]["max_tokens"]
        found["sampling.stop"] = run["rollout"]["stop"]
    environment = run.get("environment", {})
    name = environment.get("name", SINGLE_TURN)
    if name != SINGLE_TURN and (name not in GAME_TURNS or task == name):
        found["environment"] = environment
    parts = run.get("reward", {}).get("parts", [])
    if parts and any(part["name"] == "task" for part in parts) == (task is not None):
        found["reward"] = run["reward"]
    return found


def _sets_reward(laid: dict[str, Any], overrides: Sequence[str]) -> bool:
    keys = [*laid, *(text.partition("=")[0] for text in overrides)]
    return any(key == "reward" or key.startswith("reward.parts") for key in keys)


def _reward_of_rows(data: str, is_played: bool) -> list[dict[str, Any]] | None:
    """Return the reward for rows that name their verifier, as `burnish data prepare` writes them; else raise a `UserError`.

    An environment may give the rewards itself: with `is_played`, return None instead.
    """
    find_files(data)
    _, first = next(read_records(data), ("", {}))
    info = first.get("extra_info")
    if isinstance(info, dict) and info.get("verifier"):
        return [{"name": "row"}]
    if is_played:
        return None
    names = ", ".join(name for name in VERIFIERS if name != "task")
    raise UserError(
        f"how are answers to {data} to be judged? give --reward with one of {names}, or path/to/file.py:function or package.module:function; a file "
        f"in the form of a published data set names its verifier as SHAPE:{data} (`burnish data prepare --help` lists the shapes)"
    )
