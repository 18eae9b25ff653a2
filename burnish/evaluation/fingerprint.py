"""What an evaluation was made with, as a flat dictionary: two with the same one have the same completions.

Files count by their content and not by their place, so a data set or a model may be moved or copied between a kill and
the command that goes on. What leaves completions as they are (rows at once, worker processes, the device) does not count.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.config.environment import SINGLE_TURN
from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin, is_plugin_file, plugin_source
from burnish.data.files import find_files
from burnish.models.digest import digest, model_digest
from burnish.run.directory import flatten

IGNORED = ("max_rows", "reward.workers", "model.device", "data.source.path")


def fingerprint(resolved: dict[str, Any], base: Path, model: Path) -> dict[str, Any]:
    """The settings that decide the completions, by dotted key; `resolved` is the checked configuration as plain values."""
    flat = {key: value for key, value in flatten(resolved).items() if key not in IGNORED}
    environment = resolved["environment"]["name"]
    if environment == SINGLE_TURN:  # has no settings that decide anything
        flat = {key: value for key, value in flat.items() if not key.startswith("environment")}
    flat["model.content"] = model_digest(model)
    path = resolved["data"]["source"]["path"]
    if path is not None:
        files = find_files(path, base)
        flat["data.source.files"] = [file.name for file in files]
        flat["data.source.content"] = digest([file.read_bytes() for file in files])
    plugins = [("reward", part["name"]) for part in resolved["reward"]["parts"]] + [("environment", environment)]
    for what, name in plugins:
        if is_plugin(name):
            file = plugin_source(name, base)
            if file is None:
                kind = "file" if is_plugin_file(name) else "module"
                raise UserError(f"{what} {name}: there is no {kind} {name.rpartition(':')[0]} in {base} or here")
            flat[f"{what}.content of {name}"] = digest([file.read_bytes()])
    plain: dict[str, Any] = json.loads(json.dumps(flat))
    return plain
