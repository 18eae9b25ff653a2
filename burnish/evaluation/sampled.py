"""Samples with their scores and the prompts they answer: from the completions of an evaluation, or from a run's tables.

A completions file has each prompt as the text the model was given. What is trained on next is rendered again, so the
prompts are taken from the rows that were asked: `--prompts`, or what a run's config names.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.files import find_files
from burnish.data.rows import Message, source_name
from burnish.data.tallies import Tally, completions, completions_file, matched, read_items, run_sources
from burnish.run.checksums import sums
from burnish.run.directory import RunDirectory
from burnish.run.samples import read_table, sample_files

CHAT_MARKS = re.compile(r"<\|[^|]+\|>|\[INST\]|<start_of_turn>|<｜")
RIGHT = 1.0


@dataclass(frozen=True)
class Sample:
    """One completion with its score."""

    where: str
    prompt_id: str
    prompt: str
    """The text the model was given."""
    completion: str
    accuracy: float | None
    length: int
    is_whole: bool
    """It ended by itself, and nothing went wrong with scoring it."""
    answer: str | None


def is_right(sample: Sample) -> bool:
    """Whether the verifier found it wholly right."""
    return sample.accuracy is not None and sample.accuracy >= RIGHT


def source_sums(source: Path, prompts: Path | None) -> dict[str, Any]:
    """The checksums of everything that is read, as a manifest holds them."""
    files = [path for _, _, path in _tables(source)] if source.is_dir() else [completions_file(source)]
    return {"source": sums(files), "prompts": sums([] if prompts is None else find_files(str(prompts)))}


def read_samples_of(source: Path) -> list[Sample]:
    """The samples of a run's folder or of a file of completions."""
    return run_samples(source) if source.is_dir() else file_samples(source)


def file_samples(path: Path) -> list[Sample]:
    """The completions of an evaluation."""
    found = []
    for where, record in completions(path):
        whole = not (record.get("truncated") or record.get("timed_out") or record.get("error"))
        length, answer = record.get("length"), record.get("answer")
        length = len(record["completion"].split()) if length is None else length
        found.append(
            Sample(
                where,
                record["id"],
                record.get("prompt") or "",
                record["completion"],
                record["accuracy"],
                length,
                whole,
                answer,
            )
        )
    return found


def run_samples(run: Path) -> list[Sample]:
    """The samples a run kept in its tables (`run.samples_every`)."""
    found = []
    for _, _, path in _tables(run):
        for number, row in enumerate(read_table(path), 1):
            whole = not (row["truncated"] or row["error"])
            id, where = row["group"].rpartition("#")[0], f"{path.name}, row {number}"
            found.append(
                Sample(
                    where, id, row["prompt"], row["completion"], row["accuracy"], row["length"], whole, row["answer"]
                )
            )
    return found


def _tables(run: Path) -> list[tuple[int, str, Path]]:
    tables = [entry for entry in sample_files(RunDirectory.open(run).samples) if entry[1] == "train"]
    if not tables:
        raise UserError(f"{run} has kept no training samples yet (run.samples_every)")
    return tables


def prompts_of(samples: Sequence[Sample], source: Path, prompts: Path | None) -> dict[str, str | list[Message]]:
    """What each prompt id asks, as its row has it; without rows, the text the model was given."""
    if source.is_dir():
        sources, seed = run_sources(source, prompts, "--prompts")
        asked = {item.row.id: item.row.prompt for one in sources for item in read_items(_ended(one, samples), seed)}
        lost = next((sample for sample in samples if sample.prompt_id not in asked), None)
        if lost is not None:
            raise UserError(
                f"{lost.where}: the prompt {lost.prompt_id} is not among the rows of the run's data any more"
            )
        return asked
    if prompts is not None:
        items = read_items(Source(path=str(prompts)))
        names = {sample.prompt_id.rpartition("/")[0] for sample in samples}
        if len(names) > 1:
            raise UserError(
                f"{source} has completions of several files ({', '.join(sorted(names))}): give them one by one"
            )
        tallies = {sample.prompt_id: Tally(1.0, 1, sample.answer) for sample in samples}
        matched(items, tallies, source)
        ids = {sample.prompt_id for sample in samples}
        by_place = {item.row.id.rpartition("/")[2]: item.row.prompt for item in items}
        return {id: by_place[id.rpartition("/")[2]] for id in ids}
    strange = next((sample for sample in samples if CHAT_MARKS.search(sample.prompt)), None)
    if strange is not None:
        raise UserError(
            f"{strange.where}: its prompt was written by a chat template; name the file that was answered with --prompts, "
            "or training would put the template around it again"
        )
    return {sample.prompt_id: sample.prompt for sample in samples}


def _ended(source: Source, samples: Sequence[Sample]) -> Source:
    """A source with an end: of an endless task as many rows as the samples reach into."""
    if source.task is None or source.limit is not None:
        return source
    prefix = f"{source_name(source)}/"
    places = [int(s.prompt_id.rpartition("/")[2]) for s in samples if s.prompt_id.startswith(prefix)]
    return source.model_copy(update={"limit": max(places, default=0) + 1})
