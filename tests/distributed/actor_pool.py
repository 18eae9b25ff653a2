"""Processes of Ray that serve one run after another: a fresh one takes seconds to import torch, and tests have many runs.

Everything else is the product's: actors, placement groups, messages, deaths.
"""

from __future__ import annotations

import os
from typing import Any

import ray

from burnish.distributed.placement import ProcessSlot
from burnish.distributed.ray_actors import LANES, WorkerActor
from burnish.distributed.ray_cluster import Cluster


class PooledHost(WorkerActor):
    """A host that can be what it was in the beginning, with everything imported."""

    def warm(self, is_divided: bool) -> None:
        import burnish.distributed.role_workers  # noqa: F401

        if is_divided:
            import torch.distributed.fsdp
            import torch.distributed.tensor.parallel  # noqa: F401

    def niceness(self) -> int:
        return os.nice(0)

    def clean(self) -> None:
        from burnish.training.parallel.ranks import leave_process_group

        leave_process_group()
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
        self.is_ready.clear()
        self.worker = None


class Pool:
    """Hosts that wait for work, in an order that stays: torch keeps what it found out as one rank for its life, so a process
    that was rank 1 may be that again, and never another. The first two are those that divide a model."""

    def __init__(self, size: int) -> None:
        self.free = [(number, self._new(number)) for number in range(size)]

    def _new(self, number: int) -> Any:
        remote: Any = ray.remote
        host = remote(concurrency_groups=LANES)(PooledHost).options(num_cpus=0).remote()
        host.warm.remote(number < 2)
        return host

    def take(self) -> tuple[int, Any]:
        if not self.free:
            return 1000, self._new(1000)
        number, host = self.free.pop(0)
        return number, self._new(number) if host is None else host

    def give(self, number: int, host: Any) -> None:
        try:
            ray.get(host.clean.remote(), timeout=60)
        except ray.exceptions.RayError:
            host = None  # it was killed, and is made again when it is needed
        self.free = sorted([*self.free, (number, host)], key=lambda entry: entry[0])


class PooledCluster(Cluster):
    """Room is reserved as ever; the processes come from the pool and go back to it."""

    pool: Pool

    def __init__(self, *args: Any) -> None:
        self.taken: list[tuple[int, Any]] = []
        super().__init__(*args)

    def host(self, slot: ProcessSlot) -> Any:
        self.taken.append(self.pool.take())
        return self.taken[-1][1]

    def close(self) -> None:
        super().close()
        for number, host in self.taken:
            self.pool.give(number, host)
        self.taken = []
