"""The processes of a group of workers, as Ray's actors (`ray_host.py`), each in its place of a placement group: how they are made,
what is known of one that is late or has ended, and a new one in its place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from burnish.config.errors import UserError
from burnish.controller.backend import Gone
from burnish.controller.placement import Seat
from burnish.controller.ray_cluster import Cluster
from burnish.controller.ray_host import Outcome, Relay, end_process, outcome_of, reason_of, stacks_file, tell_process
from burnish.core.workers import WorkerFailed, WorkerLost

TAIL = 12
"""Lines of a worker's output in a message about its end."""
STACKS_S = 3.0


class RayProcesses:
    """The actors of a group of workers of one class. `args` make each of them; with `together`, they can find each other
    (torch.distributed)."""

    relays_from, fan_out = 64, 64
    """A group of more ranks than this is spoken to through relays, each of so many ranks."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        kind: type,
        args: tuple[Any, ...],
        logs: Path,
        deadline_s: float,
        together: bool = False,
    ) -> None:
        self.name, self.cluster, self.deadline_s = name, cluster, deadline_s
        self.seats = cluster.layout.seats[name]
        self.size = len(self.seats)
        self.logs = [(logs / f"{name}-{rank}.log").resolve() for rank in range(self.size)]
        self._made = (kind, args)
        self._environments: list[dict[str, str]] = [{} for _ in self.seats]
        self._actors = [cluster.host(seat) for seat in self.seats]
        self._processes: dict[int, tuple[int, str]] = {}
        self._begun: dict[int, Any] = {}
        self._relays: list[Any] = []
        if together and self.size > 1:
            address, port = self._first("where", self._actors[0].where.remote())
            self._environments = [
                {
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": str(self.size),
                    "MASTER_ADDR": address,
                    "MASTER_PORT": str(port),
                }
                for rank in range(self.size)
            ]
        for rank in range(self.size):
            self._begin(rank)

    def _begin(self, rank: int) -> None:
        kind, args = self._made
        environment, log = self._environments[rank], str(self.logs[rank])
        self._begun[rank] = self._actors[rank].begin.remote(kind, args, environment, log, str(Path.cwd()))

    def start(self) -> None:
        """Wait until every worker is made; the first error of any is raised."""
        until = time.monotonic() + self.deadline_s
        while self._begun:
            ready, _ = ray.wait(list(self._begun.values()), num_returns=len(self._begun), timeout=0.5)
            for rank in [rank for rank, reference in self._begun.items() if reference in ready]:
                found = outcome_of(self._begun.pop(rank))
                if found.gone is not None:
                    raise self._ended_before(rank, found.gone)
                if found.error is not None:
                    raise self._failed(rank, found)
                self._processes[rank] = found.value
            if self._begun and time.monotonic() > until:
                late = sorted(self._begun)
                raise WorkerLost(
                    f"{self.name}: ranks {late} of {self.size} were not ready in {self.deadline_s:g} s, which is "
                    f"placement.timeout_s: {self.silent(late, 'begin')}",
                    late[0],
                )
        if self.size > self.relays_from:
            self._relays = [self._new_relay(first) for first in range(0, self.size, self.fan_out)]

    def _new_relay(self, first: int) -> Any:
        """A relay on the machine of its first rank, which asks for no CPU: it does nothing but wait."""
        hosts = dict(enumerate(self._actors[first : first + self.fan_out], first))
        relay = self.cluster.host(Seat(self.seats[first].bundle, {"CPU": 0.0}))
        log = self.logs[0].parent / f"{self.name}-relay-{first}.log"
        relay.begin.remote(Relay, (hosts,), {}, str(log), str(Path.cwd()))
        return relay

    def _first(self, what: str, reference: Any) -> Any:
        try:
            return ray.get(reference, timeout=self.deadline_s)
        except GetTimeoutError as error:
            raise WorkerLost(
                f"{self.name} rank 0 was not ready in {self.deadline_s:g} s (asked for {what})", 0
            ) from error
        except RayActorError as error:
            raise self._ended_before(0, reason_of(error)) from error

    def _failed(self, rank: int, found: Outcome) -> Exception:
        """The error of a rank, as it is raised here."""
        if found.is_users:
            return UserError(str(found.error))
        return WorkerFailed(f"{self.name} rank {rank} of {self.size} failed:\n{found.error}")

    def _ended_before(self, rank: int, why: str) -> WorkerLost:
        return WorkerLost(
            f"{self.name} rank {rank} of {self.size} has ended before it was ready: {why}\n{self.describe(rank)}", rank
        )

    def _blame(self, rank: int, error: str) -> None:
        """Raise that another rank is gone, if one is: then the error of this one is nothing but a broken connection to it."""
        asked = {other: actor.stacks.remote() for other, actor in enumerate(self._actors) if other != rank}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=STACKS_S) if asked else ([], [])
        for other, reference in asked.items():
            if reference in ready and (gone := outcome_of(reference).gone) is not None:
                raise Gone(f"{gone} (rank {rank} failed with it: {error.strip().splitlines()[-1]})", other)

    def describe(self, rank: int) -> str:
        who = f"process {self._processes[rank][0]}" if rank in self._processes else "its process"
        try:
            lines = self.logs[rank].read_text(errors="replace").splitlines()[-TAIL:]
        except OSError:
            return f"{who} left no output at {self.logs[rank]}"
        said = "\n".join(f"  {line}" for line in lines)
        return (
            f"{who} wrote to {self.logs[rank]} last:\n{said}" if lines else f"{who} wrote nothing to {self.logs[rank]}"
        )

    def silent(self, ranks: Sequence[int], what: str) -> str:
        """The stacks of the ranks go to a file; one that cannot even tell them is stopped, or its machine is gone."""
        asked = {rank: self._actors[rank].stacks.remote() for rank in ranks}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=STACKS_S)
        texts, mute = [], []
        for rank, reference in asked.items():
            try:
                texts.append(f"--- {self.name} rank {rank}\n{ray.get(reference) if reference in ready else ''}")
            except RayError:
                mute.append(rank)
            else:
                mute += [] if reference in ready else [rank]
        path = self.logs[0].parent / f"stacks-{self.name}-{what}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(texts))
        told = f"what they were doing is in {path}"
        if not mute:
            return told
        for rank in mute:
            self._on_machine_of(rank, tell_process)
        logs = ", ".join(str(stacks_file(self.logs[rank])) for rank in mute[:4])
        return f"{told}; ranks {mute} do not even tell that (stopped, swapped out, or gone), or in {logs} if they could"

    def restart(self, rank: int) -> None:
        """The old process must be gone: Ray would wait for the CPUs it holds."""
        self._look_for(rank)
        ray.kill(self._actors[rank], no_restart=True)
        self._on_machine_of(rank, end_process)
        self._processes.pop(rank, None)
        self._actors[rank] = self.cluster.host(self.seats[rank])
        self._begin(rank)  # nobody waits for it: an error is raised by the first call
        if self._relays:
            self._relays[rank // self.fan_out].call.remote("adopt", ((rank, self._actors[rank]), {}))

    def _on_machine_of(self, rank: int, action: Callable[[int], None]) -> None:
        """Have something done to a rank's process, where that is known; nobody waits for it."""
        if rank in self._processes:
            pid, node = self._processes[rank]
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.remote(action).options(num_cpus=0, scheduling_strategy=there).remote(pid)

    def _look_for(self, rank: int) -> None:
        """Which process a rank is that was started again: known by now, unless it never came up."""
        if rank in self._begun and ray.wait([self._begun[rank]], timeout=0)[0]:
            with contextlib.suppress(RayError):
                self._processes[rank] = ray.get(self._begun[rank])
            del self._begun[rank]

    def pid(self, rank: int) -> int:
        """The process of a rank, once it is there."""
        self._look_for(rank)
        return self._processes[rank][0]

    def close(self) -> None:
        for actor in [*self._actors, *self._relays]:
            ray.kill(actor, no_restart=True)
