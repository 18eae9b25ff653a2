"""The synchronous source and its journal: finished work is never repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from burnish.algorithms.curriculum.spec import LengthBudget, PrioritisedCurriculum
from burnish.config.data import Data, Reward, RewardPart, Source
from burnish.config.environment import Environment
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory, pack
from burnish.data.prompt_stream import PromptStream
from burnish.environments.registry import environment_factory
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner, RolloutStopped
from burnish.rollout.scoring import GREEDY_SAMPLE
from burnish.rollout.sync_source import RolloutPlan, SyncSource
from burnish.rollout.validation import held_out_rollouts, validation_metrics
from burnish.run.journal import Journal

SAMPLING = SamplingOptions(max_tokens=6, stop_tokens=(1,))
PLAN = RolloutPlan(prompts=4, n=3, sampling=SAMPLING)
GREEDY_PLAN = replace(PLAN, greedy=True)
SOURCES = [Source(task="sort_digits", options={"min_digits": 2, "max_digits": 3})]
OWN_REWARD = '''
from burnish.environments.base import Done, Turn


class Half:
    """Rewards every second prompt itself and leaves the others to the configured reward."""

    def __init__(self, prompt, tokenizer):
        self.prompt = prompt

    def start(self):
        return Turn(tuple(self.prompt.tokens))

    def observe(self, completion, text):
        return Done(0.125 if len(self.prompt.tokens) == 3 else None)
'''


def quiet(message: str) -> None:
    """Discards progress."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters("0123456789>")


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


@pytest.fixture(scope="module")
def rewards() -> Iterator[Rewards]:
    with Rewards(Reward(parts=[RewardPart(name="task")], workers=1)) as pool:
        yield pool


@pytest.fixture
def life(model: Decoder, tokenizer: Tokenizer, rewards: Rewards, tmp_path: Path) -> Any:
    """`life()`: everything a process that resumes this run builds anew, over the same journal."""

    def start(environment: Environment = Environment()) -> SyncSource:  # noqa: B008 (a frozen record)
        engine = DenseEngine(model, max_rows=5)
        runner = RolloutRunner(engine, environment_factory(environment, tokenizer, tmp_path), tokenizer, seed=3)
        stream = PromptStream(SOURCES, tokenizer, Data(train=SOURCES), seed=3)
        return SyncSource(stream, runner, rewards, Journal(tmp_path / "journal"))

    return start


def drawn_tokens(source: SyncSource) -> int:
    engine = source.runner.engine
    assert isinstance(engine, DenseEngine)
    return engine.stats.tokens


def same(left: list[Trajectory], right: list[Trajectory]) -> None:
    assert [t.id for t in left] == [t.id for t in right]
    for a, b in zip(left, right, strict=True):
        assert (a.finish, a.completion, a.reward, a.accuracy, a.parts, a.error, a.metadata) == (
            b.finish, b.completion, b.reward, b.accuracy, b.parts, b.error, b.metadata,
        )  # fmt: skip
        for name in ("tokens", "action_mask", "behaviour_logp", "version"):
            np.testing.assert_array_equal(getattr(a.sequences[0], name), getattr(b.sequences[0], name))


def test_a_step_is_scored_and_in_the_order_of_its_draws(life: Any) -> None:
    said: list[str] = []
    source = life()
    scored = source.next(1, PLAN, said.append)
    assert [t.id for t in scored.trajectories] == [
        f"{d.prompt.row.id}#{d.visit}.{k}" for d in scored.draws for k in range(3)
    ]
    answers = {d.prompt.row.id: d.prompt.row.answer for d in scored.draws}
    for trajectory in scored.trajectories:
        right = float(trajectory.completion.strip() == answers[trajectory.prompt_id])
        assert trajectory.reward == trajectory.accuracy == trajectory.parts["task"] == right
    assert scored.failed == []
    assert scored.num_tokens == drawn_tokens(source)
    assert "rollout 12/12" in said
    assert [e["event"] for e in source.journal.events] == ["drawn", "completed", "scored"]


def test_each_sample_is_told_once_when_it_has_its_score(life: Any) -> None:
    source, told = life(), list[tuple[str, float | None, str, int]]()
    source.on_scored = lambda t, draw: told.append((t.id, t.reward, draw.prompt.row.id, draw.step))
    scored = source.next(1, PLAN, quiet)
    assert sorted(told) == sorted((t.id, t.reward, t.prompt_id, 1) for t in scored.trajectories)


