"""The ranks that train one model together: process group, data-parallel shards, collectives, and the division of a model.

A process has a place in the dimensions of a mesh (`mesh.py`). Data-parallel ranks (`data` x `expert` of the config) work on different
sequences. The ranks of a context group divide the rows of the same micro-batches. The ranks of a tensor-parallel group divide the
weights of each layer, and those of a pipeline have different layers. "All ranks" below means the data-parallel ones: the others see the
same sequences and compute the same numbers, or get them from the last stage.

Token weights are fixed on the whole mini-batch before it is divided, so losses, gradients and metrics are plain sums over ranks.
A single process uses `SOLO`, which never loads torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.model import Lora
from burnish.config.placement import Parallel
from burnish.core.batch import Batch, Ragged
from burnish.core.pictures import PICTURE_COLUMNS
from burnish.core.routed_experts import EXPERT_COLUMNS
from burnish.core.segments import offsets_from_lengths
from burnish.models.architecture import Architecture
from burnish.models.decoder import Decoder
from burnish.models.weight_files import load_deferred
from burnish.training.packing import ATTENTION_COST, karmarkar_karp, prefix_trees, tree_cost, unshared_trees
from burnish.training.parallel.context_parallel import apply_context_parallel, check_keys_gathered
from burnish.training.parallel.expert_parallel import apply_expert_parallel, check_experts_divisible
from burnish.training.parallel.fsdp import apply_fsdp, backbone_of, reshard
from burnish.training.parallel.mesh import LearnerMesh, learner_mesh
from burnish.training.parallel.pipeline import apply_pipeline, stage_layers, sum_tied_gradient
from burnish.training.parallel.tensor_parallel import apply_tensor_parallel, check_divisible, reduce_partial_gradients

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ORIGINAL_INDEX = "place"
"""Sequence column with each sequence's index in the whole mini-batch, which restores the order after a gather."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class GatheredBatch:
    """A mini-batch gathered from all ranks, with the model's outputs on it."""

    batch: Batch
    outputs: dict[str, Tensor]
    own_tokens: Tensor | slice
    """Positions of this rank's tokens in the batch."""


