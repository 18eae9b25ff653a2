"""The files, model directories, plug-ins and packages that a config needs, and which of them are missing."""

from __future__ import annotations

import copy
import glob
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from burnish.algorithms.terms.spec import TeacherReference, TeachersReference
from burnish.config.data import Source
from burnish.config.errors import UserError, hub_dataset_hint
from burnish.config.extras import install_hint
from burnish.config.foreign_engines import is_vllm_in_process
from burnish.config.loading import ConfigType, Loaded, to_plain_values
from burnish.config.model_ids import ModelId, fetch_model, local_directory, model_directory, parse_model_id
from burnish.config.plugins import is_plugin_file, is_plugin_module, is_reference, plugin_source
from burnish.config.records import Record
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig, TrainConfig
from burnish.config.yaml_text import parse_yaml

TreeKey = tuple[str | int, ...]
AnyConfig = TrainConfig | SftConfig | PreferConfig | RewardModelConfig
GYM_PREFIX = "reasoning-gym/"
TOOL_PACKAGES = {"search": ("bm25s", "search"), "mcp": ("mcp", "mcp")}
ENVIRONMENT_PACKAGES = {
    "agent": ("uvicorn", "agents"),
    "deep_retrieval": ("bm25s", "search"),
    "science_world": ("scienceworld", "scienceworld"),
}
"""The module to import and its extra, by the name of the tool or environment."""


def check_files(loaded: Loaded[Any]) -> None:
    """Raise for the first file, folder or plug-in that is missing. Outputs of other stages need not exist yet."""
    for problem in missing_files(loaded):
        raise UserError(problem)


def missing_files(loaded: Loaded[Any]) -> Iterator[str]:
    """An error text for each file, folder and plug-in that is missing. Outputs of other stages are not checked."""
    yield from missing_models(loaded)
    yield from missing_inputs(loaded)


def missing_models(loaded: Loaded[Any]) -> Iterator[str]:
    """The error texts for model directories."""
    looked = f"(looked in {loaded.base} and in the working directory)"
    for key, value in model_directories(loaded.config):
        try:
            if not is_reference(value) and model_directory(value, loaded.base, with_weights=False) is None:
                yield f"{key}: no directory {value} {looked}"
        except UserError as error:
            yield f"{key}: {error}"


def missing_inputs(loaded: Loaded[Any]) -> Iterator[str]:
    """The error texts for data files and plug-ins."""
    looked = f"(looked in {loaded.base} and in the working directory)"
    for source in data_sources(loaded.config):
        path = source.path
        if path is not None and not is_reference(path) and not matching_paths(path, loaded.base, Path.is_file):
            yield f"no such file: {path} {looked}{hub_dataset_hint(path, (loaded.base, Path()))}"
    for text in plugin_names(loaded.resolved):
        if plugin_source(text, loaded.base) is None:
            yield f"plug-in {text!r}: no such {'file' if is_plugin_file(text) else 'module'} {looked}"


