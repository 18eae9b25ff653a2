"""A model directory out of the files of a checkpoint: as they are, in another type, or with adapters added in."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from burnish.algorithms.curriculum.prompt_selection import angle_between, slerp_weights, weighted_average
from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.config.yaml_text import read_json_object
from burnish.models.architecture import read_config
from burnish.models.compatibility import check_same_architecture, check_same_tokenizer
from burnish.models.heads import SCORE_STATISTICS_FILE, load_score_model
from burnish.models.lora.peft_files import base_model_of, is_adapter, is_score_adapter
from burnish.models.policy import load_policy, save_merged
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import StoredTensor, file_tensors, weight_contents, weight_files
from burnish.run.checkpoint.checkpoints import MANIFEST_FILE, read_manifest
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import (
    SAFETENSORS_DTYPES,
    BytesFile,
    Content,
    TensorBytes,
    TensorFile,
    WriterRank,
    flat_bytes,
    write_contents,
)
from burnish.run.durable_files import checksums

SAFETENSORS = ".safetensors"
INDEX = "model.safetensors.index.json"


def copy_model(source: Path, names: Sequence[str], out: Path, dtype: torch.dtype | None) -> None:
    """The named files of a model in `source`, into `out`; weights become `dtype`, if one is given, a file at a time."""
    num_bytes = 0
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if dtype is None or not name.endswith(SAFETENSORS):
            shutil.copyfile(source / name, out / name)
        else:
            num_bytes += _convert_file(source / name, out, name, dtype)
    if dtype is None:
        return
    if "config.json" in names:
        config = read_json_object(out / "config.json")
        config.pop("torch_dtype", None)
        _write_json(out / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")})
    if INDEX in names:
        index = read_json_object(out / INDEX)
        _write_json(out / INDEX, {**index, "metadata": {**index.get("metadata", {}), "total_size": num_bytes}})


def merge_adapter(source: Path, out: Path, dtype: torch.dtype | None) -> None:
    """A whole model of an adapter's directory: its base with the adapters added in, in the base's type if none is given."""
    if not is_adapter(source):
        raise UserError(f"{source} has no adapters to merge: it is a whole model already")
    name = str(dtype).removeprefix("torch.") if dtype is not None else _stored_dtype(base_model_of(source))
    if is_score_adapter(source):
        scorer = load_score_model(source, getattr(torch, name), torch.device("cpu"))
        write_contents(out, scorer.contents(keep_in_place, base_model_of(source), Tokenizer.load(source), merged=True))
        if (source / SCORE_STATISTICS_FILE).is_file():
            shutil.copyfile(source / SCORE_STATISTICS_FILE, out / SCORE_STATISTICS_FILE)
        return
    policy = load_policy(Model.model_validate({"dtype": name, "device": "cpu"}), source, None, seed=0)
    save_merged(policy, out)


def _convert_file(file: Path, out: Path, name: str, dtype: torch.dtype) -> int:
    """One file in another type; what is not a floating-point number stays as it is. Returns the tensors' bytes."""
    tensors = {}
    for key, stored in file_tensors(file):
        tensor = stored.whole()
        tensors[key] = keep_in_place(tensor.to(dtype) if tensor.is_floating_point() else tensor.clone())
    TensorFile(name, tensors, {"format": "pt"}).write(out)
    return sum(held.num_bytes for held in tensors.values())


def _stored_dtype(base: Path) -> str:
    config = read_config(base)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1))


# --- `burnish merge`: a Hugging Face directory whose weights are made of those of several others, a few rows at a time.
#
# The models must be alike: the same architecture, the same tokenizer, the same tensors. What is not weights (config,
# tokenizer, chat template, generation settings) is the first one's. No more is held in memory than a block of rows of
# each model, so that a model far larger than memory can be merged.

MERGE_METHODS = ("linear", "slerp")
PROVENANCE = "merge.json"
BLOCK_ELEMENTS = 1 << 22  # of one block of rows
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
MERGED_INDEX = "model.safetensors.index.json"
REPORT_EVERY_S = 2.0
TIED_HEAD = "lm_head.weight"
"""Written by some exporters though it is the embedding once more."""
MERGEABLE_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items() if not name.startswith("F8")}
Report = Callable[[str], None]


