"""Search by an HTTP retriever that speaks Search-R1's protocol.

    POST url   {"queries": ["..."], "topk": 3, "return_scores": true}
    reply      {"result": [[{"document": {"contents": "\\"title\\"\\ntext"}, "score": 1.2}, ...]]}

Without scores a reply has the documents themselves in place of `{"document", "score"}`; both forms are read. Calls of many episodes that
arrive within `batch_window_s` become one request. Requests run in threads, so the event loop never waits for the server.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any, ClassVar
from urllib.error import HTTPError
from urllib.request import Request

from burnish.config.errors import UserError, is_server_url
from burnish.core.http import deadline_opener
from burnish.data.search_corpus.bm25_index import Passage, passage_of
from burnish.environments.base import RunsIn
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.passages import (
    SEARCH_R1,
    check_format,
    format_passages,
    search_schema,
)
from burnish.environments.tools.values import WrongArguments, check_arguments, error_result

FIRST_WAIT_S, MAX_WAIT_S = 0.25, 8.0
MAX_SHOWN_CHARS = 300
OPENER = deadline_opener()


class SearchFailed(Exception):
    """The retriever gave no usable answer; the text says what was tried."""


@dataclass
class _Batch:
    """Queries that wait to be sent together."""

    queries: list[str] = field(default_factory=list)
    answers: list[asyncio.Future[list[Passage]]] = field(default_factory=list)


class SearchHTTP(Tool):
    """Asks a retriever over HTTP and returns the best passages."""

    runs_in: ClassVar[RunsIn] = "loop"

    def __init__(
        self,
        url: str,
        name: str = "search",
        top_k: int = 3,
        timeout_s: float = 20.0,
        retries: int = 2,
        max_in_flight: int = 16,
        max_batch: int = 64,
        batch_window_s: float = 0.005,
        headers: Mapping[str, str] | None = None,
        format: str = SEARCH_R1,
        max_passage_chars: int = 2000,
    ) -> None:
        """Options:

        - `url`: the whole address, such as `http://127.0.0.1:8000/retrieve`.
        - `timeout_s`: the longest a search may take, retries included.
        - `retries`: how often a request is sent again after a failed connection, 429 or 5xx.
        - `max_in_flight`: the number of requests at the same time.
        - `max_batch`, `batch_window_s`: queries that arrive within the window are sent together, at most `max_batch`.
        - `top_k`, `format`, `max_passage_chars`: as for `SearchBM25`.
        """
        if not is_server_url(url):
            raise UserError(f"HTTP search: url must be like http://127.0.0.1:8000/retrieve, not {url!r}")
        for key, value in (
            ("top_k", top_k),
            ("max_in_flight", max_in_flight),
            ("max_batch", max_batch),
            ("max_passage_chars", max_passage_chars),
        ):
            if value < 1:
                raise UserError(f"HTTP search: {key} must be 1 or more, not {value}")
        if not timeout_s > 0 or retries < 0 or batch_window_s < 0:
            raise UserError("HTTP search: timeout_s must be above 0, retries and batch_window_s at least 0")
        self._url, self._top_k, self._timeout_s, self._retries = url, top_k, timeout_s, retries
        self._max_batch, self._batch_window_s = max_batch, batch_window_s
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._format, self._max_passage_chars = check_format(format, "HTTP search"), max_passage_chars
        self._threads = ThreadPoolExecutor(max_in_flight, thread_name_prefix="search")
        self._batch = _Batch()
        self._requests: set[asyncio.Task[None]] = set()
        self.schema = search_schema(name, "Search a collection of passages, and return the best ones.")

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Search, and return the passages as text. SearchFailed if the retriever does not answer."""
        try:
            query = check_arguments(self.schema, arguments)["query"]
        except WrongArguments as error:
            return error_result(str(error), "wrong_arguments")
        return format_passages(await self.search(query), self._format, self._max_passage_chars)

    async def search(self, query: str) -> list[Passage]:
        """The passages that the retriever returns for a query."""
        loop = asyncio.get_running_loop()
        batch, answer = self._batch, loop.create_future()
        batch.queries.append(query)
        batch.answers.append(answer)
        if len(batch.queries) >= self._max_batch:
            self._send(batch)
        elif len(batch.queries) == 1:
            loop.call_later(self._batch_window_s, self._send, batch)
        return await answer

    def _send(self, batch: _Batch) -> None:
        """Send a batch, unless it was sent because it was full."""
        if batch is self._batch:
            self._batch = _Batch()
            request = asyncio.get_running_loop().create_task(self._answer(batch))
            self._requests.add(request)  # the loop itself holds tasks weakly
            request.add_done_callback(self._requests.discard)

    async def _answer(self, batch: _Batch) -> None:
        wanted = [
            place for place, answer in enumerate(batch.answers) if not answer.done()
        ]  # not those cancelled meanwhile
        if not wanted:
            return
        queries = [batch.queries[place] for place in wanted]
        loop, deadline = asyncio.get_running_loop(), time.monotonic() + self._timeout_s
        try:
            results = await loop.run_in_executor(self._threads, self._ask, queries, deadline)
        except SearchFailed as error:
            for place in wanted:
                if not batch.answers[place].done():
                    batch.answers[place].set_exception(SearchFailed(str(error)))
            return
        for place, passages in zip(wanted, results, strict=True):
            if not batch.answers[place].done():
                batch.answers[place].set_result(passages)

    def _ask(self, queries: list[str], deadline: float) -> list[list[Passage]]:
        """In a thread: send queries, with retries, until the deadline."""
        body = json.dumps({"queries": queries, "topk": self._top_k, "return_scores": True}).encode()
        problem = f"{self._url}: no request was sent before the deadline of {self._timeout_s:g} s"
        for attempt in range(self._retries + 1):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                with OPENER.open(Request(self._url, body, self._headers), timeout=left_s) as reply:
                    data = reply.read()
                return self._passages(data, len(queries))
            except HTTPError as error:
                words = error.read(MAX_SHOWN_CHARS).decode(errors="replace")
                problem = f"{self._url} answered {error.code}: {words}"
                if error.code != 429 and error.code < 500:
                    raise SearchFailed(problem) from error
            except (OSError, HTTPException) as error:
                problem = f"{self._url}: {type(error).__name__}: {error}"
            wait_s = min(MAX_WAIT_S, FIRST_WAIT_S * 2**attempt)
            if attempt < self._retries and time.monotonic() + wait_s < deadline:
                time.sleep(wait_s)
        raise SearchFailed(f"the retriever did not answer: {problem}")

    def _passages(self, data: bytes, num_queries: int) -> list[list[Passage]]:
        try:
            results = json.loads(data)["result"]
            if len(results) != num_queries:
                raise ValueError(f"{len(results)} results for {num_queries} queries")
            return [[_passage(found) for found in result[: self._top_k]] for result in results]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            shown = data[:MAX_SHOWN_CHARS].decode(errors="replace")
            raise SearchFailed(
                f"{self._url} does not speak Search-R1's protocol ({type(error).__name__}: {error}): {shown}"
            ) from error


def _passage(found: Any) -> Passage:
    if isinstance(found, Mapping) and "document" in found:
        return passage_of(found["document"], "a result", float(found.get("score") or 0.0))
    return passage_of(found, "a result")