def model_directories(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """The model directories of a config with their keys."""
    return ((key, value) for key, _, value in _model_values(config))


def _model_values(config: Any) -> Iterator[tuple[str, TreeKey, str]]:
    """The name, the place in the tree and the value of each key that holds a model."""
    found: list[tuple[str, TreeKey, Any]] = [
        ("model.path", ("model", "path"), config.model.path),
        ("model.adapter", ("model", "adapter"), config.model.adapter),
    ]
    if isinstance(config, TrainConfig):
        algorithm = config.algorithm
        if isinstance(algorithm.kl.reference, TeacherReference):
            key = ("algorithm", "kl", "reference", "path")
            found.append((".".join(key), key, algorithm.kl.reference.path))
        if isinstance(algorithm.kl.reference, TeachersReference):
            for teacher, path in algorithm.kl.reference.directories.items():
                place = ("algorithm", "kl", "reference", "paths", teacher)
                found.append((".".join(place), place, path))
        if algorithm.process is not None:
            found.append(("algorithm.process.path", ("algorithm", "process", "path"), algorithm.process.path))
        for index, part in enumerate(config.reward.parts):
            if part.name in ("model", "judge"):
                name = f"reward.parts[{index}] ({part.name}): options.path"
                found.append((name, ("reward", "parts", index, "options", "path"), part.options.get("path")))
    return ((name, key, value) for name, key, value in found if isinstance(value, str))


def pin_model_ids(
    loaded: Loaded[ConfigType], record: Path | None, say: Callable[[str], None], with_weights: bool = True
) -> Loaded[ConfigType]:
    """Replace every hub id by `org/name@commit` and fetch its files, so that a run that continues has the same weights.

    `record` is the saved config of the run, if it exists: an id without a revision gets the commit that the run began with.
    """
    tree = copy.deepcopy(loaded.resolved)
    recorded = (
        parse_yaml(record.read_text(encoding="utf-8"), str(record)) if record is not None and record.is_file() else {}
    )
    for name, key, value in _model_values(loaded.config):
        if is_reference(value) or local_directory(value, loaded.base) is not None:
            continue
        model = parse_model_id(value, (loaded.base, Path()))
        if model is None:
            continue  # `missing_models` reports it
        begun = parse_model_id(str(_value_at(recorded, key)), ())
        if model.revision is None and begun is not None and begun.repo == model.repo:
            model = begun
        try:
            folder = fetch_model(model, with_weights, say)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
        pinned = ModelId(model.repo, folder.name)
        say(f"{name}={value}: commit {folder.name} in {folder.parent.parent}")
        _value_at(tree, key[:-1])[key[-1]] = str(pinned)
    if tree == loaded.resolved:
        return loaded
    config = type(loaded.config).model_validate(tree)
    return Loaded(config, to_plain_values(config), loaded.base)


def _value_at(tree: Any, key: TreeKey) -> Any:
    for part in key:
        try:
            tree = tree[part]
        except (LookupError, TypeError):  # an older config has another shape
            return None
    return tree


def data_sources(config: AnyConfig) -> list[Source]:
    """All data sources of a config."""
    return list(_sources(config))


def _sources(value: Any) -> Iterator[Source]:
    if isinstance(value, Source):
        yield value
    elif isinstance(value, Record):
        for _, inner in value:
            yield from _sources(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _sources(inner)


def plugin_names(resolved: dict[str, Any]) -> list[str]:
    """The plug-ins of a resolved config: `file.py:name` anywhere, `package.module:name` at the keys that take a plug-in."""
    return [text for text in _strings(resolved) if is_plugin_file(text)] + list(_plugin_modules(resolved))


def _plugin_modules(tree: Any) -> Iterator[str]:
    """`package.module:name` at the keys `plugin`, `sampler` and `name`.

    Other text, such as an option or the name of a data source, may look like a module without being one.
    """
    if isinstance(tree, dict):
        keys = ("plugin", "sampler") if "plugin" in tree else ("name", "sampler")
        for key, value in tree.items():
            if key in keys and isinstance(value, str) and is_plugin_module(value):
                yield value
            elif key not in ("options", "run"):
                yield from _plugin_modules(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _plugin_modules(value)


def plugin_files(resolved: dict[str, Any], base: Path) -> dict[str, Path]:
    """The existing files of a config's plug-ins, by path or module."""
    found = {spec.rpartition(":")[0]: plugin_source(spec, base) for spec in sorted(plugin_names(resolved))}
    return {name: file for name, file in found.items() if file is not None}


def _strings(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _strings(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _strings(value)


def matching_paths(path: str, base: Path, is_valid: Callable[[Path], bool]) -> list[Path]:
    """The valid paths of a path or glob, relative to the recipe's folder and to the working directory."""
    roots = [str(base / path), path]
    return [Path(one) for root in roots for one in (glob.glob(root, recursive=True) or [root]) if is_valid(Path(one))]


def missing_extras(config: AnyConfig) -> Iterator[str]:
    """An error text for each package that is needed and not installed, with the command that installs it."""
    for key, module, extra in dict.fromkeys(_required_packages(config)):
        if not _is_installed(module):
            hint = "pip install vllm (docs/engines.md)" if extra == "vllm" else install_hint(extra)
            yield f"{key} needs {module}, which is not installed: {hint}"


def _required_packages(config: AnyConfig) -> Iterator[tuple[str, str, str]]:
    """The key that needs a package, the module to import, and the extra."""
    for tracker in config.run.trackers:
        yield f"run.trackers={tracker.name}", tracker.module, tracker.name
    for source in data_sources(config):
        if source.task is not None and source.task.startswith(GYM_PREFIX):
            yield f"task {source.task}", "reasoning_gym", "tasks"
    if not isinstance(config, TrainConfig):
        return
    for part in config.reward.parts:
        if "math" in (part.name, part.options.get("checker")):
            yield f"reward {part.name}", "math_verify", "math"
    for tool in config.environment.tools:
        if tool.name in TOOL_PACKAGES:
            yield f"tool {tool.name}", *TOOL_PACKAGES[tool.name]
    if config.environment.name in ENVIRONMENT_PACKAGES:
        yield f"environment {config.environment.name}", *ENVIRONMENT_PACKAGES[config.environment.name]
    if config.placement.name == "ray":
        yield "placement=ray", "ray", "ray"
    if is_vllm_in_process(config):
        yield "rollout.engine=vllm", "vllm", "vllm"


def _is_installed(module: str) -> bool:
    """Whether a module can be found. A blocked one (`sys.modules[name] = None`) cannot."""
    try:
        return find_spec(module) is not None
    except ValueError:
        return False
