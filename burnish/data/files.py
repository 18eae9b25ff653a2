"""Reads records from jsonl, json and csv files (also gzipped), parquet and arrow files, and folders of Hugging Face `datasets`.

A record is a dictionary of plain Python values. It comes with its place (`train.jsonl:17`, `train.parquet, row 3`), which every error
about it names, so that a bad row can be found with an editor.

A folder of `datasets` has one of two layouts. `save_to_disk` writes `dataset_dict.json` with a folder per split, or one data set with
`state.json`. A snapshot of a hub repository has the split in the names of its data files (`data/train-00000-of-00002.parquet`,
`main/test.jsonl`), below a folder that may be one of several configurations.
"""

from __future__ import annotations

import csv
import glob
import gzip
import io
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, did_you_mean, hub_dataset_hint, unknown_name_error
from burnish.config.yaml_text import check_file_name, parse_json, read_json_object

Record = dict[str, Any]
LocatedRecord = tuple[str, Record]
"""The place of a record, and the record."""
GZIP = ".gz"
TEXT_FORMATS = (".jsonl", ".json", ".csv")
SPLIT = re.compile(r"(?:^|[-_./])(train|training|test|validation|valid|val|dev)(?=[-_./]|$)", re.IGNORECASE)
SPLIT_ALIASES = {"training": "train", "valid": "validation", "val": "validation", "dev": "validation"}
WHOLE_SPLIT = "all"
"""The split name of data that is not divided."""


def read_records(pattern: str, base: Path | None = None, csv_header: Sequence[str] = ()) -> Iterator[LocatedRecord]:
    """Read all records of the files that a path or glob names, in sorted order of the files."""
    for path in find_files(pattern, base):
        yield from read_file(path, csv_header)


def read_file(path: Path, csv_header: Sequence[str] = ()) -> Iterator[LocatedRecord]:
    """Read all records of a file. `csv_header` are the columns of csv files without a line of names.

    A record of such a file also has the name of the file without its suffix, in the column `file`.
    """
    if not csv_header or file_format(path) != ".csv" or _has_header(path, csv_header):
        yield from READERS[file_format(path)](path)
        return
    for where, record in _read_csv(path, csv_header):
        yield where, {**record, "file": path.name.partition(".")[0]}


def _has_header(path: Path, names: Sequence[str]) -> bool:
    """Whether the first line of a csv file has one of these names."""
    first = next(csv.reader(io.StringIO(_read_text(path))), [])
    return any(name.casefold() in (field.strip().casefold() for field in first) for name in names if len(name) > 1)


def find_files(pattern: str, base: Path | None = None) -> list[Path]:
    """Find the files that a path or glob names, relative to `base` first and then to the working directory."""
    roots = [pattern] if base is None or Path(pattern).is_absolute() else [str(base / pattern), pattern]
    for root in roots:
        if Path(root).is_file():
            return [_checked_format(Path(root))]
        found = sorted(Path(p) for p in glob.glob(root, recursive=True) if Path(p).is_file())
        if found and glob.has_magic(root):
            return [_checked_format(p) for p in found]
    if any(Path(root).is_dir() for root in roots):
        raise UserError(f"{pattern} is a directory; name the files in it, such as {pattern.rstrip('/')}/*.parquet")
    if glob.has_magic(pattern):
        raise UserError(f"no file matches {pattern} (looked at {', '.join(roots)})")
    parent = Path(roots[0]).parent
    neighbours = [p.name for p in parent.iterdir()] if parent.is_dir() else []
    near = did_you_mean(Path(pattern).name, neighbours)
    raise UserError(
        f"no such file: {' or '.join(roots)}{near or hub_dataset_hint(pattern, roots=(base or Path(), Path()))}"
    )


def file_format(path: Path) -> str:
    """The suffix that tells how a file is read; text formats may be gzipped (`.jsonl.gz`)."""
    return Path(path.stem).suffix if path.suffix == GZIP and Path(path.stem).suffix in TEXT_FORMATS else path.suffix


