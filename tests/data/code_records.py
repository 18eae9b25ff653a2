"""Records of code benchmarks as they are published, for tests of how they are read and scored."""

from __future__ import annotations

import json

CRUX = {"code": "def f(a, n):\n    return a[:n] + [n]", "input": "[1, 2], 1", "output": "[1, 1]", "id": "sample_0"}
LCB = {
    "question_title": "Sum", "question_content": "Add two numbers.", "platform": "atcoder", "question_id": "abc1_a",
    "contest_date": "2023-08-21T00:00:00", "starter_code": "", "difficulty": "easy",
    "public_test_cases": json.dumps([{"input": "1 2\n", "output": "3", "testtype": "stdin"}]),
    "private_test_cases": json.dumps([{"input": "5 -9\n", "output": "-4\n", "testtype": "stdin"}]), "metadata": "{}",
}  # fmt: skip
LEETCODE = {
    **LCB, "platform": "leetcode", "starter_code": "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        ",
    "public_test_cases": json.dumps([{"input": "[2, 7, 11]\n9", "output": "[0, 1]", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": "[3, 3]\n6", "output": "[0, 1]", "testtype": "functional"}]),
    "metadata": json.dumps({"func_name": "twoSum"}),
}  # fmt: skip
TWO_SUM = """```python
class Solution:
    def twoSum(self, nums: List[int], target: int) -> List[int]:
        seen = {}
        for i, n in enumerate(nums):
            if target - n in seen:
                return (seen[target - n], i)
            seen[n] = i
```"""
