"""Episodes of agents that call the model through the recording endpoint: exact traces, limits, failures, and any weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config.data import Template
from burnish.config.environment import Environment as EnvironmentConfig
from burnish.core.engine import Completion, SamplingOptions
from burnish.core.trajectory import EPISODE_METRICS, EVENTS, Trajectory, pack
from burnish.distributed.roles import recording_endpoint
from burnish.environments.registry import environment_of
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.decoder import Decoder
from burnish.rollout.runner import RolloutRunner
from tests.rollout.test_in_flight import TOKENIZER, draws

SAMPLING = SamplingOptions(max_tokens=6, stop_tokens=(1,))
AGENTS = '''
import asyncio, json, os, time, urllib.error, urllib.request
import openai

def ask(base_url, api_key, path="/completions", **body):
    data = json.dumps({"model": "any", "max_tokens": 6} | body).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + api_key}
    with urllib.request.urlopen(urllib.request.Request(base_url + path, data, headers)) as answer:
        return json.load(answer)

def chain(row, base_url, api_key, turns=3):
    """Continues its own text, turn by turn."""
    text, ids = row["prompt"], []
    for turn in range(turns):
        answer = ask(base_url, api_key, prompt=text)
        ids.append(answer["id"])
        text += answer["choices"][0]["text"] + str(turn) + ">"
    return float(len(text) % 5)

async def client_chain(row, client, turns=2):
    text = row["prompt"]
    for turn in range(turns):
        answer = await client.completions.create(model="x", prompt=text, max_tokens=6)
        text += answer.choices[0].text + str(turn) + ">"
    return {"reward": 1.0, "success": True, "metrics": {"turns_seen": turns}}

async def forks(row, client):
    answers = await asyncio.gather(*(client.completions.create(model="x", prompt=row["prompt"] + str(k) + ">", max_tokens=4) for k in range(3)))
    await client.completions.create(model="x", prompt=row["prompt"] + "0>" + answers[0].choices[0].text + "7>", max_tokens=4)
    return {answers[0].id: 1.0, answers[2].id: -0.5}

def several(row, base_url, api_key):
    answer = ask(base_url, api_key, prompt=row["prompt"], n=3)
    ask(base_url, api_key, prompt=row["prompt"] + answer["choices"][1]["text"] + "5>")
    return 1.0

def never_calls(row):
    return 1.0

def raises(row, base_url, api_key):
    ask(base_url, api_key, prompt=row["prompt"])
    raise ValueError("no luck")

def hangs(row, base_url, api_key):
    ask(base_url, api_key, prompt=row["prompt"])
    time.sleep(1000)

def dies(row, base_url, api_key):
    os._exit(3)

def refused(row, base_url, api_key):
    """Asks for what no engine can read, and goes on."""
    statuses = []
    for prompt in ("", [3, 99999], [-1]):
        try:
            ask(base_url, api_key, prompt=prompt)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
    ask(base_url, api_key, prompt=row["prompt"])
    return float(statuses == [400, 400, 400])

def loops(row, base_url, api_key):
    said = [ask(base_url, api_key, prompt=row["prompt"])["choices"][0]["text"] for _ in range(9)]
    return float(sum("has made all 3 model calls" in text for text in said))
'''


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "episode_agents.py").write_text(AGENTS)
    return tmp_path


class Recorded:
    """An engine that remembers what it sampled, by prompt."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.drawn = engine, list[tuple[tuple[int, ...], Completion]]()
        self._prompts: dict[str, tuple[int, ...]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, requests: Any) -> None:
        self._prompts |= {request.id: request.tokens for request in requests}
        self.engine.submit(requests)

    def stream(self) -> Iterator[Completion]:
        for completion in self.engine.stream():
            self.drawn.append((self._prompts[completion.id], completion))
            yield completion


def runner_of(engine: Any, folder: Path, name: str, **settings: Any) -> RolloutRunner:
    config = EnvironmentConfig(**({"agent": f"episode_agents.py:{name}", "workers": 1, "retries": 0} | settings))  # type: ignore[arg-type]
    _, host = environment_of(config, TOKENIZER, folder)
    endpoint = recording_endpoint(config, TOKENIZER, Template(kind="plain"))
    return RolloutRunner(
        engine, None, TOKENIZER, 7, config.max_turns, 256, host=host, retries=config.retries, endpoint=endpoint, trained_calls="all"
    )  # fmt: skip


def played(runner: RolloutRunner, n: int = 2) -> dict[str, Trajectory]:
    try:
        return {t.id: t for t in runner.run(draws(), n, SAMPLING, "train")}
    finally:
        runner.close()


