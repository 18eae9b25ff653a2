"""A hundred hostile programs next to harmless ones: none escapes, none changes the verdict of another, no process is left."""

from __future__ import annotations

import itertools
import json
import os
import platform
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from burnish.config.data import Reward
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards
from tests.sandbox import hostile_programs
from tests.sandbox.leftovers import settles

MEMORY_GIB = 0.5 + os.getpid() * 1e-8  # a value that only the command lines of our sandboxes contain
IDLE = 4  # processes of two workers' sandboxes that have nothing to do


class Outside(NamedTuple):
    """What a program must not reach."""

    folder: Path
    listeners: list[socket.socket]
    names: dict[str, str]


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    folder = tmp_path / "canary"
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "secret").write_text("hunter2")
    monkeypatch.setenv("SECRET", "hunter2")
    name = f"burnish-{os.getpid()}"
    abstract, in_files, internet = (socket.socket(f) for f in (socket.AF_UNIX, socket.AF_UNIX, socket.AF_INET))
    abstract.bind(f"\0{name}")
    monkeypatch.chdir(folder)
    in_files.bind("listener")  # relative: the whole path may be too long for a socket
    internet.bind(("127.0.0.1", 0))
    listeners = [abstract, in_files, internet]
    for listener in listeners:
        listener.listen()
        listener.setblocking(False)
    yield Outside(folder, listeners, {"canary": str(folder), "socket": name, "port": str(internet.getsockname()[1])})
    for listener in listeners:
        listener.close()


def stdio(name: str, program: str, stdin: str, output: str) -> ScoreRequest:
    tests = json.dumps({"stdio": [{"input": stdin, "output": output}]})
    return ScoreRequest(name, "p", f"```python\n{program}\n```", "s", tests, {})


def harmless(number: int) -> ScoreRequest:
    if number % 2:
        return stdio(f"harmless {number}", "print(sum(map(int, input().split())))", f"{number} 1", str(number + 1))
    tests = json.dumps({"asserts": [f"assert add(1, {number}) == {number + 1}"], "entry_point": "add"})
    return ScoreRequest(f"harmless {number}", "p", "```python\ndef add(a, b): return a + b\n```", "s", tests, {})


def was_reached(listener: socket.socket) -> bool:
    try:
        listener.accept()
        return True
    except BlockingIOError:
        return False


def hostile_requests(names: dict[str, str]) -> list[ScoreRequest]:
    held = [stdio(name, _source(text, names), "", "held") for name, text in hostile_programs.HELD.items()]
    ends = [
        stdio(name, hostile_programs.PRELUDE + text, "", "held") for name, (text, _) in hostile_programs.ENDS.items()
    ]
    assert len(held + ends) >= 100
    # On other machines than x86_64 the number is another system call.
    by_number = ("syscall,", "CFUNCTYPE") if platform.machine() != "x86_64" else ()
    return [one for one in held + ends if not any(word in one.completion for word in by_number)]


def _source(text: str, names: dict[str, str]) -> str:
    return hostile_programs.PRELUDE + text.format(**names)


def problems(score: Score) -> Any:
    """What is wrong with the verdict on a hostile program, if anything."""
    if score.error is not None:
        return score.error
    details = score.details["code"]
    if score.id in hostile_programs.HELD:
        return None if score.reward == 1.0 else details
    expected = hostile_programs.ENDS[score.id][1]
    return None if score.reward == 0.0 and re.search(expected, details) else f"{details!r} is not {expected!r}"


def test_a_hundred_hostile_programs_are_held(outside: Outside) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    hostile = hostile_requests(outside.names)
    requests = list(itertools.chain(*([harmless(n), one] if n % 4 == 0 else [one] for n, one in enumerate(hostile))))
    config = Reward.model_validate({"parts": ["code"], "workers": 2, "timeout_s": 8.0, "memory_gib": MEMORY_GIB})
    with Rewards(config) as rewards:
        scores = rewards.score(requests)
        wrong = {s.id: problems(s) for s in scores if not s.id.startswith("harmless") and problems(s)}
        assert wrong == {}
        disturbed = {s.id: s for s in scores if s.id.startswith("harmless") and s.reward != 1.0}
        assert disturbed == {}
        counters = rewards.counters
        assert (counters["worker_restarts"], counters["scorer_failed"], counters["scorer_retried"]) == (0, 0, 0)
        assert settles(MEMORY_GIB, IDLE) == IDLE  # no daemon, no child
    assert settles(MEMORY_GIB, 0) == 0
    assert {p.name for p in outside.folder.iterdir()} == {"secret", "listener"}
    assert (outside.folder / "secret").read_text() == "hunter2"
    assert not any(was_reached(listener) for listener in outside.listeners)
    assert Path("/proc/self/mountinfo").read_text() == mounts
