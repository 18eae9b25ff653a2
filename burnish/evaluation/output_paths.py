"""The files of an evaluation, and the checks before they are written.

<folder>/<name>.jsonl          every completion (or .parquet, where --out names one)
<folder>/<name>.json           the result, with the settings it was made with
<folder>/<name>.partial.jsonl  the completions so far, while the evaluation runs
<folder>/results.json          the results of one command together
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.published_datasets import split_shape
from burnish.evaluation.completions import SUFFIXES, refuse_other_settings
from burnish.evaluation.settings import TASK_PREFIX

COMBINED_NAME = "results"
"""Name of the file with all results. No data set may have this name."""


@dataclass(frozen=True)
class OutputPaths:
    """The files of one data set."""

    name: str
    completions: Path

    @property
    def result(self) -> Path:
        """The result file."""
        return self.completions.with_suffix(".json")

    @property
    def journal(self) -> Path:
        """The completions of an unfinished evaluation."""
        return self.completions.with_suffix(".partial.jsonl")

    def clear(self) -> None:
        """Delete the files of an earlier evaluation, and nothing else."""
        if self.result.exists() and read_result(self.result) is None:
            raise UserError(f"{self.result} exists and is no result of `burnish eval`; give another --out")
        for path in (self.result, self.journal, self.completions):
            path.unlink(missing_ok=True)

    def finished(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Return the existing result if it was made with these settings. Any other file in its place is a `UserError`."""
        if self.journal.exists():
            return None
        if not self.result.exists() and not self.completions.exists():
            return None
        found = read_result(self.result) if self.result.exists() and self.completions.exists() else None
        if found is None:
            there = self.completions if self.completions.exists() else self.result
            raise UserError(f"{there} exists; give --force to replace it, or --out for another place")
        refuse_other_settings(found["settings"], settings, self.completions)
        return found


def read_result(path: Path) -> dict[str, Any] | None:
    """Read a result file; None if it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("settings"), dict) else None


def find_output_paths(out: Path | None, model: Path, data: Sequence[str]) -> list[OutputPaths]:
    """Return the paths for each data set: in a folder, by default `eval-<model>`, or the one file that --out names."""
    if out is not None and re.fullmatch(r"\.[a-z]{2,7}", out.suffix):
        _check_file(out, data)
        return [OutputPaths(out.stem, out)]
    folder = out or Path("-".join(["eval", *_file_name_part(model_name(model))]))
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--out {folder} is a file; name a folder, or a file that ends in {' or '.join(SUFFIXES)}")
    if not folder.parent.is_dir():
        raise UserError(f"--out {folder}: the folder {folder.parent} does not exist; make it first")
    taken = [COMBINED_NAME]
    for one in data:
        name = "-".join(
            _file_name_part(
                one.removeprefix(TASK_PREFIX)
                if one.startswith(TASK_PREFIX)
                else Path(split_shape(one)[1]).name.partition(".")[0]
            )
        )
        name = name or "data"
        taken.append(next(n for i in range(1, len(taken) + 2) if (n := name if i == 1 else f"{name}-{i}") not in taken))
    return [OutputPaths(name, folder / f"{name}.jsonl") for name in taken[1:]]


def model_name(model: Path) -> str:
    """Return the name of a model: its folder, with the run's name for a checkpoint."""
    path = model.resolve()
    return f"{path.parent.parent.name}-{path.name}" if path.parent.name == "checkpoints" else path.name


def _check_file(out: Path, data: Sequence[str]) -> None:
    if out.suffix not in SUFFIXES:
        raise UserError(
            f"--out {out}: completions are written as {' or '.join(SUFFIXES)}, by the ending of the name; a folder has none"
        )
    if len(data) > 1:
        raise UserError(f"--out {out} is one file, and there are {len(data)} data sets; name a folder")
    if out.is_dir():
        raise UserError(f"--out {out} is a directory; name a file in it")
    if not out.parent.is_dir():
        raise UserError(f"--out {out}: the folder {out.parent} does not exist; make it first")


def _file_name_part(text: str) -> list[str]:
    return list(filter(None, [re.sub(r"[^\w.+=]+", "-", text).strip("-")]))
