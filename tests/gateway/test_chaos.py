"""Agents that crash, hang, flood, steal keys, send garbage and call after their end do not touch the episodes beside them.

Every healthy episode has exactly the tokens that the engine sampled for it, and those of a run without sick ones. Every sick one ends with an
event that says why, and without a reward. No process is left, and the memory of the run is bounded.

    python -m tests.gateway.test_chaos function 1000     so many agents as functions, or as commands; prints what happened
"""

from __future__ import annotations

import os
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from burnish.core.trajectory import EPISODE_METRICS, EVENTS, Trajectory
from burnish.run.supervisor.processes import descendants, processes_with_variable
from tests.gateway.agents.chaos_agent import NOISE
from tests.gateway.scripted_engine import (
    AGENTS,
    SAMPLING,
    TOKENIZER,
    Draw,
    Sampled,
    ScriptedEngine,
    draws,
    recorded,
    runner_of,
)

HEALTHY = ("talks", "leaves_streams", "retries", "sends_garbage", "steals", "floods", "sends_much", "calls_late")
WEIGHTS = (12, 2, 2, 2, 2, 1, 1, 2)
EVENTS_OF = {
    "raises": ("step_failed", "agent_died"),
    "exits": ("worker_died", "agent_died"),
    "kills_itself": ("worker_died", "agent_died"),
    "never_calls": ("no_calls", "no_calls"),
    "gives_a_bad_reward": ("step_failed", "bad_reply"),
    "gives_no_number": ("bad_reply", "bad_reply"),
}
"""Sick kinds, and the event that ends them: of a function, of a command."""
HANGING = ("hangs", "hangs_at_once", "has_children_that_go_on")
MARK = "BURNISH_CHAOS"
"""A variable that all processes of the agents have, by which those left behind are found."""
MAX_GROWTH_KIB = 1 << 20
"""Memory that a run with bodies of 100 MB may take at its peak."""


def answer_text(draw: Draw) -> str:
    return f"the {draw.number} of {len(draw.text)}"


def mixture(num: int, seed: int, folder: Path, has_hanging: bool) -> list[dict[str, Any]]:
    """Rows of healthy and sick episodes. Eight of ten are healthy, and each kind is there. An agent that hangs holds its place for long: few do."""
    dice = random.Random(seed)
    sick, weights = list(EVENTS_OF), [4] * len(EVENTS_OF)
    if has_hanging:
        sick, weights = [*sick, *HANGING], [*weights, *([1] * len(HANGING))]
    kinds = [*HEALTHY, *sick]
    while len(kinds) < num:
        kinds.append(dice.choices(HEALTHY, WEIGHTS)[0] if dice.random() < 0.8 else dice.choices(sick, weights)[0])
    dice.shuffle(kinds)
    return [
        {"prompt": f"episode {number}", "number": number, "kind": kind, "is_healthy": kind in HEALTHY, "folder": str(folder)}
        for number, kind in enumerate(kinds[:num])
    ]  # fmt: skip


def own(sampled: list[Sampled]) -> set[Sampled]:
    """Those samples that belong to the conversation of an episode."""
    return {one for one in sampled if NOISE not in TOKENIZER.decode(list(one.context))}


def run_all(rows: list[dict[str, Any]], mark: str, **settings: Any) -> tuple[ScriptedEngine, dict[int, Trajectory]]:
    """Play the rows, and see that nothing is left of them. Returns their trajectories by number."""
    engine = ScriptedEngine(answer_text)
    before = set(descendants(os.getpid()))
    runner = runner_of(engine, AGENTS, **({"max_turns": 80, "deadline_s": 600.0} | settings))
    try:
        found = [(int(t.prompt_id.rpartition("/")[2]), t) for t in runner.run(draws(rows), 1, SAMPLING, "train")]
    finally:
        runner.close()
    assert set(descendants(os.getpid())) <= before
    assert set(processes_with_variable(f"{MARK}={mark}")) <= {os.getpid()}
    assert sorted(number for number, _ in found) == sorted(row["number"] for row in rows)
    return engine, dict(found)


