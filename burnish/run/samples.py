"""Tables of samples (parquet), the file of the tokens on which sampler and trainer disagree most, and examples of events.

There is one parquet file per step and kind (`train-000010.parquet`, `validation-greedy-000050.parquet`). All have the same
columns, so that any tool can read them together. `pieces`, `logp`, `advantages`, `gap`, `entropy` and `mask` are lists with a value for each
token the model wrote, in the order of the branches if an agent's context was rewritten. `mask` is 1 if the token was in the loss, else 0. `turns` is JSON of an environment's dialogue:
speaker, text, state, reward, and where a branch begins (`trainers/episode_rows.py`). `events` is JSON of what went wrong in it, and
`last_words` is what the environment said at the end. `pictures` names the images of the sample, which are in `pictures/` (`run/picture_files.py`). `role` is the player in a game of several. `extra` is JSON of what reward functions log beside a sample, by part and column. A missing
value is null, never a number: the advantage of a validation sample, advantages of tokens that equal their sample's, the
reward if scoring failed.

samples/worst_tokens.jsonl has one JSON line per token with all of `WORST_TOKEN_COLUMNS`; a missing value is null. It is written
in every step, so it must cost a fraction of a millisecond: lines are appended without a sync. They survive a kill. A loss of
power can only take steps after the last checkpoint, and those are repeated. samples/events.jsonl is written in the same way: the first
event of each kind that went wrong in an episode, with all of `EVENT_COLUMNS`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import quote

from burnish.config.errors import UserError, did_you_mean
from burnish.run.durable_files import append, atomic_write, fsync_path
from burnish.run.picture_files import write_pictures

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq


SAMPLE_COLUMNS = {
    "step": "int64",
    "kind": "string",
    "group": "string",
    "sample": "int64",
    "data_source": "string",
    "prompt": "string",
    "completion": "string",
    "answer": "string",
    "reward": "double",
    "accuracy": "double",
    "parts": "string",
    "advantage": "double",
    "truncated": "bool",
    "finish": "string",
    "length": "int64",
    "pieces": "strings",
    "logp": "floats",
    "advantages": "floats",
    "gap": "floats",
    "entropy": "floats",
    "mask": "floats",
    "turns": "string",
    "pictures": "strings",
    "role": "string",
    "opponent": "int64",
    "last_words": "string",
    "events": "string",
    "details": "string",
    "extra": "string",
    "error": "string",
}
EVENT_COLUMNS = ("step", "sample", "kind", "what", "message", "traceback")
WORST_TOKEN_COLUMNS = (
    "step",
    "group",
    "sample",
    "position",
    "token",
    "before",
    "text",
    "after",
    "behaviour_logp",
    "trainer_logp",
    "gap",
    "weight",
)


def write_samples(folder: Path, step: int, kind: str, rows: list[dict[str, Any]]) -> Path:
    """Write one table atomically, and its images before it. Adds `step` and `kind`; a missing column is null; dictionaries become JSON."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for row in rows:
        if strange := [name for name in row if name not in SAMPLE_COLUMNS]:
            raise ValueError(f"samples have no column {strange[0]!r}{did_you_mean(strange[0], SAMPLE_COLUMNS)}")
    filled = [row | {"step": step, "kind": kind} for row in rows]
    for row in filled:
        if row.get("pictures"):
            row["pictures"] = write_pictures(folder, row["pictures"])
    columns = {name: [_encodable(row.get(name)) for row in filled] for name in SAMPLE_COLUMNS}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema=_schema()), buffer, compression="zstd")
    path = folder / f"{quote(kind, safe='')}-{step:06d}.parquet"
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(path, buffer.getvalue())
    return path


def sample_files(folder: Path) -> list[tuple[int, str, Path]]:
    """Return (step, quoted kind, file) of every table, by step and then kind, without opening any file."""
    found = []
    for path in folder.glob("*.parquet"):
        kind, _, step = path.stem.rpartition("-")
        if step.isdigit() and not path.name.startswith("."):
            found.append((int(step), kind, path))
    return sorted(found)


