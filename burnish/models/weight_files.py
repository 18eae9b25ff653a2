"""Load and save the decoder as a Hugging Face directory: safetensors only, checked tensor by tensor.

The table of `weight_blocks.py` says which rows of our parameters each tensor is, and serves loading and saving.

Saving returns contents that are written now or later. If a model is sharded over processes, each process writes whole
tensors, about the same number of bytes, to its own files; `transformers` reads them like any model in several files. A
single writer would hold the whole model in memory, and all processes would wait for its disk.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from burnish.config.errors import UserError, did_you_mean
from burnish.config.model import LoraBase
from burnish.config.yaml_text import check_file_name, read_json_object
from burnish.core.pipeline_stage import PipelineStage, stage_of, whole_tensor
from burnish.core.sharded_tensors import (
    Slices,
    at_origin,
    blocks_of_permuted_rows,
    local_shard,
    local_tensor,
    overlap,
)
from burnish.models.architecture import (
    Architecture,
    architecture_from_hf,
    architecture_to_hf,
    read_config,
    why_not_native,
)
from burnish.models.decoder import Decoder
from burnish.models.model_families import FAMILIES
from burnish.models.nf4 import DenseWeights, WeightsToFill, quantise_layers, weight_shapes
from burnish.models.vision.processor_files import processor_contents
from burnish.models.weight_blocks import WeightBlock, weight_blocks
from burnish.models.weight_layout import RowOrder, in_hf_order, row_order_of
from burnish.run.checkpoint.saver import HostCopy, TensorStaging, keep_in_place
from burnish.run.checkpoint.snapshot import BytesFile, Content, WriterRank, write_contents, writer_rank_of
from burnish.run.checkpoint.tensor_file import TensorBytes, TensorFile

LAYER_NAME = re.compile(r"(?:language_model\.)?model\.(?:language_model\.|text_model\.)?layers\.(\d+)\.")
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
FILE_BYTES = 4 << 30
"""Bytes of one safetensors file at most."""
METADATA = {"format": "pt"}
T = TypeVar("T")
_patch_lock = threading.RLock()
"""Only one thread may patch `reset_parameters` at a time; otherwise the original functions would be lost."""


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Create modules on the meta device without initialising them.

    On the meta device torch's initialisation runs in Python, and its first call imports the compiler, which takes two seconds.
    """
    kinds: tuple[Any, ...] = (nn.Linear, nn.Embedding)
    with _patch_lock:
        original_inits = [kind.reset_parameters for kind in kinds]
        for kind in kinds:
            kind.reset_parameters = _skip_init
        try:
            with torch.device("meta"):
                yield
        finally:
            for kind, function in zip(kinds, original_inits, strict=True):
                kind.reset_parameters = function


