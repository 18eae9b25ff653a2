"""What runs in Ray's processes: an actor that is host to any worker, and a worker that passes calls on to others.

A host makes the worker it is told to, calls it in two lanes, and writes what it prints to a file. A relay stands between the
driver and some dozens of hosts: one message to it becomes a message to each, and their answers one answer, so that the driver
of a thousand workers sends and reads a few dozen messages a call.
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
"""How long a relay waits for the others when one has failed: they may wait for that one for ever."""


class RayStore:
    """The object store of the cluster."""

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, reference: Any) -> Any:
        return ray.get(reference)


LANES = {"side": 1, "begin": 1, "watch": 1}
"""Threads of an actor besides the one for work."""


class WorkerActor:
    """The actor: makes a worker and calls it. One thread for each lane, and one that can tell what the others do."""

    def __init__(self) -> None:
        self.worker: Any = None
        self.resident = ResidentShard()
        self.failure: str | None = None
        self.is_there = threading.Event()

    def where(self) -> tuple[str, int]:
        """This machine's address and a port that is free now."""
        with socket.socket() as free:
            free.bind(("", 0))
            return ray.util.get_node_ip_address(), int(free.getsockname()[1])

    @ray.method(concurrency_group="begin")  # a call may come before it by way of a relay, and waits for it
    def begin(
        self, kind: type, args: tuple[Any, ...], environment: Mapping[str, str], log: str, folder: str
    ) -> tuple[int, str]:
        """Make the worker; returns which process this is, on which machine."""
        self.is_there.clear()
        self.failure = None
        try:
            if Path(folder).is_dir():  # relative paths mean what they mean to the driver, where the machine has them
                os.chdir(folder)
            os.environ.update(environment)
            _redirect_output(Path(log))
            _dump_stacks_on_signal(stacks_file(Path(log)))
            self.worker = kind(*args)
            self.worker.store = RayStore()
        except BaseException as error:
            self.failure = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.is_there.set()
        return os.getpid(), ray.get_runtime_context().get_node_id()

    def call(self, method: str, parcel: Any, *parts: Any) -> Any:
        """One call, in the lane `work`; `parts` go into the marked places of the arguments."""
        self.is_there.wait()
        if self.failure is not None:
            raise RuntimeError(f"the worker could not be made: {self.failure}")
        args, kwargs = fill_placeholders(decode(parcel), [self.resident.open(part) for part in parts])
        result = getattr(self.worker, method)(*args, **kwargs)
        self.resident.keep(parts, result)
        return encode(result)

    @ray.method(concurrency_group="side")
    def call_side(self, method: str, parcel: Any, *parts: Any) -> Any:
        """One call, in the lane `side`."""
        return self.call(method, parcel, *parts)

    def forward(self, message: RelayMessage, *bales: Any) -> list[CallOutcome]:
        """Of a relay: calls to others, in the lane `work`."""
        self.is_there.wait()
        found: list[CallOutcome] = self.worker.forward(message, *bales)
        return found

    @ray.method(concurrency_group="side")
    def forward_side(self, message: RelayMessage, *bales: Any) -> list[CallOutcome]:
        """The same in the lane `side`."""
        return self.forward(message, *bales)

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """What every thread is doing."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        return "\n".join(
            f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
            for ident, frame in sys._current_frames().items()
        )


def kill_process(pid: int) -> None:
    """End a worker's process for good, even one that is stopped and hears nothing. Called on its machine."""
    command = Path(f"/proc/{pid}/cmdline")
    if command.is_file() and b"ray::" in command.read_bytes():  # the number may be another process's by now
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def request_stack_dump(pid: int) -> None:
    """Have a worker's process write its stacks, even one in which no Python runs any more. Called on its machine."""
    if pid in workers_that_dump_stacks(os.getppid()):
        os.kill(pid, STACKS_SIGNAL)


def stacks_file(log: Path) -> Path:
    """Where a worker's process writes its stacks."""
    return log.parent / "stacks" / f"{log.stem}.txt"


def _dump_stacks_on_signal(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    faulthandler.register(STACKS_SIGNAL, open(path, "a"))  # noqa: SIM115 (as long as the process)


def _redirect_output(log: Path) -> None:
    """All that this process prints from here on, C++ included, goes to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


# --- calls and what comes of them ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallOutcome:
    """What came of one call: a result, an error of the worker's, or a worker that is gone."""

    value: Any = None
    error: str | None = None
    is_users: bool = False
    """Whether the error is one that a user can fix."""
    gone: str | None = None

    @property
    def is_bad(self) -> bool:
        return self.error is not None or self.gone is not None


def call_outcome(reference: Any) -> CallOutcome:
    """Of a call that has ended."""
    try:
        return CallOutcome(ray.get(reference))
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            return CallOutcome(error=str(error.cause), is_users=True)
        return CallOutcome(error=ANSI_COLOURS.sub("", str(error)))
    except RayError as error:
        return CallOutcome(gone=exit_reason(error))


def exit_reason(error: Exception) -> str:
    """What Ray says of a worker's end, without its identifiers."""
    text = " ".join(str(error).split())
    _, found, detail = text.partition("Worker exit detail: ")
    return (detail if found else text).partition(" Some common causes include")[0][:400]


def start_call(host: Any, lane: str, method: str, parcel: Any, parts: Sequence[Any]) -> Any:
    """Ray's reference for a call's result."""
    return (host.call_side if lane == "side" else host.call).remote(method, parcel, *parts)


@dataclass(frozen=True)
class RelayMessage:
    """Calls of one method to several ranks of a relay: the same arguments for all, or one entry each."""

    ranks: list[int]
    method: str
    lane: str
    parcels: list[Any]


class Relay:
    """Passes calls on to the hosts of some ranks."""

    def __init__(self, hosts: Mapping[int, Any]) -> None:
        self.hosts = dict(hosts)

    def adopt(self, rank: int, host: Any) -> None:
        """A new process in a rank's place."""
        self.hosts[rank] = host

    def forward(self, message: RelayMessage, *bales: Sequence[Any]) -> list[CallOutcome]:
        """What came of a call at each rank; `bales` hold the parts of batches, one a rank each.

        Where one fails, the others have `GRACE_S` left: a rank may wait for ever for one that is gone.
        """
        count = len(message.ranks)
        parcels = message.parcels * count if len(message.parcels) == 1 else message.parcels
        places = {
            start_call(self.hosts[rank], message.lane, message.method, parcels[k], [bale[k] for bale in bales]): k
            for k, rank in enumerate(message.ranks)
        }
        outcomes: dict[int, CallOutcome] = {}
        left, until = list(places), float("inf")
        while left and time.monotonic() < until:
            ended, left = ray.wait(left, num_returns=len(left), timeout=0.5)
            outcomes |= {places[reference]: call_outcome(reference) for reference in ended}
            if until == float("inf") and any(outcome.is_bad for outcome in outcomes.values()):
                until = time.monotonic() + GRACE_S
        late = CallOutcome(gone=f"it had not answered {GRACE_S:g} s after another one failed")
        return [outcomes.get(k, late) for k in range(count)]
