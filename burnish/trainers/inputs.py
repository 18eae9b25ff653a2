"""What a run was begun with that its configuration only names: the numbers of models and the code of plug-ins.

A frozen reference, or the base of adapters, is read again from its directory when a run goes on, and a reward from its file. With other
numbers it would be another run, which is refused; other code may be on purpose, and is told of.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.named_files import AnyConfig, directories_of, places, plugin_files
from burnish.models.digest import digest, model_digest
from burnish.run.contents import Sums, are_sums, file_sums, what_differs
from burnish.run.files import atomic_write

Inputs = dict[str, dict[str, Any]]
FILE = "inputs.json"
WEIGHTS = ("*.safetensors", "*.bin")
READERS = 8
"""Files that are read at once for their checksums."""


def keep_inputs(
    folder: Path, config: AnyConfig, resolved: dict[str, Any], base: Path, forget: Callable[[], None] = lambda: None
) -> list[str]:
    """Write down what a run is made with; notes on what has changed since it was last begun, the error for other models.

    `forget` is called where other code than that of rewards has changed: rollouts in the journal were sampled by a policy that the
    old code had trained. (Scores that are there stay as they are.)
    """
    path, names = folder / FILE, dict(directories_of(config))
    models = {key: found[0] for key, name in names.items() if (found := places(name, base, Path.is_dir))}
    before, now = _read(path), inputs(models, resolved, base)
    for key in models:
        changed = None if before is None else what_has_changed(before, now, key)
        if changed is not None:
            raise UserError(
                f"cannot resume: the model of {key}={names[key]} is not the one this run was begun with ({changed}); put that back, or start "
                "a new run"
            )
    old = now["plugins"] if before is None else before["plugins"]
    changed_files = [name for name, found in now["plugins"].items() if old.get(name, found) != found]
    training = plugin_files({k: v for k, v in resolved.items() if k != "reward"}, base)
    if training.keys() & set(changed_files):
        forget()
    atomic_write(path, json.dumps(now, indent=1) + "\n")  # last: a kill before it finds the change again
    notes = [f"{name} has changed since the run was begun: from here on the new code counts" for name in changed_files]
    if before is None and any((folder / "checkpoints").glob("step-*")):
        notes.append(
            f"{path} is missing: models and plug-ins are taken as they are now, whether they have changed is not known"
        )
    return notes


def inputs(models: dict[str, Path], resolved: dict[str, Any], base: Path) -> Inputs:
    """A digest and the checksums of each model directory by its key, and a digest of each plug-in's file by its name; what is not
    there is for others to say."""
    return {
        "models": {key: model_digest(model) for key, model in models.items()},
        "weights": {key: weight_sums(model) for key, model in models.items()},
        "plugins": {name: digest([file.read_bytes()]) for name, file in plugin_files(resolved, base).items()},
    }


def what_has_changed(before: Inputs, now: Inputs, key: str) -> str | None:
    """In what the model of a key differs from the one that was written down, or None."""
    changed = what_differs(now["weights"][key], before["weights"].get(key, {}))
    if changed is None and before["models"].get(key, "") not in ("", now["models"][key]):
        changed = "its config or tokenizer has changed"
    return changed


def weight_sums(model: Path) -> Sums:
    """Size and CRC-32 of every file of weights: a digest of samples would not see a single bit."""
    files = sorted({file for pattern in WEIGHTS for file in model.glob(pattern)})
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip((file.name for file in files), pool.map(file_sums, files), strict=True))


def _read(path: Path) -> Inputs | None:
    """What was written down; None where the file does not exist."""
    if not path.is_file():
        return None
    try:
        found = {"weights": {}, **json.loads(path.read_text())}
        for part in ("models", "plugins", "weights"):
            if not isinstance(found[part], dict):
                raise ValueError(f"{part!r} has no keys")
        for key, sums in found["weights"].items():
            if not are_sums(sums):
                raise ValueError(f"'weights' of {key}: a size or a checksum is missing")
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is damaged ({error}): it says which models and plug-ins the run was begun with; restore it from a copy, or delete it "
            "to go on with them as they are now"
        ) from error
    return found
