"""Agents under sources that pause, load weights, restart and stop: no episode is lost, and nothing is left behind."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from burnish.config.data import Data, Source
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptStream
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder
from burnish.rewards.scoring import Rewards
from burnish.rollout.async_source import AsyncSource
from burnish.rollout.runner import RolloutRunner, RolloutStopped
from burnish.rollout.sync_source import RolloutPlan
from burnish.run.journal import Journal
from burnish.run.supervisor.processes import descendants
from tests.rollout.test_agent_episodes import AGENTS, runner_of
from tests.rollout.test_async_source import Judge
from tests.rollout.test_in_flight import TOKENIZER, draws

SAMPLING = SamplingOptions(max_tokens=12, stop_tokens=(1,))
LONG = SamplingOptions(max_tokens=40)
PATIENCE_S = 60.0
WAITING = (
    AGENTS.replace("import openai", "")
    + '''
def long_chain(row, base_url, api_key):
    text = row["prompt"]
    for turn in range(2):
        text += ask(base_url, api_key, prompt=text, max_tokens=40)["choices"][0]["text"] + str(turn) + ">"
    return 1.0

def waits(row, base_url, api_key):
    """One call; then it waits for a file that the test makes."""
    ask(base_url, api_key, prompt=row["prompt"])
    while not os.path.exists(os.path.join(os.path.dirname(__file__), "go")):
        time.sleep(0.01)
    return 1.0
'''
)
SCRIPT = """
import json, os, subprocess, sys, urllib.request
child = subprocess.Popen(["sleep", "1000"])
body = json.dumps({"model": "any", "prompt": json.loads(sys.stdin.readline())["prompt"], "max_tokens": 12}).encode()
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", body, headers)).read()
print(1.0)
"""


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "episode_agents.py").write_text(WAITING)
    (tmp_path / "script.py").write_text(SCRIPT)
    before = set(descendants(os.getpid()))
    yield tmp_path
    assert not [t.name for t in threading.enumerate() if t.name in ("burnish-environments", "rollouts")]
    wait_until(lambda: set(descendants(os.getpid())) <= before)


def wait_until(is_true: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.01)


def stopping(kind: Any, model: Decoder, every: int) -> Any:
    """An engine that is interrupted whenever it has drawn so many tokens."""
    num_heard = 0

    def heard(name: str, token: int) -> None:
        nonlocal num_heard
        num_heard += 1
        if num_heard % every == 0:
            engine.interrupt()

    engine = kind(model, 4, TOKENIZER.decode, heard)
    return engine


def paused_again_and_again(runner: RolloutRunner, n: int) -> dict[str, Trajectory]:
    """All episodes; after each stream everything is paused, and new weights are announced."""
    in_flight, found, version = runner.in_flight(), list[Trajectory](), 0
    for draw in draws():
        for sample in range(n):
            found += in_flight.add(draw, sample, LONG, "train")
    while in_flight.running or in_flight.paused or in_flight.waiting:
        version += bool(in_flight.paused)
        runner.engine.load(version, ())
        found += in_flight.take_replies(0.01)
        in_flight.submit_pending()
        for completion in runner.engine.stream():
            found += in_flight.take(completion)
        found += in_flight.pause_all()
    return {t.id: t for t in found}


@pytest.mark.parametrize("kind", [DenseEngine, PagedEngine])
def test_weights_that_change_under_an_agent_are_the_versions_of_its_tokens(
    model: Decoder, folder: Path, kind: Any
) -> None:
    undisturbed = runner_of(kind(model, 4, TOKENIZER.decode), folder, "long_chain")
    expected = {t.id: t for t in undisturbed.run(draws(), 2, LONG, "train")}
    undisturbed.close()
    runner = runner_of(stopping(kind, model, 20), folder, "long_chain")
    try:
        found = paused_again_and_again(runner, 2)
    finally:
        runner.close()
    assert found.keys() == expected.keys()
    num_mixed = 0
    for name, one in found.items():
        assert [n.tokens.tolist() for n in one.nodes] == [n.tokens.tolist() for n in expected[name].nodes]
        versions = [n.version for n in one.nodes if n.version is not None]
        assert (np.diff(np.concatenate(versions)) >= 0).all()
        num_mixed += sum(len(set(v.tolist())) > 1 for v in versions)
    assert num_mixed, "no call was paused in the middle"


def test_a_partial_call_has_an_age_and_a_dropped_episode_starts_again(model: Decoder, folder: Path) -> None:
    engine = stopping(DenseEngine, model, 1)
    runner = runner_of(engine, folder, "waits")
    in_flight, (draw, _) = runner.in_flight(), draws()
    in_flight.add(draw, 0, LONG, "train")
    (active,) = in_flight
    assert active.oldest is None
    while not in_flight.paused:
        in_flight.take_replies(0.1)
    while active.oldest is None:  # the interrupt of the agent's call may end a stream before it has drawn anything
        in_flight.submit_pending()
        assert list(engine.stream()) == []
        in_flight.pause_all()
    assert (active.oldest, active.current.turns) == (0, [])
    engine.load(3, ())
    in_flight.drop(active)
    assert list(in_flight) == []
    in_flight.submit_pending()
    assert (in_flight.running, in_flight.paused) == ({}, [])
    in_flight.add(draw, 0, LONG, "train")
    (folder / "go").touch()
    found: list[Trajectory] = []
    while not found:
        found += in_flight.take_replies(0.05)
        in_flight.submit_pending()
        for completion in engine.stream():
            found += in_flight.take(completion)
    assert {int(v) for n in found[0].nodes if n.version is not None for v in n.version} == {3}
    in_flight.close()
    runner.close()


def test_an_asynchronous_source_uses_each_episode_once_and_none_too_late(model: Decoder, folder: Path) -> None:
    sources = [Source(task="sort_digits", options={"min_digits": 2, "max_digits": 3})]
    plan, journal = RolloutPlan(prompts=2, n=2, sampling=SAMPLING), Journal(folder / "journal")
    runner = runner_of(PagedEngine(model, 4, TOKENIZER.decode), folder, "chain")
    stream = PromptStream(sources, TOKENIZER, Data(train=sources), 3)
    plans = lambda step: plan if step <= 4 else None  # noqa: E731
    source = AsyncSource(stream, runner, cast(Rewards, Judge()), journal, plans, 1, PATIENCE_S, lambda text: None)
    used = []
    try:
        for step in range(1, 5):
            for t in source.next(step, plan, lambda text: None).trajectories:
                used.append(t.id)
                assert t.error is None
                ages = {step - 1 - int(v) for n in t.nodes if n.version is not None for v in n.version}
                assert ages <= {0, 1}
            source.load(step)
            held_out = list(runner.run(draws(), 1, SAMPLING, "eval"))  # validation, while agents of training wait
            assert [t.error for t in held_out] == [None, None]
    finally:
        source.close()
    lines = (folder / "journal" / "events.jsonl").read_text().splitlines()
    drawn = [name for e in map(json.loads, lines) if e["event"] == "drawn" for name in e["ids"]]
    assert len(used) == len(set(used)) == 16
    assert {name.rpartition(".")[0] for name in used} <= set(drawn)


def test_validation_does_not_wait_for_agents_of_training(model: Decoder, folder: Path) -> None:
    engine = DenseEngine(model)
    runner = runner_of(engine, folder, "", agent=[sys.executable, "script.py"])  # one command at a time
    in_flight, (draw, other) = runner.in_flight(), draws()
    in_flight.add(draw, 0, SAMPLING, "train")
    while not in_flight.paused:
        in_flight.take_replies(0.1)
    assert [t.reward for t in runner.run([other], 1, SAMPLING, "eval")] == [1.0]
    in_flight.close()
    runner.close()  # the command of training and its child are gone, which the fixture checks


@pytest.mark.parametrize("is_command", [False, True])
def test_a_stop_ends_sampling_while_agents_work(model: Decoder, folder: Path, is_command: bool) -> None:
    settings: dict[str, Any] = {"agent": [sys.executable, "script.py"], "workers": 4} if is_command else {}
    if is_command:
        (folder / "script.py").write_text(SCRIPT + "\nchild.wait()\n")
    runner = runner_of(DenseEngine(model), folder, "waits", **settings)
    endpoint: Any = runner.endpoint
    opened: list[Any] = []

    def opening(name: str, limits: Any, submit: Any) -> Any:
        opened.append(type(endpoint).open(endpoint, name, limits, submit))
        return opened[-1]

    endpoint.open = opening

    def stop() -> None:
        wait_until(lambda: len(opened) == 4 and all(session.tree.answers for session in opened))
        runner.stop_request.request()

    thread = threading.Thread(target=stop)
    thread.start()
    with runner.stop_request.allowed(), pytest.raises(RolloutStopped):
        list(runner.run(draws(), 2, SAMPLING, "train"))
    thread.join()
    runner.close()
    assert all(session.is_ended for session in opened)
