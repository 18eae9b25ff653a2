"""Code in Ray's processes: an actor that hosts any worker, and a relay that forwards calls to other actors.

An actor builds its worker, calls it in two lanes, and writes its output to a file. A relay stands between the driver and up to 64
actors: one message to it becomes a message to each, and their answers become one answer. A message costs the driver 0.6 ms, so a
call to 1,000 workers needs relays (`bench/controller_sim.py`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from burnish.config.errors import UserError
from burnish.core.serialization import decode, encode
from burnish.distributed.batch_dispatch import fill_placeholders
from burnish.distributed.resident_batches import ResidentShard
from burnish.run.supervisor.processes import STACKS_SIGNAL, workers_that_dump_stacks

ANSI_COLOURS = re.compile(r"\x1b\[\d+m")
GRACE_S = 10.0
"""How long a relay waits for the other ranks when one has failed: they may be waiting for that one forever."""


class RayStore:
    """The object store of the cluster."""

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, reference: Any) -> Any:
        return ray.get(reference)


LANES = {"side": 1, "begin": 1, "watch": 1}
"""Ray concurrency groups: threads of an actor besides the one for work."""


class WorkerActor:
    """The Ray actor: builds a worker and calls it. It has one thread per lane, and one that reports the stacks of the others."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.resident = ResidentShard()
        self.failure: str | None = None
        self.is_ready = threading.Event()

    def rendezvous_address(self) -> tuple[str, int]:
        """This machine's address, and a port for torch.distributed, reserved until the actor ends.

        The reserving socket stays bound and never listens. Rank 0, in this process, can still listen at the port, since both set
        SO_REUSEADDR; a program that asks for a free port does not get it in between.
        """
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return ray.util.get_node_ip_address(), int(self._reserved.getsockname()[1])

    @ray.method(concurrency_group="begin")  # a call may arrive earlier through a relay, and waits for it
    def begin(
        self,
        kind: type,
        args: tuple[Any, ...],
        environment: Mapping[str, str],
        log: str,
        folder: str,
        address: tuple[str, int] | None = None,
    ) -> tuple[int, str]:
        """Build the worker; returns its process id and node id. `address` is where the ranks of a process group meet."""
        self.is_ready.clear()
        self.failure = None
        try:
            if Path(folder).is_dir():  # so that relative paths mean the same as for the driver
                os.chdir(folder)
            os.environ.update(environment)
            if address is not None:
                os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
            _redirect_output(Path(log))
            _dump_stacks_on_signal(stacks_file(Path(log)))
            self.worker = kind(*args)
            self.worker.store = RayStore()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.is_ready.set()
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def call(self, method: str, parcel: Any, *parts: Any) -> Any:
        """Call a method in the lane `work`; `parts` replace the placeholders in the arguments."""
        self.is_ready.wait()
        if self.failure is not None:
            raise RuntimeError(f"the worker could not be built: {self.failure}")
        args, kwargs = fill_placeholders(decode(parcel), [self.resident.open(part) for part in parts])
        result = getattr(self.worker, method)(*args, **kwargs)
        self.resident.keep(parts, result)
        return encode(result)

    @ray.method(concurrency_group="side")
    def call_side(self, method: str, parcel: Any, *parts: Any) -> Any:
        """Call a method in the lane `side`."""
        return self.call(method, parcel, *parts)

    def forward(self, message: RelayMessage, *batch_parts: Any) -> list[RayOutcome]:
        """Forward calls to other actors, in the lane `work` (relays only)."""
        self.is_ready.wait()
        found: list[RayOutcome] = self.worker.forward(message, *batch_parts)
        return found

    @ray.method(concurrency_group="side")
    def forward_side(self, message: RelayMessage, *batch_parts: Any) -> list[RayOutcome]:
        """Forward calls in the lane `side`."""
        return self.forward(message, *batch_parts)

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """The stack of every thread."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
            for ident, frame in sys._current_frames().items()
        )


def kill_process(pid: int) -> None:
    """Kill a worker's process, even a stopped one. Runs on its machine."""
    command = Path(f"/proc/{pid}/cmdline")
    if command.is_file() and b"ray::" in command.read_bytes():  # the pid may have been reused
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def request_stack_dump(pid: int) -> None:
    """Make a worker's process write its stacks, even if no Python code runs in it. Runs on its machine."""
    if pid in workers_that_dump_stacks(os.getppid()):
        os.kill(pid, STACKS_SIGNAL)


