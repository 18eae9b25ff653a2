"""Hugging Face directories out, as contents to write now or later (in: `models/weight_loading.py`).

Of a model that is spread over processes every one writes whole tensors, about as many bytes as the others, into files
of its own: `transformers` reads them like any model in several files. One process that writes for all would hold all of
it in its memory, and all would wait for its disk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from burnish.models.architecture import read_config, to_hf
from burnish.models.decoder import Decoder
from burnish.models.quantization.nf4_decoder import shapes_of
from burnish.models.weight_loading import blocks, hf_tensors
from burnish.run.checkpoint.contents import Blob, Content, Part, TensorBytes, TensorFile, part_of, write_contents
from burnish.run.checkpoint.saving import HostCopy, Stage, leave

FILE_BYTES = 4 << 30
METADATA = {"format": "pt"}
T = TypeVar("T")


def save_decoder(
    model: Decoder,
    directory: Path,
    source: Path | None,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> None:
    """A Hugging Face directory that transformers loads unchanged (the tokenizer is saved by its own class).

    A model that came from a directory keeps that directory's config.json (with the dtype it now has) and
    generation_config.json; a new one gets both written. `tensors` are the weights, where they are not the model's own.
    """
    write_contents(directory, decoder_contents(model, leave, source, eos_ids, pad_id, tensors))


def decoder_contents(
    model: Decoder,
    stage: Stage,
    source: Path | None,
    eos_ids: tuple[int, ...] = (),
    pad_id: int | None = None,
    tensors: Iterable[tuple[str, Tensor]] | None = None,
) -> Iterator[Content]:
    """The same as contents, one at a time; of a model that is spread over processes, this process's."""
    part = part_of(model.parameters())
    if part.index == 0:
        yield from _configs(model, source, eos_ids, pad_id)
    parameters = shapes_of(model)
    sizes = [
        (block.theirs, block.shard(parameters).numel * parameters[block.ours].element_size())
        for block in blocks(model.arch)
    ]
    if part.count > 1 and not isinstance(stage, HostCopy):
        stage = HostCopy()  # what is gathered is gone when the next parameter is
    yield from weight_contents(hf_tensors(model) if tensors is None else tensors, sizes, stage, part)


def weight_contents(
    tensors: Iterable[tuple[str, T]], sizes: Sequence[tuple[str, int]], stage: Callable[[T], TensorBytes], part: Part
) -> Iterator[Content]:
    """The files of named tensors that are this process's, each as soon as its last tensor is there.

    `sizes` has the names of all tensors, in their order, with their bytes; of a model in several files the first
    process also has the index.
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
        yield Blob("model.safetensors.index.json", json.dumps(index, indent=1))


def plan_files(sizes: Sequence[tuple[str, int]], num_parts: int) -> list[tuple[int, list[str]]]:
    """Which process writes which tensors, file by file: in order, about the same bytes for all, at most FILE_BYTES a file."""
    total = sum(size for _, size in sizes)
    files: list[tuple[int, list[str]]] = []
    before = filled = 0
    for name, size in sizes:
        owner = (2 * before + size) * num_parts // (2 * total)  # whose share the tensor's middle falls into
        if not files or files[-1][0] != owner or filled + size > FILE_BYTES:
            files.append((owner, []))
            filled = 0
        files[-1][1].append(name)
        before, filled = before + size, filled + size
    return files


def _configs(model: Decoder, source: Path | None, eos_ids: tuple[int, ...], pad_id: int | None) -> list[Content]:
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    if source is None:
        config: dict[str, Any] = to_hf(model.arch, dtype, eos_ids, pad_id)
        generation = {"eos_token_id": config["eos_token_id"], "pad_token_id": pad_id, "do_sample": True}
        return [_json("generation_config.json", generation), _json("config.json", config)]
    config = read_config(source)
    config.pop("torch_dtype", None)
    kept = source / "generation_config.json"
    contents: list[Content] = [Blob(kept.name, kept.read_bytes())] if kept.is_file() else []
    return [*contents, _json("config.json", {**config, "dtype": dtype})]


def _json(name: str, value: dict[str, Any]) -> Blob:
    return Blob(name, json.dumps(value, indent=1))
