"""metrics.jsonl, with one line of metrics per step. Trackers (`burnish.run.trackers`) get the same metrics.

A float is written so that it reads back bit for bit. NaN and infinities, which JSON lacks, are the strings "nan", "inf"
and "-inf" and read back as floats. Only metrics with a prefix in `MACHINE_PREFIXES` differ between two runs of one config.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.run.durable_files import append_durably, atomic_write, truncate

MetricValue = float | int | str
MACHINE_PREFIXES = ("time/", "performance/", "memory/", "controller/")
"""Prefixes of metrics that describe the machine, not the computation."""
NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
HELD_OUT_FIGURES = {"accuracy": "held-out accuracy", "reward_mean": "held-out reward"}
"""Metrics that summarise a validation, by priority, with the words for them. The first one that was measured is used."""


def held_out_figures(names: Iterable[str]) -> dict[str, str]:
    """Return the summary metric of each validation mode: `{"greedy": "accuracy"}`, or `reward_mean` if rewards are graded."""
    found: dict[str, set[str]] = {}
    for name in names:
        if match := re.fullmatch(r"validation/([^/]+)/([^/]+)", name):
            found.setdefault(match[1], set()).add(match[2])
    return {
        mode: next(f for f in HELD_OUT_FIGURES if f in there)
        for mode, there in found.items()
        if there & HELD_OUT_FIGURES.keys()
    }


def format_line(step: int, values: dict[str, MetricValue]) -> str:
    """Return the line of one step without its newline: `step` first, then the sorted names."""
    if "step" in values:
        raise ValueError("'step' is a reserved key and cannot name a metric")
    return json.dumps({"step": step} | {name: _json_value(values[name]) for name in sorted(values)}, allow_nan=False)


def parse_line(line: str) -> dict[str, Any]:
    """Parse one line. Raises ValueError if it is damaged."""
    row = json.loads(line)
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise ValueError("not an object with a whole number 'step'")
    return {name: NON_FINITE.get(value, value) if isinstance(value, str) else value for name, value in row.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines in order; [] if there is no file. A last line without its newline is still being written."""
    return [row for _, row in _parsed_lines(path)] if path.exists() else []


class MetricsFile:
    """The writer of one metrics.jsonl. Opening the file removes a last line that a kill tore."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                truncate(path, whole)

    def append(self, step: int, values: dict[str, MetricValue]) -> None:
        """Append one step's line. It is on disk when this returns."""
        line = format_line(step, values) + "\n"
        try:
            append_durably(self.path, line.encode())
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error

    def truncate_after(self, step: int) -> list[str]:
        """Atomically drop the lines of later steps and a torn last line, because the run resumes after `step`.

        Returns notes for the user: damaged lines (the damaged file is kept under another name) and steps without a line.
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
                f"{self.path}: skipped {_listed('line', damaged)}, which cannot be read; the original file is kept as {damaged_copy}"
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


def _parsed_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_whole_lines(path), 1):
        try:
            yield line, parse_line(line)
        except ValueError as error:
            raise UserError(
                f'{path}, line {number}: not a line of metrics ({error}); expected JSON like {{"step": 3, "reward/mean": 0.5}}'
            ) from error


def _json_value(value: MetricValue) -> MetricValue:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    return value
