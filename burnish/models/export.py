"""A model directory out of the files of a checkpoint: as they are, in another type, or with adapters added in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.config.text import read_json_object
from burnish.models.adapters import base_of, is_adapter, is_scorer
from burnish.models.architecture import read_config
from burnish.models.policy import load_policy, save_merged
from burnish.models.score import STATISTICS, load_scorer
from burnish.models.tokenizer import Tokenizer
from burnish.models.weights import file_tensors
from burnish.run.contents import write_contents
from burnish.run.staging import leave
from burnish.run.tensor_file import TensorFile

WEIGHTS = ".safetensors"
INDEX = "model.safetensors.index.json"


def copy_model(source: Path, names: Sequence[str], out: Path, dtype: torch.dtype | None) -> None:
    """The named files of a model in `source`, into `out`; weights become `dtype`, if one is given, a file at a time."""
    num_bytes = 0
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if dtype is None or not name.endswith(WEIGHTS):
            shutil.copyfile(source / name, out / name)
        else:
            num_bytes += _converted(source / name, out, name, dtype)
    if dtype is None:
        return
    if "config.json" in names:
        config = read_json_object(out / "config.json")
        config.pop("torch_dtype", None)
        _write(out / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
    if INDEX in names:
        index = read_json_object(out / INDEX)
        _write(out / INDEX, {**index, "metadata": {**index.get("metadata", {}), "total_size": num_bytes}})


def merge_model(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """A whole model of an adapter's directory: its base with the adapters added in, in the base's type if none is given."""
    if not is_adapter(source):
        raise UserError(f"{source} has no adapters to merge: it is a whole model already")
    name = str(dtype).removeprefix("torch.") if dtype is not None else _type_of(base_of(source))
    if is_scorer(source):
        scorer = load_scorer(source, getattr(torch, name), torch.device("cpu"))
        write_contents(out, scorer.contents(leave, base_of(source), Tokenizer.load(source), merged=True))
        if (source / STATISTICS).is_file():
            shutil.copyfile(source / STATISTICS, out / STATISTICS)
        return
    policy = load_policy(Model.model_validate({"dtype": name, "device": "cpu"}), source, None, seed=0)
    save_merged(policy, out)


def _converted(file: Path, out: Path, name: str, dtype: torch.dtype) -> int:
    """One file in another type; what is not a floating-point number stays as it is. Returns the tensors' bytes."""
    tensors = {}
    for key, stored in file_tensors(file):
        tensor = stored.whole()
        tensors[key] = leave(tensor.to(dtype) if tensor.is_floating_point() else tensor.clone())
    TensorFile(name, tensors, {"format": "pt"}).write(out)
    return sum(held.num_bytes for held in tensors.values())


def _type_of(base: Path) -> str:
    config = read_config(base)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _write(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1))
