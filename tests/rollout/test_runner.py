"""The runner with real engines on tiny models: action masks, random keys, and finish reasons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.environment import Environment
from burnish.core.engine import Request, SamplingOptions
from burnish.core.random_keys import sample_key
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.environments.base import MakeEnvironment
from burnish.environments.registry import environment_factory
from burnish.inference.native.dense_engine import DenseEngine
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.runner import RolloutRunner

GAME = '''
from burnish.environments.base import Done, Turn


class Game:
    """Answers every completion with `hint`, `turns` - 1 times."""

    def __init__(self, prompt, tokenizer, hint="42>", turns=2, reward=None):
        self.prompt, self.tokenizer, self.hint, self.turns, self.reward = prompt, tokenizer, hint, turns, reward

    def start(self):
        return Turn(tuple(self.prompt.tokens))

    def observe(self, completion, text):
        assert self.tokenizer.decode(completion) == text
        self.turns -= 1
        return Turn(tuple(self.tokenizer.encode(self.hint))) if self.turns else Done(self.reward)
'''
STOPS = (1, 2, 3, 4)  # often drawn, so that turns are short
SAMPLING = SamplingOptions(max_tokens=40, stop_tokens=STOPS)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters("0123456789>")


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


@pytest.fixture(scope="module")
def draws(tokenizer: Tokenizer) -> list[PromptSample]:
    texts = ["31>", "9>", "5067>"]
    rows = [Row(f"rows/{i}", text, "rows", None) for i, text in enumerate(texts)]
    return [
        PromptSample(Prompt(r, str(r.prompt), tokenizer.encode(str(r.prompt))), visit=i) for i, r in enumerate(rows)
    ]


@pytest.fixture
def game(tmp_path: Path, tokenizer: Tokenizer) -> Any:
    (tmp_path / "game.py").write_text(GAME)

    def make(**options: Any) -> MakeEnvironment:
        return environment_factory(Environment(name="game.py:Game", options=options), tokenizer, tmp_path)

    return make


def by_id(trajectories: Any) -> dict[str, Trajectory]:
    found = list(trajectories)
    assert len({t.id for t in found}) == len(found)
    return {t.id: t for t in found}


def test_what_is_done_is_left_out_and_the_rest_stays_the_same(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]
) -> None:
    runner = RolloutRunner(DenseEngine(model, 4), environment_factory(Environment(), tokenizer), tokenizer, seed=7)
    whole = by_id(runner.run(draws, 2, SAMPLING, "eval"))
    done = {(draws[0].prompt.row.id, 1), *((draws[1].prompt.row.id, k) for k in range(2))}
    rest = by_id(runner.run(draws, 2, SAMPLING, "eval", done))
    visits = {d.prompt.row.id: d.visit for d in draws}
    assert whole.keys() - rest.keys() == {f"{name}#{visits[name]}.{k}" for name, k in done}
    assert all(rest[name].completion == whole[name].completion for name in rest)
    everything = {(d.prompt.row.id, k) for d in draws for k in range(2)}
    assert list(runner.run(draws, 2, SAMPLING, "eval", everything)) == []


def test_a_single_turn_is_what_the_engine_gives_for_the_samples_key(
    tools: Any, model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]
) -> None:
    runner = RolloutRunner(DenseEngine(model, 4), environment_factory(Environment(), tokenizer), tokenizer, seed=7)
    got = by_id(runner.run(draws, 3, SAMPLING, "train"))
    assert got.keys() == {f"{d.prompt.row.id}#{d.visit}.{k}" for d in draws for k in range(3)}
    for draw in draws:
        for sample in range(3):
            key = sample_key(7, "train", draw.prompt.row.id, draw.visit, sample)
            request = Request("alone", tuple(draw.prompt.tokens), SAMPLING, key)
            completion = tools.run(DenseEngine(model), [request])["alone"]
            trajectory = got[f"{draw.prompt.row.id}#{draw.visit}.{sample}"]
            (sequence,) = trajectory.sequences
            at = len(draw.prompt.tokens)
            assert sequence.tokens.tolist() == [*draw.prompt.tokens, *completion.tokens.tolist()]
            assert sequence.action_mask.tolist() == [False] * at + [True] * len(completion.tokens)
            np.testing.assert_allclose(sequence.behaviour_logp[at:], completion.logp, rtol=2e-7)
            assert (sequence.behaviour_logp[:at] == 0).all()
            assert sequence.version.tolist() == [-1] * at + [0] * len(completion.tokens)
            assert trajectory.finish == completion.finish
            assert trajectory.completion == tokenizer.decode(completion.tokens.tolist())
            assert trajectory.reward is None
            assert trajectory.metadata["prompt_length"] == at


def test_noise_belongs_to_seed_stream_visit_and_sample(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]
) -> None:
    def completions(seed: int, stream: str, visit: int) -> list[str]:
        runner = RolloutRunner(DenseEngine(model), environment_factory(Environment(), tokenizer), tokenizer, seed)
        sampling = SamplingOptions(max_tokens=20)
        return sorted(t.completion for t in runner.run([PromptSample(draws[0].prompt, visit)], 2, sampling, stream))

    first = completions(0, "train", 0)
    assert first[0] != first[1]
    assert first == completions(0, "train", 0)
    others = [completions(1, "train", 0), completions(0, "eval", 0), completions(0, "train", 1)]
    assert all(not set(first) & set(other) for other in others)


@pytest.mark.parametrize("max_rows", [1, 8])
def test_observations_are_not_actions_and_the_noise_goes_on_behind_them(
    tools: Any, model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample], game: Any, max_rows: int
) -> None:
    runner = RolloutRunner(DenseEngine(model, max_rows), game(), tokenizer, seed=7, max_turns=2)
    runner.engine.load(3, [])
    got = by_id(runner.run(draws, 2, SAMPLING, "train"))
    assert {t.finish for t in got.values()} == {"stop"}
    hint = tokenizer.encode("42>")
    for draw in draws:
        for sample in range(2):
            key = sample_key(7, "train", draw.prompt.row.id, draw.visit, sample)
            prompt = tuple(draw.prompt.tokens)
            first = tools.run(DenseEngine(model), [Request("1", prompt, SAMPLING, key)])["1"].tokens.tolist()
            context = (*prompt, *first, *hint)
            second = tools.run(DenseEngine(model), [Request("2", context, SAMPLING, key, len(first))])["2"]
            trajectory = got[f"{draw.prompt.row.id}#{draw.visit}.{sample}"]
            (sequence,) = trajectory.sequences
            written = [False] * len(prompt) + [True] * len(first) + [False] * 3 + [True] * len(second.tokens)
            assert sequence.tokens.tolist() == [*context, *second.tokens.tolist()]
            assert sequence.action_mask.tolist() == written
            assert (sequence.behaviour_logp[~sequence.action_mask] == 0).all()
            assert (sequence.behaviour_logp[sequence.action_mask] < 0).all()
            assert (sequence.version == np.where(written, 3, -1)).all()
            assert trajectory.completion == tokenizer.decode([*first, *hint, *second.tokens.tolist()])
            tokens = torch.from_numpy(sequence.tokens)
            wanted = torch.from_numpy(sequence.action_mask).nonzero().squeeze(1)
            with torch.no_grad():
                logp, _ = model.token_logprobs(tokens, torch.tensor([0, len(tokens)]), wanted)
            np.testing.assert_allclose(sequence.behaviour_logp[sequence.action_mask], logp.numpy(), rtol=1e-6)


def test_an_environments_own_reward_is_the_reward(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample], game: Any
) -> None:
    for reward in (0.25, 1.0):
        runner = RolloutRunner(DenseEngine(model), game(reward=reward, turns=1), tokenizer, seed=7)
        for trajectory in runner.run(draws, 2, SAMPLING, "train"):
            assert trajectory.reward == reward
            assert trajectory.accuracy is None, "it does not say which rewards mean success"
            assert trajectory.parts == {"environment": reward}


def test_an_environment_that_wants_more_turns_is_cut_off(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample], game: Any
) -> None:
    runner = RolloutRunner(DenseEngine(model), game(turns=5, reward=1.0), tokenizer, seed=7, max_turns=3)
    for trajectory in runner.run(draws, 2, SAMPLING, "train"):
        assert trajectory.finish == "turns"
        assert trajectory.truncated
        assert trajectory.reward is None
        (sequence,) = trajectory.sequences
        turns = np.diff(sequence.action_mask.astype(int)) == 1
        assert turns.sum() == 3
        assert sequence.action_mask[-1], "no observation is left without an answer"


def test_a_context_without_room_for_another_turn_ends_the_trajectory(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample], game: Any
) -> None:
    def run(positions: int | None) -> list[Trajectory]:
        runner = RolloutRunner(
            DenseEngine(model), game(turns=5), tokenizer, seed=7, max_turns=3, max_positions=positions
        )
        return list(runner.run(draws[:2], 1, SAMPLING, "train"))

    assert {t.finish for t in run(None)} == {"turns"}
    for trajectory in run(len(draws[0].prompt.tokens) + SAMPLING.max_tokens):
        assert trajectory.finish == "length"
        assert trajectory.sequences[0].action_mask[-1]


def test_a_completion_cut_at_its_length_ends_the_trajectory(
    tools: Any, tokenizer: Tokenizer, draws: list[PromptSample], game: Any
) -> None:
    """The model counts upwards: `>` is followed by <pad>, <eos>, 0, 1, ..."""
    runner = RolloutRunner(DenseEngine(tools.successor(13)), game(), tokenizer, seed=7, max_turns=2)
    sampling = SamplingOptions(max_tokens=3, stop_tokens=(4,))
    got = list(runner.run(draws[:1], 1, sampling, "train"))
    assert [t.finish for t in got] == ["length"]
    assert got[0].sequences[0].tokens.tolist() == [*tokenizer.encode("31>"), 0, 1, 2]
    sampling = SamplingOptions(max_tokens=3, stop_tokens=(2,))
    (stopped,) = runner.run(draws[:1], 1, sampling, "train")
    assert stopped.finish == "stop"
    assert stopped.completion == "042>0"
