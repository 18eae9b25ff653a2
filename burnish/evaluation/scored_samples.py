"""Samples with their scores, as sources of training data: completions of an evaluation, trees of its searches, and tables of a run.

A file of completions has each prompt as the rendered text. Training renders prompts again, so they are read from the original rows: the
file that was answered, or the run's data.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.curation.pass_rates import (
    PassCount,
    completions,
    completions_file,
    match_pass_counts,
    read_located_rows,
    run_sources,
)
from burnish.data.files import Record, find_files
from burnish.data.row import Message
from burnish.data.row_formats import source_name
from burnish.evaluation.strategies.spec import ORACLE
from burnish.run.durable_files import checksums
from burnish.run.run_directory import RunDirectory
from burnish.run.samples import read_table, sample_files

TEMPLATE_TOKENS = re.compile(r"<\|[^|]+\|>|\[INST\]|<start_of_turn>|<｜")
CORRECT = 1.0
Node = Mapping[str, Any]
"""A node of a tree, as `evaluation/strategies/search_runner.py` records it."""


@dataclass(frozen=True)
class ScoredSample:
    """One completion with its score."""

    where: str
    prompt_id: str
    prompt: str
    """The rendered text that the model got."""
    completion: str
    accuracy: float | None
    length: int
    is_whole: bool
    """Whether it is not truncated and its scoring did not fail."""
    answer: str | None


def is_right(sample: ScoredSample) -> bool:
    """Whether the verifier found the sample fully right."""
    return sample.accuracy is not None and sample.accuracy >= CORRECT


def source_checksums(source: Path, prompts: Path | None) -> dict[str, Any]:
    """Return the checksums of all input files for a manifest."""
    files = [path for _, _, path in _train_tables(source)] if source.is_dir() else [completions_file(source)]
    return {"source": checksums(files), "prompts": checksums([] if prompts is None else find_files(str(prompts)))}


def read_samples_of(source: Path, trees: bool = False) -> list[ScoredSample]:
    """Read the samples of a run's folder or of a file of completions; with `trees`, all finished answers of its searches."""
    if trees:
        return tree_samples(source)
    return run_samples(source) if source.is_dir() else file_samples(source)


def file_samples(path: Path) -> list[ScoredSample]:
    """Read the completions of an evaluation."""
    return [scored_sample(where, record) for where, record in completions(path)]


def scored_sample(where: str, record: Record) -> ScoredSample:
    """Return a completion of an evaluation as a sample."""
    whole = not (record.get("truncated") or record.get("timed_out") or record.get("error"))
    length = record.get("length")
    length = len(record["completion"].split()) if length is None else length
    prompt, completion, accuracy = record.get("prompt") or "", record["completion"], record["accuracy"]
    return ScoredSample(where, record["id"], prompt, completion, accuracy, length, whole, record.get("answer"))


def run_samples(run: Path) -> list[ScoredSample]:
    """Read the training samples in a run's tables (`run.samples_every`)."""
    found = []
    for _, _, path in _train_tables(run):
        for number, row in enumerate(read_table(path), 1):
            whole = not (row["truncated"] or row["error"])
            id, where = row["group"].rpartition("#")[0], f"{path.name}, row {number}"
            found.append(
                ScoredSample(
                    where, id, row["prompt"], row["completion"], row["accuracy"], row["length"], whole, row["answer"]
                )
            )
    return found


def _train_tables(run: Path) -> list[tuple[int, str, Path]]:
    tables = [entry for entry in sample_files(RunDirectory.open(run).samples) if entry[1] == "train"]
    if not tables:
        raise UserError(f"{run} has kept no training samples yet (run.samples_every)")
    return tables


