"""The Ray backend of a worker group: starts its actors (`ray_actors.py`), sends them calls, and notices when one dies.

A dead worker is noticed by the next poll of any call, within half a second; the error quotes the last lines of its output.
Arguments are packed once for all ranks. Large ones go through the object store, and shards of a batch are stored once for all calls.
Large groups are called through relays.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from burnish.config.errors import UserError
from burnish.core.dispatch import WorkerFailed, WorkerLost
from burnish.core.serialization import PackedArrays, encode, num_array_bytes
from burnish.distributed.batch_dispatch import ShardedBatch
from burnish.distributed.placement import ProcessSlot
from burnish.distributed.ray_actors import (
    RayOutcome,
    Relay,
    RelayMessage,
    kill_process,
    ray_outcome,
    request_stack_dump,
    stacks_file,
    start_call,
)
from burnish.distributed.ray_cluster import Cluster
from burnish.distributed.worker_group import RankCall, Traffic, WorkerGone

LOG_TAIL_LINES = 12
"""Lines of a worker's output in a message about its end."""
STACKS_TIMEOUT_S = 3.0


class RayProcesses:
    """The actors of a group of workers of one class, each in its slot of a placement group.

    `args` build each worker. With `group_size` above 1, so many consecutive ranks can form a torch.distributed process group.
    """

    relays_from, fan_out = 64, 64
    """A group of more ranks than `relays_from` is called through relays of `fan_out` ranks each."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        kind: type,
        args: tuple[Any, ...],
        logs: Path,
        deadline_s: float,
        group_size: int = 1,
    ) -> None:
        self.name, self.cluster, self.deadline_s = name, cluster, deadline_s
        self.slots = cluster.layout.slots[name]
        self.size = len(self.slots)
        self.logs = [(logs / f"{name}-{rank}.log").resolve() for rank in range(self.size)]
        self._made = (kind, args)
        self._environments: list[dict[str, str]] = [{} for _ in self.slots]
        self._actors = [cluster.host(slot) for slot in self.slots]
        self._processes: dict[int, tuple[int, str]] = {}
        self._begun: dict[int, Any] = {}
        self._relays: list[Any] = []
        assert self.size % group_size == 0, f"{self.size} processes cannot form groups of {group_size}"
        self.group_size = group_size
        for first in range(0, self.size, group_size):
            self._begin_group(first)

    def _begin_group(self, first: int) -> None:
        """Build the workers of a process group, which meet at an address of the first one."""
        size = self.group_size
        address = self._actors[first].rendezvous_address.remote() if size > 1 else None
        for place, rank in enumerate(range(first, first + size)):
            if size > 1:
                self._environments[rank] = {"RANK": str(place), "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}
            kind, args = self._made
            environment, log, folder = self._environments[rank], str(self.logs[rank]), str(Path.cwd())
            self._begun[rank] = self._actors[rank].begin.remote(kind, args, environment, log, folder, address)

    def start(self) -> None:
        """Wait until every worker is built; raises the first error of any."""
        until = time.monotonic() + self.deadline_s
        while self._begun:
            ready, _ = ray.wait(list(self._begun.values()), num_returns=len(self._begun), timeout=0.5)
            for rank in [rank for rank, reference in self._begun.items() if reference in ready]:
                found = ray_outcome(self._begun.pop(rank))
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
        """A relay on the machine of its first rank. It takes no CPU, since it only waits."""
        hosts = dict(enumerate(self._actors[first : first + self.fan_out], first))
        relay = self.cluster.host(ProcessSlot(self.slots[first].bundle, {"CPU": 0.0}))
        log = self.logs[0].parent / f"{self.name}-relay-{first}.log"
        relay.begin.remote(Relay, (hosts,), {}, str(log), str(Path.cwd()))
        return relay

    def _failed(self, rank: int, found: RayOutcome) -> Exception:
        """The error of a rank, as it is raised in the driver."""
        if found.is_users:
            return UserError(str(found.error))
        return WorkerFailed(f"{self.name} rank {rank} of {self.size} failed:\n{found.error}")

    def _ended_before(self, rank: int, why: str) -> WorkerLost:
        return WorkerLost(
            f"{self.name} rank {rank} of {self.size} has ended before it was ready: {why}\n{self.describe(rank)}", rank
        )

    def _blame(self, rank: int, error: str) -> None:
        """Raise `WorkerGone` if another rank has died: the error of this rank is then only a broken connection to it."""
        asked = {other: actor.stacks.remote() for other, actor in enumerate(self._actors) if other != rank}
        ready, _ = (
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=STACKS_TIMEOUT_S) if asked else ([], [])
        )
        for other, reference in asked.items():
            if reference in ready and (gone := ray_outcome(reference).gone) is not None:
                raise WorkerGone(f"{gone} (rank {rank} failed with it: {error.strip().splitlines()[-1]})", other)

    def describe(self, rank: int) -> str:
        who = f"process {self._processes[rank][0]}" if rank in self._processes else "its process"
        try:
            lines = self.logs[rank].read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        except OSError:
            return f"{who} left no output at {self.logs[rank]}"
        said = "\n".join(f"  {line}" for line in lines)
        return (
            f"{who} wrote to {self.logs[rank]} last:\n{said}" if lines else f"{who} wrote nothing to {self.logs[rank]}"
        )

    def silent(self, ranks: Sequence[int], what: str) -> str:
        """Write the stacks of the ranks to a file. A rank that cannot report them is stopped, or its machine is gone."""
        asked = {rank: self._actors[rank].stacks.remote() for rank in ranks}
        ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=STACKS_TIMEOUT_S)
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
            self._on_machine_of(rank, request_stack_dump)
        logs = ", ".join(str(stacks_file(self.logs[rank])) for rank in mute[:4])
        return f"{told}; ranks {mute} did not report theirs (stopped, swapped out, or gone); what they still write is in {logs}"

    def restart(self, rank: int) -> None:
        """Start new workers in place of a rank and its process group. Old processes are killed first: Ray would wait for their CPUs."""
        first = rank - rank % self.group_size
        for one in range(first, first + self.group_size):
            self._look_for(one)
            ray.kill(self._actors[one], no_restart=True)
            self._on_machine_of(one, kill_process)
            self._processes.pop(one, None)
            self._actors[one] = self.cluster.host(self.slots[one])
            if self._relays:
                self._relays[one // self.fan_out].call.remote("adopt", ((one, self._actors[one]), {}))
        self._begin_group(first)  # not awaited: the first call raises its error

    def _on_machine_of(self, rank: int, action: Callable[[int], None]) -> None:
        """Run an action on a rank's process, if that is known, without waiting for it."""
        if rank in self._processes:
            pid, node = self._processes[rank]
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            ray.remote(action).options(num_cpus=0, scheduling_strategy=there).remote(pid)

    def _look_for(self, rank: int) -> None:
        """Learn the process of a restarted rank, unless it never came up."""
        if rank in self._begun and ray.wait([self._begun[rank]], timeout=0)[0]:
            with contextlib.suppress(RayError):
                self._processes[rank] = ray.get(self._begun[rank])
            del self._begun[rank]

    def pid(self, rank: int) -> int:
        """The process id of a rank that has started."""
        self._look_for(rank)
        return self._processes[rank][0]

    def close(self) -> None:
        for actor in [*self._actors, *self._relays]:
            ray.kill(actor, no_restart=True)