@dataclass(frozen=True)
class MergeRecipe:
    """How weights are made of weights."""

    weights: tuple[float, ...]
    method: str = "linear"
    dtype: torch.dtype | None = None
    """Of the result; None means as the first model has it."""


def merge_models(sources: Sequence[Path], folder: Path, recipe: MergeRecipe, report: Report) -> dict[str, Any]:
    """Fill a folder with the merged model; returns what it says of where it comes from."""
    check_merge(sources, recipe)
    with ExitStack() as stack:
        models = [open_weights(source, stack) for source in sources]
        for model, source in zip(models[1:], sources[1:], strict=True):
            check_same_tensors(models[0], model, sources[0], source)
        dtypes = {name: merged_dtype(handle.get_slice(name).get_dtype(), recipe) for name, handle in models[0].items()}
        told = _progress_counter(report, len(models[0]))
        blocks = {
            name: MergedTensor(dtypes[name], _shape(handle, name), (), name, tuple(models), recipe, told)
            for name, handle in models[0].items()
        }
        sizes = [(name, block.num_bytes) for name, block in blocks.items()]
        contents = weight_contents(blocks.items(), sizes, lambda block: block, WriterRank())
        written = write_contents(folder, [*config_contents(sources[0], recipe), *contents])
    provenance = {
        "method": recipe.method,
        "weights": list(recipe.weights),
        "dtype": None if recipe.dtype is None else str(recipe.dtype).removeprefix("torch."),
        "sources": [provenance_of(source) for source in sources],
        "files": written,
    }
    write_contents(folder, [BytesFile(PROVENANCE, json.dumps(provenance, indent=1) + "\n")])
    return provenance


def check_merge(sources: Sequence[Path], recipe: MergeRecipe) -> None:
    """Refuse what cannot be merged, with the first difference."""
    if len(sources) < 2:
        raise UserError(f"expected two models or more to merge, got {len(sources)}")
    if len(recipe.weights) != len(sources):
        raise UserError(f"{len(recipe.weights)} weights for {len(sources)} models: give one each")
    if abs(sum(recipe.weights) - 1) > 1e-6:
        raise UserError(f"the weights add up to {sum(recipe.weights):g}; those of an average add up to 1")
    if recipe.method == "slerp" and (len(sources) != 2 or not 0 <= recipe.weights[1] <= 1):
        raise UserError("slerp goes along the arc from one model to another: two models, with weights in 0..1")
    for source in sources:
        if is_adapter(source):
            raise UserError(f"{source} is an adapter, not a whole model: `burnish export --merged` makes one of it")
        if read_config(source).get("quantization_config"):
            raise UserError(f"{source}: its weights are quantised, and cannot be averaged")
    for other in sources[1:]:
        check_same_architecture(sources[0], other)
        check_same_tokenizer(sources[0], other)


# --- weights -----------------------------------------------------------------------------------------------------------


