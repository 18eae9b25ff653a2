"""The plan of `burnish stages`: the settings of every stage, checked before the first one starts.

Training stages are checked as configs, other stages by the parsers of their commands. Outputs of earlier stages need not exist yet;
everything else must.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from burnish.cli.data_commands import COMMANDS as DATA_COMMANDS
from burnish.cli.main import COMMANDS, Command, load_command
from burnish.config.data import RewardPart, Source
from burnish.config.errors import UserError
from burnish.config.loading import Loaded
from burnish.config.model_ids import model_directory
from burnish.config.plugins import find_references, is_plugin, is_plugin_file, is_reference
from burnish.config.requirements import check_files, data_sources, missing_extras
from burnish.config.schema import TrainConfig
from burnish.config.stages import BASE_STAGE, POLICY_COMMANDS, StagesConfig, load_stage_configs
from burnish.models.model_support import unsupported
from burnish.rewards.reward_parts import check_parts
from burnish.run.run_directory import flatten_keys, may_change, run_name
from burnish.trainers.stages import PlannedStage

POSITIONAL_OPTIONS = {
    "eval": ("data",),
    "merge": ("models",),
    "export": ("source",),
    "data prepare": ("name", "source"),
    "data impact": ("run",),
}
"""Positional arguments of commands whose only input is not `source`."""
PATH_OPTIONS = ("data", "models", "source", "run", "prompts", "scores", "guesses", "against", "template")
"""Options that name files or folders."""
RESERVED_OPTIONS = ("out", "force", "compare")
"""Options that `burnish stages` sets itself."""
MEASURED_SUFFIX = ".measured"
IMPORT_TIMEOUT_S = 120.0  # a user's module may load a model before it is runnable
EXIT_TIMEOUT_S = 1.0  # for the child to exit after its answer


@dataclass(frozen=True)
class RunnableStage:
    """A planned stage with what is needed to run it."""

    planned: PlannedStage
    loaded: Loaded[Any] | None = None
    """The config of a training stage."""
    command: Command | None = None
    args: argparse.Namespace | None = None
    """The functions and the options of any other command."""


@dataclass(frozen=True)
class Plan:
    """All stages of a recipe, in order."""

    config: StagesConfig
    base: Path
    """The folder of the recipe."""
    folder: Path
    """The folder that has a folder for each stage."""
    stages: dict[str, RunnableStage] = field(default_factory=dict)

    @property
    def planned(self) -> list[PlannedStage]:
        return [runnable.planned for runnable in self.stages.values()]

    def base_output(self) -> dict[str, str]:
        """The path of `stage:base`, if the base is not made by a stage."""
        model = self.config.model
        given = model.adapter or model.path
        if given is None:
            return {}
        path = model_directory(given, self.base, with_weights=False)
        if path is None:
            raise UserError(f"model: no directory {given} (looked in {self.base} and in the working directory)")
        return {f"stage:{BASE_STAGE}": str(path)}

    def task_sources(self) -> list[Source]:
        """The generated tasks of all stages, for the tokenizer of a new model."""
        found = [
            source
            for runnable in self.stages.values()
            if runnable.loaded
            for source in data_sources(runnable.loaded.config)
        ]
        words = [
            str(word)
            for runnable in self.stages.values()
            if runnable.args
            for word in getattr(runnable.args, "words", [])
        ]
        found += [Source(task=word.removeprefix("task:")) for word in words if word.startswith("task:")]
        return [Source(task=task) for task in dict.fromkeys(source.task for source in found if source.task)]


def stages_folder(config: StagesConfig, name: str) -> Path:
    """The folder that has a folder for each stage."""
    return Path(config.run.directory) / run_name(config.run.name, name, config.seed)


def make_plan(whole: Loaded[StagesConfig], path: Path, name: str) -> Plan:
    """Check every stage of a recipe; raise for the first that cannot run."""
    config = whole.config
    folder = stages_folder(config, name)
    plan = Plan(config, whole.base, folder)
    plan.base_output()
    if config.model.new is not None:
        plan.stages[BASE_STAGE] = _base_stage(plan)
    plan.stages.update(_evaluation_stages(plan, BASE_STAGE))
    loaded = load_stage_configs(whole, path, folder)
    for stage in config.stages:
        try:
            plan.stages[stage] = (
                _training_stage(plan, stage, loaded[stage]) if stage in loaded else _option_stage(plan, stage)
            )
        except UserError as error:
            text = str(error)
            raise UserError(text if text.startswith(f"stage {stage}") else f"stage {stage}: {text}") from error
        if config.stages[stage].command in POLICY_COMMANDS:
            plan.stages.update(_evaluation_stages(plan, stage))
    if config.model.new is not None:
        plan.stages[BASE_STAGE] = _base_stage(plan)  # again, now that all tasks are known
    return plan


def _base_stage(plan: Plan) -> RunnableStage:
    """The stage that makes the new base model."""
    tasks = [source.task for source in plan.task_sources()]
    asked = {"seed": plan.config.seed, "tasks": tasks, **flatten_keys({"model": plan.config.model.model_dump()})}
    return RunnableStage(PlannedStage(BASE_STAGE, "new", None, (), asked))


def _training_stage(plan: Plan, name: str, loaded: Loaded[Any]) -> RunnableStage:
    stage, start = plan.config.stages[name], plan.config.start_of(name)
    check_files(loaded)
    for problem in missing_extras(loaded.config):
        raise UserError(problem)
    # The models of all stages have the architecture of the base.
    for problem in unsupported(loaded.config, loaded.base, plan.config.model.path):
        raise UserError(problem)
    if isinstance(loaded.config, TrainConfig):
        _check_rewards(loaded.config.reward.parts, loaded.base)
    asked = {key: value for key, value in flatten_keys(loaded.resolved).items() if not may_change(key)}
    planned = PlannedStage(name, stage.command, start, _needs(plan, [loaded.resolved]), {**asked, "take": stage.take})
    return RunnableStage(planned, loaded)


def _check_rewards(parts: list[RewardPart], base: Path) -> None:
    """Refuse reward parts that a run would refuse. Plug-ins are imported in a child, because they may import torch or start threads."""
    if not any(is_plugin(part.name) for part in parts):
        check_parts(parts, base)
        return
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_send_reward_error, args=(parts, base, theirs))
    child.start()
    theirs.close()
    names = ", ".join(part.name for part in parts if is_plugin(part.name))
    try:
        if ours.poll(IMPORT_TIMEOUT_S):
            wrong = ours.recv()
        else:
            wrong = f"reward.parts: the import of {names} took more than {IMPORT_TIMEOUT_S:g} s: check what the file does on import"
    except EOFError:
        wrong = f"reward.parts: the process that imported {names} ended without a result: check what the file does on import"
    finally:
        child.join(EXIT_TIMEOUT_S)
        child.kill()  # a thread of the plug-in may keep it alive
        child.join(EXIT_TIMEOUT_S)
    if wrong is not None:
        raise UserError(wrong)


def _send_reward_error(parts: list[RewardPart], base: Path, to: Connection) -> None:
    try:
        check_parts(parts, base)
    except UserError as error:
        to.send(str(error))
    else:
        to.send(None)


def _option_stage(plan: Plan, name: str) -> RunnableStage:
    stage = plan.config.stages[name]
    return _parse_options(plan, name, stage.command, stage.options, plan.config.start_of(name))


def _evaluation_stages(plan: Plan, name: str) -> Iterator[tuple[str, RunnableStage]]:
    """The evaluation of a stage's model, if `measure` is given."""
    if plan.config.measure:
        try:
            yield (
                name + MEASURED_SUFFIX,
                _parse_options(plan, name + MEASURED_SUFFIX, "eval", plan.config.measure, name, of=name),
            )
        except UserError as error:
            raise UserError(f"measure: {error}") from error


