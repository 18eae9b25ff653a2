"""Published data sets are converted to prompts with answers and verifiers; benchmarks are found by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Reward, Source
from burnish.config.errors import UserError
from burnish.data.math_datasets import BOXED_INSTRUCTION, last_boxed_answer
from burnish.data.published_datasets import (
    BENCHMARKS,
    FOLDER_VARIABLE,
    SHAPES,
    benchmark_source,
    find_benchmark_files,
    get_benchmark,
    to_verl_layout,
)
from burnish.data.published_example import UnusableRow
from burnish.data.row_formats import read_rows

PUBLISHED: list[tuple[str, dict[str, Any], str, Any]] = [
    # (shape, record as published, how the prompt begins, answer)
    ("gsm8k", {"question": "How many?", "answer": "So 2*5 = 10.\n#### 1,450"}, "How many?" + BOXED_INSTRUCTION, "1450"),
    ("math", {"problem": "1/2?", "answer": "\\frac{1}{2}", "type": "Algebra"}, "1/2?" + BOXED_INSTRUCTION, "\\frac{1}{2}"),
    ("math", {"problem": "x?", "solution": "so \\boxed{\\sqrt{2}}.", "level": "Level 3"}, "x?", "\\sqrt{2}"),
    ("math500", {"problem": "p", "solution": "", "answer": "(1, 2)", "subject": "Algebra", "level": 2}, "p", "(1, 2)"),
    ("aime24", {"prompt": [{"from": "user", "value": "Find it."}], "final_answer": "73"}, "Find it." + BOXED_INSTRUCTION, "73"),
    ("aime24", {"Problem": "Find it.", "Answer": 204}, "Find it.", "204"),
    ("amc", {"problem": "m+n?", "answer": 142.0, "difficulty": 2.0}, "m+n?" + BOXED_INSTRUCTION, "142"),
    ("amc", {"problem": "m+n?", "answer": -4.0}, "m+n?", "-4"),
    ("ifeval", {"prompt": "Shout.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"n": None}], "key": 1},
     "Shout.", '[{"id": "punctuation:no_comma"}]'),
    ("nq", {"question": "who?", "answer": ["Ann", "Ann B."]}, "who?", ["Ann", "Ann B."]),
    ("hotpotqa", {"question": "same?", "answer": "yes", "type": "comparison"}, "same?", ["yes"]),
    ("countdown", {"question": "...", "numbers": [13, 2, 5], "target": 78}, "Using all the numbers 13, 2, 5", 78),
    ("game24", {"Rank": "1", "Puzzles": "1 1 4 6"}, "Using all the numbers 1, 1, 4, 6", 24),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "begins", "answer"), PUBLISHED)
def test_a_published_row_gets_its_prompt_and_answer(
    name: str, record: dict[str, Any], begins: str, answer: Any
) -> None:
    made = to_verl_layout(record, "here", name)
    assert made["prompt"][0]["role"] == "user"
    assert made["prompt"][0]["content"].startswith(begins)
    assert made["reward_model"]["ground_truth"] == answer
    assert made["data_source"] == name
    assert made["extra_info"]["verifier"] == SHAPES[name].verifier


def test_rows_of_verl_keep_their_prompt_and_are_compared_without_its_request() -> None:
    text = "What is 3/7? Let's think step by step and output the final answer within \\boxed{}."
    record = {
        "data_source": "x",
        "prompt": [{"role": "user", "content": text}],
        "reward_model": {"ground_truth": "3/7", "style": "rule"},
    }
    made = to_verl_layout(record, "here", "deepscaler")
    assert made["prompt"] == record["prompt"]
    assert made["extra_info"]["question"] == "What is 3/7?"
    assert made["reward_model"]["ground_truth"] == "3/7"


def test_code_rows_carry_their_tests_and_show_what_a_program_must_be_called() -> None:
    mbpp = {
        "task_id": 12,
        "prompt": "Add.",
        "code": "",
        "test_imports": ["import math"],
        "test_list": ["assert f(1) == 2"],
    }
    made = to_verl_layout(mbpp, "here", "mbpp")
    assert json.loads(made["reward_model"]["ground_truth"]) == {"asserts": ["assert f(1) == 2"], "setup": "import math"}
    assert "assert f(1) == 2" in made["prompt"][0]["content"]
    begun = "def f(x):\n    '''Twice.'''\n"
    human = {"task_id": "HumanEval/0", "prompt": begun, "entry_point": "f", "test": "def check(candidate): pass"}
    made = to_verl_layout(human, "here", "humaneval")
    truth = json.loads(made["reward_model"]["ground_truth"])
    assert truth == {"check": "def check(candidate): pass", "entry_point": "f", "prefix": begun}
    assert begun.rstrip() in made["prompt"][0]["content"]
    assert "check(candidate)" not in made["prompt"][0]["content"]


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("gsm8k", {"question": "q", "answer": "I do not know"}, "no number behind ####"),
        ("gsm8k", {"question": " ", "answer": "#### 1"}, "no question"),
        ("math", {"problem": "q", "answer": None}, "no answer"),
        ("math", {"problem": "q", "answer": "  "}, "no answer"),
        ("math", {"problem": "q", "solution": "no box"}, "no answer"),
        ("amc", {"problem": "q", "answer": "about ten"}, "the answer is no number"),
        ("nq", {"question": "q", "answer": []}, "no answer"),
        ("mbpp", {"task_id": 1, "prompt": "q", "test_list": []}, "no tests"),
        (
            "deepscaler",
            {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": ""}},
            "no answer",
        ),
    ],
)
def test_a_row_without_an_answer_is_unusable_and_says_why(name: str, record: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        to_verl_layout(record, "here", name)


def test_a_row_of_another_shape_is_an_error_with_its_place() -> None:
    with pytest.raises(UserError, match=r"d\.jsonl:3: a row of gsm8k has a column 'question' .*has: text"):
        to_verl_layout({"text": "hello"}, "d.jsonl:3", "gsm8k")
    with pytest.raises(UserError, match=r"d\.jsonl:3: not a row of ifeval: 1 instructions with 2 sets"):
        to_verl_layout({"prompt": "p", "instruction_id_list": ["a"], "kwargs": [{}, {}]}, "d.jsonl:3", "ifeval")
    with pytest.raises(UserError, match="unknown data set 'gsm8'; did you mean 'gsm8k'"):
        to_verl_layout({}, "here", "gsm8")


@pytest.mark.parametrize(
    ("solution", "inside"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("$\\boxed 5$.", "5"),
        ("\\fbox{7}", "7"),
        ("set \\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{open", None),
        ("nothing", None),
    ],
)
def test_the_answer_of_a_solution_is_in_its_last_box(solution: str, inside: str | None) -> None:
    assert last_boxed_answer(solution) == inside


def test_a_source_with_a_shape_reads_a_published_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k_train.jsonl"
    path.write_text('{"question": "How many?", "answer": "#### 7"}\n{"question": "And?", "answer": "#### 8"}\n')
    rows = read_rows(Source(path=str(path), shape="gsm8k", name="train"))
    assert [row.id for row in rows] == ["train/0", "train/1"]
    assert rows[0].prompt == [{"role": "user", "content": "How many?" + BOXED_INSTRUCTION}]
    assert (rows[0].answer, rows[0].data_source, rows[0].extra["verifier"]) == ("7", "gsm8k", "number")
    plain = read_rows(Source(path=str(path), name="train"))
    assert (plain[0].prompt, plain[0].answer) == ("How many?", "#### 7")
    path.write_text('{"question": "How many?", "answer": null}\n')
    with pytest.raises(UserError, match=r"gsm8k_train\.jsonl:1: no answer; `burnish data prepare gsm8k` writes a file"):
        read_rows(Source(path=str(path), shape="gsm8k"))


def test_a_file_with_several_splits_is_read_by_split(tmp_path: Path) -> None:
    path = tmp_path / "mbpp.json"
    tasks = [{"task_id": n, "prompt": f"task {n}", "test_list": ["assert True"]} for n in (2, 11, 510, 601)]
    path.write_text(json.dumps(tasks))
    held_out = read_rows(Source(path=str(path), shape="mbpp", split="test"))
    assert [row.extra["task_id"] for row in held_out] == [11, 510]
    assert len(read_rows(Source(path=str(path), shape="mbpp"))) == 4
    with pytest.raises(UserError, match=r"has no split 'tests'; it can tell apart one of prompt, test"):
        read_rows(Source(path=str(path), shape="mbpp", split="tests"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"task": "addition", "shape": "gsm8k"}, "shape describes the rows of a file"),
        ({"path": "x.jsonl", "split": "test"}, "split needs a task, or a file with a shape"),
        ({"task": "addition", "split": "validation"}, "a task has the splits train and test"),
        ({"path": "x.jsonl", "shape": "gsm8k", "answer_key": "a"}, "they have no effect on a file with a shape"),
    ],
)
def test_options_without_effect_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Source(**given)


# --- benchmarks ------------------------------------------------------------------------------------------------------

SHARED = Path(__file__).parents[2] / "../shared/data"
NUM_ROWS = {
    "gsm8k": 1319, "math500": 500, "aime24": 30, "amc": 83, "humaneval": 164, "mbpp": 257, "ifeval": 541,
    "nq": 3610, "hotpotqa": 7405, "countdown": 400, "game24": 1362,
}  # fmt: skip


def test_the_documentation_says_which_benchmarks_were_read_from_files_and_which_never() -> None:
    page = (Path(__file__).parents[2] / "docs/eval.md").read_text()
    section = page.partition("### Which files were tested\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ") and "`" in line]
    published, derived, installed, by_hand = [re.findall(r"`(\w+)`", line) for line in lines]
    counted = re.findall(r"`(\w+)` \([^)]*?([\d,]+)[^)\d]*\)", lines[0] + lines[1])
    assert {name: int(number.replace(",", "")) for name, number in counted} == NUM_ROWS
    assert sorted([*published, *derived]) == sorted(NUM_ROWS)
    assert sorted([*published, *derived, *installed, *by_hand]) == sorted(BENCHMARKS)


def test_a_file_is_found_by_its_usual_names_in_the_order_given(tmp_path: Path) -> None:
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/test.jsonl").write_text("")
    assert find_benchmark_files("gsm8k", tmp_path) == [tmp_path / "gsm8k/test.jsonl"]
    (tmp_path / "gsm8k_test.jsonl").write_text("")
    assert find_benchmark_files("gsm8k", tmp_path) == [tmp_path / "gsm8k_test.jsonl"]
    assert benchmark_source("gsm8k", tmp_path) == {
        "path": str(tmp_path / "gsm8k_test.jsonl"),
        "shape": "gsm8k",
        "name": "gsm8k",
    }


def test_the_folder_may_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"no folder given for the files of amc.*--data-dir.*{FOLDER_VARIABLE}"):
        find_benchmark_files("amc", None)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"has no file of amc; looked for amc_test\.jsonl"):
        find_benchmark_files("amc", None)
    (tmp_path / "amc_rllm.json").write_text("[]")
    assert find_benchmark_files("amc", None) == [tmp_path / "amc_rllm.json"]
    with pytest.raises(UserError, match="is not a folder"):
        find_benchmark_files("amc", tmp_path / "amc_rllm.json")


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match="unknown benchmark 'gsm8'; did you mean 'gsm8k'"):
        get_benchmark("gsm8")


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_names_a_reward_a_config_accepts(name: str) -> None:
    assert Reward.model_validate({"parts": get_benchmark(name).reward}).parts[0].name
    assert get_benchmark(name).max_tokens >= 512


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published data sets are not here")
@pytest.mark.parametrize("name", NUM_ROWS)
def test_the_published_benchmarks_are_read_whole(name: str) -> None:
    rows = read_rows(Source(**benchmark_source(name, SHARED)))
    assert len(rows) == NUM_ROWS[name]
    subject = get_benchmark(name).subject
    assert subject is None or all(isinstance(row.extra[subject], str) for row in rows)
