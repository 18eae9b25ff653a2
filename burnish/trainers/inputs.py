"""What a run was begun with that its configuration only names: the numbers of models and the code of plug-ins.

A frozen reference is read again from its directory when a run goes on, and a reward from its file. With other numbers it would be another run,
which is refused; other code may be on purpose, and is told of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.named_files import directories_of, places, plugin_files
from burnish.config.schema import TrainConfig
from burnish.models.digest import digest, model_digest
from burnish.run.files import atomic_write

FILE = "inputs.json"


def keep_inputs(folder: Path, config: TrainConfig, resolved: dict[str, Any], base: Path) -> list[str]:
    """Write down what a run is made with; notes on what has changed since it was last begun."""
    path, now = folder / FILE, inputs(config, resolved, base)
    before: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.is_file() else now
    for key, found in now["models"].items():
        if before["models"].get(key, found) != found:
            raise UserError(
                f"cannot resume: the model of {key}={dict(directories_of(config))[key]} is not the one this run was begun with; put that "
                "back, or start a new run"
            )
    atomic_write(path, json.dumps(now, indent=1) + "\n")
    changed = [name for name, found in now["plugins"].items() if before["plugins"].get(name, found) != found]
    return [f"{name} has changed since the run was begun: from here on the new code counts" for name in changed]


def inputs(config: TrainConfig, resolved: dict[str, Any], base: Path) -> dict[str, dict[str, str]]:
    """A digest of each model directory by its key, and of each plug-in's file by its name; what is not there is for others to say."""
    models = {key: places(path, base, Path.is_dir) for key, path in directories_of(config)}
    return {
        "models": {key: model_digest(found[0]) for key, found in models.items() if found},
        "plugins": {name: digest([file.read_bytes()]) for name, file in plugin_files(resolved, base).items()},
    }
