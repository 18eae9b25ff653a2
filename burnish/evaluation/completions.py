"""The file of completions an evaluation leaves: jsonl or parquet by its ending, whole or not there at all."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.evaluation.settings import TASK
from burnish.run.files import atomic_write

SUFFIXES = (".jsonl", ".parquet")


def default_target(model: Path, data: str) -> Path:
    """`eval-<model>-<data>.jsonl` in the working directory."""
    name = data.removeprefix(TASK) if data.startswith(TASK) else Path(data).stem
    words = [re.sub(r"[^\w.+=]+", "-", word).strip("-") for word in (model.resolve().name, name)]
    return Path("-".join(["eval", *filter(None, words)]) + ".jsonl")


def check_target(path: Path, force: bool) -> None:
    """Everything that would stop the file from being written, found before the work is done."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"--out {path}: completions are written as {' or '.join(SUFFIXES)}, by the ending of the name")
    if path.is_dir():
        raise UserError(f"--out {path} is a directory; name a file in it")
    if path.exists() and not force:
        raise UserError(f"{path} exists; give --force to replace it, or --out FILE for another one")
    if not path.parent.is_dir():
        raise UserError(f"--out {path}: the folder {path.parent} does not exist; make it first")


def write_completions(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the rows. `parts` is an object in jsonl and JSON text in parquet, where columns have one type."""
    if path.suffix == ".jsonl":
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # A lone surrogate from a data file has no UTF-8 form; it must not cost the whole evaluation.
        atomic_write(path, lines.encode("utf-8", "replace"))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number, whole = pa.string(), pa.float64(), pa.int64()
    types = {"sample": whole, "length": whole, "accuracy": number, "reward": number, "truncated": pa.bool_()}
    flat = [{**row, "parts": json.dumps(row["parts"], sort_keys=True)} for row in rows]
    columns = {name: [_clean(row[name]) for row in flat] for name in rows[0]}
    schema = pa.schema([(name, types.get(name, text)) for name in columns])
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), buffer, compression="zstd")
    atomic_write(path, buffer.getvalue())


def _clean(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
