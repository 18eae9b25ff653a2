"""The samples of a run that may be training: an index of its tables that grows with them, and blocks on demand.

A run may have thousands of tables, so `update` indexes some of them per call, newest first. The page shows what is indexed and
asks again. Samples are numbered in the order in which they were indexed, and a number never changes. If a resumed run repeats a
step, its table is replaced; all numbers then begin anew, in another generation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.report.sample_blocks import (
    SCALAR_COLUMNS,
    SampleGroup,
    SampleIndex,
    dialogue_turns,
    episode_events,
    group_rows,
    read_groups,
    text_block,
    token_block,
)
from burnish.run.samples import read_columns, sample_files

TABLES_AT_ONCE = 128
"""Tables indexed in one call: about a tenth of a second."""
BLOCK_SAMPLES = 256
"""Most samples of a block. The first tables of a run may be much larger than 64 samples if another tool wrote them."""
SEARCHED_COLUMNS = ("prompt", "completion", "answer", "turns", "last_words", "events", "error", "group")

FileState = tuple[int, int, int]
"""Inode, size and time of change of a file."""


class ChangedTable(Exception):
    """A table was replaced or deleted after it was indexed."""


@dataclass(frozen=True)
class Block:
    """Some groups of one table."""

    path: Path
    state: FileState
    first_group: int
    """The first group of the block among those of its table."""
    num_groups: int
    first_sample: int
    """The number of its first sample in the index."""
    num_samples: int


class LiveSamples:
    """The index of a folder of tables."""

    def __init__(self, folder: Path, generation: int = 0) -> None:
        self.folder, self.generation = folder, generation
        self._begin()

    def _begin(self) -> None:
        self.index = SampleIndex()
        self.blocks: list[Block] = []
        self.unreadable: dict[Path, str] = {}
        """Tables that cannot be read, and why."""
        self.num_waiting = 0
        """Tables that are not indexed yet."""
        self._indexed: dict[Path, FileState] = {}

    def update(self, limit: int = TABLES_AT_ONCE) -> None:
        """Index at most `limit` tables that are new, the newest first. Begin anew if an indexed table has changed."""
        found = {path: state for path in self._tables() if (state := _file_state(path)) is not None}
        if any(found.get(path) != state for path, state in self._indexed.items()):
            self.generation += 1
            self._begin()
        waiting = [path for path in found if path not in self._indexed]
        for path in waiting[:limit]:
            self._add(path, found[path])
        self.num_waiting = max(0, len(waiting) - limit)

    def _tables(self) -> list[Path]:
        """Return the tables, newest step first."""
        return [path for _, _, path in reversed(sample_files(self.folder))] if self.folder.is_dir() else []

    def _add(self, path: Path, state: FileState) -> None:
        self._indexed[path] = state
        try:
            groups = group_rows(read_columns(path, SCALAR_COLUMNS).to_pylist())
        except UserError as error:
            self.unreadable[path] = str(error)
            return
        for first, part in _parts(groups):
            first_sample = len(self.index.samples["number"])
            num_samples = sum(map(len, part))
            self.blocks.append(Block(path, state, first, len(part), first_sample, num_samples))
            self.index.add_block(part)

    def texts(self, block: int) -> bytes:
        """Return the texts of a block, as `text_block` writes them."""
        return text_block(self._groups(self.blocks[block]))

    def tokens(self, block: int) -> bytes:
        """Return the token values of a block, as `token_block` writes them."""
        return token_block([sample for group in self._groups(self.blocks[block]) for sample in group.samples])

    def _groups(self, block: Block) -> list[SampleGroup]:
        groups = _cached_groups(block.path, block.state)
        return groups[block.first_group : block.first_group + block.num_groups]

    def search(self, words: str, first: int, last: int) -> list[int]:
        """Return the samples in the blocks [first, last) whose texts contain the words, in any case.

        A word in a prompt or an expected answer finds all samples of the group.
        """
        found = []
        for block in self.blocks[first:last]:
            rows = _matches(block.path, block.state, words)
            if not any(row["is_about"] or row["is_hit"] for row in rows):
                continue
            sample = block.first_sample
            for members in group_rows(rows)[block.first_group : block.first_group + block.num_groups]:
                for row in members:
                    if members[0]["is_about"] or row["is_hit"]:
                        found.append(sample)
                    sample += 1
        return found


def _parts(groups: list[list[dict[str, Any]]]) -> Iterator[tuple[int, list[list[dict[str, Any]]]]]:
    """Divide the groups of a table into blocks, each with the number of its first group."""
    first, size = 0, 0
    for k, rows in enumerate(groups):
        if k > first and size + len(rows) > BLOCK_SAMPLES:
            yield first, groups[first:k]
            first, size = k, 0
        size += len(rows)
    if groups[first:]:
        yield first, groups[first:]


@lru_cache(maxsize=16)
def _cached_groups(path: Path, state: FileState) -> list[SampleGroup]:
    _check_state(path, state)
    return read_groups(path)


def _matches(path: Path, state: FileState, words: str) -> list[dict[str, Any]]:
    """Return for each row of a table its group, and whether the words are in its prompt or answer, and in its other texts."""
    import pyarrow.compute as pc

    _check_state(path, state)
    table = read_columns(path, SEARCHED_COLUMNS)
    hits = {
        name: pc.fill_null(pc.match_substring(table[name], words, ignore_case=True), False).to_pylist()
        for name in ("prompt", "answer", "completion", "error", "last_words")
    }
    # In these columns texts are JSON, in which a line break or a quotation mark is another text.
    encoded = {name: table[name].to_pylist() for name in ("turns", "events")}
    wanted, rows = words.casefold(), []
    for k, group in enumerate(table["group"].to_pylist()):
        is_hit = any(hits[name][k] for name in ("completion", "error", "last_words"))
        own = {name: column[k] for name, column in encoded.items()}
        if not is_hit and any(own.values()):
            is_hit = any(wanted in text.casefold() for text in _episode_texts(own))
        rows.append({"group": group, "is_about": hits["prompt"][k] or hits["answer"][k], "is_hit": is_hit})
    return rows


def _episode_texts(row: dict[str, Any]) -> Iterator[str]:
    """Yield what was said in an episode, and what went wrong in it."""
    yield from (str(entry[1]) for entry in dialogue_turns(row) or ())
    yield from (text for event in episode_events(row) for text in event)


def _check_state(path: Path, state: FileState) -> None:
    if _file_state(path) != state:
        raise ChangedTable(f"{path} has changed since it was read")


def _file_state(path: Path) -> FileState | None:
    """Return what identifies the content of a file; None if it is gone."""
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def json_bytes(value: Any) -> bytes:
    """Return compact JSON. NaN is an error, because browsers do not read it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
