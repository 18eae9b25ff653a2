"""Benchmarks in the forms that they are published in: the prompt, the answer, and right and wrong completions by their verifiers."""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.choice_datasets import CHOICE_INSTRUCTION
from burnish.data.math_datasets import BOXED_INSTRUCTION
from burnish.data.published_datasets import BENCHMARKS, benchmark_source, find_benchmark_files, to_verl_layout
from burnish.data.published_example import UnusableRow
from burnish.data.row_formats import read_rows
from burnish.rewards.verifiers import VERIFIERS
from tests.data.code_records import CRUX, LCB, LEETCODE

OLYMPIAD = {
    "id": 1606, "question": "Solve it.", "context": None, "final_answer": ["$3$, $-5$"], "is_multiple_answer": True,
    "unit": None, "answer_type": "Numerical", "error": None, "question_type": "Open-ended", "subfield": "Algebra",
}  # fmt: skip

JUDGED: list[tuple[str, dict[str, Any], Any, tuple[str, ...], tuple[str, ...]]] = [
    # (shape, record as published, the answer, right completions, wrong completions)
    ("gsm_symbolic", {"question": "How many?", "answer": "6*7\n#### 42", "id": 0, "instance": 3}, "42", (r"\boxed{42}",), ("41",)),
    ("gsm_plus", {"question": "How many?", "answer": "3", "perturbation_type": "numerical substitution"}, "3", ("3.0",), ("4",)),
    ("gsm_hard", {"input": "How many?", "code": "", "target": 2466.6666666666665}, None,
     (r"\boxed{2466.667}", r"\boxed{2,466.6667}"), (r"\boxed{2466.66}", "2466.6666666666665")),
    ("svamp", {"ID": "chal-2", "Body": "Dan had $ 3 left.", "Question": "What did it cost?", "Answer": 1.0, "Type": "Subtraction"},
     "1", ("It costs $1.",), ("2",)),
    ("asdiv", {"body": "Seven red and two green.", "question": "How many?", "solution_type": "Addition", "answer": "9 (apples)",
               "formula": "7+2=9"}, "9", ("9 apples",), ("7",)),
    ("mawps", {"iIndex": 1, "sQuestion": "How many?", "lEquations": ["X=(70.0-27.0)"], "lSolutions": [43.0]}, "43", ("43",), ("44",)),
    ("mawps", {"Question": "N_00 and N_01 ?", "Numbers": "8.0 2.0", "Equation": "- N_00 N_01", "Answer": 6.0}, "6", ("6",), ("8",)),
    ("multiarith", {"question": "How many?", "final_ans": "12"}, "12", ("so 12",), ("13",)),
    ("aime", {"ID": "1983-1", "Year": "1983", "Problem Number": "1", "Question": "Find it.", "Answer": "060", "Part": ""}, "060",
     (r"\boxed{60}",), (r"\boxed{61}",)),
    ("aime25", {"question": "The angle?", "answer": r"336^\circ"}, "336", (r"\boxed{336}",), ("335",)),
    ("olympiadbench", OLYMPIAD, None, (r"\boxed{-5, 3}", r"\boxed{3} or \boxed{-5}", r"\boxed{3 \text{ and } -5}", r"\boxed{\{3,-5\}}"),
     (r"\boxed{3}", r"\boxed{3, 5}", r"\boxed{3, 3}", r"\boxed{3, -5, 7}", "3, -5")),
    ("olympiadbench", {**OLYMPIAD, "final_answer": [r"$\pm \sqrt{2}$"]}, None, (r"\boxed{-\sqrt{2}, \sqrt{2}}", r"\boxed{\pm\sqrt{2}}"),
     (r"\boxed{\sqrt{2}}",)),
    ("olympiadbench", {**OLYMPIAD, "final_answer": ["1.32"], "is_multiple_answer": False, "error": "1e-1", "unit": "m"}, None,
     (r"\boxed{1.41}", r"\boxed{\frac{13}{10}}"), (r"\boxed{1.43}", r"\boxed{x}", "1.32")),
    ("gpqa", {"Question": "Which?", "Correct Answer": "red\n", "Incorrect Answer 1": "blue", "Incorrect Answer 2": "green",
              "Incorrect Answer 3": "grey", "Subdomain": "Optics", "High-level domain": "Physics"}, None, (), ("E", "no idea")),
    ("mmlu", {"question": "2+2?", "subject": "algebra", "choices": ["3", "4", "5", "6"], "answer": 1}, "B", ("(B)", "B. 4"), ("A",)),
    ("mmlu", {"Question": "2+2?", "A": "3", "B": "4", "C": "5", "D": "6", "Answer": "B", "Subject": "algebra"}, "B", ("B",), ("D",)),
    ("mmlu_pro", {"question": "2+2?", "options": [*"1234567890"], "answer": "J", "answer_index": 9, "category": "math"}, "J",
     (r"\boxed{J}", "The answer is (J)."), (r"\boxed{I}",)),
    ("mmlu_pro", {"question": "2+2?", "options": ["4", "5", "N/A", "N/A"], "answer": "A", "answer_index": 0}, "A", ("A",), ("C",)),
    ("arc", {"id": "x", "question": "Warm?", "choices": {"text": ["ice", "sun"], "label": ["1", "2"]}, "answerKey": "2"}, "B", ("B",), ("A",)),
    ("arc", {"question": {"stem": "Warm?", "choices": [{"text": "ice", "label": "A"}, {"text": "sun", "label": "B"}]}, "answerKey": "A"},
     "A", ("A",), ("B",)),
    ("cruxeval_o", CRUX, "[1, 1]", ("<answer>[1,1]</answer>", "<answer>assert f([1, 2], 1) == [1, 1]</answer>", "<answer>`[1, 1]`</answer>"),
     ("<answer>[1]</answer>", "<answer>f([1, 2], 1)</answer>", "[1, 1]", "<answer>[1, 1</answer>")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "answer", "right", "wrong"), JUDGED, ids=[case[0] for case in JUDGED])
