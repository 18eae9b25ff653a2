"""Completions of CRUXEval-I and LiveCodeBench, judged by running them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from burnish.data.published_datasets import to_verl_layout
from burnish.rewards import code_prediction
from burnish.rewards.code_prediction import code_input
from burnish.rewards.code_reward import ProgramRunner
from burnish.rewards.verifiers import VERIFIERS
from tests.data.code_records import CRUX, LCB, LEETCODE, TWO_SUM

HOSTILE = "<answer>f(type('X', (), {'__eq__': lambda a, b: True})(), 1)</answer>"
EQUAL_TO_ALL = """```python
class Equal:
    def __eq__(self, other): return True
    def __iter__(self): return iter([0, 1])
class Solution:
    def twoSum(self, nums, target): return Equal()
```"""
LOOP = {"code": "def f(n):\n    while n > 0:\n        pass\n    return n", "output": "0"}
JUDGED: list[tuple[str, dict[str, Any], tuple[str, ...], tuple[str, ...]]] = [
    # (shape, record as published, right completions, wrong completions)
    ("cruxeval_i", CRUX,
     ("<answer>f([1, 2], 1)</answer>", "<answer>f([1] * 1, n=1)</answer>", "<answer>f([1, 9], 1) == [1, 1]</answer>"),
     ("<answer>f([2], 1)</answer>", "<answer>[1, 2], 1</answer>", "<answer>g(1)</answer>", "<answer>f(1)</answer>", HOSTILE)),
    ("livecodebench", LCB, ("```python\nprint(sum(map(int, input().split())))\n```",), ("```python\nprint(3)\n```",)),
    ("livecodebench", LEETCODE, (TWO_SUM,), (TWO_SUM.replace("(seen[target - n], i)", "[i, 0]"), EQUAL_TO_ALL, "no program")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "record", "right", "wrong"), JUDGED, ids=["call", "stdin", "functional"])
def test_right_and_wrong_answers_to_a_published_row(
    name: str, record: dict[str, Any], right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    made = to_verl_layout(record, "here", name)
    truth, extra = made["reward_model"]["ground_truth"], made["extra_info"]
    for completions, value in ((right, 1.0), (wrong, 0.0)):
        for completion in completions:
            score = VERIFIERS[extra["verifier"]](completion, truth, extra)
            assert not isinstance(score, float)
            assert (score.value, score.accuracy) == (value, value), completion


def test_a_call_that_does_not_return_is_wrong_and_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ProgramRunner(timeout_s=2.0)
    monkeypatch.setattr(code_prediction, "process_runner", lambda: runner)
    with runner.sandbox:
        found = code_input("<answer>f(1)</answer>", json.dumps(LOOP), {})
        assert (found.value, found.timed_out) == (0.0, True)
        assert code_input("<answer>f(0)</answer>", LOOP, {}).value == 1.0
