"""The asynchronous source: no group is lost, used twice or too old, with slow engines and kills at any moment."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.data import Data, Source
from burnish.config.environment import Environment
from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold, sample_key
from burnish.data.prompt_stream import PromptStream
from burnish.environments.registry import environment_factory
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rollout.async_source import AsyncSource
from burnish.rollout.runner import RolloutRunner, RolloutStopped
from burnish.rollout.scoring import GREEDY_SAMPLE, RolloutBatch
from burnish.rollout.sync_source import RolloutPlan, SyncSource
from burnish.run.journal import Journal
from tests.inference.slow_engine import SlowEngine, length_of, token_of

TOKENIZER = Tokenizer.from_characters("0123456789>")
SOURCES = [Source(task="sort_digits", options={"min_digits": 2, "max_digits": 3})]
PLAN = RolloutPlan(prompts=3, n=2, sampling=SamplingOptions(max_tokens=12, stop_tokens=(1,)))
STEPS, SEED = 6, 3


class Judge:
    """Stands where the rewards stand: scores come after so many looks for them; those of `held` ids do not."""

    def __init__(self, looks: int = 0) -> None:
        self.looks, self.asked = looks, list[tuple[int, ScoreRequest]]()
        self.num_looks, self.held = 0, ""

    @property
    def pending(self) -> int:
        return len(self.asked)

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self.asked += [(self.num_looks + self.looks, request) for request in requests]

    def poll(self, timeout_s: float | None) -> list[Score]:
        self.num_looks += 1
        free = [(due, request) for due, request in self.asked if not self.held or self.held not in request.id]
        done = [request for due, request in free if timeout_s is None or due < self.num_looks]
        self.asked = [(due, request) for due, request in self.asked if request not in done]
        return [Score(request.id, len(request.completion) / 10, 1.0, {}) for request in done]


class Life:
    """One life of a run: the source, and the checkpoint it may go on from."""

    def __init__(
        self,
        folder: Path,
        engine: SlowEngine,
        max_staleness: int = 1,
        deadline_s: float = 20.0,
        looks: int = 0,
        plan: RolloutPlan = PLAN,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine, self.plan, self.notes = engine, plan, list[str]()
        factory = environment_factory(Environment(), TOKENIZER)
        runner = RolloutRunner(cast(Any, engine), factory, TOKENIZER, SEED)
        self.stream = PromptStream(SOURCES, TOKENIZER, Data(train=SOURCES), SEED)
        self.journal = Journal(folder / "journal")
        self.source = AsyncSource(
            self.stream, runner, cast(Rewards, Judge(looks)), self.journal, self.plans, max_staleness, deadline_s, self.notes.append, clock
        )  # fmt: skip

    def plans(self, step: int) -> RolloutPlan | None:
        return self.plan if step <= STEPS else None

    def step(self, number: int, learning: Callable[[], None] = lambda: None) -> RolloutBatch:
        scored = self.source.next(number, self.plan, lambda text: None)
        self.source.start_next(number + 1)
        learning()
        self.source.load(number)
        self.journal.append("used", step=number, ids=[t.id for t in scored.trajectories])
        return scored

    def saved(self) -> str:
        return json.dumps([self.stream.state(), self.source.pending_draws()])

    def restored(self, step: int, saved: str) -> None:
        state, tickets = json.loads(saved)
        self.journal.rewind(step)
        self.stream.restore(state)
        self.engine.load(step, ())
        self.source.restore(tickets, step)


@pytest.fixture
def close() -> Iterator[list[Life]]:
    lives: list[Life] = []
    yield lives
    for life in lives:
        life.source.close()


def check_whole(scored: RolloutBatch, step: int, max_staleness: int, n: int = 2) -> None:
    """Complete groups, no token too old, and each sample equal to one that was never paused."""
    assert [t.id for t in scored.trajectories] == [f"{d.prompt.row.id}#{d.visit}.{k}" for d in scored.draws for k in range(n)]  # fmt: skip
    for t in scored.trajectories:
        (sequence,) = t.sequences
        written = sequence.tokens[sequence.action_mask].tolist()
        key = sample_key(SEED, "train", t.prompt_id, t.visit, t.sample)
        assert written == [token_of(key, k) for k in range(length_of(key, PLAN.sampling.max_tokens))]
        versions = sequence.version[sequence.action_mask]
        age = step - 1 - versions
        assert age.min() >= 0
        assert age.max() <= max_staleness
        assert (np.diff(versions) >= 0).all()
        np.testing.assert_array_equal(
            sequence.behaviour_logp[sequence.action_mask], -1.0 - versions
        )  # its own version's
        assert t.reward == len(t.completion) / 10


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


def check_ledger(folder: Path, life: Life) -> None:
    """Every group drawn is in line, or every sample of it was used exactly once."""
    used, drawn = live(folder, "used"), live(folder, "drawn")
    assert len(set(used)) == len(used)
    assert len(set(drawn)) == len(drawn)
    groups = {name.rpartition(".")[0] for name in used}
    assert len(used) == 2 * len(groups)
    assert groups | set(life.source.groups) == set(drawn)
    assert not groups & set(life.source.groups)


@settings(max_examples=15, deadline=None)
@given(
    max_staleness=st.integers(0, 3),
    speed=st.integers(0, 4),
    looks=st.integers(0, 3),
    stuck=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_nothing_is_lost_used_twice_or_too_old_whoever_is_slow(
    tmp_path_factory: pytest.TempPathFactory, max_staleness: int, speed: int, looks: int, stuck: int, seed: int
) -> None:
    folder, moves = tmp_path_factory.mktemp("async"), set[str]()

    def hangs(request: Request) -> bool:
        """Some requests draw nothing the first few times that they are looked at after an issue, or never until the next."""
        return fold(seed, request.id) % 8 < stuck and request.id not in moves

    engine = SlowEngine(0.0005 * speed, hangs)
    life = Life(folder, engine, max_staleness, deadline_s=0.03 if stuck else 600.0, looks=looks)
    handed = 0
    try:
        for step in range(1, STEPS + 1):
            try:
                scored = life.step(step, lambda: time.sleep(0.001 * (seed % 3)))
            except UserError:
                assert stuck  # all that the engine was asked hung, twice
                return
            check_whole(scored, step, max_staleness)
            handed += len(scored.draws)
            moves |= set(engine.issued) if step % 2 else set()
        assert handed + len(life.source.groups) == len(live(folder, "drawn")) <= (STEPS + max_staleness) * PLAN.prompts
        check_ledger(folder, life)
        if not stuck:
            assert life.notes == []
            assert handed == STEPS * PLAN.prompts
    finally:
        life.source.close()


def test_a_sample_goes_on_under_new_weights_with_a_version_for_each_token(tmp_path: Path, close: list[Life]) -> None:
    first = tuple(f"/train/{k}#" for k in range(PLAN.prompts))

    def waits(request: Request) -> bool:
        """With the first weights, samples of the second step's groups get two tokens."""
        others = engine.version == 0 and not any(name in request.id for name in first)
        return others and len(engine.rows[request.id][1]) >= 2

    engine = SlowEngine(stuck=waits)
    life = Life(tmp_path, engine, max_staleness=1)
    close.append(life)

    def learning() -> None:
        while not all(waits(request) for request, *_ in list(engine.rows.values())):
            time.sleep(0.001)

    check_whole(life.step(1, learning), 1, 1)
    scored = life.step(2)
    check_whole(scored, 2, 1)
    for t in scored.trajectories:
        versions = t.sequences[0].version[t.sequences[0].action_mask].tolist()
        assert versions == [0, 0] + [1] * (len(versions) - 2)
    mixed = sum(t.num_actions > 2 for t in scored.trajectories)
    tokens = scored.num_tokens
    found = life.source.metrics(scored, 1)
    assert found["staleness/max"] == 1
    assert found["staleness/mixed"] == mixed / len(scored.trajectories) > 0
    assert found["staleness/share/1"] == found["staleness/mean"] == 2 * len(scored.trajectories) / tokens
    assert found["staleness/share/0"] == pytest.approx(1 - found["staleness/mean"])
    assert engine.users == {"rollouts"}


