"""Turns Python objects in the arguments of `burnish.train` and its kin into what a config names: files of rows and plug-ins.

The files are written to `inputs/` in a staging folder, and the config names them relative to it (`inputs/reward.py:score`). The
run reads them from there while it is checked and trained. `keep` copies them into the run directory once that exists. Names stay
valid, because relative paths of `<run>/config.yaml` are looked up in the run directory first.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from burnish.api.function_source import file_of, is_sendable, object_name, written_source
from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.evaluation.settings import TASK_PREFIX
from burnish.run.durable_files import atomic_write

INPUTS_FOLDER = "inputs"


class PythonInputs:
    """The inputs of one call. Use it in a `with` block, which deletes the staging folder."""

    def __init__(self, folder: str = INPUTS_FOLDER) -> None:
        """`folder` is the path by which the config names the files."""
        self.files: dict[str, str] = {}
        """The text of each file, by name."""
        self._folder = folder
        self._plugins: dict[int, tuple[Any, str]] = {}  # the object is kept, so that its id is not given to another
        self._staging: tempfile.TemporaryDirectory[str] | None = None

    def __enter__(self) -> PythonInputs:
        return self

    def __exit__(self, *_: object) -> None:
        if self._staging is not None:
            self._staging.cleanup()

    def stage(self, parent: Path) -> Path:
        """Write the inputs to a staging folder, and return the folder in which the config's relative paths are looked up first.

        It is made in `parent`, the folder of all runs, which processes on other machines can read too.
        """
        if not self.files:
            return Path.cwd()
        parent.mkdir(parents=True, exist_ok=True)
        self._staging = tempfile.TemporaryDirectory(prefix=".inputs-", dir=parent)
        base = Path(self._staging.name).resolve()
        self.keep(base)
        return base

    def keep(self, directory: Path) -> None:
        """Write the inputs to `inputs/` in a directory: the staging folder, or that of a run."""
        for name, text in self.files.items():
            (directory / INPUTS_FOLDER).mkdir(parents=True, exist_ok=True)
            atomic_write(directory / INPUTS_FOLDER / name, text)

    def plugin(self, value: Any) -> str:
        """The plug-in name of a function or class."""
        if id(value) not in self._plugins:
            name = (
                file_of(value) or f"{self._add(object_name(value), '.py', written_source(value))}:{object_name(value)}"
            )
            self._plugins[id(value)] = value, name
        return self._plugins[id(value)][1]

    def section(self, value: Any) -> Any:
        """A section of the config with every function and class in it replaced by its plug-in name."""
        if isinstance(value, Mapping):
            return {key: self.section(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.section(inner) for inner in value]
        if isinstance(value, Path):
            return str(value)
        return self.plugin(value) if is_sendable(value) else value

    def sources(self, data: Any, name: str) -> list[Any]:
        """Data sources of what a user gave: files, tasks, functions, sections, rows, or a list of them. `name` is of a file of rows."""
        items = data if isinstance(data, (list, tuple)) else [data]
        if rows := [item for item in items if _is_row(item)]:
            if len(rows) < len(items):
                raise UserError(f"{name} is a list of rows and of other things: give the rows as a list of their own")
            return [{"path": self.rows(rows, name)}]
        return [self._source(item, name) for item in items]

    def _source(self, item: Any, name: str) -> Any:
        if isinstance(item, (str, Path)):
            text = str(item)
            return {"task": text.removeprefix(TASK_PREFIX)} if text.startswith(TASK_PREFIX) else {"path": text}
        if isinstance(item, Mapping):
            return self.section(item)
        if is_sendable(item):
            return {"plugin": self.plugin(item)}
        return {"path": self.rows(item, name)}

    def rows(self, data: Any, name: str) -> str:
        """Write rows to a file and return its path: a list of dictionaries, a Hugging Face `Dataset`, or a pandas `DataFrame`."""
        if hasattr(data, "to_dict") and hasattr(data, "columns"):  # a DataFrame, which iterates over its columns
            data = data.to_dict("records")
        if not isinstance(data, Iterable):
            raise UserError(
                f"{name} is a {type(data).__name__}; expected a path, task:NAME, a function, a list of rows or a data set of rows"
            )
        lines = [_row_line(row, f"{name}, row {index}") for index, row in enumerate(data)]
        if not lines:
            raise UserError(f"{name} holds no rows")
        return self._add(name, ".jsonl", "".join(lines))

    def _add(self, stem: str, suffix: str, text: str) -> str:
        """Add a file under a free name and return the path by which the config names it."""
        names = (f"{stem}{suffix}" if number == 1 else f"{stem}-{number}{suffix}" for number in itertools.count(1))
        name = next(name for name in names if name not in self.files)
        self.files[name] = text
        return f"{self._folder}/{name}"


def _is_row(value: Any) -> bool:
    """Whether a value is a row of data, and not a section that describes a source."""
    if not isinstance(value, Mapping):
        return False
    return not (value.keys() <= Source.model_fields.keys() and value.keys() & {"path", "task", "plugin"})


def _row_line(row: Any, where: str) -> str:
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: expected a dictionary of columns, got {type(row).__name__}")
    try:
        return json.dumps(dict(row), ensure_ascii=False, default=_plain) + "\n"
    except (TypeError, ValueError) as error:
        column = next((key for key, value in row.items() if not _is_writable(value)), None)
        raise UserError(
            f"{where}, column {column!r}: a {type(row.get(column)).__name__} cannot be written as JSON ({error}); give text, numbers, "
            "lists and dictionaries, or leave the column out"
        ) from error


def _is_writable(value: Any) -> bool:
    try:
        json.dumps(value, default=_plain)
    except (TypeError, ValueError):
        return False
    return True


def _plain(value: Any) -> Any:
    """A value of numpy or torch as plain numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not JSON")