def read_columns(path: Path, names: Sequence[str] = tuple(SAMPLE_COLUMNS)) -> pa.Table:
    """Read some columns of one table. A column that the file lacks, because it is older, is null."""
    import pyarrow as pa

    schema = pa.schema([field for field in _schema() if field.name in names])
    with _open_table(path) as file:
        present = set(file.schema_arrow.names)
        # Tables are small: handing their columns to threads takes longer than reading them.
        table = file.read(columns=[name for name in schema.names if name in present], use_threads=False)
    for field in schema:
        if field.name not in present:
            table = table.append_column(field, pa.nulls(len(table), field.type))
    return table.select(schema.names).cast(schema)


def read_table(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one table."""
    rows: list[dict[str, Any]] = read_columns(path).to_pylist()
    return rows


def table_size(path: Path) -> tuple[int, int]:
    """Return the number of rows of a table and their uncompressed bytes, from the file's metadata."""
    with _open_table(path) as file:
        groups = [file.metadata.row_group(k) for k in range(file.metadata.num_row_groups)]
    return sum(group.num_rows for group in groups), sum(group.total_byte_size for group in groups)


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of every table, by step and kind."""
    return [row for _, _, path in sample_files(folder) for row in read_table(path)]


@contextmanager
def _open_table(path: Path) -> Iterator[pq.ParquetFile]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            yield file
    except (OSError, pa.ArrowException) as error:
        raise UserError(
            f"{path}: not readable as a table of samples ({error}); delete it if you do not need it"
        ) from error


@cache
def _schema() -> pa.Schema:
    import pyarrow as pa

    types = {
        "int64": pa.int64(),
        "string": pa.string(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "strings": pa.list_(pa.string()),
        "floats": pa.list_(pa.float32()),
    }
    return pa.schema([(name, types[kind]) for name, kind in SAMPLE_COLUMNS.items()])


def _encodable(value: Any) -> Any:
    """Replace characters that UTF-8 lacks, because a lone surrogate from a data file must not stop a run."""
    if isinstance(value, dict):
        return json.dumps(value, sort_keys=True)
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list) and value and isinstance(value[0], str):
        return [_encodable(piece) for piece in value]
    return value


def read_worst_tokens(path: Path) -> list[dict[str, Any]]:
    """Return all rows in order; [] if there is no file."""
    return WorstTokensFile(path).read()


class StepRowsFile:
    """The writer and reader of one file of JSON lines, each a row of a step with all of `columns`."""

    columns: ClassVar[tuple[str, ...]]
    title: ClassVar[str]
    """What the rows are, for error messages."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """Return all rows in order; [] if there is no file. A last line without its newline is still being written."""
        return [row for _, row in self._lines()] if self.path.exists() else []

    def append(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append the rows of one step."""
        if not rows:
            return
        lines = "".join(self._line({"step": step, **row}) for row in rows)
        try:
            append(self.path, lines.encode("utf-8", "replace"))  # a lone surrogate must not stop a run
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}; make room and start again") from error

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps and a torn last line, because the run resumes after `step`."""
        if self.path.exists():
            atomic_write(self.path, "".join(line + "\n" for line, row in self._lines() if row["step"] <= step))

    def sync(self) -> None:
        """Sync the file to disk."""
        if self.path.exists():
            fsync_path(self.path)
            fsync_path(self.path.parent)

    def _line(self, row: dict[str, Any]) -> str:
        return json.dumps({name: row[name] for name in self.columns}, ensure_ascii=False, allow_nan=False) + "\n"

    def _lines(self) -> Iterator[tuple[str, dict[str, Any]]]:
        *lines, _ = self.path.read_text(errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if not isinstance(row, dict) or (missing := [name for name in self.columns if name not in row]):
                    raise ValueError(f"no {missing[0]!r}" if isinstance(row, dict) else "not an object")
            except ValueError as error:
                raise UserError(
                    f"{self.path}, line {number}: not a row of {self.title} ({error}); delete the file if you do not need it"
                ) from error
            yield line, row


class WorstTokensFile(StepRowsFile):
    """worst_tokens.jsonl"""

    columns, title = WORST_TOKEN_COLUMNS, "worst tokens"


class EventExamplesFile(StepRowsFile):
    """events.jsonl: the first event of each kind in a run."""

    columns, title = EVENT_COLUMNS, "events"