def prompts_of(samples: Sequence[ScoredSample], source: Path, prompts: Path | None) -> dict[str, str | list[Message]]:
    """Return the prompt of each id as its data row has it; without rows, the rendered text."""
    if source.is_dir():
        sources, seed = run_sources(source, prompts, "--prompts")
        asked = {
            item.row.id: item.row.prompt
            for one in sources
            for item in read_located_rows(_with_limit(one, samples), seed)
        }
        lost = next((sample for sample in samples if sample.prompt_id not in asked), None)
        if lost is not None:
            raise UserError(
                f"{lost.where}: the prompt {lost.prompt_id} is not among the rows of the run's data any more"
            )
        return asked
    if prompts is not None:
        items = read_located_rows(Source(path=str(prompts)))
        names = {sample.prompt_id.rpartition("/")[0] for sample in samples}
        if len(names) > 1:
            raise UserError(
                f"{source} has completions of several files ({', '.join(sorted(names))}): give them one by one"
            )
        tallies = {sample.prompt_id: PassCount(1.0, 1, sample.answer) for sample in samples}
        match_pass_counts(items, tallies, source)
        ids = {sample.prompt_id for sample in samples}
        by_place = {item.row.id.rpartition("/")[2]: item.row.prompt for item in items}
        return {id: by_place[id.rpartition("/")[2]] for id in ids}
    strange = next((sample for sample in samples if TEMPLATE_TOKENS.search(sample.prompt)), None)
    if strange is not None:
        raise UserError(
            f"{strange.where}: its prompt was written by a chat template; name the file that was answered with --prompts, "
            "or training would put the template around it again"
        )
    return {sample.prompt_id: sample.prompt for sample in samples}


def _with_limit(source: Source, samples: Sequence[ScoredSample]) -> Source:
    """Limit an endless task to the rows that the samples use."""
    if source.task is None or source.limit is not None:
        return source
    prefix = f"{source_name(source)}/"
    places = [int(s.prompt_id.rpartition("/")[2]) for s in samples if s.prompt_id.startswith(prefix)]
    return source.model_copy(update={"limit": max(places, default=0) + 1})


# --- Trees of searches ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchedTree:
    """The tree of one search."""

    where: str
    sample: ScoredSample
    """The chosen answer."""
    nodes: Sequence[Node]
    search: Mapping[str, Any]
    """What the row says of its search, such as `strategy`, `verifier` and `step`."""

    def paths(self) -> Iterator[list[Node]]:
        """Yield the nodes between the root and each leaf. Conversations that a strategy opened besides the question are left out."""
        by_index = {node["node"]: node for node in self.nodes}
        inner = {node["parent"] for node in self.nodes}
        for leaf in self.nodes:
            path: list[Node] = []
            node = leaf
            while node["parent"] is not None:
                path.append(node)
                node = by_index[node["parent"]]
            if path and leaf["node"] not in inner and node["node"] == 0:
                yield path[::-1]


def read_trees(path: Path) -> list[SearchedTree]:
    """Read the trees of a file of completions."""
    found = []
    for where, record in completions(path):
        search = record.get("search") or {}
        search = json.loads(search) if isinstance(search, str) else search  # parquet holds JSON text
        if not search.get("tree"):
            raise UserError(
                f"{where}: the row has no tree: make the file with `burnish eval DIR DATA --strategy NAME --keep-trees`"
            )
        found.append(SearchedTree(where, scored_sample(where, record), search["tree"], search))
    return found


def check_is_oracle(where: str, strategy: str, verifier: str | None) -> None:
    """Raise a UserError unless the answer key scores the trees of a strategy, so that they tell which answers are right."""
    if verifier == ORACLE:
        return
    if verifier is None:
        raise UserError(
            f"{where}: strategy {strategy} has no verifier, so the answers of its trees have no scores, and only the chosen one is known to be "
            "right or wrong: leave --trees out, or search with --strategy best_of_n strategy.verifier=oracle"
        )
    raise UserError(
        f"{where}: the trees of strategy {strategy} are scored by {verifier}, without the answer key, so only the chosen answer is known to be "
        "right or wrong: leave --trees out, or search with strategy.verifier=oracle"
    )


def tree_samples(path: Path) -> list[ScoredSample]:
    """Return every finished answer of the trees in a file, as samples to choose demonstrations from.

    The answer key must have scored them: a search with another verifier tells which answers it prefers, not which are right.
    """
    found: list[ScoredSample] = []
    for tree in read_trees(path):
        check_is_oracle(tree.where, tree.search.get("strategy", "(not named)"), tree.search.get("verifier"))
        chosen = tree.sample
        for nodes in tree.paths():
            leaf, text = nodes[-1], "".join(node["text"] for node in nodes)
            if leaf["end"] == "open":
                continue
            length = sum(node["tokens"] for node in nodes if node["sampled"])
            found.append(
                ScoredSample(
                    tree.where,
                    chosen.prompt_id,
                    chosen.prompt,
                    text,
                    leaf["score"],
                    length,
                    leaf["end"] == "stop",
                    chosen.answer,
                )
            )
    return found
