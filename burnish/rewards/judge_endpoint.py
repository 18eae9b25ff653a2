"""One call of an OpenAI-compatible endpoint, made again where it failed on the way: plain standard library.

No connection, a timeout, 429 and 5xx are tried again after a wait that doubles; any other refusal is an answer about the
request itself, and final. All calls of a judge share one rate limit.
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
from typing import Any, Protocol
from urllib.error import HTTPError
from urllib.request import Request

from burnish.config.errors import UserError
from burnish.core.http import deadline_opener

MAX_WAIT_S = 60.0
MAX_SHOWN_CHARS = 300
OPENER = deadline_opener()
WaitFunction = Callable[[float], bool]
"""Sleeps so many seconds; True if it was woken because the judge is closing."""


class JudgeFailed(Exception):
    """The judge gave no answer; the text says what was tried."""


class JudgeBackend(Protocol):
    """Whoever answers a judge's questions. Threads share it."""

    @property
    def address(self) -> str:
        """What the answers are of, for the cache: behind the same address the same question has the same answer."""

    def ask(self, body: Mapping[str, Any], deadline: float) -> tuple[str, int]:
        """The answer to a chat request, and how often it was asked for again; JudgeFailed where there is none in time."""

    def close(self) -> None:
        """Let go of everything; whoever still waits for an answer gets JudgeFailed."""


class RateLimit:
    """Lets at most so many calls a minute begin, evenly spaced."""

    def __init__(self, per_minute: float | None) -> None:
        self._gap_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._next = 0.0
        self._lock = threading.Lock()

    def turn_s(self) -> float:
        """Seconds to wait until the turn that this call has now taken."""
        with self._lock:
            now = time.monotonic()
            turn = max(now, self._next)
            self._next = turn + self._gap_s
            return turn - now


class JudgeEndpoint:
    """Asks for chat completions. Threads may share it."""

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

    def ask(self, body: Mapping[str, Any], deadline: float) -> tuple[str, int]:
        """The text of the first choice, and how often the call was made again; JudgeFailed where there is none in time."""
        data, problem = json.dumps(body).encode(), "no call was made"
        for attempt in range(self._retries + 1):
            self._pause(self._limit.turn_s(), deadline, problem)
            left_s = deadline - time.monotonic()
            try:
                return self._once(data, min(self._call_s, left_s)), attempt
            except HTTPError as error:
                said = error.read(MAX_SHOWN_CHARS).decode(errors="replace")
                problem = f"{self.address} answered {error.code}: {said}"
                if error.code != 429 and error.code < 500:
                    raise JudgeFailed(problem) from error
                after_s = _retry_after_s(error.headers.get("Retry-After"))
            except (
                OSError,
                HTTPException,
                ValueError,
                RecursionError,
            ) as error:  # no connection, cut off, too late, or no JSON
                problem, after_s = f"{self.address}: {type(error).__name__}: {error}", None
            if attempt < self._retries:
                doubled = min(MAX_WAIT_S, self._backoff_s * 2**attempt)
                self._pause(doubled if after_s is None else max(after_s, doubled), deadline, problem)
        raise JudgeFailed(f"{problem} (after {self._retries + 1} calls)")

    def close(self) -> None:
        """Nothing is held between two calls."""

    def _once(self, data: bytes, timeout_s: float) -> str:
        request = Request(self.address, data, self._headers)
        with OPENER.open(request, timeout=max(timeout_s, 0.001)) as reply:
            said = json.loads(reply.read())
        try:
            content = said["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"the reply has no choices[0].message.content: {str(said)[:MAX_SHOWN_CHARS]}") from error
        if not isinstance(content, str):
            raise ValueError(f"choices[0].message.content is no text: {str(said)[:MAX_SHOWN_CHARS]}")
        return content

    def _pause(self, seconds: float, deadline: float, problem: str) -> None:
        """Wait, unless the sample's deadline comes first."""
        if time.monotonic() + seconds > deadline:
            raise JudgeFailed(f"the deadline of the sample is reached; {problem}")
        if seconds > 0 and self._wait(seconds):
            raise JudgeFailed("the judge was closed")


def _retry_after_s(value: str | None) -> float | None:
    """Seconds of a Retry-After header; a date in it is not read, the doubling wait serves as well."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None


# --- Answers of a judge on disk: what was asked once is never paid for again, whatever becomes of the run.
#
# One line an answer, with a checksum, appended in one write: a kill leaves it whole or torn, and a torn one is only asked
# again. Several processes may use one folder; each sees what the others had written when it started.

CACHE_FILE = "answers.jsonl"


def cache_key(asked: Mapping[str, Any]) -> str:
    """The key of a question: a hash of everything that decides the answer."""
    return hashlib.sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


class JudgeCache:
    """Texts by key, in memory and in a file. Threads may share it."""

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
        """What was answered, or None."""
        with self._lock:
            return self._texts.get(key)

    def put(self, key: str, text: str) -> None:
        """Keep an answer; it outlives a kill as soon as this returns."""
        body = json.dumps([key, text])
        line = f"{zlib.crc32(body.encode()):08x} {body}\n".encode()
        with self._lock:
            try:
                num_written = os.write(self._file, line)
            except OSError as error:
                raise UserError(f"the judge's cache {self.path} cannot be written: {error.strerror}") from error
            if num_written != len(line):
                raise UserError(f"the judge's cache {self.path} cannot be written: no room is left")
            self._texts[key] = text

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._file)

    def _read(self) -> dict[str, str]:
        texts: dict[str, str] = {}
        lines = self.path.read_bytes().split(b"\n")
        if lines[-1]:  # torn: what comes next must not be written behind half a line
            os.write(self._file, b"\n")
        for line in lines:
            checksum, _, body = line.partition(b" ")
            if checksum == b"%08x" % zlib.crc32(body) and body:
                key, text = json.loads(body)
                texts[key] = text
            else:
                self.num_damaged += bool(line)
        return texts
