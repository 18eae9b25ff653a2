"""`burnish data prepare`: converts a published data set to one parquet file with a manifest next to it.

The file depends only on the bytes of the source and on the options. Preparing twice gives the same bytes, and a file that is up to date is
left alone. The manifest has the checksums of source and output, the number of rows read and used, the reasons why rows were left out, and
the overlap with test sets.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.curation.decontamination import NGRAM_WORDS, Overlap, count_repeated, find_overlap
from burnish.data.curation.output_files import NUM_SHOWN, short_place, up_to_date_manifest, write_pair
from burnish.data.files import WHOLE_SPLIT, Record, choose_split, find_files, find_splits, read_file
from burnish.data.images import image_input
from burnish.data.published_datasets import (
    DatasetShape,
    get_shape,
    in_split,
    listed_rows,
    look_for_benchmark,
    to_verl_layout,
)
from burnish.data.published_example import UnusableRow
from burnish.run.durable_files import checksums, sha256

FORMAT = 1
"""Version of what is written. A file of another version is prepared again."""


@dataclass(frozen=True)
class PrepareOptions:
    """Options of `burnish data prepare`."""

    name: str
    source: str
    split: str | None = None
    config: str | None = None
    """The configuration of a snapshot with several."""
    against: tuple[str, ...] = ()
    """Test sets to compare with: a path, or `NAME:PATH` for another shape."""
    ngram: int = NGRAM_WORDS
    drop: str | None = None
    """Which overlapping rows to leave out: `exact` or `any`; None leaves none out."""


@dataclass
class PreparedRows:
    """The usable rows of a source, and why others were dropped."""

    records: list[Record] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    files: list[Path] = field(default_factory=list)

    @property
    def questions(self) -> list[str]:
        return [record["extra_info"]["question"] for record in self.records]


def prepare(wanted: PrepareOptions, out: Path, force: bool = False) -> tuple[dict[str, Any], bool]:
    """Write the parquet file and its manifest; return the manifest and whether anything was written."""
    if out.suffix != ".parquet":
        raise UserError(f"{out}: the output should be a .parquet file")
    shape, files = get_shape(wanted.name), source_files(wanted)
    tests = find_test_sets(wanted, files)
    asked = _output_key(wanted, files, tests)
    if (up_to_date := up_to_date_manifest(out, asked, force)) is not None:
        return up_to_date, False
    rows = read_source(wanted, files)
    repeated, overlaps = count_repeated(rows.questions), []
    for label, test_files in tests:
        overlaps.append(remove_overlap(rows, wanted, label, test_files))
    if not rows.records:
        raise UserError(f"{wanted.source}: no row is left; left out: {dict(rows.dropped)}")
    content = parquet_bytes(rows.records)
    manifest = {
        "asked": asked,
        "output": {"file": out.name, "sha256": hashlib.sha256(content).hexdigest(), "rows": len(rows.records)},
        "rows_read": len(rows.records) + sum(rows.dropped.values()),
        "left_out": dict(sorted(rows.dropped.items())),
        "repeated_questions": repeated,
        "overlap": overlaps,
        "verifier": shape.verifier,
        "recipe": recipe_lines(shape, out.name),
    }
    write_pair(out, content, manifest)
    return manifest, True


# --- reading ---------------------------------------------------------------------------------------------------------


def source_files(wanted: PrepareOptions) -> list[Path]:
    """The files of the source: one file, a glob, or a folder of `datasets` with the requested split."""
    return _files(wanted.source, wanted.name, wanted.split, wanted.config)


def _files(source: str, name: str, split: str | None, config: str | None) -> list[Path]:
    if Path(source).is_dir():
        splits = find_splits(Path(source), config)
        if get_shape(name).splits and list(splits) == [WHOLE_SPLIT]:
            return splits[WHOLE_SPLIT]  # the shape can tell the splits of one file apart
        return choose_split(splits, split, source)[1]
    if config is not None:
        raise UserError(f"--config chooses a folder of a snapshot, but {source} is a file")
    if split is not None and split not in get_shape(name).splits:
        raise UserError(f"--split {split}: each file of {name} is one split; remove the option")
    return find_files(source)


def find_test_sets(wanted: PrepareOptions, files: Sequence[Path]) -> list[tuple[str, list[Path]]]:
    """The test sets to compare with, each as its shape and files.

    These are the given ones, the test split of a source folder, and, in the folder of a source file, benchmarks that the data must not
    overlap.
    """
    found: list[tuple[str, list[Path]]] = []
    for text in wanted.against:
        head, _, rest = text.partition(":")
        name, path = (head, rest) if rest and not Path(text).exists() else (wanted.name, text)
        splits = find_splits(Path(path)) if Path(path).is_dir() else {}
        found.append((name, splits["test"] if "test" in splits else _files(path, name, None, None)))
    if Path(wanted.source).is_dir():
        splits = find_splits(Path(wanted.source), wanted.config)
        if "test" in splits:
            found.append((wanted.name, splits["test"]))
    else:
        beside = ((name, look_for_benchmark(name, files[0].parent)) for name in get_shape(wanted.name).tests)
        found += [(name, find_files(path)) for name, path in beside if path is not None]
    # A test set is not compared with itself, but one split of a file is compared with the test split of that file.
    is_part = wanted.split != "test" and wanted.split in get_shape(wanted.name).splits
    kept = [(name, paths) for name, paths in found if is_part or not _same(paths, files)]
    return [test for index, test in enumerate(kept) if test not in kept[:index]]


def _same(paths: Sequence[Path], others: Sequence[Path]) -> bool:
    return [path.resolve() for path in paths] == [path.resolve() for path in others]


def read_source(wanted: PrepareOptions, files: Sequence[Path]) -> PreparedRows:
    """Read all usable rows, and count the others by reason."""
    rows, shape = PreparedRows(files=list(files)), get_shape(wanted.name)
    split = wanted.split if wanted.split in shape.splits else None
    for path in files:
        for where, record in listed_rows(read_file(path, shape.csv_header), shape):
            if not in_split(record, shape, split):
                rows.dropped["of another split"] += 1
                continue
            try:
                rows.records.append(
                    _with_absolute_paths(to_verl_layout(record, where, wanted.name), where, path.parent)
                )
                rows.places.append(where)
            except UnusableRow as error:
                rows.dropped[str(error)] += 1
    return rows


def _with_absolute_paths(record: Record, where: str, folder: Path) -> Record:
    """A record whose images are bytes, or paths that hold in any folder."""
    if "images" not in record:
        return record
    found = [image_input(image, f"{where}: images[{index}]", folder) for index, image in enumerate(record["images"])]
    images = [
        {"bytes": None, "path": str(image.content)}
        if isinstance(image.content, Path)
        else {"bytes": image.content, "path": None}
        for image in found
    ]
    return {**record, "images": images}


# --- overlap ---------------------------------------------------------------------------------------------------------


def remove_overlap(rows: PreparedRows, wanted: PrepareOptions, name: str, files: Sequence[Path]) -> dict[str, Any]:
    """Report the overlap of the rows with one test set, and remove overlapping rows if `drop` says so."""
    test = read_source(PrepareOptions(name, "", "test" if "test" in get_shape(name).splits else None), files)
    matches = find_overlap(rows.questions, test.questions, wanted.ngram)
    exact = [match for match in matches if match.words is None]
    drop = {"exact": exact, "any": matches}.get(wanted.drop or "", [])
    report = {
        "with": ", ".join(path.name for path in files),
        "test_rows": len(test.records),
        "exact": len(exact),
        f"{wanted.ngram}_words": len(matches) - len(exact),
        "left_out": len(drop),
        "first": [_shown(match, rows, test) for match in matches[:NUM_SHOWN]],
    }
    gone = {match.train for match in drop}
    rows.dropped.update({f"overlaps {report['with']}": len(gone)} if gone else {})
    rows.records = [record for index, record in enumerate(rows.records) if index not in gone]
    rows.places = [place for index, place in enumerate(rows.places) if index not in gone]
    return report


def _shown(match: Overlap, rows: PreparedRows, test: PreparedRows) -> dict[str, str]:
    train, held_out = short_place(rows.places[match.train]), short_place(test.places[match.test])
    return {"row": train, "test_row": held_out, "shared": match.words or "the whole question"}


# --- writing ---------------------------------------------------------------------------------------------------------


def parquet_bytes(records: Sequence[Record]) -> bytes:
    """The bytes of the file; the same rows give the same bytes."""
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    numbered = [{**r, "extra_info": {**r["extra_info"], "index": index}} for index, r in enumerate(records)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(numbered), sink, compression="zstd")
    return bytes(sink.getvalue())


def recipe_lines(shape: DatasetShape, file: str) -> str:
    """The lines of a recipe for training on the file with its verifier."""
    return f"data:\n  train: {{path: {file}}}\nreward:\n  parts: {shape.verifier}\n"


def _output_key(
    wanted: PrepareOptions, files: Sequence[Path], tests: Sequence[tuple[str, list[Path]]]
) -> dict[str, Any]:
    """Everything that determines the output, without the names of folders."""
    options = {key: value for key, value in asdict(wanted).items() if key not in ("source", "against")}
    return {
        "format": FORMAT,
        **options,
        "source": checksums(files),
        "against": [{"name": name, "file": path.name, "sha256": sha256(path)} for name, some in tests for path in some],
    }
