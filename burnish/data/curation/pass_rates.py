"""How often each row of a file was answered right: from the completions of an evaluation, or from a run's journal.

Both call a row `NAME/INDEX`, its place in the file it was read from. Rows and tallies are put together by that place, and
where a completion tells the answer it was judged by, that must be the row's: completions of another file are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.yaml_text import parse_yaml
from burnish.data.files import READERS, Record, file_format, find_files, read_records
from burnish.data.row import Row
from burnish.data.row_formats import prompt_row, source_name, source_records
from burnish.data.tasks.registry import make_task
from burnish.run.run import read_visits
from burnish.run.run_directory import RunDirectory

NEVER_SAMPLED = "never sampled"


@dataclass(frozen=True)
class LocatedRow:
    """A row of a file as it stands there, and as burnish reads it."""

    where: str
    record: Record
    row: Row


@dataclass
class PassCount:
    """Right answers among those that were judged."""

    right: float = 0.0
    total: int = 0
    answer: str | None = None
    """The answer they were judged by, where that is known."""

    @property
    def rate(self) -> float:
        return self.right / self.total


def read_located_rows(source: Source, seed: int = 0) -> list[LocatedRow]:
    """Every row of a file, a plug-in or a task that has an end."""
    if source.task is None:
        located = enumerate(source_records(source, None))
        return [
            LocatedRow(where, record, prompt_row(record, where, source, index)) for index, (where, record) in located
        ]
    if source.limit is None:
        raise UserError(f"{source.task} is a generated task without end: there are no rows to choose from")
    task, split, name = make_task(source.task, source.options, seed), source.split or "train", source_name(source)
    rows = [replace(task.row(split, index), id=f"{name}/{split}/{index}") for index in range(source.limit)]
    return [LocatedRow(f"{name}, problem {index + 1}", task_record(row), row) for index, row in enumerate(rows)]


def task_record(row: Row) -> Record:
    """A row of a task as a record of a file that reads back the same."""
    return {"prompt": row.prompt, "answer": row.answer, "data_source": row.data_source, **row.extra}


def train_sources(run: Path) -> tuple[list[Source], int]:
    """The sources a run trains on, and its seed."""
    path = RunDirectory.open(run).config
    config = parse_yaml(path.read_text(), str(path))
    listed = config.get("data", {}).get("train") or []
    if not listed:
        raise UserError(f"{path} names no data.train: it is no run of `burnish train`")
    return [Source.model_validate(source) for source in listed], int(config.get("seed", 0))


# --- tallies -----------------------------------------------------------------------------------------------------------


def read_pass_counts(path: Path) -> dict[str, PassCount]:
    """The tally of each prompt by its id, of a run's folder or a file of completions."""
    return run_pass_counts(path) if path.is_dir() else completion_pass_counts(path)


def pass_count_files(path: Path) -> list[Path]:
    """The files the tallies are read from, which must be there."""
    if path.is_dir():
        read_visits(path)
        return [RunDirectory.open(path).journal / "events.jsonl"]
    return [completions_file(path)]


def completions_file(path: Path) -> Path:
    """A file that may be one of completions."""
    if not path.is_file():
        raise UserError(f"no such file: {path} (expected completions of `burnish eval`, or a run's folder)")
    if file_format(path) not in READERS:
        raise UserError(f"{path}: completions are .jsonl or .parquet, as `burnish eval` writes them")
    return path


def run_pass_counts(run: Path) -> dict[str, PassCount]:
    """Over all visits of a run, which the policy answered better and better: a prompt's rate is that of its history."""
    found: dict[str, PassCount] = {}
    for visit in read_visits(run):
        tally = found.setdefault(visit.prompt_id, PassCount())
        tally.right, tally.total = tally.right + visit.right, tally.total + visit.judged
    return found