def test_a_second_life_takes_finished_steps_from_the_journal(life: Any) -> None:
    first = life()
    expected = [first.next(step, PLAN, quiet).trajectories for step in (1, 2)]
    second = life()
    for step in (1, 2):
        same(second.next(step, PLAN, quiet).trajectories, expected[step - 1])
    assert drawn_tokens(second) == 0
    assert second.rewards.pending == 0
    third_step = second.next(3, PLAN, quiet)
    assert drawn_tokens(second) == third_step.num_tokens > 0
    same(first.next(3, PLAN, quiet).trajectories, third_step.trajectories)


@pytest.mark.parametrize("lost", ["completed", "scored"])
def test_a_lost_attachment_is_made_again_and_is_equal(life: Any, tmp_path: Path, lost: str) -> None:
    expected = life().next(1, PLAN, quiet)
    (tmp_path / "journal" / f"{lost}-000001.safetensors").unlink()
    second = life()
    same(second.next(1, PLAN, quiet).trajectories, expected.trajectories)
    assert drawn_tokens(second) == (expected.num_tokens if lost == "completed" else 0)
    assert second.rewards.pending == 0  # a score that is left over would belong to no sample of the next step


@pytest.mark.parametrize("lost", ["completed", "scored"])
def test_a_damaged_attachment_counts_as_lost(life: Any, tmp_path: Path, lost: str) -> None:
    expected = life().next(1, PLAN, quiet)
    file = tmp_path / "journal" / f"{lost}-000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    same(life().next(1, PLAN, quiet).trajectories, expected.trajectories)


def test_a_journal_of_other_prompts_is_not_taken(life: Any) -> None:
    first = life()
    first.next(1, PLAN, quiet)
    second = life()
    second.stream.draw(1)  # the stream stands elsewhere, so that the same step has other prompts
    scored = second.next(1, PLAN, quiet)
    assert drawn_tokens(second) == scored.num_tokens > 0


@pytest.mark.parametrize("lost", [None, "scored"])
def test_rewards_of_the_environment_survive_and_are_not_scored_again(
    life: Any, tmp_path: Path, lost: str | None
) -> None:
    (tmp_path / "half.py").write_text(OWN_REWARD)
    environment = Environment(name="half.py:Half")
    expected = life(environment).next(1, PLAN, quiet).trajectories
    own = [t for t in expected if t.parts == {"environment": 0.125}]
    assert 0 < len(own) < len(expected)
    assert all(t.reward == 0.125 for t in own)
    if lost:
        (tmp_path / "journal" / f"{lost}-000001.safetensors").unlink()
    same(life(environment).next(1, PLAN, quiet).trajectories, expected)


ROUNDS = (
    PLAN,
    replace(PLAN, prompts=2),
    replace(PLAN, prompts=1, n=2, sampling=replace(SAMPLING, max_tokens=3), greedy=True),
)


def three_rounds(source: SyncSource, step: int = 1) -> list[Any]:
    return [source.next(step, plan, quiet, k) for k, plan in enumerate(ROUNDS)]


def test_rounds_of_a_step_draw_new_prompts_by_their_own_plans_and_add_up(life: Any, tmp_path: Path) -> None:
    source = life()
    rounds = three_rounds(source)
    assert [len(r.trajectories) for r in rounds] == [12, 6, 2]
    assert max(t.num_actions for t in rounds[2].trajectories) <= 3 < max(t.num_actions for t in rounds[0].trajectories)
    whole = rounds[0].joined(rounds[1]).joined(rounds[2])
    assert len({t.id for t in whole.trajectories}) == len(whole.trajectories) == 20
    assert [d.prompt.row.id for d in whole.draws] == [f"sort_digits/train/{k}" for k in range(7)]
    assert whole.greedy == rounds[2].greedy != []
    assert whole.num_tokens == drawn_tokens(source)
    assert whole.rollout_s == sum(r.rollout_s for r in rounds)
    assert whole.reward_s == sum(r.reward_s for r in rounds)
    files = {file.stem for file in (tmp_path / "journal").glob("*.safetensors")}
    assert files == {f"{event}-000001{end}" for event in ("completed", "scored") for end in ("", "-r1", "-r2")}


