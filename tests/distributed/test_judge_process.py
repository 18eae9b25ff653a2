"""A judge that is a model directory: the answers are the model's own, its process may die, and ends with whoever started it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import pytest

from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.config.loading import load
from burnish.config.model import Model, NewModel
from burnish.config.rollout import Rollout
from burnish.config.schema import TrainConfig
from burnish.distributed import judge_process as judges
from burnish.distributed.engine_builder import build_engine
from burnish.distributed.judge_process import EngineJudge
from burnish.distributed.judge_worker import request_of
from burnish.distributed.roles import build_scorers
from burnish.memory_plan.from_config import plan_run
from burnish.models.architecture import new_architecture
from burnish.models.decoder import Decoder, initialise
from burnish.models.policy import PolicyModel, load_policy
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.judge_endpoint import JudgeFailed, JudgeReply
from burnish.rewards.judge_options import JudgeOptions
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.run.metrics import read_metrics
from burnish.run.supervisor.processes import parent_pids
from tests.trainers.tiny import TINY, run_of

OPTIONS: dict[str, Any] = {
    "template": "{answer}>",
    "parser": r"(?P<score>\d)",
    "high": 9.0,
    "max_tokens": 6,
    "device": "cpu",
    "parse_retries": 0,
}
ANSWERS = [str(k * 37 % 1000) for k in range(40)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says something, always the same."""
    folder, tokenizer = tmp_path_factory.mktemp("judge"), Tokenizer.from_characters("0123456789>")
    new = NewModel(hidden_size=16, num_layers=1, num_heads=2, mlp_size=24, max_positions=24)
    module = Decoder(new_architecture(new, tokenizer.vocab_size))
    initialise(module, 3, std=0.8)
    PolicyModel(module, tokenizer, None, "").save(folder)
    return folder


def options_of(directory: Path, **more: Any) -> dict[str, Any]:
    return {"path": str(directory), **OPTIONS, **more}


@pytest.fixture(scope="module")
def judge(directory: Path) -> Iterator[EngineJudge]:
    made = EngineJudge(directory, JudgeOptions.of(options_of(directory), "here"))
    yield made
    made.close()
    assert made._worker.is_dead


def request(answer: str) -> ScoreRequest:
    return ScoreRequest(f"r{answer}", "?", answer, "s", None, {})


def body(answer: str, seed: int = 0, temperature: float = 0.0) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"{answer}>"}]
    return {"messages": messages, "temperature": temperature, "max_tokens": 6, "seed": seed}


def said(directory: Path, bodies: list[dict[str, Any]]) -> list[str]:
    """What the model says in this process."""
    policy = load_policy(Model(device="cpu"), directory, None, 0)
    engine = build_engine(policy, Rollout(max_rows=4))
    engine.submit([request_of({**one, "id": k}, policy) for k, one in enumerate(bodies)])
    found = {int(c.id): policy.tokenizer.decode(c.tokens.tolist()) for c in engine.stream()}
    return [found[k] for k in range(len(bodies))]


def scored(judge: EngineJudge, answers: list[str], base: Path | None = None, **more: Any) -> tuple[list[Any], Any]:
    """Scores of answers by a judge that is not closed with them."""
    part = {"name": "judge", "options": options_of(judge.directory, **more)}

    class Lent:
        address, ask = judge.address, judge.ask

        def close(self) -> None:
            pass

    with Rewards(Reward(parts=[part]), base) as rewards:
        rewards.attach_scorers({0: Lent()})
        return rewards.score([request(answer) for answer in answers]), rewards.counters


def test_the_scores_are_what_the_model_says_whoever_is_judged_beside(judge: EngineJudge, directory: Path) -> None:
    scores, counters = scored(judge, ANSWERS)
    assert len({score.reward for score in scores}) > 2
    for score, text in zip(scores, said(directory, [body(a) for a in ANSWERS]), strict=True):
        found = [c for c in text if c.isdigit()]
        assert score.reward == (int(found[-1]) / 9 if found else 0.0)
        assert score.details["judge"] == text
        assert score.parts["judge/parse_fail"] == float(not found)
    assert counters["judge_calls"] == len(ANSWERS)
    assert counters["judge_parse_fail"] == sum(score.parts["judge/parse_fail"] for score in scores)


def test_an_answer_belongs_to_the_question_and_its_seed(judge: EngineJudge, directory: Path) -> None:
    asked = [body("12", seed, 1.0) for seed in range(8)]
    until = time.monotonic() + 60
    found = [judge.ask(one, until) for one in asked]
    assert [reply.text for reply in found] == said(directory, asked) == [judge.ask(one, until).text for one in asked]
    assert len(set(found)) > 1
    for reply in found:  # one token a character, and an end token unless the answer was cut
        assert reply.num_tokens is not None
        assert 0 <= reply.num_tokens - len("12>") - len(reply.text) <= 1


