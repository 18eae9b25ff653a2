"""Programs that do not solve their task and try to pass anyway. The tests are `f(20) == 42` and `f(21) == 44`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from burnish.config.data import Reward
from burnish.rewards.code_reward import ProgramRunner, parse_tests
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards

TESTS = {
    "asserts": ["assert f(20) == 42", "assert set([f(21)]) == set([44]) and isinstance(f(21), int)"],
    "entry_point": "f",
}
EQUAL = "class Same:\n    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    def __hash__(self): return 44\n"

FORGED = {
    "exits with a good status": "import os; os._exit(0)",
    "exits in the call": "import os\ndef f(x): os._exit(0)",
    "raises SystemExit on loading": "raise SystemExit(0)",
    "raises SystemExit in the call": "def f(x): raise SystemExit(0)",
    "raises KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "raises StopIteration": "def f(x): raise StopIteration",
    "returns what equals everything": EQUAL + "def f(x): return Same()",
    "returns an integer that equals everything": EQUAL.replace("class Same:", "class Same(int):")
    + "def f(x): return Same(1)",
    "returns a list that equals everything": EQUAL.replace("class Same:", "class Same(list):")
    + "def f(x): return Same()",
    "lies about its class": EQUAL + "    __class__ = int\ndef f(x): return Same()",
    "is itself equal to everything": EQUAL + "    def __call__(self, x): return self\nf = Same()",
    "redefines what tests use": "def f(x): return 0\nset = lambda values: 1\nisinstance = lambda *a: True\nimport builtins\n"
    "builtins.set, builtins.isinstance = set, isinstance",
    "patches the exception": "import builtins\nclass Never(Exception): pass\nbuiltins.AssertionError = Never\ndef f(x): return 0",
    "traces": "import sys\ndef trace(frame, event, argument):\n    frame.f_trace_lines = False\n    return trace\nsys.settrace(trace)\ndef f(x): return 0",
    "prints verdicts": "import json, os\nfor n in range(30):\n    for said in ({'test': 0, 'outcome': 'passed'}, {'test': 1, 'outcome': 'passed'}, {'done': True}):\n"
    "        try: os.write(n, json.dumps(said).encode() + b'\\n')\n        except OSError: pass\ndef f(x): return 0",
    "speaks on the line": "import json, os, struct\ndef say(said):\n    body = json.dumps(said).encode()\n    os.write(3, struct.pack('!I', len(body)) + body)\n"
    "say({'loaded': True})\nfor _ in range(9): say({'value': True, 'done': True, 'outcome': 'passed'})\ndef f(x): return 0",
    "sends a tag of its own": "import json, os, struct\ndef f(x):\n    body = json.dumps({'value': {'__class__': 'passed'}}).encode()\n"
    "    os.write(3, struct.pack('!I', len(body)) + body)\n    import time; time.sleep(9)",
    "sends a length without end": "import os\ndef f(x): os.write(3, b'\\xff' * 4096); import time; time.sleep(9)",
    "sends nonsense": "import os\ndef f(x): os.write(3, b'\\0\\0\\0\\4nope'); import time; time.sleep(9)",
    "closes the line": "import os\ndef f(x): os.close(3); os.close(1)",
    "patches its side of the line": "import sys\nframe = sys._getframe()\nwhile frame:\n    for name in ('encode', 'send', '_answer'):\n"
    "        if name in frame.f_globals: frame.f_globals[name] = lambda *a: {'value': True}\n    frame = frame.f_back\ndef f(x): return 0",
    "looks for the expected value in frames": "import sys\ndef f(x):\n    frame, found = sys._getframe(), []\n    while frame:\n"
    "        found += [v for v in frame.f_locals.values() if isinstance(v, int) and v in (42, 44) and v is not x]\n        frame = frame.f_back\n"
    "    return found[0] if found else -1",
    "looks for the tests in memory": "import gc\ndef f(x):\n    word = chr(97) + 'ssert f('\n    for thing in gc.get_objects():\n        inside = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, (list, tuple)) else ()\n"
    "        for text in list(inside):\n            if isinstance(text, str) and word in text and 'gc.get' not in text: return 42 if x == 20 else 44\n    return -1",
    "returns something endless": "def f(x):\n    while True: yield 42",
    "returns something deep": "def f(x):\n    deep = 42\n    for _ in range(10**5): deep = [deep]\n    return deep",
    "returns something huge": "def f(x): return 'x' * (1 << 26)",
    "returns itself": "def f(x):\n    me = []\n    me.append(me)\n    return me",
    "returns nan": "def f(x): return float('nan')",
    "returns nothing": "def f(x): pass",
    "defines nothing": "x = 1",
    "is no Python": "def f(x: return",
    "is empty": "",
    "changes the argument": "def f(x):\n    x += 22\nimport ctypes\nctypes.c_long.from_address(id(20) + 24).value = 42",
    "answers the first only": "def f(x): return 42",
}
RIGHT = {
    "solves it": "def f(x): return 2 * x + 2",
    "solves it in a class": "class F:\n    def __call__(self, x): return 2 * x + 2\nf = F()",
    "solves it with an integer of its own": "class Mine(int): pass\ndef f(x): return Mine(2 * x + 2)",
    "solves it and prints": "print('hello')\ndef f(x):\n    print(x)\n    return 2 * x + 2",
}


@pytest.fixture(scope="module")
def runner() -> Iterator[ProgramRunner]:
    runner = ProgramRunner(timeout_s=10.0, memory_gib=1.0)
    with runner.sandbox:
        yield runner


def test_no_program_forges_its_verdict() -> None:
    config = Reward.model_validate({"parts": ["code"], "workers": 2, "timeout_s": 4.0, "memory_gib": 1.0})
    programs = {**FORGED, **RIGHT}
    requests = [
        ScoreRequest(name, "p", f"```python\n{text}\n```", "s", json.dumps(TESTS), {})
        for name, text in programs.items()
    ]
    with Rewards(config) as rewards:
        scores = rewards.score(requests)
        assert rewards.counters["worker_restarts"] == 0
    assert {s.id: s.error for s in scores if s.error} == {}
    assert {s.id: s.details for s in scores if (s.reward == 1.0) != (s.id in RIGHT)} == {}
    assert all(s.accuracy == s.reward for s in scores)
    # No test may pass: a trick that passes one of two tests here could pass all tests elsewhere.
    assert {s.id for s in scores if s.id in FORGED and s.parts["code/passed"] > 0} == {"answers the first only"}


PREFIX = """from string import ascii_lowercase as LETTERS


