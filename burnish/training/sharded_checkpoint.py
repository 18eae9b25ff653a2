"""Saves named tensors in one file per process, and loads them in any number of processes (`core/sharded_tensors.py`).

    optimizer.safetensors                       one process
    optimizer-00001-of-00004.safetensors ...    four processes

A tensor has the same name in every file. If a file has a block of it, the metadata gives the shape of the whole tensor and the
block's offsets. A process reads exactly the blocks that it will hold, from whichever files have them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.core.pipeline_stage import stage_of
from burnish.core.sharded_tensors import (
    PlacedShard,
    Shard,
    at_origin,
    blocks_of_permuted_rows,
    full_shard,
    in_block_units,
    is_dtensor,
    is_first_copy,
    local_shard,
    local_tensor,
    plan_reads,
)
from burnish.models.decoder import Decoder, drop_features
from burnish.models.weight_layout import row_order_of
from burnish.run.checkpoint.saver import TensorStaging
from burnish.run.checkpoint.snapshot import Content, WriterRank, writer_rank_of
from burnish.run.checkpoint.tensor_file import SAFETENSORS_DTYPES, TensorFile
from burnish.training.optimizers.offload import TensorSpec

SHARD_METADATA_KEY = "shards"
DTYPE_BY_NAME = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


# --- Saving ------------------------------------------------------------------------------------------------------------


def tensor_contents(name: str, tensors: Mapping[str, Tensor], model: nn.Module, stage: TensorStaging) -> list[Content]:
    """This process's file of tensors that are named after a model's parameters and sharded like them."""
    part, blocks = writer_rank_of(model), parameter_blocks(model)
    own = {key: local_tensor(tensor) for key, tensor in tensors.items() if _is_saved_here(key, tensor, model, part)}
    return [shard_file(name, own, {key: blocks[key] for key in own if key in blocks}, stage, part)]


def state_contents(name: str, tensors: Mapping[str, Tensor], model: nn.Module, stage: TensorStaging) -> list[Content]:
    """This process's file of optimizer state. The tensors are local; `key/parameter` belongs to that parameter."""
    parameters, blocks = dict(model.named_parameters()), parameter_blocks(model)
    part = writer_rank_of(model)
    placed: dict[str, list[PlacedShard]] = {}
    own: dict[str, Tensor] = {}
    for flat, tensor in tensors.items():
        parameter_name = flat.split("/", 1)[1]
        parameter = parameters[parameter_name]
        is_sharded = is_dtensor(parameter) and tensor.dim() == parameter.dim()
        if is_sharded:
            placed[flat] = state_blocks(tuple(tensor.shape), parameter, blocks[parameter_name])
        if _is_saved_here(parameter_name, parameter if is_sharded else tensor, model, part):
            own[flat] = tensor
    return [shard_file(name, own, placed, stage, part)]


def _is_saved_here(name: str, tensor: Tensor, model: nn.Module, part: WriterRank) -> bool:
    """Whether this process saves what it holds of a tensor: the first copy, on the stage that owns the parameter `name`."""
    stage = stage_of(model)
    if stage is not None and not stage.owns(name):
        return False
    first_rank = 0 if stage is None else stage.first_rank
    return is_first_copy(tensor, first_rank) if is_dtensor(tensor) else part.index == first_rank


def parameter_blocks(model: nn.Module) -> dict[str, list[PlacedShard]]:
    """This process's blocks of each sharded parameter, with rows in the order of the saved parameter."""
    decoder = next((module for module in model.modules() if isinstance(module, Decoder)), None)
    blocks = {}
    for name, parameter in model.named_parameters():
        if is_dtensor(parameter):
            order = None if decoder is None else row_order_of(decoder, name)
            blocks[name] = blocks_of_permuted_rows(local_shard(parameter), None if order is None else order.tolist())
    return blocks