def _checked_format(path: Path) -> Path:
    if file_format(path) not in READERS:
        raise UserError(
            f"{path}: cannot read {path.suffix or 'a file without a suffix'}; expected {', '.join(READERS)}"
        )
    return path


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == GZIP else data).decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: not a readable gzip file: {error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _read_jsonl(path: Path) -> Iterator[LocatedRecord]:
    # Not str.splitlines: it also breaks at U+2028 and similar characters, which are legal inside a JSON string.
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        if line.strip():
            where = f"{path}:{number}"
            yield where, _checked_object(parse_json(line, where), where)


def _read_json(path: Path) -> Iterator[LocatedRecord]:
    """Read a list of objects or, as some data sets have under this suffix, one object per line, or one object over several lines."""
    text = _read_text(path)
    if text.split("\n", 1)[0].strip() == "{":
        yield str(path), _checked_object(parse_json(text, str(path)), str(path))
        return
    if not text.lstrip().startswith("["):
        yield from _read_jsonl(path)
        return
    for number, record in enumerate(parse_json(text, str(path)), start=1):
        where = f"{path}, item {number}"
        yield where, _checked_object(record, where)


def _read_parquet(path: Path) -> Iterator[LocatedRecord]:
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


def _read_arrow(path: Path) -> Iterator[LocatedRecord]:
    """Read an Arrow stream, as Hugging Face `datasets` saves it, or an Arrow file of another writer."""
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
    """The error for a damaged file: Arrow's message without the lines about its own source."""
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return UserError(f"{path}{f', after row {number}' if number else ''}: not a readable {kind} file: {reason}")


def _read_csv(path: Path, header: Sequence[str] = ()) -> Iterator[LocatedRecord]:
    reader = csv.DictReader(io.StringIO(_read_text(path)), header or None, strict=True)
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


def _checked_object(record: Any, where: str) -> Record:
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with named columns, got {type(record).__name__}")
    return record


READERS: dict[str, Callable[[Path], Iterator[LocatedRecord]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
    ".csv": _read_csv,
}


# --- folders of Hugging Face `datasets` ------------------------------------------------------------------------------


def find_splits(folder: Path, config: str | None = None) -> dict[str, list[Path]]:
    """The files of each split in a folder, in order."""
    folder = folder / config if config else folder
    if not folder.is_dir():
        raise UserError(f"no such folder: {folder}")
    if (folder / "dataset_dict.json").is_file():
        names = _list_field(folder / "dataset_dict.json", "splits")
        return {name: _saved_files(folder / check_file_name(name, folder / "dataset_dict.json")) for name in names}
    if (folder / "state.json").is_file():
        return {WHOLE_SPLIT: _saved_files(folder)}
    found: dict[str, list[Path]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and file_format(p) in READERS):
        inside = path.relative_to(folder)
        if not any(part.startswith(".") for part in inside.parts) and _is_data(inside):
            found.setdefault(_split_name(inside), []).append(path)
    if not found:
        raise UserError(f"{folder} has no data files ({', '.join(READERS)})")
    for name, files in found.items():
        _check_one_configuration(name, files, folder)
    return found


def choose_split(splits: dict[str, list[Path]], split: str | None, where: str) -> tuple[str, list[Path]]:
    """The requested split, or the only one."""
    if split is None and len(splits) == 1:
        return next(iter(splits.items()))
    if split is None:
        raise UserError(f"{where} has the splits {', '.join(splits)}; choose one with --split")
    if split not in splits:
        raise unknown_name_error(f"split of {where}:", split, splits)
    return split, splits[split]


def _saved_files(folder: Path) -> list[Path]:
    """The files of one saved data set, in the order of its state file."""
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(f"{folder} is not a saved data set: it has no state.json")
    entries = _list_field(state, "_data_files")
    return [folder / check_file_name(e.get("filename") if isinstance(e, dict) else e, state) for e in entries]


def _list_field(path: Path, name: str) -> list[Any]:
    """A list in one of the JSON files of a saved data set."""
    found = read_json_object(path).get(name)
    if not isinstance(found, list):
        raise UserError(f"{path} is damaged: {name} should be a list, not {type(found).__name__}")
    return found


def _is_data(path: Path) -> bool:
    """Whether a file is data: a json file without a split in its name may describe the repository."""
    return file_format(path) != ".json" or SPLIT.search(str(path)) is not None


def _split_name(path: Path) -> str:
    found = SPLIT.findall(str(path.with_name(path.name.partition(".")[0])))
    return SPLIT_ALIASES.get(found[-1].lower(), found[-1].lower()) if found else WHOLE_SPLIT


def _check_one_configuration(name: str, files: list[Path], folder: Path) -> None:
    parents = sorted({str(file.parent.relative_to(folder)) for file in files})
    if len(parents) > 1:
        raise UserError(
            f"{folder} has the split {name} in several folders ({', '.join(parents)}); choose one with --config"
        )