def test_with_no_staleness_it_gives_what_the_synchronous_source_gives(tmp_path: Path, close: list[Life]) -> None:
    plan = replace(PLAN, greedy=True)
    life = Life(tmp_path / "async", SlowEngine(), max_staleness=0, plan=plan)
    close.append(life)
    other = Life(tmp_path / "sync", SlowEngine())
    sync = SyncSource(other.stream, other.source.runner, cast(Rewards, Judge()), other.journal)
    told = [list[str](), list[str]()]
    for source, names in zip((life.source, sync), told, strict=True):
        source.on_scored = lambda t, draw, names=names: names.append(t.id)
    for step in range(1, 4):
        found, expected = life.step(step), sync.next(step, plan, lambda text: None)
        sync.load(step)
        for ours, theirs in ((found.trajectories, expected.trajectories), (found.greedy, expected.greedy)):
            assert [(t.id, t.completion, t.reward, t.metadata) for t in ours] == [
                (t.id, t.completion, t.reward, t.metadata) for t in theirs
            ]
            for a, b in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(a.sequences[0].tokens, b.sequences[0].tokens)
                np.testing.assert_array_equal(a.sequences[0].version, b.sequences[0].version)
    assert {t.sample for t in found.greedy} == {GREEDY_SAMPLE}
    assert len(set(told[0])) == len(told[0])
    assert set(told[0]) >= set(told[1]), "each is told when it has its score; the asynchronous one is ahead"
    kinds = [[e["event"] for e in one.events] for one in (life.journal, other.journal)]
    assert [kind for kind in kinds[0] if kind != "used"] == kinds[1]


