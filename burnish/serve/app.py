"""The web application: OpenAI's routes, answered by an engine.

GET  /v1/models, /v1/models/NAME      what is served
POST /v1/completions                  texts or token ids, continued
POST /v1/chat/completions             a dialogue, continued
POST /tokenize, /detokenize           texts and dialogues as token ids, and back
GET  /health                          whether the server serves
GET  /metrics                         counts, for Prometheus
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from burnish.config.errors import UserError
from burnish.core.engine import Request as EngineRequest
from burnish.core.engine import SamplingOptions
from burnish.serve.connections import HEALTH
from burnish.serve.engine_thread import EngineFailure, EngineLoop, Event, Generation
from burnish.serve.metrics import CONTENT_TYPE, Metrics
from burnish.serve.openai_schema import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    draws_likeliest,
    internal_error,
    not_a_number,
    num_alternatives,
    parse,
)
from burnish.serve.request_bodies import Intake
from burnish.serve.request_to_engine import (
    Scorer,
    Scores,
    Served,
    chat_prompt,
    check_model,
    check_scored,
    completion_prompts,
    detokenized,
    engine_requests,
    offered_tools,
    tokenized,
)
from burnish.serve.responses import Answer, ChatAnswer, Choices, CompletionAnswer, Delta, Echo

T = TypeVar("T")
DONE = "data: [DONE]\n\n"
CLIENT_LEFT = 499  # nginx's number for it


@dataclass
class Api:
    """The endpoints and what they need."""

    served: Served
    loop: EngineLoop
    max_body: int
    """Bytes of one request."""

    scorer: Scorer
    """Scores prompts and alternatives, on the engine's thread."""

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.metrics = Metrics()
        self.intake = Intake(self.max_body)

    async def models(self, request: Request) -> Response:
        """The one model there is."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """The same, asked for by its name."""
        check_model(request.path_params["name"], self.served)
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """200 while requests are taken, else 503."""
        self.loop.check_open()
        return JSONResponse({"status": "ok"})

    async def counts(self, request: Request) -> Response:
        """The metrics."""
        return Response(self.metrics.text(self.loop, self.intake.num_bytes), media_type=CONTENT_TYPE)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or of a dialogue."""
        return JSONResponse(
            await self.intake.work(request, lambda body: tokenized(parse(TokenizeRequest, body), self.served))
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return JSONResponse(
            await self.intake.work(request, lambda body: detokenized(parse(DetokenizeRequest, body), self.served))
        )

    def _card(self) -> dict[str, object]:
        return {"id": self.served.name, "object": "model", "created": self.created, "owned_by": "burnish"}

    async def completions(self, request: Request) -> Response:
        """Continue texts or token ids."""
        name = f"cmpl-{uuid.uuid4().hex}"

        def prepare(body: bytearray) -> tuple[CompletionRequest, list[EngineRequest]]:
            asked = parse(CompletionRequest, body)
            check_model(asked.model, self.served)
            self.loop.check_room(asked.n * len(asked.prompt))
            requests = engine_requests(asked, completion_prompts(asked, self.served), self.served, name)
            check_scored(asked, requests)
            # Texts that are no part of the answer are not held while tokens are sampled.
            return asked if asked.echo else asked.model_copy(update={"prompt": []}), requests

        asked, requests = await self.intake.work(request, prepare)
        answer = CompletionAnswer(name, asked, requests, self.served.tokenizer)
        if asked.echo:
            answer.echoes = await unless_left(request, self._echoes(asked, requests))
        if asked.max_tokens == 0:
            self.metrics.prompt_tokens += answer.num_prompt_tokens
            request.state.note = lambda: f"{answer.num_prompt_tokens} tokens scored"
            deltas = [Delta(i, logp=[], top=[], finish="length") for i in range(len(requests))]
            return JSONResponse(await asyncio.to_thread(answer.whole, deltas, 0))
        return await self._answer(request, requests, answer)

    async def _echoes(self, asked: CompletionRequest, requests: list[EngineRequest]) -> list[Echo]:
        """The prompts, with their log-probs where they are wanted."""
        found = []
        for prompt, one in zip(asked.prompt, requests[:: asked.n], strict=True):
            tokens = list(one.tokens)
            echo = Echo(prompt if isinstance(prompt, str) else self.served.tokenizer.decode(tokens), tokens)
            if asked.logprobs is not None:
                scores = await self._score(tokens, 1, asked.logprobs) if len(tokens) > 1 else Scores()
                echo.logp, echo.top = scores.logp, scores.top
            found.append(echo)
        return found

    async def _score(
        self, tokens: Sequence[int], first: int, num_top: int, options: SamplingOptions | None = None
    ) -> Scores:
        scores = await self.loop.call(lambda: self.scorer.score(tokens, first, num_top, options))
        if not all(map(math.isfinite, scores.logp)) and options is None:
            raise not_a_number()
        return scores

    async def _complete(self, delta: Delta, asked: CompletionRequest | ChatRequest, request: EngineRequest) -> Delta:
        """A choice with the alternatives to its tokens, if it has ended and they are wanted."""
        num_top = num_alternatives(asked)
        if delta.finish is None or num_top <= (1 if draws_likeliest(asked) else 0):
            return delta
        options = None if asked.raw_logprobs else request.sampling
        scores = await self._score([*request.tokens, *delta.tokens], len(request.tokens), num_top, options)
        return replace(delta, top=scores.top)

    async def chat(self, request: Request) -> Response:
        """Continue a dialogue."""
        name = f"chatcmpl-{uuid.uuid4().hex}"

        def prepare(body: bytearray) -> tuple[ChatRequest, list[EngineRequest], bool]:
            asked = parse(ChatRequest, body)
            check_model(asked.model, self.served)
            self.loop.check_room(asked.n)
            requests = engine_requests(asked, [chat_prompt(asked, self.served)], self.served, name)
            check_scored(asked, requests)
            light = asked.model_copy(update={"messages": [], "tools": [], "chat_template_kwargs": {}})
            return light, requests, bool(offered_tools(asked))

        asked, requests, with_calls = await self.intake.work(request, prepare)
        answer = ChatAnswer(name, asked, requests, self.served.tokenizer)
        return await self._answer(request, requests, answer, with_calls)

    async def _answer(
        self, request: Request, requests: list[EngineRequest], answer: Answer, with_calls: bool = False
    ) -> Response:
        asked = answer.asked
        has_logprobs = asked.logprobs if isinstance(asked, ChatRequest) else asked.logprobs is not None
        # The engine returns log-probs with the completion, so a stream with log-probs has each choice in one chunk.
        generation = self.loop.submit(requests, wants_tokens=asked.stream and not has_logprobs)
        self.metrics.prompt_tokens += answer.num_prompt_tokens
        choices = Choices(requests, self.served.tokenizer, with_calls)

        async def deltas(batch: list[Event]) -> list[Delta]:
            return [await self._complete(delta, asked, requests[delta.index]) for delta in choices.take(batch)]

        request.state.note = lambda: (
            f"{answer.num_prompt_tokens} + {choices.num_tokens} tokens, "
            f"{', '.join(f'{num} {finish}' for finish, num in choices.finishes.items()) or 'none finished'}"
        )
        events = generation.events()
        try:
            if not asked.stream:
                return await unless_left(request, whole(events, choices, deltas, answer))
            # The first events before the headers: what the engine refuses has a status of its own.
            first = await unless_left(request, anext(events))
            return EventStream(generation, chunks(first, events, choices, deltas, answer))
        except UserError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        except BaseException:
            generation.cancel()
            raise


async def unless_left(request: Request, wanted: Awaitable[T]) -> T:
    """What is awaited, unless the client leaves before."""

    async def work() -> T:
        return await wanted

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work()), asyncio.create_task(left())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()


