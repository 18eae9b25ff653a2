"""The supervisor: a small process above the driver, which is a fork of it and does all the work.

    status = supervise(folder, max_restarts=3, deadline_s=1800)
    if status is not None:
        return status          # the supervisor: the run is over
    ...                        # the driver: make the run

A driver that dies is named, with its cause, and a new one goes on from the journal and the last checkpoint. One that hangs, or
was stopped and is not continued, is ended the same way after its stacks were written. What a user must see to (a `UserError`)
and what a user asked for (Ctrl-C) is never tried again, and neither is a run that dies twice in the same step.

The supervisor loads neither torch nor numpy and starts no thread, so a fork of it is as good as a new process, and costs nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from burnish.config.yaml_text import printable
from burnish.run.durable_files import FolderId, folder_id
from burnish.run.supervisor.exit_status import (
    HUNG_STATUS,
    DriverExit,
    DriverRecord,
    describe_exit_code,
    why_not_restart,
)
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, HeartbeatRecord, read_heartbeat
from burnish.run.supervisor.processes import (
    STACKS_SIGNAL,
    adopt_orphans,
    descendants,
    kill_orphans,
    num_bytes_read,
    out_of_memory_kills,
    send_signal,
    signal_on_parent_exit,
    workers_that_dump_stacks,
)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""With which users and batch systems end a run."""
WATCHED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)
POLL_S = 0.5
MAX_STOPPED_S = 30.0
"""How long a driver may be stopped while its supervisor is not. (Ctrl-Z stops both.)"""
READ_PROGRESS_BYTES = 1 << 26
"""To read so many bytes more from a disk is a sign of life too."""
STACK_DUMP_S = 1.0
KILL_TIMEOUT_S = 60.0
"""How long a process may take to be gone after SIGKILL: one deep in the kernel (a network disk, a GPU's driver) may take for ever."""
SI_KERNEL = 0x80
SHOW_CURSOR = "\x1b[?25h"


def is_supported() -> bool:
    """Whether this system has what a supervisor needs (Linux has)."""
    return hasattr(signal, "sigtimedwait") and sys.platform.startswith("linux")


def supervise(folder: Path, max_restarts: int, deadline_s: float, replaced: FolderId | None = None) -> int | None:
    """None in each driver; in the supervisor the status to exit with, when the run is over.

    `folder` is the run's. `deadline_s` is the longest time that a driver may go without a sign of life (`heartbeat.py`). `replaced`
    is an old run at `folder`, which stays there until the driver has checked the new one: nothing is read from it or written to it.
    """
    return Supervisor(folder, max_restarts, deadline_s, replaced).run()