def open_weights(source: Path, stack: ExitStack) -> dict[str, Any]:
    """Of each tensor the open file that holds it."""
    found: dict[str, Any] = {}
    for file in weight_files(source):
        try:
            handle = stack.enter_context(safe_open(file, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file} cannot be read as safetensors: {error}") from error
        found |= dict.fromkeys(handle.keys(), handle)
    if read_config(source).get("tie_word_embeddings"):
        found.pop(TIED_HEAD, None)
    return found


def check_same_tensors(one: dict[str, Any], other: dict[str, Any], first: Path, second: Path) -> None:
    """Two models that differ in their tensors: the first difference is named."""
    if differing := sorted(one.keys() ^ other.keys()):
        owner = first if differing[0] in one else second
        raise UserError(f"the models to merge differ in their weights: only {owner} has {differing[0]}")
    for name in one:
        shapes = _shape(one[name], name), _shape(other[name], name)
        if shapes[0] != shapes[1]:
            raise UserError(f"the models to merge differ in {name}: {shapes[0]} in {first}, {shapes[1]} in {second}")


@dataclass(frozen=True)
class MergedTensor(TensorBytes):
    """A tensor of the result, computed when its bytes are written."""

    name: str
    models: tuple[dict[str, Any], ...]
    recipe: MergeRecipe
    done: Callable[[], None]
    """Called when its bytes have been written."""

    @property
    def num_bytes(self) -> int:
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes

    def chunks(self) -> Iterator[memoryview]:
        stored = [StoredTensor(model[self.name], self.name) for model in self.models]
        weights = self.weights(stored)
        for block in row_blocks(self.shape):
            parts = [tensor[block] for tensor in stored]
            yield flat_bytes(self.merged(parts, weights)).numpy().data
        self.done()

    def weights(self, stored: Sequence[StoredTensor]) -> tuple[float, ...]:
        """Those of the recipe, or on the arc between the two tensors."""
        if self.recipe.method == "linear":
            return self.recipe.weights
        products = torch.zeros(3, dtype=torch.float64)
        for block in row_blocks(self.shape):
            a, b = (tensor[block].double().reshape(-1) for tensor in stored)
            products += torch.stack([a @ b, a @ a, b @ b])
        return slerp_weights(angle_between(*products.tolist()), self.recipe.weights[1])

    def merged(self, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """One block; what is no floating-point number must be the same in all."""
        if parts[0].is_floating_point():
            return weighted_average(parts, weights).to(self.dtype)
        if any(not torch.equal(parts[0], part) for part in parts[1:]):
            raise UserError(f"the models to merge differ in {self.name}, which holds whole numbers and has no average")
        return parts[0]


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """A tensor cut along its first dimension into blocks of at most NUM_ELEMENTS, or of one row."""
    if not shape:
        yield ()
        return
    rows = max(1, BLOCK_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(shape[0], start + rows)), *(slice(0, size) for size in shape[1:]))


def merged_dtype(stored: str, recipe: MergeRecipe) -> torch.dtype:
    """The type a tensor will have, from the format's name of the one it has."""
    own = MERGEABLE_DTYPES.get(stored)
    if own is None:
        raise UserError(f"weights of the type {stored} cannot be averaged")
    return own if recipe.dtype is None or not own.is_floating_point else recipe.dtype


def _shape(handle: Any, name: str) -> tuple[int, ...]:
    return tuple(handle.get_slice(name).get_shape())


def _progress_counter(report: Report, num: int) -> Callable[[], None]:
    """To be called after each tensor; says every few seconds how many there have been."""
    count, last = 0, time.monotonic()

    def done() -> None:
        nonlocal count, last
        count += 1
        if time.monotonic() - last > REPORT_EVERY_S:
            last = time.monotonic()
            report(f"{count} of {num} tensors")

    return done


# --- the rest ----------------------------------------------------------------------------------------------------------


def config_contents(source: Path, recipe: MergeRecipe) -> list[Content]:
    """Config, tokenizer and templates of a model: of a checkpoint those its manifest counts to the model."""
    manifest = read_manifest(source)
    if manifest is not None:
        names = [name for name, entry in manifest["files"].items() if entry["of"] == "model"]
    else:
        names = [path.name for path in sorted(source.iterdir()) if path.is_file() and path.suffix in COPIED_SUFFIXES]
    names = [
        name
        for name in names
        if name not in (MERGED_INDEX, MANIFEST_FILE, PROVENANCE) and not name.endswith(".safetensors")
    ]
    contents: list[Content] = [BytesFile(name, (source / name).read_bytes()) for name in names if name != "config.json"]
    config = read_json_object(source / "config.json")
    if recipe.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(recipe.dtype).removeprefix("torch.")
    return [*contents, BytesFile("config.json", json.dumps(config, indent=1))]


def provenance_of(source: Path) -> dict[str, Any]:
    """Where a model came from: its folder, its step if it is a checkpoint, and the checksums of its weights."""
    manifest = read_manifest(source)
    step = {} if manifest is None else {"step": manifest["step"]}
    return {"path": str(source), **step, "weights": checksums(weight_files(source))}
