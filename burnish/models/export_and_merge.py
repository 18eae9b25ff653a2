"""Export a checkpoint as a model directory (`burnish export`), and merge several models into one (`burnish merge`).

An export copies the files, converts the dtype of the weights, or merges adapters into their base. A merge averages the
weights of several models with the same architecture, tokenizer and tensors. All other files (config, tokenizer, chat
template, generation settings) come from the first model. A merge holds one block of rows of each model in memory, so that
a model far larger than memory can be merged.
"""

from __future__ import annotations

import json
import math
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

from burnish.config.errors import UserError
from burnish.config.model import Model
from burnish.config.yaml_text import read_json_object
from burnish.models.answer_steps import STEP_FILE
from burnish.models.architecture import read_config
from burnish.models.compatibility import check_same_architecture, check_same_tokenizer
from burnish.models.heads import SCORE_STATISTICS_FILE, load_score_model
from burnish.models.lora.peft_files import base_model_of, is_adapter, is_score_adapter
from burnish.models.policy import load_policy, save_merged
from burnish.models.tokenizer import Tokenizer
from burnish.models.weight_files import StoredTensor, file_tensors, weight_contents, weight_files
from burnish.run.checkpoint.checkpoints import MANIFEST_FILE, read_manifest
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import BytesFile, Content, WriterRank, write_contents
from burnish.run.checkpoint.tensor_file import SAFETENSORS_DTYPES, TensorBytes, TensorFile, flat_bytes
from burnish.run.durable_files import checksums

SAFETENSORS = ".safetensors"
INDEX = "model.safetensors.index.json"
MERGE_METHODS = ("linear", "slerp")
PROVENANCE = "merge.json"
BLOCK_ELEMENTS = 1 << 22
"""Elements of one block of rows of a merge."""
COPIED_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".tiktoken")
REPORT_EVERY_S = 2.0
TIED_HEAD = "lm_head.weight"
"""Some exporters write the tied output head, a duplicate of the embedding."""
MERGEABLE_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items() if not name.startswith("F8")}
Report = Callable[[str], None]


def copy_model(source: Path, names: Sequence[str], out: Path, dtype: torch.dtype | None) -> None:
    """Copy the named files of a model from `source` to `out`; weights are converted to `dtype` if given, one file at a time."""
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
    """Write the base model of an adapter directory with the adapters merged, in the base's dtype by default."""
    if not is_adapter(source):
        raise UserError(f"{source} has no adapters to merge: it is a whole model already")
    name = str(dtype).removeprefix("torch.") if dtype is not None else _stored_dtype(base_model_of(source))
    if is_score_adapter(source):
        score_model = load_score_model(source, getattr(torch, name), torch.device("cpu"))
        write_contents(
            out, score_model.contents(keep_in_place, base_model_of(source), Tokenizer.load(source), merged=True)
        )
        for file in (SCORE_STATISTICS_FILE, STEP_FILE):
            if (source / file).is_file():
                shutil.copyfile(source / file, out / file)
        return
    policy = load_policy(Model.model_validate({"dtype": name, "device": "cpu"}), source, None, seed=0)
    save_merged(policy, out)


def _convert_file(file: Path, out: Path, name: str, dtype: torch.dtype) -> int:
    """Convert the floating-point tensors of one file to `dtype`. Returns the bytes of all tensors."""
    tensors = {}
    for key, stored in file_tensors(file):
        tensor = stored.whole()
        tensors[key] = keep_in_place(tensor.to(dtype) if tensor.is_floating_point() else tensor.clone())
    TensorFile(name, tensors, {"format": "pt"}).write(out)
    return sum(tensor.num_bytes for tensor in tensors.values())


def _stored_dtype(base: Path) -> str:
    config = read_config(base)
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=1))


# --- merge ---


@dataclass(frozen=True)
class MergeRecipe:
    """How the weights of several models are combined."""

    weights: tuple[float, ...]
    method: str = "linear"
    dtype: torch.dtype | None = None
    """Dtype of the result; None means that of the first model."""


