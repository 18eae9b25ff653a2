"""Programs that do not solve their task and try to pass all the same. The tests are `f(20) == 42` and `f(21) == 44`."""

from __future__ import annotations

import json

from burnish.config.reward import Reward
from burnish.rewards.rewards import Rewards
from burnish.rewards.types import ScoreRequest

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
    # Not one test, that is: what would pass one of two by a trick could pass both of others.
    assert {s.id for s in scores if s.id in FORGED and s.parts["code/passed"] > 0} == {"answers the first only"}


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
