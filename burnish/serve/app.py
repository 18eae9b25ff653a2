"""The web application: the routes of OpenAI's and Anthropic's APIs around an engine, and its metrics.

GET  /v1/models, /v1/models/NAME      the model
POST /v1/completions                  continue texts or token ids
POST /v1/chat/completions             continue a dialogue
POST /v1/responses, /v1/messages      the same in OpenAI's newer and in Anthropic's form
POST /v1/responses/input_tokens, /v1/messages/count_tokens      count the tokens of a prompt
POST /tokenize, /detokenize           texts and dialogues as token ids, and back
GET  /health                          whether the server accepts requests
GET  /metrics                         metrics for Prometheus
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from burnish.config.errors import UserError
from burnish.core.engine import Request as EngineRequest
from burnish.core.engine import SamplingOptions
from burnish.evaluation.strategies.spec import SELF_CERTAINTY
from burnish.gateway.calls import ModelCall
from burnish.gateway.completion_text import OfferedTools
from burnish.gateway.connections import HEALTH
from burnish.gateway.openai_responses import (
    ApiResponse,
    ChatResponse,
    ChoiceDelta,
    Choices,
    CompletionResponse,
    EchoedPrompt,
    EngineEvent,
)
from burnish.gateway.openai_schema import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    draws_likeliest,
    internal_error,
    nan_error,
    num_alternatives,
    parse_body,
)
from burnish.gateway.protocols import MESSAGES, RESPONSES, CallProtocol, error_at
from burnish.gateway.request_bodies import BodyReader
from burnish.serve.async_engine import AsyncEngine
from burnish.serve.disconnects import EventStream, unless_disconnected
from burnish.serve.engine_worker import EngineFailure
from burnish.serve.other_protocols import call_answer, chat_request, without_messages
from burnish.serve.request_to_engine import (
    Scorer,
    ServedModel,
    TokenScores,
    chat_prompt,
    check_model,
    check_scored_length,
    completion_prompts,
    detokenize_response,
    engine_requests,
    offered_tools,
    tokenize_response,
)
from burnish.serve.search_answer import CallSearchAnswer, ChoiceSearchAnswer, SearchAnswer
from burnish.serve.search_request import MAX_SEARCH_TOKENS, open_search, search_request
from burnish.serve.search_response import OpenedSearch, search_response
from burnish.serve.search_run import CertaintyVerifier, SearchVerifier, ServedSearch
from burnish.serve.server_metrics import ServerMetrics

SSE_DONE = "data: [DONE]\n\n"
MAX_NAMES_AT_ONCE = 4096
"""Most tokens of an answer that is made on the event loop, which takes about a millisecond."""
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that disconnected
METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


@dataclass
class Api:
    """The endpoints."""

    served: ServedModel
    async_engine: AsyncEngine
    max_body: int
    """Most bytes of a request body."""

    scorer: Scorer
    """Scores prompts and alternatives, on the engine's thread."""
    verifiers: Mapping[str, SearchVerifier] = field(default_factory=dict)
    """What searches may compare candidates by, besides what needs the model alone, by the names that clients use."""
    max_search_tokens: int = MAX_SEARCH_TOKENS
    """Most tokens that one search may sample."""

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self.metrics = ServerMetrics()
        self.bodies = BodyReader(self.max_body)

    async def models(self, request: Request) -> Response:
        """List the one model."""
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Describe the model by its name."""
        check_model(request.path_params["name"], self.served)
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """200 while requests are accepted, else 503."""
        self.async_engine.check_open()
        return JSONResponse({"status": "ok"})

    async def counts(self, request: Request) -> Response:
        """The metrics in Prometheus' format."""
        return Response(self.metrics.text(self.async_engine, self.bodies.num_bytes), media_type=METRICS_CONTENT_TYPE)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text or of a dialogue."""
        return JSONResponse(
            await self.bodies.work(
                request, lambda body: tokenize_response(parse_body(TokenizeRequest, body), self.served)
            )
        )

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return JSONResponse(
            await self.bodies.work(
                request, lambda body: detokenize_response(parse_body(DetokenizeRequest, body), self.served)
            )
        )

    def _card(self) -> dict[str, object]:
        return {"id": self.served.name, "object": "model", "created": self.created, "owned_by": "burnish"}

    async def completions(self, request: Request) -> Response:
        """Continue texts or token ids."""
        name = f"cmpl-{uuid.uuid4().hex}"

        def prepare(body: bytearray) -> tuple[CompletionRequest, list[EngineRequest], OpenedSearch | None]:
            asked = parse_body(CompletionRequest, body)
            check_model(asked.model, self.served)
            found = search_request(asked, self.verifiers, self.max_search_tokens)
            self.async_engine.check_room(asked.n * len(asked.prompt))
            requests = engine_requests(asked, completion_prompts(asked, self.served), self.served, name)
            check_scored_length(asked, requests)
            search = None if found is None else OpenedSearch(found, open_search(asked, found, requests[0], self.served))
            # Drop texts that the answer does not need, to free their memory while tokens are sampled.
            return asked if asked.echo else asked.model_copy(update={"prompt": []}), requests, search

        asked, requests, search = await self.bodies.work(request, prepare)
        answer = CompletionResponse(name, asked, requests, self.served.tokenizer)
        if search is not None:
            return await self._search(request, name, search, ChoiceSearchAnswer(answer))
        if asked.echo:
            answer.echoes = await unless_disconnected(request, self._echoes(asked, requests))
        if asked.max_tokens == 0:
            self.metrics.prompt_tokens += answer.num_prompt_tokens
            request.state.note = lambda: f"{answer.num_prompt_tokens} tokens scored"
            deltas = [ChoiceDelta(i, logp=[], top=[], finish="length") for i in range(len(requests))]
            return await json_response(answer, deltas, 0)
        return await self._answer(request, requests, answer)

    async def _echoes(self, asked: CompletionRequest, requests: list[EngineRequest]) -> list[EchoedPrompt]:
        """The prompts, with their log-probs if asked for."""
        found = []
        for prompt, one in zip(asked.prompt, requests[:: asked.n], strict=True):
            tokens = list(one.tokens)
            echo = EchoedPrompt(prompt if isinstance(prompt, str) else self.served.tokenizer.decode(tokens), tokens)
            if asked.logprobs is not None:
                scores = await self._score(tokens, 1, asked.logprobs) if len(tokens) > 1 else TokenScores()
                echo.logp, echo.top = scores.logp, scores.top
            found.append(echo)
        return found

    async def _score(
        self, tokens: Sequence[int], first: int, num_top: int, options: SamplingOptions | None = None
    ) -> TokenScores:
        scores = await self.async_engine.call(partial(self.scorer.score, tokens, first, num_top, options))
        if not all(map(math.isfinite, scores.logp)) and options is None:
            raise nan_error()
        return scores

    async def _complete(
        self, delta: ChoiceDelta, asked: CompletionRequest | ChatRequest, request: EngineRequest
    ) -> ChoiceDelta:
        """Add the top log-probs to a choice that has ended, if asked for."""
        num_top = num_alternatives(asked)
        if delta.finish is None or num_top <= (1 if draws_likeliest(asked) else 0):
            return delta
        options = None if asked.raw_logprobs else request.sampling
        scores = await self._score([*request.tokens, *delta.tokens], len(request.tokens), num_top, options)
        return replace(delta, top=scores.top)

    async def chat(self, request: Request) -> Response:
        """Continue a dialogue."""
        name = f"chatcmpl-{uuid.uuid4().hex}"

        def prepare(body: bytearray) -> PreparedChat:
            asked = parse_body(ChatRequest, body)
            check_model(asked.model, self.served)
            found = search_request(asked, self.verifiers, self.max_search_tokens)
            self.async_engine.check_room(asked.n)
            requests = engine_requests(asked, [chat_prompt(asked, self.served)], self.served, name)
            check_scored_length(asked, requests)
            search = None if found is None else OpenedSearch(found, open_search(asked, found, requests[0], self.served))
            light = asked.model_copy(update={"messages": [], "tools": [], "chat_template_kwargs": {}})
            schemas = offered_tools(asked)
            return light, requests, OfferedTools(self.served.tool_calls, schemas) if schemas else None, search

        asked, requests, offered, search = await self.bodies.work(request, prepare)
        answer = ChatResponse(name, asked, requests, self.served.tokenizer)
        if search is not None:
            return await self._search(request, name, search, ChoiceSearchAnswer(answer))
        return await self._answer(request, requests, answer, offered)

    def spoken(self, protocol: CallProtocol) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint of another protocol. It samples the whole answer and then writes it, also as a stream."""

        def prepare(body: bytearray, headers: Mapping[str, str], name: str) -> PreparedCall:
            call = protocol.parse(body, headers)
            asked = chat_request(call)
            check_model(asked.model, self.served)
            found = search_request(asked, self.verifiers, self.max_search_tokens)
            self.async_engine.check_room(1)
            (one,) = engine_requests(asked, [chat_prompt(asked, self.served)], self.served, name)
            search = None if found is None else OpenedSearch(found, open_search(asked, found, one, self.served))
            schemas = offered_tools(asked)
            offered = OfferedTools(self.served.tool_calls, schemas) if schemas else None
            return without_messages(call), one, offered, search

        async def endpoint(request: Request) -> Response:
            name = uuid.uuid4().hex
            headers = request.headers
            call, one, offered, search = await self.bodies.work(request, lambda body: prepare(body, headers, name))
            if search is not None:
                chosen = CallSearchAnswer(protocol, call, name, one, self.served.tokenizer)
                return await self._search(request, name, search, chosen)
            delta = await self._sample(request, one, offered)
            answer = await asyncio.to_thread(call_answer, name, one, delta, self.served.tokenizer, call.logprobs)
            if not call.is_stream:
                return JSONResponse(protocol.whole(call, answer))
            text = "".join(protocol.events(call, answer))
            return Response(text, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

        return endpoint

    async def _sample(self, request: Request, one: EngineRequest, offered: OfferedTools | None) -> ChoiceDelta:
        """The whole completion of one request."""
        generation = self.async_engine.submit([one], wants_tokens=False)
        self.metrics.prompt_tokens += len(one.tokens)
        choices = Choices([one], self.served.tokenizer, offered)
        request.state.note = lambda: f"{len(one.tokens)} + {choices.num_tokens} tokens"

        async def collect() -> ChoiceDelta:
            (delta,) = [delta async for batch in generation.events() for delta in choices.take(batch)]
            return delta

        try:
            return await unless_disconnected(request, collect())
        except UserError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        except BaseException:
            generation.cancel()
            raise

    def counted(self, protocol: CallProtocol) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint that counts the tokens of a protocol's prompts."""

        async def endpoint(request: Request) -> Response:
            headers = request.headers

            def count(body: bytearray) -> int:
                asked = chat_request(protocol.parse(body, headers))
                check_model(asked.model, self.served)
                return len(chat_prompt(asked, self.served).tokens)

            return JSONResponse(protocol.token_count(await self.bodies.work(request, count)))

        return endpoint

    async def _answer(
        self, request: Request, requests: list[EngineRequest], answer: ApiResponse, offered: OfferedTools | None = None
    ) -> Response:
        asked = answer.asked
        has_logprobs = asked.logprobs if isinstance(asked, ChatRequest) else asked.logprobs is not None
        # Log-probs come with the completion, so a stream with log-probs has each choice in one chunk.
        generation = self.async_engine.submit(requests, wants_tokens=asked.stream and not has_logprobs)
        self.metrics.prompt_tokens += answer.num_prompt_tokens
        choices = Choices(requests, self.served.tokenizer, offered)

        async def deltas(batch: list[EngineEvent]) -> list[ChoiceDelta]:
            return [await self._complete(delta, asked, requests[delta.index]) for delta in choices.take(batch)]

        request.state.note = lambda: (
            f"{answer.num_prompt_tokens} + {choices.num_tokens} tokens, "
            f"{', '.join(f'{num} {finish}' for finish, num in choices.finishes.items()) or 'none finished'}"
        )
        events = generation.events()
        try:
            if not asked.stream:
                return await unless_disconnected(request, whole_response(events, choices, deltas, answer))
            # Await the first events before the headers: a request that the engine refuses needs an error status.
            first = await unless_disconnected(request, anext(events))
            return EventStream(generation, sse_chunks(first, events, choices, deltas, answer))
        except UserError as error:
            raise ApiError(400, str(error), code="invalid_value") from error
        except BaseException:
            generation.cancel()
            raise

    async def _search(self, request: Request, name: str, opened: OpenedSearch, answer: SearchAnswer) -> Response:
        """The answer that a strategy chooses."""
        found, program = opened
        verifier = self.verifiers.get(found.verifier) if found.verifier is not None else None
        if found.verifier == SELF_CERTAINTY:
            verifier = CertaintyVerifier(self.async_engine, self.scorer)
        search = ServedSearch(name, program, self.async_engine, verifier)
        self.metrics.prompt_tokens += answer.num_prompt_tokens
        cost = program.search.cost
        request.state.note = lambda: (
            f"{answer.num_prompt_tokens} + {cost.tokens} tokens, strategy {found.strategy.name}, {cost.requests} completions"
        )
        return await search_response(request, search, found, answer)


PreparedChat = tuple[ChatRequest, list[EngineRequest], OfferedTools | None, OpenedSearch | None]
PreparedCall = tuple[ModelCall, EngineRequest, OfferedTools | None, OpenedSearch | None]


MakeDeltas = Callable[[list[EngineEvent]], Awaitable[list[ChoiceDelta]]]


async def whole_response(
    events: AsyncIterator[list[EngineEvent]], choices: Choices, deltas: MakeDeltas, answer: ApiResponse
) -> Response:
    """The whole answer as one JSON response."""
    found = [delta async for batch in events for delta in await deltas(batch)]
    return await json_response(answer, found, choices.num_tokens)


async def json_response(answer: ApiResponse, deltas: Sequence[ChoiceDelta], num_tokens: int) -> Response:
    """The whole answer as JSON. A large one is made in a thread: its tokens are decoded one by one for their names."""

    def content() -> bytes:
        return to_json(answer.whole(deltas, num_tokens))

    num_names = (answer.num_prompt_tokens + num_tokens) * (1 + num_alternatives(answer.asked))
    body = content() if num_names <= MAX_NAMES_AT_ONCE else await asyncio.to_thread(content)
    return Response(body, media_type="application/json")


async def sse_chunks(
    first: list[EngineEvent],
    events: AsyncIterator[list[EngineEvent]],
    choices: Choices,
    deltas: MakeDeltas,
    answer: ApiResponse,
) -> AsyncIterator[str]:
    """The answer as server-sent events. A failure after the first event is sent as an event."""
    try:
        yield "".join([sse_event(answer.chunk(delta)) for delta in await deltas(first)])
        async for batch in events:
            # One write for the whole batch: writes are the largest cost here.
            if text := "".join([sse_event(answer.chunk(delta)) for delta in await deltas(batch)]):
                yield text
        yield sse_event(answer.last_chunk(choices.num_tokens)) + SSE_DONE
    except ApiError as error:
        yield sse_event(error.body())
    except EngineFailure:
        yield sse_event(internal_error().body())


def sse_event(value: dict[str, Any] | None) -> str:
    """A server-sent event; an empty text for None."""
    if value is None:
        return ""
    return f"data: {to_json(value).decode()}\n\n"


def make_app(api: Api) -> Starlette:
    """Make the application. The engine's thread starts and stops with it."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        api.async_engine.start()
        yield
        await asyncio.to_thread(api.async_engine.stop)

    return Starlette(
        routes=[
            Route("/v1/models", api.models),
            Route("/v1/models/{name:path}", api.model),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            *[
                Route(f"/v1{path}", endpoint, methods=["POST"])
                for protocol in (RESPONSES, MESSAGES)
                for path, endpoint in (
                    (protocol.path, api.spoken(protocol)),
                    (protocol.count_path, api.counted(protocol)),
                )
            ],
            Route("/tokenize", api.tokenize, methods=["POST"]),
            Route("/detokenize", api.detokenize, methods=["POST"]),
            Route(HEALTH, api.health),
            Route("/metrics", api.counts),
        ],
        lifespan=lifespan,
        exception_handlers={
            ApiError: _error_response,
            HTTPException: _routing_error,
            ClientDisconnect: _client_closed,
            EngineFailure: _internal_error,
            Exception: _internal_error,
        },
    )


async def _error_response(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    request.state.note = lambda: error.message
    status, body = error_at(request.url.path, error)
    return JSONResponse(body, status, headers=error.headers)


async def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "method_not_allowed" if error.status_code == 405 else "not_found"
    return await _error_response(request, ApiError(error.status_code, message, code=code, headers=error.headers))


async def _client_closed(request: Request, error: Exception) -> Response:
    """The client has disconnected; only the log shows this status."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def _internal_error(request: Request, error: Exception) -> Response:
    """An error of the server: the client gets a plain 500, and uvicorn logs the traceback."""
    return await _error_response(request, internal_error())
