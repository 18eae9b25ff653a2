"""Benchmarks by name: their files are found in the user's folder, their rows carry what judges them."""

from __future__ import annotations

from pathlib import Path

import pytest

from burnish.config.data import Reward, Source
from burnish.config.errors import UserError
from burnish.data.benchmarks import BENCHMARKS, FOLDER_VARIABLE, benchmark, benchmark_source, find_file
from burnish.data.rows import read_rows

SHARED = Path(__file__).parents[2] / "../shared/data"
NUM_ROWS = {"gsm8k": 1319, "math500": 500, "aime24": 30, "amc": 83, "humaneval": 164, "mbpp": 257, "ifeval": 541}


def test_a_file_is_found_by_its_usual_names_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text("")
    assert find_file("gsm8k", tmp_path) == tmp_path / "gsm8k/test.jsonl"
    (tmp_path / "gsm8k_test.jsonl").write_text("")
    assert find_file("gsm8k", tmp_path) == tmp_path / "gsm8k_test.jsonl"
    assert benchmark_source("gsm8k", tmp_path) == {
        "path": str(tmp_path / "gsm8k_test.jsonl"),
        "shape": "gsm8k",
        "name": "gsm8k",
    }


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"where are the files of amc.*--data-dir.*{FOLDER_VARIABLE}"):
        find_file("amc", None)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"holds no file of amc; looked for amc_test\.jsonl"):
        find_file("amc", None)
    (tmp_path / "amc_rllm.json").write_text("[]")
    assert find_file("amc", None) == tmp_path / "amc_rllm.json"
    with pytest.raises(UserError, match="is no folder"):
        find_file("amc", tmp_path / "amc_rllm.json")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown benchmark 'gsm8'; did you mean 'gsm8k'"):
        benchmark("gsm8")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_names_a_reward_a_config_accepts(name: str) -> None:
    assert Reward.model_validate({"parts": benchmark(name).reward}).parts[0].name
    assert benchmark(name).max_tokens >= 512


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published data sets are not here")
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_published_benchmarks_are_read_whole(name: str) -> None:
    rows = read_rows(Source(**benchmark_source(name, SHARED)))
    assert len(rows) == NUM_ROWS[name]
    subject = benchmark(name).subject
    assert subject is None or all(isinstance(row.extra[subject], str) for row in rows)
