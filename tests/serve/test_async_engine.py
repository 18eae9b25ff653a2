"""The thread around the engine: every request is answered exactly once, whatever clients do, and nothing stays behind."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from burnish.core.engine import Completion, Request, SamplingOptions
from burnish.core.random_keys import fold
from burnish.gateway.openai_schema import ApiError
from burnish.inference.native.dense_engine import DenseEngine
from burnish.inference.native.paged_engine import PagedEngine
from burnish.inference.transformers_engine import TransformersEngine
from burnish.models.decoder import Decoder
from burnish.models.tokenizer import Tokenizer
from burnish.models.transformers_model import TransformersPolicy
from burnish.serve.async_engine import AsyncEngine, Generation
from burnish.serve.engine_worker import EngineThread
from burnish.serve.request_to_engine import TokenScorer


@pytest.fixture(scope="module")
def model(random_server: Any) -> Decoder:
    random_server.wait_until(random_server.is_idle)
    model: Decoder = random_server.model
    return model


def requests(name: str, num: int, max_tokens: int) -> list[Request]:
    options = SamplingOptions(max_tokens=max_tokens)
    return [Request(f"{name}/{i}", (1, 2 + i), options, fold(name, i)) for i in range(num)]


Run = Callable[..., DenseEngine | PagedEngine]


@pytest.fixture(params=[DenseEngine, PagedEngine], ids=["dense", "paged"])
def run(request: pytest.FixtureRequest, model: Decoder) -> Run:
    """`run(body)` runs a coroutine with a started engine thread; the engine must be empty afterwards."""

    def build(body: Callable[[AsyncEngine], Coroutine[Any, Any, None]], max_unfinished: int = 1000) -> Any:
        loop = AsyncEngine(EngineThread(lambda listener: request.param(model, 6, listener=listener)), max_unfinished)

        async def main() -> None:
            loop.start()
            try:
                await asyncio.wait_for(body(loop), 60)
            finally:
                await asyncio.to_thread(loop.stop)

        asyncio.run(main())
        engine = loop.host.worker.engine
        assert loop.failure is None
        if isinstance(engine, DenseEngine):
            assert [len(engine.rows), len(engine.waiting), len(engine.prefilled), len(engine.waiting_by_prompt)] == [
                0
            ] * 4
        if isinstance(engine, PagedEngine):
            assert [engine.scheduler.num_running, len(engine.waiting), len(engine.ready)] == [0] * 3
        return engine

    return build


async def read(generation: Generation) -> tuple[dict[int, list[int]], dict[int, Completion]]:
    """The streamed tokens and the completions of a generation."""
    tokens: dict[int, list[int]] = {i: [] for i in range(len(generation.requests))}
    ended: dict[int, Completion] = {}
    async for batch in generation.events():
        for event in batch:
            if isinstance(event.payload, Completion):
                assert event.index not in ended
                ended[event.index] = event.payload
            else:
                assert event.index not in ended
                tokens[event.index] += event.payload
    return tokens, ended


def test_random_clients_that_come_and_leave(run: Run, model: Decoder) -> None:
    dice = random.Random(0)
    alone = DenseEngine(model)
    alone.submit([r for k in range(60) for r in requests(str(k), 1 + k % 3, 10 + k % 7)])
    wanted = {c.id: c.tokens.tolist() for c in alone.stream()}

    async def client(loop: AsyncEngine, k: int) -> int:
        await asyncio.sleep(dice.random() * 0.3)
        generation = loop.submit(requests(str(k), 1 + k % 3, 10 + k % 7), wants_tokens=k % 2 == 0)
        if k % 4 == 1:
            await asyncio.sleep(dice.random() * 0.02)
            generation.cancel()
            generation.cancel()
            return 0
        tokens, ended = await read(generation)
        for i, completion in ended.items():
            assert completion.tokens.tolist() == wanted[f"{k}/{i}"]
            assert tokens[i] == (wanted[f"{k}/{i}"] if k % 2 == 0 else [])
        assert len(ended) == len(generation.requests)
        generation.cancel()  # too late: nothing happens
        return 1

    async def body(loop: AsyncEngine) -> None:
        assert sum(await asyncio.gather(*(client(loop, k) for k in range(60)))) == 45
        while loop.num_unfinished:
            await asyncio.sleep(0.001)

    run(body)


def test_a_request_the_engine_refuses_is_told_and_the_others_go_on(run: Run) -> None:
    async def body(loop: AsyncEngine) -> None:
        good = loop.submit(requests("good", 2, 30), wants_tokens=False)
        bad = loop.submit(requests("bad", 2, 10_000), wants_tokens=False)
        with pytest.raises(Exception, match="made for 2048 positions"):
            await read(bad)
        assert len((await read(good))[1]) == 2
        assert loop.num_unfinished == 0

    run(body)


def test_room_is_counted_until_the_engine_has_let_go(run: Run) -> None:
    async def body(loop: AsyncEngine) -> None:
        first = loop.submit(requests("a", 3, 500), wants_tokens=False)
        with pytest.raises(ApiError) as full:
            loop.submit(requests("b", 2, 5), wants_tokens=False)
        assert (full.value.status, full.value.headers) == (429, {"Retry-After": "1"})
        with pytest.raises(ApiError) as never:
            loop.submit(requests("c", 5, 5), wants_tokens=False)
        assert never.value.status == 400
        first.cancel()
        assert loop.num_unfinished == 3
        while loop.num_unfinished:
            await asyncio.sleep(0.001)
        assert len((await read(loop.submit(requests("d", 4, 5), wants_tokens=True)))[1]) == 4

    run(body, max_unfinished=4)


def test_calls_run_on_the_thread_of_the_engine_and_change_no_tokens(run: Run, model: Decoder) -> None:
    alone = DenseEngine(model)
    alone.submit(requests("a", 2, 40))
    wanted = {c.id: c.tokens.tolist() for c in alone.stream()}
    scorer = TokenScorer(model)
    tokens = list(range(1, 40))
    whole = scorer.score(tokens, 1, 2)

    def fail() -> None:
        raise ZeroDivisionError("of the call")

    async def body(loop: AsyncEngine) -> None:
        threads = {await loop.call(threading.get_ident)}
        generation = loop.submit(requests("a", 2, 40), wants_tokens=False)
        for first in (1, 20, 39 - 1):
            scores = await loop.call(lambda first=first: scorer.score(tokens, first, 2))
            assert scores.logp == pytest.approx(whole.logp[first - 1 :], abs=1e-9)
            threads.add(await loop.call(threading.get_ident))
        with pytest.raises(ZeroDivisionError):
            await loop.call(fail)
        found = {c.id: c.tokens.tolist() for c in (await read(generation))[1].values()}
        assert found == wanted
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        pending = asyncio.create_task(loop.call(threading.get_ident))
        await asyncio.sleep(0)
        loop.close()
        with pytest.raises(ApiError, match="shutting down"):
            await pending
        with pytest.raises(ApiError, match="shutting down"):
            await loop.call(threading.get_ident)

    run(body)


def test_stopping_with_requests_running_leaves_the_engine_empty(run: Run) -> None:
    async def body(loop: AsyncEngine) -> None:
        generation = loop.submit(requests("long", 9, 1500), wants_tokens=True)
        async for _ in generation.events():
            break

    assert run(body).stats.tokens < 9 * 1500


def test_an_engine_that_tells_no_tokens_and_cannot_be_stopped_is_served_too(tokenizer: Tokenizer) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": tokenizer.vocab_size}
    policy = TransformersPolicy(GPT2LMHeadModel(GPT2Config(**sizes)).eval())
    thread = EngineThread(lambda _: TransformersEngine(policy, 2, tokenizer.decode, tokenizer.pad_id))
    loop = AsyncEngine(thread, max_unfinished=20)

    async def main() -> None:
        loop.start()
        first = loop.submit(requests("a", 3, 20), wants_tokens=True)
        second = loop.submit(requests("b", 3, 20), wants_tokens=True)
        second.cancel()
        tokens, ended = await read(first)
        assert tokens == {0: [], 1: [], 2: []}
        assert [len(ended[i].tokens) for i in range(3)] == [20] * 3
        while loop.num_unfinished:
            await asyncio.sleep(0.001)
        await asyncio.to_thread(loop.stop)

    asyncio.run(asyncio.wait_for(main(), 60))
    assert loop.failure is None
