"""What an evaluation has so far, so that a kill at any moment loses seconds and no completion is there twice.

`<name>.partial.jsonl`: the first line holds the settings, each further one a scored completion. Lines are only appended;
one cut short by a kill is cut off when the same command goes on. Other settings are refused with the names of those that
differ, since completions drawn in two ways are no measurement. When all completions are there the result and the ordered
file are written and the journal goes.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from burnish.config.errors import UserError
from burnish.evaluation.completions import encode
from burnish.evaluation.result import Row
from burnish.run.files import append

SYNC_S = 1.0  # seconds of completions that a loss of power may cost; a kill costs those being scored
MAX_SHOWN = 8


class Journal:
    """The open journal of one evaluation: `rows` are those it already has; `add` appends."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.rows = path, list[Row]()
        self._synced = time.monotonic()
        self._lock: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin(self._lock, settings)
        except BlockingIOError:
            self.close()
            raise UserError(f"{path} is being written by another burnish eval; wait for it, or give --out") from None
        except BaseException:
            self.close()
            raise

    def add(self, rows: list[Row]) -> None:
        """Keep completions; forced to disk about every second."""
        is_due = time.monotonic() - self._synced > SYNC_S
        append(self.path, b"".join(map(encode, rows)), durable=is_due)
        self._synced = time.monotonic() if is_due else self._synced
        self.rows += rows

    def close(self, remove: bool = False) -> None:
        """Let it go; `remove` when everything in it has been written elsewhere. Safe to call twice."""
        if self._lock is None:
            return
        if remove:
            self.path.unlink()
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(remove=not self.rows)

    def _begin(self, lock: int, settings: dict[str, Any]) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:  # new, or killed before its first line was out
            os.ftruncate(lock, 0)
            append(self.path, json.dumps({"settings": settings}).encode() + b"\n", durable=True)
            return
        try:
            first, *rows = [json.loads(line) for line in whole.splitlines()]
            refuse_other(first["settings"], settings, self.path)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is no journal of an evaluation ({error}); move it away") from error
        os.ftruncate(lock, len(whole))
        self.rows = rows


def refuse_other(then: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raise when the completions in a file were made with other settings, naming those that differ."""
    names = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    if names:
        shown = [f"  {name}: {then.get(name)!r} there, {now.get(name)!r} now" for name in names[:MAX_SHOWN]]
        more = [f"  and {len(names) - MAX_SHOWN} more"] if len(names) > MAX_SHOWN else []
        raise UserError(
            "\n".join([f"{path} holds completions made with other settings:", *shown, *more])
            + "\nrepeat those settings to go on, give --force to start over, or --out for another place"
        )
