"""Overlap of evaluated questions with training data: which questions, their accuracy on each side, and what cannot be compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.evaluation.contamination import (
    Contamination,
    contamination_json,
    contamination_text,
    find_contamination,
    training_questions,
)
from burnish.evaluation.statistics import mean_at_k, wilson_interval
from tests.evaluation.completion_rows import row

LONG = "Ann buys three red apples and four green pears at the market on Monday and eats"
QUESTIONS = [f"{LONG} two.", "How many apples?", "Something else entirely?", "And the rest?"]


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def test_set(tmp_path: Path) -> Source:
    path = write(tmp_path / "gsm8k_test.jsonl", [{"question": text, "answer": "#### 1"} for text in QUESTIONS])
    return Source(path=path, shape="gsm8k", name="gsm8k")


def completions(*accuracies: float) -> list[dict[str, Any]]:
    return [row(f"gsm8k/{index}", sample, value) for index, value in enumerate(accuracies) for sample in range(2)]


def test_questions_in_the_training_data_are_found_and_measured_apart(tmp_path: Path, test_set: Source) -> None:
    train = write(
        tmp_path / "train.jsonl",
        [
            {"prompt": [{"role": "user", "content": "how many: APPLES"}], "completion": "3"},
            {"question": f"{LONG} nothing at all.", "answer": "0"},
            {"question": "Unrelated", "answer": "0"},
        ],
    )
    found = find_contamination(completions(1, 1, 0, 1), test_set, training_questions(tmp_path, (train,), None))
    assert isinstance(found, Contamination)
    assert (found.exact, found.shared) == (("gsm8k/1",), ("gsm8k/0",))
    assert found.overlapping == (2, mean_at_k([[1, 1], [1, 1]]))
    assert found.clean == (2, mean_at_k([[0, 0], [1, 1]]))
    text = contamination_text(found)
    assert "2 of 4 questions overlap with the training data (3 rows): 1 the same, 1 share 13 words" in text
    assert "  clean        0.500" in text
    assert "gsm8k/1 ~ train.jsonl:1: the whole question" in text
    saved = json.loads(json.dumps(contamination_json(found)))
    clean = found.clean[1]
    assert clean is not None
    assert saved["clean"] == {"num_questions": 2, "value": 0.5, "low": clean.low, "high": clean.high}
    assert (saved["exact"], saved["shared"], saved["training_rows"], saved["words"]) == (
        ["gsm8k/1"],
        ["gsm8k/0"],
        3,
        13,
    )


def test_only_evaluated_questions_count_and_a_side_without_questions_has_no_accuracy(
    tmp_path: Path, test_set: Source
) -> None:
    train = write(tmp_path / "train.jsonl", [{"question": QUESTIONS[3], "answer": "#### 1"}])
    training = training_questions(tmp_path, (f"gsm8k:{train}",), None)
    found = find_contamination([row("gsm8k/2", 0, 1.0)], test_set, training)
    assert isinstance(found, Contamination)
    assert (found.num_questions, found.num_overlapping, found.overlapping) == (1, 0, (0, None))
    assert found.clean == (1, wilson_interval(1.0, 1))
    assert contamination_json(found)["overlapping"] == {"num_questions": 0}


def run_folder(folder: Path, config: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    return folder


def test_a_run_names_its_training_files_also_from_its_checkpoint(tmp_path: Path, test_set: Source) -> None:
    train = write(tmp_path / "t.jsonl", [{"q": QUESTIONS[0], "a": "1"}, {"q": QUESTIONS[1], "a": "1"}])
    warm = write(tmp_path / "w.jsonl", [{"messages": [{"role": "user", "content": QUESTIONS[2]}]}])
    run = run_folder(
        tmp_path / "run",
        f"data: {{train: [{{path: {train}, prompt_key: q, answer_key: a, limit: 1}}, {{task: sort_digits}}]}}\n"
        f"warm_start: {{data: [{{path: {warm}}}]}}\n",
    )
    for model in (run, run / "checkpoints/step-000002"):
        model.mkdir(parents=True, exist_ok=True)
        found = find_contamination(completions(1, 1, 0, 1), test_set, training_questions(model, (), None))
        assert isinstance(found, Contamination)
        assert (found.exact, found.shared) == (("gsm8k/0", "gsm8k/2"), ())
        assert "not compared: sort_digits is a generated task" in contamination_text(found)
    named = training_questions(tmp_path, (str(run),), None)
    assert [question for _, question in named.questions] == [QUESTIONS[0], QUESTIONS[2]]


def test_the_runs_that_a_model_came_from_are_followed_to_the_first(tmp_path: Path, test_set: Source) -> None:
    files = [write(tmp_path / f"{k}.jsonl", [{"question": QUESTIONS[k], "answer": "1"}]) for k in range(3)]
    runs = [tmp_path / name for name in ("sft", "first", "second")]
    starts = ["path: org/base", f"path: {runs[0]}", f"path: org/base, adapter: {runs[1] / 'checkpoints/step-000004'}"]
    for run, start, file, section in zip(runs, starts, files, ("sft", "data", "data"), strict=True):
        key = "data" if section == "sft" else "train"
        run_folder(run, f"model: {{{start}}}\n{section}: {{{key}: [{{path: {file}}}]}}\n")
    (runs[1] / "checkpoints/step-000004").mkdir(parents=True)
    training = training_questions(runs[2], (), None)
    found = find_contamination(completions(1, 1, 0, 1), test_set, training)
    assert isinstance(found, Contamination)
    assert found.exact == ("gsm8k/0", "gsm8k/1", "gsm8k/2")
    assert training.runs == [str(runs[2]), str(runs[1]), str(runs[0])]
    assert (
        f"compared with the training data of {runs[2]}, {runs[1]}, {runs[0]}; what org/base had read before is not known"
        in contamination_text(found)
    )
    saved = contamination_json(found)
    assert (saved["runs"], saved["started_from"]) == (training.runs, ["org/base"])
    (runs[0] / "config.yaml").write_text(f"model: {{path: {runs[2]}}}\n")  # names no data, and is a circle
    again = training_questions(runs[2], (), None)
    assert ([question for _, question in again.questions], again.origins) == (
        [QUESTIONS[2], QUESTIONS[1]],
        ["org/base"],
    )
    assert again.not_compared == [f"{runs[0] / 'config.yaml'} names no training data"]


def test_a_run_whose_model_was_new_or_is_gone_says_what_is_not_known(tmp_path: Path, test_set: Source) -> None:
    train = write(tmp_path / "t.jsonl", [{"question": "q", "answer": "1"}])
    new = run_folder(tmp_path / "new", f"model: {{new: {{}}, path: null}}\ndata: {{train: [{{path: {train}}}]}}\n")
    assert training_questions(new, (), None).chain == f"the training data of {new}"
    gone = run_folder(tmp_path / "gone", "model: {path: removed/run}\ndata: {train: [{task: sort_digits}]}\n")
    text = find_contamination(completions(1, 1), test_set, training_questions(gone, (), None))
    assert isinstance(text, str)
    assert text.endswith(f"; looked at the training data of {gone}; what removed/run had read before is not known")
    assert training_questions(tmp_path, (train,), None).chain is None


def test_questions_of_training_rows_in_every_format_are_found(tmp_path: Path, test_set: Source) -> None:
    rows = [
        {"conversations": [{"from": "human", "value": QUESTIONS[1]}, {"from": "gpt", "value": QUESTIONS[3]}]},
        {"instruction": "Something else", "input": "entirely?", "output": "x"},
        {
            "prompt": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": LONG}]},
            ]
        },
    ]
    train = write(tmp_path / "train.jsonl", rows)
    found = find_contamination(completions(1, 1, 0, 1), test_set, training_questions(tmp_path, (train,), None))
    assert isinstance(found, Contamination)
    assert (found.exact, found.shared) == (("gsm8k/1", "gsm8k/2"), ("gsm8k/0",))


def test_generated_problems_are_not_compared_and_the_reason_is_kept(tmp_path: Path, test_set: Source) -> None:
    run = run_folder(tmp_path / "run", "data: {train: [{task: sort_digits}]}\n")
    found = find_contamination(completions(1, 0, 0, 0), test_set, training_questions(run, (), None))
    assert contamination_text(found).startswith("overlap      not compared: sort_digits is a generated task")
    assert contamination_json(found) == {"not_compared": [found]}
    train = write(tmp_path / "t.jsonl", [{"question": "q", "answer": "1"}])
    training = training_questions(tmp_path, (train,), None)
    generated = find_contamination([row("sort_digits/test/0", 0, 1.0)], Source(task="sort_digits"), training)
    assert generated == "sort_digits generates its problems, and its training and held-out problems never overlap"


def test_what_cannot_be_compared_with_is_an_error(tmp_path: Path, test_set: Source) -> None:
    with pytest.raises(UserError, match=r"is no run that names its training data; name the files: --contamination"):
        training_questions(tmp_path, (), None)
    run = run_folder(tmp_path / "run", f"data: {{train: [{{path: {tmp_path / 'gone.jsonl'}}}]}}\n")
    with pytest.raises(UserError, match=r"no such file: .*gone\.jsonl.*if the training data has moved, name it"):
        training_questions(run, (), None)
    with pytest.raises(UserError, match="names no training data"):
        training_questions(run_folder(tmp_path / "other", "seed: 1\n"), (), None)
    train = write(tmp_path / "t.jsonl", [{"question": "q", "answer": "1"}])
    with pytest.raises(UserError, match=r"has no row gsm8k/9; it is not the file of the completions"):
        find_contamination([row("gsm8k/9", 0, 1.0)], test_set, training_questions(tmp_path, (train,), None))