def materialise(module: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Allocate a meta module's tensors on a device, uninitialised; floating-point tensors get `dtype`.

    No float32 copy of the model is ever created. torch's `to_empty` does the same, but imports the compiler.
    """
    module.to(dtype)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            setattr(part, name, nn.Parameter(_empty_like(parameter, device), parameter.requires_grad))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, _empty_like(buffer, device))


def _empty_like(like: Tensor, device: torch.device) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _skip_init(module: nn.Module) -> None:
    pass


def published_tensors(
    tensors: Iterable[tuple[str, Tensor | StoredTensor]], arch: Architecture
) -> Iterator[tuple[str, Tensor | StoredTensor | StoredMatrix]]:
    """Named tensors under the names of the family's published files.

    Image-text models of transformers' modules have other prefixes. Their stacked experts are divided into one tensor for each.
    """
    vision_names = FAMILIES[arch.family].vision_names
    if vision_names is not None:
        tensors = ((vision_names.published(name), tensor) for name, tensor in tensors)
    shape, names = arch.experts, FAMILIES[arch.family].expert_names
    if shape is None or names is None:
        yield from tensors
        return
    stacks: dict[str, tuple[tuple[str, int, int], ...]] = {}
    size = shape.expert_size
    stacks[f"{names.module}.experts.gate_up_proj"] = (names.gate, 0, size), (names.up, size, 2 * size)
    stacks[f"{names.module}.experts.down_proj"] = ((names.down, 0, arch.hidden_size),)
    for name, tensor in tensors:
        match = LAYER_NAME.match(name)
        parts = stacks.get(name[match.end() :]) if match else None
        if match is None or parts is None:
            is_router = match is not None and name[match.end() :] == f"{names.module}.gate.weight"
            yield f"{match[0]}{names.router}.weight" if match is not None and is_router else name, tensor
            continue
        sizes = (shape.num_experts, parts[-1][2])
        if tuple(tensor.shape[:2]) != sizes:
            raise UserError(f"{name} is {tuple(tensor.shape)} but config.json implies {(*sizes, '...')}")
        for e in range(shape.num_experts):
            for pattern, start, stop in parts:
                yield f"{match[0]}{pattern.format(e)}.weight", StoredMatrix(tensor, e, start, stop)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory; raise for pickled weights."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = {check_file_name(name, index) for name in _weight_map(index).values()}
        files = [directory / name for name in sorted(names)]
        missing = [f.name for f in files if not f.is_file()]
        if missing:
            raise UserError(f"{directory}: {index.name} names files that are not there: {', '.join(missing)}")
        return files
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    pickles = sorted(f.name for pattern in PICKLE_PATTERNS for f in directory.glob(pattern))
    if pickles:
        raise UserError(
            f"{directory} holds its weights as pickle ({', '.join(pickles[:3])}), which can run any code when it is loaded; "
            "convert it to safetensors (transformers: model.save_pretrained(...)) and load that"
        )
    raise UserError(f"{directory} has no weights: expected model.safetensors or model.safetensors.index.json")


def _weight_map(index: Path) -> dict[str, str]:
    """File name by tensor name."""
    content = read_json_object(index)
    if "weight_map" not in content:
        raise UserError(f"{index} is damaged: it should be a JSON object with a `weight_map`")
    weight_map = content["weight_map"]
    if not isinstance(weight_map, dict):
        raise UserError(f"{index} is damaged: `weight_map` should be an object, not a {type(weight_map).__name__}")
    return weight_map


def load_decoder(directory: Path, dtype: torch.dtype, device: torch.device, base: LoraBase = "dtype") -> Decoder:
    """Load the native decoder from a Hugging Face directory; its layers' matrices are quantised if `base` is an NF4 format."""
    model = _decoder_on_meta(directory, base)
    materialise(model, dtype, device)
    load_tensors(model, stored_tensors(directory), str(directory))
    return model


def defer_decoder(directory: Path, dtype: torch.dtype, base: LoraBase = "dtype") -> Decoder:
    """The decoder of a Hugging Face directory on the meta device: divide it over processes first, then call `load_deferred`."""
    model = _decoder_on_meta(directory, base).to(dtype)
    model.unloaded_from = directory
    return model


@torch.no_grad()
def load_deferred(model: nn.Module, device: torch.device) -> None:
    """Allocate the parameters that this process has of a model on the meta device, and read them from the model's files.

    No process ever holds more than its part. Parameters of a head around the decoder become 0. Adapters are not on the meta device,
    and keep their values.
    """
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    for decoder in decoders:
        assert decoder.unloaded_from is not None, "a model is on the meta device as a whole"
        load_tensors(decoder, stored_tensors(decoder.unloaded_from), str(decoder.unloaded_from), stage_of(model))
        decoder.unloaded_from = None
    inside = {id(parameter) for decoder in decoders for parameter in decoder.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.zero_()


def _decoder_on_meta(directory: Path, base: LoraBase) -> Decoder:
    """A decoder of a directory's architecture without memory, checked against the shapes in the files."""
    config = read_config(directory)
    reason = why_not_native(config)
    if reason:
        raise UserError(f"{directory} cannot run on the native decoder: {reason}; set model.backend=transformers")
    arch = architecture_from_hf(config, str(directory / "config.json"))
    _check_layers(directory, arch)
    with on_meta_device():
        model = Decoder(arch)
        _check_shapes(directory, model)
        quantise_layers(model, base)
    return model


def _check_layers(directory: Path, arch: Architecture) -> None:
    """Raise if config.json has another number of layers than the files, before any layer is created."""
    found = {int(match[1]) for name, _ in stored_tensors(directory) if (match := LAYER_NAME.match(name))}
    found -= set(range(arch.num_layers, arch.num_layers + arch.num_ignored_layers))
    if arch.num_layers != len(found):
        raise UserError(
            f"{directory}: config.json implies {arch.num_layers:,} layers, but the weights have {len(found):,}"
        )


def _check_shapes(directory: Path, model: Decoder) -> None:
    """Raise if a tensor's shape differs from what config.json implies, before memory is allocated."""
    known, parameters = {block.hf_name: block for block in weight_blocks(model.arch)}, dict(model.named_parameters())
    for name, tensor in published_tensors(stored_tensors(directory), model.arch):
        if name in known and known[name].shard(parameters).sizes != tensor.shape:
            wanted = known[name].shard(parameters).sizes
            raise UserError(f"{directory}: {name} is {tensor.shape} but config.json implies {wanted}")


def load_tensors(
    model: Decoder,
    tensors: Iterable[tuple[str, Tensor | StoredTensor]],
    where: str,
    stage: PipelineStage | None = None,
) -> None:
    """Copy named Hugging Face tensors into the model in place. All must be known and fit, and none may be missing.

    `stage` is that of a model around this one, which is divided into stages as a whole.
    """

    def is_spare(name: str) -> bool:
        """Some exporters write the tied head as well, and old exports contain RoPE's derived buffer."""
        if (layer := LAYER_NAME.match(name)) and model.arch.num_ignored_layers:
            return 0 <= int(layer[1]) - model.arch.num_layers < model.arch.num_ignored_layers
        return (name == "lm_head.weight" and model.arch.tied) or name.endswith("rotary_emb.inv_freq")

    wanted = ((name, tensor) for name, tensor in published_tensors(tensors, model.arch) if not is_spare(name))
    weights = WeightsToFill(model)
    load_weight_blocks(
        weights,
        weight_blocks(model.arch),
        wanted,
        where,
        "config.json implies",
        partial(row_order_of, model),
        weights.filled,
        stage_of(model) if stage is None else stage,
    )
    model.drop_features()


def load_weight_blocks(
    parameters: Mapping[str, Tensor],
    table: Iterable[WeightBlock],
    tensors: Iterable[tuple[str, Tensor | StoredTensor | StoredMatrix]],
    where: str,
    whose: str,
    order: RowOrder | None = None,
    filled: Callable[[str], None] | None = None,
    stage: PipelineStage | None = None,
) -> None:
    """Copy named tensors into their blocks of the parameters; `whose` says in an error what implies the shapes.

    If parameters are sharded over processes, each process reads only its shard. `order` gives the row order of a
    parameter; `filled` is called with the name of each parameter that has all its blocks. Parameters that only other stages
    have are not read.
    """
    known = {block.hf_name: block for block in table}
    missing, num_left = set(known), Counter(block.parameter_name for block in known.values())
    for name, tensor in tensors:
        if name not in known:
            raise UserError(f"{where}: unexpected tensor {name!r}{did_you_mean(name, known)}")
        if stage is not None and known[name].parameter_name not in parameters:
            missing.discard(name)
            continue
        parameter, stored = parameters[known[name].parameter_name], known[name].shard(parameters)
        if stored.sizes != tuple(tensor.shape):
            raise UserError(f"{where}: {name} is {tuple(tensor.shape)} but {whose} {stored.sizes}")
        rows = None if order is None else order(known[name].parameter_name)
        for block in blocks_of_permuted_rows(local_shard(parameter), None if rows is None else rows.tolist()):
            if (common := overlap(block, at_origin(stored))) is not None:
                local_tensor(parameter)[common.target].copy_(tensor[common.source])
        if name in missing:
            missing.discard(name)
            num_left[known[name].parameter_name] -= 1
            if filled is not None and not num_left[known[name].parameter_name]:
                filled(known[name].parameter_name)
    if missing:
        raise UserError(f"{where}: {len(missing)} tensors are missing, first {sorted(missing)[0]}")


class StoredTensor:
    """A tensor in an open safetensors file; only the requested part is read."""

    def __init__(self, handle: Any, name: str) -> None:
        self._handle, self._name, self._slice = handle, name, handle.get_slice(name)
        self.shape: tuple[int, ...] = tuple(self._slice.get_shape())

    def __getitem__(self, block: Slices) -> Tensor:
        if block == tuple(slice(0, length) for length in self.shape):
            return self.whole()
        part: Tensor = self._slice[block]
        return part

    def whole(self) -> Tensor:
        tensor: Tensor = self._handle.get_tensor(self._name)
        return tensor


class StoredMatrix:
    """Rows [start, stop) of matrix `index` of a stacked tensor [experts, rows, columns]; only the requested part is read."""

    def __init__(self, stack: Tensor | StoredTensor, index: int, start: int, stop: int) -> None:
        self._stack, self._index, self._start = stack, index, start
        self.shape: tuple[int, ...] = (stop - start, int(stack.shape[2]))

    def __getitem__(self, block: Slices) -> Tensor:
        rows, columns = (slice(*part.indices(size)) for part, size in zip(block, self.shape, strict=True))
        rows = slice(self._start + rows.start, self._start + rows.stop)
        part: Tensor = self._stack[(slice(self._index, self._index + 1), rows, columns)]
        return part[0]


def stored_tensors(directory: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of a model directory by their Hugging Face names, read one at a time or in part."""
    for file in weight_files(directory):
        yield from file_tensors(file)


def file_tensors(file: Path) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of one safetensors file by name."""
    try:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118 (a handle is not a dict)
                yield name, StoredTensor(handle, name)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file} cannot be read as safetensors: {error}") from error


def hf_tensors(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The weights under Hugging Face's names, as views of our parameters; NF4 matrices are dequantised.

    If the model is sharded over processes, parameters are gathered one at a time, and all processes must iterate over all.
    """
    yield from block_tensors(
        DenseWeights(model), weight_blocks(model.arch), partial(row_order_of, model), stage_of(model)
    )


def block_tensors(
    parameters: Mapping[str, Tensor],
    table: Iterable[WeightBlock],
    order: RowOrder | None = None,
    stage: PipelineStage | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The blocks of the parameters under their file names, in the order of the table."""
    name, tensor = "", torch.empty(0)
    for block in table:
        if block.parameter_name != name:
            name, tensor = block.parameter_name, whole_tensor(block.parameter_name, parameters, stage)
            tensor = tensor if order is None else in_hf_order(tensor, order(name))
        yield block.hf_name, tensor[block.start : block.stop]


# --- saving ---


def save_decoder(
    model: Decoder,
    directory: Path,
    source: Path | None,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """Write a Hugging Face directory that transformers loads; the tokenizer is saved separately.

    A model from a directory keeps that directory's config.json (with its current dtype) and generation_config.json; a new
    model gets new ones. `tensors` replace the model's own weights.
    """
    write_contents(directory, decoder_contents(model, keep_in_place, source, eos_ids, pad_id, tensors))


def decoder_contents(
    model: Decoder,
    stage: TensorStaging,
    source: Path | None,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> Iterator[Content]:
    """The files of `save_decoder` as contents, one at a time; of a sharded model, those of this process."""
    part = writer_rank_of(model)
    if part.index == 0:
        yield from _config_contents(model, source, eos_ids, pad_id)
    tensors = hf_tensors(model) if tensors is None else tensors
    yield from weight_contents(tensors, hf_tensor_sizes(model), gathering_stage(stage, part), part)


def hf_tensor_sizes(model: Decoder) -> list[tuple[str, int]]:
    """Names and bytes of `hf_tensors`."""
    shapes = weight_shapes(model)
    return [
        (b.hf_name, b.shard(shapes).numel * shapes[b.parameter_name].element_size()) for b in weight_blocks(model.arch)
    ]


def gathering_stage(stage: TensorStaging, part: WriterRank) -> TensorStaging:
    """A staging for tensors of a sharded model: a gathered tensor is freed when the next one is gathered, so it is copied."""
    return stage if part.count == 1 or isinstance(stage, HostCopy) else HostCopy()


def weight_contents(
    tensors: Iterable[tuple[str, T]],
    sizes: Sequence[tuple[str, int]],
    stage: Callable[[T], TensorBytes],
    part: WriterRank,
) -> Iterator[Content]:
    """This process's files of named tensors, each as soon as its last tensor is staged.

    `sizes` has the names and bytes of all tensors in order. If there are several files, process 0 also has the index.
    """
    files = plan_files(sizes, part.count)
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    names = ["model.safetensors"] if len(files) == 1 else names
    given = iter(tensors)
    for name, (owner, members) in zip(names, files, strict=True):
        held = {}
        for member in members:
            found, tensor = next(given)
            assert found == member, f"{found} came where {member} was announced"
            if owner == part.index:
                held[member] = stage(tensor)
        if owner == part.index:
            yield TensorFile(name, held, METADATA)
    if len(files) > 1 and part.index == 0:
        weight_map = {member: name for name, (_, members) in zip(names, files, strict=True) for member in members}
        index = {"metadata": {"total_size": sum(size for _, size in sizes)}, "weight_map": weight_map}
        yield BytesFile("model.safetensors.index.json", json.dumps(index, indent=1))


def plan_files(sizes: Sequence[tuple[str, int]], num_parts: int) -> list[tuple[int, list[str]]]:
    """(process, tensor names) of each file: tensors in order, about equal bytes per process, at most FILE_BYTES per file."""
    total = sum(size for _, size in sizes)
    files: list[tuple[int, list[str]]] = []
    before = filled = 0
    for name, size in sizes:
        owner = (
            (2 * before + size) * num_parts // (2 * total)
        )  # the process whose share contains the middle of the tensor
        if not files or files[-1][0] != owner or filled + size > FILE_BYTES:
            files.append((owner, []))
            filled = 0
        files[-1][1].append(name)
        before, filled = before + size, filled + size
    return files


def _config_contents(
    model: Decoder, source: Path | None, eos_ids: tuple[int, ...], pad_id: int | None
) -> list[Content]:
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    if source is None:
        config: dict[str, Any] = architecture_to_hf(model.arch, dtype, eos_ids, pad_id)
        generation = {"eos_token_id": config["eos_token_id"], "pad_token_id": pad_id, "do_sample": True}
        blobs: list[Content] = [_json_blob("generation_config.json", generation), _json_blob("config.json", config)]
        return [*blobs, *processor_contents(model.arch.vision, None)]
    config = read_config(source)
    config.pop("torch_dtype", None)
    kept = source / "generation_config.json"
    contents: list[Content] = [BytesFile(kept.name, kept.read_bytes())] if kept.is_file() else []
    contents += processor_contents(model.arch.vision, source)
    return [*contents, _json_blob("config.json", {**config, "dtype": dtype})]


def _json_blob(name: str, value: dict[str, Any]) -> BytesFile:
    return BytesFile(name, json.dumps(value, indent=1))
