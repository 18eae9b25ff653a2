"""Records out of files: jsonl, json, csv (also gzipped), parquet and arrow, one or a glob, each with the place it came from.

A record is a dictionary of plain Python values. Its place (`train.jsonl:17`, `train.parquet, row 3`) goes into
every message about it, so that a bad row can be found with an editor.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, hub_hint, nearest
from burnish.config.text import parse_json

Record = dict[str, Any]
Located = tuple[str, Record]
"""Where a record came from, and the record."""
GZIP = ".gz"
TEXTS = (".jsonl", ".json", ".csv")


def read_records(pattern: str, base: Path | None = None) -> Iterator[Located]:
    """All records of the files a path or glob names, files in sorted order, rows in file order."""
    for path in find_files(pattern, base):
        yield from READERS[kind_of(path)](path)


def find_files(pattern: str, base: Path | None = None) -> list[Path]:
    """The files a path or glob names, looked for from `base` and then from the working directory."""
    roots = [pattern] if base is None or Path(pattern).is_absolute() else [str(base / pattern), pattern]
    for root in roots:
        if Path(root).is_file():
            return [_checked(Path(root))]
        found = sorted(Path(p) for p in glob.glob(root, recursive=True) if Path(p).is_file())
        if found and glob.has_magic(root):
            return [_checked(p) for p in found]
    if any(Path(root).is_dir() for root in roots):
        raise UserError(f"{pattern} is a directory; name the files in it, such as {pattern.rstrip('/')}/*.parquet")
    if glob.has_magic(pattern):
        raise UserError(f"no file matches {pattern} (looked at {', '.join(roots)})")
    parent = Path(roots[0]).parent
    neighbours = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    near = nearest(Path(pattern).name, neighbours)
    raise UserError(
        f"no such file: {' or '.join(roots)}{near or hub_hint(pattern, is_data=True, roots=(base or Path(), Path()))}"
    )


def kind_of(path: Path) -> str:
    """The ending that tells how a file is read; text may be gzipped (`.jsonl.gz`)."""
    return Path(path.stem).suffix if path.suffix == GZIP and Path(path.stem).suffix in TEXTS else path.suffix


def _checked(path: Path) -> Path:
    if kind_of(path) not in READERS:
        raise UserError(
            f"{path}: cannot read {path.suffix or 'a file without an ending'}; expected {', '.join(READERS)}"
        )
    return path


def _text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == GZIP else data).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a readable gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _read_jsonl(path: Path) -> Iterator[Located]:
    # Not str.splitlines: it also breaks at U+2028 and friends, which are legal inside a JSON string.
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _object(parse_json(line, where), where)


def _read_json(path: Path) -> Iterator[Located]:
    """A list of objects, or (as some data sets do under this ending) one object a line."""
    text = _text(path)
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(path)
        return
    for number, record in enumerate(parse_json(text, str(path)), start=1):
        where = f"{path}, item {number}"
        yield where, _object(record, where)


def _read_parquet(path: Path) -> Iterator[Located]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (pyarrow.ArrowException, OSError, MemoryError, OverflowError, UnicodeDecodeError) as error:
        raise _unreadable(path, number, "parquet", error) from error


def _read_arrow(path: Path) -> Iterator[Located]:
    """What Hugging Face `datasets` saves to disk: an Arrow stream (or, of other writers, an Arrow file)."""
    import pyarrow

    number = 0
    try:
        with pyarrow.memory_map(str(path)) as memory:
            is_file = memory.read(6) == b"ARROW1"
            memory.seek(0)
            reader = pyarrow.ipc.open_file(memory) if is_file else pyarrow.ipc.open_stream(memory)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", record
    except (pyarrow.ArrowException, OSError, MemoryError, OverflowError, UnicodeDecodeError) as error:
        raise _unreadable(path, number, "arrow", error) from error


def _unreadable(path: Path, number: int, kind: str, error: BaseException) -> UserError:
    """What Arrow says of a damaged file, without the lines of its own source."""
    said = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(f"{path}{f', behind row {number}' if number else ''}: not a readable {kind} file: {said}")


def _read_csv(path: Path) -> Iterator[Located]:
    reader = csv.DictReader(io.StringIO(_text(path)), strict=True)
    try:
        for record in reader:
            where = f"{path}:{reader.line_num}"
            if None in record:
                raise UserError(f"{where}: more fields than the header has columns ({len(reader.fieldnames or ())})")
            missing = [k for k, v in record.items() if v is None]
            if missing:
                raise UserError(f"{where}: no value for {', '.join(missing)}; the row is shorter than the header")
            yield where, dict(record)
    except csv.Error as error:
        raise UserError(f"{path}:{reader.reader.line_num}: not valid csv: {error}") from error


def _object(record: Any, where: str) -> Record:
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with named columns, got {type(record).__name__}")
    return record


READERS: dict[str, Callable[[Path], Iterator[Located]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
}