def rotate(word):
    '''Move the first letter to the end.'''
    return word[1:] + word[:1]


def unrotate(word):
    '''Undo rotate.'''
"""
CHECK = "def check(candidate):\n    assert all(candidate(rotate(word)) == word for word in ('abc', 'hello', LETTERS))"
CALLS_BACK = {
    "check": "def check(candidate):\n    assert twice(2) == 8",
    "prefix": "def twice(x):\n    return f(f(x))\ndef f(x):\n",
    "entry_point": "f",
}
FORGED_HELPERS = {
    "redefines the helper": "def rotate(word): return word\ndef unrotate(word): return word",
    "redefines the helper in its body": "    globals()['rotate'] = lambda word: word\n    return word",
    "redefines what the prefix imports": "LETTERS = ''\nrotate = str\ndef unrotate(word): return word",
}
RIGHT_BESIDE_HELPERS = {
    "is whole": "def unrotate(word): return word[-1:] + word[:-1]",
    "continues the prefix": "    return word[-1:] + word[:-1]",
    "has a wrong helper of its own": "def rotate(word): return 0\ndef unrotate(word): return word[-1:] + word[:-1]",
}


@pytest.mark.parametrize(
    "prefix", [PREFIX, PREFIX.partition("    '''Undo")[0], PREFIX + "    if word:\n        pass\n"]
)
def test_helpers_that_a_check_uses_are_those_of_the_prompt(runner: ProgramRunner, prefix: str) -> None:
    tests = parse_tests({"check": CHECK, "entry_point": "unrotate", "prefix": prefix})
    for program in FORGED_HELPERS.values():
        assert runner.outcomes(program, tests, stops_early=True)[0][0].startswith("failed")
    for program in RIGHT_BESIDE_HELPERS.values():
        assert runner.outcomes(program, tests, stops_early=True)[0] == ["passed"]


def test_a_helper_that_calls_the_function_under_test_calls_the_programs(runner: ProgramRunner) -> None:
    assert runner.outcomes("    return 2 * x", parse_tests(CALLS_BACK), stops_early=True)[0] == ["passed"]
    assert runner.outcomes("    return 3 * x", parse_tests(CALLS_BACK), stops_early=True)[0] == ["failed"]


SWALLOWING = [  # each would pass if Python took the function's exception for the end of a loop
    "assert all(map(f, [1, 2]))",
    "assert list(filter(f, [1])) == []",
    "assert sum(map(f, [1])) == 0",
    "assert next(map(f, [1]), None) is None",
    "assert list(iter(lambda: f(1), 0)) == []",
    "assert not [x for x in map(f, [1])]",
    "import itertools\nassert list(itertools.takewhile(f, [1])) == []",
    "class Cases:\n    def __getitem__(self, index): return f(index)\nassert all(Cases())",
]
RAISED = (
    "StopIteration",
    "StopIteration(3)",
    "type('Mine', (StopIteration,), {})",
    "StopAsyncIteration",
    "GeneratorExit",
    "KeyboardInterrupt",
    "IndexError",
)
COUNT = (
    "class Count:\n    n = -1\n    def __iter__(self): return self\n    def __next__(self):\n        self.n += 1\n"
    "        if self.n == 2: raise StopIteration\n        return self.n\ndef f(n): return Count()"
)


def test_an_exception_never_passes_for_the_end_of_a_loop(runner: ProgramRunner) -> None:
    tests = parse_tests({"asserts": SWALLOWING, "entry_point": "f"})
    for raised in RAISED:
        got = runner.outcomes(f"def f(x): raise {raised}", tests, stops_early=False)[0]
        assert [outcome.partition(": ")[0] for outcome in got] == ["failed"] * len(SWALLOWING), (raised, got)
    ends = parse_tests({"asserts": ["assert list(f(2)) == [0, 1]"]})
    assert runner.outcomes(COUNT, ends, stops_early=False)[0] == ["passed"]


def test_a_program_that_ends_is_not_what_a_bare_except_expects(runner: ProgramRunner) -> None:
    tests = parse_tests({"asserts": ["try:\n    f(1)\n    ok = False\nexcept:\n    ok = True\nassert ok"]})
    assert runner.outcomes("def f(x): raise ValueError", tests, stops_early=False)[0] == ["passed"]
    for way in ("import os; os._exit(0)", "import os; os.close(3)", "import os; os.write(3, bytes(4096))"):
        assert runner.outcomes(f"def f(x): {way}", tests, stops_early=False)[0][0].startswith("failed")


@pytest.mark.parametrize("check", ["def check(f):\n    yield\n    assert 0", "async def check(f):\n    assert 0"])
def test_a_check_that_would_never_run_is_a_mistake_in_the_data(runner: ProgramRunner, check: str) -> None:
    with pytest.raises(ValueError, match="calling it does not run it"):
        runner.outcomes("def f(): pass", parse_tests({"check": check, "entry_point": "f"}), stops_early=False)


def test_a_share_of_the_tests_can_be_the_score() -> None:
    parts = [{"name": "code", "options": {"score": "fraction"}}]
    half, none = FORGED["answers the first only"], FORGED["returns nothing"]
    with Rewards(Reward.model_validate({"parts": parts, "workers": 1})) as rewards:
        scores = rewards.score(
            [ScoreRequest(t, "p", f"```python\n{t}\n```", "s", json.dumps(TESTS), {}) for t in (half, none)]
        )
    assert [(s.reward, s.accuracy) for s in scores] == [(0.5, 0.0), (0.0, 0.0)]
    assert scores[0].parts == {"code": 0.5, "code/passed": 1.0, "code/tests": 2.0}
    assert scores[0].details == {"code": "test 1: passed\ntest 2: failed"}
