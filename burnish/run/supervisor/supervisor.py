"""The supervisor: a small parent process that starts the driver, watches it, and restarts it after a crash.

    status = supervise(folder, max_restarts=3, deadline_s=1800)
    if status is not None:
        return status          # in the supervisor: the run is over
    ...                        # in the driver: train

If a driver dies, the supervisor prints the cause and starts a new driver, which resumes from the journal and the last
checkpoint. A driver that hangs, or that is stopped by a signal and not continued, writes its stacks and is killed; then the
same happens. The supervisor does not restart after a `UserError`, after Ctrl-C, or when a run dies twice in the same step.

The driver is a fork of the supervisor. The supervisor loads neither torch nor numpy and starts no thread, so a fork is as
clean as a new process and costs nothing.
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
"""Signals with which users and batch systems end a run."""
WATCHED_SIGNALS = (*STOP_SIGNALS, signal.SIGCHLD)
POLL_S = 0.5
MAX_STOPPED_S = 30.0
"""Longest time that a driver may be stopped while its supervisor is not. (Ctrl-Z stops both.)"""
READ_PROGRESS_BYTES = 1 << 26
"""Reading this many more bytes from a disk also counts as progress."""
STACK_DUMP_S = 1.0
KILL_TIMEOUT_S = 60.0
"""Longest time that a process may take to end after SIGKILL. Inside the kernel (network disk, GPU driver) it may never end."""
SI_KERNEL = 0x80
SHOW_CURSOR = "\x1b[?25h"


def is_supported() -> bool:
    """Whether this system has what a supervisor needs. Linux does."""
    return hasattr(signal, "sigtimedwait") and sys.platform.startswith("linux")


def supervise(folder: Path, max_restarts: int, deadline_s: float, replaced: FolderId | None = None) -> int | None:
    """Return None in each driver; in the supervisor, return the exit status when the run is over.

    `folder` is the run directory. `deadline_s` is the longest time without a heartbeat (`liveness.py`). `replaced` is the id of
    an old run at `folder`. It stays there until the driver has checked the new run; nothing in it is read or written.
    """
    return Supervisor(folder, max_restarts, deadline_s, replaced).run()


def _try_write(path: Path, content: bytes) -> bool:
    """Write a file; return False if the system refuses, for example on a full disk."""
    try:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    except OSError:
        return False
    return True


class Supervisor:
    """Starts drivers one after another and watches them."""

    def __init__(self, folder: Path, max_restarts: int, deadline_s: float, replaced: FolderId | None = None) -> None:
        self.folder, self.max_restarts, self.deadline_s = folder, max_restarts, deadline_s
        self.replaced = replaced
        self.is_asked_to_stop = False
        self.driver = 0
        self.is_stopped = False
        """Whether the driver is stopped by a signal."""
        self.stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self.kills = out_of_memory_kills()

    def run(self) -> int | None:
        """See `supervise`."""
        adopt_orphans()
        # A parent may have left SIGCHLD ignored; then no child can be waited for.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED_SIGNALS)
        previous: DriverExit | None = None
        for restarts in range(self.max_restarts + 1):
            record = DriverRecord(self.folder, self.replaced)
            if not self._fork_driver(mask):
                return None
            ended = self._watch(record)
            if ended.is_final or self.is_asked_to_stop:
                if ended.status == HUNG_STATUS:
                    self._report_and_clean_up(ended)
                break
            self._report_and_clean_up(ended)
            while signal.sigtimedwait(STOP_SIGNALS, 0) is not None:  # signals that came while there was no driver
                self.is_asked_to_stop = True
            if self.is_asked_to_stop:
                break
            reason = why_not_restart(ended, previous, restarts, self.max_restarts)
            if reason is not None:
                self.say(f"the run stops here: {reason}; the same command goes on {record.resume_point()}")
                break
            self.say(f"going on {record.resume_point()} (restart {restarts + 1} of {self.max_restarts})")
            previous = ended
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return ended.status

    def _fork_driver(self, mask: set[int | signal.Signals]) -> bool:
        """Fork a driver. Returns False in the driver."""
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
        signal_on_parent_exit(supervisor, signal.SIGTERM)  # SIGTERM lets the driver finish its step
        faulthandler.enable(self.stacks)
        faulthandler.register(STACKS_SIGNAL, self.stacks)
        return False

    def _watch(self, record: DriverRecord) -> DriverExit:
        """Wait until the driver ends, or kill it when it hangs."""
        beat: HeartbeatRecord | None = None
        sign: tuple[HeartbeatRecord | None, int] = None, 0
        silent_s = stopped_s = 0.0
        looked = time.monotonic()
        while True:
            self._handle_signal(signal.sigtimedwait(WATCHED_SIGNALS, POLL_S))
            now = time.monotonic()
            # The cap excludes time in which the supervisor was stopped or the machine slept.
            passed, looked = min(now - looked, 2 * POLL_S), now
            status = self._reap()
            if status is not None:
                return self._driver_exit(record, status)
            beat = read_heartbeat(self.folder / HEARTBEAT_FILE, self.driver) or beat
            # Loading large weights may take long without a heartbeat, so bytes read from disk count as progress too.
            last, sign = sign, (beat, num_bytes_read(self.driver) // READ_PROGRESS_BYTES)
            silent_s = 0.0 if sign != last else silent_s + passed
            stopped_s = stopped_s + passed if self.is_stopped else 0.0
            if stopped_s > min(MAX_STOPPED_S, self.deadline_s):
                return self._kill_driver(record, f"was stopped by a signal and not continued for {stopped_s:.0f} s")
            if silent_s > self.deadline_s:
                return self._kill_driver(record, f"gave no sign of life for {silent_s:.0f} s (--deadline)")

    def _handle_signal(self, signalled: Any) -> None:
        """Forward a stop signal to the driver. A terminal's Ctrl-C reaches the driver by itself."""
        if signalled is None or signalled.si_signo not in STOP_SIGNALS:
            return
        self.is_asked_to_stop = True
        if signalled.si_code != SI_KERNEL:
            send_signal(self.driver, signal.Signals(signalled.si_signo))

    def _reap(self) -> int | None:
        """Reap ended children; return the driver's exit code if it ended (negative for a signal number)."""
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

    def _driver_exit(self, record: DriverRecord, code: int) -> DriverExit:
        kills = out_of_memory_kills()
        for_memory, self.kills = kills > self.kills, kills
        return record.exited(self.driver, code, describe_exit_code(code, for_memory))

    def _kill_driver(self, record: DriverRecord, why: str) -> DriverExit:
        """Let a hanging driver and its workers write their stacks, then kill them."""
        for worker in workers_that_dump_stacks(self.driver):
            send_signal(worker, STACKS_SIGNAL)
        send_signal(self.driver, STACKS_SIGNAL)
        send_signal(self.driver, signal.SIGCONT)  # a stopped process could not write its stacks
        time.sleep(STACK_DUMP_S)
        for pid in [self.driver, *descendants(self.driver)]:
            send_signal(pid, signal.SIGKILL)
        until = time.monotonic() + KILL_TIMEOUT_S
        while self._reap() is None:
            if time.monotonic() > until:  # it still holds the run's lock, so a new driver could not start
                return record.hung(self.driver, f"{why}, and does not end though it was killed", is_final=True)
            time.sleep(0.05)
        return record.hung(self.driver, why)

    def _report_and_clean_up(self, ended: DriverExit) -> None:
        """Print how the driver ended, save its stacks, and end the processes that it left."""
        if sys.stdout.isatty():
            print(SHOW_CURSOR, end="", flush=True)  # the live display hides it
        self.say(f"the driver (process {self.driver}) {ended.cause}, {ended.where}")
        self.stacks.seek(0)
        found = self.stacks.read()
        path = self.folder / "stacks" / f"driver-{self.driver}.txt"
        if found and self._has_folder() and _try_write(path, found):
            workers = self.folder / "workers" / "stacks"
            others = (
                f", what its workers were doing in {workers}"
                if ended.status == HUNG_STATUS and workers.is_dir()
                else ""
            )
            self.say(f"what it was doing is in {path}{others}")
        elif found:
            self.say(f"what it was doing:\n{found.decode(errors='replace')}")
        for line in ended.last_lines:
            print(f"  {printable(line)}", file=sys.stderr, flush=True)
        if killed := kill_orphans():
            self.say(f"what it had started did not end by itself and was killed: process {', '.join(map(str, killed))}")

    def _has_folder(self) -> bool:
        return self.folder.is_dir() and folder_id(self.folder) != self.replaced

    def say(self, text: str) -> None:
        """Print a line to stderr and to the run's log."""
        print(f"burnish: {printable(text)}", file=sys.stderr, flush=True)
        log = self.folder / "log.txt"
        if not self._has_folder() or not log.is_file():
            return
        # On a full disk, the log misses the line; stderr has it.
        with contextlib.suppress(OSError), open(log, "a", encoding="utf-8", errors="replace") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  supervisor: {text}\n")
