"""The buffer of self-made tasks: its rows, its file through kills, and the reading of proposals and solutions."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.data.tasks.absolute_zero import AbsoluteZeroTask
from burnish.data.tasks.code_tasks import (
    CodeTask,
    are_equal,
    program_problem,
    read_proposal,
    read_solution,
    solve_prompt,
    task_from_json,
)
from burnish.run.task_journal import TaskJournal


def record(kind: Any, text: str | None, solved: tuple[float, ...] = (1.0, 0.0)) -> dict[str, Any]:
    """What the environment says of an episode that proposed `f(x) = text`, or nothing valid."""
    task = None if text is None else CodeTask(kind, f"def f(x):\n    return {text}", ("1",), ("1",)).to_json()
    worth = None if text is None else 1 - sum(solved) / len(solved)
    return {"type": kind, "proposed": task, "problem": None, "solved": list(solved), "learnability": worth}


STEPS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("a", record("deduction", "x+1")), ("b", record("abduction", None)), ("c", record("deduction", "x+1"))],
    2: [("d", record("induction", "x+1")), ("e", record("abduction", "x * 2", (0.0, 0.0)))],
    3: [("f", record("deduction", "x  +  1")), ("g", record("abduction", "x-1"))],
}


def opened(folder: Path, step: int) -> AbsoluteZeroTask:
    task = AbsoluteZeroTask(seed=3, references=2)
    task.open_journal(folder / "tasks.jsonl", step)
    return task


def rows(task: AbsoluteZeroTask) -> list[Any]:
    return [(row.prompt, row.extra) for row in (task.row("train", k) for k in range(12))]


def test_a_buffer_begins_with_the_identity_and_rows_show_what_it_has(tmp_path: Path) -> None:
    task = opened(tmp_path, 0)
    assert {kind: len(tasks) for kind, tasks in task.buffer.items()} == {"deduction": 1, "abduction": 1, "induction": 0}
    first = rows(task)
    assert [extra["type"] for _, extra in first[:3]] == ["deduction", "abduction", "induction"]
    assert "def f(x):\n    return x\n" in first[0][0]
    assert (first[0][1]["fill"]["program"], first[2][1]["fill"]) == ("def f(x):\n    return x", None)
    for step, records in STEPS.items():
        task.observe(step, records)
    later = rows(task)
    assert later == rows(task)
    assert later != first
    assert len({extra["program"] for _, extra in later if extra["type"] == "induction"}) > 1
    assert max(prompt.count("```output") for prompt, extra in later if extra["type"] == "deduction") == 2
    assert task.row("test", 0) == AbsoluteZeroTask(seed=9).row("test", 0)


def test_metrics_of_a_step_count_each_type(tmp_path: Path) -> None:
    task = opened(tmp_path, 0)
    task.observe(1, STEPS[1])
    task.observe(2, STEPS[2])
    found = task.metrics()
    assert found["abduction/valid"] == 1.0
    assert (found["abduction/solved"], found["abduction/learnability"]) == (0.0, 1.0)
    assert (found["induction/solved_proposed"], found["induction/size"]) == (0.5, 1.0)
    task.observe(3, [*STEPS[1][1:2], *STEPS[3]])
    found = task.metrics()
    assert found["abduction/valid"] == 0.5
    assert found["deduction/new_program"] == 0.0  # differs from x+1 only in spaces
    assert found["abduction/new_program"] == 1.0
    assert (found["deduction/size"], found["distinct_programs"]) == (4.0, 4.0)


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("cut", [0, 7, 250])
def test_a_kill_neither_loses_nor_doubles_a_task(tmp_path: Path, step: int, cut: int) -> None:
    """The file loses its last bytes, the run goes back to a checkpoint, and the steps after it are repeated."""
    whole = AbsoluteZeroTask(seed=3, references=2)
    states = {0: whole.state()}
    for number, records in STEPS.items():
        whole.observe(number, records)
        states[number] = whole.state()
    first = opened(tmp_path, 0)
    for number, records in STEPS.items():
        first.observe(number, records)
    path = tmp_path / "tasks.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) - cut])
    for _ in range(2):  # the second time, it dies again before it writes anything
        again = opened(tmp_path, step)
        again.restore(states[step])
    for number in range(step + 1, 4):
        again.observe(number, STEPS[number])
    assert again.buffer == whole.buffer
    assert rows(again) == rows(whole)
    last = TaskJournal(path, 3)
    assert [made.id for made in last.tasks] == ["a", "c", "d", "e", "f", "g"]
    assert again.metrics() == whole.metrics()


def test_damage_and_repeated_tasks_are_errors(tmp_path: Path) -> None:
    task = opened(tmp_path, 0)
    task.observe(1, STEPS[1])
    task.observe(2, STEPS[2])
    with pytest.raises(ValueError, match="sample a is there already"):
        task.observe(3, STEPS[1])
    path = tmp_path / "tasks.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"x+1", b"x+2") + b"".join(lines[2:]))
    with pytest.raises(UserError, match=r"tasks.jsonl, line 2: the record is damaged"):
        opened(tmp_path, 2)
    path.write_bytes(lines[0])
    with pytest.raises(UserError, match="had made 4 tasks when it was saved, and 1 are in"):
        opened(tmp_path, 2).restore({"num_tasks": 4})


def test_a_buffer_draws_from_its_newest_tasks() -> None:
    task = AbsoluteZeroTask(seed=0, max_tasks=2)
    task.observe(1, [(str(k), record("deduction", f"x+{k}")) for k in range(5)])
    assert [one.program[-3:] for one in task.buffer["deduction"]] == ["x+3", "x+4"]
    assert task.state() == {"num_tasks": 5}


# --- reading ------------------------------------------------------------------------------------------------------------------

PROGRAM = "```python\ndef f(x):\n    return x\n```"


def tagged(answer: str, before: str = "<think>hm</think>") -> str:
    return f"{before}<answer>{answer}</answer>"


def test_proposals_and_solutions_are_read_from_their_blocks() -> None:
    proposal = read_proposal(tagged(f"\n{PROGRAM}\n```input\n[1], 2\n```\n"), "deduction", "blocks", 10)
    assert proposal is not None
    assert (proposal.program, proposal.inputs) == ("def f(x):\n    return x", ("[1], 2",))
    induction = tagged("```input\n1\n```\n```input\n2\n```\n```message\nthe same\n```")
    found = read_proposal(induction, "induction", "blocks", 2, "def f(x): return x")
    assert found is not None
    assert (found.inputs, found.message) == (("1", "2"), "the same")
    assert read_solution(tagged("```output\n[1]\n```"), "deduction", "blocks") == "[1]"
    assert read_solution(tagged(PROGRAM), "induction", "blocks") == "def f(x):\n    return x"
    for text in (PROGRAM, tagged(PROGRAM), tagged(PROGRAM, ""), tagged(f"{PROGRAM}\n{PROGRAM}\n```input\n1\n```"), ""):
        assert read_proposal(text, "abduction", "blocks", 10) is None
    assert read_proposal(induction, "induction", "blocks", 3) is None
    assert read_solution(tagged("[1]"), "deduction", "blocks") is None
    assert read_solution(tagged("```output\n1\n```") + tagged("```output\n2\n```"), "deduction", "blocks") is None


def test_the_one_line_language_is_read_and_asked_in() -> None:
    proposal = read_proposal("x*2+1;3", "abduction", "expression", 10)
    assert proposal is not None
    assert (proposal.program, proposal.inputs) == ("def f(x):\n    return x*2+1", ("3",))
    assert read_proposal("x", "abduction", "expression", 10) is None
    task = CodeTask("induction", proposal.program, ("1", "2", "3", "4"), ("3", "5", "7", "9"))
    assert solve_prompt(task, "expression") == "1:3 2:5 f="
    assert read_solution(" 7\n", "deduction", "expression") == "7"


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [("{1, 2}", "{2, 1}", True), ("1", "1.0", True), ("'a'", '"a"', True), ("[1]", "(1,)", False), ("__import__('os')", "1", False),
     ("{'b': 1, 'a': [2]}", "{'a': [2], 'b': 1}", True), ("nan", "nan", False), ("(" * 300, "1", False), ("9" * 5000, "1", False)],
)  # fmt: skip
def test_values_are_compared_as_python_literals(left: str, right: str, expected: bool) -> None:
    assert are_equal(left, right) is expected


@pytest.mark.parametrize(
    "text",
    [
        "import os.path",
        "from random import seed",
        "import math, sys",
        "__import__('os')",
        "y = id(3)",
        "import secrets",
        "from builtins import id as i",
        "open('/dev/urandom')",
        "__builtins__['id']",
    ],
)
def test_programs_with_forbidden_names_are_refused_before_they_run(text: str) -> None:
    assert "forbidden" in str(program_problem(f"{text}\ndef f(x):\n    return x"))
    assert program_problem("import math\ndef f(x):\n    return math.floor(x)") is None
    assert "no function f" in str(program_problem("def g(x):\n    return x"))


# --- the rows of bench/absolute_zero.py


@pytest.fixture
def bench_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    yield importlib.import_module("absolute_zero_rows")
    del sys.modules["absolute_zero_rows"]


def test_held_out_tasks_of_the_bench_are_right_and_in_no_demonstration(bench_rows: ModuleType) -> None:
    inputs = set[str]()
    for kind in bench_rows.KINDS:
        for row in bench_rows.held_out(kind):
            task = task_from_json(row["solve"])
            expression = task.program.rpartition("return ")[2]
            assert task.outputs == tuple(repr(eval(expression, {"x": eval(text)})) for text in task.inputs)
            inputs |= set(task.inputs)
    shown = " ".join(row["prompt"] + row["completion"] for row in bench_rows.demonstrations(600, 0))
    assert len(inputs) > 100
    assert not any(text in shown for text in inputs)


def test_demonstrations_of_the_bench_are_flawed_and_in_the_format(bench_rows: ModuleType) -> None:
    right = []
    for row in bench_rows.demonstrations(1200, 0):
        program, found, text = row["prompt"].removesuffix("=").partition(";")
        if row["prompt"].endswith("=") and found and " " not in row["prompt"]:
            right.append(str(eval(program, {"x": eval(text)})) == row["completion"])
        kinds = {"ded?": "deduction", "abd?": "abduction", "ind?": "induction"}
        if (kind := kinds.get(row["prompt"][:4])) is not None:
            assert read_proposal(row["completion"], kind, "expression", bench_rows.INPUTS) is not None
    assert 0.5 < sum(right) / len(right) < 0.8
