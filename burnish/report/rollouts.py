"""The sample rollouts a page can carry: whole groups, spread over the run, under a limit of bytes.

A run may hold gigabytes of samples; a page should open on a phone. Tables are taken evenly over the run (the first and
the last of each kind always), and of each table as many whole groups as its share allows, spread evenly too. The
choice depends on nothing but the files.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TypeVar

from burnish.run.samples import read_table, sample_files

BYTES = 3_000_000
TABLES_A_KIND = 24
HEAD, TAIL = 600, 300  # tokens kept of a longer completion
TEXT = 6_000  # characters kept of a longer prompt, answer or error

Row = dict[str, Any]
T = TypeVar("T")


def evenly(items: list[T], count: int) -> list[T]:
    """`count` of the items, in order, spread evenly, with the first and the last."""
    if count >= len(items):
        return items
    if count <= 1:
        return items[-1:]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def shorten(text: str | None) -> str | None:
    """A long text with its middle left out, saying how much."""
    if text is None or len(text) <= TEXT:
        return text
    half = TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def finite(value: Any) -> Any:
    """The value, or None for a NaN or an infinity, which a browser's JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def compact(row: Row) -> Row:
    """A row as the page carries it: short keys for tokens, no text twice, long completions cut in the middle."""
    pieces, logp = row["pieces"] or [], row["logp"] or []
    kept = {name: finite(row[name]) for name in ("sample", "reward", "accuracy", "advantage", "truncated", "length")}
    kept["error"] = shorten(row["error"])
    try:
        parts = json.loads(row["parts"]) if row["parts"] else {}
    except ValueError:
        parts = row["parts"]
    kept["parts"] = (
        {name: finite(value) for name, value in parts.items()} if isinstance(parts, dict) else {"parts": parts}
    )
    if not pieces or "".join(pieces) != row["completion"]:
        kept["text"] = shorten(row["completion"])
    rounded = [None if finite(value) is None else round(value, 3) for value in logp]
    if len(pieces) > HEAD + TAIL:
        kept["cut"] = len(pieces) - HEAD - TAIL
        kept["head"] = HEAD
        pieces, rounded = pieces[:HEAD] + pieces[-TAIL:], rounded[:HEAD] + rounded[-TAIL:]
    return kept | {"pieces": pieces, "logp": rounded}


def grouped(rows: list[Row]) -> list[dict[str, Any]]:
    """The rows of one table as groups that share a prompt, in order of appearance."""
    groups: dict[str, dict[str, Any]] = {}
    for row in rows:
        group = groups.setdefault(
            str(row["group"]),
            {
                "step": row["step"],
                "kind": row["kind"],
                "group": row["group"],
                "source": row["data_source"],
                "prompt": shorten(row["prompt"]),
                "answer": shorten(row["answer"]),
                "samples": [],
            },
        )
        group["samples"].append(compact(row))
    return list(groups.values())


def choose(groups: list[dict[str, Any]], limit: int) -> list[dict[str, Any]]:
    """As many whole groups as fit the limit, spread evenly; where not even one fits, samples of the first that do."""
    sizes = [len(json.dumps(group)) for group in groups]
    count = len(groups)
    while count > 1 and sum(evenly(sizes, count)) > limit:
        count = min(count - 1, int(count * limit / sum(evenly(sizes, count))) or 1)
    chosen = evenly(groups, max(count, 1))
    if len(chosen) == 1 and len(json.dumps(chosen[0])) > limit:
        only, room = chosen[0], limit
        samples: list[Row] = []
        for sample in only["samples"]:
            room -= len(json.dumps(sample))
            if samples and room < 0:
                break
            samples.append(sample)
        chosen = [only | {"samples": samples}]
    return chosen


def collect(folder: Path, limit: int = BYTES) -> tuple[list[dict[str, Any]], str]:
    """The groups to show, and a sentence that says what was left out (empty when nothing was)."""
    files = sample_files(folder) if folder.is_dir() else []
    kinds = sorted({kind for _, kind, _ in files})
    taken = sorted(
        entry
        for kind in kinds
        for entry in evenly([f for f in files if f[1] == kind], max(2, min(TABLES_A_KIND, 120 // len(kinds))))
    )
    groups, num_rows = [], 0
    for _, _, path in taken:
        rows = read_table(path)
        num_rows += len(rows)
        groups += choose(grouped(rows), limit // len(taken))
    shown = sum(len(group["samples"]) for group in groups)
    if shown == num_rows and len(taken) == len(files):
        return groups, ""
    return groups, (
        f"To keep this page small it shows {shown:,} of the {num_rows:,} samples in {len(taken)} of {len(files)} tables, spread "
        "evenly over the run; the parquet files in samples/ hold them all."
    )
