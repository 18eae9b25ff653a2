"""Where an evaluation leaves its files, and whether it may.

<folder>/<name>.jsonl          every completion (or .parquet, where --out names one)
<folder>/<name>.json           the result, with the settings it was made with
<folder>/<name>.partial.jsonl  what there is so far, while it runs
<folder>/results.json          the results of one command together
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from burnish.config.errors import UserError
from burnish.evaluation.completions import SUFFIXES, refuse_other_settings
from burnish.evaluation.settings import TASK_PREFIX
from burnish.memory_plan.kv_cache import BLOCK_SIZE, GIB, MAX_FREE_SHARE

COMBINED_NAME = "results"
"""Name of the file with all results, which no data set's may have."""


@dataclass(frozen=True)
class OutputPaths:
    """The files of one data set."""

    name: str
    completions: Path

    @property
    def result(self) -> Path:
        """The numbers."""
        return self.completions.with_suffix(".json")

    @property
    def journal(self) -> Path:
        """What there is so far."""
        return self.completions.with_suffix(".partial.jsonl")

    def clear(self) -> None:
        """Remove what an evaluation left here, and nothing else."""
        if self.result.exists() and read_result(self.result) is None:
            raise UserError(
                f"{self.result} is no result of `burnish eval`, and stands in its place; give another --out"
            )
        for path in (self.result, self.journal, self.completions):
            path.unlink(missing_ok=True)

    def finished(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """The result that is there, if this is what it measured; a UserError where something else stands in its place."""
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
    """A result file, or None if it is something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("settings"), dict) else None


def find_output_paths(out: Path | None, model: Path, data: Sequence[str]) -> list[OutputPaths]:
    """A place for each data set: in a folder, by default `eval-<model>`, or the one file that --out names."""
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
                one.removeprefix(TASK_PREFIX) if one.startswith(TASK_PREFIX) else Path(one).name.partition(".")[0]
            )
        )
        name = name or "data"
        taken.append(next(n for i in range(1, len(taken) + 2) if (n := name if i == 1 else f"{name}-{i}") not in taken))
    return [OutputPaths(name, folder / f"{name}.jsonl") for name in taken[1:]]


def model_name(model: Path) -> str:
    """What a model is called: its folder, of a run's checkpoint with the run."""
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


# --- How many completions are decoded at once, and how large the cache is: arithmetic on plain numbers.
#
# An evaluation has the device to itself, so it may take more of it than a rollout between two updates does. All completions
# at once is best where they fit: the long ones begin early, and the last steps are not left to a few of them.

MAX_ROWS = 2048  # a step of more rows is no faster a row, and its logits take gigabytes
CPU_ROWS = 256  # on a CPU, where nobody knows how much memory is free
ROW_MULTIPLE = 64  # rows come in multiples of it, for which the kernels are compiled and the matmuls are whole tiles
WORK_BYTES = 6 * GIB  # left to activations and logits, where the device is large enough
CACHE_SHARE = 0.85  # of the free memory that the cache takes at most


class BatchPlan(NamedTuple):
    """Rows that are decoded at once, and the bytes of their cache."""

    rows: int
    cache_bytes: int


def plan_batch_size(
    requests: int, longest_prompt: int, max_tokens: int, token_bytes: int, free_bytes: int
) -> BatchPlan:
    """The rows and the cache for so many requests on a device with so much free memory.

    The cache takes what all rows at their longest need, at most 85% of what is free and leaving room to work in (on a small
    device the 40% a rollout takes). A row is counted at half of its new tokens, since few run to the limit; when they grow
    past that the youngest wait.
    """
    longest = -(-(longest_prompt + max_tokens) // BLOCK_SIZE) * BLOCK_SIZE
    typical = longest_prompt + max_tokens // 2
    most = max(free_bytes * MAX_FREE_SHARE, min(free_bytes * CACHE_SHARE, free_bytes - WORK_BYTES))
    fit = int(most // (typical * token_bytes))
    rows = max(
        1, min(-(-requests // ROW_MULTIPLE) * ROW_MULTIPLE if requests > ROW_MULTIPLE else requests, MAX_ROWS, fit)
    )
    wanted = (rows * longest + BLOCK_SIZE) * token_bytes  # and the page that nobody holds
    return BatchPlan(rows, int(min(wanted, most)))
