"""The config of `burnish stages`: several commands in a row, each using the outputs of earlier ones.

Later stages refer to the output of a stage by `stage:NAME`: the model of a training stage or a merge, the file of a data command, the
completions of an evaluation. `run:NAME` is the run folder of a training stage. `stage:base` is the initial model.

The config of a training stage is its recipe, then the settings common to all stages, then its own keys. The path of its model is
`stage:NAME` until that stage has run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from burnish.config.data import Template
from burnish.config.errors import UserError, did_you_mean
from burnish.config.loading import Loaded, load, load_tree, merge_trees, read_recipe, with_defaults, with_plugin_folder
from burnish.config.model import Model, check_trainable
from burnish.config.placement import Parallel
from burnish.config.plugins import find_references, is_reference
from burnish.config.recipe_names import is_recipe_name, recipe_path
from burnish.config.records import Record, root_node
from burnish.config.requirements import AnyConfig
from burnish.config.schema import PreferConfig, RewardModelConfig, Run, SftConfig, TrainConfig
from burnish.config.shrink import (
    DEMONSTRATION_SOURCE,
    MAX_NEW_TOKENS,
    MAX_SAMPLES,
    PLAIN_TEMPLATE,
    SHRUNK_SUFFIX,
    SORT_DIGITS_OPTIONS,
    TINY_MODEL,
    WARM_START,
    shrink,
)

Command = Literal[
    "train", "sft", "prefer", "reward-model", "eval", "merge", "export", "data prepare", "data decontaminate",
    "data filter", "data bucket", "data impact", "data reject", "data pairs", "data questions",
]  # fmt: skip
TRAINING_COMMANDS = ("train", "sft", "prefer", "reward-model")
"""Commands whose stages are training runs with a config."""
POLICY_COMMANDS = ("train", "sft", "prefer", "merge", "export")
"""Commands that produce a policy, from which a later stage can start."""
COMMANDS_WITH_MODEL = (*TRAINING_COMMANDS, "eval")
"""Commands that start from a model."""
BASE_STAGE, PREVIOUS_STAGE = "base", "previous"
STAGE_NAME = re.compile(r"[A-Za-z][\w-]*")
CONFIG_TYPES: dict[str, type[Record]] = {
    "train": TrainConfig,
    "sft": SftConfig,
    "prefer": PreferConfig,
    "reward-model": RewardModelConfig,
}
MODEL_SOURCE_KEYS = ("path", "new", "adapter")
"""Keys of `model` that select the model."""
EVALUATION_PROMPTS = 32
"""Maximum number of prompts of a shrunk evaluation."""
SHRUNK_SFT = {**WARM_START, "updates": 60}
"""Keys of a shrunk sft stage. A later stage may need right answers sampled from it, and after two updates there would be none."""
DATA_OPTIONS = ("reward", "data_dir", "prompt_key", "answer_key", "template", "system", "best_by", "dtype", "device")
"""Options of an evaluation that depend on its data or its model."""
FILE_OPTIONS = ("source", "scores", "prompts", "guesses", "against", "run")
"""Options of other commands that name files or folders."""


class Stage(Record):
    """One command, the model that it starts from, and its settings."""

    command: Command
    """The command of the stage, as in `burnish COMMAND`."""
    start: str | None = None
    """The model to start from: base, the name of a stage, or previous (the last stage before this one that made a policy, or base). null:
    previous."""
    take: Literal["best", "last"] = "best"
    """The checkpoint of a training stage that is its output: the best by run.best_by (the last if there was no validation), or the last."""
    recipe: str | None = None
    """A recipe of the command to start the config from: a file relative to this one, or a name of `burnish recipes` (training stages)."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Keys of the command's config (training stages). seed, run, model and template default to the ones given for all stages."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of other commands by their command-line names, and their inputs: `data` of eval, `models` of merge, `source` of data."""

    @model_validator(mode="after")
    def _check_keys(self) -> Stage:
        is_trained = self.command in TRAINING_COMMANDS
        if self.options and is_trained:
            raise ValueError(f"options are for commands without a config; {self.command} takes config")
        if (self.config or self.recipe is not None) and not is_trained:
            raise ValueError(f"{self.command} has no config: give options")
        if self.take != "best" and not is_trained:
            raise ValueError(f"take=last has no effect: {self.command} has a single output")
        if self.start is not None and self.command not in COMMANDS_WITH_MODEL:
            raise ValueError(f"start has no effect on {self.command}; its inputs are given in options")
        return self


class StagesConfig(Record):
    """`burnish stages`."""

    seed: int = Field(0, ge=0)
    """Seed of all randomness of all stages."""
    run: Run = Run()
    """The folder of the stages (one each in `directory`/`name`), checkpoints and trackers."""
    model: Model = Model()
    """The base: the model that the first stage starts from. A new one is made once, before the first stage."""
    template: Template = Template()
    """How prompts become text, in every stage."""
    measure: dict[str, Any] = Field(default_factory=dict)
    """Options of the evaluation (data, limit, n, ...) that measures the base and every policy that a stage makes. Empty: no evaluation."""
    stages: dict[str, Stage] = Field(min_length=1)
    """The stages by name, in order."""

    @model_validator(mode="after")
    def _combinations(self) -> StagesConfig:
        check_trainable(self.model)
        if self.measure and "data" not in self.measure:
            raise ValueError("measure needs data: a benchmark, a file, or task:NAME")
        for name in self.stages:
            if not STAGE_NAME.fullmatch(name) or name in (BASE_STAGE, PREVIOUS_STAGE, "lock"):
                raise ValueError(
                    f"a stage cannot be called {name!r}: use letters, digits, _ and -, not {BASE_STAGE}, {PREVIOUS_STAGE} or lock"
                )
            self._check_references(name)
        return self

    def _check_references(self, name: str) -> None:
        stage, earlier = self.stages[name], self._stages_before(name)
        if stage.start not in (None, BASE_STAGE, PREVIOUS_STAGE):
            where = f"stages.{name}.start={stage.start}"
            if stage.start not in earlier:
                raise ValueError(f"{where}: {_reference_problem(str(stage.start), name, earlier, list(self.stages))}")
            if self.stages[str(stage.start)].command not in POLICY_COMMANDS:
                raise ValueError(f"{where}: {self.stages[str(stage.start)].command} makes no policy to start from")
        for kind, other in find_references([stage.config, stage.options]):
            if other == BASE_STAGE and kind == "stage":
                continue
            where = f"stages.{name}: {kind}:{other}"
            if other not in earlier:
                raise ValueError(f"{where}: {_reference_problem(other, name, earlier, list(self.stages))}")
            if kind == "run" and self.stages[other].command not in TRAINING_COMMANDS:
                raise ValueError(
                    f"{where}: {self.stages[other].command} has no run folder; its output is stage:{other}"
                )

    def start_of(self, name: str) -> str | None:
        """The stage whose model a stage starts from, or `base`; None for a command without a model."""
        stage = self.stages[name]
        if stage.command not in COMMANDS_WITH_MODEL:
            return None
        if stage.start not in (None, PREVIOUS_STAGE):
            return stage.start
        policies = [other for other in self._stages_before(name) if self.stages[other].command in POLICY_COMMANDS]
        return policies[-1] if policies else BASE_STAGE

    def _stages_before(self, name: str) -> list[str]:
        return list(self.stages)[: list(self.stages).index(name)]


def _reference_problem(other: str, name: str, earlier: list[str], names: list[str]) -> str:
    """Why stage `name` cannot refer to stage `other`."""
    if other == name:
        return "a stage cannot use its own output"
    if other in names:
        return f"stage {other} comes later"
    return f"there is no stage {other}{did_you_mean(other, [BASE_STAGE, *earlier])}"


# --- configs of training stages -----------------------------------------------------------------------------------------------


def load_stage_configs(whole: Loaded[StagesConfig], path: Path, folder: Path) -> dict[str, Loaded[Any]]:
    """The configs of all training stages, by name, with their runs in `folder`. Errors name the stage."""
    found: dict[str, Loaded[Any]] = {}
    for name, stage in whole.config.stages.items():
        if stage.command not in TRAINING_COMMANDS:
            continue
        try:
            kind = CONFIG_TYPES[stage.command]
            tree = stage_tree(whole, name, _adapter_stages(found))
            tree["run"] |= {"directory": str(folder), "name": name}
            found[name] = load_tree(kind, tree, path, written=stage_tree(whole, name, set(), with_default_values=False))
            _refuse_parallel(found[name].config)
        except UserError as error:
            raise UserError(f"stage {name}: {error}") from error
    return found


def _refuse_parallel(config: AnyConfig) -> None:
    if isinstance(config, SftConfig | PreferConfig) and config.parallel != Parallel():
        raise UserError("a stage is one process, so parallel has no effect: run this command with torchrun instead")


def stage_tree(
    whole: Loaded[StagesConfig], name: str, adapter_stages: set[str], with_default_values: bool = True
) -> dict[str, Any]:
    """The config tree of one training stage. `adapter_stages` are the earlier stages whose models are adapters."""
    config, stage = whole.config, whole.config.stages[name]
    kind = CONFIG_TYPES[stage.command]
    own = [key for key in MODEL_SOURCE_KEYS if key in stage.config.get("model", {})]
    if own:
        raise UserError(f"config.model.{own[0]}: the model is selected by start, and by the model common to all stages")
    tree: dict[str, Any] = {}
    if stage.recipe is not None:
        path = _stage_recipe(stage.recipe, whole.base).resolve()
        tree = read_recipe(kind, path, with_default_values=with_default_values)
        tree = with_plugin_folder(with_defaults(kind, tree) if with_default_values else tree, path.parent, whole.base)
        tree["model"] = {key: value for key, value in tree.get("model", {}).items() if key not in MODEL_SOURCE_KEYS}
    common = {
        "seed": config.seed,
        "run": config.run.model_dump(exclude_unset=True),
        "model": _start_model(config, config.start_of(name) or BASE_STAGE, adapter_stages),
    }
    template = config.template.model_dump(exclude_unset=True)
    common |= {"data": {"template": template}} if stage.command == "train" else {"template": template}
    shape = root_node(kind)
    merged: dict[str, Any] = merge_trees(shape, merge_trees(shape, tree, common), stage.config)
    return merged


def _stage_recipe(text: str, base: Path) -> Path:
    if is_recipe_name(text):
        return recipe_path(text)
    return next((path for path in (base / text, Path(text)) if path.is_file()), base / text)


def _start_model(config: StagesConfig, start: str, adapter_stages: set[str]) -> dict[str, Any]:
    given = config.model.model_dump(exclude_unset=True)
    if start == BASE_STAGE and config.model.new is None:
        return given
    kept = {key: value for key, value in given.items() if key not in MODEL_SOURCE_KEYS}
    if start in adapter_stages:
        return {**{key: value for key, value in kept.items() if key != "lora"}, "adapter": f"stage:{start}"}
    return {**kept, "path": f"stage:{start}"}


def _adapter_stages(loaded: dict[str, Loaded[Any]]) -> set[str]:
    return {name for name, one in loaded.items() if one.config.model.lora or one.config.model.adapter}


# --- burnish stages --shrink: every stage becomes a job of seconds, on the outputs of the shrunk stages before it ---------------


def load_shrunk_stages(path: Path, overrides: Sequence[str] = ()) -> tuple[Loaded[StagesConfig], list[str]]:
    """A small version of a recipe of stages, and the changes."""
    whole = load(StagesConfig, path)
    loaded = load_stage_configs(whole, path, Path())
    tree, notes = dict(whole.resolved), list[str]()
    for name, stage in whole.config.stages.items():
        if name in loaded:
            small, changes = _shrink_training(loaded[name].resolved)
            own: dict[str, Any] = {"config": small, "recipe": None}
            notes += [f"{name}: {change}" for change in changes]
        else:
            own = {"options": _shrink_options(name, stage.command, stage.options)}
            notes += [f"{name}: {key}: {stage.options.get(key)} -> {own['options'].get(key)}" for key in stage.options]
        tree["stages"] = {**tree["stages"], name: {**tree["stages"][name], **own}}
    run: dict[str, Any] = {"trackers": [], "threads": whole.config.run.threads}
    run |= {"name": whole.config.run.name.removesuffix(SHRUNK_SUFFIX) + SHRUNK_SUFFIX} if whole.config.run.name else {}
    tree |= {
        "model": TINY_MODEL,
        "template": PLAIN_TEMPLATE,
        "run": run,
        "measure": _shrink_measure(whole.config.measure),
    }
    return load_tree(StagesConfig, tree, path, overrides), [note for note in notes if _is_change(note)]


def _shrink_training(values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    small, changes = shrink(values)
    if "sft" in small and small["sft"]["data"] == [DEMONSTRATION_SOURCE]:
        small["sft"] = {
            **small["sft"],
            **SHRUNK_SFT,
            "optimizer": {**small["sft"]["optimizer"], **WARM_START["optimizer"]},
        }
        changes = [change for change in changes if not change.startswith(("sft.updates:", "sft.batch_size:"))]
        changes += [f"sft.{key}: {values['sft'][key]} -> {small['sft'][key]}" for key in ("updates", "batch_size")]
    kept = {key: value for key, value in small.items() if key not in ("model", "seed")}
    kept["run"] = {key: value for key, value in small["run"].items() if key not in ("directory", "name", "threads")}
    return kept, [change for change in changes if not change.startswith(("model:", "run.name:"))]


def _shrink_options(name: str, command: str, options: dict[str, Any]) -> dict[str, Any]:
    if command == "eval":
        return _shrink_evaluation(options, "train")
    if command == "merge":
        models = [model if is_reference(model) else f"stage:{BASE_STAGE}" for model in options.get("models", [])]
        return {**options, "models": models}
    outside = {key: value for key, value in options.items() if key in FILE_OPTIONS and not is_reference(value)}
    if "prompts" in outside:  # prompts of the built-in task are plain text, which completions contain
        del outside["prompts"]
        options = {key: value for key, value in options.items() if key != "prompts"}
    if outside:
        key, value = next(iter(outside.items()))
        raise UserError(
            f"stage {name} cannot be shrunk: {command} reads {key}={value}, which is not the output of a stage"
        )
    return {key: value for key, value in options.items() if key != "language"}  # digits belong to no language


def _shrink_evaluation(options: dict[str, Any], split: str) -> dict[str, Any]:
    """An evaluation on the built-in task; `split` is train if its completions may be trained on."""
    if is_reference(options.get("data")):
        return options
    small = {key: value for key, value in options.items() if key not in DATA_OPTIONS}
    settings = {"data.source.options": SORT_DIGITS_OPTIONS, "data.source.split": split}
    small |= {
        "data": "task:sort_digits",
        "limit": EVALUATION_PROMPTS,
        "max_tokens": MAX_NEW_TOKENS,
        "settings": settings,
    }
    return small | ({"n": min(options["n"], MAX_SAMPLES)} if "n" in options else {})


def _shrink_measure(options: dict[str, Any]) -> dict[str, Any]:
    return _shrink_evaluation(options, "test") if options else {}


def _is_change(note: str) -> bool:
    old, _, new = note.partition(" -> ")
    return not old.endswith(f": {new}")
