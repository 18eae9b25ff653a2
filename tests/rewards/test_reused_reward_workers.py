"""Scoring processes that tests of whole runs share: equal runs take the same one, and any other gets its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Reward
from burnish.rewards import worker_pool
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from tests.reused_reward_workers import end_all, reused_reward_workers


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def scored(completion: str, **reward: Any) -> tuple[int, float]:
    """The process that scored a completion, and its reward."""
    with Rewards(Reward(workers=1, **reward)) as rewards:
        (score,) = rewards.score([ScoreRequest("r", "p", completion, "s", "Yes", {})])
        (worker,) = next(iter(rewards._pools.values()))._workers
        return worker.process.pid, score.reward


def test_equal_runs_share_a_process_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    strict: dict[str, Any] = {"parts": [{"name": "exact"}]}
    loose: dict[str, Any] = {"parts": [{"name": "exact", "options": {"ignore_case": True}}]}
    with reused_reward_workers():
        first, other = scored("yes", **strict), scored("yes", **loose)
        assert scored("yes", **strict) == first
        assert scored("Yes", **strict) == (first[0], 1.0)
        assert (first[1], other[1]) == (0.0, 1.0)
        processes = {first[0], other[0], scored("yes", timeout_s=7, **strict)[0]}
        monkeypatch.setenv("ANOTHER", "value")
        processes.add(scored("yes", **strict)[0])
        assert len(processes) == 4
        assert all(map(is_running, processes))
    end_all()
    assert not any(map(is_running, processes))
    assert worker_pool.start_worker.__module__ == "burnish.rewards.worker_pool"


def test_a_process_with_functions_of_users_ends_with_its_run(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def half(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n"
    )
    with reused_reward_workers():
        process, reward = scored("yes", parts=[{"name": f"{tmp_path}/mine.py:half"}])
        assert reward == 0.5
        assert not is_running(process)
    end_all()
