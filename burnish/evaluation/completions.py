"""The completions of an evaluation: one row per sample in a jsonl or parquet file, and the partial file while it runs.

A finished file is written atomically. While an evaluation runs, `<name>.partial.jsonl` holds the settings in its first line and
one scored completion in each further line. So a kill loses seconds, and no completion is sampled twice. A line that a kill
tore is removed when the command is repeated. So are the rows of a game of several players that lacks a row of one of them. Other
settings are an error that names the differences, because completions that were sampled in two ways are no measurement. The partial
file is deleted when the result is written.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from burnish.config.errors import UserError
from burnish.core.trajectory import EPISODE_METRICS, EVENTS, LAST_WORDS, PLAYERS, Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.row import answer_text
from burnish.evaluation.answers import read_answer
from burnish.evaluation.result import Row
from burnish.evaluation.strategies.search_tree import SEARCH
from burnish.models.tokenizer import Tokenizer
from burnish.run.durable_files import append, atomic_write
from burnish.trainers.episode_rows import episode_entries, opening_text

SUFFIXES = (".jsonl", ".parquet")
TAGS = ("subject", "level", "type", "category", "difficulty", "ability", "language", "year")
"""Columns of a data set by which results are broken down."""
SYNC_INTERVAL_S = 1.0
"""A loss of power costs at most this many seconds of completions. A kill costs only those that are being scored."""
MAX_SHOWN_SETTINGS = 8
_OBJECTS = (
    "tags",
    "parts",
    "turns",
    "events",
    "metrics",
    "search",
)  # JSON text in parquet, where a column has one type
_COLUMNS = ("id", "sample", "completion", "accuracy", "reward", "length", "answer")


def completion_row(prompt: Prompt, kind: str, t: Trajectory) -> Row:
    """Return a completion with its question and score as plain values. `kind` is the verifier that judged it."""
    is_played = "environment" in t.parts or len(t.turns) > 1  # a dialogue has no answer to vote on
    answer, question = read_answer("" if is_played else kind, t.completion), prompt.row
    tags = {name: question.extra[name] for name in TAGS if isinstance(question.extra.get(name), str | int | float)}
    return {
        "id": t.prompt_id,
        "sample": t.sample,
        **({} if t.role is None else {"role": t.role}),
        "data_source": question.data_source,
        "tags": tags,
        "prompt": prompt.text,
        "completion": t.completion,
        "answer": None if question.answer is None else answer_text(question.answer),
        "answered": answer.text,
        "formatted": answer.is_marked,
        "accuracy": t.accuracy,
        "reward": t.reward,
        "parts": t.parts,
        "length": t.num_actions,
        "finish": t.finish,
        "truncated": t.truncated and t.finish != "turns",
        "timed_out": bool(t.metadata.get("timed_out")),
        "error": t.error,
        **({SEARCH: t.metadata[SEARCH]} if SEARCH in t.metadata else {}),
    }


def token_columns(t: Trajectory) -> Row:
    """Return the tokens of a completion without an environment, and their mean log-prob."""
    node = t.nodes[-1]
    logp = 0.0 if node.logp is None or not len(node.logp) else float(node.logp.mean(dtype=np.float64))
    return {"tokens": node.tokens.tolist() if node.logp is not None else [], "mean_logp": logp}


def episode_row(prompt: Prompt, kind: str, t: Trajectory, episode: int, tokenizer: Tokenizer) -> Row:
    """Return an episode with an environment: `completion_row`, the prompt that the model read, its turns and what went wrong.

    `episode` is its index among the samples of the prompt. The players of one game have it in common.
    """
    return completion_row(prompt, kind, t) | {
        "prompt": opening_text(t, prompt, tokenizer),
        "episode": episode,
        **({} if t.role is None else {"players": t.metadata[PLAYERS]}),
        "num_turns": len(t.turns),
        "turns": episode_entries(t, tokenizer),
        "last_words": t.metadata.get(LAST_WORDS),
        "events": t.metadata.get(EVENTS, []),
        "metrics": t.metadata.get(EPISODE_METRICS, {}),
    }


def whole_games(rows: list[Row]) -> list[Row]:
    """Return the rows without repetitions, and without games of several players that lack the row of one of them."""
    last = {(row["id"], row["sample"]): row for row in rows}
    found = Counter(_game(row) for row in last.values())
    return [row for row in last.values() if found[_game(row)] == row.get("players", 1)]


def _game(row: Row) -> tuple[str, int]:
    return row["id"], row["episode"] if "episode" in row else row["sample"]


def encode_row(row: Row) -> bytes:
    """Return the line of a row. A lone surrogate from a data file has no UTF-8 form and is replaced."""
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def write_completions(path: Path, rows: list[Row]) -> None:
    """Write the rows. `tags`, `parts` and `search` are objects in jsonl and JSON text in parquet."""
    if path.suffix == ".jsonl":
        atomic_write(path, b"".join(map(encode_row, rows)))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, number, whole, truth = pa.string(), pa.float64(), pa.int64(), pa.bool_()
    types = {"sample": whole, "length": whole, "accuracy": number, "reward": number}
    types |= dict.fromkeys(("episode", "players", "num_turns"), whole)
    types |= dict.fromkeys(("truncated", "formatted", "timed_out"), truth)
    flat = [
        {**row, **{name: json.dumps(row[name], sort_keys=True) for name in _OBJECTS if name in row}} for row in rows
    ]
    columns = {name: [_encodable(row[name]) for row in flat] for name in rows[0]}
    schema = pa.schema([(name, types.get(name, text)) for name in columns])
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns, schema=schema), buffer, compression="zstd")
    atomic_write(path, buffer.getvalue())


def read_completions(path: Path) -> list[Row]:
    """Read a file that `write_completions` wrote."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        rows = pq.ParquetFile(path).read().to_pylist()
        rows = [{**row, **{name: json.loads(row[name]) for name in _OBJECTS if name in row}} for row in rows]
    else:
        rows = [_row_of(line, f"{path}:{i}") for i, line in enumerate(path.read_bytes().split(b"\n"), 1) if line]
    missing = [name for name in _COLUMNS if rows and name not in rows[0]]
    if missing or not rows:
        what = f"has no column {missing[0]!r}" if missing else "is empty"
        raise UserError(f"{path} {what}; it is no file of completions that `burnish eval` wrote")
    return rows


