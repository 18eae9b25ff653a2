"""A process group between the ranks of a learner and those of its engines, over which weights go straight to the rank that needs them.

Without it the learner's first rank gathers every tensor and puts it into the object store. Here each rank sends the blocks that it holds,
by the plan with the fewest bytes (`inference/resharding.py`), and each bucket is verified by its checksum. The group is gloo's and messages
are in host memory: learner and engine are different processes, and may share a GPU, which NCCL refuses.

A link that fails is closed on both sides. The engines then get their weights from the object store, and the next version opens a new link.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from burnish.config.model import Lora
from burnish.core.sharded_tensors import PlacedShard, Shard
from burnish.inference.native.parallel_decoder import part_blocks
from burnish.inference.reshard_transfer import execute
from burnish.inference.resharding import Plan, TensorLayout, make_plan
from burnish.models.architecture import Architecture

JOIN_TIMEOUT_S = 60.0
"""How long a process waits for the others to join. An engine that is being started again may take longer; it then joins the next link."""


@dataclass(frozen=True)
class LinkAddress:
    """Where the processes of a link meet. The learner's ranks come first, then those of all engines."""

    host: str
    port: int
    num_learners: int
    num_engine_processes: int
    engine_ranks: int
    """Ranks of each engine."""
    timeout_s: float
    """Time limit of one message."""

    @property
    def size(self) -> int:
        return self.num_learners + self.num_engine_processes


def host_store(host: str) -> TCPStore:
    """The store through which the processes of a link find one another, at a free port."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S))


@dataclass(frozen=True)
class Member:
    """What a process tells the others of a link. The learner's ranks hold blocks of tensors, engines have names."""

    host: str
    blocks: Mapping[str, Sequence[PlacedShard]] = field(default_factory=dict)
    """By name: the blocks of the full tensor that the process holds."""
    item_sizes: Mapping[str, int] = field(default_factory=dict)
    trained: Sequence[str] = ()
    """Names of the tensors that change from version to version."""
    names: Sequence[str] = ()
    """The tensors that an engine needs."""

    @property
    def text(self) -> str:
        """As JSON: whoever reaches the store must not be able to send objects."""
        blocks = {
            name: [(one.shard.shape, one.shard.offsets, one.shard.sizes, one.at) for one in some]
            for name, some in self.blocks.items()
        }
        return json.dumps([self.host, blocks, dict(self.item_sizes), list(self.trained), list(self.names)])

    @classmethod
    def parsed(cls, text: str | bytes) -> Member:
        host, blocks, item_sizes, trained, names = json.loads(text)
        placed = {
            name: [PlacedShard(Shard(*map(tuple, one[:3])), tuple(one[3])) for one in some]
            for name, some in blocks.items()
        }
        return cls(host, placed, item_sizes, trained, names)


class WeightLink:
    """One process of a link. Building it waits for all others; a `RuntimeError` says that one did not come."""

    def __init__(self, address: LinkAddress, rank: int, arch: Architecture, lora: Lora | None, own: Member) -> None:
        self.address, self.rank, self.arch, self.lora = address, rank, arch, lora
        patience = timedelta(seconds=JOIN_TIMEOUT_S)
        store = TCPStore(address.host, address.port, wait_for_workers=False, timeout=patience)
        store.set(f"member {rank}", own.text)
        keys = [f"member {other}" for other in range(address.size)]
        store.wait(keys, patience)
        self.members = [Member.parsed(store.get(key)) for key in keys]
        timeout = timedelta(seconds=address.timeout_s)
        self.group: Any = ProcessGroupGloo(PrefixStore("weights", store), rank, address.size, timeout)
        self._plans: dict[bool, Plan] = {}

    def plan(self, complete: bool) -> Plan:
        """The plan of all tensors, or of the trained ones. It lists the transfers of this process alone."""
        if complete not in self._plans:
            hosts = [member.host for member in self.members]
            self._plans[complete] = make_plan(
                self._tensors(complete), lambda rank: hosts.index(hosts[rank]), rank=self.rank
            )
        return self._plans[complete]

    def _tensors(self, complete: bool) -> list[TensorLayout]:
        first, engine_ranks = self.address.num_learners, self.address.engine_ranks
        learner = self.members[0]
        names = [name for name in self.members[first].names if complete or name in learner.trained]
        found = []
        for name in names:
            sources = {rank: one.blocks[name] for rank, one in enumerate(self.members) if name in one.blocks}
            if not sources:
                raise ValueError(f"the engines have {name}, and no rank of the learner has it")
            holder = self.members[next(iter(sources))]
            shape = holder.blocks[name][0].shard.shape
            targets = {
                first + process: part_blocks(self.arch, self.lora, name, shape, process % engine_ranks, engine_ranks)
                for process in range(self.address.num_engine_processes)
            }
            found.append(TensorLayout(name, holder.item_sizes[name], sources, targets))
        return found

    def move(self, complete: bool, sources: Mapping[str, Tensor], targets: Mapping[str, Tensor]) -> None:
        """Send this process's `sources` to the engines, or write its `targets`. All processes call it for each version.

        A `RuntimeError` says that a process ended or did not answer: the link is then closed. A `SyncError` names tensors that did not arrive.
        """
        assert self.group is not None, "the link was closed"
        transfers = self.plan(complete).transfers
        try:
            execute(transfers, sources, targets, self.group)
        except RuntimeError:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections: processes that wait for this one get an error."""
        self.group = None