def _needs(plan: Plan, trees: list[Any]) -> tuple[str, ...]:
    named = dict.fromkeys(other for _, other in find_references(trees))
    return tuple(other for other in named if other in plan.stages)


# --- commands without a config -----------------------------------------------------------------------------------------------


def _parse_options(
    plan: Plan, name: str, command: str, options: dict[str, Any], start: str | None, of: str | None = None
) -> RunnableStage:
    """A stage of a command that has options instead of a config."""
    table, word = (DATA_COMMANDS, command.removeprefix("data ")) if command.startswith("data ") else (COMMANDS, command)
    functions = load_command(table[word][0])
    parser = _StageParser(prog=f"stage {name}", allow_abbrev=False, add_help=False)
    functions.add_arguments(parser)
    options = {key: _resolve_path_option(key, value, plan.base) for key, value in options.items()}
    own = [key for key in options if key.replace("-", "_") in RESERVED_OPTIONS]
    if own:
        raise UserError(f"options.{own[0]} cannot be set in a stage: its output is written to the folder of the stage")
    args = parser.parse_intermixed_args(_command_line(plan, name, command, options, start))
    args.is_command = False
    if command == "eval":
        _check_eval(args)
    for key, value in vars(args).items():
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, Path) and key != "out" and not is_reference(str(path)) and not path.exists():
                raise UserError(
                    f"{key}: no such file or folder: {path} (looked in {plan.base} and in the working directory)"
                )
    plain = {key: _to_plain(value) for key, value in vars(args).items() if key not in ("out", "force", "is_command")}
    return RunnableStage(PlannedStage(name, command, start, _needs(plan, [plain]), plain, of), None, functions, args)


