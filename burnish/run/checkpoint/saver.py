"""Saving while training goes on: the loop stands still for a copy, a thread does the writing.

At most one checkpoint is being written. The next one waits for it; so does the end of the run. An error of the thread
is raised in the loop, at the next step. Where the host has no room for the copy, or the run is told to wait
(`run.save=wait`), a checkpoint is written from where its tensors are, and the loop stands still.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from burnish.config.errors import UserError
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.checkpoint.snapshot import Snapshot, TensorBytes, flat_bytes

# --- Taking tensors out of training's way: copies in host memory that are made quickly and written slowly.
#
# A GPU's tensors go to pinned memory, which is the fastest way off the device and lets all copies run at once; the
# caller waits for the device once, after the last of them (`wait_for_devices`). Pinned memory comes in slabs of a fixed
# size, because torch rounds every allocation up to a power of two and gives none back to the system: the slabs of one
# checkpoint are those of the next.

SLAB_BYTES = 1 << 28
ALIGNMENT = 16
"""At which a tensor starts in its slab, so that its bytes can be looked at in its type."""
FREE_MEMORY_MARGIN = 0.1
"""Share of the host's memory that a copy leaves free."""
SMALL_TENSOR_BYTES = 1 << 20
"""Bytes of a tensor for which nobody asks how much memory is left."""


class TensorStaging(Protocol):
    """How a snapshot takes hold of a tensor."""

    def __call__(self, tensor: Tensor) -> TensorBytes: ...


def keep_in_place(tensor: Tensor) -> TensorBytes:
    """The tensor where it is: what it holds when it is written, which must be before training goes on."""
    return TensorBytes(tensor.dtype, tuple(tensor.shape), (flat_bytes(tensor),))


class HostCopy:
    """Copies for one snapshot, as long as there is room; then it leaves tensors where they are and `is_short`."""

    def __init__(self) -> None:
        self.is_short = False
        self.num_bytes = 0
        self._slab: Tensor | None = None
        self._used = 0

    @torch.no_grad()
    def __call__(self, tensor: Tensor) -> TensorBytes:
        source = flat_bytes(tensor)
        self.is_short = self.is_short or (source.numel() > SMALL_TENSOR_BYTES and not _has_room(source.numel()))
        pieces = None if self.is_short else self._pinned(source) if tensor.is_cuda else [_private_copy(source, tensor)]
        if pieces is None:
            self.is_short = True
            return keep_in_place(tensor)
        self.num_bytes += source.numel()
        return TensorBytes(tensor.dtype, tuple(tensor.shape), tuple(pieces))

    def _pinned(self, source: Tensor) -> list[Tensor] | None:
        """The bytes in slabs; None where the system refuses to pin one more."""
        pieces = []
        self._used += -self._used % ALIGNMENT
        while source.numel():
            if self._slab is None or self._used == SLAB_BYTES:
                try:
                    self._slab, self._used = torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True), 0
                except RuntimeError:
                    return None
            piece = self._slab[self._used : self._used + source.numel()]
            piece.copy_(source[: piece.numel()], non_blocking=True)
            pieces.append(piece)
            source, self._used = source[piece.numel() :], self._used + piece.numel()
        return pieces


def _private_copy(source: Tensor, tensor: Tensor) -> Tensor:
    """Bytes that are not the tensor's: they are copied already where it was not contiguous."""
    return source.clone() if source.data_ptr() == tensor.data_ptr() else source


