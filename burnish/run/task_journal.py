"""tasks.jsonl: the tasks that a run made itself, one checksummed JSON line each, on disk before a later step uses them.

A line is a record as in the journal (`burnish.run.journal`): a running index `i`, an `event`, and a CRC-32. The events are `task`, with the
step that made it, the id of the sample that proposed it and the task, and `resumed`: the run went back to a checkpoint, and earlier tasks of
later steps are void, because those steps are repeated. Nothing is erased but a last line that a kill tore.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from burnish.config.errors import UserError
from burnish.run.durable_files import START_OVER_HINT, append_durably, truncate
from burnish.run.journal import decode_record, encode_record


class MadeTask(NamedTuple):
    """A task that a run made."""

    step: int
    id: str
    """Id of the sample that proposed it."""
    task: dict[str, Any]


class TaskJournal:
    """The writer of one tasks.jsonl. `tasks` holds those that are valid, in the order in which they were made."""

    def __init__(self, path: Path, step: int) -> None:
        """Open the file of a run that goes on after `step`. Tasks of later steps become void."""
        self.path = path
        self.tasks: list[MadeTask] = []
        self._num_records = 0
        if path.exists():
            self._replay()
        if any(made.step > step for made in self.tasks):
            self._write([("resumed", {"step": step})])
            self._forget_after(step)

    def append(self, step: int, tasks: Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Append the tasks of a step, as (id, task), with one sync. They are on disk when this returns."""
        new = [MadeTask(step, id, task) for id, task in tasks]
        known = {made.id for made in self.tasks}
        if twice := [made.id for made in new if made.id in known]:
            raise ValueError(f"{self.path}: the task of sample {twice[0]} is there already")
        if new:
            self._write([("task", made._asdict()) for made in new])
            self.tasks += new

    def _write(self, events: list[tuple[str, dict[str, Any]]]) -> None:
        lines = [
            encode_record({"i": self._num_records + k, "event": event, **fields})
            for k, (event, fields) in enumerate(events)
        ]
        try:
            append_durably(self.path, "".join(line + "\n" for line in lines).encode())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error
        self._num_records += len(lines)

    def _forget_after(self, step: int) -> None:
        self.tasks = [made for made in self.tasks if made.step <= step]

    def _replay(self) -> None:
        """Read the intact records and remove a torn end. A damaged record before intact ones is a `UserError`."""
        length, num_bad, num_after = 0, 0, 0
        with open(self.path, "rb") as file:
            for line in file:
                record = decode_record(line) if line.endswith(b"\n") else None
                if num_bad == 0 and record is not None and record.get("i") == self._num_records:
                    if record["event"] == "resumed":
                        self._forget_after(record["step"])
                    else:
                        self.tasks.append(MadeTask(record["step"], record["id"], record["task"]))
                    self._num_records += 1
                    length += len(line)
                else:
                    num_bad += 1
                    num_after += record is not None
        if num_after:
            raise UserError(
                f"{self.path}, line {self._num_records + 1}: the record is damaged or missing, and {num_after} intact ones follow it, so this "
                f"is not a torn last write; restore the file from a copy, {START_OVER_HINT}"
            )
        if num_bad:
            truncate(self.path, length)