def merge_models(sources: Sequence[Path], folder: Path, recipe: MergeRecipe, report: Report) -> dict[str, Any]:
    """Write the merged model to a folder; returns its provenance record, which is also written."""
    check_merge(sources, recipe)
    with ExitStack() as stack:
        models = [open_weights(source, stack) for source in sources]
        for model, source in zip(models[1:], sources[1:], strict=True):
            check_same_tensors(models[0], model, sources[0], source)
        dtypes = {name: merged_dtype(handle.get_slice(name).get_dtype(), recipe) for name, handle in models[0].items()}
        tensor_done = _progress_counter(report, len(models[0]))
        blocks = {
            name: MergedTensor(dtypes[name], _shape(handle, name), (), name, tuple(models), recipe, tensor_done)
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
    """Raise if the models cannot be merged, naming the first difference."""
    if len(sources) < 2:
        raise UserError(f"expected two models or more to merge, got {len(sources)}")
    if len(recipe.weights) != len(sources):
        raise UserError(f"{len(recipe.weights)} weights for {len(sources)} models: give one per model")
    if abs(sum(recipe.weights) - 1) > 1e-6:
        raise UserError(f"the weights add up to {sum(recipe.weights):g}; the weights of an average must add up to 1")
    if recipe.method == "slerp" and (len(sources) != 2 or not 0 <= recipe.weights[1] <= 1):
        raise UserError("slerp interpolates between two models: give two models, with weights in 0..1")
    for source in sources:
        if is_adapter(source):
            raise UserError(f"{source} is an adapter, not a whole model: `burnish export --merged` makes one of it")
        if read_config(source).get("quantization_config"):
            raise UserError(f"{source}: its weights are quantised and cannot be averaged")
    for other in sources[1:]:
        check_same_architecture(sources[0], other)
        check_same_tokenizer(sources[0], other)


def open_weights(source: Path, stack: ExitStack) -> dict[str, Any]:
    """The open safetensors file of each tensor, by name."""
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
    """Raise if two models differ in the names or shapes of their tensors."""
    if differing := sorted(one.keys() ^ other.keys()):
        owner = first if differing[0] in one else second
        raise UserError(f"the models to merge differ in their weights: only {owner} has {differing[0]}")
    for name in one:
        shapes = _shape(one[name], name), _shape(other[name], name)
        if shapes[0] != shapes[1]:
            raise UserError(f"the models to merge differ in {name}: {shapes[0]} in {first}, {shapes[1]} in {second}")


@dataclass(frozen=True)
class MergedTensor(TensorBytes):
    """A tensor of the result, computed block by block while it is written."""

    name: str
    models: tuple[dict[str, Any], ...]
    recipe: MergeRecipe
    done: Callable[[], None]
    """Called when the tensor has been written."""

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
        """The weights of the recipe, or the slerp weights of this tensor."""
        if self.recipe.method == "linear":
            return self.recipe.weights
        products = torch.zeros(3, dtype=torch.float64)
        for block in row_blocks(self.shape):
            a, b = (tensor[block].double().reshape(-1) for tensor in stored)
            products += torch.stack([a @ b, a @ a, b @ b])
        return slerp_weights(angle_between(*products.tolist()), self.recipe.weights[1])

    def merged(self, parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        """Average one block; tensors of integers must be equal in all models."""
        if parts[0].is_floating_point():
            return weighted_average(parts, weights).to(self.dtype)
        if any(not torch.equal(parts[0], part) for part in parts[1:]):
            raise UserError(f"the models to merge differ in {self.name}, which holds integers and has no average")
        return parts[0]


def row_blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Index blocks of rows of at most BLOCK_ELEMENTS elements, but at least one row."""
    if not shape:
        yield ()
        return
    rows = max(1, BLOCK_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    for start in range(0, shape[0], rows):
        yield (slice(start, min(shape[0], start + rows)), *(slice(0, size) for size in shape[1:]))


def merged_dtype(stored: str, recipe: MergeRecipe) -> torch.dtype:
    """The dtype of a merged tensor, from safetensors' name of its stored dtype."""
    own = MERGEABLE_DTYPES.get(stored)
    if own is None:
        raise UserError(f"weights of dtype {stored} cannot be averaged")
    return own if recipe.dtype is None or not own.is_floating_point else recipe.dtype


def _shape(handle: Any, name: str) -> tuple[int, ...]:
    return tuple(handle.get_slice(name).get_shape())


def _progress_counter(report: Report, num: int) -> Callable[[], None]:
    """A function to call after each tensor, which reports progress every few seconds."""
    count, last = 0, time.monotonic()

    def done() -> None:
        nonlocal count, last
        count += 1
        if time.monotonic() - last > REPORT_EVERY_S:
            last = time.monotonic()
            report(f"{count} of {num} tensors")

    return done


def config_contents(source: Path, recipe: MergeRecipe) -> list[Content]:
    """Config, tokenizer and templates of a model; of a checkpoint, the model files of its manifest."""
    manifest = read_manifest(source)
    if manifest is not None:
        names = [name for name, entry in manifest["files"].items() if entry["of"] == "model"]
    else:
        names = [path.name for path in sorted(source.iterdir()) if path.is_file() and path.suffix in COPIED_SUFFIXES]
    names = [
        name for name in names if name not in (INDEX, MANIFEST_FILE, PROVENANCE) and not name.endswith(".safetensors")
    ]
    contents: list[Content] = [BytesFile(name, (source / name).read_bytes()) for name in names if name != "config.json"]
    config = read_json_object(source / "config.json")
    if recipe.dtype is not None:
        config.pop("torch_dtype", None)
        config["dtype"] = str(recipe.dtype).removeprefix("torch.")
    return [*contents, BytesFile("config.json", json.dumps(config, indent=1))]


def provenance_of(source: Path) -> dict[str, Any]:
    """A model's folder, its step if it is a checkpoint, and the checksums of its weights."""
    manifest = read_manifest(source)
    step = {} if manifest is None else {"step": manifest["step"]}
    return {"path": str(source), **step, "weights": checksums(weight_files(source))}


# --- Merging without training
#
# Kimi k1.5 (2501.12599) averages a long-thinking model with a short one (long2short). Sums are in float32 at least. A
# weight of 0 leaves a tensor out, so that weights 1 and 0 give the first one bit for bit.

PARALLEL_ANGLE = 1e-6
"""Below this angle slerp is linear interpolation, which is the same there and does not divide by 0."""


def weighted_average(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_i w_i tensor_i, in float32, or float64 for float64 tensors."""
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    used = [(t.to(wide), w) for t, w in zip(tensors, weights, strict=True) if w != 0]
    total = used[0][0] * used[0][1]
    for tensor, weight in used[1:]:
        total += tensor * weight
    return total


def angle_between(dot: float, square_a: float, square_b: float) -> float:
    """The angle between two vectors from their products a.b, a.a and b.b; 0 if one of them is zero."""
    norms = math.sqrt(square_a) * math.sqrt(square_b)
    return math.acos(max(-1.0, min(1.0, dot / norms))) if norms else 0.0


def slerp_weights(theta: float, share: float) -> tuple[float, float]:
    """sin((1 - t) theta) / sin(theta) and sin(t theta) / sin(theta) with t = `share`: the weights of a and b (Shoemake, 1985).

    Parallel and opposite vectors are interpolated linearly; opposite ones have no unique arc.
    """
    if share in (0.0, 1.0) or min(theta, math.pi - theta) < PARALLEL_ANGLE:
        return 1 - share, share
    return math.sin((1 - share) * theta) / math.sin(theta), math.sin(share * theta) / math.sin(theta)