def test_a_process_that_dies_is_started_again_and_asked_again(judge: EngineJudge) -> None:
    before, _ = scored(judge, ANSWERS[:5])
    process = judge._worker._process
    os.kill(process.pid, signal.SIGSTOP)  # so that it dies with questions that it has not answered
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(scored, judge, ANSWERS[:5])
        while len(judge._worker._waiting) < 5:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        after, counters = asked.result()
    assert [s.reward for s in after] == [s.reward for s in before]
    assert all(s.error is None for s in after)
    assert counters["judge_retried"] == 5
    assert judge._worker._process.pid != process.pid


class Mortal:
    """Stands where a process does: it dies of the next question once it has given so many answers in its life."""

    made: ClassVar[list[Mortal]] = []
    answers: ClassVar[list[int]] = []
    """Of those still to be made, the next one's first; 0 where the list is empty."""
    note = ""

    def __init__(self, directory: Path, options: JudgeOptions) -> None:
        self.left, self.is_dead, self.is_killed = self.answers.pop(0) if self.answers else 0, False, False
        self.made.append(self)

    def submit(self, body: dict[str, Any]) -> Future[JudgeReply]:
        question: Future[JudgeReply] = Future()
        self.is_dead = self.left == 0
        self.left -= 1
        if self.is_dead:
            question.set_exception(judges.JudgeProcessDied("it died"))
        else:
            question.set_result(JudgeReply("9", 7))
        return question

    def kill(self) -> None:
        self.is_dead = self.is_killed = True


@pytest.fixture
def mortal(monkeypatch: pytest.MonkeyPatch) -> type[Mortal]:
    monkeypatch.setattr(judges, "JudgeProcess", Mortal)
    monkeypatch.setattr(Mortal, "made", [])
    monkeypatch.setattr(Mortal, "answers", [])
    return Mortal


def test_a_process_that_always_dies_is_started_again_three_times_in_a_row(
    mortal: type[Mortal], directory: Path
) -> None:
    made = EngineJudge(directory, JudgeOptions.of(options_of(directory, retries=9), "here"))
    for _ in range(2):  # whoever asks later starts no more
        with pytest.raises(JudgeFailed, match="died after each of 3 starts without an answer"):
            made.ask(body("1"), time.monotonic() + 60)
        assert len(mortal.made) == 1 + 3
    mortal.made.clear()
    mortal.answers[:] = [0, 0, 0, 1]
    made = EngineJudge(directory, JudgeOptions.of(options_of(directory, retries=9), "here"))
    assert made.ask(body("1"), time.monotonic() + 60) == JudgeReply("9", 7, 3)
    with pytest.raises(JudgeFailed, match="after each of 3 starts"):
        made.ask(body("1"), time.monotonic() + 60)
    assert len(mortal.made) == 4 + 3  # an answer gives it three more