class _StageParser(argparse.ArgumentParser):
    """A parser that raises `UserError` instead of exiting."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _command_line(plan: Plan, name: str, command: str, options: dict[str, Any], start: str | None) -> list[str]:
    """The command-line arguments of a stage."""
    reads = POSITIONAL_OPTIONS.get(command, ("source",))
    for key in reads:
        if key not in options:
            raise UserError(f"{command} needs options.{key}: its input")
    read = [str(word) for key in reads for word in _as_list(options[key])]
    out = str(output_path(plan.folder, name, command))
    if command == "eval":
        config = plan.config
        given = {"seed": config.seed, "dtype": config.model.dtype, "device": config.model.device} | options
        template = config.template.model_dump(exclude_unset=True)
        settings = ({"data.template": template} if template else {}) | options.get("settings", {})
        words = [f"stage:{start}", *read, *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
        return [*words, "--out", out, *_option_words(given, (*reads, "settings"))]
    return [*([out, *read] if command == "merge" else [*read, out]), *_option_words(options, reads)]


def _option_words(options: dict[str, Any], besides: tuple[str, ...]) -> list[str]:
    words: list[str] = []
    for key, value in options.items():
        if key in besides or value is None or value is False:
            continue
        flag = "--" + key.replace("_", "-")
        if key in ("against", "reward"):  # options that may be repeated
            words += [word for one in _as_list(value) for word in (flag, str(one))]
        else:
            words += [flag, *([] if value is True else map(str, _as_list(value)))]
    return words


def output_path(folder: Path, name: str, command: str) -> Path:
    """The output path of a stage without a config."""
    if command in ("merge", "export", "new"):
        return folder / name / "model"
    return folder / name / f"{name}{'.parquet' if command == 'data prepare' else '.jsonl'}"


def _check_eval(args: argparse.Namespace) -> None:
    """Refuse what `burnish eval` would refuse, as far as it can be checked before its model and data exist."""
    from burnish.cli.eval import option_values, split_words
    from burnish.evaluation.settings import load_settings

    _, data, overrides = split_words(args.words)
    if len(data) > 1:
        raise UserError(f"an eval stage takes one data set, but there are {len(data)}: make a stage for each")
    if not is_reference(data[0]):
        load_settings(data[0], option_values(args), overrides, {}, args.data_dir)


def _resolve_path_option(key: str, value: Any, base: Path) -> Any:
    """An option with paths relative to the recipe's folder, if they exist there."""
    if isinstance(value, list):
        return [_resolve_path_option(key, one, base) for one in value]
    if not isinstance(value, str) or is_reference(value):
        return value
    if is_plugin_file(value):
        file, _, attribute = value.rpartition(":")
        return f"{base / file}:{attribute}" if (base / file).is_file() else value
    is_there = (base / value).is_file() or (key in ("models", "source", "run") and (base / value).is_dir())
    return str(base / value) if key in PATH_OPTIONS and is_there else value


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _to_plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_to_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value
