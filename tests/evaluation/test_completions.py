"""The file of completions: what it is called, what it holds, when it is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from burnish.config.errors import UserError
from burnish.evaluation.completions import check_target, default_target, write_completions


def row(sample: int, completion: str, reward: float | None) -> dict[str, Any]:
    return {
        "id": "d/0",
        "sample": sample,
        "data_source": "d",
        "prompt": "q",
        "completion": completion,
        "answer": None,
        "accuracy": reward,
        "reward": reward,
        "parts": {} if reward is None else {"exact": reward},
        "length": 3,
        "truncated": False,
        "error": "boom" if reward is None else None,
    }


ROWS = [row(0, "né\u2028", 1.0), row(1, "x", None)]


def test_jsonl_and_parquet_hold_the_same_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.parquet"):
        write_completions(tmp_path / name, ROWS)
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().split("\n")[:-1]] == ROWS
    table = pq.ParquetFile(tmp_path / "a.parquet").read().to_pylist()
    assert [{**r, "parts": json.loads(r["parts"])} for r in table] == ROWS


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_a_lone_surrogate_does_not_cost_the_evaluation(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    write_completions(path, [row(0, "a\ud800b", 1.0)])
    assert b"a?b" in path.read_bytes()


def test_the_default_name_says_model_and_data(tmp_path: Path) -> None:
    assert str(default_target(tmp_path / "my-model", "data/test.jsonl")) == "eval-my-model-test.jsonl"
    assert str(default_target(tmp_path / "m", "task:reasoning-gym/x")) == "eval-m-reasoning-gym-x.jsonl"
    assert str(default_target(tmp_path / "m", "data/*.parquet")) == "eval-m.jsonl"


def test_a_target_that_cannot_be_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(UserError, match="exists; give --force"):
        check_target(tmp_path / "a.jsonl", force=False)
    check_target(tmp_path / "a.jsonl", force=True)
    with pytest.raises(UserError, match=r"written as \.jsonl or \.parquet"):
        check_target(tmp_path / "a.txt", force=False)
    with pytest.raises(UserError, match=r"the folder .* does not exist"):
        check_target(tmp_path / "no" / "a.jsonl", force=False)
    (tmp_path / "d.jsonl").mkdir()
    with pytest.raises(UserError, match="is a directory"):
        check_target(tmp_path / "d.jsonl", force=True)
