"""Trees of answers with real engines on tiny models: sampling, random keys, shared prefixes, and the trained edges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from burnish.config.environment import Environment
from burnish.config.loading import algorithm_from_preset
from burnish.core.engine import Request, SamplingOptions
from burnish.core.random_keys import fold, sample_key
from burnish.core.trajectory import Trajectory, pack
from burnish.data.prompt_pool import Prompt
from burnish.data.prompt_stream import PromptSample
from burnish.data.row import Row
from burnish.environments.registry import environment_factory
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.rollout.runner import RolloutRunner
from burnish.rollout.scoring import RolloutBatch
from burnish.rollout.segment_rollouts import TreePlan
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext

TREE = TreePlan((2, 3), segment=3)
SAMPLING = SamplingOptions(max_tokens=11, stop_tokens=(1, 2))
ENDLESS = replace(SAMPLING, stop_tokens=())
N = 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_characters("0123456789>")


@pytest.fixture(scope="module")
def model(tools: Any) -> Decoder:
    return tools.decoder()


def draws_of(tokenizer: Tokenizer, texts: list[str]) -> list[PromptSample]:
    rows = [Row(f"rows/{text}", text, "rows", None) for text in texts]
    return [PromptSample(Prompt(r, str(r.prompt), tokenizer.encode(str(r.prompt))), visit=2) for r in rows]


@pytest.fixture(scope="module")
def draws(tokenizer: Tokenizer) -> list[PromptSample]:
    return draws_of(tokenizer, ["31>", "9>", "5067>"])


def runner_of(engine: Any, tokenizer: Tokenizer) -> RolloutRunner:
    return RolloutRunner(engine, environment_factory(Environment(), tokenizer), tokenizer, seed=7)


def grow(
    engine: Any, tokenizer: Tokenizer, draws: list[PromptSample], sampling: SamplingOptions = SAMPLING
) -> list[Trajectory]:
    """The paths of all trees, in order."""
    order = {draw.prompt.row.id: k for k, draw in enumerate(draws)}
    paths = runner_of(engine, tokenizer).run(draws, N, sampling, "train", branching=TREE)
    return sorted(paths, key=lambda t: (order[t.prompt_id], t.sample))


@pytest.fixture(scope="module")
def paths(model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]) -> list[Trajectory]:
    return grow(DenseEngine(model, 5), tokenizer, draws)


def edges(t: Trajectory) -> Iterator[tuple[str, int, int]]:
    """Each node of a path with the tokens of the edge into it."""
    yield from (
        (n, a, b)
        for n, (a, b) in zip(
            t.metadata["nodes"], pairwise([t.metadata["prompt_length"], *t.metadata["ends"]]), strict=True
        )
    )


# --- what is sampled ---------------------------------------------------------------------------------------------------------


def test_every_edge_is_what_the_engine_gives_for_its_own_key(
    tools: Any, model: Decoder, paths: list[Trajectory]
) -> None:
    requests, expected = [], {}
    for t in paths:
        tokens = t.sequences[0].tokens.tolist()
        for node, start, end in edges(t):
            sample, *path = map(int, node.split("."))
            key = sample_key(7, "train", t.prompt_id, 2, sample)
            for child in path:
                key = fold(key, child)
            name = f"{t.prompt_id}/{node}"
            drawn = start - t.metadata["prompt_length"]
            most = min(3, 11 - drawn) if len(path) < 2 else 11 - drawn
            if name not in expected:
                requests.append(Request(name, tuple(tokens[:start]), replace(SAMPLING, max_tokens=most), key, drawn))
            assert expected.setdefault(name, tokens[start:end]) == tokens[start:end]  # the same in all that pass it
    got = tools.run(DenseEngine(model), requests)
    assert {name: c.tokens.tolist() for name, c in got.items()} == expected
    for t in paths:
        sequence, prompt = t.sequences[0], t.metadata["prompt_length"]
        logp = np.concatenate([got[f"{t.prompt_id}/{node}"].logp for node, _, _ in edges(t)])
        np.testing.assert_allclose(sequence.behaviour_logp[prompt:], logp, rtol=2e-7)
        assert sequence.action_mask.tolist() == [False] * prompt + [True] * len(logp)


def test_a_node_has_all_its_children_or_has_ended(paths: list[Trajectory]) -> None:
    seen: dict[str, set[str]] = {}
    for t in paths:
        assert len({u.id for u in paths}) == len(paths)
        for above, below in pairwise([t.prompt_id, *(f"{t.prompt_id}/{node}" for node in t.metadata["nodes"])]):
            seen.setdefault(above, set()).add(below)
        ended = t.sequences[0].tokens[-1] in SAMPLING.stop_tokens
        assert t.finish == ("stop" if ended else "length")
        assert ended or t.num_actions == SAMPLING.max_tokens
        assert t.metadata["ends"][-1] == len(t.sequences[0].tokens)
        assert [b - a for _, a, b in edges(t)][:-1] == [3] * (len(t.metadata["nodes"]) - 1)
    leaves = {f"{t.prompt_id}/{t.metadata['nodes'][-1]}" for t in paths}
    assert not leaves & seen.keys()
    widths = {0: {N}, 1: {2}, 2: {3}}
    depth = [
        (name.count(".") + 1 if "." in name or name.count("/") > 1 else 0, len(kids)) for name, kids in seen.items()
    ]
    assert {k: {w for d, w in depth if d == k} for k in widths} == widths
    assert {len(t.metadata["nodes"]) for t in paths} == {1, 2, 3}  # some ended on each level


def test_a_tree_does_not_depend_on_who_else_is_sampled_nor_on_the_engine(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample], paths: list[Trajectory]
) -> None:
    def all_of(found: list[Trajectory]) -> dict[str, tuple[list[int], dict[str, Any]]]:
        return {t.id: (t.sequences[0].tokens.tolist(), t.metadata) for t in found}

    assert all_of(grow(DenseEngine(model, 64), tokenizer, draws)) == all_of(paths)
    assert all_of(grow(PagedEngine(model, 7), tokenizer, list(reversed(draws)))) == all_of(paths)
    alone = all_of(grow(DenseEngine(model, 1), tokenizer, draws[1:2]))
    assert alone == {name: value for name, value in all_of(paths).items() if name.startswith("rows/9>")}


# --- what is shared ----------------------------------------------------------------------------------------------------------


def test_tokens_are_counted_once(model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]) -> None:
    engine = DenseEngine(model, 16)
    found = grow(engine, tokenizer, draws)
    assert RolloutBatch(draws, found, 0.0, 0.0).num_tokens == engine.stats.tokens
    assert sum(t.num_actions for t in found) > 1.5 * engine.stats.tokens


def test_a_tree_of_six_by_six_by_six_prefills_at_most_its_unique_tokens(tools: Any, tokenizer: Tokenizer) -> None:
    """Tokens of the prompt and the inner edges: no request continues tokens of the last level."""
    engine, tree = PagedEngine(tools.decoder(num_layers=1), max_rows=216, num_blocks=2500), TreePlan((6, 6), segment=30)
    engine.reserve(400)
    draws = draws_of(tokenizer, ["0123456789" * 10 + ">"])
    sampling = SamplingOptions(max_tokens=90, stop_tokens=())
    found = list(runner_of(engine, tokenizer).run(draws, 6, sampling, "train", branching=tree))
    assert len(found) == 216
    contexts = {tuple(t.sequences[0].tokens[:end].tolist()) for t in found for end in t.metadata["ends"][:-1]}
    assert len(contexts) == 42
    prompt = len(draws[0].prompt.tokens)
    unique = prompt + 42 * 30
    assert engine.stats.tokens == 258 * 30
    assert engine.stats.prefilled_tokens <= 1.1 * unique
    assert engine.stats.prefilled_tokens <= prompt + 42 * 17  # a page at most for each node, besides its last token
    assert prompt + sum(map(len, contexts)) > 4 * unique  # what a prefill for every node would be


# --- what is trained ---------------------------------------------------------------------------------------------------------


def scored(paths: list[Trajectory]) -> list[Trajectory]:
    return [replace(t, reward=float(sum(t.sequences[0].tokens) % 2), accuracy=0.0) for t in paths]


def test_every_edge_is_trained_on_by_exactly_one_path(paths: list[Trajectory]) -> None:
    wanted = {
        (t.prompt_id, tuple(t.sequences[0].tokens[: p + 1].tolist()), n)
        for t in paths
        for n, a, b in edges(t)
        for p in range(a, b)
    }
    for packed in (scored(paths), list(reversed(scored(paths))), scored(paths)[3:]):
        batch = pack(packed)
        trained = []
        for k, t in enumerate(packed):
            mask = batch.loss_mask[batch.offsets[k] : batch.offsets[k + 1]].tolist()
            trained += [
                (t.prompt_id, tuple(t.sequences[0].tokens[: p + 1].tolist()), n)
                for n, a, b in edges(t)
                for p in range(a, b)
                if mask[p]
            ]
        assert len(trained) == len(set(trained)) == int(batch.loss_mask.sum())
        if len(packed) == len(paths):
            assert set(trained) == wanted
        assert bool((batch.loss_mask <= batch.action_mask).all())


class Learner:
    """Says of every token what the sampler said."""

    def outputs(self, batch: Any, needs: frozenset[str]) -> dict[str, torch.Tensor]:
        return {"logp": batch.token["behaviour_logp"].double()}


def test_the_worked_example_from_the_sampler_to_the_loss(
    model: Decoder, tokenizer: Tokenizer, draws: list[PromptSample]
) -> None:
    """Two samples of a prompt, continued three times each, with rewards [1, 0, 1] and [0, 0, 1]."""
    runner = runner_of(DenseEngine(model), tokenizer)
    found = list(runner.run(draws[:1], 2, replace(ENDLESS, max_tokens=5), "train", branching=TreePlan((3,), segment=2)))
    rewards = [1.0, 0, 1, 0, 0, 1]
    for t in found:
        t.reward = t.accuracy = rewards[t.sample]
    expected = {"0": 1 / 6, "1": -1 / 6} | {
        f"{k // 3}.{k % 3}": r - (2 / 3, 1 / 3)[k // 3] for k, r in enumerate(rewards)
    }
    algorithm = algorithm_from_preset("spo_tree").model_copy(update={"replay": None})
    for order in (found, sorted(found, key=lambda t: t.sample)):
        context = StepContext(Learner())  # type: ignore[arg-type]
        batch = AlgorithmPipeline(algorithm, num_updates=2).prepare(pack(order), context)
        got = {}
        for k, t in enumerate(order):
            part = slice(int(batch.offsets[k]), int(batch.offsets[k + 1]))
            for place, node in enumerate(t.metadata["nodes"]):
                held = batch.token["advantages"][part][batch.token["segment_ids"][part] == place]
                if len(held):
                    assert node not in got
                    got[node] = held.unique().item()
        assert got == pytest.approx(expected, abs=1e-12)


def test_edges_whose_siblings_are_worth_the_same_leave_the_loss(paths: list[Trajectory]) -> None:
    algorithm = algorithm_from_preset("spo_tree").model_copy(update={"replay": None})
    pipeline = AlgorithmPipeline(algorithm, num_updates=2)
    packed = [replace(t, reward=float(t.prompt_id == "rows/9>" and t.metadata["nodes"][0] == "1")) for t in paths]
    context = StepContext(Learner())  # type: ignore[arg-type]
    batch = pipeline.trim(pipeline.prepare(pack(packed), context), context)
    kept = {packed[i].prompt_id for i in batch.sequence["trajectory_ids"].tolist()}
    assert kept == {"rows/9>"}  # the other trees have nothing to compare
    assert bool((batch.token["advantages"][batch.loss_mask] != 0).all())
    assert set(batch.token["segment_ids"][batch.loss_mask].tolist()) == {
        0
    }  # nor have the children of any node of this one