def check(rows: list[dict[str, Any]], mark: str, is_command: bool, **settings: Any) -> Counter[str]:
    """Play a mixture, then its healthy episodes alone, and compare. Returns what happened, by kind."""
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    engine, found = run_all(rows, mark, **settings)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - size < MAX_GROWTH_KIB
    healthy = [row for row in rows if row["is_healthy"]]
    _, calm = run_all(
        [row | ({} if row["kind"] == "retries" else {"kind": "talks"}) for row in healthy], mark, **settings
    )
    counts: Counter[str] = Counter()
    for row in rows:
        t, kind = found[row["number"]], row["kind"]
        events = [event["kind"] for event in t.metadata.get(EVENTS, ())]
        counts[f"{kind}: {'reward' if t.reward is not None else events[-1]}"] += 1
        if not row["is_healthy"]:
            expected = "step_timed_out" if kind in HANGING else EVENTS_OF[kind][is_command]
            assert (t.reward, t.finish, events[-1]) == (None, "error", expected), (kind, t.error)
            assert set(events) <= {expected, "worker_died"}, (kind, events)
            continue
        assert t.error is None, (kind, t.error)
        assert set(events) <= {"worker_died"}, (kind, events)  # of another one in its process; it was started again
        undisturbed = calm[row["number"]]
        assert undisturbed.error is None, (kind, undisturbed.error)
        assert set(recorded(t)) <= set(engine.drawn[t.id]), kind
        assert own(recorded(t)) == own(engine.drawn[t.id]), (kind, t.metadata)
        assert own(recorded(t)) == own(recorded(undisturbed)), (kind, t.metadata, undisturbed.metadata)
        assert t.reward == undisturbed.reward, kind
        for name in ("calls_refused", "calls_refused_busy", "clients_left", "client_retries"):
            counts[name] += int(t.metadata[EPISODE_METRICS].get(name, 0))
    return counts


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A name in the environment of all processes that the agents of a test have."""
    monkeypatch.setenv(MARK, tmp_path.name)
    return tmp_path.name


def command_settings(mark: str) -> dict[str, Any]:
    return {"agent": ["python", "-I", "-S", "chaos_agent.py"], "options": {MARK: mark}}


FUNCTION = {"agent": "chaos_agent.py:run", "workers": 2}


def test_agents_as_functions_in_the_middle_of_chaos(tmp_path: Path, mark: str) -> None:
    rows = mixture(20, 0, tmp_path, has_hanging=False)
    counts = check(rows, mark, is_command=False, **FUNCTION)
    assert counts["calls_refused"] > 0


def test_agents_as_commands_in_the_middle_of_chaos(tmp_path: Path, mark: str) -> None:
    rows = mixture(20, 1, tmp_path, has_hanging=False)
    check(rows, mark, is_command=True, workers=8, **command_settings(mark))


@pytest.mark.parametrize("is_command", [False, True], ids=["function", "command"])
def test_agents_that_hang_are_ended_with_everything_they_started(tmp_path: Path, mark: str, is_command: bool) -> None:
    rows = [row for row in mixture(17, 2, tmp_path, has_hanging=True) if row["kind"] in HANGING]
    assert {row["kind"] for row in rows} == set(HANGING)
    settings = command_settings(mark) if is_command else FUNCTION
    check(rows, mark, is_command, deadline_s=1.0, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("is_command", [False, True], ids=["function", "command"])
def test_a_thousand_agents_in_the_middle_of_chaos(tmp_path: Path, mark: str, is_command: bool) -> None:
    print(thousand(1000, tmp_path, mark, is_command))


def thousand(num: int, folder: Path, mark: str, is_command: bool, seed: int = 3) -> str:
    """Play many episodes, with some that hang, and say what happened."""
    started = time.monotonic()
    rows = mixture(num, seed, folder, has_hanging=True)
    settings = command_settings(mark) | {"workers": 32} if is_command else FUNCTION | {"workers": 8}
    counts = check(rows, mark, is_command, deadline_s=60.0, **settings)
    lines = [f"{name}: {count}" for name, count in sorted(counts.items())]
    head = f"{num} episodes as {'commands' if is_command else 'functions'} in {time.monotonic() - started:.0f} s, seed {seed}"
    return "\n  ".join([head, *lines])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ[MARK] = Path(name).name
        print(thousand(int(sys.argv[2]), Path(name), Path(name).name, sys.argv[1] == "command"))