@pytest.mark.parametrize("kept", range(10))
def test_a_step_cut_in_any_round_is_replayed_exactly(life: Any, tmp_path: Path, kept: int) -> None:
    first = life()
    expected = three_rounds(first)
    events = tmp_path / "journal" / "events.jsonl"
    lines = events.read_bytes().splitlines(keepends=True)
    assert len(lines) == 9
    events.write_bytes(b"".join(lines[:kept]))
    second = life()
    again = three_rounds(second)
    for one, other in zip(expected, again, strict=True):
        same(one.trajectories, other.trajectories)
        same(one.greedy, other.greedy)
    completed = (kept + 1) // 3  # rounds whose generation was still in the journal
    assert drawn_tokens(second) == sum(r.num_tokens for r in expected[completed:])
    same(first.next(2, PLAN, quiet).trajectories, second.next(2, PLAN, quiet).trajectories)


class Judge:
    """Stands where the rewards stand: a function scores in this process."""

    def __init__(self, score: Callable[[ScoreRequest], Score]) -> None:
        self.score, self.done = score, list[Score]()

    @property
    def pending(self) -> int:
        return len(self.done)

    def submit(self, requests: Sequence[ScoreRequest]) -> None:
        self.done += [self.score(request) for request in requests]

    def poll(self, timeout_s: float | None) -> list[Score]:
        done, self.done = self.done, []
        return done


def by_length(request: ScoreRequest) -> Score:
    """One in a hundred of the length of the text, so that answers differ; wrong for the prompt numbered 2's greedy one."""
    if request.id == f"sort_digits/train/2#0.{GREEDY_SAMPLE}":
        return Score(request.id, None, None, {}, False, "the judge is ill")
    return Score(request.id, len(request.completion) / 100, 1.0, {"judge": 1.0})


@pytest.fixture
def greedy_life(life: Any) -> Any:
    def start() -> SyncSource:
        source: SyncSource = life()
        source.rewards = cast(Rewards, Judge(by_length))
        return source

    return start


def test_failed_scores_are_computed_again_and_what_followed_from_them_is_made_again(life: Any) -> None:
    asked: list[str] = []

    def start(is_mended: bool) -> SyncSource:
        def score(request: ScoreRequest) -> Score:
            asked.append(request.id)
            if "/1#" in request.id and not is_mended:
                return Score(request.id, None, None, {}, False, "not mended yet")
            return Score(request.id, len(request.completion) / 100, 1.0, {"judge": 1.0})

        source: SyncSource = life()
        source.rewards = cast(Rewards, Judge(score))
        return source

    broken = start(is_mended=False)
    first, _ = (broken.next(step, PLAN, quiet) for step in (1, 2))
    assert [t.id for t in first.failed] == [f"sort_digits/train/1#0.{k}" for k in range(3)]
    asked.clear()
    mended = start(is_mended=True)
    again = mended.next(1, PLAN, quiet)
    assert asked == [t.id for t in first.failed]
    assert again.failed == []
    assert [t.completion for t in again.trajectories] == [t.completion for t in first.trajectories]
    assert drawn_tokens(mended) == 0
    kept = [t for t in first.trajectories if t.reward is not None]
    same([t for t in again.trajectories if t.id in {k.id for k in kept}], kept)
    third = start(is_mended=True)  # killed before it came further
    same(third.next(1, PLAN, quiet).trajectories, again.trajectories)
    for source in (mended, third):  # the policy of step 2 had not learnt from them
        assert source.next(2, PLAN, quiet).num_tokens == drawn_tokens(source) > 0


@pytest.mark.parametrize("greedy", [False, True])
def test_a_stop_keeps_what_has_ended_and_the_next_life_makes_only_the_rest(life: Any, greedy: bool) -> None:
    plan = GREEDY_PLAN if greedy else PLAN
    whole = life()
    expected = whole.next(1, plan, quiet)
    (whole.journal.folder / "events.jsonl").unlink()
    first = life()

    def stop_at(text: str) -> None:
        if text == "rollout 4/12":
            first.stop()

    with pytest.raises(RolloutStopped):
        first.next(1, plan, stop_at)
    assert [e["event"] for e in first.journal.events] == ["drawn", "partial"]
    second = life()
    again = second.next(1, plan, quiet)
    same(again.trajectories, expected.trajectories)
    same(again.greedy, expected.greedy)
    assert drawn_tokens(second) < expected.num_tokens


