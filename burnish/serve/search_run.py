"""`ServedSearch` runs one search over the server's engine, beside ordinary requests, on the event loop.

Its requests are submitted in waves: as many as the engine has room for, and no more than a share of all requests that the server
holds. The strategy itself runs in a thread, one step at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from burnish.core.engine import Completion, Request
from burnish.evaluation.strategies.search_program import SearchProgram, node_index
from burnish.evaluation.strategies.search_tree import mean_logp
from burnish.evaluation.strategies.verifiers import PACK_TOKENS
from burnish.gateway.openai_responses import EngineEvent
from burnish.gateway.openai_schema import nan_error
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.serve.async_engine import AsyncEngine, Generation
from burnish.serve.request_to_engine import Scorer

SEARCH_SHARE = 4
"""One search has at most 1 / SEARCH_SHARE of the requests that the server holds at the same time."""
Results = Sequence[Completion | Score]


class SearchVerifier(Protocol):
    """Scores the paths of searches."""

    delimiter: str | None
    """What ends the steps that it scores; None if it scores any text."""

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return the scores of all requests."""


class CertaintyVerifier:
    """Self-certainty, computed by the engine's model between two of its steps."""

    delimiter: str | None = None

    def __init__(self, engine: AsyncEngine, scorer: Scorer) -> None:
        self._engine, self._scorer = engine, scorer

    async def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return the scores. Each pass is a call of its own, so that the engine decodes between them."""
        found: list[Score] = []
        for part in _packed(requests):
            # Texts and messages are not needed, and may go to another process.
            light = [replace(one, prompt="", completion="") for one in part]
            values = await self._engine.call(partial(self._scorer.self_certainty, light))
            found += [
                Score(one.id, value, None, num_tokens=len(list(one.tokens or ())))
                for one, value in zip(part, values, strict=True)
            ]
        return found


def _packed(requests: Sequence[ScoreRequest]) -> list[list[ScoreRequest]]:
    """Split requests into parts of at most `PACK_TOKENS` tokens; a longer one stands alone."""
    parts: list[list[ScoreRequest]] = []
    total = 0
    for one in requests:
        size = len(list(one.tokens or ()))
        if not parts or total + size > PACK_TOKENS:
            parts.append([])
            total = 0
        parts[-1].append(one)
        total += size
    return parts


class ServedSearch:
    """A search and its requests. `name` tells it from all others of the server."""

    def __init__(self, name: str, program: SearchProgram, engine: AsyncEngine, verifier: SearchVerifier | None) -> None:
        """Without `verifier`, scores are mean log-probs."""
        self.name, self.program, self.engine, self.verifier = name, program, engine, verifier
        self.has_results = asyncio.Event()
        """Set when the search has taken its first results, so the engine has accepted its requests, and when it has ended."""
        self.wall_s = 0.0
        """Seconds from the start of the search to its end."""
        self._most = max(1, engine.max_unfinished // SEARCH_SHARE)
        self._waiting: deque[Request] = deque()
        self._num_running = 0
        self._is_submitting = False
        self._generations: list[Generation] = []
        self._tasks: set[asyncio.Task[Results]] = set()

    async def run(self) -> None:
        """Run the search until it has chosen. Cancel this to end it early; its requests end with it."""
        results: Results = ()
        started = time.perf_counter()
        try:
            while True:
                requests, scores = await asyncio.to_thread(self._advance, results)
                if self.program.is_done:
                    return
                if results:
                    self.has_results.set()
                self._start(requests, scores)
                if not self._tasks:
                    raise RuntimeError(f"{self.name}: the search waits for nothing")
                results = await self._next_results()
        finally:
            self.wall_s = time.perf_counter() - started
            self.has_results.set()
            self.cancel()

    def cancel(self) -> None:
        """Abort the unfinished requests. Further calls do nothing."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()
        for generation in self._generations:
            generation.cancel()
        self._generations.clear()

    def _advance(self, results: Results) -> tuple[list[Request], list[ScoreRequest]]:
        """Give the program its results, and return what it waits for. Runs in a thread, alone."""
        program = self.program
        for one in results:
            if isinstance(one, Completion):
                if not np.isfinite(one.logp).all():
                    raise nan_error()
                program.take(one)
            else:
                program.take_score(one)
        requests: list[Request] = []
        while not program.is_done:
            requests += program.requests()
            scores = program.score_requests()
            if self.verifier is not None or not scores:
                return self._named(requests), [replace(s, id=self._id(s.id)) for s in scores]
            for score in scores:
                node = program.search.nodes[node_index(score.id)]
                program.take_score(Score(score.id, mean_logp(node), None, num_tokens=0))
        return [], []

    def _named(self, requests: Sequence[Request]) -> list[Request]:
        return [replace(request, id=self._id(request.id)) for request in requests]

    def _id(self, request: str) -> str:
        """The id of a request among those of all searches. Searches for one question have the same names for theirs."""
        return f"{self.name}/{node_index(request)}"

    def _start(self, requests: Sequence[Request], scores: Sequence[ScoreRequest]) -> None:
        """Start what the program waits for."""
        self._waiting += requests
        if self._waiting and not self._is_submitting and self._num_running < self._most:
            self._is_submitting = True
            self._spawn(self._submit())
        if scores:
            assert self.verifier is not None
            self._spawn(self.verifier.score(scores))

    def _spawn(self, work: Coroutine[Any, Any, Results]) -> None:
        self._tasks.add(asyncio.create_task(work))

    async def _next_results(self) -> Results:
        """Wait for the next tasks that end, and return what they bring, perhaps nothing."""
        done, self._tasks = await self._ended()
        failed = [error for task in done if (error := task.exception()) is not None]
        if failed:
            raise failed[0]
        return [one for task in done for one in task.result()]

    async def _ended(self) -> tuple[set[asyncio.Task[Results]], set[asyncio.Task[Results]]]:
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        return done, self._tasks - done  # a task may have added others meanwhile

    async def _submit(self) -> Results:
        """Submit the next wave."""
        wanted = list(self._waiting)[: self._most - self._num_running]
        generation = await self.engine.submit_when_free(wanted)
        self._generations.append(generation)
        for _ in generation.requests:
            self._waiting.popleft()
        self._num_running += len(generation.requests)
        self._is_submitting = False
        self._spawn(self._take_batch(generation, generation.events()))
        return ()

    async def _take_batch(self, generation: Generation, events: AsyncIterator[list[EngineEvent]]) -> Results:
        """Return the completions of the next batch of a generation, and start to wait for the one after it."""
        batch = await anext(events, None)
        if batch is None:
            self._generations.remove(generation)
            return ()
        found = [event.payload for event in batch if isinstance(event.payload, Completion)]
        self._num_running -= len(found)
        self._spawn(self._take_batch(generation, events))
        return found