def test_a_straggler_costs_a_step_its_deadline_and_comes_later(tmp_path: Path, close: list[Life]) -> None:
    held = {"is": True}
    engine = SlowEngine(stuck=lambda request: held["is"] and "/train/1#0.0" in request.id)
    life = Life(tmp_path, engine, max_staleness=1, deadline_s=10, clock=engine.clock)
    close.append(life)
    first = life.step(1)
    assert life.notes == [], "there were enough others"
    assert [d.prompt.row.id for d in first.draws] == [f"sort_digits/train/{k}" for k in (0, 2, 3)]
    second = life.step(2)  # the last one that the straggler's group can be in with the tokens it has
    assert "sort_digits/train/1" not in {d.prompt.row.id for d in second.draws}
    assert "continue and are used later" in life.notes[0]
    assert "1 of them start over" in life.notes[0]
    held["is"] = False
    later = [life.step(step) for step in (3, 4)]  # the groups of the third may be complete before the straggler moves
    assert "sort_digits/train/1" in {d.prompt.row.id for scored in later for d in scored.draws}
    for step, scored in enumerate((first, second, *later), 1):
        check_whole(scored, step, 1)
    check_ledger(tmp_path, life)


def test_where_nothing_is_complete_requests_are_issued_again_and_then_the_run_stops(
    tmp_path: Path, close: list[Life]
) -> None:
    engine = SlowEngine(stuck=lambda request: engine.issued.count(request.id) < 2)
    life = Life(tmp_path, engine, deadline_s=4, clock=engine.clock)
    close.append(life)
    check_whole(life.step(1), 1, 1)
    assert life.notes == ["step 1: not one group is complete after 4 s; all requests are issued again"]
    dead = Life(tmp_path / "dead", SlowEngine(stuck=lambda request: True), deadline_s=0.05)
    close.append(dead)
    with pytest.raises(UserError, match="not one group was complete in twice"):
        dead.step(1)


