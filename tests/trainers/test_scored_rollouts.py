"""scored.json: the latest scored rollouts, bounded, and never a reason for a run to end or to wait."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.core.trajectory import TokenNode, Trajectory, TurnSpan, chain_nodes
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.models.tokenizer import Tokenizer
from burnish.trainers.scored_rollouts import MAX_CHARS, MAX_ROLLOUTS, ScoredRollouts, cut, scored_row


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters("0123456789>")


def rollout(tokenizer: Tokenizer, sample: int, **fields: Any) -> tuple[Trajectory, PromptSample]:
    draw = PromptSample(Prompt(Row("rows/7", "1>", "rows", "9"), "1>", tokenizer.encode("1>")), 0, step=4)
    tokens = np.array(tokenizer.encode("1>9"))
    nodes = chain_nodes(tokens, np.arange(3) == 2, np.zeros(3, np.float32), np.zeros(3, np.int32))
    return Trajectory("rows/7", 0, sample, nodes, "stop", "9", **{"reward": 0.5} | fields), draw


class Clock:
    """A clock that only a test moves, and that a write takes `cost` of."""

    def __init__(self) -> None:
        self.now, self.cost = 0.0, 0.0

    def __call__(self) -> float:
        self.now += self.cost
        return self.now


def samples_in(path: Path) -> list[int]:
    return [row["sample"] for row in json.loads(path.read_text())["rollouts"]]


def test_the_latest_are_kept_and_a_burst_is_written_when_the_step_has_all(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, clock = tmp_path / "scored.json", Clock()
    scored = ScoredRollouts(path, tokenizer, pytest.fail, clock)
    for sample in range(MAX_ROLLOUTS + 10):
        scored.add(*rollout(tokenizer, sample))
    assert samples_in(path) == [0], "the others came within the interval"
    scored.flush()
    assert samples_in(path) == list(range(10, MAX_ROLLOUTS + 10))
    path.unlink()
    scored.add(*rollout(tokenizer, -1))
    scored.flush()
    assert not path.exists(), "there is nothing new"
    clock.now = 1.0
    scored.add(*rollout(tokenizer, 99))
    assert samples_in(path)[-1] == 99


def test_a_slow_write_is_repeated_after_twenty_times_its_duration(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, clock = tmp_path / "scored.json", Clock()
    scored = ScoredRollouts(path, tokenizer, pytest.fail, clock)
    clock.cost = 0.5  # each look at the clock, so a write takes at least that
    scored.add(*rollout(tokenizer, 1))
    clock.cost, clock.now = 0.0, 5.0
    scored.add(*rollout(tokenizer, 2))
    scored.flush()
    assert samples_in(path) == [1]
    clock.now = 20.0
    scored.flush()
    assert samples_in(path) == [1, 2]


def test_a_file_that_cannot_be_written_is_told_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    notes: list[str] = []
    scored = ScoredRollouts(tmp_path / "gone" / "scored.json", tokenizer, notes.append, Clock())
    for sample in range(3):
        scored.add(*rollout(tokenizer, sample))
        scored.flush()
    assert len(notes) == 1
    assert "scored.json (No such file or directory)" in notes[0]


def test_a_row_has_texts_and_numbers_that_json_has(tokenizer: Tokenizer) -> None:
    row = scored_row(*rollout(tokenizer, 3, reward=float("nan"), error="boom"), tokenizer)
    assert (row["step"], row["group"], row["sample"]) == (4, "rows/7#0", 3)
    assert (row["prompt"], row["completion"], row["turns"]) == ("1>", "9", None)
    assert (row["reward"], row["error"], row["length"]) == (None, "boom", 1)
    trajectory, draw = rollout(tokenizer, 3)
    trajectory.nodes.append(TokenNode(1, np.array(tokenizer.encode("5"))))
    trajectory.turns = [TurnSpan(1, "start", 0.25)]
    assert [entry["text"] for entry in scored_row(trajectory, draw, tokenizer)["turns"]] == ["9", "5"]
    trajectory.turns = [TurnSpan(1, "start", float("nan"))]
    assert scored_row(trajectory, draw, tokenizer)["turns"][0]["reward"] is None


def test_a_long_text_loses_its_middle() -> None:
    assert cut("x" * MAX_CHARS) == "x" * MAX_CHARS
    short = cut("a" * MAX_CHARS + "b" * MAX_CHARS)
    assert short.startswith("a" * 4000 + "\n[... 8000 characters ...]\n")
    assert short.endswith("b" * 4000)
