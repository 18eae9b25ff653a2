"""Finds the config, the trainer and the data of a TRL script, by its syntax tree."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from burnish.config.errors import UserError
from burnish.config.importing.draft import PLACEHOLDER
from burnish.config.importing.hydra_config import read_text
from burnish.config.importing.python_script import PythonScript, Unknown, called_name

TRAINERS = {
    "GRPOTrainer": "GRPOConfig",
    "RLOOTrainer": "RLOOConfig",
    "DPOTrainer": "DPOConfig",
    "KTOTrainer": "KTOConfig",
    "ORPOTrainer": "ORPOConfig",
    "CPOTrainer": "CPOConfig",
    "SFTTrainer": "SFTConfig",
    "RewardTrainer": "RewardConfig",
}
CONFIGS = {config: trainer for trainer, config in TRAINERS.items()}
POSITIONAL = {
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "RLOOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "DPOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "KTOTrainer": ("model", "ref_model", "args", "train_dataset", "eval_dataset"),
    "SFTTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
    "RewardTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset"),
}
LOADERS = {"json": "", "parquet": "", "csv": "", "arrow": ""}
"""Formats that `load_dataset` reads from `data_files`."""
ROW_CHANGES = (
    "map",
    "filter",
    "train_test_split",
    "select_columns",
    "cast",
    "cast_column",
    "sort",
    "flatten",
    "to_iterable_dataset",
)
SPLIT_ROWS = re.compile(r"\[:(\d+)\]$")


class TrlScript(NamedTuple):
    """One training run of a script."""

    script: PythonScript
    config_name: str
    arguments: dict[str, ast.expr]
    """Arguments of the config class, and attributes that are set on it later."""
    trainer: dict[str, ast.expr]
    """Arguments of the trainer."""


def read_trl_script(
    path: Path, environment: Mapping[str, str], wanted: str | None, text: str | None = None
) -> TrlScript:
    """The training run of a script; `wanted` names the trainer if there are several kinds. `text` takes the place of the file's."""
    script = PythonScript(path, read_text(path) if text is None else text, environment)
    configs, trainers = script.calls(CONFIGS), script.calls(TRAINERS)
    kinds = dict.fromkeys([called_name(c) for c in configs] + [TRAINERS[called_name(t)] for t in trainers])
    names = {name.removesuffix("Config").lower(): name for name in kinds}
    if not names:
        raise UserError(
            f"{path}: no call of {', '.join(CONFIGS)} or of their trainers. `burnish import trl` reads a Python script that makes one; a "
            "script that takes its arguments from the command line names no values"
        )
    if wanted is not None and wanted not in names:
        raise UserError(f"{path}: --trainer {wanted}: the script has {', '.join(names)}")
    if wanted is None and len(names) > 1:
        raise UserError(f"{path} has several trainers: choose one with --trainer {' or --trainer '.join(names)}")
    kind = names[wanted] if wanted is not None else next(iter(names.values()))
    trainer = next((call for call in trainers if TRAINERS[called_name(call)] == kind), None)
    given = {} if trainer is None else script.arguments(trainer, POSITIONAL.get(called_name(trainer), ()))
    config = next((call for call in configs if called_name(call) == kind), None)
    named = script.resolve(given["args"]) if "args" in given else None
    if isinstance(named, ast.Call) and called_name(named) == kind:
        config = named
    arguments = {} if config is None else script.arguments(config, ("output_dir",)) | script.attribute_changes(config)
    return TrlScript(script, kind, arguments, given)


# --- data -------------------------------------------------------------------------------------------------------------------


class FoundData(NamedTuple):
    """A source of rows as far as the script names it."""

    source: dict[str, Any]
    notes: list[str]


