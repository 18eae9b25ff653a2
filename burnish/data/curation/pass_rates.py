"""Pass rates: how often each row of a file was answered right, from the completions of an evaluation or from a run's journal.

Both name a row `NAME/INDEX`, by its index in the file. Rows and pass counts are matched by that index. If a completion states the answer
that it was judged by, it must be the row's answer; completions of another file are an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.yaml_text import parse_yaml
from burnish.data.files import READERS, Record, file_format, find_files, read_records
from burnish.data.row import Row, answer_text
from burnish.data.row_formats import prompt_row, source_name, source_records
from burnish.data.tasks.registry import make_task
from burnish.run.run import read_visits
from burnish.run.run_directory import RunDirectory

NEVER_SAMPLED = "never sampled"


@dataclass(frozen=True)
class LocatedRow:
    """A row as it is in the file (`record`), and as burnish reads it (`row`)."""

    where: str
    record: Record
    row: Row


@dataclass
class PassCount:
    """Number of right answers among the judged ones."""

    right: float = 0.0
    total: int = 0
    answer: str | None = None
    """The answer that they were judged by, if known."""

    @property
    def rate(self) -> float:
        return self.right / self.total


def read_located_rows(source: Source, seed: int = 0) -> list[LocatedRow]:
    """Read every row of a file, a plug-in or a task with a limit."""
    if source.task is None:
        located = enumerate(source_records(source, None))
        return [
            LocatedRow(where, record, prompt_row(record, where, source, index)) for index, (where, record) in located
        ]
    if source.limit is None:
        raise UserError(f"{source.task} is an endless generated task: there are no rows to choose from")
    task, split, name = make_task(source.task, source.options, seed), source.split or "train", source_name(source)
    rows = [replace(task.row(split, index), id=f"{name}/{split}/{index}") for index in range(source.limit)]
    return [LocatedRow(f"{name}, problem {index + 1}", task_record(row), row) for index, row in enumerate(rows)]


def task_record(row: Row) -> Record:
    """A row of a task as a record that reads back as the same row."""
    return {"prompt": row.prompt, "answer": row.answer, "data_source": row.data_source, **row.extra}


def train_sources(run: Path) -> tuple[list[Source], int]:
    """The sources a run trains on, and its seed."""
    path = RunDirectory.open(run).config
    config = parse_yaml(path.read_text(), str(path))
    listed = config.get("data", {}).get("train") or []
    if not listed:
        raise UserError(f"{path} names no data.train: it is not a run of `burnish train`")
    return [Source.model_validate(source) for source in listed], int(config.get("seed", 0))


# --- pass counts -------------------------------------------------------------------------------------------------------


def read_pass_counts(path: Path) -> dict[str, PassCount]:
    """The pass count of each prompt by its id, from a run's folder or a file of completions."""
    return run_pass_counts(path) if path.is_dir() else completion_pass_counts(path)


def pass_count_files(path: Path) -> list[Path]:
    """The files that the pass counts are read from; they must exist."""
    if path.is_dir():
        read_visits(path)
        return [RunDirectory.open(path).journal / "events.jsonl"]
    return [completions_file(path)]


def completions_file(path: Path) -> Path:
    """Check that a file of completions exists and has a known format."""
    if not path.is_file():
        raise UserError(f"no such file: {path} (expected completions of `burnish eval`, or a run's folder)")
    if file_format(path) not in READERS:
        raise UserError(f"{path}: completions are .jsonl or .parquet, as `burnish eval` writes them")
    return path


def run_pass_counts(run: Path) -> dict[str, PassCount]:
    """Pass counts over all visits of a run. The policy changes meanwhile, so the rate of a prompt averages over its history."""
    found: dict[str, PassCount] = {}
    for visit in read_visits(run):
        count = found.setdefault(visit.prompt_id, PassCount())
        count.right, count.total = count.right + visit.right, count.total + visit.judged
    return found