def completion_pass_counts(path: Path) -> dict[str, PassCount]:
    """Of the samples of an evaluation; one that could not be judged does not count."""
    found: dict[str, PassCount] = {}
    for where, record in completions(path):
        if record["accuracy"] is not None:
            tally = found.setdefault(record["id"], PassCount(answer=record.get("answer")))
            if tally.answer != record.get("answer"):
                raise UserError(
                    f"{where}: {record['id']} has another answer than in an earlier line; the file is mixed"
                )
            tally.right, tally.total = tally.right + record["accuracy"], tally.total + 1
    return found


def completions(path: Path) -> Iterable[tuple[str, Record]]:
    """The lines of a file of completions, each with its place."""
    for where, record in read_records(str(completions_file(path))):
        missing = [name for name in ("id", "sample", "completion", "accuracy") if name not in record]
        if missing:
            raise UserError(
                f"{where}: no column {missing[0]!r}; it is no file of completions that `burnish eval` wrote"
            )
        yield where, record


# --- together ----------------------------------------------------------------------------------------------------------


def match_pass_counts(
    items: Sequence[LocatedRow], tallies: dict[str, PassCount], scores: Path
) -> list[PassCount | None]:
    """The tally of each row, None for one that was never judged; a tally that belongs to no row is an error."""
    if not any(tally.total for tally in tallies.values()):
        raise UserError(f"{scores}: not one answer was judged right or wrong, so rows have no pass rate")
    own, theirs = _prefix(items[0].row.id), {_prefix(id) for id in tallies}
    if own not in theirs and (len(theirs) > 1 or scores.is_dir()):
        raise UserError(f"{scores} knows rows of {', '.join(sorted(theirs))}, not of {own}")
    prefix = own if own in theirs else next(iter(theirs))  # an evaluation may have called the file otherwise
    found = {own + id.removeprefix(prefix): tally for id, tally in tallies.items() if _prefix(id) == prefix}
    strange = sorted(found.keys() - {item.row.id for item in items})
    if strange:
        raise UserError(f"{scores} has a row {strange[0]}, and {own} has none of that number: another file")
    for item in items:
        tally = found.get(item.row.id)
        if tally is not None and tally.answer is not None and tally.answer != str(item.row.answer):
            raise UserError(
                f"{item.where}: its answer is {item.row.answer!r}, but in {scores} it is {tally.answer!r}: these scores are of "
                "another file, or of one whose rows stood in another order"
            )
    tallied = [found.get(item.row.id) for item in items]
    return [tally if tally is not None and tally.total else None for tally in tallied]


def _prefix(id: str) -> str:
    """What an id calls the file it is a row of."""
    return id.rpartition("/")[0]


def rows_with_pass_counts(file: Path, scores: Path) -> tuple[list[LocatedRow], list[PassCount | None]]:
    """The rows of a file, each with its tally; a run says how its rows are read."""
    source, seed = source_in_run(scores, file) if scores.is_dir() else (Source(path=str(file)), 0)
    items = read_located_rows(source, seed)
    return items, match_pass_counts(items, read_pass_counts(scores), scores)


def run_sources(run: Path, file: Path | None, option: str) -> tuple[list[Source], int]:
    """What a run trained on, or of that the one file whose place now is given by an option; and the run's seed."""
    if file is not None:
        source, seed = source_in_run(run, file)
        return [source], seed
    sources, seed = train_sources(run)
    for path in [source.path for source in sources if source.path is not None]:
        try:
            find_files(path)
        except UserError as error:
            raise UserError(f"{error}; if the run's file lies elsewhere, name it with {option}") from error
    return sources, seed


def source_in_run(run: Path, file: Path) -> tuple[Source, int]:
    """The source of a run that is this file, with the file's place now; and the run's seed."""
    sources, seed = train_sources(run)
    for source in sources:
        if source.path is not None and Path(source.path).name == file.name:
            return source.model_copy(update={"path": str(file), "limit": None}), seed
    named = ", ".join(source_name(source) for source in sources)
    raise UserError(f"the run {run} was not trained on a file called {file.name} (its sources: {named})")
