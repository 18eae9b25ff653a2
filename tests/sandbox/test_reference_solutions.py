"""The reference solutions of MBPP and HumanEval pass their own tests, all of them; a wrong one of each does not."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from burnish.config.data import Reward
from burnish.rewards.scoring import Rewards
from burnish.rewards.types import ScoreRequest

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
    """How many reference solutions pass, of every so many; the test fails at one that does not."""
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


FORGED = {  # tasks whose check calls a function of the prompt, and a program that defines it anew
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
