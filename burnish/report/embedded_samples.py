"""The samples in a report: which of them it holds, and the compressed blocks that hold them.

A report holds at most `MAX_PAGE_BYTES` of text and token values before compression: tens of thousands of long samples. If a
run has more, tables are chosen evenly over the run, always with the first and the last of each kind. Of a table that is too
large by itself, whole groups are chosen evenly. The choice depends on the files alone.

A block is zlib-compressed and base64-encoded, so that no byte of a completion is markup; the browser inflates it by itself
(`DecompressionStream`).
"""

from __future__ import annotations

import base64
import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from burnish.report.sample_blocks import PageSample, SampleGroup, SampleIndex, read_groups, text_block, token_block
from burnish.run.samples import sample_files, table_size

MAX_PAGE_BYTES = 48_000_000
"""Text and token values in a page, before compression."""
TABLE_OVERHEAD = 4
"""Upper bound of a table's size over its size in the page. A table has more columns, and numbers in full precision."""
BLOCK_CHARS = 300_000
"""Characters of text in a block: small enough to inflate within a frame or two, large enough to compress well."""

T = TypeVar("T")


def collect_groups(folder: Path, limit: int = MAX_PAGE_BYTES) -> tuple[list[SampleGroup], str]:
    """Return the groups to show, by step and kind, and a sentence about what was left out (empty if nothing was)."""
    files = sample_files(folder) if folder.is_dir() else []
    tables = [(path, kind, *table_size(path)) for _, kind, path in files]
    read = [read_groups(path) for path in choose_tables(tables, TABLE_OVERHEAD * limit)]
    sizes = [sum(group.size for group in groups) for groups in read]
    share = min(1.0, limit / max(1, sum(sizes)))
    groups = [
        group
        for those, size in zip(read, sizes, strict=True)
        for group in choose_groups(those, math.ceil(share * size))
    ]
    shown = sum(len(group.samples) for group in groups)
    total = sum(rows for _, _, rows, _ in tables)
    if shown == total:
        return groups, ""
    return groups, (
        f"To keep this page quick it shows {shown:,} of {total:,} samples, spread evenly over the run; the parquet files in "
        "samples/ hold them all."
    )


def choose_tables(tables: list[tuple[Path, str, int, int]], limit: int) -> list[Path]:
    """Choose evenly from the tables (file, kind, rows, bytes) of each kind, so that their bytes are under the limit."""
    kinds = {kind: [t for t in tables if t[1] == kind] for _, kind, _, _ in tables}
    share = 1.0
    while True:
        taken = {
            t[0]
            for of_kind in kinds.values()
            for t in evenly_spaced(of_kind, max(min(2, len(of_kind)), math.floor(share * len(of_kind))))
        }
        total = sum(size for path, _, _, size in tables if path in taken)
        if total <= limit or all(math.floor(share * len(of_kind)) <= 2 for of_kind in kinds.values()):
            return [path for path, _, _, _ in tables if path in taken]
        share *= min(0.95, limit / total)


def choose_groups(groups: list[SampleGroup], limit: int) -> list[SampleGroup]:
    """Choose evenly as many whole groups as fit the limit. If none fits, return the samples of the last group that fit."""
    count = len(groups)
    while count > 1 and (total := sum(group.size for group in evenly_spaced(groups, count))) > limit:
        count = min(count - 1, int(count * limit / total) or 1)
    chosen = evenly_spaced(groups, max(count, 1))
    if len(chosen) == 1 and chosen[0].size > limit:
        only, room = chosen[0], limit
        samples: list[PageSample] = []
        for sample in only.samples:
            room -= sample.size
            if samples and room < 0:
                break
            samples.append(sample)
        chosen = [SampleGroup(only.step, only.kind, only.name, samples, only.pictures)]
    return chosen


def evenly_spaced(items: list[T], count: int) -> list[T]:
    """Return `count` evenly spaced items in order, including the first and the last."""
    if count >= len(items):
        return items
    if count <= 1:
        return items[-1:]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


@dataclass
class EmbeddedSamples:
    """The index, and pairs of blocks (texts, tokens)."""

    index: dict[str, Any]
    blocks: list[tuple[str, str]] = field(default_factory=list)


def embed_samples(groups: list[SampleGroup]) -> EmbeddedSamples:
    """Build the index and the blocks of all groups, in order."""
    index, blocks = SampleIndex(), list(divide_into_blocks(groups))
    for block in blocks:
        index.add_block([[sample.row for sample in group.samples] for group in block])
    # zlib releases the interpreter's lock, so threads compress in parallel.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return EmbeddedSamples(index.since(0), list(pool.map(_pack_block, blocks)))


def compress_base64(data: bytes, is_noise: bool = False) -> str:
    """Compress data and encode it in base64. For noise, search no repetitions: only byte frequencies compress it."""
    packer = zlib.compressobj(4, strategy=zlib.Z_HUFFMAN_ONLY if is_noise else zlib.Z_DEFAULT_STRATEGY)
    return base64.b64encode(packer.compress(data) + packer.flush()).decode()


def _pack_block(block: list[SampleGroup]) -> tuple[str, str]:
    samples = [sample for group in block for sample in group.samples]
    return compress_base64(text_block(block)), compress_base64(token_block(samples), is_noise=True)


def divide_into_blocks(groups: list[SampleGroup]) -> Iterator[list[SampleGroup]]:
    """Divide the groups into blocks of about `BLOCK_CHARS` of text and bytes of images."""
    block: list[SampleGroup] = []
    size = 0
    for group in groups:
        block.append(group)
        size += sum(len(sample.text) for sample in group.samples)
        size += sum(file.stat().st_size for file in group.pictures.values())
        if size >= BLOCK_CHARS:
            yield block
            block, size = [], 0
    if block:
        yield block
