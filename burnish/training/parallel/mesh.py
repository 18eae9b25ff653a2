"""The mesh of a learner's processes: which of them communicate, by the name of a dimension.

Five numbers say how processes divide a model's training: [pipeline, data, context, expert, tensor]. Ranks are numbered with `tensor`
fastest, so that those that communicate most are neighbours on one machine. The five dimensions are grouped in three ways:

    parameters    [pipeline, replicate, shard, tensor]                  shard = data / replicate x context x expert
    batch         [pipeline, batch, context, tensor]                    batch = data x expert
    experts       [pipeline, replicate, shard, expert, tensor]          shard = data / replicate x context

`parameters` places dense parameters: FSDP shards them over `shard`, HSDP copies them over `replicate`, tensor parallelism divides
them over `tensor`. `batch` places sequences: processes along `batch` have different ones, those along `context` share the rows of the
same micro-batches. `experts` places the parameters of experts, and exists only if they are divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from burnish.config.placement import MeshSizes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class LearnerMesh:
    """The process groups of a learner, seen from this process."""

    sizes: MeshSizes
    parameters: DeviceMesh
    batch: DeviceMesh
    experts: DeviceMesh | None = None
    gradient_group: ProcessGroup | None = None
    """The processes of `pipeline_group` a second time, for what goes backward; None with one stage."""

    @property
    def fsdp(self) -> DeviceMesh:
        """The mesh over which FSDP shards dense parameters: `shard`, below `replicate` if there are several copies."""
        return _with_copies(self.parameters, self.sizes)

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """The mesh over which FSDP shards the parameters of this process's experts, if it is not that of all parameters."""
        return None if self.experts is None else _with_copies(self.experts, self.sizes)

    @property
    def tensor(self) -> DeviceMesh:
        """The mesh over which tensor parallelism divides layers."""
        return self.parameters["tensor"]

    @property
    def expert_parts(self) -> DeviceMesh | None:
        """The mesh over which experts and their columns are divided: `expert`, `tensor`, or both. None if they are whole."""
        if self.experts is None:
            return self.tensor if self.sizes.tensor > 1 else None
        return self.experts["expert", "tensor"] if self.sizes.tensor > 1 else self.experts["expert"]

    @property
    def batch_group(self) -> ProcessGroup:
        """The processes with the other sequences of a mini-batch, at this process's place in all other dimensions."""
        return self.batch.get_group("batch")

    @property
    def batch_rank(self) -> int:
        """Which part of a mini-batch this process has."""
        return self.batch.get_local_rank("batch")

    @property
    def context_group(self) -> ProcessGroup:
        """The processes that divide the rows of the same micro-batches."""
        return self.batch.get_group("context")

    @property
    def pipeline_group(self) -> ProcessGroup:
        """One process of every stage, in the order of the stages."""
        return self.batch.get_group("pipeline")

    @property
    def stage(self) -> int:
        """Which stage of layers this process has."""
        return self.batch.get_local_rank("pipeline")


@cache
def learner_mesh(kind: str, sizes: MeshSizes) -> LearnerMesh:
    """The mesh of a layout on `cpu` or `cuda`, made once per process group. Every process must call this.

    Each mesh opens process groups with sockets and threads that live until the process group is destroyed.
    """
    pipeline, data, context, expert, tensor, replicate = sizes
    ranks = torch.arange(sizes.processes).view(pipeline, replicate, data // replicate, context, expert, tensor)
    experts = ranks.reshape(pipeline, replicate, -1, expert, tensor)
    return LearnerMesh(
        sizes,
        _device_mesh(
            kind, ranks.reshape(pipeline, replicate, -1, tensor), ("pipeline", "replicate", "shard", "tensor")
        ),
        _device_mesh(
            kind,
            ranks.movedim(4, 3).reshape(pipeline, data * expert, context, tensor),
            ("pipeline", "batch", "context", "tensor"),
        ),
        _device_mesh(kind, experts, ("pipeline", "replicate", "shard", "expert", "tensor")) if expert > 1 else None,
        _own_group(ranks.reshape(pipeline, -1).t()) if pipeline > 1 else None,
    )


def _device_mesh(kind: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(kind, ranks, mesh_dim_names=names)


def _own_group(ranks: torch.Tensor) -> ProcessGroup:
    """The group of this process, if every row of `ranks` is a group."""
    from torch.distributed import new_subgroups_by_enumeration

    own, _ = new_subgroups_by_enumeration(ranks.tolist())
    assert own is not None, "every process is in a row"
    return own


def _with_copies(mesh: DeviceMesh, sizes: MeshSizes) -> DeviceMesh:
    return mesh["replicate", "shard"] if sizes.replicate > 1 else mesh["shard"]