Deltas = Callable[[list[Event]], Awaitable[list[Delta]]]


async def whole(events: AsyncIterator[list[Event]], choices: Choices, deltas: Deltas, answer: Answer) -> Response:
    """The answer in one piece."""
    found = [delta async for batch in events for delta in await deltas(batch)]
    # In a thread: the names of tokens with log-probs take a decoding each.
    return JSONResponse(await asyncio.to_thread(answer.whole, found, choices.num_tokens))


async def chunks(
    first: list[Event], events: AsyncIterator[list[Event]], choices: Choices, deltas: Deltas, answer: Answer
) -> AsyncIterator[str]:
    """The answer as server-sent events; a failure after the first can only be one of them."""
    try:
        yield "".join([event(answer.chunk(delta)) for delta in await deltas(first)])
        async for batch in events:
            # One write for all that came meanwhile: writing costs more than anything else here.
            if text := "".join([event(answer.chunk(delta)) for delta in await deltas(batch)]):
                yield text
        yield event(answer.last_chunk(choices.num_tokens)) + DONE
    except ApiError as error:
        yield event(error.body())
    except EngineFailure:
        yield event(internal_error().body())


def event(value: dict[str, Any] | None) -> str:
    """A server-sent event; nothing where there is nothing to say."""
    if value is None:
        return ""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'), allow_nan=False)}\n\n"


class EventStream(StreamingResponse):
    """A stream that stops its generation however it ends, also when the client leaves in the middle."""

    def __init__(self, generation: Generation, content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self.generation = generation

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.generation.cancel()


def make_app(api: Api) -> Starlette:
    """The application; its lifetime is that of the engine's thread."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        api.loop.start()
        yield
        await asyncio.to_thread(api.loop.stop)

    return Starlette(
        routes=[
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
            Route(HEALTH, api.health),
            Route("/metrics", api.counts),
        ],
        lifespan=lifespan,
        exception_handlers={
            ApiError: _refused,
            HTTPException: _no_route,
            ClientDisconnect: _left,
            EngineFailure: _failed,
            Exception: _failed,
        },
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.note = lambda: error.message
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return await _refused(request, ApiError(error.status_code, message, code=code, headers=error.headers))


async def _left(request: Request, error: Exception) -> Response:
    """The client has disconnected: only the log shows this status."""
    return Response(status_code=CLIENT_LEFT)


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of the server: the client gets a plain 500, and uvicorn logs the traceback."""
    return await _refused(request, internal_error())
