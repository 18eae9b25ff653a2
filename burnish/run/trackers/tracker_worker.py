"""The process of one tracker: `python -m burnish.run.trackers.tracker_worker COMMANDS_FD REPLIES_FD`, started by `tracker_process.py`.

Commands and replies are lines of JSON. The package's own output goes to stdout and stderr, which are the tracker's log file. If the run is
killed, the commands end, and the tracker is closed as failed, so that nothing that has arrived is lost.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from burnish.run.durable_files import atomic_write
from burnish.run.trackers.backends import Backend, TrackedRun

MAX_FAILURES = 5
"""Failures in a row after which a tracker is given up."""
GIVEN_UP = 1
NICENESS = 10
LOG_HEADER = "----- the tracker starts -----"


class Worker:
    """Passes the commands of a run to a tracker and reports what became of them."""

    def __init__(self, replies: IO[str]) -> None:
        self.replies = replies
        self.failures_in_row = 0
        self.state: dict[str, Any] = {}
        self.state_file = Path()
        self.backend: Backend | None = None

    def run(self, commands: IO[str]) -> int:
        """Serve until the run says that it is finished, or is gone. Returns the exit status."""
        print(LOG_HEADER, flush=True)
        is_failed = True
        for line in commands:
            command = json.loads(line)
            if command["op"] == "finish":
                is_failed = command["is_failed"]
                break
            is_done = self._try(self._do, command)
            if not is_done and (self.backend is None or self.failures_in_row >= MAX_FAILURES):
                failures = "1 failure" if self.failures_in_row == 1 else f"{self.failures_in_row} failures in a row"
                self._reply("note", text=f"given up after {failures}")
                return GIVEN_UP
        if self.backend is not None and self._try(self.backend.close, is_failed):
            self._reply("done")
        return 0

    def _do(self, command: dict[str, Any]) -> None:
        if command["op"] == "begin":
            self._begin(command)
            return
        assert self.backend is not None, "`begin` comes first"
        if command["op"] == "report":
            self.backend.report(Path(command["path"]))
            return
        step = command["step"]
        is_sent = self.backend.skips_sent_steps and step <= self.backend.run.last_step
        if command["op"] == "samples":
            if not is_sent and self.backend.sample_rows:
                self.backend.table(step, command["kind"], Path(command["path"]))
            return
        if not is_sent:
            self.backend.log(step, command["values"])
        self.state["last_step"] = step
        self._save_state()
        self._reply("sent", step=step)

    def _begin(self, command: dict[str, Any]) -> None:
        self.state_file = Path(command["state"])
        if self.state_file.is_file():
            self.state = json.loads(self.state_file.read_text())
        module, _, name = command["backend"].partition(":")
        backend: Callable[[TrackedRun, dict[str, Any]], Backend] = getattr(importlib.import_module(module), name)
        run = TrackedRun(
            Path(command["run"]),
            command["config"],
            self.state.setdefault("id", ""),
            self.state.get("last_step", -1),
            lambda text: self._reply("note", text=text),
        )
        self.backend = backend(run, command["options"])
        self.state["id"] = run.id
        self._save_state()
        self._reply("where", text=self.backend.where)

    def _save_state(self) -> None:
        atomic_write(self.state_file, json.dumps(self.state) + "\n")

    def _try(self, call: Callable[..., None], *arguments: Any) -> bool:
        """Call, and report an exception. Third-party code and networks may raise anything."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 -- reported, and the run goes on
            traceback.print_exc()
            sys.stderr.flush()
            self.failures_in_row += 1
            self._reply("failed", text=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            return False
        self.failures_in_row = 0
        return True

    def _reply(self, kind: str, **fields: Any) -> None:
        try:
            self.replies.write(json.dumps({"kind": kind, **fields}) + "\n")
            self.replies.flush()
        except BrokenPipeError:  # the run is gone; the tracker still gets what has arrived
            pass


def main() -> int:
    """Run with the descriptors of the command line. The run has the first claim on the cores of the machine."""
    os.nice(NICENESS)
    with (
        open(int(sys.argv[1]), encoding="utf-8") as commands,
        open(int(sys.argv[2]), "w", encoding="utf-8") as replies,
    ):
        return Worker(replies).run(commands)


if __name__ == "__main__":
    sys.exit(main())
