"""Rewards computed by workers: the same scores as in one process, none lost and none twice when a worker ends."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.config.data import Reward
from burnish.config.model import Lora, Model, NewModel
from burnish.core.dispatch import WorkerLost
from burnish.distributed import remote_reward_pool
from burnish.distributed.remote_reward_pool import RemoteRewardPool, RewardWorker
from burnish.distributed.roles import build_scorers
from burnish.distributed.worker_group import WorkerGroup
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.heads import new_score_model
from burnish.models.lora.adapters import adapter_weights
from burnish.models.policy import load_policy
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rewards.worker_pool import START_TIMEOUT_S, ScoringCall
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from tests.distributed.in_process_backend import HereBackend

TOKENIZER = Tokenizer.from_characters("0123456789>")


@pytest.fixture(scope="module")
def scorer_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=16)
    decoder = Decoder(new_architecture(new, TOKENIZER.vocab_size))
    initialise(decoder, 0, std=0.3)
    folder = tmp_path_factory.mktemp("scorer")
    write_contents(folder, new_score_model(decoder, 1).contents(keep_in_place, None, TOKENIZER))
    return folder


@pytest.fixture(scope="module")
def adapted_at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scorer that is a PEFT directory on a base in 4 bits."""
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=16)
    base, folder = (tmp_path_factory.mktemp(name) for name in ("base", "adapted"))
    load_policy(Model(new=new, device="cpu"), None, "0123456789>", seed=1).save(base)
    policy = load_policy(Model(device="cpu", lora=Lora(rank=2, base="nf4")), base, None, 0)
    for parameter in adapter_weights(policy.module).values():
        parameter.data.fill_(0.1)
    write_contents(folder, new_score_model(policy.module, 1).contents(keep_in_place, base, TOKENIZER))
    return folder


def request_of(k: int) -> ScoreRequest:
    answer = str(k % 90 + 10)
    tokens = [*TOKENIZER.encode(f"21>{answer}"), TOKENIZER.eos_ids[0]]
    return ScoreRequest(f"r{k}", "21>", answer, "rows", "12", {}, tokens=tokens, written=[False] * 3 + [True] * 3)


@dataclass
class Office:
    """Rewards that two workers compute, and what is known of them."""

    rewards: Rewards
    backend: HereBackend
    notes: list[str] = field(default_factory=list)


@contextmanager
def office(reward: Reward, base: Path | None = None, backend: type[HereBackend] = HereBackend) -> Iterator[Office]:
    with Rewards(reward, base, is_remote=True) as rewards:
        setups = list(rewards.worker_setups.values())
        workers: list[RewardWorker] = []  # those that were replaced too

        def worker(rank: int) -> RewardWorker:
            workers.append(RewardWorker(reward, setups, TOKENIZER, base, cpus=1))
            return workers[-1]

        here = backend(worker, 2)
        made = Office(rewards, here)
        group = WorkerGroup("reward", RewardWorker, here, deadline_s=5)
        rewards.use_pool(
            lambda outcomes: RemoteRewardPool(group, outcomes, reward.workers, 5.0, 1.0, made.notes.append)
        )
        try:
            yield made
        finally:
            for pool in {pool for one in workers for pool in one._pools.values()}:
                pool.close()


def mixed(scorer_at: Path) -> Reward:
    model = {"name": "model", "weight": 2.0, "options": {"path": str(scorer_at), "device": "cpu"}}
    return Reward(parts=[model, "exact"], workers=1)


