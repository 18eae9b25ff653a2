"""Answers cut into segments: borders, random keys, border values, and the resulting loss."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.algorithms.losses.loss_view import loss_view
from burnish.config.data import Data, Reward, RewardPart, Source
from burnish.config.environment import Environment
from burnish.config.loading import algorithm_from_preset
from burnish.core.engine import SamplingOptions
from burnish.core.random_keys import fold, sample_key
from burnish.core.trajectory import Trajectory, chain_nodes, pack
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample, PromptStream
from burnish.data.row import Row
from burnish.environments.registry import environment_factory
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.segment_rollouts import (
    FIRST_CONTINUED_SAMPLE,
    AnswerPrefix,
    ChainPlan,
    attach_border_values,
    border_prefixes,
    cut_into_segments,
)
from burnish.rollout.sync_source import RolloutPlan, SyncSource
from burnish.run.journal import Journal
from burnish.trainers.minibatches import mini_batches
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext

SAMPLING = SamplingOptions(max_tokens=8, stop_tokens=(1, 2))
CHAIN = ChainPlan(below=0.9, every=2, rollouts=3)
SOURCES = [Source(task="sort_digits", options={"min_digits": 2, "max_digits": 3})]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters("0123456789>")


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


@pytest.fixture(scope="module")
def draws(tokenizer: Tokenizer) -> list[PromptSample]:
    rows = [Row(f"rows/{text}", text, "rows", None) for text in ("31>", "5067>")]
    return [PromptSample(Prompt(r, str(r.prompt), tokenizer.encode(str(r.prompt))), visit=1) for r in rows]


def runner_of(engine: Any, tokenizer: Tokenizer) -> RolloutRunner:
    return RolloutRunner(engine, environment_factory(Environment(), tokenizer), tokenizer, seed=7)


def sampled(runner: RolloutRunner, draws: list[PromptSample], n: int = 6) -> list[Trajectory]:
    found = sorted(runner.run(draws, n, SAMPLING, "train"), key=lambda t: t.id)
    cut_into_segments(found, CHAIN)
    return found


# --- borders -----------------------------------------------------------------------------------------------------------------


def written(probs: Sequence[float], prompt: Sequence[int] = (5,), sample: int = 0) -> Trajectory:
    """An answer whose tokens were sampled with these probabilities."""
    lead = [0.0] * len(prompt)
    nodes = chain_nodes(
        tokens=np.array([*prompt, *range(len(probs))], dtype=np.int64),
        action_mask=np.array([False] * len(prompt) + [True] * len(probs)),
        behaviour_logp=np.array([*lead, *np.log(probs)], dtype=np.float32),
        version=np.zeros(len(prompt) + len(probs), dtype=np.int32),
    )
    metadata = {"prompt_length": len(prompt)}
    return Trajectory("rows/31>", 1, sample, nodes, "stop", "", metadata=metadata)


def test_borders_are_before_every_so_manieth_unsure_token_and_states_are_named_by_their_tokens() -> None:
    probs = [0.95, 0.5, 0.99, 0.6, 0.97, 0.3]
    samples = [written(probs), written(probs, prompt=(5, 6), sample=1), written([0.95, 0.99], sample=2)]
    cut_into_segments(samples, ChainPlan(0.9, 1, 3))
    assert [t.metadata["borders"] for t in samples] == [[1, 2, 4, 6], [2, 3, 5, 7], []]
    assert samples[0].metadata["border_states"] == samples[1].metadata["border_states"]
    assert len(set(samples[0].metadata["border_states"])) == 4
    cut_into_segments(samples, ChainPlan(0.9, 2, 3))
    assert samples[0].metadata["borders"] == [1, 4]


def test_a_state_that_several_samples_come_through_is_continued_once(draws: list[PromptSample]) -> None:
    one, other = written([0.5, 0.5, 0.5]), written([0.5, 0.5, 0.5], sample=1)
    other.sequences[0].tokens[2] = 9  # they part with the second token
    cut_into_segments([one, other], ChainPlan(0.9, 1, 2))
    found = border_prefixes([one, other], draws, ChainPlan(0.9, 1, 2), seed=7)
    assert [b.tokens for b in found] == [()] * 2 + [(0,)] * 2 + [(0, 1)] * 2 + [(0, 9)] * 2
    assert [b.sample for b in found] == list(range(FIRST_CONTINUED_SAMPLE, FIRST_CONTINUED_SAMPLE - 8, -1))
    assert len({b.key for b in found}) == 8
    states = one.metadata["border_states"]
    base = sample_key(7, "baseline", "rows/31>", 1, 1)
    assert found[5].key == fold(base, int(states[2], 16))
    assert (
        border_prefixes([other], draws, ChainPlan(0.9, 1, 2), seed=7)[-1].key == found[-1].key
    )  # independent of other samples


# --- answers continued from them ---------------------------------------------------------------------------------------------


def test_what_is_continued_begins_with_its_state_and_has_the_room_that_is_left(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]
) -> None:
    engine = DenseEngine(model, 16)
    runner = runner_of(engine, tokenizer)
    samples = sampled(runner, draws)
    before = engine.stats.tokens
    wanted = {(b.draw.prompt.row.id, b.sample): b for b in border_prefixes(samples, draws, CHAIN, runner.seed)}
    found = list(runner.continue_all(wanted.values(), SAMPLING))
    assert {(t.prompt_id, t.sample) for t in found} == wanted.keys()
    assert sum(t.num_actions for t in found) == engine.stats.tokens - before  # only what was drawn for them
    for t in found:
        begin, tokens = wanted[t.prompt_id, t.sample], t.sequences[0].tokens.tolist()
        prompt = begin.draw.prompt.tokens
        given = len(prompt) + len(begin.tokens)
        assert tokens[:given] == [*prompt, *begin.tokens]
        assert t.sequences[0].action_mask.tolist() == [False] * given + [True] * (len(tokens) - given)
        assert t.completion == tokenizer.decode(tokens[len(prompt) :])
        assert t.truncated == (tokens[-1] not in SAMPLING.stop_tokens)
        assert not t.truncated or len(tokens) - len(prompt) == SAMPLING.max_tokens


def test_an_answer_continued_does_not_depend_on_who_else_is(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]
) -> None:
    runner = runner_of(DenseEngine(model, 16), tokenizer)
    wanted = border_prefixes(sampled(runner, draws), draws, CHAIN, runner.seed)

    def tokens_of(engine: Any, some: Sequence[AnswerPrefix]) -> dict[tuple[str, int], list[int]]:
        found = runner_of(engine, tokenizer).continue_all(some, SAMPLING)
        return {(t.prompt_id, t.sample): t.sequences[0].tokens.tolist() for t in found}

    everyone = tokens_of(DenseEngine(model, 16), wanted)
    some = tokens_of(PagedEngine(model, 3), wanted[5:40:7])
    assert some == {name: everyone[name] for name in some}


def test_samples_that_will_be_continued_leave_their_cache_to_those_that_do(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]
) -> None:
    engine = PagedEngine(model, 16, num_blocks=500)
    engine.reserve(300)
    runner, sampling = runner_of(engine, tokenizer), SamplingOptions(max_tokens=120)
    samples = list(runner.run(draws, 2, sampling, "train", branching=CHAIN))
    cut_into_segments(samples, ChainPlan(0.9, 10, 2))
    wanted = border_prefixes(samples, draws, ChainPlan(0.9, 10, 2), runner.seed)
    computed = engine.stats.prefilled_tokens
    assert len(list(runner.continue_all(wanted, sampling))) == len(wanted)
    states = {(b.draw.prompt.row.id, b.tokens) for b in wanted}
    assert engine.stats.prefilled_tokens - computed <= 16 * len(states)  # a page for each state, not its whole past
    assert sum(len(tokens) for _, tokens in states) > 2 * 16 * len(states)


# --- values ------------------------------------------------------------------------------------------------------------------


def outcome(tokens: Sequence[int]) -> float:
    """A reward that every token of the answer has a say in."""
    return float(sum((k + 2) * t for k, t in enumerate(tokens)) % 3 == 0)


@torch.no_grad()
def enumerated(model: Decoder, prompt: list[int], begun: tuple[int, ...], most: int) -> float:
    """The expected outcome of answers of `most` tokens that begin so, by adding up all of them."""
    total = 0.0
    for rest in product(range(model.arch.vocab_size), repeat=most - len(begun)):
        tokens = [*prompt, *begun, *rest]
        logp = model.logits(model.hidden(torch.tensor(tokens), torch.tensor([0, len(tokens)]))).log_softmax(-1)
        at = range(len(prompt) + len(begun), len(tokens))
        total += math.exp(sum(float(logp[p - 1, tokens[p]]) for p in at)) * outcome([*begun, *rest])
    return total


def test_values_are_those_of_all_continuations_weighed_by_their_probability(tools: Any, tokenizer: Tokenizer) -> None:
    model, most, rollouts = tools.decoder(vocab=4), 3, 3000
    draw = PromptSample(Prompt(Row("rows/31>", "31>", "rows", None), "31>", [2, 3]), visit=1)
    runner = runner_of(DenseEngine(model, 4096), tokenizer)
    sample = written([0.5] * most, prompt=(2, 3))
    cut_into_segments([sample], ChainPlan(0.9, 1, rollouts))
    wanted = border_prefixes([sample], [draw], ChainPlan(0.9, 1, rollouts), runner.seed)
    states = {b.sample: b.state for b in wanted}
    sampling = SamplingOptions(max_tokens=most)
    continued = list(runner.continue_all(wanted, sampling))
    for t in continued:
        t.reward, t.metadata["state"] = outcome(t.sequences[0].tokens[2:].tolist()), states[t.sample]
    attach_border_values([sample], continued)
    for place, value in zip(sample.metadata["borders"], sample.metadata["border_values"], strict=True):
        exact = enumerated(model, [2, 3], tuple(sample.sequences[0].tokens[2:place].tolist()), most)
        assert value == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / rollouts) + 1e-9)


def test_a_policy_that_always_does_the_same_has_the_value_of_what_it_does(tools: Any, tokenizer: Tokenizer) -> None:
    model = tools.successor(8)
    draw = PromptSample(Prompt(Row("rows/31>", "31>", "rows", None), "31>", [2, 3]), visit=1)
    runner = runner_of(DenseEngine(model), tokenizer)
    sample = written([0.5] * 4, prompt=(2, 3))
    sample.sequences[0].tokens[2:] = [4, 5, 7, 0]  # it left the policy's way with the third token
    cut_into_segments([sample], ChainPlan(0.9, 1, 2))
    wanted = border_prefixes([sample], [draw], ChainPlan(0.9, 1, 2), runner.seed)
    states = {b.sample: b.state for b in wanted}
    continued = list(runner.continue_all(wanted, SamplingOptions(max_tokens=4)))
    for t in continued:
        t.reward, t.metadata["state"] = float(t.sequences[0].tokens[2:].tolist() == [4, 5, 6, 7]), states[t.sample]
    attach_border_values([sample], continued)
    assert sample.metadata["border_values"] == [1, 1, 1, 0]


class Learner:
    """Says of every token what the sampler said."""

    def outputs(self, batch: Any, needs: frozenset[str]) -> dict[str, torch.Tensor]:
        return {"logp": batch.token["behaviour_logp"].double()}


def test_the_worked_example_from_the_borders_to_the_loss(draws: list[PromptSample]) -> None:
    chain = ChainPlan(0.9, 1, 4)
    samples = [written([0.95, 0.5, 0.99, 0.6, 0.97, 0.3]), written([0.95, 0.99], prompt=(5, 6), sample=1)]
    cut_into_segments(samples, chain)
    values = dict(zip(samples[0].metadata["border_states"], (0.5, 0.5, 0.75, 0.25), strict=True))
    continued = []
    for b in border_prefixes(samples, draws, chain, seed=7):
        right = (FIRST_CONTINUED_SAMPLE - b.sample) % 4 < 4 * values[b.state]
        continued.append(replace(written([1.0], sample=b.sample), reward=float(right), metadata={"state": b.state}))
    for sample in samples:
        sample.reward = sample.accuracy = 1.0
    attach_border_values(samples, continued)
    assert samples[0].metadata["border_values"] == [0.5, 0.5, 0.75, 0.25]
    algorithm = algorithm_from_preset("spo_chain")
    pipeline = AlgorithmPipeline(algorithm, num_updates=2)
    context = StepContext(Learner())  # type: ignore[arg-type]
    whole = pipeline.prepare(pack(samples), context)
    assert whole.token["advantages"].tolist() == [0, 0, 0.25, 0.25, -0.5, -0.5, 0.75, *[0] * 4]
    batch = pipeline.trim(whole, context)
    assert batch.num_sequences == 1  # the sure answer has nothing to learn from
    masked = torch.where(batch.loss_mask, batch.token["advantages"], 0.0)
    assert masked.tolist() == [0, 0, 0.25, 0, -0.5, 0, 0.75]
    (mini,) = mini_batches(batch, algorithm, 1, 1, 8)
    loss, _ = pipeline.loss(loss_view(mini, mini.token["old_logp"][mini.loss_mask], torch.zeros(3)))
    assert float(loss) == pytest.approx(-0.166667, abs=1e-6)


# --- from a source -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rewards() -> Iterator[Rewards]:
    with Rewards(Reward(parts=[RewardPart(name="task")], workers=1)) as pool:
        yield pool


@pytest.fixture
def life(model: Decoder, tokenizer: Tokenizer, rewards: Rewards, tmp_path: Path) -> Any:
    """`life()`: everything a process that resumes this run builds anew, over the same journal."""

    def start() -> SyncSource:
        stream = PromptStream(SOURCES, tokenizer, Data(train=SOURCES), seed=3)
        return SyncSource(stream, runner_of(DenseEngine(model, 16), tokenizer), rewards, Journal(tmp_path / "journal"))

    return start


PLAN = RolloutPlan(prompts=3, n=2, sampling=SAMPLING, branching=CHAIN)


def quiet(message: str) -> None:
    """Discards progress."""


def test_samples_of_a_source_have_values_and_every_sampled_token_counts(life: Any) -> None:
    source = life()
    scored = source.next(1, PLAN, quiet)
    assert [t.sample for t in scored.trajectories] == [0, 1] * 3
    assert all(t.sample <= FIRST_CONTINUED_SAMPLE and t.reward is not None for t in scored.continued)
    assert scored.num_tokens == source.runner.engine.stats.tokens
    for t in scored.trajectories:
        assert len(t.metadata["border_values"]) == len(t.metadata["borders"]) > 0
    assert pack(scored.usable).ragged["border_values"].values.shape[0] == sum(
        len(t.metadata["borders"]) for t in scored.trajectories
    )


@pytest.mark.parametrize("lost", ["scored", "completed"])
def test_a_resumed_source_has_the_same_values_and_samples_only_what_was_lost(life: Any, lost: str) -> None:
    whole = life().next(1, PLAN, quiet)
    source = life()
    del source.rounds.recorded["scored", 1, 0]
    if lost == "completed":
        del source.rounds.recorded["completed", 1, 0]
    again = source.next(1, PLAN, quiet)
    assert (source.runner.engine.stats.tokens > 0) == (lost == "completed")
    for name in ("trajectories", "continued"):
        pairs = list(zip(getattr(whole, name), getattr(again, name), strict=True))
        assert pairs
        assert all(a.metadata == b.metadata and (a.id, a.reward) == (b.id, b.reward) for a, b in pairs)
    assert again.num_tokens == whole.num_tokens


def test_a_sample_none_of_whose_continuations_could_be_scored_is_not_used(
    life: Any, rewards: Rewards, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, poll, broken = rewards.submit, rewards.poll, set[str]()

    def submitted(requests: Sequence[ScoreRequest]) -> None:
        broken.update(r.id for r in requests if ".-" in r.id)
        submit(requests)

    def polled(timeout: float | None) -> list[Score]:
        return [replace(s, reward=None, error="broken") if s.id in broken else s for s in poll(timeout)]

    monkeypatch.setattr(rewards, "submit", submitted)
    monkeypatch.setattr(rewards, "poll", polled)
    scored = life().next(1, PLAN, quiet)
    assert scored.usable == []
    assert {t.error for t in scored.trajectories} == {
        "not one answer continued from one of its borders could be scored: broken"
    }
