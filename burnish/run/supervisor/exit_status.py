"""How a driver ended, from its exit code and the run directory, and whether it should be restarted."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.run.durable_files import FolderId, folder_id
from burnish.run.journal import decode_record
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, read_heartbeat

WORKER_LOST_STATUS = 75
"""Exit status of a driver that lost a worker (sysexits.h: a temporary failure, try again)."""
HUNG_STATUS = 124
"""Exit status of a run whose driver hung. The command `timeout` uses the same."""
FAILED_STATUS = 1
END_EVENTS = ("complete", "stopped")
"""The last journal event of a driver that ended as intended."""
OUTCOME_FILE = "outcome.json"
"""File that a finished stage leaves if it is not a training run (`stage_index.py`)."""
USER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals with which users end a process on purpose."""
EXITED_EARLY = "exited with status 0 before the run was complete (does a plug-in call sys.exit() or os._exit()?)"
NUM_LOG_LINES = 5
"""Lines at the end of the log that are printed again."""


@dataclass(frozen=True)
class DriverExit:
    """How a driver ended."""

    status: int
    """The status that the supervisor would exit with."""
    is_final: bool
    """Whether the run is over: complete, stopped by its user, or refused."""
    cause: str
    where: str
    at: int | None
    """The step in which it ended; None before the first."""
    num_steps: int
    """Number of steps that it finished."""
    last_lines: tuple[str, ...]

    @property
    def is_bug(self) -> bool:
        """Whether an error in the program ended it, rather than an outside cause."""
        return self.status == FAILED_STATUS


class DriverRecord:
    """What the run directory records of one driver, from the moment this object is created."""

    def __init__(self, folder: Path, replaced: FolderId | None = None) -> None:
        self.folder, self.replaced = folder, replaced
        self.journal = folder / "journal" / "events.jsonl"
        self.begun = self.journal.stat().st_size if self.is_there and self.journal.exists() else 0

    @property
    def is_there(self) -> bool:
        """Whether the folder belongs to this run. Until the run begins, an old run that it replaces may be there."""
        return self.replaced is None or folder_id(self.folder) != self.replaced

    def exited(self, pid: int, code: int, cause: str) -> DriverExit:
        """Return the exit of a driver that ended with a code; a negative code is a signal number.

        A code of 0 counts only if the run recorded its end, because a plug-in may call `sys.exit(0)` or `os._exit(0)`.
        """
        if code == 0 and not self.has_ended():
            code, cause = FAILED_STATUS, EXITED_EARLY
        status = code if code >= 0 else 128 - code
        is_final = code not in (FAILED_STATUS, WORKER_LOST_STATUS) if code >= 0 else -code in USER_SIGNALS
        return self._exit(pid, status, is_final, cause)

    def has_ended(self) -> bool:
        """Whether the driver recorded that the run is complete or stopped, or that its stage is done."""
        events = self._events()
        return (bool(events) and events[-1]["event"] in END_EVENTS) or (self.folder / OUTCOME_FILE).is_file()

    def hung(self, pid: int, cause: str, is_final: bool = False) -> DriverExit:
        """Return the exit of a driver that hung and was killed."""
        return self._exit(pid, HUNG_STATUS, is_final, cause)

    def _exit(self, pid: int, status: int, is_final: bool, cause: str) -> DriverExit:
        events = self._events()
        step_events = [event for event in events if event["event"] in ("step", "resumed")]
        beat = read_heartbeat(self.folder / HEARTBEAT_FILE, pid)
        return DriverExit(
            status=status,
            is_final=is_final,
            cause=cause,
            where="before it had begun" if beat is None else f"in {beat}",
            at=max(step_events[-1]["step"], 0) + 1 if step_events else None,
            num_steps=sum(event["event"] == "step" and event["step"] > 0 for event in events),
            last_lines=self._tail(),
        )

    def _events(self) -> list[dict[str, Any]]:
        """Return the journal's records since this driver started. A torn last line is skipped."""
        if not self.is_there or not self.journal.exists():
            return []
        with open(self.journal, "rb") as file:
            file.seek(self.begun)
            return [record for line in file if (record := decode_record(line)) is not None]

    def _tail(self) -> tuple[str, ...]:
        log = self.folder / "log.txt"
        if not self.is_there or not log.is_file():
            return ()
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 4096))
            return tuple(file.read().decode(errors="replace").splitlines()[-NUM_LOG_LINES:])

    def resume_point(self) -> str:
        """Describe where the next driver will resume."""
        saved = sorted((self.folder / "checkpoints").glob("step-*")) if self.is_there else []
        return f"from {saved[-1]}" if saved else "from the start, with what the journal has"


def describe_exit_code(code: int, for_memory: bool) -> str:
    """Describe an exit code in words."""
    if code >= 0:
        return {FAILED_STATUS: "failed with an error", WORKER_LOST_STATUS: "lost a worker"}.get(
            code, f"exited with status {code}"
        )
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if -code == signal.SIGKILL:
        why = (
            "by the kernel, which was out of memory"
            if for_memory
            else "by a user or another program, or by the kernel for lack of memory"
        )
        return f"was killed ({name}) {why}"
    return f"was killed by {name}"


def why_not_restart(ended: DriverExit, previous: DriverExit | None, restarts: int, max_restarts: int) -> str | None:
    """Return why a run is not restarted after its driver ended; None if it is."""
    if ended.is_bug and ended.num_steps == 0:
        return "the error came before a step was done, and would come again"
    if previous is not None and previous.at == ended.at:
        return f"it died twice {'before its first step' if ended.at is None else f'in step {ended.at}'}"
    if restarts == max_restarts:
        return f"it was restarted {restarts} times, which is --max-restarts"
    return None
