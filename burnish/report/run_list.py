"""The runs and measurements that a page shows: those that were named, and those below named folders. Both may be added meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, did_you_mean
from burnish.report.page_data import RunData
from burnish.report.scaling_files import JSON_NAME, find_scalings

MAX_DEPTH = 3
"""Folders between a named folder and its runs: those of a user, of a group of runs, of the stages of a run."""


MAX_READ_AHEAD = 8
"""Runs whose metrics are read before the page asks for them."""


class RunList:
    """The runs of some paths, and the measurements of test-time scaling, each by an id that stays the same."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._runs: dict[str, RunData] = {}
        self._ids: dict[Path, str] = {}
        self._scalings: dict[str, Path] = {}
        self._lock = threading.Lock()
        for path in paths:
            check_path(path)
        self.update()
        if not (self._runs or self._scalings):
            raise UserError(
                f"no run in {', '.join(map(str, paths))}: a run is a folder with a config.yaml, as burnish train writes it. No measurement "
                f"either: burnish eval --scaling writes {JSON_NAME} into its folder once the samples of its pool are scored"
            )

    def update(self) -> None:
        """Look for new runs. A run whose folder is gone leaves the list."""
        with self._lock:
            found = {path.resolve(): base for base in self.paths for path in find_runs(base)}
            for path, base in found.items():
                if path not in self._ids:
                    self._ids[path] = _new_id(path, base, self._runs)
                    self._runs[self._ids[path]] = RunData(self._ids[path], path)
            for path in [path for path in self._ids if path not in found]:
                del self._runs[self._ids.pop(path)]
            self._update_scalings()

    def _update_scalings(self) -> None:
        found = {path.resolve(): base for base in self.paths for path in find_scalings(base, MAX_DEPTH)}
        self._scalings = {name: path for name, path in self._scalings.items() if path in found}
        known = set(self._scalings.values())
        for path, base in found.items():
            if path not in known:
                self._scalings[_new_id(path, base, self._scalings)] = path

    def get(self, run_id: str) -> RunData | None:
        """Return a run by its id."""
        return self._runs.get(run_id)

    def read_ahead(self, is_over: threading.Event) -> None:
        """Read the metrics of the runs, the newest first, and the samples of the newest, so that the page finds them read."""
        newest = sorted(self._runs.values(), key=lambda run: run.last_change(), reverse=True)
        for run in newest[:MAX_READ_AHEAD]:
            if not is_over.is_set():
                run.metrics("main")
        for run in newest[:1]:
            while not is_over.is_set() and run.samples()["waiting"]:
                pass

    def summaries(self) -> dict[str, Any]:
        """Return the line of each run, by id."""
        self.update()
        runs = sorted(self._runs.items())  # a copy: another request may remove a run meanwhile
        return {"runs": [run.summary() for _, run in runs], "scalings": sorted(self._scalings)}

    def scaling(self, scaling_id: str) -> Path | None:
        """Return the folder of a measurement by its id."""
        return self._scalings.get(scaling_id)


def _new_id(path: Path, base: Path, taken: Container[str]) -> str:
    """Return the path below the folder that was named; with a number if it is taken."""
    base = base.resolve()
    name = path.name if path == base else str(path.relative_to(base))
    found, number = name, 2
    while found in taken:
        found, number = f"{name} ({number})", number + 1
    return found


def check_path(path: Path) -> None:
    """Raise a `UserError` for a path that is no folder."""
    if path.is_dir():
        return
    names = [entry.name for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []
    raise UserError(f"{path} is neither a run nor a folder of runs{did_you_mean(path.name, names)}")


def find_runs(path: Path, depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the runs at and below a path. Folders inside a run, and hidden ones, are not searched."""
    if os.path.isfile(path / "config.yaml"):  # `Path.is_file` raises for a folder that this user may not enter
        yield path
        return
    if depth == 0:
        return
    try:
        entries = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:  # a folder that this user may not read, or that was removed meanwhile
        return
    for name in entries:
        yield from find_runs(path / name, depth - 1)
