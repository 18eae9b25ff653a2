"""metrics.jsonl: one line a step, the numbers a run is judged by.

A float is written so that it reads back bit for bit. NaN and infinities, which JSON does not have, are the strings
"nan", "inf" and "-inf" and read back as floats. Names that start with one of `MEASURED` are the only ones that differ
between two runs of one config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.run.files import append_durably, atomic_write, truncate

Value = float | int | str
MEASURED = ("time/", "performance/", "memory/", "controller/")
"""Of the machine, not of the computation."""
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


FIGURES = {"accuracy": "held-out accuracy", "reward_mean": "held-out reward"}
"""What a validation is summed up by, the first that was measured, with what people are told it is."""


def held_out_figures(names: Iterable[str]) -> dict[str, str]:
    """The figure of each validation mode among the names of metrics: `{"greedy": "accuracy"}`, or `reward_mean` where rewards are graded."""
    found: dict[str, set[str]] = {}
    for name in names:
        if match := re.fullmatch(r"validation/([^/]+)/([^/]+)", name):
            found.setdefault(match[1], set()).add(match[2])
    return {mode: next(f for f in FIGURES if f in there) for mode, there in found.items() if there & FIGURES.keys()}


def format_line(step: int, values: dict[str, Value]) -> str:
    """The line of one step, without the newline: `step` first, then the names in order."""
    if "step" in values:
        raise ValueError("'step' is the line's own key and cannot name a metric")
    return json.dumps({"step": step} | {name: _plain(values[name]) for name in sorted(values)}, allow_nan=False)


def parse_line(line: str) -> dict[str, Any]:
    """The values of one line; raises ValueError where it is not one."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not an object with a whole number 'step'")
    return {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines in order; none where the file does not exist yet. A last line without its newline is still being written."""
    return [row for _, row in _lines(path)] if path.exists() else []


class Metrics:
    """The writer of one metrics.jsonl; opening it cuts a last line that a kill tore."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                truncate(path, whole)

    def append(self, step: int, values: dict[str, Value]) -> None:
        """Write one step's line; it is on disk when this returns."""
        line = format_line(step, values) + "\n"
        try:
            append_durably(self.path, line.encode())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error

    def truncate_after(self, step: int) -> list[str]:
        """Drop the lines of later steps and a torn last line, all at once: the run goes on after `step`.

        Returns what to tell the user: lines that cannot be read (the file with them is kept under another name) and steps without one.
        """
        kept, damaged = list[tuple[str, int]](), list[int]()
        for number, line in enumerate(_whole_lines(self.path), 1) if self.path.exists() else ():
            try:
                found = parse_line(line)["step"]
                kept += [(line, found)] if found <= step else []
            except ValueError:
                damaged.append(number)
        remarks = []
        if damaged:
            damaged_copy = self.path.with_name(f"{self.path.stem}.damaged{self.path.suffix}")
            atomic_write(damaged_copy, self.path.read_bytes())
            remarks.append(
                f"{self.path}: {_listed('line', damaged)} cannot be read and left out; the file as it was is {damaged_copy}"
            )
        if self.path.exists():
            atomic_write(self.path, "".join(line + "\n" for line, _ in kept))
        if missing := sorted(set(range(1, step + 1)) - {found for _, found in kept}):
            remarks.append(
                f"{self.path} has no line of {_listed('step', missing)}: it was cut, deleted or damaged. The weights do not depend on it; restore "
                "the file from a copy to have whole curves"
            )
        return remarks


def _listed(what: str, numbers: list[int]) -> str:
    """`step 3`, or `steps 3 to 7 (4 in all)`."""
    if len(numbers) == 1:
        return f"{what} {numbers[0]}"
    return f"{what}s {numbers[0]} to {numbers[-1]} ({len(numbers)} in all)"


def _whole_lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").split("\n")[:-1]


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            yield line, parse_line(line)
        except ValueError as error:
            raise UserError(
                f'{path}, line {number}: not a line of metrics ({error}); expected JSON like {{"step": 3, "reward/mean": 0.5}}'
            ) from error


def _plain(value: Value) -> Value:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value
