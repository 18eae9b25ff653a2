"""The trainer with sources that sample ahead or asynchronously: the same loop, older rollouts, exact resuming."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from burnish.core.batch import Batch
from burnish.rollout.ahead_source import AheadSource
from burnish.rollout.async_source import AsyncSource
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.sync_source import RolloutJournal
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.run.run import Run
from burnish.trainers import rl
from tests.trainers.tiny import run_of

TOY = """
model: {new: {hidden_size: 16, num_layers: 1, num_heads: 2, mlp_size: 24, max_positions: 32}, dtype: float64, device: cpu}
data: {train: {task: sort_digits, limit: 40, options: {min_digits: 2, max_digits: 3}}, validation: {task: sort_digits}, max_prompt_tokens: 8}
reward: {workers: 1, parts: [{name: format, options: {pattern: '[0-9]{1,3}'}}, {name: task, weight: 0.5}]}
rollout: {prompts: 4, n: 4, max_tokens: 6}
training: {steps: 6, mini_batches: 2, optimizer: {lr: 1.0e-2}}
algorithm: {kl: {loss: {coef: 0}, reference: none}, correction: decoupled_token_is}
validation: {every: 3, limit: 4}
run: {samples_every: 100, save_every: 2, threads: 1, save: wait}
"""
STEPS = 6
ASYNC = "rollout.source={name: async, max_staleness: %d}"


def numbers(folder: Path) -> list[dict[str, Any]]:
    skipped = (*MACHINE_PREFIXES, "staleness/")
    return [
        {k: v for k, v in row.items() if not k.startswith(skipped)} for row in read_metrics(folder / "metrics.jsonl")
    ]


def weights(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / f"step-{STEPS:06d}"
    return {n: t.tobytes() for f in ("model", "optimizer") for n, t in load_file(last / f"{f}.safetensors").items()}


def live(folder: Path, event: str) -> list[str]:
    """The ids of all records of a kind that count."""
    events = [json.loads(line) for line in (folder / "journal" / "events.jsonl").read_text().splitlines()]
    resumed = [(i, e["step"]) for i, e in enumerate(events) if e["event"] == "resumed"]
    return [
        name
        for i, e in enumerate(events)
        if e["event"] == event and not any(i < k and e["step"] > step for k, step in resumed)
        for name in e["ids"]
    ]


def check_ledger(folder: Path) -> None:
    """Every sample of every prompt that was drawn was used, once."""
    used, drawn = live(folder, "used"), live(folder, "drawn")
    assert sorted(used) == sorted(f"{group}.{sample}" for group in drawn for sample in range(4))
    assert len(drawn) == len(set(drawn)) == STEPS * 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Finished runs by their overrides."""
    made: dict[tuple[str, ...], Path] = {}

    def get(*overrides: str) -> Path:
        if overrides not in made:
            made[overrides] = run_of(tmp_path_factory.mktemp("runs") / "run", TOY, list(overrides))
        return made[overrides]

    return get


def test_asynchronous_without_staleness_is_synchronous(runs: Callable[..., Path]) -> None:
    assert numbers(runs(ASYNC % 0)) == numbers(runs())
    assert weights(runs(ASYNC % 0)) == weights(runs())
    check_ledger(runs(ASYNC % 0))


def test_one_step_ahead_is_another_run_and_always_the_same(runs: Callable[..., Path], tmp_path: Path) -> None:
    first, again = runs("rollout.source=ahead"), run_of(tmp_path / "run", TOY, ["rollout.source=ahead"])
    assert numbers(first) == numbers(again) != numbers(runs())
    assert weights(first) == weights(again) != weights(runs())
    rows = read_metrics(first / "metrics.jsonl")[1:]
    assert [row["staleness/max"] for row in rows] == [0.0, *[1.0] * (STEPS - 1)]
    check_ledger(first)


class Killed(BaseException):
    """The end of a life; nothing catches it."""


MOMENTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "learning, the next batch on its way": (rl, "learn", lambda context, step, batch: step == 2),
    "new weights": (AheadSource, "load", lambda source, version: version == 3),
    "new weights, asynchronous": (AsyncSource, "load", lambda source, version: version == 3),
    "samples stopped": (
        InFlightTrajectories,
        "pause_all",
        lambda in_flight: in_flight.runner.engine.engine.version == 3,
    ),
    "a step done, not committed": (Run, "commit", lambda run, step, *rest: step == 4),
    "a batch complete, not written": (RolloutJournal, "write_round", lambda rounds, key, found: key.step == STEPS),
    "between two checkpoints": (Run, "commit", lambda run, step, *rest: step == 5),
    "the last step": (rl, "after_step", lambda context, step, *rest: step == STEPS),
}


