"""An engine in a process of its own gives the same answers as one in a thread, and its end is told."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from burnish.cli.serve import load_engine
from burnish.config.errors import UserError
from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.evaluation.model_source import find_model
from burnish.serve.async_engine import AsyncEngine, EngineHost, Generation
from burnish.serve.engine_process import EngineProcess, ProcessScorer
from burnish.serve.engine_worker import EngineFailure, EngineThread, LoadedEngine
from burnish.serve.request_to_engine import Scorer, TokenScores

Answers = list[tuple[dict[int, list[int]], dict[int, Completion]]]


def loader(path: Path, **changed: object) -> partial[LoadedEngine]:
    options = {"device": "cpu", "dtype": "float64", "max_rows": 4}
    options |= {"cache_gib": None, "cache_dtype": "auto", "weights": "model"}
    names = {"name": None, "model": path, "max_tokens": None, "call_format": None, "image_folder": None}
    return partial(load_engine, argparse.Namespace(**(options | names | changed)), find_model(path))


def requests(name: str, num: int, max_tokens: int) -> list[Request]:
    options = SamplingOptions(max_tokens=max_tokens)
    return [Request(f"{name}/{i}", (1, 2 + i), options, fold(name, i)) for i in range(num)]


async def read(generation: Generation) -> tuple[dict[int, list[int]], dict[int, Completion]]:
    tokens: dict[int, list[int]] = {}
    ended: dict[int, Completion] = {}
    async for batch in generation.events():
        for event in batch:
            if isinstance(event.payload, Completion):
                ended[event.index] = event.payload
            else:
                tokens.setdefault(event.index, []).extend(event.payload)
    return tokens, ended


async def answers(loop: AsyncEngine, scorer: Scorer) -> tuple[Answers, TokenScores]:
    """Several generations at once, one that is cancelled, one that the engine refuses, and scores."""
    cancelled = loop.submit(requests("cancelled", 1, 100_000), wants_tokens=False)
    open_ones = [loop.submit(requests(str(k), 1 + k, 20), wants_tokens=k % 2 == 0) for k in range(5)]
    refused = loop.submit(requests("refused", 1, 10_000_000), wants_tokens=False)
    with pytest.raises(UserError, match="made for 131072 positions"):
        await read(refused)
    cancelled.cancel()
    scores = await loop.call(partial(scorer.score, list(range(1, 40)), 1, 2))
    found = [await read(one) for one in open_ones]
    while loop.num_unfinished:
        await asyncio.sleep(0.001)
    return found, scores


async def started(host: EngineHost) -> AsyncEngine:
    loop = AsyncEngine(host, 1000)
    loop.start()
    return loop


def test_it_answers_as_a_thread_does_and_a_killed_one_ends_all_generations(model_directory: Path) -> None:
    load = loader(model_directory)
    process = EngineProcess(load)
    loaded = load()
    thread = EngineThread(loaded.make_engine)

    async def main() -> None:
        wanted, wanted_scores = await answers(await started(thread), loaded.scorer)
        served, note = await asyncio.to_thread(process.wait_until_loaded)
        assert (served.num_embeddings, served.max_positions) == (served.tokenizer.vocab_size, 131072)
        assert note.endswith("float64")
        loop = await started(process)
        found, scores = await answers(loop, ProcessScorer())
        assert scores == wanted_scores
        for (tokens, ended), (wanted_tokens, wanted_ended) in zip(found, wanted, strict=True):
            assert tokens == wanted_tokens
            for i, completion in wanted_ended.items():
                assert ended[i].tokens.tolist() == completion.tokens.tolist()
                assert ended[i].logp.tolist() == completion.logp.tolist()
        failed = asyncio.Event()
        loop.on_failure = failed.set
        generation = loop.submit(requests("long", 2, 100_000), wants_tokens=True)
        await anext(generation.events())
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineFailure, match="ended with code -9"):
            await read(generation)
        await failed.wait()
        assert loop.num_unfinished == 0
        await asyncio.to_thread(process.stop)
        await asyncio.to_thread(thread.stop)

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.slow
def test_an_error_of_the_user_while_it_loads_is_raised_in_the_parent(model_directory: Path) -> None:
    process = EngineProcess(loader(model_directory, cache_gib=1e-9))
    with pytest.raises(UserError, match="the KV cache"):
        process.wait_until_loaded()
