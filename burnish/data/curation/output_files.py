"""The output of a `burnish data` command: rows as jsonl or parquet, and a manifest next to them.

The output depends only on the bytes of the sources and on the options. The manifest has the checksums of sources and output, so the same
command finds its output up to date and does nothing. A file that no such command wrote is never replaced without --force.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from burnish.config.errors import UserError
from burnish.data.files import Record
from burnish.data.media_columns import with_media_columns
from burnish.run.durable_files import atomic_write, sha256

FORMAT = 1
"""Version of what the commands write. A file of another version is written again."""
SUFFIXES = (".jsonl", ".parquet")
NUM_SHOWN = 5
REPORT_EVERY_S = 2.0
ProgressReport = Callable[[str], None]
"""Reports the progress of a command."""
T = TypeVar("T")


@dataclass
class KeptRows:
    """The rows that a command keeps, and why the others were dropped."""

    records: list[Record]
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    """Places of the first rows that were dropped, by reason."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Further entries of the manifest."""

    def drop(self, reason: str, where: str) -> None:
        """Count a dropped row."""
        self.dropped[reason] += 1
        shown = self.examples.setdefault(reason, [])
        if len(shown) < NUM_SHOWN:
            shown.append(short_place(where))


def short_place(where: str) -> str:
    """The place of a row, without the folder of its file."""
    return Path(where).name


def no_progress(text: str) -> None:
    """Report nothing."""


def with_progress(items: Sequence[T], what: str, report: ProgressReport) -> Iterator[T]:
    """Iterate, and report every few seconds how many items are done."""
    last = time.monotonic()
    for index, item in enumerate(items):
        if time.monotonic() - last > REPORT_EVERY_S:
            last = time.monotonic()
            report(f"{index:,} of {len(items):,} {what}")
        yield item


def write_output(
    out: Path,
    asked: dict[str, Any],
    make: Callable[[ProgressReport], KeptRows],
    force: bool = False,
    report: ProgressReport = no_progress,
) -> tuple[dict[str, Any], bool]:
    """Make the rows and write them with their manifest; return the manifest and whether anything was written."""
    if out.suffix not in SUFFIXES:
        raise UserError(f"{out}: the output should be {' or '.join(SUFFIXES)}")
    asked = json.loads(json.dumps({"format": FORMAT, **asked}))
    if (up_to_date := up_to_date_manifest(out, asked, force)) is not None:
        return up_to_date, False
    kept = make(report)
    if not kept.records:
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in kept.dropped.items())
        raise UserError(f"no row is left for {out}: {reasons or 'the source has no rows'}; nothing was written")
    content = encode_rows(kept.records, out.suffix)
    manifest = {
        "asked": asked,
        "output": {"file": out.name, "sha256": hashlib.sha256(content).hexdigest(), "rows": len(kept.records)},
        "left_out": dict(sorted(kept.dropped.items())),
        "first_left_out": dict(sorted(kept.examples.items())),
        **kept.facts,
    }
    write_pair(out, content, manifest)
    return manifest, True


def up_to_date_manifest(out: Path, asked: dict[str, Any], force: bool) -> dict[str, Any] | None:
    """The manifest of an output that is up to date, else None. A file without a manifest is an error unless `force`."""
    old = read_manifest(out)
    if old is not None and old.get("asked") == asked and out.is_file() and sha256(out) == old["output"]["sha256"]:
        return old
    if old is None and out.exists() and not force:
        raise UserError(f"{out} exists and was not written by this command; give --force to replace it")
    return None


def write_pair(out: Path, content: bytes, manifest: dict[str, Any]) -> None:
    """Write the file, then its manifest, so that a manifest never describes a file that was not written."""
    out.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(out, content)
    atomic_write(manifest_path(out), json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")


def encode_rows(given: Sequence[Record], suffix: str) -> bytes:
    """The bytes of the file; the same rows give the same bytes. In parquet, a missing key is null."""
    records = [with_media_columns(record, suffix == ".jsonl") for record in given]
    if suffix == ".jsonl":
        lines = (json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records)
        return "".join(lines).encode("utf-8", "replace")
    import pyarrow
    import pyarrow.parquet

    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {name: [record.get(name) for record in records] for name in names}
    sink = pyarrow.BufferOutputStream()
    try:
        table = pyarrow.table(columns)
    except pyarrow.ArrowException as error:
        raise UserError(
            f"the rows do not fit into parquet, whose columns have one type each ({error}); write a .jsonl file instead"
        ) from error
    pyarrow.parquet.write_table(table, sink, compression="zstd")
    return bytes(sink.getvalue())


def manifest_path(out: Path) -> Path:
    """The path of a file's manifest."""
    return out.with_name(out.name + ".manifest.json")


def read_manifest(out: Path) -> dict[str, Any] | None:
    """The manifest of a file, or None if it has none."""
    path = manifest_path(out)
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) and "output" in found else None
    except ValueError as error:
        raise UserError(f"{path} is damaged: {error}; remove it to prepare the file again") from error


def summary(manifest: dict[str, Any], out: Path, is_new: bool) -> list[str]:
    """The lines that a command prints about its output."""
    output = manifest["output"]
    first = (
        f"{out}: {output['rows']:,} rows" if is_new else f"{out} is up to date: {output['rows']:,} rows, nothing to do"
    )
    lines = [first]
    for reason, count in manifest["left_out"].items():
        shown = manifest["first_left_out"].get(reason, [])
        lines.append(f"  left out     {count:,}: {reason}" + (f" (first: {shown[0]})" if shown else ""))
    return [*lines, f"  sha256       {output['sha256']}"]


def aligned_table(header: Sequence[str], rows: Iterable[Sequence[Any]], indent: str = "  ") -> list[str]:
    """A text table: the first column left-aligned, the others right-aligned."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return [
        indent
        + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
