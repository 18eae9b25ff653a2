"""The sample rollouts a page can carry: every one of them, or whole groups spread over the run where that is too much.

A page carries some hundred megabytes of text and token values before compression, which is tens of thousands of long samples; a run
may hold more. Then tables are taken evenly over the run (the first and the last of each kind always), and of a table that is
too large by itself whole groups, spread evenly too. The choice depends on nothing but the files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from burnish.run.samples import read_columns, sample_files, table_size

BYTES = 120_000_000
"""Of text and token values, before compression."""
UNPACKED = 4
"""How many times larger a table is than what a page carries of it, at most: it has more columns, and numbers in full."""
TOKEN_COLUMNS = ("logp", "advantages", "gap")

T = TypeVar("T")


@dataclass
class Sample:
    """What a page shows of one sample."""

    row: dict[str, Any]
    """The columns that are one value."""
    piece_bytes: np.ndarray  # [T] how many UTF-8 bytes each token adds to the text; empty where tokens are not known
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """Each of `TOKEN_COLUMNS` as [T] float32, nan where there is no value; absent where there is none at all."""
    text: str = ""
    """What the pieces say, or the completion where there are none."""

    @property
    def size(self) -> int:
        prompt = len(self.row["prompt"] or "") // 4  # shared by a group
        return prompt + len(self.text) + len(self.piece_bytes) * (1 + len(self.values))


@dataclass
class Group:
    """The samples of one prompt in one table."""

    step: int
    kind: str
    name: str
    samples: list[Sample] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(sample.size for sample in self.samples)


def collect(folder: Path, limit: int = BYTES) -> tuple[list[Group], str]:
    """The groups to show, by step and kind, and a sentence that says what was left out (empty when nothing was)."""
    files = sample_files(folder) if folder.is_dir() else []
    tables = [(path, kind, *table_size(path)) for _, kind, path in files]
    read = [read_groups(path) for path in choose_tables(tables, UNPACKED * limit)]
    sizes = [sum(group.size for group in groups) for groups in read]
    share = min(1.0, limit / max(1, sum(sizes)))
    groups = [
        group for those, size in zip(read, sizes, strict=True) for group in choose(those, math.ceil(share * size))
    ]
    shown = sum(len(group.samples) for group in groups)
    total = sum(rows for _, _, rows, _ in tables)
    if shown == total:
        return groups, ""
    return groups, (
        f"To keep this page quick it shows {shown:,} of {total:,} samples, spread evenly over the run; the parquet files in "
        "samples/ hold them all."
    )


def choose_tables(tables: list[tuple[Path, str, int, int]], limit: int) -> list[Path]:
    """All tables (file, kind, rows, bytes), or so many of each kind, spread evenly, that their bytes are under the limit."""
    kinds = {kind: [t for t in tables if t[1] == kind] for _, kind, _, _ in tables}
    share = 1.0
    while True:
        taken = {
            t[0]
            for those in kinds.values()
            for t in evenly(those, max(min(2, len(those)), math.floor(share * len(those))))
        }
        total = sum(size for path, _, _, size in tables if path in taken)
        if total <= limit or all(math.floor(share * len(those)) <= 2 for those in kinds.values()):
            return [path for path, _, _, _ in tables if path in taken]
        share *= min(0.95, limit / total)


def choose(groups: list[Group], limit: int) -> list[Group]:
    """As many whole groups as fit the limit, spread evenly; where not even one fits, samples of the last that do."""
    count = len(groups)
    while count > 1 and (total := sum(group.size for group in evenly(groups, count))) > limit:
        count = min(count - 1, int(count * limit / total) or 1)
    chosen = evenly(groups, max(count, 1))
    if len(chosen) == 1 and chosen[0].size > limit:
        only, room = chosen[0], limit
        samples: list[Sample] = []
        for sample in only.samples:
            room -= sample.size
            if samples and room < 0:
                break
            samples.append(sample)
        chosen = [Group(only.step, only.kind, only.name, samples)]
    return chosen


def evenly(items: list[T], count: int) -> list[T]:
    """`count` of the items, in order, spread evenly, with the first and the last."""
    if count >= len(items):
        return items
    if count <= 1:
        return items[-1:]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def read_groups(path: Path) -> list[Group]:
    """The rows of one table as groups that share a prompt, in order of appearance."""
    groups: dict[str, Group] = {}
    for sample in _samples(path):
        row = sample.row
        group = groups.setdefault(str(row["group"]), Group(row["step"], row["kind"], str(row["group"])))
        group.samples.append(sample)
    return list(groups.values())


def _samples(path: Path) -> Iterator[Sample]:
    """The rows of one table. Token columns stay arrays: a table may have a million tokens."""
    import pyarrow.compute as pc

    table = read_columns(path)
    scalars = table.drop_columns(["pieces", *TOKEN_COLUMNS]).to_pylist()
    pieces = table["pieces"].combine_chunks()
    starts, flat = _bounds(pieces), pieces.flatten()
    widths = pc.fill_null(pc.binary_length(flat), 0).to_numpy(zero_copy_only=False)
    texts = pc.fill_null(pc.binary_join(pieces, ""), "").to_pylist()
    columns = {}
    for name in TOKEN_COLUMNS:
        column = table[name].combine_chunks()
        columns[name] = (_bounds(column), column.flatten().to_numpy(zero_copy_only=False))
    for k, row in enumerate(scalars):
        width = widths[starts[k] : starts[k + 1]]
        values = {n: flat[at[k] : at[k + 1]] for n, (at, flat) in columns.items()}
        values = {n: v for n, v in values.items() if len(v) == len(width) and len(v)}
        yield Sample(row, width, values, texts[k] if len(width) else row["completion"] or "")


def _bounds(column: Any) -> np.ndarray:
    """[rows + 1] where each row's list begins in the flattened column; a null is an empty list."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)])


def parts_of(row: dict[str, Any]) -> dict[str, Any]:
    """The parts of a reward; what is no number of JSON's is null."""
    try:
        parts = json.loads(row["parts"]) if row["parts"] else {}
    except ValueError:
        parts = row["parts"]
    return {n: finite(v) for n, v in parts.items()} if isinstance(parts, dict) else {"parts": parts}


def turns_of(row: dict[str, Any]) -> list[list[Any]] | None:
    """Who said what after the prompt (who, text, state, reward), where a sample has several turns."""
    try:
        said = json.loads(row["turns"]) if row["turns"] else None
        return said and [[one["who"], one["text"], one.get("state"), finite(one.get("reward"))] for one in said]
    except (ValueError, TypeError, KeyError):  # another tool's table: its own words are shown
        return [["", str(row["turns"]), None, None]]


def finite(value: Any) -> Any:
    """The value, or None for a NaN or an infinity, which a browser's JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