def test_right_and_wrong_answers_to_a_published_row(
    name: str, record: dict[str, Any], answer: Any, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    made = to_verl_layout(record, "here", name)
    if made["extra_info"]["verifier"] == "answer_set":
        pytest.importorskip("math_verify")
    truth, extra = made["reward_model"]["ground_truth"], made["extra_info"]
    if answer is not None:
        assert truth == answer
    for completions, value in ((right, 1.0), (wrong, 0.0)):
        for completion in completions:
            score = VERIFIERS[extra["verifier"]](completion, truth, extra)
            assert (score if isinstance(score, float) else score.value) == value, completion


def prompt_of(name: str, record: dict[str, Any]) -> str:
    return str(to_verl_layout(record, "here", name)["prompt"][0]["content"])


def test_prompts_state_what_is_asked_and_never_the_answer() -> None:
    assert prompt_of("mmlu", JUDGED[14][1]) == f"2+2?\n\nA. 3\nB. 4\nC. 5\nD. 6\n{CHOICE_INSTRUCTION}"
    assert prompt_of("svamp", JUDGED[3][1]) == f"Dan had $ 3 left. What did it cost?{BOXED_INSTRUCTION}"
    assert prompt_of("mawps", JUDGED[6][1]).startswith("8.0 and 2.0 ?")
    several = prompt_of("olympiadbench", {**OLYMPIAD, "context": "Let x be real.", "unit": "cm"})
    assert several.startswith("Let x be real.\nSolve it.\nThe problem has several answers")
    assert "The unit of the answer is cm" in several
    assert "returns `[1, 1]`" in prompt_of("cruxeval_i", CRUX)
    assert "[1, 2], 1" not in prompt_of("cruxeval_i", CRUX)
    assert "[1, 1]" not in prompt_of("cruxeval_o", CRUX)
    assert "def twoSum" in prompt_of("livecodebench", LEETCODE)
    assert "stdin" in prompt_of("livecodebench", LCB)


def test_gpqa_shuffles_by_the_question_alone() -> None:
    record = JUDGED[13][1]
    made = to_verl_layout(record, "a", "gpqa")
    rotated = {**record, "Incorrect Answer 1": "grey", "Incorrect Answer 2": "blue", "Incorrect Answer 3": "green"}
    assert to_verl_layout(rotated, "b", "gpqa")["prompt"] == made["prompt"]
    assert f"\n{made['reward_model']['ground_truth']}. red\n" in made["prompt"][0]["content"] + "\n"
    letters = Counter(
        to_verl_layout({**record, "Question": f"Which {n}?"}, "c", "gpqa")["reward_model"]["ground_truth"]
        for n in range(200)
    )
    assert sorted(letters) == [*"ABCD"]
    assert all(30 <= count <= 70 for count in letters.values())


@pytest.mark.parametrize(
    ("name", "record", "tags"),
    [
        ("aime", {"ID": "2024-I-1", "Problem": "p", "Answer": 5}, {"year": 2024}),
        ("amc", {"problem": "p", "answer": 5, "url": "https://x/2022_AMC_12A_Problems/Problem_1"}, {"year": 2022}),
        ("olympiadbench", OLYMPIAD, {"subject": "Algebra", "type": "Numerical"}),
        ("gpqa", JUDGED[13][1], {"subject": "Optics", "category": "Physics"}),
        ("mmlu_pro", JUDGED[16][1], {"subject": "math"}),
        ("math", {"problem": "p", "solution": r"\boxed{1}", "level": "Level 5", "type": "Geometry"}, {"subject": "Geometry", "level": 5.0}),
        ("livecodebench", LCB, {"difficulty": "easy", "category": "atcoder", "year": 2023}),
        ("gsm_plus", JUDGED[1][1], {"type": "numerical substitution"}),
    ],
)  # fmt: skip
def test_results_can_be_broken_down_by_subject_level_and_year(
    name: str, record: dict[str, Any], tags: dict[str, Any]
) -> None:
    from burnish.evaluation.completions import TAGS

    extra = to_verl_layout(record, "here", name)["extra_info"]
    assert {key: extra.get(key) for key in tags} == tags
    assert set(tags) <= set(TAGS)


@pytest.mark.parametrize(
    ("name", "record", "reason"),
    [
        ("gsm_plus", {"question": "q", "answer": "None"}, "no answer"),
        ("gsm_hard", {"input": "q", "target": "many"}, "the answer is no number"),
        ("asdiv", {"body": "b", "question": "q", "answer": "8 (yellow); 2 (blue)"}, "the answer is no number"),
        ("mawps", {"sQuestion": "q", "lSolutions": [1, 2]}, "several answers"),
        ("olympiadbench", {**OLYMPIAD, "final_answer": None, "question_type": "Theorem proof"}, "a proof, which no answer checks"),
        ("olympiadbench", {**OLYMPIAD, "image_1": {"bytes": b""}}, "it has images"),
        ("olympiadbench", {**OLYMPIAD, "final_answer": ["1", "2"], "is_multiple_answer": False}, "2 answers, but"),
        ("mmlu", {"question": "q", "choices": ["a", ""], "answer": 0}, "an option is missing"),
        ("mmlu", {"question": "q", "choices": ["a", "b"], "answer": 2}, "the answer is none of the options"),
        ("mmlu", {"question": "q", "choices": ["a", "a"], "answer": 0}, "the right option is there twice"),
        ("mmlu_pro", {"question": "q", "options": ["a", "b"], "answer": "A", "answer_index": 1}, "answer and answer_index differ"),
        ("mmlu_pro", {"question": "q", "options": [*"abcdefghijk"], "answer": "A"}, "more than 10 options"),
        ("arc", {"question": "q", "choices": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "E"}, "none of the options"),
        ("cruxeval_o", {**CRUX, "output": "g(1)"}, "its output is no literal"),
        ("livecodebench", {**LCB, "public_test_cases": "[]", "private_test_cases": "[]"}, "no tests"),
    ],
)  # fmt: skip
def test_an_unusable_row_says_why(name: str, record: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow, match=reason):
        to_verl_layout(record, "here", name)


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("echo harm",)


def test_private_tests_are_unpacked_without_running_what_a_pickle_names() -> None:
    private = [{"input": "5 -9\n", "output": "-4\n", "testtype": "stdin"}]
    made = to_verl_layout({**LCB, "private_test_cases": packed(json.dumps(private))}, "here", "livecodebench")
    assert made == to_verl_layout(LCB, "here", "livecodebench")
    assert json.loads(made["reward_model"]["ground_truth"])["stdio"][1] == {"input": "5 -9\n", "output": "-4\n"}
    for bad, words in (
        (packed(Hostile()), r"the pickle names \w+\.system, and only a pickled text is read"),
        (packed(["x"]), "a pickle of list; only a pickled text"),
        (packed("[]")[:-8], "packed text that is cut off"),
        ("%%%", "neither JSON nor base64 of zlib"),
        ('[{"input": "1"}]', "a list of tests with input, output and testtype"),
        ('[{"input": "1", "output": "1", "testtype": "gui"}]', "testtype should be stdin or functional"),
    ):
        with pytest.raises(UserError, match=rf"d\.jsonl:7: not a row of livecodebench: .*{words}"):
            to_verl_layout({**LCB, "private_test_cases": bad}, "d.jsonl:7", "livecodebench")


@pytest.mark.parametrize(
    ("name", "record", "words"),
    [
        ("gpqa", {"Question": "q", "Correct Answer": "a"}, "has a column 'Incorrect Answer 1'"),
        ("mawps", {"Question": "N_00 N_03", "Numbers": "1 2", "Answer": 3}, "the place N_03, but there are 2 Numbers"),
        ("olympiadbench", {**OLYMPIAD, "error": "a bit"}, "not a row of olympiadbench: could not convert"),
        ("cruxeval_o", {**CRUX, "code": "def g(: pass"}, "code and input should be Python"),
        ("cruxeval_i", {**CRUX, "code": "def g(a): pass"}, "code should define a function f"),
        ("arc", {"question": "q", "answerKey": "A", "choices": ["a", "b"]}, "choices should be an object"),
        ("livecodebench", {**LEETCODE, "metadata": "{}"}, "metadata should name the tested method"),
    ],
)
def test_a_malformed_row_is_an_error_with_its_place(name: str, record: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=rf"d\.csv:3: .*{words}"):
        to_verl_layout(record, "d.csv:3", name)


# --- files -----------------------------------------------------------------------------------------------------------


def read_benchmark(name: str, folder: Path, left_out: Counter[str] | None = None) -> list[Any]:
    return read_rows(Source(**benchmark_source(name, folder)), None, left_out)


def test_unusable_rows_of_a_benchmark_are_counted_by_reason_when_asked(tmp_path: Path) -> None:
    rows = [OLYMPIAD, {**OLYMPIAD, "final_answer": None}, {**OLYMPIAD, "image_1": {"bytes": "x"}}]
    (tmp_path / "olympiadbench.json").write_text(json.dumps(rows))
    left_out: Counter[str] = Counter()
    assert [row.id for row in read_benchmark("olympiadbench", tmp_path, left_out)] == ["olympiadbench/0"]
    assert left_out == {"no answer": 1, "it has images": 1}
    with pytest.raises(UserError, match=r"olympiadbench\.json, item 2: no answer; `burnish data prepare"):
        read_benchmark("olympiadbench", tmp_path)
    (tmp_path / "olympiadbench.json").write_text(json.dumps(rows[1:]))
    with pytest.raises(UserError, match=r"holds no rows that can be used: 1 no answer, 1 it has images"):
        read_benchmark("olympiadbench", tmp_path, Counter())


def test_the_files_of_mmlu_have_their_subject_in_their_name_and_are_all_read(tmp_path: Path) -> None:
    folder = tmp_path / "mmlu/data/test"
    folder.mkdir(parents=True)
    (folder / "abstract_algebra_test.csv").write_text('"Find 1, 2",0,4,2,6,B\n')
    (folder / "virology_test.csv").write_text("Which?,a,b,c,d,D\nWho?,a,b,c,d,A\n")
    rows = read_benchmark("mmlu", tmp_path)
    assert [(row.extra["subject"], row.answer) for row in rows] == [
        ("abstract_algebra", "B"), ("virology", "D"), ("virology", "A"),
    ]  # fmt: skip
    assert [row.id for row in rows] == ["mmlu/0", "mmlu/1", "mmlu/2"]
    (folder / "virology_test.csv").write_text("question,A,B,C,D,answer,subject\nWhich?,a,b,c,d,D,biology\n")
    assert [row.extra["subject"] for row in read_benchmark("mmlu", tmp_path)] == ["abstract_algebra", "biology"]


def test_all_shards_of_a_parquet_file_are_read_and_all_problems_of_the_folders_of_math(tmp_path: Path) -> None:
    data = tmp_path / "MMLU-Pro/data"
    data.mkdir(parents=True)
    for shard in range(2):
        table = pyarrow.Table.from_pylist([{**JUDGED[16][1], "question": f"{shard}?"}])
        pyarrow.parquet.write_table(table, data / f"test-0000{shard}-of-00002.parquet")
    assert [row.extra["question"] for row in read_benchmark("mmlu_pro", tmp_path)] == ["0?", "1?"]
    for subject in ("algebra", "geometry"):
        (tmp_path / "MATH/test" / subject).mkdir(parents=True)
        problem = {"problem": "p", "level": "Level 1", "type": subject.title(), "solution": r"$\boxed{2}$"}
        (tmp_path / "MATH/test" / subject / "1.json").write_text(json.dumps(problem, indent=4))
    assert [row.extra["subject"] for row in read_benchmark("math", tmp_path)] == ["Algebra", "Geometry"]
    assert len(find_benchmark_files("math", tmp_path)) == 2


def test_a_set_of_several_files_is_never_read_in_part(tmp_path: Path) -> None:
    for subject in ("anatomy", "virology"):
        (tmp_path / "mmlu" / subject).mkdir(parents=True)
        table = pyarrow.Table.from_pylist(
            [{"question": f"{subject}?", "choices": ["a", "b"], "answer": 0, "subject": subject}]
        )
        pyarrow.parquet.write_table(table, tmp_path / "mmlu" / subject / "test-00000-of-00001.parquet")
    assert [row.extra["subject"] for row in read_benchmark("mmlu", tmp_path)] == ["anatomy", "virology"]
    (tmp_path / "mmlu/all").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "mmlu/all/test-00000-of-00001.parquet")
    assert [row.extra["subject"] for row in read_benchmark("mmlu", tmp_path)] == ["virology"]
    (tmp_path / "livecodebench").mkdir()
    for name, record in (("test", LCB), ("test2", LEETCODE)):
        (tmp_path / f"livecodebench/{name}.jsonl").write_text(json.dumps(record) + "\n")
    assert [row.extra["category"] for row in read_benchmark("livecodebench", tmp_path)] == ["atcoder", "leetcode"]