def dies(folder: Path, moment: str, *overrides: str) -> bool:
    owner, method, fits = MOMENTS[moment]
    function = getattr(owner, method)

    def call(*args: Any, **options: Any) -> Any:
        if fits(*args, **options):
            raise Killed
        return function(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, method, call)
        try:
            run_of(folder, TOY, list(overrides))
        except Killed:
            return True
    return False


def test_a_run_ahead_that_dies_again_and_again_ends_as_one_that_never_did(
    runs: Callable[..., Path], tmp_path: Path
) -> None:
    for moment in MOMENTS:
        if moment not in ("new weights, asynchronous", "samples stopped"):
            assert dies(tmp_path / "run", moment, "rollout.source=ahead"), moment
    found = run_of(tmp_path / "run", TOY, ["rollout.source=ahead"])
    assert numbers(found) == numbers(runs("rollout.source=ahead"))
    assert weights(found) == weights(runs("rollout.source=ahead"))
    check_ledger(found)


def test_an_asynchronous_run_that_dies_again_and_again_loses_nothing(tmp_path: Path) -> None:
    for moment in MOMENTS:
        if moment != "new weights":
            assert dies(tmp_path / "run", moment, ASYNC % 2), moment
    found = run_of(tmp_path / "run", TOY, [ASYNC % 2])
    check_ledger(found)
    rows = read_metrics(found / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert max(row["staleness/max"] for row in rows[1:]) <= 2


def test_the_learner_learns_while_the_engine_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Learning waits for the next batch, which a run that takes turns would not begin before it has learnt."""
    sampled = [threading.Event() for _ in range(STEPS + 2)]
    make, learn = AheadSource._generate, rl.learn

    def making(source: Any, *args: Any) -> Any:
        made = make(source, *args)
        sampled[int(threading.current_thread().name.rpartition(" ")[2])].set()
        return made

    def learning(job: Any, step: int, batch: Batch) -> Any:
        assert step == STEPS or sampled[step + 1].wait(600)
        return learn(job, step, batch)

    monkeypatch.setattr(AheadSource, "_generate", making)
    monkeypatch.setattr(rl, "learn", learning)
    run_of(tmp_path / "run", TOY, ["rollout.source=ahead"])
    assert all(event.is_set() for event in sampled[2 : STEPS + 1])


def test_the_correction_sees_the_age_of_tokens(runs: Callable[..., Path]) -> None:
    rows, now = (read_metrics(folder / "metrics.jsonl")[2:] for folder in (runs("rollout.source=ahead"), runs()))
    assert all(row["mismatch/lag_mean"] == 1 for row in rows)
    assert all(
        row["mismatch/mean"] > 1e-4 > 1e-6 > other["mismatch/mean"] for row, other in zip(rows, now, strict=True)
    )
    assert all(abs(row["rollout_corr/rollout_is_max"] - 1) > 1e-3 for row in rows)
    without = runs("rollout.source=ahead", "algorithm.correction=none")
    assert weights(without) != weights(runs("rollout.source=ahead"))


@pytest.mark.parametrize("source", ["rollout.source=ahead", ASYNC % 1])
def test_refills_stages_and_greedy_answers_go_through_every_source(source: str, tmp_path: Path) -> None:
    more = [
        "algorithm=remax",
        "algorithm.kl={loss: {coef: 0}, reward: {coef: 0}, reference: none}",
        "algorithm.filters=[{name: difficulty_band, low: 0.01, high: 0.99}]",
        "algorithm.refill={rounds: 2}",
        "algorithm.curriculum={name: prioritised, warmup_steps: 1}",
        "rollout.stages=[{start: 3, n: 6, prompts: 3}]",
        "training.steps=4",
        "training.mini_batches=1",
    ]
    folder = run_of(tmp_path / "run", TOY, [source, *more])
    rows = read_metrics(folder / "metrics.jsonl")[1:]
    assert all("reward/greedy" in row for row in rows)
    assert '"round":1' in (folder / "journal" / "events.jsonl").read_text()
    used = live(folder, "used")
    assert len(used) == len(set(used))
