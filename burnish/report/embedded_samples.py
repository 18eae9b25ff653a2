"""The samples in a report: which of them it holds, and the compressed blocks that hold them.

A report holds at most `MAX_PAGE_BYTES` of text and token values before compression: tens of thousands of long samples. If a
run has more, tables are chosen evenly over the run, always with the first and the last of each kind. Of a table that is too
large by itself, whole groups are chosen evenly. The choice depends on the files alone.

The page has an index, which it reads when it opens, and blocks, which it reads when they are shown. A block is
zlib-compressed and base64-encoded, so that no byte of a completion is markup; the browser inflates it by itself
(`DecompressionStream`). The texts of some groups make one block of JSON. The values of their tokens make another, with one
byte per value: enough for a colour and two digits. The parquet files have the exact values. `static/store.js` is the reader.

A token block starts with four numbers per sample (32 bits, little-endian): the byte counts of its four parts. Then come the
first parts of all samples, then all second parts, and so on:

- the number of UTF-8 bytes of text that each token adds; 255 means that the next byte is added too;
- log-probs: with x = -log p in [0, 30], the code is 254 (x / 30)^(1/3), finest where tokens are likely; 255 means none;
- advantages, then trainer's log-prob minus sampler's: 128 is zero, 128 + m and 128 - m are +-1e-5 r^(m-1) with
  r^126 = 1e7; 0 means none.
"""

from __future__ import annotations

import base64
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from burnish.run.samples import read_columns, sample_files, table_size

MAX_PAGE_BYTES = 120_000_000
"""Text and token values in a page, before compression."""
TABLE_OVERHEAD = 4
"""Upper bound of a table's size over its size in the page. A table has more columns, and numbers in full precision."""
TOKEN_COLUMNS = ("logp", "advantages", "gap")
BLOCK_CHARS = 300_000
"""Characters of text in a block: small enough to inflate within a frame or two, large enough to compress well."""
MAX_NEGATIVE_LOGP = 30.0
MIN_SIGNED, DECADES, LEVELS = 1e-5, 7, 126

T = TypeVar("T")


@dataclass
class PageSample:
    """One sample as the page shows it."""

    row: dict[str, Any]
    """The columns with one value per sample."""
    piece_bytes: np.ndarray  # [T] number of UTF-8 bytes that each token adds to the text; empty if tokens are unknown
    values: dict[str, np.ndarray] = field(default_factory=dict)
    """`TOKEN_COLUMNS` as [T] float32, with nan for a missing value. A column without values is absent."""
    text: str = ""
    """The joined pieces, or the completion if there are none."""

    @property
    def size(self) -> int:
        prompt = len(self.row["prompt"] or "") // 4  # a group shares one prompt
        episode = sum(len(self.row[name] or "") for name in ("turns", "last_words", "events"))
        return prompt + len(self.text) + episode + len(self.piece_bytes) * (1 + len(self.values))


@dataclass
class SampleGroup:
    """The samples of one prompt in one table."""

    step: int
    kind: str
    name: str
    samples: list[PageSample] = field(default_factory=list)

    @property
    def size(self) -> int:
        return sum(sample.size for sample in self.samples)


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
        chosen = [SampleGroup(only.step, only.kind, only.name, samples)]
    return chosen


def evenly_spaced(items: list[T], count: int) -> list[T]:
    """Return `count` evenly spaced items in order, including the first and the last."""
    if count >= len(items):
        return items
    if count <= 1:
        return items[-1:]
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def read_groups(path: Path) -> list[SampleGroup]:
    """Read one table as groups that share a prompt, in order of appearance."""
    groups: dict[str, SampleGroup] = {}
    for sample in _samples(path):
        row = sample.row
        group = groups.setdefault(str(row["group"]), SampleGroup(row["step"], row["kind"], str(row["group"])))
        group.samples.append(sample)
    return list(groups.values())


