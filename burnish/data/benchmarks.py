"""Benchmarks by name: which file holds one, how its rows are read and judged, how long an answer may be.

The files are the user's own, in a folder given with the command or in the environment variable `BURNISH_DATA`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, unknown
from burnish.data.published_sets import SHAPES

FOLDER_VARIABLE = "BURNISH_DATA"


@dataclass(frozen=True)
class Benchmark:
    """A test set that has a name."""

    name: str
    title: str
    files: tuple[str, ...]
    """Names and patterns looked for in the folder; the first that is there is taken."""
    shape: str
    max_tokens: int
    split: str | None = None
    """Which part is the benchmark, where the file holds several."""
    subject: str | None = None
    """The key of a row's `extra` that divides it into subjects."""

    @property
    def reward(self) -> list[dict[str, Any]]:
        """`reward.parts` that judge its answers."""
        return [{"name": SHAPES[self.shape].verifier}]


def _row(name: str, title: str, max_tokens: int, *files: str, **more: Any) -> Benchmark:
    usual = (f"{name}_test.jsonl", f"{name}.jsonl", f"{name}.json", f"{name}_test.parquet", f"{name}.parquet")
    below = tuple(f"{name}/{pattern}" for pattern in ("test.*", "**/test-*.parquet", "**/test.*"))
    return Benchmark(name, title, (*usual, *files, *below), name, max_tokens, **more)


BENCHMARKS: dict[str, Benchmark] = {
    row.name: row
    for row in (
        _row("gsm8k", "GSM8K, 1,319 questions", 1024),
        _row("math500", "MATH-500", 2048, "MATH-500/test.jsonl", subject="subject"),
        _row("aime24", "AIME 2024, 30 problems", 8192, "aime2024*.json*", "aime_2024*.json*", "AIME_2024/*.parquet"),
        _row("amc", "AMC 12 of 2022 and 2023, 83 problems", 4096, "amc*.json*"),
        _row("humaneval", "HumanEval, 164 functions", 1024, "HumanEval.jsonl.gz", "HumanEval.jsonl"),
        _row(
            "mbpp", "MBPP (sanitized), 257 functions", 1024, "mbpp_sanitized.json", "sanitized-mbpp.json", split="test"
        ),
        _row("ifeval", "IFEval, 541 prompts", 1280, "ifeval*.jsonl"),
    )
}


def benchmark(name: str) -> Benchmark:
    """The benchmark of a name; an unknown one is an error that lists them."""
    if name not in BENCHMARKS:
        raise unknown("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]


def find_file(name: str, folder: Path | None) -> Path:
    """The file of a benchmark in a folder, or in that of `BURNISH_DATA`."""
    files = benchmark(name).files
    given = folder or (Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None)
    if given is None:
        raise UserError(
            f"where are the files of {name}? give the folder with --data-dir, or in the environment variable {FOLDER_VARIABLE}"
        )
    if not given.is_dir():
        raise UserError(f"{given} is no folder; the files of {name} are looked for in it")
    found = look_for(name, given)
    if found is None:
        raise UserError(f"{given} holds no file of {name}; looked for {', '.join(files)}")
    return found


def look_for(name: str, folder: Path) -> Path | None:
    """The file of a benchmark in a folder, if it is there."""
    for pattern in benchmark(name).files:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        if found:
            return found[0]
    return None


def benchmark_source(name: str, folder: Path | None) -> dict[str, Any]:
    """The data source of a benchmark, as a config spells it."""
    row = benchmark(name)
    source = {"path": str(find_file(name, folder)), "shape": row.shape, "name": row.name}
    return {**source, **({"split": row.split} if row.split else {})}