def test_a_stop_while_scores_are_awaited_keeps_those_that_are_there(life: Any) -> None:
    first = life()
    asked: list[str] = []

    class Slow(Judge):
        def poll(self, timeout_s: float | None) -> list[Score]:
            done, self.done = self.done[:5], self.done[5:]
            first.stop()
            return done

    def score(request: ScoreRequest) -> Score:
        asked.append(request.id)
        return by_length(request)

    first.rewards = cast(Rewards, Slow(score))
    with pytest.raises(RolloutStopped):
        first.next(1, PLAN, quiet)
    scored, asked[:] = asked[:10], []  # five of the wait, and five of the last look
    second = life()
    second.rewards = cast(Rewards, Judge(score))
    assert len(second.next(1, PLAN, quiet).usable) == 12
    assert len(asked) == 2
    assert not set(asked) & set(scored)
    assert drawn_tokens(second) == 0


def test_a_request_to_stop_cuts_no_measurement_short(life: Any, rewards: Rewards) -> None:
    source = life()
    expected = held_out_rollouts(source.runner, rewards, [d.prompt for d in source.stream.draw(3)], 2, SAMPLING, quiet)
    other = life()
    other.stop()
    other.runner.engine.interrupt()  # as one that came in the last moment of the step's sampling
    same(held_out_rollouts(other.runner, rewards, [d.prompt for d in other.stream.draw(3)], 2, SAMPLING, quiet).trajectories, expected.trajectories)  # fmt: skip


def test_the_reward_of_the_greedy_answer_reaches_all_samples_of_its_prompt(greedy_life: Any, life: Any) -> None:
    source = greedy_life()
    scored = source.next(1, GREEDY_PLAN, quiet)
    assert [(t.prompt_id, t.sample) for t in scored.greedy] == [(d.prompt.row.id, GREEDY_SAMPLE) for d in scored.draws]
    assert scored.num_tokens == drawn_tokens(source) > sum(t.num_actions for t in scored.trajectories)
    most_likely = list(source.runner.run(scored.draws, 1, replace(SAMPLING, temperature=0.0), "baseline"))
    assert {t.prompt_id: t.completion for t in most_likely} == {t.prompt_id: t.completion for t in scored.greedy}
    rewards = {t.prompt_id: len(t.completion) / 100 for t in scored.greedy}
    usable = scored.usable
    assert len(usable) == 9
    assert [t.metadata["greedy_reward"] for t in usable] == [rewards[t.prompt_id] for t in usable]
    assert pack(usable).sequence["greedy_reward"].tolist() == [rewards[t.prompt_id] for t in usable]
    assert any(t.reward != t.metadata["greedy_reward"] for t in usable)
    assert [t.id for t in scored.trajectories] == [f"{d.prompt.row.id}#0.{k}" for d in scored.draws for k in range(3)]


def test_greedy_answers_leave_the_samples_as_they_are(greedy_life: Any, life: Any, tmp_path: Path) -> None:
    with_greedy = greedy_life().next(1, GREEDY_PLAN, quiet)
    (tmp_path / "journal" / "events.jsonl").unlink()
    for a, b in zip(with_greedy.trajectories, life().next(1, PLAN, quiet).trajectories, strict=True):
        assert a.completion == b.completion


def test_samples_whose_greedy_answer_failed_count_as_failed_and_say_so(greedy_life: Any) -> None:
    scored = greedy_life().next(1, GREEDY_PLAN, quiet)
    assert [t.prompt_id for t in scored.greedy if t.reward is None] == ["sort_digits/train/2"]
    assert [t.id for t in scored.failed] == [f"sort_digits/train/2#0.{k}" for k in range(3)]
    for t in scored.failed:
        assert t.error == "the greedy answer to its prompt could not be scored: the judge is ill"
        assert t.accuracy is None
        assert "greedy_reward" not in t.metadata


