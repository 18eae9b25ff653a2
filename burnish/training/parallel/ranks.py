"""What a learner knows of the other processes that train the same model.

A process has a place in up to four dimensions. Data-parallel ranks (`replicate` x `shard` of the config) work on
different sequences; the ranks of a sequence-parallel group cut the rows of the same micro-batches among them, those of a
tensor-parallel group the weights of each layer. What is said of "all ranks" below is meant of the data-parallel ones:
the others see the same sequences, and have the same numbers already.

Weights of tokens are fixed on the whole mini-batch before it is divided, so losses, gradients and metrics are plain sums
over ranks. One process alone is `SOLO`; it never loads torch.distributed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from burnish.config.errors import UserError
from burnish.config.placement import Parallel
from burnish.core.batch import Batch, Ragged
from burnish.core.segments import offsets_from_lengths
from burnish.training.packing import ATTENTION_COST, karmarkar_karp, shared_prefixes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


# --- Which sequences of a mini-batch each data-parallel rank works on.


def balanced_shares(batch: Batch, num_ranks: int, attention_cost: float = ATTENTION_COST) -> list[Tensor]:
    """The sequences of each rank, in rising order: every one once, about the same work for all; a share may be empty.

    A group stays together, since its samples share the work of their prompt. A sequence of L tokens costs
    L + attention_cost L^2, what it begins with in common with its group counted once.
    """
    lengths = batch.lengths.tolist()
    if "group_ids" in batch.sequence:
        groups, shared = batch.sequence["group_ids"].tolist(), shared_prefixes(batch).tolist()
    else:
        groups, shared = list(range(len(lengths))), [0] * len(lengths)
    members: dict[int, list[int]] = {}
    for i, group in enumerate(groups):
        members.setdefault(group, []).append(i)

    def cost(length: int) -> float:
        return length + attention_cost * length**2

    units = list(members.values())
    costs = [cost(shared[unit[0]]) + sum(cost(lengths[i]) - cost(shared[i]) for i in unit) for unit in units]
    parts = karmarkar_karp(costs, num_ranks)
    return [torch.tensor(sorted(i for k in part for i in units[k]), dtype=torch.long) for part in parts]


ORIGINAL_INDEX = "place"
"""The sequence column with each sequence's number in the whole mini-batch, by which order is restored."""

Value = TypeVar("Value")


@dataclass(frozen=True)
class GatheredBatch:
    """A mini-batch put together from all ranks, outputs of the model on it, and where this rank's tokens stand in it."""

    batch: Batch
    outputs: dict[str, Tensor]
    mine: Tensor | slice


@dataclass(frozen=True)
class Ranks:
    """One process among those that train a model together."""

    index: int = 0
    """Which share of a mini-batch is this process's."""
    count: int = 1
    """Into how many shares a mini-batch is divided."""
    is_first: bool = True
    """Whether this is the one process that writes and speaks for all."""
    device: torch.device | None = None
    """Where this process computes; None means where its parameters are."""
    data: ProcessGroup | None = None
    """The processes with other shares."""
    sequence: ProcessGroup | None = None
    """The processes that cut the rows of a micro-batch among them; None where one has all."""
    weights: DeviceMesh | None = None
    """How parameters are laid out: dimensions `replicate`, `shard`, `tensor`; None in one process alone."""

    def share(self, batch: Batch, attention_cost: float = ATTENTION_COST) -> Batch:
        """This rank's sequences of a mini-batch that every rank has; their numbers in it go along."""
        if self.count == 1:
            return batch
        mine = balanced_shares(batch, self.count, attention_cost)[self.index]
        place = torch.arange(batch.num_sequences, device=batch.tokens.device)
        return batch.with_sequence(**{ORIGINAL_INDEX: place}).select(mine)

    def settle(self, model: nn.Module) -> None:
        """To be called after a pass without gradient: no parameter stays gathered, so none can be out of date."""
        if self.weights is not None:
            from burnish.training.parallel.fsdp import reshard

            reshard(model)

    def finish(self, gradients: Mapping[str, Tensor]) -> None:
        """To be called when an update's gradients are complete, before they are read."""
        if self.weights is not None and self.weights["tensor"].size() > 1:
            from burnish.training.parallel.tensor_parallel import reduce_partial_gradients

            reduce_partial_gradients(gradients, self.weights["tensor"])

    # --- adding up -----------------------------------------------------------------------------------------------------

    def most(self, count: int) -> int:
        """The greatest of all ranks' counts."""
        return max(self._everyone(count))

    def total(self, amounts: Mapping[str, float]) -> dict[str, float]:
        """Named sums over ranks, in the order of ranks, so that all get the same bits; who lacks a name adds nothing."""
        sums: dict[str, float] = {}
        for part in self._everyone(dict(amounts)):
            for name, amount in part.items():
                sums[name] = sums.get(name, 0.0) + amount
        return sums

    def mean(self, value: Tensor) -> Tensor:
        """The mean of each number over all processes, those of other dimensions too; the same bits for all."""
        from torch.distributed import all_gather, get_world_size

        values = [torch.empty_like(value) for _ in range(get_world_size())]
        all_gather(values, value)
        return torch.stack(values).mean(0)

    def anyone(self, is_so: bool) -> bool:
        """Whether it is so for any process, those of other dimensions too."""
        return is_so if self.weights is None else float(self.mean(torch.tensor(float(is_so), device=self.device))) > 0

    def from_first(self, value: Value) -> Value:
        """What the first process says; the others wait for it, and their own value does not count."""
        if self.weights is None:
            return value
        from torch.distributed import broadcast_object_list

        said = [value]
        broadcast_object_list(said, src=0)
        return said[0]

    def _everyone(self, value: Value) -> list[Value]:
        """The values of all ranks, this one's among them."""
        if self.count == 1:
            return [value]
        from torch.distributed import all_gather_object

        values: list[Value] = [value] * self.count
        all_gather_object(values, value, group=self.data)
        return values

    # --- putting together ----------------------------------------------------------------------------------------------

    def gather(self, column: Tensor) -> list[Tensor]:
        """The columns of all ranks, each of its own length."""
        if self.count == 1:
            return [column]
        from torch.distributed import all_gather

        lengths = self._everyone(column.shape[0])
        mine = column.new_zeros(max(lengths), *column.shape[1:])
        mine[: column.shape[0]] = column
        parts = [torch.empty_like(mine) for _ in lengths]
        all_gather(parts, mine, group=self.data)
        return [part[:length] for part, length in zip(parts, lengths, strict=True)]

    def whole(self, batch: Batch, outputs: Mapping[str, Tensor]) -> GatheredBatch:
        """The mini-batch this rank's batch is a share of, with [N] outputs; in the order it had, if shares know it."""
        if self.count == 1:
            return GatheredBatch(batch, dict(outputs), slice(None))
        counts = self._everyone(batch.num_sequences)
        before = sum(counts[: self.index])
        mine = torch.arange(before, before + batch.num_sequences, device=batch.tokens.device)
        # The outputs travel as columns under names no column has.
        found = self._merged(batch.with_token(**{f"/{name}": column for name, column in outputs.items()}))
        if ORIGINAL_INDEX in found.sequence:
            order = found.sequence[ORIGINAL_INDEX].argsort()
            found, mine = found.select(order), order.argsort()[mine]
        columns = {name: found.token.pop(f"/{name}") for name in outputs}
        numbers = torch.arange(found.num_tokens, device=batch.tokens.device)
        return GatheredBatch(found, columns, Batch(numbers, found.offsets).select(mine).tokens)

    def _merged(self, batch: Batch) -> Batch:
        """The batches of all ranks, one after the other."""

        def all_of(column: Tensor) -> Tensor:
            return torch.cat(self.gather(column))

        return Batch(
            tokens=all_of(batch.tokens),
            offsets=offsets_from_lengths(all_of(batch.lengths)),
            token={name: all_of(column) for name, column in batch.token.items()},
            sequence={name: all_of(column) for name, column in batch.sequence.items()},
            ragged={
                name: Ragged(all_of(ragged.values), offsets_from_lengths(all_of(ragged.offsets.diff())))
                for name, ragged in batch.ragged.items()
            },
        )