def _samples(path: Path) -> Iterator[PageSample]:
    """Yield the rows of one table. Token columns stay arrays, because a table may have a million tokens."""
    import pyarrow.compute as pc

    table = read_columns(path)
    scalars = table.drop_columns(["pieces", *TOKEN_COLUMNS]).to_pylist()
    pieces = table["pieces"].combine_chunks()
    starts, flat = _bounds(pieces), pieces.flatten()
    widths = pc.fill_null(pc.binary_length(flat), 0).to_numpy(zero_copy_only=False)
    texts = pc.fill_null(pc.binary_join(pieces, ""), "").to_pylist()
    columns = {}
    for name in TOKEN_COLUMNS:
        column = table[name].combine_chunks()
        columns[name] = (_bounds(column), column.flatten().to_numpy(zero_copy_only=False))
    for k, row in enumerate(scalars):
        width = widths[starts[k] : starts[k + 1]]
        values = {n: flat[at[k] : at[k + 1]] for n, (at, flat) in columns.items()}
        values = {n: v for n, v in values.items() if len(v) == len(width) and len(v)}
        yield PageSample(row, width, values, texts[k] if len(width) else row["completion"] or "")


def _bounds(column: Any) -> np.ndarray:
    """Return the offsets [rows + 1] of each row's list in the flattened column. A null is an empty list."""
    import pyarrow.compute as pc

    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)])


def reward_parts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the parts of a reward. Non-finite numbers, which JSON lacks, become None."""
    try:
        parts = json.loads(row["parts"]) if row["parts"] else {}
    except ValueError:
        parts = row["parts"]
    return {n: finite_or_none(v) for n, v in parts.items()} if isinstance(parts, dict) else {"parts": parts}


def dialogue_turns(row: dict[str, Any]) -> list[list[Any]] | None:
    """Return the entries after the prompt as [speaker, text, state, reward]; None if the sample has none.

    The first entry of a later branch also has the branch's number and the turn after which it continues.
    """
    try:
        said = json.loads(row["turns"]) if row["turns"] else None
        return said and [
            [one["who"], one["text"], one.get("state"), finite_or_none(one.get("reward"))]
            + ([one["branch"], one["after"]] if "branch" in one else [])
            for one in said
        ]
    except (ValueError, TypeError, KeyError):  # a table that another tool wrote: show its text as it is
        return [["", str(row["turns"]), None, None]]


def episode_events(row: dict[str, Any]) -> list[list[str]]:
    """Return what went wrong in an episode as [kind, what, message, traceback]."""
    try:
        events = json.loads(row["events"]) if row["events"] else []
        return [[str(one.get(name) or "") for name in ("kind", "what", "message", "traceback")] for one in events]
    except (ValueError, TypeError, AttributeError):  # a table that another tool wrote: show its text as it is
        return [["", "", str(row["events"]), ""]]


def finite_or_none(value: Any) -> Any:
    """Return the value, or None for a NaN or an infinity, which JSON lacks."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class EmbeddedSamples:
    """The index, and pairs of blocks (texts, tokens)."""

    index: dict[str, Any]
    blocks: list[tuple[str, str]] = field(default_factory=list)


def embed_samples(groups: list[SampleGroup]) -> EmbeddedSamples:
    """Build the index and the blocks of all groups, in order."""
    kinds = sorted({group.kind for group in groups})
    sources = sorted({_source(group) for group in groups})
    finishes = sorted({_finish(sample) for group in groups for sample in group.samples})
    per_group: dict[str, list[Any]] = {name: [] for name in ("step", "kind", "name", "source", "first", "block")}
    per_sample: dict[str, list[Any]] = {
        name: [] for name in ("number", "reward", "accuracy", "advantage", "length", "finish")
    }
    found = EmbeddedSamples(
        {"kinds": kinds, "sources": sources, "finishes": finishes, "groups": per_group, "samples": per_sample}
    )
    blocks = list(_blocks(groups))
    for number, block in enumerate(blocks):
        for group in block:
            place = (group.step, kinds.index(group.kind), group.name, sources.index(_source(group)))
            for name, value in zip(per_group, (*place, len(per_sample["number"]), number), strict=True):
                per_group[name].append(value)
            for sample in group.samples:
                row = sample.row
                per_sample["number"].append(row["sample"])
                per_sample["length"].append(row["length"])
                per_sample["finish"].append(finishes.index(_finish(sample)))
                for name in ("reward", "accuracy", "advantage"):
                    per_sample[name].append(_short(row[name]))
    # zlib releases the interpreter's lock, so threads compress in parallel.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found.blocks = list(pool.map(_pack_block, blocks))
    return found


def compress_base64(data: bytes, is_noise: bool = False) -> str:
    """Compress data and encode it in base64. For noise, search no repetitions: only byte frequencies compress it."""
    packer = zlib.compressobj(4, strategy=zlib.Z_HUFFMAN_ONLY if is_noise else zlib.Z_DEFAULT_STRATEGY)
    return base64.b64encode(packer.compress(data) + packer.flush()).decode()


