"""How a driver ended, read from its exit code and from what it left in the run directory; and whether another one would do better."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.run.durable_files import FolderId, folder_id
from burnish.run.journal import decode_record
from burnish.run.supervisor.liveness import HEARTBEAT_FILE, read_heartbeat

WORKER_LOST_STATUS = 75
"""Exit status of a driver whose worker was lost (sysexits.h: a temporary failure, try again)."""
HUNG_STATUS = 124
"""Of a run whose driver hung, as `timeout` reports it."""
FAILED_STATUS = 1
END_EVENTS = ("complete", "stopped")
"""Events with which a driver that ends well closes the journal."""
OUTCOME_FILE = "outcome.json"
"""What a stage that is no training run leaves when it is done (`stage_index.py`)."""
USER_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals by which people end a process on purpose."""
EXITED_EARLY = "exited with status 0 before the run was complete (does a plug-in call sys.exit() or os._exit()?)"
NUM_LOG_LINES = 5
"""Lines of the log that are shown again."""


@dataclass(frozen=True)
class DriverExit:
    """The end of a driver."""

    status: int
    """What the supervisor would exit with."""
    is_final: bool
    """Whether the run is over: done, stopped by its user, or refused."""
    cause: str
    where: str
    at: int | None
    """The step it was in; None before the first."""
    num_steps: int
    """Steps that it had finished."""
    last_lines: tuple[str, ...]

    @property
    def is_bug(self) -> bool:
        """Whether an error of the program ended it, rather than something from outside."""
        return self.status == FAILED_STATUS


class DriverRecord:
    """A driver's life as the run directory tells it, from now on."""

    def __init__(self, folder: Path, replaced: FolderId | None = None) -> None:
        self.folder, self.replaced = folder, replaced
        self.journal = folder / "journal" / "events.jsonl"
        self.begun = self.journal.stat().st_size if self.is_there and self.journal.exists() else 0

    @property
    def is_there(self) -> bool:
        """Whether the folder is this run's: until the run begins, an old one that it replaces may lie there."""
        return self.replaced is None or folder_id(self.folder) != self.replaced

    def death(self, pid: int, code: int, cause: str) -> DriverExit:
        """Of a driver with an exit code, negative for a signal's number.

        An exit code of 0 is believed only if the run says that it ended: a plug-in may call `sys.exit(0)` or `os._exit(0)`.
        """
        if code == 0 and not self.has_ended():
            code, cause = FAILED_STATUS, EXITED_EARLY
        status = code if code >= 0 else 128 - code
        is_final = code not in (FAILED_STATUS, WORKER_LOST_STATUS) if code >= 0 else -code in USER_SIGNALS
        return self._death(pid, status, is_final, cause)

    def has_ended(self) -> bool:
        """Whether the driver recorded that the run is complete or was stopped, or that its stage is done."""
        events = self._events()
        return (bool(events) and events[-1]["event"] in END_EVENTS) or (self.folder / OUTCOME_FILE).is_file()

    def hang(self, pid: int, cause: str, is_final: bool = False) -> DriverExit:
        """Of a driver that had to be killed."""
        return self._death(pid, HUNG_STATUS, is_final, cause)

    def _death(self, pid: int, status: int, is_final: bool, cause: str) -> DriverExit:
        events = self._events()
        placed = [event for event in events if event["event"] in ("step", "resumed")]
        beat = read_heartbeat(self.folder / HEARTBEAT_FILE, pid)
        return DriverExit(
            status=status,
            is_final=is_final,
            cause=cause,
            where="before it had begun" if beat is None else f"in {beat}",
            at=max(placed[-1]["step"], 0) + 1 if placed else None,
            num_steps=sum(event["event"] == "step" and event["step"] > 0 for event in events),
            last_lines=self._tail(),
        )

    def _events(self) -> list[dict[str, Any]]:
        """What the journal heard since this life began; a torn last line is not there yet."""
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

    def goes_on_from(self) -> str:
        """Where the next driver will begin."""
        saved = sorted((self.folder / "checkpoints").glob("step-*")) if self.is_there else []
        return f"from {saved[-1]}" if saved else "from the start, with what the journal has"


def describe_exit_code(code: int, for_memory: bool) -> str:
    """An exit code in words."""
    if code >= 0:
        return {FAILED_STATUS: "failed with an error", WORKER_LOST_STATUS: "lost a worker"}.get(
            code, f"exited with status {code}"
        )
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if -code == signal.SIGKILL:
        why = (
            "by the kernel, which was out of memory"
            if for_memory
            else "by somebody, or by the kernel for want of memory"
        )
        return f"was killed ({name}) {why}"
    return f"was killed by {name}"


def why_not_restart(death: DriverExit, previous: DriverExit | None, restarts: int, max_restarts: int) -> str | None:
    """Why a run is not taken up again after a death; None where it is."""
    if death.is_bug and death.num_steps == 0:
        return "the error came before a step was done, and would come again"
    if previous is not None and previous.at == death.at:
        return f"it died twice {'before its first step' if death.at is None else f'in step {death.at}'}"
    if restarts == max_restarts:
        return f"it was started again {restarts} times, which is --max-restarts"
    return None
