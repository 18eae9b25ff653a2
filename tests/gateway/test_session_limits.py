"""What one session may have under way, and what it keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from burnish.gateway import session as session_module
from burnish.gateway.calls import ModelCall
from burnish.gateway.openai_schema import ApiError
from burnish.gateway.session import AgentSession, Sampled, SampleRequest, SessionLimits, SessionSpent
from burnish.gateway.session_renderer import SessionRenderer
from tests.environments.chat_templates import small_tokenizer

TOKENIZER = small_tokenizer("qwen2.5")


class Waiting:
    """A session whose samples wait until they are answered."""

    def __init__(self, max_calls: int = 100) -> None:
        self.samples: list[SampleRequest] = []
        limits = SessionLimits(max_calls, 16)
        self.session = AgentSession("s", "http://x", SessionRenderer(TOKENIZER), limits, self.samples.append)

    async def call(self, number: int, num_bytes: int = 10, **more: Any) -> asyncio.Task[Any]:
        """Begin a call, and let it get as far as it can without an answer."""
        call = ModelCall(messages=({"role": "user", "content": str(number)},), **more)
        answering = asyncio.ensure_future(self.session.answer(call, b"%d" % number, num_bytes, None, False))
        for _ in range(5):
            await asyncio.sleep(0)
        return answering

    async def answer_all(self, calls: list[asyncio.Task[Any]]) -> None:
        for sample in self.samples:
            sample.complete(Sampled([TOKENIZER.eos_ids[0]], [-0.1], [0], "stop"))
        self.samples.clear()
        await asyncio.gather(*calls)


def test_more_samples_at_once_than_allowed_are_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_OPEN_SAMPLES", 4)

    async def run() -> None:
        agent = Waiting()
        calls = [await agent.call(0, n=3), await agent.call(1)]
        with pytest.raises(ApiError, match=r"4 samples .* under way; it may have 4") as refused:
            await (await agent.call(2))
        assert (refused.value.status, refused.value.code) == (429, "too_many_calls")
        assert refused.value.headers == {"Retry-After": "1"}
        assert len(agent.samples) == 4
        await agent.answer_all(calls)
        await agent.answer_all([await agent.call(2, n=5)])  # alone, a call may ask for more
        assert agent.session.counts["calls_refused_busy"] == 1

    asyncio.run(run())


def test_more_bytes_at_once_than_allowed_are_told_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "MAX_OPEN_BYTES", 1000)

    async def run() -> None:
        agent = Waiting()
        calls = [await agent.call(0, num_bytes=2000)]
        with pytest.raises(ApiError, match="2000 bytes of requests under way"):
            await (await agent.call(1))
        await agent.answer_all(calls)
        await agent.answer_all([await agent.call(1)])

    asyncio.run(run())


def test_calls_that_were_refused_leave_nothing_behind() -> None:
    async def run() -> None:
        agent = Waiting(max_calls=1)
        await agent.answer_all([await agent.call(0)])
        for number in range(1, 50):
            with pytest.raises(SessionSpent):
                await (await agent.call(number))
        assert len(agent.session._answers) == 1
        assert agent.session.counts["calls_past_limit"] == 49

    asyncio.run(run())
