"""The config of each training stage: its recipe, the settings of the whole, its own; and what of the files it names must be there.

A stage that begins with what another made has `stage:NAME` as its model's path until that is there.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.load import Loaded, load_tree, read
from burnish.config.parallel import Parallel
from burnish.config.plugins import is_plugin
from burnish.config.preference import PreferConfig
from burnish.config.references import is_reference
from burnish.config.reward_model import RewardModelConfig
from burnish.config.schema import SftConfig, TrainConfig
from burnish.config.shape import root_shape
from burnish.config.slots import Record
from burnish.config.slots.terms import TeacherReference
from burnish.config.stages import BASE, TRAINED, StagesConfig
from burnish.config.tree import complete, merge

AnyConfig = TrainConfig | SftConfig | PreferConfig | RewardModelConfig
KINDS: dict[str, type[Record]] = {
    "train": TrainConfig,
    "sft": SftConfig,
    "prefer": PreferConfig,
    "reward-model": RewardModelConfig,
}
WHOSE = ("path", "new", "adapter")
"""Keys of a model that say which one it is."""


def load_stages(whole: Loaded[StagesConfig], path: Path, folder: Path) -> dict[str, Loaded[Any]]:
    """The configs of all training stages, by name, with their runs in `folder`; what is wrong with one is said with its name."""
    found: dict[str, Loaded[Any]] = {}
    for name, stage in whole.config.stages.items():
        if stage.command not in TRAINED:
            continue
        try:
            kind = KINDS[stage.command]
            tree = stage_tree(whole, name, _with_adapters(found))
            tree["run"] |= {"directory": str(folder), "name": name}
            found[name] = load_tree(kind, tree, path)
            _refuse_parallel(found[name].config)
        except UserError as error:
            raise UserError(f"stage {name}: {error}") from error
    return found


def _refuse_parallel(config: AnyConfig) -> None:
    if isinstance(config, SftConfig | PreferConfig) and config.parallel != Parallel():
        raise UserError("a stage is one process, so parallel has no effect: run this command by itself with torchrun")


def stage_tree(whole: Loaded[StagesConfig], name: str, adapted: set[str]) -> dict[str, Any]:
    """The keys of one stage; `adapted` are the stages before it whose models are adapters."""
    config, stage = whole.config, whole.config.stages[name]
    kind = KINDS[stage.command]
    own = [key for key in WHOSE if key in stage.config.get("model", {})]
    if own:
        raise UserError(
            f"config.model.{own[0]}: which model it begins with is said by start, and by model of the whole"
        )
    tree: dict[str, Any] = {}
    if stage.recipe is not None:
        place = next((p for p in (whole.base / stage.recipe, Path(stage.recipe)) if p.is_file()), None)
        tree = complete(kind, read(kind, place or whole.base / stage.recipe))
        tree["model"] = {key: value for key, value in tree.get("model", {}).items() if key not in WHOSE}
    common = {
        "seed": config.seed,
        "run": config.run.model_dump(exclude_unset=True),
        "model": _model(config, config.start_of(name) or BASE, adapted),
    }
    template = config.template.model_dump(exclude_unset=True)
    common |= {"data": {"template": template}} if stage.command == "train" else {"template": template}
    shape = root_shape(kind)
    merged: dict[str, Any] = merge(shape, merge(shape, tree, common), stage.config)
    return merged


def _model(config: StagesConfig, start: str, adapted: set[str]) -> dict[str, Any]:
    given = config.model.model_dump(exclude_unset=True)
    if start == BASE and config.model.new is None:
        return given
    kept = {key: value for key, value in given.items() if key not in WHOSE}
    if start in adapted:
        return {**{key: value for key, value in kept.items() if key != "lora"}, "adapter": f"stage:{start}"}
    return {**kept, "path": f"stage:{start}"}


def _with_adapters(loaded: dict[str, Loaded[Any]]) -> set[str]:
    return {name for name, one in loaded.items() if one.config.model.lora or one.config.model.adapter}


# --- files ---------------------------------------------------------------------------------------------------------------


def check_files(loaded: Loaded[Any]) -> None:
    """Every file, folder and plug-in that a stage names and no stage makes must be there."""
    for problem in missing_files(loaded):
        raise UserError(problem)


def missing_files(loaded: Loaded[Any]) -> Iterator[str]:
    """What a config names and no stage makes, and is not there."""
    looked = f"(looked from {loaded.base} and from here)"
    for key, value in _directories(loaded.config):
        if not is_reference(value) and not _places(value, loaded.base, Path.is_dir):
            yield f"{key}: no directory {value} {looked}"
    for source in sources_of(loaded.config):
        path = source.path
        if path is not None and not is_reference(path) and not _places(path, loaded.base, Path.is_file):
            yield f"no such file: {path} {looked}"
    for text in _texts(loaded.resolved):
        if is_plugin(text) and not _places(text.rpartition(":")[0], loaded.base, Path.is_file):
            yield f"plug-in {text!r}: no such file {looked}"


def _directories(config: AnyConfig) -> Iterator[tuple[str, str]]:
    """The models a config names, with the keys that name them."""
    found = {"model.path": config.model.path, "model.adapter": config.model.adapter}
    if isinstance(config, TrainConfig):
        algorithm = config.algorithm
        if isinstance(algorithm.kl.reference, TeacherReference):
            found["algorithm.kl.reference.path"] = algorithm.kl.reference.path
        if algorithm.process is not None:
            found["algorithm.process.path"] = algorithm.process.path
        for index, part in enumerate(config.reward.parts):
            if part.name in ("model", "judge"):
                found[f"reward.parts[{index}] ({part.name}): options.path"] = part.options.get("path")
    return ((key, value) for key, value in found.items() if isinstance(value, str))


def sources_of(config: AnyConfig) -> list[Source]:
    """Everything a config reads rows from."""
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


def _texts(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _texts(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from _texts(value)


def _places(path: str, base: Path, fits: Callable[[Path], bool]) -> list[Path]:
    """The places a path or glob stands for, from the recipe's folder and from here, that are what they should be."""
    roots = [str(base / path), path]
    return [Path(one) for root in roots for one in (glob.glob(root, recursive=True) or [root]) if fits(Path(one))]
