"""The commands as functions: `burnish.train`, `sft`, `prefer` and `reward_model`.

A call builds the config that a recipe would give, with Python objects replaced by the files that hold them
(`burnish.api.python_inputs`), and runs the command's own code in this process. The run directory is the same as the
command's, and `burnish train RUN/config.yaml` continues it.
"""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from burnish.api.execution import CONFIGS, Callback, execute, listen, with_settings
from burnish.api.python_inputs import PythonInputs
from burnish.api.run_handle import Run
from burnish.config.environment import TOOLS
from burnish.config.errors import UserError
from burnish.config.loading import load, load_tree
from burnish.config.plugins import is_plugin_file
from burnish.config.recipe_names import is_recipe_name, recipe_path
from burnish.config.yaml_text import parse_yaml
from burnish.run.run import Run as OpenRun
from burnish.run.run_directory import run_name

PATH_KEYS = ("path", "adapter", "corpus")
"""Keys of models, data and tools whose values are paths."""
TOOL_TURNS = 8
"""Answers in an episode with tools, unless `environment` says otherwise."""


def train(
    *,
    model: Any,
    data: Any,
    reward: Any = None,
    algorithm: str | Mapping[str, Any] = "grpo",
    rollout: Mapping[str, Any] | None = None,
    held_out: Any = None,
    environment: Any = None,
    tools: Sequence[Any] = (),
    agent: Any = None,
    callback: Callback | None = None,
    name: str | None = None,
    fresh: bool = False,
    **settings: Any,
) -> Run:
    """Train a policy with reinforcement learning, as `burnish train` does. A run of this name that exists is continued.

    model: a model directory, a `Run`, or the section `model` of a recipe.
    data: prompts: a list of rows, a Hugging Face `Dataset`, a file, `task:NAME`, a function that returns rows, or the section `data`.
    reward: a function in the convention of TRL or verl, the name of a verifier, `burnish.reward(...)`, or a list of them.
    held_out: prompts for validation, in the forms of `data`.
    environment: a class, a name, or the section `environment`. tools: typed functions or names. agent: a function or command.
    callback: called with the metrics of each step; True ends the run after that step.
    name: the folder in `runs/`. Without one it is made of the script's name, the command and the seed.
    fresh: start again; an old run of this name is moved to NAME.1.
    settings: further sections or keys of a recipe: `training={...}`, `seed=1`, `**{"rollout.n": 8}`. Keys of `training` may also be
        given by themselves: `steps=50`.
    """
    with PythonInputs() as inputs:
        given = {"model": model, "algorithm": inputs.section(algorithm), "rollout": inputs.section(rollout)}
        given["data"] = _data_section(inputs, data, held_out)
        given["reward"] = _reward_section(inputs, reward)
        given["environment"] = _environment_section(inputs, environment, tools, agent)
        return _run_command("training", "train", inputs, given, settings, name, fresh, callback)


def sft(*, model: Any, data: Any, **settings: Any) -> Run:
    """Train on demonstrations, as `burnish sft` does. Arguments as of `train`; keys of the section `sft` may be given by themselves."""
    if "held_out" in settings:
        raise UserError(
            "burnish.sft has no argument 'held_out', because sft has no validation; measure its model with evaluate"
        )
    return _offline("sft", "sft", model, data, None, **settings)


def prefer(*, model: Any, data: Any, loss: Any = None, held_out: Any = None, **settings: Any) -> Run:
    """Train on preferences, as `burnish prefer` does, with the loss dpo, ipo, kto, simpo or orpo. Arguments as of `train`."""
    settings = settings if loss is None else {**settings, "loss": loss}
    return _offline("preference", "prefer", model, data, held_out, **settings)


def reward_model(*, model: Any, data: Any, held_out: Any = None, **settings: Any) -> Run:
    """Train a reward model on pairs of answers, or with `steps={}` on values of their steps, as `burnish reward-model` does. Arguments as of `train`."""
    return _offline("reward_model", "reward-model", model, data, held_out, **settings)


