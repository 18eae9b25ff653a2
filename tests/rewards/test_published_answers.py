"""The published data sets with their own verifiers: the published answer is right, and no answer is not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from burnish.config.data import Source
from burnish.data.row import Row
from burnish.data.rows import read_rows
from burnish.rewards.verifiers import row as judge

SHARED = Path(__file__).parents[2] / "../shared/data"
FILES = {
    "gsm8k": "gsm8k_test.jsonl",
    "math": "math_train_rllm.json",
    "math500": "math500.jsonl",
    "aime24": "aime2024_orz.json",
    "amc": "amc_rllm.json",
    "deepscaler": "deepscaler_sub_1209.parquet",
    "nq": "nq_open_validation.jsonl",
    "hotpotqa": "hotpotqa_dev_simplified.json",
    "countdown": "countdown_rg_400.jsonl",
}


def answered(row: Row) -> str:
    """A completion that gives the published answer as its prompt asks for it."""
    if row.extra["verifier"] == "task":
        return f"<answer>{row.extra['solution']}</answer>"
    if row.extra["verifier"] == "qa":
        return f"Let me see. <answer>{row.answer[-1]}</answer>"
    return f"So it is $\\boxed{{{row.answer}}}$."


@pytest.mark.skipif(not SHARED.is_dir(), reason="the published data sets are not here")
@pytest.mark.parametrize("name", FILES)
def test_published_answers_are_right_and_none_is_wrong(name: str) -> None:
    rows = read_rows(Source(path=str(SHARED / FILES[name]), shape=name, limit=40))
    if rows[0].extra["verifier"] == "math" and importlib.util.find_spec("math_verify") is None:
        pytest.skip("math-verify is not installed")
    for row in rows:
        assert judge(answered(row), row.answer, row.extra) == 1.0, row.id
        assert judge("I do not know.", row.answer, row.extra) == 0.0, row.id