SOLO = Ranks()
"""One process alone."""


# --- A model spread over the processes that train it: rows, layers and parameters, in the order they must be cut.


def parallelize_model(model: nn.Module, ranks: Ranks, offload: bool = False) -> None:
    """Cut a whole model over ranks, in place: this process has its part from now on. Its learner is made afterwards."""
    if ranks.weights is None:
        return
    from burnish.training.parallel.fsdp import apply_fsdp
    from burnish.training.parallel.sequence_parallel import apply_sequence_parallel
    from burnish.training.parallel.tensor_parallel import apply_tensor_parallel

    if ranks.weights["tensor"].size() > 1:
        apply_tensor_parallel(model, ranks.weights["tensor"])
    if ranks.sequence is not None:
        apply_sequence_parallel(model, ranks.sequence)
    if offload or ranks.weights["replicate"].size() * ranks.weights["shard"].size() > 1:
        apply_fsdp(model, ranks, offload)
    else:
        model.to(ranks.device)


# --- Joining the other processes: `torchrun` tells each its number, and the config how the work is divided.
#
# Ranks are numbered with `tensor` fastest, then `sequence`, then `shard`, then `replicate`: those that speak most often are
# neighbours on one machine.


def is_launched() -> bool:
    """Whether a launcher (torchrun) started this process as one of several, or as one that may have peers."""
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ


def require_single_process(command: str) -> None:
    """For commands that one process runs: several would do the same work and get in each other's way."""
    if is_launched() and int(os.environ["WORLD_SIZE"]) > 1:
        raise UserError(
            f"burnish {command} runs in one process, and torchrun started {os.environ['WORLD_SIZE']}: start it without torchrun "
            "(burnish sft is the command that several processes can share)"
        )


def join_process_group(config: Parallel, on_gpu: bool) -> Ranks:
    """This process's place among its peers; `SOLO` where no launcher started it."""
    if not is_launched():
        if config != Parallel():
            raise UserError(
                "parallel has no effect on one process: start several with torchrun --nproc-per-node <number> -m burnish.cli.main ..."
            )
        return SOLO
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    num_processes, kind = int(os.environ["WORLD_SIZE"]), "cuda" if on_gpu else "cpu"
    replicate, shard, sequence, tensor = config.sizes(num_processes)
    device = torch.device(kind)
    if on_gpu:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if not distributed.is_initialized():
        # Small values travel as objects, and offloaded tensors from the CPU: both backends, each for its device.
        distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    weights = init_device_mesh(
        kind, (replicate, shard * sequence, tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    work = init_device_mesh(kind, (replicate * shard, sequence, tensor), mesh_dim_names=("data", "sequence", "columns"))
    return Ranks(
        index=work.get_local_rank("data"),
        count=replicate * shard,
        is_first=distributed.get_rank() == 0,
        device=device,
        data=work.get_group("data"),
        sequence=work.get_group("sequence") if sequence > 1 else None,
        weights=weights,
    )


def leave_process_group() -> None:
    """Say goodbye to the others, where there are any: a process that ends without it is reported as a failure."""
    if is_launched():
        from torch import distributed

        if distributed.is_initialized():
            distributed.destroy_process_group()