def test_a_judge_that_is_closed_while_its_process_starts_leaves_none(
    mortal: type[Mortal], directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EngineJudge(directory, JudgeOptions.of(options_of(directory), "here"))
    mortal.made[0].is_dead = True
    is_starting, may_go_on = threading.Event(), threading.Event()

    class Slow(Mortal):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            is_starting.set()
            assert may_go_on.wait(60)

    monkeypatch.setattr(judges, "JudgeProcess", Slow)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(made.ask, body("1"), time.monotonic() + 60)
        assert is_starting.wait(60)
        made.close()
        assert not mortal.made[1].is_killed
        may_go_on.set()
        with pytest.raises(JudgeFailed, match="the judge was closed"):
            asked.result(60)
    assert mortal.made[1].is_killed
    with pytest.raises(JudgeFailed, match="the judge was closed"):
        made.ask(body("1"), time.monotonic() + 60)
    assert len(mortal.made) == 2


def test_the_cache_knows_the_model_and_not_the_process(
    judge: EngineJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first = scored(judge, ANSWERS[:5], tmp_path, cache="kept")
    _, again = scored(judge, ANSWERS[:5], tmp_path, cache="kept")
    assert (first["judge_calls"], again["judge_calls"], again["judge_cached"]) == (5, 0, 5)
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in judge.directory.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    monkeypatch.setattr(judges, "JudgeProcess", Mortal)
    assert EngineJudge(copy, judge.options).address == judge.address
    large = bytearray(1 << 19)
    seen = set()
    for at in (0, 1 << 18, (1 << 19) - 1):
        large[at] ^= 1
        (copy / "more.safetensors").write_bytes(large)
        seen.add(EngineJudge(copy, judge.options).address)
    assert len(seen | {judge.address}) == 4


def test_a_question_that_leaves_no_room_is_a_failure_of_the_scorer(judge: EngineJudge) -> None:
    (score,), _ = scored(judge, ["1" * 30])
    assert score.reward is None
    assert "31 tokens, and the judge's model 24 positions" in str(score.error)


def test_a_question_without_an_answer_in_time_is_given_up_and_forgotten(judge: EngineJudge) -> None:
    os.kill(judge._worker._process.pid, signal.SIGSTOP)
    (score,), _ = scored(judge, ["12"], deadline_s=0.3)
    assert score.reward is None
    assert "the deadline of the sample is reached; judge judge0 gave no answer in 0." in str(score.error)
    assert judge._worker._waiting == {}
    os.kill(judge._worker._process.pid, signal.SIGCONT)
    (score,), _ = scored(judge, ["12"])
    assert score.error is None


def test_a_directory_that_is_no_model_is_an_error_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"config\.json"):
        EngineJudge(tmp_path, JudgeOptions.of(options_of(tmp_path), "here"))


@pytest.mark.slow  # 4 s: a process that starts in vain
def test_what_keeps_the_process_from_loading_is_told(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"judge .*: .* has no weights: expected model.safetensors"):
        EngineJudge(tmp_path, JudgeOptions.of(options_of(tmp_path), "here"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": "m", "url": "http://a/v1"}, "options.url is for an endpoint"),
        ({"path": "m", "per_minute": 5.0}, "options.per_minute is for an endpoint"),
        ({"url": "http://a/v1", "model": "m", "dtype": "bfloat16"}, "options.dtype is for options.path"),
        ({"model": "m"}, "or options.path, a model directory"),
        ({"path": "m", "engine": "vllm"}, "engine 'vllm' is not one of auto, native, transformers"),
        ({"path": "m", "dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"path": "m", "cache_gib": 0}, "should be above 0"),
        ({"path": 3}, "should be a model directory"),
    ],
)
def test_options_that_do_nothing_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        JudgeOptions.of(options, "here")
    assert words in str(error.value)


def test_the_plan_counts_the_judge_beside_the_policy(directory: Path) -> None:
    part = json.dumps({"name": "judge", "options": options_of(directory, cache_gib=1.5)})
    tree = ["model.new.num_layers=1", "model.device=cpu", "data.train.task=sort_digits"]
    alone, beside = (
        plan_run(load(TrainConfig, None, [*tree, *more]).config, None) for more in ([], [f"reward.parts=[{part}]"])
    )
    assert alone.capacity is not None
    assert beside.capacity == alone.capacity - beside.judges
    assert 1.9 < beside.judges / 2**30 < 2.0  # the cache, and what a process takes; the weights are next to nothing
    assert beside.text.endswith("beside it judges: 1.95 GiB")


SCRIPT = """
import sys, time
from pathlib import Path
from burnish.distributed.judge_process import EngineJudge
from burnish.rewards.judge_options import JudgeOptions
judge = EngineJudge(Path(sys.argv[1]), JudgeOptions(path=sys.argv[1], device="cpu"))
print(judge._worker._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow  # 8 s: two processes that import torch
def test_the_process_ends_with_the_one_that_started_it_however_that_ends(directory: Path) -> None:
    started = subprocess.Popen([sys.executable, "-c", SCRIPT, str(directory)], stdout=subprocess.PIPE)
    assert started.stdout is not None
    worker = int(started.stdout.readline())
    assert worker in parent_pids()
    started.kill()
    started.wait()
    until = time.monotonic() + 20
    while worker in parent_pids() and time.monotonic() < until:
        time.sleep(0.05)
    assert worker not in parent_pids()


def test_a_run_is_rewarded_by_a_model_directory(directory: Path, tmp_path: Path) -> None:
    part = json.dumps({"name": "judge", "options": options_of(directory, cache=str(tmp_path / "kept"))})
    overrides = [f"reward.parts=[{part}, {{name: task, weight: 0}}]", "training.steps=2"]
    run = run_of(tmp_path / "one", TINY, overrides)
    rows = read_metrics(run / "metrics.jsonl")
    assert all(row["reward/mean"] == row["reward/part/judge"] for row in rows)
    assert any(row["reward/part/judge"] > 0 for row in rows)
    assert all(row["reward/failed"] == 0 for row in rows)
    assert "judge judge0: native decoder" in (run / "log.txt").read_text()


def test_scorers_are_built_for_judges_that_are_directories_alone(directory: Path) -> None:
    parts = [{"name": "judge", "options": {"url": "http://127.0.0.1:9/v1", "model": "m"}}, {"name": "number"}]
    assert build_scorers(Reward(parts=parts), Tokenizer.from_characters("0"), None) == {}