def reward(
    function: Any,
    *,
    weight: float = 1.0,
    correct_at: float | None = None,
    sources: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A part of the reward with its settings: a function or the name of a verifier. `options` are arguments of the function."""
    part = {"name": function, "weight": weight, "correct_at": correct_at, "sources": sources, "options": options}
    return {key: value for key, value in part.items() if value is not None}


def tool(function: Any, **options: Any) -> dict[str, Any]:
    """A tool with its options: a typed function, a class, or the name of a built-in tool."""
    return {"name": function, "options": options}


def load_config(path: str | Path, *overrides: str) -> dict[str, Any]:
    """The whole config of a recipe as a dictionary, to change and to pass on: `burnish.train(**burnish.load_config("recipe.yaml"))`.

    `path` is a file, or the name of a recipe of `burnish recipes`. `overrides` are those of the command line. Relative paths that exist beside the recipe become absolute.
    """
    recipe = recipe_path(str(path))
    section = _recipe_section(recipe)
    loaded = load(CONFIGS[section], recipe, list(overrides))
    config = dict(_with_absolute_paths(loaded.resolved, loaded.base))
    if section == "training":
        return config
    own = config.pop(section)
    return config | {key: own.pop(key) for key in ("data", "held_out") if own.get(key)} | {section: own}


def _recipe_section(recipe: Path) -> str:
    """The section that says which command a recipe, or one that it extends, is for."""
    seen: list[Path] = []
    while recipe.is_file() and recipe.resolve() not in seen:  # loading reports what is missing or extends itself
        seen.append(recipe.resolve())
        tree = parse_yaml(recipe.read_text(encoding="utf-8"), str(recipe))
        tree = tree if isinstance(tree, dict) else {}
        if found := [name for name in CONFIGS if name in tree]:
            return found[0]
        parent = str(tree.get("extends", ""))
        recipe = recipe_path(parent) if parent and is_recipe_name(parent) else recipe.parent / parent
    return "training"


def _with_absolute_paths(tree: Any, base: Path, key: str = "") -> Any:
    if isinstance(tree, dict):
        return {name: _with_absolute_paths(value, base, name) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_with_absolute_paths(value, base, key) for value in tree]
    if not isinstance(tree, str) or Path(tree).is_absolute():
        return tree
    if is_plugin_file(tree):
        file, _, name = tree.rpartition(":")
        return f"{base / file}:{name}" if (base / file).is_file() else tree
    is_there = key in PATH_KEYS and bool(glob.glob(str(base / tree), recursive=True))
    return str(base / tree) if is_there else tree


# --- Sections of the config -----------------------------------------------------------------------------------------------


def _data_section(inputs: PythonInputs, data: Any, held_out: Any) -> dict[str, Any]:
    is_section = isinstance(data, Mapping) and bool(data.keys() & {"train", "validation", "template"})
    section = dict(data) if is_section else {"train": data}
    if "test" in section:  # a DatasetDict
        section.setdefault("validation", section.pop("test"))
    if held_out is not None:
        if "validation" in section:
            raise UserError("the held-out prompts are given twice: as held_out and as data['validation']")
        section["validation"] = held_out
    rows = {key: inputs.sources(value, key) for key, value in section.items() if key in ("train", "validation")}
    return {**inputs.section({key: value for key, value in section.items() if key not in rows}), **rows}


def _reward_section(inputs: PythonInputs, reward: Any) -> dict[str, Any] | None:
    if reward is None:
        return None
    if isinstance(reward, Mapping) and "name" not in reward:
        return dict(inputs.section(reward))
    return {"parts": inputs.section(list(reward) if isinstance(reward, (list, tuple)) else [reward])}


def _environment_section(inputs: PythonInputs, environment: Any, tools: Sequence[Any], agent: Any) -> Any:
    section = inputs.section(environment)
    if isinstance(section, str):
        section = {"name": section}
    if agent is not None:
        section = {**(section or {}), "agent": inputs.section(agent)}
    if tools:
        section = {"name": TOOLS, "max_turns": TOOL_TURNS, **(section or {}), "tools": inputs.section(list(tools))}
    return section


def _offline(
    section: str,
    command: str,
    model: Any,
    data: Any,
    held_out: Any,
    *,
    callback: Callback | None = None,
    name: str | None = None,
    fresh: bool = False,
    **settings: Any,
) -> Run:
    with PythonInputs() as inputs:
        own = {"data": inputs.sources(data, "train")}
        if held_out is not None:
            own["held_out"] = inputs.sources(held_out, "held_out")
        given = {"model": model, section: own}
        return _run_command(section, command, inputs, given, settings, name, fresh, callback)


def _model_section(inputs: PythonInputs, model: Any) -> dict[str, Any]:
    if isinstance(model, Run):
        return {"path": str(model.best_checkpoint)}
    if isinstance(model, Mapping):
        return dict(inputs.section(model))
    if not isinstance(model, (str, Path)):
        raise UserError(
            f"model is a {type(model).__name__}; expected a directory, a Run or the section model (a Policy is given as the directory "
            "that its save returns)"
        )
    return {"path": str(model)}


def _program_name() -> str:
    """The name of the script; `notebook` if there is none."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None:
        return "notebook"
    path = Path(file)
    stem = path.parent.name if path.stem == "__main__" else path.stem
    return re.sub(r"[^\w+=.-]+", "-", stem).strip("-.") or "notebook"  # as of `my script.py`, or of <stdin>


# --- Running --------------------------------------------------------------------------------------------------------------


def _run_command(
    section: str,
    command: str,
    inputs: PythonInputs,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    name: str | None,
    fresh: bool,
    callback: Callback | None,
) -> Run:
    """Build the config of a command, run it, and return its run."""
    tree: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    tree["model"] = _model_section(inputs, tree["model"])
    tree = with_settings(tree, section, inputs.section(settings), command.replace("-", "_"))
    seed = tree.get("seed", CONFIGS[section].model_fields["seed"].default)
    given_name = name or (tree.get("run") or {}).get("name")
    tree["run"] = {**(tree.get("run") or {}), "name": run_name(given_name, f"{_program_name()}-{command}", seed)}
    loaded = load_tree(CONFIGS[section], tree, None)
    loaded = loaded._replace(base=inputs.stage(Path(loaded.resolved["run"]["directory"])))

    def on_open(run: OpenRun) -> None:
        inputs.keep(run.directory.path)
        listen(run, callback)

    return Run(execute(loaded, fresh, on_open))
