"""The config of each training stage: its recipe, the settings of the whole, its own.

A stage that begins with what another made has `stage:NAME` as its model's path until that is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.load import Loaded, load_tree, read
from burnish.config.named_files import AnyConfig
from burnish.config.parallel import Parallel
from burnish.config.preference import PreferConfig
from burnish.config.reward_model import RewardModelConfig
from burnish.config.schema import SftConfig, TrainConfig
from burnish.config.shape import root_shape
from burnish.config.slots import Record
from burnish.config.stages import BASE, TRAINED, StagesConfig
from burnish.config.tree import complete, merge

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