def find_data(script: PythonScript, node: ast.expr, split: str) -> FoundData:
    """The file or data set behind an expression, through `map`, `filter` and the like, which are noted."""
    notes: list[str] = []
    options: dict[str, Any] = {}
    for _ in range(50):
        node = script.resolve(node)
        if isinstance(node, ast.Subscript):
            key = script.value(node.slice)
            split = key if isinstance(key, str) else split
            node = node.value
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and called_name(node) not in ("load_dataset", "load_from_disk")
        ):
            _note_change(script, node, notes, options)
            if called_name(node).startswith("from_"):
                break
            node = node.func.value
        else:
            break
    if isinstance(node, ast.Call) and called_name(node) == "load_dataset":
        return FoundData({**_loaded(script, node, split, notes), **options}, notes)
    if isinstance(node, ast.Call) and called_name(node) == "load_from_disk" and node.args:
        path = script.value(node.args[0])
        if isinstance(path, str):
            return FoundData({"path": f"{path}/**/*.arrow", **options}, notes)
    notes.append(
        f"the script makes its rows in Python ({script.source(node)}): write them to a file (dataset.to_json), or give a function of "
        "yours that yields them (plugin: file.py:function)"
    )
    return FoundData({"path": f"{PLACEHOLDER}/{split}.jsonl"}, notes)


def _note_change(script: PythonScript, call: ast.Call, notes: list[str], options: dict[str, Any]) -> None:
    """What a method of a data set means for the file behind it."""
    name = called_name(call)
    arguments = [script.value(arg) for arg in call.args]
    if name == "rename_column" and len(arguments) == 2 and arguments[1] == "prompt" and isinstance(arguments[0], str):
        options["prompt_key"] = arguments[0]
    elif name == "select" and call.args and isinstance(call.args[0], ast.Call) and called_name(call.args[0]) == "range":
        bounds = [script.value(arg) for arg in call.args[0].args]
        if len(bounds) == 1 and isinstance(bounds[0], int):
            options["limit"] = bounds[0]
        else:
            notes.append(f"the script selects rows ({script.source(call.args[0])}): select them in the file")
    elif name in ROW_CHANGES or name.startswith(("rename", "remove")):
        text = ", ".join(
            [script.source(arg) for arg in call.args] + [f"{k.arg}={script.source(k.value)}" for k in call.keywords]
        )
        notes.append(
            f"the script changes its rows with {name}({text}), which is not done here: change the file, or give the rows by a plug-in"
        )


def _loaded(script: PythonScript, call: ast.Call, split: str, notes: list[str]) -> dict[str, Any]:
    """The source of a call of `load_dataset`."""
    arguments = script.arguments(call, ("path", "name"))
    values = {name: script.value(node) for name, node in arguments.items()}
    given = values.get("split", split)
    split = given if isinstance(given, str) else split
    limit = SPLIT_ROWS.search(split)
    options: dict[str, Any] = {} if limit is None else {"limit": int(limit[1])}
    if "[" in split and limit is None:
        notes.append(f"split {split!r} is a part of the rows: select them in the file, or set limit")
    files, path = values.get("data_files"), values.get("path")
    if isinstance(files, dict):
        files = files.get(split.partition("[")[0], next(iter(files.values()), None))
    files = files[0] if isinstance(files, list) and len(files) == 1 else files
    if path in LOADERS and isinstance(files, str):
        return {"path": files, **options}
    if isinstance(path, Unknown) or path is None or (path in LOADERS and not isinstance(files, str)):
        notes.append(f"the data of {script.source(call)} is not known: set its path")
        return {"path": f"{PLACEHOLDER}/{split.partition('[')[0]}.jsonl", **options}
    if Path(str(path)).suffix in (".json", ".jsonl", ".parquet", ".csv", ".arrow"):
        return {"path": str(path), **options}
    notes.append(
        f"{path} is a data set of the hub ({split}): `hf download {path} --repo-type dataset --local-dir data/{str(path).split('/')[-1]}`, "
        "then name its files (a glob) as the path"
    )
    return {"path": str(path), **options}
