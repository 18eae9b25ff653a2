"""Scoring processes that are killed or stopped in the middle of a call: the call is made again, and no answer is blamed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Reward
from burnish.rewards import worker
from burnish.rewards.scoring import Rewards
from burnish.rewards.types import ScoreRequest
from burnish.run.supervisor.processes import descendants

PLUGIN = """
import os, time
from pathlib import Path
from typing import Any

def slowly(data_source, solution_str, ground_truth, extra_info):
    Path(__file__).with_name(f"at-{os.getpid()}").write_text(solution_str)
    time.sleep(0.2)
    return float(len(solution_str))
"""


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 2)])
def test_a_call_whose_process_is_lost_is_made_again(tmp_path: Path, number: int, workers: int) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    config = Reward(parts=["mine.py:slowly"], workers=workers, timeout_s=2.0)
    with Rewards(config, base=tmp_path) as rewards:
        rewards.submit([ScoreRequest(str(k), "p", "x" * k, "s", "1", {}) for k in range(6)])
        until = time.monotonic() + 30
        while not (begun := list(tmp_path.glob("at-*"))) and time.monotonic() < until:
            time.sleep(0.01)
        victim = int(begun[0].name.removeprefix("at-"))
        os.kill(victim, number)
        scores = {}
        while rewards.pending:
            scores |= {score.id: score for score in rewards.poll(30)}
        assert {id: score.reward for id, score in scores.items()} == {str(k): float(k) for k in range(6)}
        counters = rewards.counters
        assert counters["answer_timeout"] == counters["scorer_failed"] == 0
        assert counters["worker_restarts"] == counters["scorer_retried"] == 1
        assert victim not in descendants(os.getpid())


def test_a_process_that_ends_before_it_hears_its_task_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    begin, begun = worker.subprocess.Popen, list[int]()

    def begin_dead(*args: Any, **options: Any) -> Any:
        started = begin(*args, **options)
        if not begun:
            started.kill()
            started.wait(10)
        begun.append(started.pid)
        return started

    monkeypatch.setattr(worker.subprocess, "Popen", begin_dead)
    with Rewards(Reward(parts=["mine.py:slowly"], workers=1), base=tmp_path) as rewards:
        assert [score.reward for score in rewards.score([ScoreRequest("0", "p", "xx", "s", "1", {})])] == [2.0]
    assert len(begun) == 2