@pytest.mark.parametrize("which", ["scorer_at", "adapted_at"])
def test_workers_give_the_scores_of_one_process(which: str, request: pytest.FixtureRequest) -> None:
    reward, requests = mixed(request.getfixturevalue(which)), [request_of(k) for k in range(90)]
    requests[7] = ScoreRequest("long", "21>", "1" * 20, "rows", "12", {})  # longer than the model's positions
    with Rewards(reward) as rewards:
        rewards.attach_scorers(build_scorers(reward, TOKENIZER, None))
        expected = rewards.score(requests)
    with office(reward) as made:
        found = made.rewards.score(requests)
        assert made.rewards.counters["scorer_failed"] == 1
        assert {sent.rank for sent in made.backend.sent} == {0, 1}
    assert [score.id for score in found] == [score.id for score in expected]
    assert [score.accuracy for score in found] == [score.accuracy for score in expected]
    assert found[7].reward is None
    assert "reward part 'model' failed on row 'long'" in str(found[7].error)
    for one, other in zip(found, expected, strict=True):
        assert one.parts.keys() == other.parts.keys()
        assert (one.reward is None) == (other.reward is None)
        assert one.reward is None or one.reward == pytest.approx(other.reward, abs=1e-6)


@pytest.mark.parametrize("how", ["dead", "mute"])
def test_a_worker_that_ends_is_named_and_its_answers_are_scored_again_once(scorer_at: Path, how: str) -> None:
    requests = [request_of(k) for k in range(60)]
    with office(mixed(scorer_at)) as made:
        getattr(made.backend, how).add(1)
        made.rewards.submit(requests)
        found = []
        while made.rewards.pending:
            found += made.rewards.poll(1.0)
        assert sorted(score.id for score in found) == sorted(one.id for one in requests)
        assert all(score.reward is not None for score in found)
        assert made.backend.restarted == [1]
        assert made.rewards.counters["worker_restarts"] == 1
    assert len(made.notes) == 1
    assert made.notes[0].startswith("reward worker 1 is started again, and its ")
    assert "answers are scored again: reward rank 1" in made.notes[0]


class Silent:
    """Workers that take calls and never answer."""

    size = 1

    def __init__(self) -> None:
        self.dealt = threading.Event()

    def send(self, rank: int, method: str, calls: list[ScoringCall]) -> SimpleNamespace:
        self.dealt.set()
        return SimpleNamespace(rank=rank)

    def ready(self, handles: list[Any], timeout_s: float) -> list[Any]:
        time.sleep(0.01)
        return []


@pytest.mark.parametrize(("part", "waits_s"), [(0, 1000.0), (1, START_TIMEOUT_S + 2 * 0.5)])
def test_a_model_has_the_deadline_of_a_worker_and_a_verifier_that_of_its_calls(part: int, waits_s: float) -> None:
    workers = Silent()
    pool = RemoteRewardPool(workers, queue.SimpleQueue(), 1, 0.5, 1000.0, print, models={0})  # type: ignore[arg-type]
    try:
        before = time.monotonic()
        pool.submit([ScoringCall(part, (0,), b"")])
        assert workers.dealt.wait(60)
        after, until = time.monotonic(), pool._states[0].until
    finally:
        pool.close()
    assert before + waits_s <= until <= after + waits_s


def test_a_worker_that_always_ends_stops_the_run(scorer_at: Path) -> None:
    class Doomed(HereBackend):
        def restart(self, rank: int) -> None:
            super().restart(rank)
            self.dead.add(rank)

    with office(mixed(scorer_at), backend=Doomed) as made:
        made.backend.dead |= {0, 1}
        with pytest.raises(WorkerLost, match=r"reward rank \d of 2 has ended in `score` \(Score answers"):
            made.rewards.score([request_of(k) for k in range(8)])
        assert made.backend.restarted.count(0) <= remote_reward_pool.MAX_RESTARTS


def test_functions_of_a_user_and_verifiers_are_counted_where_they_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import os\n"
        "def dies(data_source, solution_str, ground_truth, extra_info):\n"
        "    if not os.path.exists('once'):\n"
        "        open('once', 'w').close()\n"
        "        os._exit(3)\n"
        "    return 0.5\n"
    )
    parts: list[Any] = [{"name": "own.py:dies"}, "exact"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        with office(Reward(parts=parts, workers=1), tmp_path) as made:
            found = made.rewards.score([request_of(2), request_of(3)])
            assert [score.reward for score in found] == [1.5, 0.5]
            counters = made.rewards.counters
    assert counters["worker_restarts"] == 1
    assert counters["scorer_retried"] == 1
    assert not made.notes  # the worker itself did not end
