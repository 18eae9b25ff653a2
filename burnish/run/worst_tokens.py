"""samples/worst_tokens.jsonl: the tokens of each step on which sampler and trainer disagree most, one JSON line a token.

A line has all of `COLUMNS`, in their order; what does not exist is null. It is written in every step, so it costs a
fraction of a millisecond: a step is appended at once and not waited for until it is on the disk. A kill does not
harm it; what a loss of power may take away are steps after the last checkpoint, which are made again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.run.files import append, atomic_write, fsync_path

COLUMNS = (
    "step",
    "group",
    "sample",
    "position",
    "token",
    "before",
    "text",
    "after",
    "behaviour_logp",
    "trainer_logp",
    "gap",
    "weight",
)


def read(path: Path) -> list[dict[str, Any]]:
    """All rows in order; none where the file does not exist. A last line without its newline is still being written."""
    return [row for _, row in _lines(path)] if path.exists() else []


class WorstTokens:
    """The writer of one worst_tokens.jsonl."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Write the rows of one step; a step without any leaves no line."""
        if not rows:
            return
        lines = "".join(_line({"step": step, **row}) for row in rows)
        try:
            append(self.path, lines.encode("utf-8", "replace"))  # a lone surrogate must not stop a run
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps and a torn last line: the run goes on after `step`."""
        if self.path.exists():
            atomic_write(self.path, "".join(line + "\n" for line, row in _lines(self.path) if row["step"] <= step))

    def sync(self) -> None:
        """Force what was written to disk."""
        if self.path.exists():
            fsync_path(self.path)
            fsync_path(self.path.parent)


def _line(row: dict[str, Any]) -> str:
    return json.dumps({name: row[name] for name in COLUMNS}, ensure_ascii=False, allow_nan=False) + "\n"


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    *lines, _ = path.read_text(errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if not isinstance(row, dict) or (missing := [name for name in COLUMNS if name not in row]):
                raise ValueError(f"no {missing[0]!r}" if isinstance(row, dict) else "not an object")
        except ValueError as error:
            raise UserError(
                f"{path}, line {number}: not a row of worst tokens ({error}); delete the file if it is of no use"
            ) from error
        yield line, row