def completion_pass_counts(path: Path) -> dict[str, PassCount]:
    """Pass counts of the samples of an evaluation. A sample without a verdict does not count."""
    found: dict[str, PassCount] = {}
    for where, record in completions(path):
        if record["accuracy"] is not None:
            count = found.setdefault(record["id"], PassCount(answer=record.get("answer")))
            if count.answer != record.get("answer"):
                raise UserError(
                    f"{where}: {record['id']} has another answer than in an earlier line; the file mixes several data sets"
                )
            count.right, count.total = count.right + record["accuracy"], count.total + 1
    return found


def completions(path: Path) -> Iterable[tuple[str, Record]]:
    """The records of a file of completions, each with its place."""
    for where, record in read_records(str(completions_file(path))):
        missing = [name for name in ("id", "sample", "completion", "accuracy") if name not in record]
        if missing:
            raise UserError(f"{where}: no column {missing[0]!r}; this is not a completions file of `burnish eval`")
        yield where, record


# --- matching rows with pass counts ------------------------------------------------------------------------------------


def match_pass_counts(
    items: Sequence[LocatedRow], counts: dict[str, PassCount], scores: Path
) -> list[PassCount | None]:
    """The pass count of each row; None if it was never judged. A pass count without a row is an error."""
    if not any(count.total for count in counts.values()):
        raise UserError(f"{scores}: no answer was judged right or wrong, so rows have no pass rate")
    own, names = _prefix(items[0].row.id), {_prefix(id) for id in counts}
    if own not in names and (len(names) > 1 or scores.is_dir()):
        raise UserError(f"{scores} has rows of {', '.join(sorted(names))}, not of {own}")
    prefix = own if own in names else next(iter(names))  # an evaluation may have used another name for the file
    found = {own + id.removeprefix(prefix): count for id, count in counts.items() if _prefix(id) == prefix}
    unknown = sorted(found.keys() - {item.row.id for item in items})
    if unknown:
        raise UserError(
            f"{scores} has a row {unknown[0]}, and {own} has no row of that number: the scores are of another file"
        )
    for item in items:
        count = found.get(item.row.id)
        if count is not None and count.answer is not None and count.answer != answer_text(item.row.answer):
            raise UserError(
                f"{item.where}: its answer is {item.row.answer!r}, but in {scores} it is {count.answer!r}: the scores are of "
                "another file, or its rows were in another order"
            )
    matched = [found.get(item.row.id) for item in items]
    return [count if count is not None and count.total else None for count in matched]


def _prefix(id: str) -> str:
    """The name of the file in a row id."""
    return id.rpartition("/")[0]


def rows_with_pass_counts(file: Path, scores: Path) -> tuple[list[LocatedRow], list[PassCount | None]]:
    """The rows of a file and their pass counts. If `scores` is a run, its config says how rows are read."""
    source, seed = source_in_run(scores, file) if scores.is_dir() else (Source(path=str(file)), 0)
    items = read_located_rows(source, seed)
    return items, match_pass_counts(items, read_pass_counts(scores), scores)


def run_sources(run: Path, file: Path | None, option: str) -> tuple[list[Source], int]:
    """The training sources of a run, or only the one that `file` is now the path of; and the run's seed."""
    if file is not None:
        source, seed = source_in_run(run, file)
        return [source], seed
    sources, seed = train_sources(run)
    for path in [source.path for source in sources if source.path is not None]:
        try:
            find_files(path)
        except UserError as error:
            raise UserError(f"{error}; if the file has moved, give its path with {option}") from error
    return sources, seed


def source_in_run(run: Path, file: Path) -> tuple[Source, int]:
    """The source of a run with this file name, with its current path; and the run's seed."""
    sources, seed = train_sources(run)
    for source in sources:
        if source.path is not None and Path(source.path).name == file.name:
            return source.model_copy(update={"path": str(file), "limit": None}), seed
    named = ", ".join(source_name(source) for source in sources)
    raise UserError(f"the run {run} was not trained on a file called {file.name} (its sources: {named})")
