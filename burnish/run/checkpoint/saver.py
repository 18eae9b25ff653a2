"""Saving checkpoints in the background: training pauses only for a copy to host memory, and a thread writes the files.

At most one checkpoint is being written. The next checkpoint and the end of the run wait for it. An error in the thread is
raised in the training loop at the next step. If host memory has no room for the copy, or with `run.save=wait`, the tensors
are written from where they are, and training waits.

Tensors on a GPU are copied to pinned memory, which is fastest and lets all copies run at once; `wait_for_devices` waits once
after the last copy. Pinned memory comes in slabs of one size, because torch rounds each allocation up to a power of two and
never returns it to the system. So one checkpoint reuses the slabs of the previous one.
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
from burnish.run.checkpoint.snapshot import Snapshot
from burnish.run.checkpoint.tensor_file import TensorBytes, flat_bytes

GIB = 1 << 30
SLAB_BYTES = 1 << 28
ALIGNMENT = 16
"""Alignment of a tensor in its slab, so that its bytes can be viewed as its dtype."""
FREE_MEMORY_MARGIN = 0.1
"""Share of the host's memory that a copy leaves free."""
SMALL_TENSOR_BYTES = 1 << 20
"""Tensors up to this size are copied without a check of the free memory."""
LONG_WAIT_S = 5.0
"""A wait longer than this is reported to the user."""
Result = TypeVar("Result")


class TensorStaging(Protocol):
    """How a snapshot captures a tensor."""

    def __call__(self, tensor: Tensor) -> TensorBytes: ...


TakeSnapshot = Callable[[TensorStaging], Snapshot]
"""Takes a snapshot and captures every tensor with the given staging."""


def keep_in_place(tensor: Tensor) -> TensorBytes:
    """Capture a tensor without a copy. It must be written before training continues."""
    return TensorBytes(tensor.dtype, tuple(tensor.shape), (flat_bytes(tensor),))


class HostCopy:
    """Copies the tensors of one snapshot to host memory. When memory runs short, it sets `is_short` and keeps tensors in place."""

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
        """Copy the bytes to slabs; None if the system refuses to pin another slab."""
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
    """Return bytes that do not share memory with the tensor. For a non-contiguous tensor, `source` is a copy already."""
    return source.clone() if source.data_ptr() == tensor.data_ptr() else source


def wait_for_devices() -> None:
    """Wait until every copy from a GPU has arrived."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def free_memory() -> tuple[int, int] | None:
    """Return free and total bytes of host memory; None if the system does not tell.

    In a container, these are the smaller of the machine's and the container's values.
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


class BackgroundTask(Generic[Result]):
    """Runs at most one function at a time in a thread. The caller must collect its result or error.

    The thread is a daemon: work that survives a kill at any point also survives an exit of the process.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._result: list[Result] = []
        self._error: BaseException | None = None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is running and no result is waiting."""
        return self._thread is None

    def start(self, work: Callable[[], Result], name: str) -> None:
        """Start the work. The result of the previous work must have been collected."""
        assert self.is_idle
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; return whether the work has ended. True if there is none."""
        if self._thread is not None:
            self._thread.join(timeout)
        return self._thread is None or not self._thread.is_alive()

    def collect(self) -> Result:
        """Return the result of the work, once, or raise its error."""
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
        except BaseException as error:  # noqa: BLE001 -- `collect` raises it again
            self._error = error


def folder_bytes(folder: Path) -> int:
    """Return the size of a folder in bytes. Files may appear and disappear meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint on disk, and the seconds it took to write."""

    step: int
    score: float | None
    path: Path
    write_s: float


class CheckpointSaver:
    """Writes the checkpoints of one run, one at a time. `note` prints a sentence, `phase` shows what the run waits for.

    A wait has no deadline, because disks have any speed. `phase` is called as long as the checkpoint on disk grows, and the
    supervisor ends a run that shows no progress.
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

    def begin(
        self,
        step: int,
        take: TakeSnapshot,
        score: float | None,
        metric: str | None = None,
        sync: Callable[[], None] | None = None,
    ) -> None:
        """Take the snapshot of a step and start writing it. The previous one must have been collected.

        `sync` puts other files of the step on disk. It is called before the checkpoint appears, by the thread that writes it.
        """
        stage = HostCopy() if self.in_background else keep_in_place
        snapshot = take(stage)
        wait_for_devices()
        self._step = step
        self._work.start(lambda: self._write(step, snapshot, score, metric, sync), f"checkpoint of step {step}")
        if isinstance(stage, HostCopy) and stage.is_short:
            self.in_background = False
            found = free_memory()
            free = "" if found is None else f" ({found[0] / GIB:.1f} of {found[1] / GIB:.1f} GiB are free)"
            self.note(
                f"host memory has no room for a copy of the checkpoint{free}: this and all later ones are written while the run waits"
            )
        if not self.in_background:
            self._wait()

    def collect(self, wait: bool) -> SavedCheckpoint | None:
        """Return the checkpoint that was written since the last call, or None. Raises the error of a failed one.

        With `wait`, wait until no checkpoint is being written. A long wait is reported.
        """
        if self._work.is_idle or not (wait or self._work.wait(0)):
            return None
        if not self._work.wait(LONG_WAIT_S):
            self.note(f"waiting for the checkpoint of step {self._step} to be written")
            self._wait()
        return self._work.collect()

    def _wait(self) -> None:
        """Wait until nothing is being written."""
        size = -1
        while not self._work.wait(LONG_WAIT_S):
            found = folder_bytes(self.checkpoints.folder)
            if found != size:
                size = found
                self.phase(f"writing the checkpoint of step {self._step}, {size / GIB:.1f} GiB are on disk")

    def _write(
        self,
        step: int,
        snapshot: Snapshot,
        score: float | None,
        metric: str | None,
        sync: Callable[[], None] | None,
    ) -> SavedCheckpoint:
        started = time.perf_counter()
        try:
            if sync is not None:
                sync()
            path = self.checkpoints.write(step, snapshot, score, metric)
        except OSError as error:
            where = self.checkpoints.folder if error.filename is None else error.filename
            raise UserError(
                f"cannot write the checkpoint of step {step} in {where}: {error.strerror or error}; fix this and start again"
            ) from error
        return SavedCheckpoint(step, score, path, time.perf_counter() - started)
