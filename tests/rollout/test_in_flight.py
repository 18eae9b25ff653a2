"""Samples paused anywhere continue with the same tokens, keep their versions, and find every stop string."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.environment import Environment
from burnish.core.engine import Completion, Engine, SamplingOptions
from burnish.core.routed_experts import first_records
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.environments.base import MakeEnvironment
from burnish.environments.registry import environment_factory
from burnish.inference.engine_wrappers import WeightCopyEngine
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.rollout import in_flight
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.running_trajectory import PartialTurn

TOKENIZER = Tokenizer.from_characters("0123456789>")
SAMPLING = SamplingOptions(max_tokens=14, stop_tokens=(1,))
TWO_TURNS = """
from burnish.environments.base import Done, Turn


class Game:
    def __init__(self, prompt, tokenizer):
        self.prompt, self.tokenizer, self.seen = prompt, tokenizer, []

    def start(self):
        return Turn(tuple(self.prompt.tokens))

    def observe(self, completion, text):
        assert self.tokenizer.decode(completion) == text
        self.seen.append(len(completion))
        return Turn((5, 6)) if len(self.seen) == 1 else Done(float(sum(self.seen)))
"""


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


def draws() -> list[PromptSample]:
    return [PromptSample(Prompt(Row(f"r{k}", text, "rows", None), text, TOKENIZER.encode(text)), 0) for k, text in enumerate(("31>", "9>"))]  # fmt: skip


class Stopping(DenseEngine):
    """Interrupted whenever it has drawn so many tokens."""

    def __init__(self, model: Decoder, every: int) -> None:
        super().__init__(model, 6, TOKENIZER.decode, self._heard)
        self.every, self.until = every, 0

    def _heard(self, name: str, token: int) -> None:
        if self.stats.tokens >= self.until:
            self.interrupt()

    def stream(self) -> Iterator[Completion]:
        self.until = self.stats.tokens + self.every
        return super().stream()


def stopped_again_and_again(runner: RolloutRunner, sampling: SamplingOptions) -> dict[str, Trajectory]:
    """All samples; every time the engine is interrupted they are stopped, and new weights are announced."""
    in_flight = InFlightTrajectories(runner)
    for draw in draws():
        for sample in range(3):
            in_flight.add(draw, sample, sampling, "train")
    found: list[Trajectory] = []
    for version in range(200):
        runner.engine.load(version, ())
        in_flight.submit_pending()
        for completion in runner.engine.stream():
            found += in_flight.take(completion)
        found += in_flight.pause_all()
        if not in_flight.paused:
            return {t.id: t for t in found}
    raise AssertionError("no end")


def runner_of(engine: Engine, make: MakeEnvironment | None = None, max_turns: int = 1) -> RolloutRunner:
    return RolloutRunner(engine, make or environment_factory(Environment(), TOKENIZER), TOKENIZER, 7, max_turns)


@pytest.mark.parametrize("every", [1, 9])
def test_a_sample_that_is_stopped_has_the_tokens_of_one_that_is_not(model: Decoder, every: int) -> None:
    expected = {t.id: t for t in runner_of(DenseEngine(model, 4)).run(draws(), 3, SAMPLING, "train")}
    found = stopped_again_and_again(runner_of(Stopping(model, every)), SAMPLING)
    assert found.keys() == expected.keys()
    kinds = set()
    for name, one in found.items():
        other, (sequence,) = expected[name], one.sequences
        assert (one.finish, one.completion, one.metadata) == (other.finish, other.completion, other.metadata)
        np.testing.assert_array_equal(sequence.tokens, other.sequences[0].tokens)
        np.testing.assert_array_equal(sequence.action_mask, other.sequences[0].action_mask)
        np.testing.assert_allclose(sequence.behaviour_logp, other.sequences[0].behaviour_logp, rtol=1e-5)
        versions = sequence.version[sequence.action_mask]
        assert (np.diff(versions) >= 0).all()
        kinds.add(len(set(versions)) > 1)
    assert True in kinds


def test_turns_of_an_environment_see_whole_completions(model: Decoder, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(TWO_TURNS)
    make = environment_factory(Environment(name="game.py:Game"), TOKENIZER, tmp_path)
    sampling = SamplingOptions(max_tokens=30, stop_tokens=(1, 2, 3))
    expected = {t.id: t for t in runner_of(DenseEngine(model), make, 2).run(draws(), 3, sampling, "train")}
    found = stopped_again_and_again(runner_of(Stopping(model, 7), make, 2), sampling)
    assert {name: (t.reward, t.completion) for name, t in found.items()} == {
        name: (t.reward, t.completion) for name, t in expected.items()
    }


def test_a_stop_string_across_the_place_where_a_sample_was_stopped_ends_it(tools: Any) -> None:
    model = tools.successor(13)  # after "9>" it counts on for ever
    sampling = SamplingOptions(max_tokens=30, stop=("345", "12345"))
    decode = TOKENIZER.decode
    expected = {t.id: t for t in runner_of(DenseEngine(model, decode=decode)).run(draws(), 3, sampling, "train")}
    assert all(t.completion.endswith("345") and t.finish == "stop" for t in expected.values())
    for every in (36, 42):  # of six samples: six or seven tokens of each, the last of them within the string
        found = stopped_again_and_again(runner_of(Stopping(model, every)), sampling)
        assert {k: t.completion for k, t in found.items()} == {k: t.completion for k, t in expected.items()}


def test_what_ended_before_it_could_be_stopped_is_returned(model: Decoder) -> None:
    engine = DenseEngine(model)
    in_flight = InFlightTrajectories(runner_of(engine))
    for draw in draws():
        in_flight.add(draw, 0, SamplingOptions(max_tokens=1), "train")
    in_flight.submit_pending()
    (first,) = in_flight.take(next(iter(islice(engine.stream(), 1))))
    (second,) = in_flight.pause_all()
    assert {first.prompt_id, second.prompt_id} == {"r0", "r1"}
    assert list(in_flight) == []


def test_an_engine_on_a_copy_keeps_sampling_with_what_it_loaded(tools: Any) -> None:
    policy = tools.decoder(seed=1)

    def sampled(engine: Engine) -> list[str]:
        return [t.completion for t in sorted(runner_of(engine).run(draws(), 3, SAMPLING, "train"), key=lambda t: t.id)]

    engine = WeightCopyEngine(DenseEngine, policy)
    before = sampled(engine)
    assert before == sampled(DenseEngine(policy))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    assert sampled(engine) == before != sampled(DenseEngine(policy))
    engine.load(1, ())
    assert sampled(engine) == sampled(DenseEngine(policy))
    versions = {int(v) for t in runner_of(engine).run(draws(), 1, SAMPLING, "train") for v in t.sequences[0].version}
    assert versions == {-1, 1}


def test_openings_are_remembered_up_to_a_limit(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "MAX_OPENINGS", 2)
    found = InFlightTrajectories(runner_of(DenseEngine(model)))
    first = found._shared_opening((300, 301))
    assert found._shared_opening(tuple([300, 301])) is first
    for token in range(5):
        found._shared_opening((token,))
    assert len(found._openings) == 2


def test_a_token_has_the_experts_of_the_request_that_sampled_it() -> None:
    def record(*rows: int) -> np.ndarray:
        return np.array(rows, dtype=np.int16)[:, None, None]

    turn = PartialTurn()
    turn.append([7, 8, 9], [-1.0] * 3, version=0)
    turn.experts = first_records(
        turn.experts, record(1, 2, 3, 4, -1)
    )  # a context of two tokens; the last was not computed
    turn.drop_last(1)
    assert turn.experts is not None
    assert turn.experts.ravel().tolist() == [1, 2, 3, -1]
    turn.append([5], [-1.0], version=1)
    turn.experts = first_records(turn.experts, record(11, 12, 13, 14, -1))
    assert turn.experts is not None
    assert turn.experts.ravel().tolist() == [1, 2, 3, 14, -1]
