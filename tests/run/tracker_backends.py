"""Trackers that record what they are told, fail, hang or die, for the tests of what a run does with them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from burnish.run.trackers.backends import Backend, TrackedRun


class Recorder(Backend):
    """Writes every call as a line of JSON."""

    skips_sent_steps = True

    def __init__(self, run: TrackedRun, options: dict[str, Any]) -> None:
        super().__init__(run, options)
        self.where = "recorded.jsonl"
        self._write("begin", run.make_id(), run.config)

    def _write(self, *words: Any) -> None:
        with open(self.run.path / "recorded.jsonl", "a") as file:
            file.write(json.dumps(words) + "\n")

    def log(self, step: int, values: dict[str, Any]) -> None:
        self._write("log", step, values)

    def table(self, step: int, kind: str, path: Path) -> None:
        self._write("table", step, kind, self.rows(path))

    def report(self, path: Path) -> None:
        self._write("report", path.name)

    def close(self, is_failed: bool) -> None:
        self._write("close", is_failed)


class Fails(Recorder):
    """Fails in steps 2 and 4, and from step 10 on."""

    def log(self, step: int, values: dict[str, Any]) -> None:
        if step in (2, 4) or step >= 10:
            raise ConnectionError(f"no route in step {step}")
        super().log(step, values)


class NeverBegins(Recorder):
    def __init__(self, run: TrackedRun, options: dict[str, Any]) -> None:
        raise PermissionError("no such account")


class Hangs(Recorder):
    def log(self, step: int, values: dict[str, Any]) -> None:
        threading.Event().wait()


class Dies(Recorder):
    def log(self, step: int, values: dict[str, Any]) -> None:
        os._exit(7)
