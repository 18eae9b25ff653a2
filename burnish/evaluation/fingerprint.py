"""What an evaluation was made with, as a flat dictionary: two with the same one have the same completions.

Files count by their content and not by their place, so a data set or a model may be moved or copied between a kill and
the command that goes on. What leaves completions as they are (rows at once, worker processes, the device) does not count.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from burnish.config.environment import SINGLE_TURN
from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin
from burnish.data.files import find_files
from burnish.run.directory import flatten

IGNORED = ("max_rows", "reward.workers", "model.device", "data.source.path")
MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.jinja", "*.model")
CHUNK, NUM_CHUNKS = 1 << 14, 64  # of a large file: read all over it, since training may leave any part as it was


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
        flat["data.source.content"] = _digest([file.read_bytes() for file in files])
    plugins = [("reward", part["name"]) for part in resolved["reward"]["parts"]] + [("environment", environment)]
    for what, name in plugins:
        if is_plugin(name):
            raw = name.rpartition(":")[0]
            file = next((p for p in (base / raw, Path(raw)) if p.is_file()), None)
            if file is None:
                raise UserError(f"{what} {name}: there is no file {raw} in {base} or here")
            flat[f"{what}.content of {name}"] = _digest([file.read_bytes()])
    plain: dict[str, Any] = json.loads(json.dumps(flat))
    return plain


def model_digest(path: Path) -> str:
    """A digest of a model directory: its configs and tokenizer, and samples from all over its weights."""
    files = sorted({file for pattern in MODEL_FILES for file in path.glob(pattern)})
    return _digest([part for file in files for part in (file.name.encode(), *_samples(file))])


def _samples(path: Path) -> list[bytes]:
    size = path.stat().st_size
    if size <= CHUNK * NUM_CHUNKS:
        return [path.read_bytes()]
    with path.open("rb") as file:
        starts = [i * (size - CHUNK) // (NUM_CHUNKS - 1) for i in range(NUM_CHUNKS)]
        return [str(size).encode(), *(os.pread(file.fileno(), CHUNK, start) for start in starts)]


def _digest(parts: list[bytes]) -> str:
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.hexdigest()[:16]