def sampled_tokens(trajectories: Any) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    return sorted(
        (tuple(node.tokens.tolist()), tuple(np.round(node.logp, 5).tolist()))
        for t in trajectories
        for node in t.nodes
        if node.is_sampled
    )


@pytest.mark.parametrize("name", ["chain", "client_chain", "forks"])
def test_a_trajectory_has_exactly_what_the_engine_drew(model: Decoder, folder: Path, name: str) -> None:
    engine = Recorded(DenseEngine(model))
    found = played(runner_of(engine, folder, name), 3)
    assert len(found) == 6
    drawn = [(tuple(c.tokens.tolist()), tuple(np.round(c.logp, 5).tolist())) for _, c in engine.drawn]
    assert sampled_tokens(found.values()) == sorted(drawn)
    contexts = sorted((*prompt, *c.tokens.tolist()) for prompt, c in engine.drawn)
    read = []
    for t in found.values():
        assert t.error is None
        for number, (sequence, path) in enumerate(zip(t.sequences, t.paths, strict=True)):
            at = 0
            for index in path:
                at += len(t.nodes[index].tokens)
                if t.nodes[index].is_sampled and t.node_places[index].sequence == number:
                    read.append(tuple(sequence.tokens[:at].tolist()))
    assert sorted(read) == contexts
    batch = pack(list(found.values()))
    assert int(batch.token["action_mask"].sum()) == sum(len(tokens) for tokens, _ in drawn)


def test_an_episode_is_the_same_whatever_runs_beside_it_and_however_often_it_is_paused(
    model: Decoder, folder: Path
) -> None:
    first = played(runner_of(DenseEngine(model, 1), folder, "chain"))
    again = played(runner_of(DenseEngine(model, 8), folder, "chain"), 3)
    for name, t in first.items():
        assert t.reward == again[name].reward
        assert [node.tokens.tolist() for node in t.nodes] == [node.tokens.tolist() for node in again[name].nodes]
        assert [span.node for span in t.turns] == [span.node for span in again[name].turns]


def test_of_several_choices_only_the_continued_one_is_trained(model: Decoder, folder: Path) -> None:
    for t in played(runner_of(DenseEngine(model), folder, "several"), 1).values():
        sampled = [node for node in t.nodes if node.is_sampled]
        assert len(sampled) == 4
        assert t.metadata[EPISODE_METRICS]["untrained_unused"] == 2 == sum(not node.is_trained for node in sampled)
        batch = pack([t])
        assert int(batch.token["loss_mask"].sum()) == sum(len(n.tokens) for n in sampled if n.is_trained)


def test_rewards_of_calls_and_measurements_reach_the_trajectory(model: Decoder, folder: Path) -> None:
    found = played(runner_of(DenseEngine(model), folder, "forks"), 1)
    for t in found.values():
        assert t.reward == 0.5
        assert sorted(span.reward for span in t.turns) == [-0.5, 0.0, 0.0, 1.0]
        assert len(t.sequences) == 3
        assert t.metadata[EPISODE_METRICS]["calls"] == 4
    with_client = played(runner_of(DenseEngine(model), folder, "client_chain"), 1)
    assert {(t.reward, t.accuracy) for t in with_client.values()} == {(1.0, 1.0)}


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("never_calls", "no_calls", "without a model call"),
        ("raises", "step_failed", "no luck"),
        ("hangs", "step_timed_out", "neither ended nor called the model for 0.5 s"),
        ("dies", "worker_died", "exited with status 3"),
    ],
)
def test_an_agent_that_fails_leaves_its_sample_without_a_reward(
    model: Decoder, folder: Path, name: str, kind: str, text: str
) -> None:
    deadline_s = 0.5 if name == "hangs" else 60.0
    found = played(runner_of(DenseEngine(model), folder, name, deadline_s=deadline_s, retries=1), 1)
    for t in found.values():
        assert (t.reward, t.finish) == (None, "error")
        events = t.metadata[EVENTS]
        assert {event["kind"] for event in events} == {kind}
        assert text in str(t.error)


def test_an_agent_that_asks_for_too_many_calls_is_told_so_and_its_trajectory_is_cut(
    model: Decoder, folder: Path
) -> None:
    for t in played(runner_of(DenseEngine(model), folder, "loops", max_turns=3), 1).values():
        assert (t.finish, len(t.turns), t.reward) == ("turns", 3, 6.0)
        assert t.truncated


def test_a_prompt_that_no_engine_can_read_is_refused_and_the_run_goes_on(model: Decoder, folder: Path) -> None:
    for t in played(runner_of(DenseEngine(model), folder, "refused"), 1).values():
        assert (t.error, t.reward, len(t.turns)) == (None, 1.0, 1)
        assert t.metadata[EPISODE_METRICS]["calls_refused"] == 3
