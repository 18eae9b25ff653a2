"""The `code` reward on harmless programs: extracting the program, running each kind of test, and the details it reports."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.rewards.code_reward import (
    ProgramRunner,
    extract_program,
    outcomes_from_verdicts,
    outputs_match,
    parse_tests,
    stdio_outcome,
)
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.sandbox.client import RunResult
from burnish.sandbox.program_process import whole_statements


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    runner = ProgramRunner(timeout_s=10.0, memory_gib=1.0)
    with runner.sandbox:
        yield runner


def outcomes(runner: ProgramRunner, program: str, **tests: Any) -> list[str]:
    return runner.outcomes(program, parse_tests(json.dumps(tests)), stops_early=False)[0]


# --- the program in a completion -------------------------------------------------------------------------------------


def test_the_program_is_the_last_block_of_python() -> None:
    assert extract_program("text\n```python\na\n```\nthen\n```python\nb\n```\nit prints\n```\n3\n```\n") == "b\n"
    assert extract_program("```\na\n```\n```bash\nb\n```") == "b\n"
    assert extract_program("print(1)") == "print(1)"
    assert extract_program("<think>```python\nno\n```</think>```python\nyes\n```") == "yes\n"
    assert extract_program("```python\ncut off") == "cut off"
    assert extract_program("````python\nx = '''\n```\n'''\n````") == "x = '''\n```\n'''\n"
    assert extract_program("") == ""


# --- the tests of a row ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("4", "got a int"),
        ("{", "one JSON object"),
        ({}, "exactly one of"),
        ({"asserts": ["assert 1"], "stdio": [{"input": "", "output": ""}]}, "exactly one of"),
        ({"asserts": []}, "at least one"),
        ({"asserts": ["assert ("]}, "a test of the row is not valid Python"),
        ({"asserts": ["assert 1"], "setup": "import ("}, "setup of the row is not valid Python"),
        ({"check": "def check(candidate): pass"}, "entry_point"),
        ({"stdio": [{"input": "1"}]}, "output"),
        ({"stdio": [{"input": "1", "output": "2"}], "setup": "import math"}, "no effect"),
        ({"asserts": ["assert 1"], "imports": "x"}, "unknown key 'imports'"),
    ],
)
def test_tests_that_are_none_are_mistakes_in_the_data(answer: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_tests(answer if isinstance(answer, str) else json.dumps(answer))


def test_output_is_compared_word_by_word_and_numbers_as_numbers() -> None:
    assert outputs_match("1 2\n3\n", "1  2 \n3.0\n\n")
    assert outputs_match("", "\n")
    assert not outputs_match("1 2\n3", "1 2 3")
    assert not outputs_match("1", "")
    assert not outputs_match("nan", "NaN")
    assert not outputs_match("9" * 200 + "1", "9" * 200 + "2")


# --- tests that call -------------------------------------------------------------------------------------------------


def test_values_of_all_plain_types_cross_both_ways(runner: ProgramRunner) -> None:
    values = [
        "{1: [2, (3, None)], 'a': {4.5}}",
        "frozenset([1, b'x'])",
        "10**5000",
        "complex(1, 2)",
        "'\\ud800 \\x00 ü'",
        "float('inf')",
        "range(1, 9, 2)",
        "decimal.Decimal('0.10')",
        "fractions.Fraction(1, 3)",
        "collections.Counter('aab')",
        "collections.OrderedDict(a=1)",
        "collections.deque([1, 2], 5)",
        "datetime.datetime(2020, 1, 2, 3)",
        "bytearray(b'x')",
        "int",
        "...",
        "True",
    ]
    tests = [f"assert same({v}) == {v} and type(same({v})) is type({v})" for v in values]
    got = outcomes(runner, "def same(x):\n    assert type(x).__module__ != 'burnish'\n    return x", asserts=tests)
    assert got == ["passed"] * len(values)


def test_a_function_that_changes_its_argument_is_seen_to(runner: ProgramRunner) -> None:
    program = "def sort(x):\n    x.sort()\ndef fill(d, s):\n    d['a'] = [1]; s.add(2)"
    tests = [
        "x = [3, 1, 2]\nassert sort(x) is None and x == [1, 2, 3]",
        "d, s = {}, {1}\nfill(d, s)\nassert d == {'a': [1]} and s == {1, 2}",
    ]
    assert outcomes(runner, program, asserts=tests) == ["passed", "passed"]


def test_classes_and_generators_of_the_program_can_be_used(runner: ProgramRunner) -> None:
    program = (
        "class Point:\n    def __init__(self, x): self.x = x\n    def moved(self, by): return Point(self.x + by)\n"
        "    def __eq__(self, o): return self.x == o.x\ndef count(n):\n    yield from range(n)\ndef xs(ps): return [p.x for p in ps]\nLIMIT = 7"
    )
    tests = [
        "assert Point(1).moved(2).x == 3",
        "assert Point(1).moved(1) == Point(2) and Point(1) != Point(3)",
        "assert xs([Point(1), Point(2)]) == [1, 2]",
        "assert list(count(3)) == [0, 1, 2] and LIMIT == 7",
        "assert count(3) == [0, 1, 2]",
    ]
    assert outcomes(runner, program, asserts=tests) == ["passed"] * 4 + ["failed"]


def test_exceptions_cross_as_their_nearest_built_in_class(runner: ProgramRunner) -> None:
    program = "class Mine(ValueError): pass\ndef f(x): raise Mine('no')"
    caught = "try:\n    f(1)\n    assert False\nexcept ValueError as error:\n    assert str(error) == 'no'"
    got = outcomes(runner, program, asserts=[caught, "f(1)"])
    assert got == ["passed", "failed: ValueError: no"]


def test_names_are_the_programs_only_where_python_has_no_meaning_for_them(runner: ProgramRunner) -> None:
    program = "def sum(a, b): return a + b\ndef math(): return 1\nadd = sum"
    assert outcomes(runner, program, asserts=["assert sum(1, 2) == 3"], entry_point="sum") == ["passed"]
    assert outcomes(runner, program, asserts=["assert sum(1, 2) == 3"]) == ["passed"]
    assert outcomes(runner, program, asserts=["assert sum([add(1, 2)]) == 3", "assert math.pi > 3"]) == [
        "passed",
        "passed",
    ]


def test_check_is_given_its_entry_point_and_may_call_helpers(runner: ProgramRunner) -> None:
    prefix = "def double(x):\n    return 2 * x\n\ndef f(x: int) -> int:\n    '''Four times x.'''\n"
    check = "def check(candidate):\n    for n in range(50):\n        assert candidate(n) == double(double(n))\n"
    for program in ("def f(x):\n    return double(double(x))", "    return 4 * x\n"):
        assert outcomes(runner, program, check=check, entry_point="f", prefix=prefix) == ["passed"]
    assert outcomes(runner, "    return x\n", check=check, entry_point="f", prefix=prefix) == ["failed"]


def test_exceptions_may_be_expected_in_any_way_a_test_can(runner: ProgramRunner) -> None:
    unittest = "import unittest\nunittest.TestCase().assertRaises(ValueError, f, 1)"
    suppressed = "import contextlib\nwith contextlib.suppress(ValueError):\n    f(1)"
    setup = "def fails(g, x):\n    try: g(x)\n    except ValueError: return True"
    got = outcomes(
        runner, "def f(x): raise ValueError", asserts=[unittest, suppressed, "assert fails(f, 1)"], setup=setup
    )
    assert got == ["passed"] * 3


@pytest.mark.parametrize(
    ("prefix", "whole"),
    [
        ("import a\n\ndef f(x):\n", "import a\n"),
        ("def g(): return 1\n@cache\ndef f(x):\n    y = (\n", "def g(): return 1"),
        ("def g():\n    return 1\n\ndef f(x):\n    if x:\n", "def g():\n    return 1\n"),
        ("def f(x):\n    'Double x.'\n", "def f(x):\n    'Double x.'\n"),
        ("x = 1\nwrite a function", "x = 1"),
        ("", ""),
    ],
)
def test_an_unfinished_function_at_the_end_of_a_prefix_is_left_to_the_program(prefix: str, whole: str) -> None:
    assert whole_statements(prefix) == whole


def test_setup_is_there_for_program_and_tests(runner: ProgramRunner) -> None:
    tests = ["assert math.isclose(area(1), math.pi)"]
    assert outcomes(runner, "def area(r): return math.pi * r * r", asserts=tests, setup="import math") == ["passed"]


def test_a_program_starts_from_the_same_state_each_time(runner: ProgramRunner) -> None:
    program = "import random\nx = [random.random(), hash('a'), 'left' in globals()]\nleft = 1\nimport os\nx += os.listdir('.')\nopen('file', 'w')"
    first = runner.sandbox.run_stdio(program + "\nprint(x)", "", 5.0)
    assert (first.status, first.output) == (0, runner.sandbox.run_stdio(program + "\nprint(x)", "", 5.0).output)


def test_a_test_that_hands_over_a_function_is_a_mistake_in_the_data(runner: ProgramRunner) -> None:
    with pytest.raises(ValueError, match="the tests pass a function to the program"):
        outcomes(runner, "def f(g): return g(1)", asserts=["assert f(lambda x: x) == 1"])


def test_the_test_at_which_a_program_ends_is_the_one_that_failed(runner: ProgramRunner) -> None:
    program = "import os\ndef f(x):\n    if x == 2: os._exit(3)\n    return x"
    got = outcomes(runner, program, asserts=[f"assert f({n}) == {n}" for n in (1, 2, 3)])
    assert got == ["passed", "failed: the program exited with status 3", "not run"]
    got = outcomes(runner, "def f(:", asserts=["assert f(1)"])
    assert got[0].startswith("failed: the program does not load: SyntaxError")


def test_time_memory_and_output_are_named() -> None:
    verdicts = [{"test": 0, "outcome": "passed"}]
    assert outcomes_from_verdicts(RunResult("time", -9, "", "", verdicts), 2) == ["passed", "failed: out of time"]
    assert outcomes_from_verdicts(RunResult("ended", 0, "", "", [{"done": True}, *verdicts]), 1) == ["passed"]
    assert outcomes_from_verdicts(RunResult("ended", 0, "", "", []), 1) == [
        "failed: the test ended the process it ran in"
    ]
    assert stdio_outcome(RunResult("memory", -9, "", "", []), "") == "failed: out of memory"
    assert stdio_outcome(RunResult("ended", -11, "", "", []), "") == "failed: the program was killed by SIGSEGV"
    assert stdio_outcome(RunResult("ended", -40, "", "", []), "") == "failed: the program was killed by signal 40"
    assert stdio_outcome(RunResult("ended", 1, "x", "Traceback\nKeyError: 3", []), "x") == "failed: KeyError: 3"


# --- tests that read and write ---------------------------------------------------------------------------------------


def test_programs_read_standard_input_and_write_standard_output(runner: ProgramRunner) -> None:
    program = (
        "import atexit, sys, threading\nif __name__ == '__main__':\n    n = int(input())\n    data = sys.stdin.read().split()\n"
        "    atexit.register(lambda: print(n))\n    threading.Thread(target=lambda: print(sum(map(int, data)))).start()\n"
    )
    many = " ".join(["1"] * 200_000)
    tests = [{"input": f"3\n{many}", "output": "200000\n3"}, {"input": "3\n1", "output": "2"}]
    assert outcomes(runner, program, stdio=tests) == ["passed", "failed: wrong output"]


def test_programs_may_use_processes_and_share_memory_as_the_library_does(runner: ProgramRunner) -> None:
    program = (
        "import mmap, multiprocessing, tempfile\nfrom concurrent.futures import ProcessPoolExecutor\n"
        "if __name__ == '__main__':\n    shared = multiprocessing.Value('i', 0)\n"
        "    def add():\n        with shared.get_lock(): shared.value += 1\n"
        "    workers = [multiprocessing.Process(target=add) for _ in range(4)]\n"
        "    for worker in workers: worker.start()\n    for worker in workers: worker.join()\n"
        "    with ProcessPoolExecutor(2) as pool: print(shared.value, sum(pool.map(abs, [-1, -2])))\n"
        "    with tempfile.TemporaryFile(dir='/dev/shm') as f:\n        f.truncate(4096)\n        mmap.mmap(f.fileno(), 4096)[:2] = b'ok'\n"
    )
    assert outcomes(runner, program, stdio=[{"input": "", "output": "4 3"}]) == ["passed"]


def test_all_or_nothing_stops_at_the_first_failure(runner: ProgramRunner) -> None:
    tests = parse_tests({"stdio": [{"input": str(n), "output": "1"} for n in (1, 2, 1)]})
    assert runner.outcomes("print(input())", tests, stops_early=True)[0] == [
        "passed",
        "failed: wrong output",
        "not run",
    ]
    assert runner.outcomes("print(input())", tests, stops_early=False)[0] == [
        "passed",
        "failed: wrong output",
        "passed",
    ]


# --- as a reward -----------------------------------------------------------------------------------------------------


def test_time_counts_as_a_timeout_and_mistakes_in_the_data_as_failures() -> None:
    right, endless = "```python\ndef f(x): return x\n```", "```python\nwhile True: pass\n```"
    rows = [
        (right, {"asserts": ["assert f(1) == 1"]}),
        (endless, {"asserts": ["assert f(1) == 1"]}),
        (right, {"asserts": ["assert f(lambda: 1)"]}),
    ]
    config = Reward.model_validate(
        {"parts": ["code", {"name": "format", "weight": 0.5}], "workers": 2, "timeout_s": 6.0}
    )
    with Rewards(config) as rewards:
        scores = rewards.score(
            [ScoreRequest(str(n), "p", text, "s", tests, {}) for n, (text, tests) in enumerate(rows)]
        )
        assert rewards.counters["answer_timeout"] == rewards.counters["scorer_failed"] == 1
        assert rewards.counters["worker_restarts"] == 0
        with pytest.raises(UserError, match="row 'r' of 's': the tests of the row need exactly one of"):
            rewards.check([Row("r", "p", "s", "{}")])
        rewards.check([Row("r", "p", "s", json.dumps(rows[0][1]))])
    assert [(s.reward, s.accuracy, s.timed_out) for s in scores[:2]] == [(1.0, 1.0, False), (0.0, 0.0, True)]
    assert scores[1].details == {"code": "test 1: failed: out of time"}
    assert scores[2].reward is None
    assert scores[2].error is not None
    assert "the tests pass a function to the program" in scores[2].error


def test_details_can_be_written_whatever_a_program_raises() -> None:
    raises = ScoreRequest(
        "a", "p", r"def f(): raise ValueError('no \ud800')", "s", {"asserts": ["assert f() == 1"]}, {}
    )
    with Rewards(Reward.model_validate({"parts": ["code"], "workers": 1})) as rewards:
        (score,) = rewards.score([raises])
    assert score.details["code"] == "test 1: failed: ValueError: no ?"


def test_a_row_may_name_the_code_reward_itself() -> None:
    request = ScoreRequest("a", "p", "def f(): return 1", "s", {"asserts": ["assert f() == 1"]}, {"verifier": "code"})
    with Rewards(Reward.model_validate({"parts": ["row"], "workers": 1})) as rewards:
        assert [s.reward for s in rewards.score([request])] == [1.0]


# --- reference solutions of MBPP and HumanEval -----------------------------------------------------------------------

DATA = Path(__file__).parents[3] / "shared" / "data"
MBPP, HUMANEVAL = DATA / "mbpp_sanitized.json", DATA / "HumanEval.jsonl.gz"


def request(name: object, program: str, tests: dict[str, object]) -> ScoreRequest:
    return ScoreRequest(str(name), "p", f"Here it is:\n```python\n{program}\n```", "s", json.dumps(tests), {})


def mbpp() -> list[ScoreRequest]:
    rows = json.loads(MBPP.read_text())
    return [
        request(r["task_id"], r["code"], {"asserts": r["test_list"], "setup": "\n".join(r["test_imports"])})
        for r in rows
    ]


def humaneval(is_whole: bool) -> list[ScoreRequest]:
    rows = [json.loads(line) for line in gzip.decompress(HUMANEVAL.read_bytes()).splitlines()]
    return [
        request(
            r["task_id"],
            r["prompt"] * is_whole + r["canonical_solution"],
            {"check": r["test"], "entry_point": r["entry_point"], "prefix": r["prompt"]},
        )
        for r in rows
    ]


needs_data = pytest.mark.skipif(
    not MBPP.exists() or not HUMANEVAL.exists(), reason=f"MBPP and HumanEval are not in {DATA}"
)


def judged(every: int) -> int:
    """Number of reference solutions that pass, checking every k-th; the test fails at the first that does not."""
    right = (mbpp() + humaneval(is_whole=True))[::every]
    continued = humaneval(is_whole=False)[:: 4 * every]
    wrong = [request(f"wrong {r.id}", "def nothing(): pass", json.loads(str(r.answer))) for r in right[::8]]
    with Rewards(Reward.model_validate({"parts": ["code"], "workers": 2, "timeout_s": 100.0})) as rewards:
        scores = rewards.score(right + continued + wrong)
    assert not any(s.error for s in scores)
    assert {s.id: s.details for s in scores if s.reward != float(not s.id.startswith("wrong"))} == {}
    return len(right)


@needs_data
def test_reference_solutions_pass_and_others_do_not() -> None:
    assert judged(every=8) == 74


FORGED = {  # tasks whose check calls a function of the prompt, and a program that redefines it
    "HumanEval/32": "def poly(xs, x): return 0.0\ndef find_zero(xs): return 0.0",
    "HumanEval/38": "def encode_cyclic(s): return s\ndef decode_cyclic(s): return s",
    "HumanEval/50": "def encode_shift(s): return s\ndef decode_shift(s): return s",
}


@needs_data
def test_programs_that_redefine_what_their_check_calls_fail() -> None:
    rows = [r for r in humaneval(is_whole=True) if r.id in FORGED]
    forged = [request(f"forged {r.id}", FORGED[r.id], json.loads(str(r.answer))) for r in rows]
    with Rewards(Reward.model_validate({"parts": ["code"], "workers": 2, "timeout_s": 100.0})) as rewards:
        scores = rewards.score(rows + forged)
    assert [s.reward for s in scores] == [1.0] * 3 + [0.0] * 3


@needs_data
@pytest.mark.slow  # 12 s on two idle cores
def test_all_reference_solutions_pass() -> None:
    assert judged(every=1) == 427 + 164