def text_block(block: list[SampleGroup]) -> bytes:
    """Return the texts of some groups as JSON: prompt and expected answer per group, everything else per sample."""
    samples = [sample for group in block for sample in group.samples]
    texts = {
        "prompt": [group.samples[0].row["prompt"] or "" for group in block],
        "answer": [group.samples[0].row["answer"] for group in block],
        "text": [sample.text for sample in samples],
        "whole": [None if s.row["completion"] in (s.text, None) else s.row["completion"] for s in samples],
        "parts": [reward_parts(sample.row) for sample in samples],
        "turns": [dialogue_turns(sample.row) for sample in samples],
        "role": [sample.row["role"] for sample in samples],
        "lastWords": [sample.row["last_words"] for sample in samples],
        "events": [episode_events(sample.row) for sample in samples],
        "error": [sample.row["error"] for sample in samples],
    }
    return json.dumps(texts, separators=(",", ":"), allow_nan=False).encode()


def token_block(samples: list[PageSample]) -> bytes:
    """Return the token values of some samples, in the format of the module's docstring."""
    nothing = np.empty(0, np.uint8)
    columns = [[width_codes(sample.piece_bytes) for sample in samples]]
    columns += [[sample.values.get(name, nothing) for sample in samples] for name in TOKEN_COLUMNS]
    sizes = np.array([[len(part) for part in column] for column in columns], dtype="<u4").T
    codings: tuple[Callable[[np.ndarray], np.ndarray], ...] = (np.asarray, log_prob_codes, signed_codes, signed_codes)
    coded = [coding(np.concatenate(column)) for coding, column in zip(codings, columns, strict=True)]
    return sizes.tobytes() + b"".join(code.tobytes() for code in coded)


def width_codes(piece_bytes: np.ndarray) -> np.ndarray:
    """Return the byte count of each token as uint8. A count of 255 or more takes several bytes."""
    if len(piece_bytes) == 0 or piece_bytes.max() < 255:
        return piece_bytes.astype(np.uint8)
    return np.array([byte for n in piece_bytes.tolist() for byte in [255] * (n // 255) + [n % 255]], np.uint8)


def log_prob_codes(log_probs: np.ndarray) -> np.ndarray:
    """Return one byte per log-prob."""
    known = np.isfinite(log_probs)
    x = np.clip(-np.where(known, log_probs, 0.0), 0.0, MAX_NEGATIVE_LOGP)
    return np.where(known, np.rint(254 * np.cbrt(x / MAX_NEGATIVE_LOGP)), 255).astype(np.uint8)


def signed_codes(values: np.ndarray) -> np.ndarray:
    """Return one byte per number of any size and sign, on a logarithmic scale."""
    known = np.isfinite(values)
    size = np.abs(np.where(known, values, 0.0))
    levels = np.log10(np.maximum(size, MIN_SIGNED / 2) / MIN_SIGNED) * LEVELS / DECADES
    level = np.where(size < MIN_SIGNED / 2, 0, np.clip(np.rint(levels) + 1, 1, LEVELS + 1))
    return np.where(known, 128 + np.where(values < 0, -level, level), 0).astype(np.uint8)


def _pack_block(block: list[SampleGroup]) -> tuple[str, str]:
    samples = [sample for group in block for sample in group.samples]
    return compress_base64(text_block(block)), compress_base64(token_block(samples), is_noise=True)


def _blocks(groups: list[SampleGroup]) -> Iterator[list[SampleGroup]]:
    """Divide the groups into blocks of about `BLOCK_CHARS` of text."""
    block: list[SampleGroup] = []
    size = 0
    for group in groups:
        block.append(group)
        size += sum(len(sample.text) for sample in group.samples)
        if size >= BLOCK_CHARS:
            yield block
            block, size = [], 0
    if block:
        yield block


def _source(group: SampleGroup) -> str:
    return group.samples[0].row["data_source"] or ""


def _finish(sample: PageSample) -> str:
    """Return why a sample ended. Older tables only say whether it was truncated."""
    return sample.row["finish"] or ("cut" if sample.row["truncated"] else "stop")


def _short(value: float | None) -> float | None:
    value = finite_or_none(value)
    return None if value is None else float(f"{value:.6g}")
