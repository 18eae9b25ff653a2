"""Runs a command's own code in this process, with the settings of a Python call."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from burnish.cli import offline_training
from burnish.cli import train as train_command
from burnish.cli.main import print_note
from burnish.config.errors import UserError, did_you_mean
from burnish.config.loading import Loaded, set_key
from burnish.config.records import Record, field_node, root_node
from burnish.config.schema import PreferConfig, RewardModelConfig, SftConfig, TrainConfig
from burnish.models.model_support import pin_supported_models
from burnish.run.durable_files import folder_id
from burnish.run.run import Run
from burnish.run.run_directory import RunDirectory

Callback = Callable[[dict[str, Any]], bool | None]
"""Called with the metrics of each step, `step` among them. True ends the run after the step is saved."""
CONFIGS: dict[str, type[Record]] = {
    "training": TrainConfig,
    "sft": SftConfig,
    "preference": PreferConfig,
    "reward_model": RewardModelConfig,
}
"""The config of each command, by the section that the command is about."""


def with_settings(tree: dict[str, Any], section: str, settings: Mapping[str, Any], function: str) -> dict[str, Any]:
    """The tree with settings merged in: sections, dotted keys, and keys of the command's own section."""
    config_type = CONFIGS[section]
    own = field_node(config_type, section).records[0]
    keys: list[tuple[list[str], Any]] = []
    for key, value in settings.items():
        if "." in key or key in config_type.model_fields:
            keys.append((key.split("."), value))
        elif key in own.model_fields:
            keys.append(([section, key], value))
        else:
            known = [*config_type.model_fields, *own.model_fields, "name", "callback", "fresh", "held_out"]
            raise UserError(
                f"burnish.{function} has no argument {key!r}{did_you_mean(key, known)} (settings are the sections "
                f"{', '.join(config_type.model_fields)} and the keys of {section}: {', '.join(own.model_fields)})"
            )
    for parts, value in sorted(keys, key=lambda item: len(item[0])):
        tree = set_key(root_node(config_type), tree, parts, value)
    return tree


def listen(run: Run, callback: Callback | None) -> None:
    """Call `callback` after each step. Not after the validation before step 1, which has none of a step's metrics."""
    if callback is not None:
        run.listeners.append(lambda step, values: callback(values) if step else None)


def execute(loaded: Loaded[Any], fresh: bool, on_open: Callable[[Run], None]) -> Path:
    """Run the command's own code in this process, and return the run directory."""
    settings = loaded.config.run
    folder = Path(settings.directory) / settings.name
    replaced = folder_id(folder) if fresh else None
    loaded = pin_supported_models(loaded, None if fresh else RunDirectory(folder).config, print_note)
    try:
        if isinstance(loaded.config, TrainConfig):
            args = argparse.Namespace(controls=False, profile=None)
            train_command.train_in_process(args, loaded, settings.name, replaced, on_open)
        else:
            offline_training.train_in_process(loaded, settings.name, None, replaced, on_open)
    finally:
        gc.collect()  # models and caches are in reference cycles; the program may need their memory
    return folder