def test_a_csv_of_contest_problems_is_read_by_year(tmp_path: Path) -> None:
    (tmp_path / "AIME_Dataset_1983_2024.csv").write_text(
        "ID,Year,Problem Number,Question,Answer,Part\n1983-1,1983,1,Find x.,60,\n2024-II-2,2024,2,Find y.,236,II\n"
    )
    rows = read_benchmark("aime", tmp_path)
    assert [(row.extra["year"], row.answer) for row in rows] == [(1983, "60"), (2024, "236")]


def test_the_generated_benchmark_is_the_same_for_every_seed_and_scored_by_its_checkers() -> None:
    pytest.importorskip("reasoning_gym")
    from burnish.data.tasks import reasoning_gym

    tasks, per_task = reasoning_gym.BENCHMARK_TASKS, reasoning_gym.BENCHMARK_PROBLEMS_PER_TASK
    assert (len(tasks), len(tasks) * per_task) == (20, 500)
    assert not set(tasks) & set(reasoning_gym.HASH_ORDERED)
    rows = read_rows(Source(**{**benchmark_source("reasoning_gym", None), "limit": 26}))
    assert [row.extra["subject"] for row in rows] == ["aiw"] * 25 + ["base_conversion"]
    assert rows[0].prompt.endswith("inside <answer> </answer>.")
    for row in (rows[0], rows[-1]):
        for said, value in ((f"So <answer>{row.answer}</answer>", 1.0), ("<answer>zzz</answer>", 0.0)):
            assert VERIFIERS["task"](said, row.answer, row.extra) == value
    with pytest.raises(UserError, match=r"is installed, but 0\.0\.0 was asked for"):
        next(reasoning_gym.held_out_rows("0.0.0"))


def test_the_table_of_the_documentation_has_every_benchmark_with_its_verifier_and_its_limit() -> None:
    page = (Path(__file__).parents[2] / "docs/eval.md").read_text()
    section = page.partition("## Benchmarks\n")[2].partition("\n## ")[0]
    listed = {}
    for line in section.splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            verifier = re.match(r"`(\w+)`", cells[4])
            assert verifier is not None
            listed |= {name: (verifier[1], int(cells[5])) for name in re.findall(r"`(\w+)`", cells[0])}
    assert listed == {name: (row.reward[0]["name"], row.max_tokens) for name, row in BENCHMARKS.items()}