@dataclass(frozen=True)
class Ranks:
    """One process among those that train a model together."""

    data_rank: int = 0
    """Which shard of a mini-batch this process has."""
    data_size: int = 1
    """Number of shards of a mini-batch."""
    is_first: bool = True
    """Whether this is the process that writes files and messages."""
    device: torch.device | None = None
    """Where this process computes; None means where its parameters are."""
    data_group: ProcessGroup | None = None
    """The processes with the other shards."""
    context_group: ProcessGroup | None = None
    """The processes that divide the rows of a micro-batch; None if one process computes all of them."""
    mesh: LearnerMesh | None = None
    """The processes by dimension, and the layout of the parameters; None in a single process."""

    def local_shard(self, batch: Batch, attention_cost: float = ATTENTION_COST) -> Batch:
        """This rank's sequences of a mini-batch that every rank has, with their index in it."""
        if self.data_size == 1:
            return batch
        own = balanced_shares(batch, self.data_size, attention_cost)[self.data_rank]
        index = torch.arange(batch.num_sequences, device=batch.tokens.device)
        return batch.with_sequence(**{ORIGINAL_INDEX: index}).select(own)

    def reshard(self, model: nn.Module) -> None:
        """Free gathered parameters after a pass without gradient, so that none of them is stale later."""
        if self.mesh is not None:
            reshard(model)

    def reduce_partial_gradients(self, gradients: Mapping[str, Tensor], model: nn.Module) -> None:
        """Complete an update's gradients before they are read: sum those that tensor parallelism or two stages left partial."""
        if self.mesh is not None and self.mesh.sizes.tensor > 1:
            reduce_partial_gradients(gradients, self.mesh.tensor)
        sum_tied_gradient(gradients, model)

    # --- reductions ------------------------------------------------------------------------------------------------------

    def max_over_ranks(self, count: int) -> int:
        """The largest of all ranks' counts."""
        return max(self._all_gather_object(count))

    def sum_over_ranks(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Named sums over ranks. They are added in rank order, so that all ranks get the same bits; a missing name counts as 0."""
        sums: dict[str, float] = {}
        for part in self._all_gather_object(dict(amounts)):
            for name, amount in part.items():
                sums[name] = sums.get(name, 0.0) + amount
        return sums

    def mean_over_processes(self, value: Tensor) -> Tensor:
        """Elementwise mean over all processes of all mesh dimensions; every process gets the same bits."""
        from torch.distributed import all_gather, get_world_size

        values = [torch.empty_like(value) for _ in range(get_world_size())]
        all_gather(values, value)
        return torch.stack(values).mean(0)

    def sum_over_stages(self, value: Tensor) -> Tensor:
        """The sum over pipeline stages of the mean over each stage's processes; every process gets the same bits."""
        assert self.mesh is not None, "a single process has no stages"
        return self.mean_over_processes(value) * self.mesh.sizes.pipeline

    def sum_over_work(self, value: Tensor) -> Tensor:
        """Elementwise sum over processes that have different sequences, rows or layers; those of a tensor-parallel group count once."""
        if self.mesh is None:
            return value
        return self.mean_over_processes(value) * (self.mesh.sizes.processes / self.mesh.sizes.tensor)

    def any_process(self, flag: bool) -> bool:
        """Whether the flag is set in any process of any mesh dimension."""
        if self.mesh is None:
            return flag
        return float(self.mean_over_processes(torch.tensor(float(flag), device=self.device))) > 0

    def max_over_parts(self, value: Tensor) -> Tensor:
        """Elementwise maximum over the processes with the same sequences, which have other rows or other layers."""
        if self.mesh is None:
            return value
        from torch.distributed import ReduceOp, all_reduce

        wide = value.int()  # neither NCCL nor gloo has int16
        for group in (self.mesh.context_group, self.mesh.pipeline_group):
            if group.size() > 1:
                all_reduce(wide, ReduceOp.MAX, group=group)
        return wide.to(value.dtype)

    # --- broadcasts and gathers ------------------------------------------------------------------------------------------

    def broadcast_from_first(self, value: Value) -> Value:
        """The first process's value; the values of the others are ignored."""
        if self.mesh is None:
            return value
        from torch.distributed import broadcast_object_list

        values = [value]
        broadcast_object_list(values, src=0)
        return values[0]

    def from_last_stage(self, value: Value) -> Value:
        """The value of the last pipeline stage, which has the outputs of the model; of this process without a pipeline. No tensors."""
        if self.mesh is None or self.mesh.sizes.pipeline == 1:
            return value
        from torch.distributed import broadcast_object_list, get_global_rank

        values, group = [value], self.mesh.pipeline_group
        broadcast_object_list(values, src=get_global_rank(group, group.size() - 1), group=group)
        return values[0]

    def columns_from_last_stage(self, columns: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """The [N] columns of the last pipeline stage."""
        if self.mesh is None or self.mesh.sizes.pipeline == 1:
            return dict(columns)
        from torch.distributed import broadcast, get_global_rank

        group, found = self.mesh.pipeline_group, dict[str, Tensor]()
        dtypes = self.from_last_stage({name: column.dtype for name, column in columns.items()})
        for name, dtype in dtypes.items():
            empty = torch.empty(batch.num_tokens, dtype=dtype, device=batch.tokens.device)
            found[name] = columns[name] if self.mesh.stage == group.size() - 1 else empty
            broadcast(found[name], src=get_global_rank(group, group.size() - 1), group=group)
        return found

    def gather_batch(self, batch: Batch, outputs: Mapping[str, Tensor]) -> GatheredBatch:
        """The whole mini-batch of which `batch` is this rank's shard, with [N] outputs; in its original order if shards know it."""
        if self.data_size == 1:
            return GatheredBatch(batch, dict(outputs), slice(None))
        counts = self._all_gather_object(batch.num_sequences)
        before = sum(counts[: self.data_rank])
        own = torch.arange(before, before + batch.num_sequences, device=batch.tokens.device)
        # Outputs travel as token columns. The slash keeps their names apart from those of real columns.
        merged = self._all_gather_batch(batch.with_token(**{f"/{name}": column for name, column in outputs.items()}))
        if ORIGINAL_INDEX in merged.sequence:
            order = merged.sequence[ORIGINAL_INDEX].argsort()
            merged, own = merged.select(order), order.argsort()[own]
        columns = {name: merged.token.pop(f"/{name}") for name in outputs}
        positions = torch.arange(merged.num_tokens, device=batch.tokens.device)
        return GatheredBatch(merged, columns, Batch(positions, merged.offsets).select(own).tokens)

    def _all_gather_batch(self, batch: Batch) -> Batch:
        """The batches of all ranks, one after the other."""

        def gathered(column: Tensor) -> Tensor:
            return torch.cat(self._all_gather_column(column))

        return Batch(
            tokens=gathered(batch.tokens),
            offsets=offsets_from_lengths(gathered(batch.lengths)),
            token={
                name: gathered(column)
                for name, column in batch.token.items()
                if name not in EXPERT_COLUMNS  # a loss reads no experts, and int16 cannot be sent
            },
            sequence={name: gathered(column) for name, column in batch.sequence.items()},
            ragged={
                name: Ragged(gathered(ragged.values), offsets_from_lengths(gathered(ragged.offsets.diff())))
                for name, ragged in batch.ragged.items()
                if name not in PICTURE_COLUMNS  # a loss reads no images
            },
        )

    def _all_gather_column(self, column: Tensor) -> list[Tensor]:
        """The columns of all ranks, each of its own length."""
        from torch.distributed import all_gather

        lengths = self._all_gather_object(column.shape[0])
        padded = column.new_zeros(max(lengths), *column.shape[1:])
        padded[: column.shape[0]] = column
        parts = [torch.empty_like(padded) for _ in lengths]
        all_gather(parts, padded, group=self.data_group)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def _all_gather_object(self, value: Value) -> list[Value]:
        """The values of all ranks, in rank order."""
        if self.data_size == 1:
            return [value]
        from torch.distributed import all_gather_object

        values: list[Value] = [value] * self.data_size
        all_gather_object(values, value, group=self.data_group)
        return values


SOLO = Ranks()
"""A single process."""


def balanced_shares(batch: Batch, num_ranks: int, attention_cost: float = ATTENTION_COST) -> list[Tensor]:
    """The sequences of each data-parallel rank, ascending: each sequence once, about equal work; a share may be empty.

    A group stays together, because its sequences share the computation of their prefixes. A sequence of L tokens costs
    L + attention_cost L^2, less what the prefix costs that it shares.
    """
    lengths = batch.lengths.tolist()
    trees = prefix_trees(batch) if "group_ids" in batch.sequence else unshared_trees(range(len(lengths)))
    parts = karmarkar_karp([tree_cost(lengths, tree, attention_cost) for tree in trees], num_ranks)
    return [torch.tensor(sorted(i for k in part for i in trees[k].members), dtype=torch.long) for part in parts]


def check_model_divides(arch: Architecture, parallel: Parallel, lora: Lora | None = None) -> None:
    """Raise what `parallelize_model` would, as far as the architecture and its adapters tell, before any process starts."""
    stage_layers(arch, parallel.pipeline)
    check_divisible(arch, parallel.tensor)
    check_experts_divisible(arch, parallel.expert, parallel.tensor, lora)
    kv_heads = arch.num_kv_heads // parallel.tensor
    if kv_heads % parallel.context:
        check_keys_gathered(arch, kv_heads, parallel.context)


def parallelize_model(model: nn.Module, ranks: Ranks, offload: bool = False, policy: nn.Module | None = None) -> None:
    """Divide a whole model over the ranks, in place: afterwards this process has its shard. Make its learner after this call.

    Of a model whose weights were not loaded yet, each process now reads its own part from the files. A teacher computes the same rows as the
    `policy`, divided or not.

    The order is fixed: a stage keeps whole layers, tensor parallelism divides their matrices, and FSDP shards what is left of them.
    """
    if ranks.mesh is None:
        return
    assert ranks.device is not None, "a process of a mesh knows where it computes"
    is_deferred = next(model.parameters()).is_meta
    if ranks.mesh.sizes.pipeline > 1:
        apply_pipeline(model, ranks.mesh, ranks.device)
    if ranks.mesh.sizes.tensor > 1:
        apply_tensor_parallel(model, ranks.mesh.tensor)
    if ranks.context_group is not None:
        other = None if policy is None else backbone_of(policy)
        kv_heads = other.arch.num_kv_heads // ranks.mesh.sizes.tensor if isinstance(other, Decoder) else None
        apply_context_parallel(model, ranks.context_group, kv_heads)
    if ranks.mesh.expert_parts is not None:
        apply_expert_parallel(model, ranks.mesh.expert_parts)
    if offload or ranks.mesh.sizes.replicate * ranks.mesh.sizes.shards > 1:
        apply_fsdp(model, ranks.mesh.fsdp, offload, ranks.mesh.expert_fsdp)
    elif not is_deferred:
        model.to(ranks.device)
    if is_deferred:
        load_deferred(model, torch.device("cpu") if offload else ranks.device)


# --- The process group -------------------------------------------------------------------------------------------------


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as a rank."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def require_single_process(command: str) -> None:
    """Refuse torchrun for a command that runs in one process: several would repeat its work and overwrite its files."""
    if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise UserError(
            f"burnish {command} runs in one process, and torchrun started {os.environ['WORLD_SIZE']}: start it without torchrun "
            "(burnish sft is the command that several processes can share)"
        )


def join_process_group(config: Parallel, on_gpu: bool) -> Ranks:
    """Initialise torch.distributed and return this process's ranks; `SOLO` unless a launcher started it."""
    if not is_launched():
        if config != Parallel():
            raise UserError(
                "parallel has no effect on one process: start several with torchrun --nproc-per-node <number> -m burnish.cli.main ..."
            )
        return SOLO
    from torch import distributed

    sizes = config.sizes(int(os.environ["WORLD_SIZE"]))
    device = torch.device("cpu")
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        # Python objects and offloaded tensors are sent from the CPU, so a GPU run needs gloo as well as NCCL.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    mesh = learner_mesh(device.type, sizes)
    return Ranks(
        data_rank=mesh.batch_rank,
        data_size=sizes.batch_shards,
        is_first=distributed.get_rank() == 0,
        device=device,
        data_group=mesh.batch_group,
        context_group=mesh.context_group if sizes.context > 1 else None,
        mesh=mesh,
    )


def leave_process_group() -> None:
    """Destroy the process group, if there is one. torchrun reports a process that exits without this as failed."""
    if is_launched():
        from torch import distributed

        if distributed.is_initialized():
            learner_mesh.cache_clear()
            distributed.destroy_process_group()
