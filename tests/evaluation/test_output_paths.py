"""Where the files go, and when that is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.evaluation.output_paths import OutputPaths, find_output_paths, model_name


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def names(out: str | None, model: str, *data: str) -> list[str]:
    return [
        str(place.completions) for place in find_output_paths(None if out is None else Path(out), Path(model), data)
    ]


def test_names_say_model_and_data() -> None:
    assert names(None, "my-model", "gsm8k", "data/test.jsonl", "task:reasoning-gym/x") == [
        "eval-my-model/gsm8k.jsonl",
        "eval-my-model/test.jsonl",
        "eval-my-model/reasoning-gym-x.jsonl",
    ]
    assert names("mine", "m", "data/*.parquet") == ["mine/data.jsonl"]
    assert names("qwen2.5", "m", "a.jsonl") == ["qwen2.5/a.jsonl"]  # no ending, a version
    assert names("o.parquet", "m", "gsm8k") == ["o.parquet"]
    assert model_name(Path("runs/r1/checkpoints/step-000050")) == "r1-step-000050"


def test_two_data_sets_of_one_name_and_the_name_of_all_results_are_told_apart() -> None:
    assert names("o", "m", "a/x.jsonl", "b/x.jsonl", "results.jsonl") == [
        "o/x.jsonl",
        "o/x-2.jsonl",
        "o/results-2.jsonl",
    ]


@pytest.mark.parametrize(
    ("out", "data", "message"),
    [
        ("a.txt", ["x"], r"written as \.jsonl or \.parquet"),
        ("a.jsonl", ["x", "y"], "one file, and there are 2 data sets"),
        ("no/a.jsonl", ["x"], "folder no does not exist"),
        ("no/a", ["x"], "folder no does not exist"),
        ("d.jsonl", ["x"], "is a directory"),
        ("file", ["x"], "is a file"),
    ],
)
def test_a_place_that_cannot_be_is_refused(out: str, data: list[str], message: str) -> None:
    Path("d.jsonl").mkdir()
    Path("file").touch()
    with pytest.raises(UserError, match=message):
        find_output_paths(Path(out), Path("m"), data)


def test_what_is_finished_is_found_and_what_is_foreign_refused() -> None:
    place, settings = OutputPaths("a", Path("a.jsonl")), {"seed": 0}
    assert place.finished(settings) is None
    Path("a.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"a\.jsonl exists; give --force"):
        place.finished(settings)
    Path("a.json").write_text(json.dumps({"settings": settings, "accuracy": 0.5}))
    found = place.finished(settings)
    assert found is not None
    assert found["accuracy"] == 0.5
    with pytest.raises(UserError, match="seed: 0 there, 1 now"):
        place.finished({"seed": 1})
    Path("a.partial.jsonl").touch()  # killed between the last files: its journal tells
    assert place.finished(settings) is None


def test_force_removes_an_evaluation_and_nothing_else() -> None:
    place = OutputPaths("a", Path("a.jsonl"))
    for path, content in ((place.result, '{"settings": {}}'), (place.completions, "x"), (place.journal, "x")):
        path.write_text(content)
    place.clear()
    assert list(Path.cwd().iterdir()) == []
    place.result.write_text('{"mine": 1}')
    with pytest.raises(UserError, match=r"a\.json exists and is no result of"):
        place.clear()
    assert place.result.exists()
