"""What a run was begun with that its configuration only names: the numbers of models and the code of plug-ins.

A frozen reference is read again from its directory when a run goes on, and a reward from its file. With other numbers it would be another run,
which is refused; other code may be on purpose, and is told of.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin
from burnish.models.digest import digest, model_digest
from burnish.run.directory import flatten
from burnish.run.files import atomic_write

FILE = "inputs.json"
MODELS = ("model.path", "model.adapter", "algorithm.kl.reference.path")


def keep_inputs(folder: Path, resolved: dict[str, Any], base: Path) -> list[str]:
    """Write down what a run is made with; notes on what has changed since it was last begun."""
    path, now = folder / FILE, inputs(resolved, base)
    before: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.is_file() else now
    for key, found in now["models"].items():
        if before["models"].get(key, found) != found:
            raise UserError(
                f"cannot resume: the model of {key}={flatten(resolved)[key]} is not the one this run was begun with; put that back, or "
                "start a new run"
            )
    atomic_write(path, json.dumps(now, indent=1) + "\n")
    changed = [name for name, found in now["plugins"].items() if before["plugins"].get(name, found) != found]
    return [f"{name} has changed since the run was begun: from here on the new code counts" for name in changed]


def inputs(resolved: dict[str, Any], base: Path) -> dict[str, dict[str, str]]:
    """A digest of each model directory by its key, and of each plug-in's file by its name."""
    flat = flatten(resolved)
    models = {key: _place(flat[key], base) for key in MODELS if flat.get(key) is not None}
    plugins = {name.rpartition(":")[0] for name in _texts(resolved) if is_plugin(name)}
    return {
        "models": {key: model_digest(path) for key, path in models.items() if path.is_dir()},
        "plugins": {
            name: digest([path.read_bytes()]) for name in sorted(plugins) if (path := _place(name, base)).is_file()
        },
    }


def _place(path: str, base: Path) -> Path:
    return base / path if (base / path).exists() else Path(path)


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [text for inner in (value.values() if isinstance(value, dict) else value) for text in _texts(inner)]
    return [value] if isinstance(value, str) else []
