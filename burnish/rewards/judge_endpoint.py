"""The judge's client of an OpenAI-compatible endpoint, with retries and a rate limit, and its answer cache on disk.

A failed connection, a timeout, 429 and 5xx are retried after a wait that doubles. Any other error status is about the request itself and
is final. All calls of a judge share one rate limit.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.error import HTTPError
from urllib.request import Request

from burnish.config.errors import UserError
from burnish.core.http import deadline_opener

MAX_WAIT_S = 60.0
MAX_SHOWN_CHARS = 300
CACHE_FILE = "answers.jsonl"
OPENER = deadline_opener()
WaitFunction = Callable[[float], bool]
"""Sleeps for some seconds; returns True if it was woken because the judge is closing."""


class JudgeFailed(Exception):
    """The judge gave no answer; the text says what was tried."""


class JudgeReply(NamedTuple):
    """An answer of a judge's model."""

    text: str
    num_tokens: int | None
    """Tokens of the question and of the answer; None if the endpoint does not say."""
    num_retries: int = 0


class JudgeBackend(Protocol):
    """Answers a judge's questions. It must be thread-safe."""

    @property
    def address(self) -> str:
        """Identifies the model for the cache: at the same address, the same question has the same answer."""

    def ask(self, body: Mapping[str, Any], deadline: float) -> JudgeReply:
        """The answer to a chat request; JudgeFailed if there is none before the deadline."""

    def close(self) -> None:
        """Release all resources. Calls that still wait for an answer raise JudgeFailed."""


class RateLimit:
    """Limits how many calls start per minute, evenly spaced."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def turn_s(self) -> float:
        """Reserve the next slot and return the seconds to wait for it."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._gap_s
            return turn - now


class JudgeEndpoint:
    """Thread-safe client for chat completions."""

    def __init__(
        self,
        url: str,
        key: str | None,
        call_s: float,
        retries: int,
        backoff_s: float,
        limit: RateLimit,
        wait: WaitFunction,
    ) -> None:
        self.address = url.rstrip("/") + "/chat/completions"
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._call_s, self._retries, self._backoff_s = call_s, retries, backoff_s
        self._limit, self._wait = limit, wait

    def ask(self, body: Mapping[str, Any], deadline: float) -> JudgeReply:
        """The first choice; JudgeFailed if there is none before the deadline."""
        data, problem = json.dumps(body).encode(), "no call was made"
        for attempt in range(self._retries + 1):
            self._pause(self._limit.turn_s(), deadline, problem)
            left_s = deadline - time.monotonic()
            try:
                return self._once(data, min(self._call_s, left_s))._replace(num_retries=attempt)
            except HTTPError as error:
                body_text = error.read(MAX_SHOWN_CHARS).decode(errors="replace")
                problem = f"{self.address} answered {error.code}: {body_text}"
                if error.code != 429 and error.code < 500:
                    raise JudgeFailed(problem) from error
                after_s = _retry_after_s(error.headers.get("Retry-After"))
            except (
                OSError,
                HTTPException,
                ValueError,
                RecursionError,
            ) as error:  # no connection, cut off, too late, or not JSON
                problem, after_s = f"{self.address}: {type(error).__name__}: {error}", None
            if attempt < self._retries:
                doubled = min(MAX_WAIT_S, self._backoff_s * 2**attempt)
                self._pause(doubled if after_s is None else max(after_s, doubled), deadline, problem)
        raise JudgeFailed(f"{problem} (after {self._retries + 1} calls)")

    def close(self) -> None:
        """Do nothing: no connection is kept between calls."""

    def _once(self, data: bytes, timeout_s: float) -> JudgeReply:
        request = Request(self.address, data, self._headers)
        with OPENER.open(request, timeout=max(timeout_s, 0.001)) as reply:
            message = json.loads(reply.read())
        try:
            content = message["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"the reply has no choices[0].message.content: {str(message)[:MAX_SHOWN_CHARS]}"
            ) from error
        if not isinstance(content, str):
            raise ValueError(f"choices[0].message.content is not text: {str(message)[:MAX_SHOWN_CHARS]}")
        return JudgeReply(content, _num_tokens(message))

    def _pause(self, seconds: float, deadline: float, problem: str) -> None:
        """Wait; raise JudgeFailed at once if the sample's deadline comes first."""
        if time.monotonic() + seconds > deadline:
            raise JudgeFailed(f"the deadline of the sample is reached; {problem}")
        if seconds > 0 and self._wait(seconds):
            raise JudgeFailed("the judge was closed")


def _num_tokens(message: Mapping[str, Any]) -> int | None:
    """`usage.total_tokens` of a reply; None if it has no such number."""
    usage = message.get("usage")
    total = usage.get("total_tokens") if isinstance(usage, dict) else None
    return total if type(total) is int else None


def _retry_after_s(value: str | None) -> float | None:
    """The seconds of a Retry-After header. A date is ignored; the doubling wait applies then."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None


# --- cache -----------------------------------------------------------------------------------------------------------


def cache_key(asked: Mapping[str, Any]) -> str:
    """The cache key of a question: a hash of everything that determines the answer."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


class JudgeCache:
    """Thread-safe cache of a judge's answers, in memory and in a file, so that no question is paid for twice.

    Each answer is one line with a checksum, appended in one write. A kill leaves a line whole or torn; a torn answer is asked for again.
    Several processes may share a folder. Each sees what the others had written when it started.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CACHE_FILE
        self.num_damaged = 0
        self._lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise UserError(f"the judge's cache {folder} cannot be written: {error.strerror}") from error
        self._texts = self._read()

    def get(self, key: str) -> str | None:
        """The cached answer, or None."""
        with self._lock:
            return self._texts.get(key)

    def put(self, key: str, text: str) -> None:
        """Store an answer. It survives a kill of this process once this returns."""
        body = json.dumps([key, text])
        line = f"{zlib.crc32(body.encode()):08x} {body}\n".encode()
        with self._lock:
            try:
                num_written = os.write(self._file, line)
            except OSError as error:
                raise UserError(f"the judge's cache {self.path} cannot be written: {error.strerror}") from error
            if num_written != len(line):
                raise UserError(f"the judge's cache {self.path} cannot be written: no space left on the device")
            self._texts[key] = text

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _read(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # torn: the next answer must not be appended to half a line
            os.write(self._file, b"\n")
        for line in lines:
            checksum, _, body = line.partition(b" ")
            if checksum == b"%08x" % zlib.crc32(body) and body:
                key, text = json.loads(body)
                texts[key] = text
            else:
                self.num_damaged += bool(line)
        return texts