def stacks_file(log: Path) -> Path:
    """The file for the stacks of a worker's process."""
    return log.parent / "stacks" / f"{log.stem}.txt"


def _dump_stacks_on_signal(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(STACKS_SIGNAL, open(path, "a"))  # noqa: SIM115 (open as long as the process runs)


def _redirect_output(log: Path) -> None:
    """Redirect all output of this process, C++ included, to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


# --- Calls and their outcomes ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RayOutcome:
    """The outcome of a call: a result, an error of the worker, or a worker that has died."""

    value: Any = None
    error: str | None = None
    is_users: bool = False
    """Whether the error is a `UserError`."""
    gone: str | None = None

    @property
    def is_bad(self) -> bool:
        return self.error is not None or self.gone is not None


def ray_outcome(reference: Any) -> RayOutcome:
    """The outcome of a call that has ended."""
    try:
        return RayOutcome(ray.get(reference))
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            return RayOutcome(error=str(error.cause), is_users=True)
        return RayOutcome(error=ANSI_COLOURS.sub("", str(error)))
    except RayError as error:
        return RayOutcome(gone=exit_reason(error))


def exit_reason(error: Exception) -> str:
    """Ray's explanation of a worker's end, without identifiers."""
    text = " ".join(str(error).split())
    _, found, detail = text.partition("Worker exit detail: ")
    return (detail if found else text).partition(" Some common causes include")[0][:400]


def start_call(host: Any, lane: str, method: str, parcel: Any, parts: Sequence[Any]) -> Any:
    """Start a call; returns Ray's reference to its result."""
    return (host.call_side if lane == "side" else host.call).remote(method, parcel, *parts)


@dataclass(frozen=True)
class RelayMessage:
    """Calls of one method to several ranks of a relay, with one set of arguments for all or one for each."""

    ranks: list[int]
    method: str
    lane: str
    parcels: list[Any]


class Relay:
    """Forwards calls to the actors of some ranks."""

    def __init__(self, hosts: Mapping[int, Any]) -> None:
        self.hosts = dict(hosts)

    def adopt(self, rank: int, host: Any) -> None:
        """Use a new actor for a rank."""
        self.hosts[rank] = host

    def forward(self, message: RelayMessage, *batch_parts: Sequence[Any]) -> list[RayOutcome]:
        """The outcome of a call at each rank. Each of `batch_parts` holds the parts of one batch, one per rank.

        If one rank fails, the others have `GRACE_S` left: they may be waiting for it forever.
        """
        count = len(message.ranks)
        parcels = message.parcels * count if len(message.parcels) == 1 else message.parcels
        places = {
            start_call(
                self.hosts[rank], message.lane, message.method, parcels[k], [parts[k] for parts in batch_parts]
            ): k
            for k, rank in enumerate(message.ranks)
        }
        outcomes: dict[int, RayOutcome] = {}
        left, until = list(places), float("inf")
        while left and time.monotonic() < until:
            ended, left = ray.wait(left, num_returns=len(left), timeout=0.5)
            outcomes |= {places[reference]: ray_outcome(reference) for reference in ended}
            if until == float("inf") and any(outcome.is_bad for outcome in outcomes.values()):
                until = time.monotonic() + GRACE_S
        late = RayOutcome(gone=f"it had not answered {GRACE_S:g} s after another rank failed")
        return [outcomes.get(k, late) for k in range(count)]