def distribute_like(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Whole tensors that are named after a model's parameters, sharded like them. A tensor that needs no change is returned as is.

    Tensors of other pipeline stages are left out.
    """
    parameters, blocks, stage = dict(model.named_parameters()), parameter_blocks(model), stage_of(model)
    found = {}
    for name, tensor in tensors.items():
        if stage is not None and name not in parameters:
            continue
        parameter = parameters[name].detach()
        found[name] = tensor.to(parameter.device)
        if name in blocks and not is_dtensor(tensor):
            made = found[name] = torch.empty_like(parameter, dtype=tensor.dtype)
            here = local_tensor(made)
            for _, common in plan_reads(blocks[name], [at_origin(full_shard(tensor.shape))]):
                here[common.target] = tensor[common.source].to(here.device)
    return found


def state_blocks(sizes: tuple[int, ...], parameter: Tensor, blocks: Sequence[PlacedShard]) -> list[PlacedShard]:
    """The blocks of a state tensor that belong to the blocks of its parameter.

    A state tensor may have one number for several of the parameter's, such as the scales of quantised moments. It is then divided
    at the same places, in units of those numbers.
    """
    of = local_tensor(parameter).shape
    each = [1 if size == full else full // max(size, 1) for size, full in zip(sizes, of, strict=True)]
    return [in_block_units(block, each) for block in blocks]


def shard_file(
    name: str,
    tensors: Mapping[str, Tensor],
    blocks: Mapping[str, Sequence[PlacedShard]],
    stage: TensorStaging,
    part: WriterRank,
) -> TensorFile:
    """One process's file. `blocks` gives, for tensors that are blocks of larger ones, which blocks they are."""
    described = {
        key: {
            "shape": blocks[key][0].shard.shape,
            "blocks": [(block.at, block.shard.offsets, block.shard.sizes) for block in blocks[key]],
        }
        for key in tensors
        if key in blocks
    }
    metadata = {SHARD_METADATA_KEY: json.dumps(described)} if described else {}
    return TensorFile(shard_file_name(name, part), {key: stage(tensor) for key, tensor in tensors.items()}, metadata)


def shard_file_name(name: str, part: WriterRank) -> str:
    """`name.safetensors`, numbered if several processes write."""
    return f"{name}.safetensors" if part.count == 1 else f"{name}-{part.index + 1:05d}-of-{part.count:05d}.safetensors"


# --- Loading -----------------------------------------------------------------------------------------------------------


class StoredTensors:
    """The tensors that one or more processes saved under a name; use it in a `with` block.

    A tensor that was read whole may be a view of the file: copy it if it must outlive the block.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.path = directory / f"{name}.safetensors"
        """The path for error messages."""
        self._stack = ExitStack()
        self._blocks: dict[str, list[tuple[Any, PlacedShard]]] = {}
        for file in _shard_files(directory, name):
            self._open(file)

    @property
    def names(self) -> set[str]:
        """Names of the tensors."""
        return set(self._blocks)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._blocks[name][0][1].shard.shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of the tensor."""
        return DTYPE_BY_NAME[self._blocks[name][0][0].get_slice(name).get_dtype()]

    def read(self, name: str, wanted: Sequence[PlacedShard] | None = None, sizes: Sequence[int] = ()) -> Tensor:
        """A tensor of the given sizes with the wanted blocks; the whole tensor if `wanted` is None."""
        blocks = self._blocks[name]
        if wanted is None:
            wanted, sizes = [at_origin(full_shard(self.shape(name)))], self.shape(name)
        try:
            plan = plan_reads(wanted, [block for _, block in blocks])
        except ValueError as error:
            raise UserError(f"{self.path} is incomplete: of {name}, {error}") from error
        everything = tuple(slice(0, size) for size in sizes)
        if len(plan) == 1 and plan[0][1].source == plan[0][1].target == everything:
            handle = blocks[plan[0][0]][0]
            if handle.get_slice(name).get_shape() == list(sizes):
                tensor: Tensor = handle.get_tensor(name)
                return tensor
        made = torch.empty(tuple(sizes), dtype=self.dtype(name))
        for index, common in plan:
            made[common.target] = blocks[index][0].get_slice(name)[common.source]
        return made

    def _open(self, file: Path) -> None:
        try:
            handle = self._stack.enter_context(safe_open(file, framework="pt"))
            described = json.loads((handle.metadata() or {}).get(SHARD_METADATA_KEY, "{}"))
            for name in handle.keys():  # noqa: SIM118 (a handle is not a dict)
                self._blocks.setdefault(name, []).extend(
                    (handle, block) for block in _stored_blocks(handle, name, described)
                )
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            self._stack.close()
            raise UserError(f"{file} cannot be read as safetensors: {error}") from error

    def __enter__(self) -> StoredTensors:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks = {}
        self._stack.close()


def _stored_blocks(handle: Any, name: str, described: dict[str, Any]) -> list[PlacedShard]:
    """A file's blocks of a tensor: those in its metadata, or the whole tensor."""
    if name not in described:
        return [at_origin(full_shard(handle.get_slice(name).get_shape()))]
    shape, blocks = tuple(described[name]["shape"]), described[name]["blocks"]
    return [PlacedShard(Shard(shape, tuple(offsets), tuple(sizes)), tuple(at)) for at, offsets, sizes in blocks]


def _shard_files(directory: Path, name: str) -> Sequence[Path]:
    """The single file, or all files of a numbered set; UserError if one is missing."""
    single = directory / f"{name}.safetensors"
    numbered = {
        int(found[1]): int(found[2])
        for path in directory.glob(f"{name}-*.safetensors")
        if (found := re.fullmatch(rf"{re.escape(name)}-(\d+)-of-(\d+)\.safetensors", path.name))
    }
    if not numbered:
        if single.is_file():
            return [single]
        raise UserError(f"{single} is not there: the checkpoint was saved by a run of another kind, or is incomplete")
    count = max(numbered.values())
    files = [directory / shard_file_name(name, WriterRank(index, count)) for index in range(count)]
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{missing[0]} is not there: the checkpoint is incomplete")
    return files


def read_state(
    stored: StoredTensors, model: nn.Module, specs: Callable[[str], Mapping[str, TensorSpec]]
) -> dict[str, Tensor]:
    """This process's part of an optimizer's state. `specs(name)` gives the shapes that the state of a parameter has here.

    State with other shapes is read whole, so that the optimizer can say in its error what it expected.
    """
    parameters, blocks = dict(model.named_parameters()), parameter_blocks(model)
    found, stage = {}, stage_of(model)
    for flat in stored.names:
        key, name = flat.split("/", 1)
        if stage is not None and name not in parameters:  # of another stage
            continue
        spec = specs(name).get(key)
        if name in blocks and spec is not None and len(spec[0]) == parameters[name].dim():
            wanted = state_blocks(spec[0], parameters[name], blocks[name])
            if all(block.shard.shape == stored.shape(flat) for block in wanted):
                found[flat] = stored.read(flat, wanted, spec[0])
                continue
        found[flat] = stored.read(flat)
    return found


@torch.no_grad()
def load_tensors_into(directory: Path, name: str, tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Copy stored tensors into `tensors` bit for bit, each process its own blocks; names, shapes and types must match.

    The tensors are named after a model's parameters and sharded like them. Those of other pipeline stages are not read.
    """
    blocks, stage = parameter_blocks(model), stage_of(model)
    elsewhere = set() if stage is None else stage.tensors.keys() - tensors.keys()
    with StoredTensors(directory, name) as stored:
        names = stored.names - elsewhere
        if names != tensors.keys():
            unexpected, missing = sorted(names - tensors.keys()), sorted(tensors.keys() - names)
            raise UserError(f"{stored.path} does not fit the model: unexpected {unexpected[:3]}, missing {missing[:3]}")
        for key, tensor in tensors.items():
            got, wanted = (stored.shape(key), stored.dtype(key)), (tuple(tensor.shape), tensor.dtype)
            if got != wanted:
                words = f"{got[0]} in {got[1]}, but the model has {wanted[0]} in {wanted[1]}"
                raise UserError(f"{stored.path} does not fit the model: {key} is {words}")
        for key, tensor in tensors.items():
            here = local_tensor(tensor)
            here.copy_(stored.read(key, blocks.get(key), here.shape))
    drop_features(model)
