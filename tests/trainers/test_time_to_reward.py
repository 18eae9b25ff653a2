"""The speed-run: what a training may see, what its clock counts, and what the page shows of its rows."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from burnish.config.loading import dump, load
from burnish.config.schema import TrainConfig

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCH))
    known = set(sys.modules)
    yield importlib.import_module("time_to_reward")
    for name in set(sys.modules) - known:  # `common` is a name that other modules may have
        if getattr(sys.modules[name], "__file__", None) and str(BENCH) in str(sys.modules[name].__file__):
            del sys.modules[name]


def values(overrides: list[str]) -> dict[str, Any]:
    return {key: json.loads(text)[0] for key, _, text in (one.partition("=") for one in overrides)}


def test_settings_are_chosen_on_training_questions_that_the_training_does_not_see(bench: Any, tmp_path: Path) -> None:
    bench.make_tiny(tmp_path)
    every = bench.read_rows_of(tmp_path / "gsm8k_train.jsonl")
    found = values(bench.data_overrides(bench.TASKS["gsm8k"], tmp_path, tmp_path, True, 10))
    trained = every[: found["data.train"]["limit"]]
    held_back = bench.read_rows_of(Path(found["data.validation"]["path"]))
    assert len(held_back) == 10
    assert trained + held_back == every
    assert bench.read_rows_of(Path(found["data.train"]["path"])) == every
    measured = values(bench.data_overrides(bench.TASKS["gsm8k"], tmp_path, tmp_path, False, 10))
    assert "limit" not in measured["data.train"]
    assert measured["data.validation"]["path"] == str(tmp_path / "gsm8k_test.jsonl")


def test_training_problems_without_an_answer_are_left_out(bench: Any, tmp_path: Path) -> None:
    rows = [
        {"problem": "1+1?", "answer": "2"},
        {"problem": "Draw it.", "answer": ""},
        {"problem": "2+1?", "answer": "3"},
    ]
    (tmp_path / "math_train_rllm.json").write_text(json.dumps(rows))
    assert bench.read_rows_of(bench.training_file(bench.TASKS["math500"], tmp_path, tmp_path)) == [rows[0], rows[2]]


def test_the_sums_of_the_test_are_not_trained_on_in_either_order(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "NUM_SUMS_DRAWN", 2000)
    bench.make_sums(tmp_path)
    pairs = [
        {tuple(sorted(row["question"].split("?")[0].split()[2::2])) for row in bench.read_rows_of(tmp_path / f"sums_{side}.jsonl")}
        for side in ("train", "test")
    ]  # fmt: skip
    assert len(pairs[0]) > 1000
    assert not pairs[0] & pairs[1]


def test_the_clock_stands_still_while_a_mark_is_measured(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed, now = sys.modules["timed_training"], [1000.0]
    monkeypatch.setattr(timed.time, "time", lambda: now[0])
    clock = timed.Clock(started=990.0)
    assert clock.seconds() == 10
    now[0] = 1007.0
    clock.pause(7.0)
    assert clock.seconds() == 10
    assert timed.predicted_step_s([]) == timed.FIRST_STEP_S
    assert timed.predicted_step_s([8.0]) == pytest.approx(8.8)
    assert timed.predicted_step_s([8.0, 100, 2, 4, 3, 2, 4]) == pytest.approx(3.3)


@pytest.mark.usefixtures("shared_reward_workers")
def test_a_training_is_measured_before_its_first_step_and_before_its_last(bench: Any, tmp_path: Path) -> None:
    timed, model = sys.modules["timed_training"], bench.make_tiny(tmp_path)
    sources = bench.data_overrides(bench.TASKS["gsm8k"], tmp_path, tmp_path, True, 10)
    small = [*bench.WITHOUT_VALIDATION, *bench.TINY, *sources, f"model.path={model}", f"run.directory={tmp_path}"]
    recipe, saved = str(bench.RECIPES / "gsm8k_fast.yaml"), tmp_path / "rows.json"
    job = timed.Job("gsm8k", "tiny", 0, recipe, [*small, "training.steps=3"], [0.0, 1e9], str(saved), timed.time.time())
    rows = timed.train(job)
    assert [(row["mark_s"], row["steps"], row["questions"]) for row in rows] == [(0.0, 0, 10), (1e9, 2, 10)]
    assert 0 < rows[0]["ready_s"] <= rows[0]["seconds"] < rows[1]["seconds"]
    assert json.loads(saved.read_text()) == rows


def test_the_page_shows_the_mean_of_the_seeds_and_the_newest_of_equal_rows(bench: Any, tmp_path: Path) -> None:
    def row(seed: int, accuracy: float, kind: str = "measure", **more: Any) -> dict[str, Any]:
        common = {"task": "gsm8k", "system": "burnish", "mark_s": 100.0, "seconds": 97.2, "ci": [0.6, 0.8]}
        return {**common, "kind": kind, "seed": seed, "accuracy": accuracy, **more}

    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    bench.merge(file, {"gpu": None}, [row(0, 0.5), row(1, 0.72)])
    choice = {"steps": 22, "step_s": 3.75, "overrides": ["rollout.temperature=0.7"], "together": 1}
    bench.merge(file, {"gpu": None}, [row(0, 0.70), row(0, 0.69, "choose", **choice)])
    names = ("measured", "choices")
    page.write_text("".join(f"a\n<!-- {name}: begin -->\nold\n<!-- {name}: end -->\nz\n" for name in names))
    bench.write_page([file], page)
    text = page.read_text()
    both = "0: 70.0% [60.0, 80.0] after 97 s; 1: 72.0% [60.0, 80.0] after 97 s"
    assert f"| gsm8k, 100 s | burnish | {both} | 71.0% |" in text
    assert "| gsm8k | burnish | 69.0% [60.0, 80.0] after 97 s | 22 | 3.8 s | `rollout.temperature=0.7` |" in text
    assert "old" not in text
    assert text.count("a\n<!--") == text.count("-->\nz\n") == 2


def test_every_setting_of_the_grid_is_a_valid_recipe_and_differs_from_the_others(bench: Any) -> None:
    grid = yaml.safe_load(bench.GRID.read_text())
    assert set(grid) == set(bench.TASKS)
    for task, settings in grid.items():
        recipe = bench.RECIPES / f"{bench.TASKS[task].recipe}.yaml"
        sources = [f"data.{side}=[{{path: rows.jsonl}}]" for side in ("train", "validation")]
        overrides = [*bench.WITHOUT_VALIDATION, *sources]
        made = [dump(load(TrainConfig, recipe, [*overrides, *own]).config) for own in settings.values()]
        assert len(set(made)) == len(made)
