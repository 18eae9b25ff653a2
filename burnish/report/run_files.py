"""Readers that follow the files of a run while it trains. Each call reads only what was added since the last one.

A resumed run replaces metrics.jsonl and worst_tokens.jsonl by shorter files. A reader then begins anew and counts one more
generation, so that a page which holds the older lines knows that it must drop them.
"""

from __future__ import annotations

import json
import math
import os
import re
from array import array
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.run.samples import WORST_TOKEN_COLUMNS

CHECKED_BYTES = 128
"""Bytes before the place where reading continues. If they changed, the file is another one."""
MAX_NOTES = 200
MAX_HEALTH_LINES = 20
MAX_LINE_CHARS = 4_000
STEP_LINE = re.compile(r"\S+ \S+  step \d+/\d+  ")


class LineTail:
    """The complete lines that were added to a text file since the last call. A file that does not exist has none."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        """How often the file was replaced by another one."""
        self._file_id: tuple[int, int] | None = None
        self._offset = 0
        self._end = b""  # the last bytes that were read

    def read(self) -> tuple[bool, list[str]]:
        """Return whether the file began anew since the last call, and the new lines without their newlines."""
        try:
            with open(self.path, "rb") as file:
                return self._read(file)
        except FileNotFoundError:
            was_there = self._file_id is not None
            self.generation += was_there
            self._begin(None)
            return was_there, []

    def _read(self, file: Any) -> tuple[bool, list[str]]:
        stat = os.fstat(file.fileno())
        file_id = stat.st_dev, stat.st_ino
        file.seek(self._offset - len(self._end))
        is_other = self._file_id is not None and (file_id != self._file_id or file.read(len(self._end)) != self._end)
        if is_other or self._file_id is None:
            if is_other:
                self.generation += 1
            self._begin(file_id)
        file.seek(self._offset)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._end = (self._end + whole)[-CHECKED_BYTES:]
        return is_other, whole.decode("utf-8", "replace").split("\n")[:-1]

    def _begin(self, file_id: tuple[int, int] | None) -> None:
        self._file_id, self._offset, self._end = file_id, 0, b""


@dataclass
class Series:
    """The finite values of one metric. Steps rise."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        self.steps.append(step)
        self.values.append(value)

    def points(self) -> list[tuple[int, float]]:
        """Return all (step, value)."""
        return list(zip(self.steps, self.values, strict=True))


class MetricsTail:
    """The metrics of a run as one `Series` each, in the order in which their names first appear."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)
        self.series: dict[str, Series] = {}
        self.num_rows = 0
        self._row_steps = array("q")  # the step of each line; of a damaged one, that of the line before
        self.last_row: dict[str, Any] = {}
        self.damaged: list[int] = []
        """Numbers of the lines that cannot be read, counted from 1."""

    @property
    def generation(self) -> int:
        return self._lines.generation

    def update(self) -> None:
        """Read the new lines."""
        is_new, lines = self._lines.read()
        if is_new:
            self.series, self.num_rows, self.last_row, self.damaged = {}, 0, {}, []
            self._row_steps = array("q")
        for line in lines:
            self.num_rows += 1
            try:
                row = json.loads(line)
                step = row["step"]
                self._row_steps.append(step)
            except (ValueError, LookupError, TypeError):
                self.damaged.append(self.num_rows)
                self._row_steps.append(self._row_steps[-1] if self._row_steps else -1)
                continue
            self.last_row = row
            self._add_row(step, row)

    def _add_row(self, step: int, row: dict[str, Any]) -> None:
        """Add the values of a line. A long run has millions, so that this loop is kept short."""
        series, is_finite = self.series, math.isfinite
        for name, value in row.items():
            # NaN and infinities are text in the file.
            if (value.__class__ is float or value.__class__ is int) and name != "step" and is_finite(value):
                if (line := series.get(name)) is None:
                    line = series[name] = Series()
                line.steps.append(step)
                line.values.append(value)

    def step_of_row(self, row: int) -> int:
        """Return the step of a line, or a later step than all if the line is not there yet."""
        return self._row_steps[row] if row < self.num_rows else 2**62


class LogTail:
    """What log.txt says besides its lines of steps: the lines of the health check, and the last notes."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)
        self.health: deque[str] = deque(maxlen=MAX_HEALTH_LINES)
        self.num_health = 0
        self.notes: deque[str] = deque(maxlen=MAX_NOTES)
        self.num_notes = 0

    def update(self) -> None:
        """Read the new lines."""
        is_new, lines = self._lines.read()
        if is_new:
            self.health.clear()
            self.notes.clear()
            self.num_health = self.num_notes = 0
        for line in lines:
            if STEP_LINE.match(line):
                continue
            self.notes.append(line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + " [...]")
            self.num_notes += 1
            if "; likely cause: " in line and "; try: " in line:
                self.health.append(line)
                self.num_health += 1

    def health_items(self) -> list[dict[str, str]]:
        """Return the last lines of the health check, each as its cause, what was seen and when, and what to try."""
        items = []
        for line in self.health:
            seen, _, rest = line.partition("; likely cause: ")
            cause, _, remedy = rest.partition("; try: ")
            texts = {"cause": cause, "seen": re.sub(r"^\S+ \S+  ", "", seen), "remedy": remedy}
            items.append({name: text[:MAX_LINE_CHARS] for name, text in texts.items()})
        return items


class WorstTokensTail:
    """Of worst_tokens.jsonl, the tokens of the first step, of the step with the largest gap, and of the last step."""

    def __init__(self, path: Path) -> None:
        self._lines = LineTail(path)
        self._begin()

    def _begin(self) -> None:
        self._first: list[dict[str, Any]] = []
        self._worst: list[dict[str, Any]] = []
        self._last: list[dict[str, Any]] = []

    def update(self) -> None:
        """Read the new lines. A line that cannot be read is left out."""
        is_new, lines = self._lines.read()
        if is_new:
            self._begin()
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and all(name in row for name in WORST_TOKEN_COLUMNS):
                self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        if not self._last or self._last[0]["step"] != row["step"]:
            self._last = []
        self._last.append(row)
        if not self._first or self._first[0]["step"] == row["step"]:
            self._first = self._last
        if not self._worst or largest_gap(self._last) > largest_gap(self._worst):
            self._worst = self._last

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of the chosen steps, in order."""
        steps = {rows[0]["step"]: rows for rows in (self._first, self._worst, self._last) if rows}
        return [row for _, rows in sorted(steps.items()) for row in rows]


def largest_gap(rows: list[dict[str, Any]]) -> float:
    """Return the largest |gap| of some tokens."""
    return max(abs(row["gap"]) for row in rows)
