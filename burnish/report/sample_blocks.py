"""Samples as the page reads them: an index with a few numbers per sample, and blocks with texts and values of tokens.

The page reads the index when it opens and blocks when they are shown. `SampleIndex` builds the index block by block. A text
block is JSON. A token block has one byte per value: enough for a colour and two digits. The parquet files have the exact
values. `static/store.js` is the reader.

A token block starts with one number per part and sample (32 bits, little-endian): the byte counts of its parts. Then come the
first parts of all samples, then all second parts, and so on:

- the number of UTF-8 bytes of text that each token adds; 255 means that the next byte is added too;
- log-probs: with x = -log p in [0, 30], the code is 254 (x / 30)^(1/3), finest where tokens are likely; 255 means none;
- advantages, then trainer's log-prob minus sampler's: 128 is zero, 128 + m and 128 - m are +-1e-5 r^(m-1) with
  r^126 = 1e7; 0 means none;
- entropies of the policy at each token, coded like -log p;
- the loss mask: 1 if the token was in the loss, 0 if not, 255 if unknown.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from burnish.run.picture_files import picture_file
from burnish.run.samples import read_columns

TOKEN_COLUMNS = ("logp", "advantages", "gap", "entropy", "mask")
MAX_NEGATIVE_LOGP = 30.0
MIN_SIGNED, DECADES, LEVELS = 1e-5, 7, 126
UNKNOWN_MASK = 255
SCALAR_COLUMNS = (
    "step",
    "kind",
    "group",
    "sample",
    "data_source",
    "reward",
    "accuracy",
    "advantage",
    "truncated",
    "finish",
    "length",
)
"""The columns that the index needs."""


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
    pictures: dict[str, Path] = field(default_factory=dict)
    """Files of the images of its samples, by name. One that was deleted is left out."""

    @property
    def size(self) -> int:
        return sum(sample.size for sample in self.samples) + sum(p.stat().st_size for p in self.pictures.values())


def read_groups(path: Path) -> list[SampleGroup]:
    """Read one table as groups that share a prompt, in order of appearance."""
    groups: dict[str, SampleGroup] = {}
    for sample in _samples(path):
        row = sample.row
        group = groups.setdefault(str(row["group"]), SampleGroup(row["step"], row["kind"], str(row["group"])))
        group.samples.append(sample)
        for name in row["pictures"] or ():
            if (file := picture_file(path.parent, name)).is_file():
                group.pictures[name] = file
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


class SampleIndex:
    """The numbers of all samples by which the page filters and sorts, as columns that only grow.

    A group is a run of samples with the same prompt, and `first` is its first sample. Names of kinds, data sources and finish
    reasons are numbered in the order in which they appear.
    """

    def __init__(self) -> None:
        self.names: dict[str, list[str]] = {"kinds": [], "sources": [], "finishes": []}
        self._codes: dict[str, dict[str, int]] = {name: {} for name in self.names}
        self.groups: dict[str, list[Any]] = {name: [] for name in ("step", "kind", "name", "source", "first", "block")}
        self.samples: dict[str, list[Any]] = {
            name: [] for name in ("number", "reward", "accuracy", "advantage", "length", "finish")
        }
        self.num_blocks = 0

    def add_block(self, groups: list[list[dict[str, Any]]]) -> None:
        """Add the groups of a block, each as the rows of its samples. A row has the columns of `SCALAR_COLUMNS`."""
        for rows in groups:
            head = rows[0]
            place = (
                head["step"],
                self._code("kinds", head["kind"]),
                str(head["group"]),
                self._code("sources", head["data_source"] or ""),
                len(self.samples["number"]),
                self.num_blocks,
            )
            for column, value in zip(self.groups.values(), place, strict=True):
                column.append(value)
            for row in rows:
                self.samples["number"].append(row["sample"])
                self.samples["length"].append(row["length"])
                self.samples["finish"].append(self._code("finishes", finish_reason(row)))
                for name in ("reward", "accuracy", "advantage"):
                    self.samples[name].append(_short(row[name]))
        self.num_blocks += 1

    def since(self, group: int, limit: int | None = None) -> dict[str, Any]:
        """Return the groups from one on with their samples, and all names. After `limit` groups it ends with their block."""
        firsts, blocks = self.groups["first"], self.groups["block"]
        end = len(firsts) if limit is None else min(len(firsts), group + limit)
        while 0 < end < len(firsts) and blocks[end] == blocks[end - 1]:
            end += 1
        bounds = [firsts[k] if k < len(firsts) else len(self.samples["number"]) for k in (group, end)]
        return {
            **self.names,
            "groups": {name: column[group:end] for name, column in self.groups.items()},
            "samples": {name: column[slice(*bounds)] for name, column in self.samples.items()},
        }

    def _code(self, kind: str, name: str) -> int:
        codes = self._codes[kind]
        if name not in codes:
            codes[name] = len(codes)
            self.names[kind].append(name)
        return codes[name]


def group_rows(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the rows of each group, in the order in which the groups first appear."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(str(row["group"]), []).append(row)
    return list(groups.values())


def text_block(block: list[SampleGroup]) -> bytes:
    """Return the texts of some groups as JSON: prompt and expected answer per group, images by name, everything else per sample."""
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
        "pictures": {
            name: base64.b64encode(file.read_bytes()).decode()
            for group in block
            for name, file in group.pictures.items()
        },
    }
    return json.dumps(texts, separators=(",", ":"), allow_nan=False).encode()


def token_block(samples: list[PageSample]) -> bytes:
    """Return the token values of some samples, in the format of the module's docstring."""
    nothing = np.empty(0, np.uint8)
    columns = [[width_codes(sample.piece_bytes) for sample in samples]]
    columns += [[sample.values.get(name, nothing) for sample in samples] for name in TOKEN_COLUMNS]
    sizes = np.array([[len(part) for part in column] for column in columns], dtype="<u4").T
    codings: tuple[Callable[[np.ndarray], np.ndarray], ...] = (
        np.asarray,
        log_prob_codes,
        signed_codes,
        signed_codes,
        lambda entropies: log_prob_codes(-entropies),
        mask_codes,
    )
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


def mask_codes(values: np.ndarray) -> np.ndarray:
    """Return one byte per token: 1 in the loss, 0 not, 255 unknown."""
    return np.where(np.isfinite(values), np.where(values > 0, 1, 0), UNKNOWN_MASK).astype(np.uint8)


def finish_reason(row: dict[str, Any]) -> str:
    """Return why a sample ended. Older tables only say whether it was truncated."""
    return str(row["finish"] or ("cut" if row["truncated"] else "stop"))


def _short(value: float | None) -> float | None:
    value = finite_or_none(value)
    return None if value is None else float(f"{value:.6g}")
