"""`burnish data decontaminate`: drops rows whose question is in a test set, or shares a run of words with one of its questions.

Texts are compared as words, without case and punctuation. A common run of 13 words counts as contamination, as for GPT-3 (Brown et al.
2020, 2005.14165, appendix C).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.curation.output_files import (
    NUM_SHOWN,
    KeptRows,
    ProgressReport,
    no_progress,
    short_place,
    write_output,
)
from burnish.data.files import Record, find_files, read_file, read_records
from burnish.data.images import content_text
from burnish.data.math_datasets import strip_format_request
from burnish.data.published_datasets import (
    BENCHMARKS,
    find_benchmark_files,
    get_benchmark,
    get_shape,
    in_split,
    split_shape,
    to_verl_layout,
)
from burnish.data.published_example import UnusableRow, question_of
from burnish.data.row import ROLES
from burnish.run.durable_files import checksums

NGRAM_WORDS = 13
WORD = re.compile(r"\w+")


def decontaminate(
    file: Path,
    out: Path,
    against: tuple[str, ...],
    ngram: int = NGRAM_WORDS,
    folder: Path | None = None,
    force: bool = False,
    report: ProgressReport = no_progress,
) -> tuple[dict[str, Any], bool]:
    """Write the rows that overlap none of the test sets. Each test set is a benchmark's name, a file, or `SHAPE:FILE`."""
    if ngram < 2:
        raise UserError(f"--ngram {ngram}: expected 2 words or more")
    if not against:
        raise UserError("--against is missing: name the benchmark or the file of a test set")
    tests = [resolve_test_set(text, folder) for text in against]
    compared = [{"name": name, **entry} for name, _, files in tests for entry in checksums(files)]
    asked = {
        "command": "decontaminate",
        "ngram": ngram,
        "source": checksums(find_files(str(file))),
        "against": compared,
    }
    return write_output(out, asked, lambda say: _rows_without_overlap(file, tests, ngram, say), force, report)


def resolve_test_set(text: str, folder: Path | None) -> tuple[str, str | None, list[Path]]:
    """The name of a test set, the shape of its rows if it has one, and its files."""
    if text in BENCHMARKS:
        return text, get_benchmark(text).shape, find_benchmark_files(text, folder)
    shape, path = split_shape(text)
    files = find_files(path)
    return shape or files[0].name, shape, files


def read_test_questions(name: str, shape: str | None, files: list[Path]) -> list[tuple[str, str]]:
    """The questions of a test set, each with its place."""
    split = BENCHMARKS[name].split if name in BENCHMARKS else None
    header = () if shape is None else get_shape(shape).csv_header
    located = [located for file in files for located in read_file(file, header)]
    if shape is not None:
        located = [(where, record) for where, record in located if in_split(record, get_shape(shape), split)]
    return [(where, question_of_record(where, record, shape)) for where, record in located]


def question_of_record(where: str, record: Record, shape: str | None = None) -> str:
    """The question of a row of any kind: for rollouts, supervised or preference data, also without an answer."""
    if shape is not None:
        with suppress(UnusableRow):
            return str(to_verl_layout(record, where, shape)["extra_info"]["question"])
    info = record.get("extra_info")
    if isinstance(info, dict) and isinstance(info.get("question"), str):
        return str(info["question"])
    for messages in (record.get(name) for name in ("messages", "prompt", "conversations", "context_messages")):
        if isinstance(messages, list):
            return strip_format_request("\n".join(map(_user_text, messages)))
    if isinstance(record.get("instruction"), str):  # Alpaca: `input` is what the instruction is about
        return strip_format_request("\n".join(filter(None, (record["instruction"], record.get("input")))))
    try:
        return strip_format_request(question_of(record))
    except (UnusableRow, ValueError, TypeError) as error:
        raise UserError(f"{where}: no question found ({error}; has: {', '.join(map(str, record))})") from error


def _user_text(turn: Record) -> str:
    """The text of a turn of the user, in a conversation of any format; nothing of another turn."""
    if ROLES.get(str(turn.get("role") or turn.get("from"))) != "user":
        return ""
    return content_text(turn.get("content", turn.get("value", "")))


def _rows_without_overlap(
    file: Path, tests: list[tuple[str, str | None, list[Path]]], ngram: int, report: ProgressReport
) -> KeptRows:
    items = list(read_records(str(file)))
    questions = [question_of_record(where, record) for where, record in items]
    gone: dict[int, str] = {}
    reports = []
    for name, shape, files in tests:
        asked = read_test_questions(name, shape, files)
        report(f"comparing {len(items):,} rows with {len(asked):,} of {name}")
        matches = find_overlap(questions, [question for _, question in asked], ngram)
        exact = sum(match.words is None for match in matches)
        shown = [
            {
                "row": short_place(items[m.train][0]),
                "test_row": short_place(asked[m.test][0]),
                "shared": m.words or "the whole question",
            }
            for m in matches[:NUM_SHOWN]
        ]
        gone = {match.train: f"overlaps {name}" for match in matches} | gone
        reports.append(
            {"with": name, "test_rows": len(asked), "exact": exact, "words": len(matches) - exact, "first": shown}
        )
    kept = KeptRows([], facts={"rows_read": len(items), "overlap": reports})
    for index, (where, record) in enumerate(items):
        if index in gone:
            kept.drop(gone[index], where)
        else:
            kept.records.append(record)
    return kept


# --- overlap of questions --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Overlap:
    """A training and a test question, by index, with the words that they share; None if the questions are the same."""

    train: int
    test: int
    words: str | None


def comparable_words(text: str) -> list[str]:
    """The words of a text for comparison: normalised, without case and punctuation."""
    return WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def find_overlap(train: Sequence[str], test: Sequence[str], ngram: int = NGRAM_WORDS) -> list[Overlap]:
    """The training questions that overlap with a test question, each with the first such test question."""
    whole: dict[str, int] = {}
    runs: dict[str, int] = {}
    for index, text in enumerate(test):
        words = comparable_words(text)
        whole.setdefault(" ".join(words), index)
        for run in word_ngrams(words, ngram):
            runs.setdefault(run, index)
    matches: list[Overlap] = []
    for index, text in enumerate(train):
        words = comparable_words(text)
        same = whole.get(" ".join(words))
        if same is not None:
            matches.append(Overlap(index, same, None))
            continue
        shared = next((run for run in word_ngrams(words, ngram) if run in runs), None)
        if shared is not None:
            matches.append(Overlap(index, runs[shared], shared))
    return matches


def word_ngrams(words: Sequence[str], length: int) -> Iterator[str]:
    """Every run of `length` consecutive words."""
    return (" ".join(words[at : at + length]) for at in range(len(words) - length + 1))


def count_repeated(texts: Sequence[str]) -> int:
    """How many texts repeat an earlier one."""
    return len(texts) - len({" ".join(comparable_words(text)) for text in texts})