def wait_for_devices() -> None:
    """Return when every copy from a GPU has arrived."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def free_memory() -> tuple[int, int] | None:
    """Bytes of host memory that can still be had, and that there are; None where the system does not say.

    In a container the smaller of the machine's and the container's.
    """
    try:
        lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    except OSError:
        return None
    machine = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}
    free, total = machine["MemAvailable"], machine["MemTotal"]
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        used = int((group / "memory.current").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free, total
    return min(free, limit - used + int(statistics["inactive_file"])), min(total, limit)


def _has_room(num_bytes: int) -> bool:
    found = free_memory()
    return found is None or found[0] - num_bytes > FREE_MEMORY_MARGIN * found[1]


# --- One piece of work beside the main thread, whose result or error is never lost.

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """At most one piece of work at a time; whoever gave it picks up what came of it.

    The thread does not outlive the process: work that a kill may interrupt anywhere may also be interrupted by an exit.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: list[Result] = []
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing under way and nothing to pick up."""
        return self._thread is None

    def start(self, work: Callable[[], Result], name: str) -> None:
        """Begin; what came of the work before must have been picked up."""
        assert self.is_idle
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether the work has ended (also if there is none), after at most `timeout` seconds."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def pick_up(self) -> Result:
        """The result of work that has ended, once; its error is raised here, as it was raised there."""
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result.pop()

    def _run(self, work: Callable[[], Result]) -> None:
        try:
            self._result.append(work())
        except BaseException as error:  # noqa: BLE001 -- whatever it is, it is raised again where it can be heard
            self._error = error


LONG_WAIT_S = 5.0
"""After which a wait is worth a word."""
GIB = 1 << 30


def folder_bytes(folder: Path) -> int:
    """What lies in a folder, in bytes; files may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


TakeSnapshot = Callable[[TensorStaging], Snapshot]
"""Takes a snapshot: holds every tensor the way it is told to."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk, and what it cost."""

    step: int
    score: float | None
    path: Path
    write_s: float


class CheckpointSaver:
    """Writes the checkpoints of one run, one at a time; `note` takes a sentence for the user, `phase` what is waited for.

    A wait has no deadline of its own, since disks are of any speed: `phase` hears of it as long as more and more of the checkpoint
    is on disk, and the supervisor ends a run that nothing is heard of.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        in_background: bool,
        note: Callable[[str], None],
        phase: Callable[[str], None],
    ) -> None:
        self.checkpoints, self.in_background, self.note, self.phase = checkpoints, in_background, note, phase
        self._work: BackgroundTask[SavedCheckpoint] = BackgroundTask()
        self._step = -1

    def begin(self, step: int, take: TakeSnapshot, score: float | None, metric: str | None = None) -> None:
        """Take the snapshot of a step and start writing it; the one before must have been collected."""
        stage = HostCopy() if self.in_background else keep_in_place
        snapshot = take(stage)
        wait_for_devices()
        self._step = step
        self._work.start(lambda: self._write(step, snapshot, score, metric), f"checkpoint of step {step}")
        if isinstance(stage, HostCopy) and stage.is_short:
            self.in_background = False
            found = free_memory()
            free = "" if found is None else f" ({found[0] / GIB:.1f} of {found[1] / GIB:.1f} GiB are free)"
            self.note(
                f"host memory has no room for a copy of the checkpoint{free}: this one and those after it are written while the run waits"
            )
        if not self.in_background:
            self._wait()

    def collect(self, wait: bool) -> SavedCheckpoint | None:
        """A checkpoint that has been written since the last call, or None; its error is raised.

        With `wait` none is under way when this returns, and a wait that takes long says for what.
        """
        if self._work.is_idle or not (wait or self._work.wait(0)):
            return None
        if not self._work.wait(LONG_WAIT_S):
            self.note(f"waiting for the checkpoint of step {self._step} to be written")
            self._wait()
        return self._work.pick_up()

    def _wait(self) -> None:
        """Until nothing is being written."""
        size = -1
        while not self._work.wait(LONG_WAIT_S):
            found = folder_bytes(self.checkpoints.folder)
            if found != size:
                size = found
                self.phase(f"writing the checkpoint of step {self._step}, {size / GIB:.1f} GiB are on disk")

    def _write(self, step: int, snapshot: Snapshot, score: float | None, metric: str | None) -> SavedCheckpoint:
        started = time.perf_counter()
        try:
            path = self.checkpoints.write(step, snapshot, score, metric)
        except OSError as error:
            where = self.checkpoints.folder if error.filename is None else error.filename
            raise UserError(
                f"cannot write the checkpoint of step {step} in {where}: {error.strerror or error}; see to that and start again"
            ) from error
        return SavedCheckpoint(step, score, path, time.perf_counter() - started)
