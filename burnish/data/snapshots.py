"""Folders of Hugging Face `datasets`: which files hold a split.

Two layouts: what `save_to_disk` writes (`dataset_dict.json` with a folder a split, or one data set with `state.json`), and
a snapshot of a hub repository, whose data files carry the split in their name (`data/train-00000-of-00002.parquet`,
`main/test.jsonl`) below a folder that may be one of several configurations.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, unknown
from burnish.config.text import plain_name, read_json_object
from burnish.data.files import READERS, kind_of

SPLIT = re.compile(r"(?:^|[-_./])(train|training|test|validation|valid|val|dev)(?=[-_./]|$)", re.IGNORECASE)
SAME = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
WHOLE = "all"
"""The name of what is not divided."""


def splits_of(folder: Path, config: str | None = None) -> dict[str, list[Path]]:
    """The files of each split in a folder, in order."""
    folder = folder / config if config else folder
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}")
    if (folder / "dataset_dict.json").is_file():
        names = _field(folder / "dataset_dict.json", "splits")
        return {name: _saved(folder / plain_name(name, folder / "dataset_dict.json")) for name in names}
    if (folder / "state.json").is_file():
        return {WHOLE: _saved(folder)}
    found: dict[str, list[Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and kind_of(p) in READERS):
        inside = path.relative_to(folder)
        if not any(part.startswith(".") for part in inside.parts) and _is_data(inside):
            found.setdefault(_split_name(inside), []).append(path)
    if not found:
        raise UserError(f"{folder} holds no data files ({', '.join(READERS)})")
    for name, files in found.items():
        _one_configuration(name, files, folder)
    return found


def choose_split(splits: dict[str, list[Path]], split: str | None, where: str) -> tuple[str, list[Path]]:
    """The split asked for, or the only one."""
    if split is None and len(splits) == 1:
        return next(iter(splits.items()))
    if split is None:
        raise UserError(f"{where} holds the splits {', '.join(splits)}; choose one with --split")
    if split not in splits:
        raise unknown(f"split of {where}:", split, splits)
    return split, splits[split]


def _saved(folder: Path) -> list[Path]:
    """The files of one saved data set, in the order its state gives."""
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(f"{folder} is not a saved data set: it has no state.json")
    entries = _field(state, "_data_files")
    return [folder / plain_name(e.get("filename") if isinstance(e, dict) else e, state) for e in entries]


def _field(path: Path, name: str) -> list[Any]:
    """A list in a JSON file of a saved data set."""
    found = read_json_object(path).get(name)
    if not isinstance(found, list):
        raise UserError(f"{path} is damaged: {name} should be a list, not {type(found).__name__}")
    return found


def _is_data(path: Path) -> bool:
    """A json file whose name says nothing of a split may be a description of the repository."""
    return kind_of(path) != ".json" or SPLIT.search(str(path)) is not None


def _split_name(path: Path) -> str:
    found = SPLIT.findall(str(path.with_name(path.name.partition(".")[0])))
    return SAME.get(found[-1].lower(), found[-1].lower()) if found else WHOLE


def _one_configuration(name: str, files: list[Path], folder: Path) -> None:
    parents = sorted({str(file.parent.relative_to(folder)) for file in files})
    if len(parents) > 1:
        raise UserError(
            f"{folder} holds the split {name} in several folders ({', '.join(parents)}); choose one with --config"
        )
