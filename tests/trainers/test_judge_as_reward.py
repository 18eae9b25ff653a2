"""RL with a judge as its reward: what the run tells of it, and that a run made again pays for nothing twice."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from burnish.config.errors import UserError
from burnish.run.metrics import read
from burnish.run.samples import read_table
from tests.rewards.judge.server import Body, Reply, serving
from tests.trainers.tiny import TINY, run_of

STEPS, SAMPLES = 2, 16


def verdict(body: Body, number: int) -> Reply:
    """Right where the answer has a 1 in it; of an answer with a 9 nobody can say."""
    answer = re.search(r"A: (.*)", body["messages"][0]["content"])
    assert answer is not None
    return Reply("hm" if "9" in answer[1] else json.dumps({"correct": "1" in answer[1]}))


def test_the_verdicts_are_the_reward_and_are_told(tmp_path: Path) -> None:
    with serving(verdict) as endpoint:
        options = {"url": endpoint.url, "model": "m", "template": "Q: {question}\nA: {answer}", "parse_retries": 1}
        part = json.dumps({"name": "judge", "options": {**options, "cache": str(tmp_path / "kept")}})
        overrides = [f"reward.parts=[{part}]", f"training.steps={STEPS}", "run.samples_every=1"]
        run = run_of(tmp_path / "one", TINY, overrides)
        asked = len(endpoint.asked)
        again = run_of(tmp_path / "two", TINY, overrides)
        assert len(endpoint.asked) == asked  # every answer is in the cache
    rows = read(run / "metrics.jsonl")
    samples = [s for file in sorted((run / "samples").glob("*.parquet")) for s in read_table(file)]
    assert len(samples) == STEPS * SAMPLES
    right = [float("1" in s["completion"] and "9" not in s["completion"]) for s in samples]
    assert [s["reward"] for s in samples] == right
    assert sum(row["reward/part/judge"] for row in rows) * SAMPLES == sum(right)
    unread = sum("9" in s["completion"] for s in samples)
    assert unread > 0
    assert round(sum(row["reward/part/judge/parse_fail"] for row in rows) * SAMPLES) == unread
    assert all(row["reward/failed"] == 0 for row in rows)
    assert [row["reward/mean"] for row in read(again / "metrics.jsonl")] == [row["reward/mean"] for row in rows]


def test_an_endpoint_that_is_gone_is_a_failure_the_run_tells(tmp_path: Path) -> None:
    with serving(verdict) as endpoint:
        pass
    options = {"url": endpoint.url, "model": "m", "retries": 0}
    part = json.dumps({"name": "judge", "options": options})
    with pytest.raises(
        UserError, match=rf"step 1: not one of {SAMPLES} samples could be scored(.|\n)*Connection refused"
    ):
        run_of(tmp_path / "run", TINY, [f"reward.parts=[{part}]", "training.steps=1"])