def test_an_error_of_the_engine_is_raised_to_the_trainer(tmp_path: Path, close: list[Life]) -> None:
    class Broken(SlowEngine):
        def stream(self) -> Iterator[Completion]:
            raise UserError("the engine is broken")

    life = Life(tmp_path, Broken())
    close.append(life)
    with pytest.raises(UserError, match="the engine is broken"):
        life.step(1)


@pytest.mark.parametrize("checkpoint", [0, 2, 3])
@pytest.mark.parametrize("killed", [3, 5])
def test_a_life_that_ends_anywhere_is_gone_on_with_and_repeats_what_was_written(
    tmp_path: Path, close: list[Life], checkpoint: int, killed: int
) -> None:
    engine = SlowEngine(0.001)
    first = Life(tmp_path, engine, max_staleness=2)
    close.append(first)
    saved, given = first.saved(), list[list[str]]()
    for step in range(1, killed + 1):
        given.append([t.id for t in first.step(step, lambda: time.sleep(0.003)).trajectories])
        saved = first.saved() if step == checkpoint else saved
    first.source.next(killed + 1, PLAN, lambda text: None)  # given, and never used
    first.source.close()
    again = Life(tmp_path, SlowEngine(0.0005), max_staleness=2)
    close.append(again)
    again.restored(checkpoint, saved)
    for step in range(checkpoint + 1, STEPS + 1):
        scored = again.step(step)
        check_whole(scored, step, 2)
        if step <= killed:
            assert [t.id for t in scored.trajectories] == given[step - 1]
    check_ledger(tmp_path, again)
    assert again.source.groups == {}
    assert len(live(tmp_path, "used")) == STEPS * PLAN.prompts * PLAN.n


def test_a_damaged_record_ends_the_repetition_and_loses_nothing(tmp_path: Path, close: list[Life]) -> None:
    first = Life(tmp_path, SlowEngine(0.001), max_staleness=2)
    close.append(first)
    saved = first.saved()
    for step in range(1, 5):
        first.step(step)
    first.source.close()
    (tmp_path / "journal" / "completed-000002.safetensors").write_bytes(b"?")
    for _ in range(2):  # the second time what the first has made anew is repeated, not what followed the damage before
        again = Life(tmp_path, SlowEngine(0.001), max_staleness=2)
        close.append(again)
        again.restored(0, saved)
        for step in range(1, 4):
            check_whole(again.step(step), step, 2)
        check_ledger(tmp_path, again)
        again.source.close()


def test_scores_on_their_way_are_all_there_after_a_rest(tmp_path: Path, close: list[Life]) -> None:
    life = Life(tmp_path, SlowEngine(), max_staleness=1, looks=3)
    close.append(life)
    judge = cast(Judge, life.source.rewards)
    judge.held = "/train/4#"
    life.step(1)
    while not judge.pending:  # the source has it
        life.source.thread.run()
        life.source.thread.stop()
    judge.held = ""
    life.source.pause()
    assert judge.pending == 0
    check_whole(life.step(2), 2, 1)


def test_a_stop_keeps_the_samples_that_have_ended(tmp_path: Path, close: list[Life]) -> None:
    first = Life(tmp_path, SlowEngine())
    close.append(first)
    first.step(1)
    saved = first.saved()
    first.source.thread.run()
    until = time.monotonic() + 600
    while not any(group.finished for group in first.source.groups.values()):
        assert time.monotonic() < until
        time.sleep(0.01)
    first.source.stop()
    with pytest.raises(RolloutStopped):
        first.source.next(2, PLAN, lambda text: None)
    assert first.journal.events[-1]["event"] == "partial"
    second = Life(tmp_path, SlowEngine())
    close.append(second)
    kept = {f"{group}.{sample}" for group, sample in second.source._resumed}
    assert kept
    second.restored(1, saved)
    issued: list[str] = []
    issue = second.source._add_sample
    second.source._add_sample = lambda group, sample: (issued.append(f"{group.id}.{sample}"), issue(group, sample))[1]  # type: ignore[func-returns-value,method-assign]
    check_whole(second.step(2), 2, 1)
    assert not kept & set(issued)
