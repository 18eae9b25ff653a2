"""Responses to requests with a strategy: the chosen answer when the search has ended, whole or as a stream.

A stream carries the progress of the search as comments of server-sent events, which clients skip. They also keep the connection open.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from burnish.config.errors import UserError
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.gateway.openai_schema import ApiError, internal_error
from burnish.serve.disconnects import EventStream, unless_disconnected
from burnish.serve.engine_worker import EngineFailure
from burnish.serve.search_answer import SearchAnswer, failed_search
from burnish.serve.search_request import SearchRequest
from burnish.serve.search_run import ServedSearch

PROGRESS_S = 1.0
"""Time between two comments of a stream."""


class OpenedSearch(NamedTuple):
    """A search that was asked for and has not begun."""

    found: SearchRequest
    program: SearchProgram


def invalid_search(error: UserError) -> ApiError:
    """The error for a search that the engine or a strategy refuses."""
    return ApiError(400, str(error), param="strategy", code="invalid_value")


async def search_response(
    request: Request, search: ServedSearch, found: SearchRequest, answer: SearchAnswer
) -> Response:
    """Run a search and answer with its choice. It ends when the client disconnects."""
    try:
        if not answer.is_stream:
            return await unless_disconnected(request, whole_search(search, found, answer))
        running = asyncio.create_task(search.run())
        try:
            # Await the first results before the headers: a request that the engine refuses needs an error status.
            await unless_disconnected(request, search.has_results.wait())
        except BaseException:
            running.cancel()
            raise
        if running.done():
            running.result()
        return EventStream(running, search_chunks(running, search, found, answer))
    except UserError as error:
        raise invalid_search(error) from error


async def whole_search(search: ServedSearch, found: SearchRequest, answer: SearchAnswer) -> Response:
    """Run a search and answer with its choice, as one JSON response."""
    await search.run()
    return Response(await asyncio.to_thread(_content, search, found, answer), media_type="application/json")


def _content(search: ServedSearch, found: SearchRequest, answer: SearchAnswer) -> bytes:
    if search.program.choice is None:
        raise failed_search(search.program)
    return to_json(answer.whole(search, found))


async def search_chunks(
    running: asyncio.Task[None], search: ServedSearch, found: SearchRequest, answer: SearchAnswer
) -> AsyncIterator[str]:
    """The answer as server-sent events, behind comments with the progress. A failure is sent as an event."""
    try:
        while not running.done():
            yield f": {progress(search.program)}\n\n"
            await asyncio.wait([running], timeout=PROGRESS_S)
        running.result()
        if search.program.choice is None:
            raise failed_search(search.program)
        yield await asyncio.to_thread(answer.events, search, found)
    except (ApiError, UserError) as error:
        yield answer.error_event(error if isinstance(error, ApiError) else invalid_search(error))
    except EngineFailure:
        yield answer.error_event(internal_error())


def progress(program: SearchProgram) -> str:
    """What a search has spent so far, as one line of JSON."""
    cost = program.search.cost
    facts = {"tokens": cost.tokens, "requests": cost.requests, "verifier_calls": cost.scores}
    return to_json({"strategy": {**facts, "budget": program.search.budget}}).decode()