STORE_THRESHOLD_BYTES = 1 << 16
"""Size above which arguments go through the object store."""


class RayBackend(RayProcesses):
    """A group of workers in Ray actors (`WorkerBackend`)."""

    is_here = False

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes the arguments of `RayProcesses`."""
        super().__init__(*args, **options)
        self.traffic = Traffic()

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _PackedArguments:
        packed = encode((args, kwargs))
        return _PackedArguments(packed, num_array_bytes(packed))

    def send(self, rank_calls: Sequence[RankCall]) -> list[_RayCall]:
        sent: dict[int, _RayCall] = {}
        by_relay: dict[int, list[RankCall]] = {}
        for rank_call in rank_calls:
            if self._relays:
                by_relay.setdefault(rank_call.rank // self.fan_out, []).append(rank_call)
            else:
                stored = [
                    self._stored_parts(sharded, share, sharded.parts[share]) for sharded, share in rank_call.parts
                ]
                parts = [*stored, *rank_call.promises]
                parcel = self._stored_arguments(rank_call.parcel)
                reference = start_call(self._actors[rank_call.rank], rank_call.lane, rank_call.method, parcel, parts)
                self.traffic.messages += 1
                sent[id(rank_call)] = _RayCall(rank_call.rank, _Reply(reference, is_many=False), 0)
        for relay, group in by_relay.items():
            reply = self._forward(relay, group)
            sent |= {id(rank_call): _RayCall(rank_call.rank, reply, k) for k, rank_call in enumerate(group)}
        return [sent[id(rank_call)] for rank_call in rank_calls]

    def _forward(self, relay: int, rank_calls: Sequence[RankCall]) -> _Reply:
        """Send one message for all called ranks of a relay."""
        first, ranks = rank_calls[0], [rank_call.rank for rank_call in rank_calls]
        same = all(rank_call.parcel is first.parcel for rank_call in rank_calls)
        parcels = [self._stored_arguments(rank_call.parcel) for rank_call in (rank_calls[:1] if same else rank_calls)]
        batch_parts = []
        for j, (sharded, _) in enumerate(first.parts):
            parts = [sharded.parts[rank_call.parts[j][1]] for rank_call in rank_calls]
            batch_parts.append(self._stored_parts(sharded, tuple(ranks), parts))
        message = RelayMessage(ranks, first.method, first.lane, parcels)
        host = self._relays[relay]
        self.traffic.messages += 1
        return _Reply(
            (host.forward_side if first.lane == "side" else host.forward).remote(message, *batch_parts), is_many=True
        )

    def _stored_arguments(self, parcel: _PackedArguments) -> Any:
        """Arguments to send; large ones are put into the store, once."""
        if parcel.stored is None and parcel.size > STORE_THRESHOLD_BYTES:
            parcel.stored = ray.put(parcel.content)
            self.traffic.bytes_out += parcel.size
            self.traffic.bytes_stored += parcel.size
        elif parcel.stored is None:
            self.traffic.bytes_out += parcel.size
        return parcel.content if parcel.stored is None else parcel.stored

    def _stored_parts(self, sharded: ShardedBatch, key: Any, parts: PackedArrays | list[PackedArrays]) -> Any:
        """Parts of a batch to send; large ones are put into the store, once."""
        if key not in sharded.stored:
            size = num_array_bytes(parts)
            self.traffic.bytes_out += size
            self.traffic.bytes_stored += size if size > STORE_THRESHOLD_BYTES else 0
            sharded.stored[key] = ray.put(parts) if size > STORE_THRESHOLD_BYTES else parts
        return sharded.stored[key]

    def wait(self, tokens: Sequence[_RayCall], timeout_s: float) -> list[_RayCall]:
        return self._ended(tokens, 1.0, timeout_s)

    def any_of(self, tokens: Sequence[_RayCall], timeout_s: float) -> list[_RayCall]:
        # A poll takes time for every call in it. Waiting for a sixteenth of them keeps the number of polls small.
        return self._ended(tokens, 1 / 16, timeout_s)

    def _ended(self, tokens: Sequence[_RayCall], share: float, timeout_s: float) -> list[_RayCall]:
        references = list(dict.fromkeys(token.reply.reference for token in tokens))
        if not references:
            return []
        ready, _ = ray.wait(references, num_returns=max(1, int(share * len(references))), timeout=timeout_s)
        found = set(ready)
        ended = [token for token in tokens if token.reply.reference in found]
        return sorted(ended, key=lambda token: not token.outcome.is_bad)  # failed ones first

    @property
    def keeps_promises(self) -> bool:
        return not self._relays  # Ray resolves references among the arguments, not inside a relay's message

    def promise(self, token: _RayCall) -> Any:
        return None if token.reply.is_many else token.reply.reference

    def value(self, token: _RayCall) -> Any:
        found = token.outcome
        if found.gone is not None:
            raise WorkerGone(found.gone)
        if found.error is not None:
            if not found.is_users:
                self._blame(token.rank, found.error)
            raise self._failed(token.rank, found)
        size = num_array_bytes(found.value)
        self.traffic.bytes_in += size
        self.traffic.bytes_stored += size if size > STORE_THRESHOLD_BYTES else 0
        return found.value


@dataclass
class _PackedArguments:
    """Packed arguments of a call."""

    content: Any
    size: int
    stored: Any = None


class _Reply:
    """The reply to one call, or to those that a relay forwards; it is read once."""

    def __init__(self, reference: Any, is_many: bool) -> None:
        self.reference, self.is_many = reference, is_many
        self._outcomes: list[RayOutcome] | RayOutcome | None = None

    def outcome(self, index: int) -> RayOutcome:
        if self._outcomes is None:
            found = ray_outcome(self.reference)
            # If a relay has died, the answers of all its ranks are lost.
            self._outcomes = found.value if self.is_many and not found.is_bad else found
        return self._outcomes[index] if isinstance(self._outcomes, list) else self._outcomes


@dataclass(eq=False)
class _RayCall:
    """A call that was sent to a rank."""

    rank: int
    reply: _Reply
    index: int

    @property
    def outcome(self) -> RayOutcome:
        """The outcome of a call that has ended."""
        return self.reply.outcome(self.index)
