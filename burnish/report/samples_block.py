"""Samples as a page carries them: an index that is read at once, and compressed blocks that are read when they are looked at.

A block is zlib-compressed and base64-encoded, so that no byte a model wrote is markup, and the browser inflates it by itself
(`DecompressionStream`). The texts of some groups are one block of JSON. The values of their tokens are another, of one byte each: enough for a
colour and two digits; the parquet files have them in full. `static/store.js` reads what is written here.

A block of tokens has four numbers (32 bits, little-endian) for each sample, the bytes of its parts, then all first parts, all second ones, ...:

- how many UTF-8 bytes of the text each token adds; 255 says that the next byte is added too;
- log-probs, x = -log p in [0, 30]: the code is 254 (x / 30)^(1/3), finest where tokens are likely; 255 is none;
- advantages, and trainer's log-prob less engine's: 128 is zero, 128 + m and 128 - m are +-1e-5 r^(m-1) with r^126 = 1e7; 0 is none.
"""

from __future__ import annotations

import base64
import json
import os
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.report.sample_groups import TOKEN_COLUMNS, Group, Sample, finite, parts_of, turns_of

BLOCK = 300_000
"""Characters of text in a block: small enough to inflate within a frame or two, large enough to compress well."""
LARGEST_X = 30.0
SMALLEST, DECADES, LEVELS = 1e-5, 7, 126


@dataclass
class Embedded:
    """What goes into the page: the index as JSON, and pairs of blocks (texts, tokens)."""

    index: dict[str, Any]
    blocks: list[tuple[str, str]] = field(default_factory=list)


def embed(groups: list[Group]) -> Embedded:
    """All groups, in order."""
    kinds = sorted({group.kind for group in groups})
    sources = sorted({_source(group) for group in groups})
    finishes = sorted({_finish(sample) for group in groups for sample in group.samples})
    per_group: dict[str, list[Any]] = {name: [] for name in ("step", "kind", "name", "source", "first", "block")}
    per_sample: dict[str, list[Any]] = {
        name: [] for name in ("number", "reward", "accuracy", "advantage", "length", "finish")
    }
    found = Embedded(
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
    # The compressor works outside the interpreter's lock, so that threads share it out.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found.blocks = list(pool.map(_packed, blocks))
    return found


def squeeze(data: bytes, is_noise: bool = False) -> str:
    """Compressed, as text of letters, digits, `+`, `/` and `=`. Noise has no repetitions to look for, only frequent bytes."""
    packer = zlib.compressobj(4, strategy=zlib.Z_HUFFMAN_ONLY if is_noise else zlib.Z_DEFAULT_STRATEGY)
    return base64.b64encode(packer.compress(data) + packer.flush()).decode()


def text_block(block: list[Group]) -> bytes:
    """The texts of some groups, in order: of each group the prompt and what was expected, of each sample the rest."""
    samples = [sample for group in block for sample in group.samples]
    texts = {
        "prompt": [group.samples[0].row["prompt"] or "" for group in block],
        "answer": [group.samples[0].row["answer"] for group in block],
        "text": [sample.text for sample in samples],
        "whole": [None if s.row["completion"] in (s.text, None) else s.row["completion"] for s in samples],
        "parts": [parts_of(sample.row) for sample in samples],
        "turns": [turns_of(sample.row) for sample in samples],
        "error": [sample.row["error"] for sample in samples],
    }
    return json.dumps(texts, separators=(",", ":"), allow_nan=False).encode()


def token_block(samples: list[Sample]) -> bytes:
    """The values of tokens of some samples, in order."""
    nothing = np.empty(0, np.uint8)
    columns = [[widths(sample.piece_bytes) for sample in samples]]
    columns += [[sample.values.get(name, nothing) for sample in samples] for name in TOKEN_COLUMNS]
    sizes = np.array([[len(part) for part in column] for column in columns], dtype="<u4").T
    codings: tuple[Callable[[np.ndarray], np.ndarray], ...] = (np.asarray, log_prob_codes, signed_codes, signed_codes)
    coded = [coding(np.concatenate(column)) for coding, column in zip(codings, columns, strict=True)]
    return sizes.tobytes() + b"".join(code.tobytes() for code in coded)


def widths(piece_bytes: np.ndarray) -> np.ndarray:
    """Bytes a token, 255 and more as several."""
    if len(piece_bytes) == 0 or piece_bytes.max() < 255:
        return piece_bytes.astype(np.uint8)
    return np.array([byte for n in piece_bytes.tolist() for byte in [255] * (n // 255) + [n % 255]], np.uint8)


def log_prob_codes(log_probs: np.ndarray) -> np.ndarray:
    """Log-probs as one byte each."""
    known = np.isfinite(log_probs)
    x = np.clip(-np.where(known, log_probs, 0.0), 0.0, LARGEST_X)
    return np.where(known, np.rint(254 * np.cbrt(x / LARGEST_X)), 255).astype(np.uint8)


def signed_codes(values: np.ndarray) -> np.ndarray:
    """Numbers of any size and sign as one byte each."""
    known = np.isfinite(values)
    size = np.abs(np.where(known, values, 0.0))
    levels = np.log10(np.maximum(size, SMALLEST / 2) / SMALLEST) * LEVELS / DECADES
    level = np.where(size < SMALLEST / 2, 0, np.clip(np.rint(levels) + 1, 1, LEVELS + 1))
    return np.where(known, 128 + np.where(values < 0, -level, level), 0).astype(np.uint8)


def _packed(block: list[Group]) -> tuple[str, str]:
    samples = [sample for group in block for sample in group.samples]
    return squeeze(text_block(block)), squeeze(token_block(samples), is_noise=True)


def _blocks(groups: list[Group]) -> Iterator[list[Group]]:
    """The groups in runs of about a block's text."""
    block: list[Group] = []
    size = 0
    for group in groups:
        block.append(group)
        size += sum(len(sample.text) for sample in group.samples)
        if size >= BLOCK:
            yield block
            block, size = [], 0
    if block:
        yield block


def _source(group: Group) -> str:
    return group.samples[0].row["data_source"] or ""


def _finish(sample: Sample) -> str:
    """Why a sample ended; tables of runs that did not say have only whether it was cut."""
    return sample.row["finish"] or ("cut" if sample.row["truncated"] else "stop")


def _short(value: float | None) -> float | None:
    value = finite(value)
    return None if value is None else float(f"{value:.6g}")