@pytest.mark.parametrize("lost", [None, "completed", "scored"])
def test_greedy_answers_and_their_rewards_survive_in_the_journal(
    greedy_life: Any, tmp_path: Path, lost: str | None
) -> None:
    expected = greedy_life().next(1, GREEDY_PLAN, quiet)
    if lost:
        (tmp_path / "journal" / f"{lost}-000001.safetensors").unlink()
    second = greedy_life()
    again = second.next(1, GREEDY_PLAN, quiet)
    same(again.trajectories, expected.trajectories)
    same(again.greedy, expected.greedy)
    assert drawn_tokens(second) == (expected.num_tokens if lost == "completed" else 0)


def test_a_curriculum_goes_on_from_a_checkpoint_and_the_journal_as_if_unbroken(
    model: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    sources = [Source(task="sort_digits", limit=6, options={"min_digits": 2, "max_digits": 3})]

    def start() -> SyncSource:
        runner = RolloutRunner(DenseEngine(model), environment_factory(Environment(), tokenizer), tokenizer, seed=3)
        stream = PromptStream(
            sources, tokenizer, Data(train=sources), seed=3, curriculum=PrioritisedCurriculum(warmup_steps=1)
        )
        right = {f"sort_digits/train/{k}" for k in range(3)}
        judge = Judge(lambda r: Score(r.id, 1.0, float(r.id.partition("#")[0] in right), {}))
        return SyncSource(stream, runner, cast(Rewards, judge), Journal(tmp_path / "journal"))

    def step(source: SyncSource, number: int) -> list[Trajectory]:
        scored = source.next(number, replace(PLAN, n=1), quiet)
        source.stream.observe(scored.trajectories)
        return scored.trajectories

    unbroken = start()
    step(unbroken, 1)
    step(unbroken, 2)
    saved = json.loads(json.dumps(unbroken.stream.state()))
    expected = [step(unbroken, number) for number in (3, 4, 5)]
    resumed = start()
    resumed.stream.restore(saved)
    for number, trajectories in zip((3, 4, 5), expected, strict=True):
        same(step(resumed, number), trajectories)
    assert drawn_tokens(resumed) == 0
    assert resumed.stream.state() == unbroken.stream.state()
    warm_up = start().stream
    warm_up.draw(8)
    assert [d.prompt.row.id for d in warm_up.draw(4)] != [t.prompt_id for t in expected[0]]  # steps 2 and 3 are past it


def test_a_budget_is_in_the_metadata_of_samples_and_measurements(model: Decoder, rewards: Rewards) -> None:
    tokenizer, budget = Tokenizer.from_characters("0123456789>"), LengthBudget(low=3, high=9, text="{n}>")
    stream = PromptStream(SOURCES, tokenizer, Data(train=SOURCES, budget=budget), seed=3)
    runner = RolloutRunner(DenseEngine(model), environment_factory(Environment(), tokenizer), tokenizer, seed=3)
    draws = stream.draw(5)
    measured = held_out_rollouts(runner, rewards, [d.prompt for d in draws], 2, SAMPLING, quiet)
    asked = [d.prompt.budget for d in draws for _ in range(2)]
    assert [t.metadata["budget"] for t in measured.trajectories] == asked
    assert pack(measured.trajectories).sequence["budget"].tolist() == asked


def test_measuring_twice_gives_the_same_numbers(
    model: Decoder, tokenizer: Tokenizer, rewards: Rewards, tools: Any
) -> None:
    engine = DenseEngine(tools.successor(13))
    runner = RolloutRunner(engine, environment_factory(Environment(), tokenizer), tokenizer, seed=3)
    prompts = [d.prompt for d in PromptStream(SOURCES, tokenizer, Data(train=SOURCES), seed=3).draw(6)]
    sampling = SamplingOptions(max_tokens=2, stop_tokens=(1,))
    scored, again = (held_out_rollouts(runner, rewards, prompts, 2, sampling, quiet) for _ in range(2))
    same(scored.trajectories, again.trajectories)
    values = validation_metrics(scored, by="length")
    # The model continues `>` with <pad> <eos>: an empty answer, never right.
    assert values["accuracy"] == values["reward_mean"] == values["truncated"] == values["failed"] == 0
    assert values["length_mean"] == 2
    assert {k for k in values if k.startswith("accuracy/")} == {
        f"accuracy/length={n}" for n in {len(p.tokens) - 1 for p in prompts}
    }
