"""The source of a training step, with its journal: what was finished is never made again."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config.schema import Data, Environment, Reward, RewardPart, Source
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompts import PromptStream
from burnish.environments.base import environment_factory
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.rewards import Rewards
from burnish.rollout.driver import Driver
from burnish.rollout.measure import measure, summary
from burnish.rollout.native.engine import NativeEngine
from burnish.rollout.sources import SyncSource
from burnish.run.journal import Journal

SAMPLING = SamplingOptions(max_tokens=6, stop_tokens=(1,))
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
    """Nobody watches."""


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
        engine = NativeEngine(model, max_rows=5)
        driver = Driver(engine, environment_factory(environment, tokenizer, tmp_path), tokenizer, seed=3)
        stream = PromptStream(SOURCES, tokenizer, Data(train=SOURCES), seed=3)
        return SyncSource(stream, driver, rewards, SAMPLING, prompts=4, n=3, journal=Journal(tmp_path / "journal"))

    return start


def drawn_tokens(source: SyncSource) -> int:
    engine = source.driver.engine
    assert isinstance(engine, NativeEngine)
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
    scored = source.next(1, said.append)
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


def test_a_second_life_takes_finished_steps_from_the_journal(life: Any) -> None:
    first = life()
    expected = [first.next(step, quiet).trajectories for step in (1, 2)]
    second = life()
    for step in (1, 2):
        same(second.next(step, quiet).trajectories, expected[step - 1])
    assert drawn_tokens(second) == 0
    assert second.rewards.pending == 0
    third_step = second.next(3, quiet)
    assert drawn_tokens(second) == third_step.num_tokens > 0
    same(first.next(3, quiet).trajectories, third_step.trajectories)


@pytest.mark.parametrize("lost", ["completed", "scored"])
def test_a_lost_attachment_is_made_again_and_is_equal(life: Any, tmp_path: Path, lost: str) -> None:
    expected = life().next(1, quiet)
    (tmp_path / "journal" / f"{lost}-000001.safetensors").unlink()
    second = life()
    same(second.next(1, quiet).trajectories, expected.trajectories)
    assert drawn_tokens(second) == (expected.num_tokens if lost == "completed" else 0)


@pytest.mark.parametrize("lost", ["completed", "scored"])
def test_a_damaged_attachment_counts_as_lost(life: Any, tmp_path: Path, lost: str) -> None:
    expected = life().next(1, quiet)
    file = tmp_path / "journal" / f"{lost}-000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    same(life().next(1, quiet).trajectories, expected.trajectories)


def test_a_journal_of_other_prompts_is_not_taken(life: Any) -> None:
    first = life()
    first.next(1, quiet)
    second = life()
    second.stream.draw(1)  # the stream stands elsewhere, so that the same step has other prompts
    scored = second.next(1, quiet)
    assert drawn_tokens(second) == scored.num_tokens > 0


@pytest.mark.parametrize("lost", [None, "scored"])
def test_rewards_of_the_environment_survive_and_are_not_scored_again(
    life: Any, tmp_path: Path, lost: str | None
) -> None:
    (tmp_path / "half.py").write_text(OWN_REWARD)
    environment = Environment(name="half.py:Half")
    expected = life(environment).next(1, quiet).trajectories
    own = [t for t in expected if t.parts == {"environment": 0.125}]
    assert 0 < len(own) < len(expected)
    assert all(t.reward == 0.125 for t in own)
    if lost:
        (tmp_path / "journal" / f"{lost}-000001.safetensors").unlink()
    same(life(environment).next(1, quiet).trajectories, expected)


def test_measuring_twice_gives_the_same_numbers(
    model: Decoder, tokenizer: Tokenizer, rewards: Rewards, tools: Any
) -> None:
    engine = NativeEngine(tools.successor(13))
    driver = Driver(engine, environment_factory(Environment(), tokenizer), tokenizer, seed=3)
    prompts = [d.prompt for d in PromptStream(SOURCES, tokenizer, Data(train=SOURCES), seed=3).draw(6)]
    sampling = SamplingOptions(max_tokens=2, stop_tokens=(1,))
    scored, again = (measure(driver, rewards, prompts, 2, sampling, quiet) for _ in range(2))
    same(scored.trajectories, again.trajectories)
    values = summary(scored, by="length")
    # The model continues `>` with <pad> <eos>: an empty answer, never right.
    assert values["accuracy"] == values["reward_mean"] == values["truncated"] == values["failed"] == 0
    assert values["length_mean"] == 2
    assert {k for k in values if k.startswith("accuracy/")} == {
        f"accuracy/length={n}" for n in {len(p.tokens) - 1 for p in prompts}
    }
