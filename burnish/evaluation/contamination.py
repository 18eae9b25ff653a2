"""`burnish eval --contamination`: which questions of a test set the training data has, and the accuracy with and without them.

Questions are compared as in `burnish data decontaminate`: by their words, without case and punctuation. A question overlaps if it is a
training question, or shares a run of 13 words with one (Brown et al. 2020, 2005.14165, appendix C). Only the files are compared that the
command names, or the configs of a run and of the runs that its model came from. What the first of them started from had read is not known,
and the result says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.config.yaml_text import parse_yaml
from burnish.data.curation.decontamination import (
    NGRAM_WORDS,
    find_overlap,
    question_of_record,
    read_test_questions,
    resolve_test_set,
)
from burnish.data.curation.output_files import NUM_SHOWN, short_place
from burnish.data.curation.row_selection import comparable_question
from burnish.data.files import find_files
from burnish.data.row_formats import read_rows, source_name, source_records
from burnish.evaluation.result import Row, aligned_lines, by_question, estimate_json, interval_text, judged_rows
from burnish.evaluation.statistics import Estimate, mean_at_k

TRAINING_SECTIONS = (
    ("data", "train"),
    ("data", "demonstrations"),
    ("warm_start", "data"),
    ("sft", "data"),
    ("preference", "data"),
    ("reward_model", "data"),
)
"""Where the configs of runs name their training data."""


@dataclass
class TrainingQuestions:
    """The questions of training data, each with its place, and the sources that have none to compare."""

    questions: list[tuple[str, str]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    """Sources without rows in a file, each with the reason."""
    runs: list[str] = field(default_factory=list)
    """The runs whose configs were read: one, those that its model came from, and so on."""
    origins: list[str] = field(default_factory=list)
    """Models that these runs started from and that are no runs here. What they had read is not known."""

    @property
    def chain(self) -> str | None:
        """Return which runs were followed and where that ended; None if files were named."""
        if not self.runs:
            return None
        before = f"; what {', '.join(self.origins)} had read before is not known" if self.origins else ""
        return f"the training data of {', '.join(self.runs)}{before}"


def training_questions(model: Path, paths: Sequence[str], folder: Path | None) -> TrainingQuestions:
    """The questions of the named files, or of the run that a model comes from.

    A path is a file, a glob, `SHAPE:FILE`, or the folder of a run.
    """
    found = TrainingQuestions()
    if not paths:
        run = run_of_model(model)
        if run is None:
            raise UserError(
                f"--contamination: {model} is no run that names its training data; name the files: --contamination train.jsonl"
            )
        _add_run(found, run)
    for text in paths:
        if (Path(text) / "config.yaml").is_file():
            _add_run(found, Path(text))
        else:
            name, shape, files = resolve_test_set(text, folder)
            found.questions += read_test_questions(name, shape, files)
            found.sources.append(text)
    return found


def run_of_model(model: Path) -> Path | None:
    """The run that a model directory is, or is a checkpoint of; None for any other directory."""
    folders = (model, model.resolve().parent.parent) if model.resolve().parent.name == "checkpoints" else (model,)
    return next((folder for folder in folders if (folder / "config.yaml").is_file()), None)


def _add_run(found: TrainingQuestions, run: Path) -> None:
    """Add the data of a run, of the runs that its model came from, and so on to the first."""
    waiting, seen = [run], set[Path]()
    while waiting:
        one = waiting.pop(0)
        if one.resolve() in seen:
            continue
        seen.add(one.resolve())
        path = one / "config.yaml"
        config = parse_yaml(path.read_text(encoding="utf-8"), str(path)) or {}
        _add_sources(found, path, config, is_first=one is run)
        found.runs.append(str(one))
        for start in _starts(config):
            before = run_of_model(Path(start))
            if before is not None:
                waiting.append(before)
            elif start not in found.origins:
                found.origins.append(start)


def _starts(config: Mapping[str, Any]) -> list[str]:
    """The models that a run started from: an adapter, and the model below it. None for a model with random weights."""
    model = config.get("model") or {}
    return [model[key] for key in ("adapter", "path") if model.get(key) is not None]


def _add_sources(found: TrainingQuestions, path: Path, config: Mapping[str, Any], is_first: bool) -> None:
    """Add the data that a config names. The run that was asked for must name some."""
    listed = [source for section, key in TRAINING_SECTIONS for source in (config.get(section) or {}).get(key) or []]
    if not listed and is_first:
        raise UserError(f"{path} names no training data; name the files: --contamination train.jsonl")
    if not listed:
        found.not_compared.append(f"{path} names no training data")
    for source in map(Source.model_validate, listed):
        if source.task is not None:
            found.not_compared.append(f"{source.task} is a generated task, so its training rows are in no file")
            continue
        if source.path is not None:
            _check_files(source.path)
        found.questions += _questions_of_source(source)
        found.sources.append(source.path or source_name(source))


def _check_files(path: str) -> None:
    try:
        find_files(path)
    except UserError as error:
        raise UserError(f"{error}; if the training data has moved, name it: --contamination FILE") from error


def _questions_of_source(source: Source) -> Iterator[tuple[str, str]]:
    """The question of every row that a run reads from a file or a plug-in."""
    for where, record in source_records(source, None, Counter()):
        asked = record.get(source.prompt_key) if "prompt" not in record else None
        named = {"question": asked} if isinstance(asked, str) else record
        yield where, question_of_record(where, named)


# --- the overlap of one test set -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contamination:
    """The questions of a test set that training data has, and the accuracy on each side."""

    num_questions: int
    exact: tuple[str, ...]
    """Ids of the questions that are training questions."""
    shared: tuple[str, ...]
    """Ids of the other questions that share a run of words with a training question."""
    clean: tuple[int, Estimate | None]
    """The number of questions without overlap that were judged, and their accuracy."""
    overlapping: tuple[int, Estimate | None]
    first: tuple[dict[str, str], ...]
    """Examples: the question, the training row, and the words that they share."""
    training: TrainingQuestions

    @property
    def num_overlapping(self) -> int:
        """Number of questions with an overlap of either kind."""
        return len(self.exact) + len(self.shared)


def find_contamination(
    rows: Sequence[Row], source: Source, training: TrainingQuestions, base: Path | None = None
) -> Contamination | str:
    """Compare the questions of completions with training questions; or the reason why they cannot be compared."""
    if source.task is not None:
        return f"{source.task} generates its problems, and its training and held-out problems never overlap"
    if not training.questions:
        chain = [] if training.chain is None else [f"looked at {training.chain}"]
        return "; ".join([*dict.fromkeys(training.not_compared), *chain])
    asked = {row.id: comparable_question(row) for row in read_rows(source, base, Counter())}
    ids = list(dict.fromkeys(row["id"] for row in rows))
    missing = [one for one in ids if one not in asked]
    if missing:
        raise UserError(
            f"{source.path or source_name(source)} has no row {missing[0]}; it is not the file of the completions"
        )
    matches = find_overlap([asked[one] for one in ids], [question for _, question in training.questions], NGRAM_WORDS)
    overlaps = {ids[match.train] for match in matches}
    groups = {
        side: [[row["accuracy"] for row in group] for group in by_question(judged_rows(part)).values()]
        for side, part in (
            ("clean", [row for row in rows if row["id"] not in overlaps]),
            ("overlapping", [row for row in rows if row["id"] in overlaps]),
        )
    }
    measured = {side: (len(group), mean_at_k(group) if group else None) for side, group in groups.items()}
    return Contamination(
        num_questions=len(ids),
        exact=tuple(ids[match.train] for match in matches if match.words is None),
        shared=tuple(ids[match.train] for match in matches if match.words is not None),
        clean=measured["clean"],
        overlapping=measured["overlapping"],
        first=tuple(
            {
                "question": ids[match.train],
                "training_row": short_place(training.questions[match.test][0]),
                "shared": match.words or "the whole question",
            }
            for match in matches[:NUM_SHOWN]
        ),
        training=training,
    )


def contamination_text(found: Contamination | str) -> str:
    """Return the lines that the command prints."""
    if isinstance(found, str):
        return aligned_lines([("overlap", f"not compared: {found}")])
    lines = [
        (
            "overlap",
            f"{found.num_overlapping:,} of {found.num_questions:,} questions overlap with the training data "
            f"({len(found.training.questions):,} rows): {len(found.exact):,} the same, {len(found.shared):,} share {NGRAM_WORDS} words",
        )
    ]
    for name, (count, estimate) in (("  clean", found.clean), ("  overlapping", found.overlapping)):
        if estimate is not None:
            lines.append((name, f"{interval_text(estimate)}  {count:,} questions"))
    lines += [("", f"{one['question']} ~ {one['training_row']}: {one['shared']}") for one in found.first]
    lines += [("", f"not compared: {reason}") for reason in dict.fromkeys(found.training.not_compared)]
    lines += [] if found.training.chain is None else [("", f"compared with {found.training.chain}")]
    return aligned_lines(lines)


def contamination_json(found: Contamination | str) -> dict[str, Any]:
    """Return what the result file has under `contamination`."""
    if isinstance(found, str):
        return {"not_compared": [found]}

    def side(count: int, estimate: Estimate | None) -> dict[str, Any]:
        return {"num_questions": count, **({} if estimate is None else estimate_json(estimate))}

    return {
        "training": found.training.sources,
        "runs": found.training.runs,
        "started_from": found.training.origins,
        "training_rows": len(found.training.questions),
        "not_compared": list(dict.fromkeys(found.training.not_compared)),
        "words": NGRAM_WORDS,
        "num_questions": found.num_questions,
        "exact": list(found.exact),
        "shared": list(found.shared),
        "clean": side(*found.clean),
        "overlapping": side(*found.overlapping),
        "first": list(found.first),
    }