def _row_of(line: bytes, where: str) -> Row:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); it is no file of completions") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: not an object; it is no file of completions")
    return row


def _encodable(value: Any) -> Any:
    return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value


class PartialCompletions:
    """The open partial file of one evaluation. `rows` holds the completions so far; `add` appends."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self.path, self.rows = path, list[Row]()
        self._synced = time.monotonic()
        self._lock: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._begin(self._lock, settings)
        except BlockingIOError:
            self.close()
            raise UserError(f"{path} is being written by another burnish eval; wait for it, or give --out") from None
        except BaseException:
            self.close()
            raise

    def add(self, rows: list[Row]) -> None:
        """Append completions. They are synced to disk about every second."""
        is_due = time.monotonic() - self._synced > SYNC_INTERVAL_S
        append(self.path, b"".join(map(encode_row, rows)), durable=is_due)
        self._synced = time.monotonic() if is_due else self._synced
        self.rows += rows

    def close(self, remove: bool = False) -> None:
        """Close the file; with `remove`, delete it. Safe to call twice."""
        if self._lock is None:
            return
        if remove:
            self.path.unlink()
        os.close(self._lock)
        self._lock = None

    def __enter__(self) -> PartialCompletions:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(remove=not self.rows)

    def _begin(self, lock: int, settings: dict[str, Any]) -> None:
        data = self.path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:  # new, or killed before its first line was written
            os.ftruncate(lock, 0)
            append(self.path, json.dumps({"settings": settings}).encode() + b"\n", durable=True)
            return
        try:
            first, *rows = [json.loads(line) for line in whole.splitlines()]
            refuse_other_settings(first["settings"], settings, self.path)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} is no journal of an evaluation ({error}); move it away") from error
        os.ftruncate(lock, len(whole))
        self.rows = whole_games(rows)


def refuse_other_settings(then: dict[str, Any], now: dict[str, Any], path: Path) -> None:
    """Raise a `UserError` if the completions in a file were made with other settings; it names the differences."""
    names = [name for name in sorted(then.keys() | now.keys()) if then.get(name) != now.get(name)]
    if names:
        shown = [f"  {name}: {then.get(name)!r} there, {now.get(name)!r} now" for name in names[:MAX_SHOWN_SETTINGS]]
        more = [f"  and {len(names) - MAX_SHOWN_SETTINGS} more"] if len(names) > MAX_SHOWN_SETTINGS else []
        raise UserError(
            "\n".join([f"{path} holds completions made with other settings:", *shown, *more])
            + "\nrepeat those settings to go on, give --force to start over, or --out for another place"
        )