def _try_write(path: Path, content: bytes) -> bool:
    """Whether there was room for a file."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    except OSError:
        return False
    return True


class Supervisor:
    """Starts drivers, one after another, and watches them."""

    def __init__(self, folder: Path, max_restarts: int, deadline_s: float, replaced: FolderId | None = None) -> None:
        self.folder, self.max_restarts, self.deadline_s = folder, max_restarts, deadline_s
        self.replaced = replaced
        self.is_asked_to_stop = False
        self.driver = 0
        self.is_stopped = False
        """Whether somebody has stopped the driver."""
        self.stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self.kills = out_of_memory_kills()

    def run(self) -> int | None:
        """See `supervise`."""
        adopt_orphans()
        signal.signal(
            signal.SIGCHLD, signal.SIG_DFL
        )  # a parent may have left it ignored: then nobody can be waited for
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        previous: DriverExit | None = None
        for restarts in range(self.max_restarts + 1):
            life = DriverRecord(self.folder, self.replaced)
            if not self._begin(mask):
                return None
            death = self._watch(life)
            if death.is_final or self.is_asked_to_stop:
                if death.status == HUNG_STATUS:
                    self._settle(death)
                break
            self._settle(death)
            while signal.sigtimedwait(STOP_SIGNALS, 0) is not None:  # which no driver was there to hear
                self.is_asked_to_stop = True
            if self.is_asked_to_stop:
                break
            reason = why_not_restart(death, previous, restarts, self.max_restarts)
            if reason is not None:
                self.say(f"the run stops here: {reason}; the same command goes on {life.goes_on_from()}")
                break
            self.say(f"going on {life.goes_on_from()} (restart {restarts + 1} of {self.max_restarts})")
            previous = death
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return death.status

    # --- one driver ------------------------------------------------------------------------------------------------------

    def _begin(self, mask: set[int | signal.Signals]) -> bool:
        """Fork a driver; False in it."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.stacks.seek(0)
        self.stacks.truncate()
        supervisor = os.getpid()
        self.driver = os.fork()
        if self.driver:
            self.is_stopped = False
            return True
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal_on_parent_exit(supervisor, signal.SIGTERM)  # which lets it finish its step
        faulthandler.enable(self.stacks)
        faulthandler.register(STACKS_SIGNAL, self.stacks)
        return False

    def _watch(self, life: DriverRecord) -> DriverExit:
        """Wait until the driver ends, or must be ended."""
        beat: HeartbeatRecord | None = None
        sign: tuple[HeartbeatRecord | None, int] = None, 0
        silent_s = stopped_s = 0.0
        looked = time.monotonic()
        while True:
            self._hear(signal.sigtimedwait(WATCHED_SIGNALS, POLL_S))
            now = time.monotonic()
            # A supervisor that was stopped itself, or whose machine slept, has not waited for its driver.
            passed, looked = min(now - looked, 2 * POLL_S), now
            status = self._reap()
            if status is not None:
                return self._death(life, status)
            beat = read_heartbeat(self.folder / HEARTBEAT_FILE, self.driver) or beat
            # Large weights may take long to load, in which nobody speaks.
            last, sign = sign, (beat, num_bytes_read(self.driver) // READ_PROGRESS_BYTES)
            silent_s = 0.0 if sign != last else silent_s + passed
            stopped_s = stopped_s + passed if self.is_stopped else 0.0
            if stopped_s > min(MAX_STOPPED_S, self.deadline_s):
                return self._end(life, f"was stopped by a signal, and nobody continued it for {stopped_s:.0f} s")
            if silent_s > self.deadline_s:
                return self._end(life, f"gave no sign of life for {silent_s:.0f} s (--deadline)")

    def _hear(self, signalled: Any) -> None:
        """Pass on what is meant for the run. A terminal's Ctrl-C goes to the driver as well, by itself."""
        if signalled is None or signalled.si_signo not in STOP_SIGNALS:
            return
        self.is_asked_to_stop = True
        if signalled.si_code != SI_KERNEL:
            send_signal(self.driver, signal.Signals(signalled.si_signo))

    def _reap(self) -> int | None:
        """The driver's exit code if it has ended (negative: a signal's number); what it left behind is reaped too."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if pid == 0:
                return None
            if pid != self.driver:
                continue
            if os.WIFSTOPPED(status) or os.WIFCONTINUED(status):
                self.is_stopped = os.WIFSTOPPED(status)
            else:
                return os.waitstatus_to_exitcode(status)

    def _death(self, life: DriverRecord, code: int) -> DriverExit:
        kills = out_of_memory_kills()
        for_memory, self.kills = kills > self.kills, kills
        return life.death(self.driver, code, describe_exit_code(code, for_memory))

    def _end(self, life: DriverRecord, why: str) -> DriverExit:
        """Have a driver that hangs write its stacks, and its workers theirs; then kill it."""
        for worker in workers_that_dump_stacks(self.driver):
            send_signal(worker, STACKS_SIGNAL)
        send_signal(self.driver, STACKS_SIGNAL)
        send_signal(self.driver, signal.SIGCONT)  # a stopped one could not write
        time.sleep(STACK_DUMP_S)
        for pid in [self.driver, *descendants(self.driver)]:
            send_signal(pid, signal.SIGKILL)
        until = time.monotonic() + KILL_TIMEOUT_S
        while self._reap() is None:
            if time.monotonic() > until:  # it still holds the run's lock, so nobody could go on
                return life.hang(self.driver, f"{why}, and does not end though it was killed", is_final=True)
            time.sleep(0.05)
        return life.hang(self.driver, why)

    # --- what is said of it ----------------------------------------------------------------------------------------------

    def _settle(self, death: DriverExit) -> None:
        """Name a death, keep its stacks, end what is left of it."""
        if sys.stdout.isatty():
            print(SHOW_CURSOR, end="", flush=True)  # which a live display hides
        self.say(f"the driver (process {self.driver}) {death.cause}, {death.where}")
        self.stacks.seek(0)
        found = self.stacks.read()
        path = self.folder / "stacks" / f"driver-{self.driver}.txt"
        if found and self._has_folder() and _try_write(path, found):
            workers = self.folder / "workers" / "stacks"
            others = (
                f", what its workers were doing in {workers}"
                if death.status == HUNG_STATUS and workers.is_dir()
                else ""
            )
            self.say(f"what it was doing is in {path}{others}")
        elif found:
            self.say(f"what it was doing:\n{found.decode(errors='replace')}")
        for line in death.last_lines:
            print(f"  {printable(line)}", file=sys.stderr, flush=True)
        if killed := kill_orphans():
            self.say(f"what it had started did not end by itself and was killed: process {', '.join(map(str, killed))}")

    def _has_folder(self) -> bool:
        return self.folder.is_dir() and folder_id(self.folder) != self.replaced

    def say(self, text: str) -> None:
        """To the terminal, and to the run's log."""
        print(f"burnish: {printable(text)}", file=sys.stderr, flush=True)
        log = self.folder / "log.txt"
        if not self._has_folder() or not log.is_file():
            return
        # On a full disk the line above is all there is.
        with contextlib.suppress(OSError), open(log, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  supervisor: {text}\n")
