"""Request bodies: read, parsed and tokenised within a memory bound.

Parsing takes 25 times the bytes of a body, and tokenising 300 times the bytes of a text. Large bodies are therefore processed one
at a time in a thread, and their total size is bounded until they are prompts. Small bodies are always admitted: the number of
connections bounds them. Clients that send large bodies and stall would use up the bound, so a stalled body is refused when
another large body needs its memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import Request

from burnish.gateway.openai_schema import ApiError
from burnish.models.tokenizer import Tokenizer

T = TypeVar("T")
SMALL_BODY = 2**12
"""Most bytes of a body that is processed on the event loop. It takes less than a millisecond, and a thread would wait for Python's lock."""
LARGE_BODY = 2**18
"""Least bytes of a large body."""
MAX_LARGE_BODIES = 4
"""The bound on the bytes of all large bodies, as a multiple of the largest body."""
PROGRESS_BYTES = 2**16
STALL_TIMEOUT_S = 2.0
"""A large body is stalled if it got fewer than PROGRESS_BYTES in this time. That is less than half the rate of a body of 8 MiB that
meets the limit of 120 s."""
RETRY_AFTER_S = 1
CLOSE_HEADER = {"Connection": "close"}
"""For an error before the end of the body, whose rest is not read."""
TOKENS_PER_POSITION = 2
"""A text is refused if a prefix has more tokens than this times the number of positions."""
UNKNOWN_TOKEN_SIZE = 256
"""Assumed size of the longest token where it cannot be read from the tokenizer."""
PREFIX_GROWTH = (2, 8)
"""Least and largest growth factor of the next prefix."""
MAX_NFC_RATIO = 4
"""The most characters that NFC composes into one."""


@dataclass(eq=False)
class _Body:
    """A body that is being read or processed."""

    step_at: float
    """When the last STEP bytes were complete."""
    step_size: int = 0
    """The size of the body at that time."""
    data: bytearray = field(default_factory=bytearray)
    reading: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Ends the reading if the body is refused for another one."""
    is_whole: bool = False

    @property
    def is_refused(self) -> bool:
        """Whether the body was refused for another one."""
        return self.reading.when() is not None


@dataclass
class BodyReader:
    """Reads the bodies of all requests. Used on the event loop."""

    max_body: int
    """Bytes of one body."""
    clock: Callable[[], float] = time.monotonic
    inline_bytes: int = SMALL_BODY
    """Bodies of at most this size are prepared at once, in the event loop. Only for a `prepare` that takes less time than a thread."""
    content_types: tuple[str, ...] = ("application/json",)
    """Types of bodies. A page in a browser must not be able to send one without a CORS preflight."""
    num_bytes: int = 0
    """Bytes of all bodies that are being read or processed."""
    _large: set[_Body] = field(default_factory=set)
    _working: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while a large body is processed."""

    @property
    def max_bytes(self) -> int:
        """Most bytes of all large bodies together."""
        return MAX_LARGE_BODIES * self.max_body

    async def work(self, request: Request, prepare: Callable[[bytearray], T]) -> T:
        """Read the body of a request and run `prepare` on it; return the result. All but small bodies are prepared in a thread."""
        async with self._read(request) as data:
            if len(data) <= self.inline_bytes:
                return prepare(data)
            if len(data) < LARGE_BODY:
                return await asyncio.to_thread(prepare, data)
            async with self._working:
                return await asyncio.to_thread(prepare, data)

    @contextlib.asynccontextmanager
    async def _read(self, request: Request) -> AsyncIterator[bytearray]:
        """Read a body within the limits. Its bytes count until the block ends."""
        _check_content_type(request, self.content_types)
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.max_body:  # before any of it is read
            raise self._too_large()
        body = _Body(self.clock())
        try:
            await self._receive(request, body)
            yield body.data
        finally:
            self._drop(body)

    async def _receive(self, request: Request, body: _Body) -> None:
        try:
            async with body.reading:
                async for part in request.stream():
                    # The timeout takes effect in the next turn of the event loop, and a part may come before it.
                    if not body.is_refused:
                        self._add(body, part)
        except TimeoutError:
            raise _too_slow() from None
        if body.is_refused:
            raise _too_slow()
        body.is_whole = True

    def _add(self, body: _Body, part: bytes) -> None:
        body.data += part
        self.num_bytes += len(part)
        size = len(body.data)
        if size > self.max_body:
            raise self._too_large()
        if size < LARGE_BODY:
            return
        self._large.add(body)
        if size - body.step_size >= PROGRESS_BYTES:
            body.step_at, body.step_size = self.clock(), size
        while sum(len(one.data) for one in self._large) > self.max_bytes:
            self._make_room(body)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than the {self.max_body} bytes this server takes"
        return ApiError(413, message, code="body_too_large", headers=CLOSE_HEADER)

    def _make_room(self, body: _Body) -> None:
        """Refuse the body that has been stalled longest, or this one if no other is stalled."""
        slowest = min((one for one in self._large if not one.is_whole), key=lambda one: one.step_at)
        if slowest is body or self.clock() - slowest.step_at <= STALL_TIMEOUT_S:
            message = (
                f"large requests of {self.max_bytes} bytes are in work, which is all this server holds; try again later"
            )
            raise ApiError(
                429, message, code="too_many_bytes", headers={"Retry-After": str(RETRY_AFTER_S)} | CLOSE_HEADER
            )
        slowest.reading.reschedule(asyncio.get_running_loop().time())
        self._drop(slowest)

    def _drop(self, body: _Body) -> None:
        self.num_bytes -= len(body.data)
        body.data = bytearray()
        self._large.discard(body)


def _too_slow() -> ApiError:
    message = (
        f"the body came too slowly, and another large request needed the memory: send bodies of {LARGE_BODY} bytes and more with at least "
        f"{PROGRESS_BYTES} bytes in {STALL_TIMEOUT_S:g} s"
    )
    return ApiError(408, message, code="body_too_slow", headers=CLOSE_HEADER)


def _check_content_type(request: Request, known: tuple[str, ...]) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in known:
        # A page in a browser may send some other types to a server on loopback without a CORS preflight, but not these.
        raise ApiError(
            415, f"expected Content-Type: {' or '.join(known)}, got {kind or 'none'}", code="unsupported_media_type"
        )


# --- texts that are too long ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextLimit:
    """Finds texts that are certain to have more tokens than positions, without tokenising all of them.

    The first test divides the length of the text by that of the longest token. The second one tokenises ever longer prefixes: the
    rest of a text changes the tokens of a prefix only near its end, so twice as many tokens as positions are too many.
    """

    tokenizer: Tokenizer
    max_positions: int | None

    def check(self, text: str, param: str) -> None:
        """Raise for a text that cannot fit. A text that passes may still be slightly too long."""
        if self.max_positions is None:
            return
        least = self.least_tokens(text)
        if least > self.max_positions:
            raise self._refusal(text, least, param)
        limit = TOKENS_PER_POSITION * self.max_positions
        size = limit
        while size < len(text):
            num = len(self.tokenizer.encode(text[:size]))
            # A prefix that ends inside a token, such as half of `<pad>`, may have more tokens there than the whole text.
            if num > limit + (UNKNOWN_TOKEN_SIZE if self._longest is None else self._longest.size):
                raise self._refusal(text, self.max_positions + 1, param)
            least_growth, most_growth = PREFIX_GROWTH
            size = int(size * max(least_growth, min(most_growth, 1.2 * limit / max(1, num))))

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens of a text."""
        if self._longest is None:
            return 0
        size = len(text.encode()) if self._longest.in_bytes else len(text)
        shrunk = MAX_NFC_RATIO if self._longest.is_composed and not text.isascii() else 1
        return -(-size // (self._longest.size * shrunk))

    @cached_property
    def _longest(self) -> LongestToken | None:
        return longest_token(self.tokenizer)

    def _refusal(self, text: str, num: int, param: str) -> ApiError:
        return ApiError(
            400,
            f"this server has {self.max_positions} positions for a sequence; the prompt has {len(text)} characters, which are at least "
            f"{num} tokens",
            param=param,
            code="context_length_exceeded",
        )


@dataclass(frozen=True)
class LongestToken:
    """The longest piece of text that one token can stand for."""

    size: int
    in_bytes: bool
    """Whether the size is in bytes of UTF-8; otherwise in characters."""
    is_composed: bool
    """Whether the text is normalised to NFC first, which can shorten it."""


def longest_token(tokenizer: Tokenizer) -> LongestToken | None:
    """The longest token of a tokenizer; None if a token may stand for any number of characters.

    This is the case if the tokenizer drops or joins characters: unknown ones, white space around a special token, or what its
    normaliser removes. Only steps that are known not to do so are accepted.
    """
    pipeline = tokenizer.pipeline()
    if pipeline is None:
        return None
    added, vocab = pipeline.get("added_tokens", []), pipeline["model"]["vocab"]
    marks = [token["content"] for token in added]
    if tokenizer.is_character_level:
        return LongestToken(max(map(len, [*vocab, *marks])), in_bytes=False, is_composed=False)
    normalizers, splits = _steps(pipeline.get("normalizer")), _steps(pipeline.get("pre_tokenizer"))
    in_bytes = any(step["type"] == "ByteLevel" for step in splits)
    if pipeline["model"].get("type") != "BPE" or not _has_all_bytes(pipeline["model"], in_bytes):
        return None
    strips = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if strips or not all(map(_keeps_length, normalizers)) or not all(map(_keeps_text, splits)):
        return None
    # A token of a byte-level vocabulary is written with one character for each byte; an added one as it is.
    size = max(max(map(len, vocab)), *(len(mark.encode()) if in_bytes else len(mark) for mark in marks), 1)
    return LongestToken(size, in_bytes, any(step["type"] == "NFC" for step in normalizers))


def _has_all_bytes(model: dict[str, Any], in_bytes: bool) -> bool:
    """Whether every text can be tokenised without unknown tokens."""
    in_utf8 = set(range(256)) - {0xC0, 0xC1, *range(0xF5, 0x100)}
    if not in_bytes:
        return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in model["vocab"] for byte in in_utf8)
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}  # as themselves; the others from U+0100 on
    others = {byte: chr(0x100 + k) for k, byte in enumerate(sorted(set(range(256)) - shown))}
    return all(others.get(byte, chr(byte)) in model["vocab"] for byte in in_utf8)


def _steps(stage: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a normaliser or pre-tokeniser; those of a sequence one by one."""
    if stage is None:
        return []
    inner = stage.get("normalizers") or stage.get("pretokenizers")
    return [step for part in inner for step in _steps(part)] if stage["type"] == "Sequence" and inner else [stage]


def _keeps_length(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return pattern is not None and len(normalizer["content"].encode()) >= len(pattern.encode())
    return normalizer["type"] in ("NFC", "Prepend", "ByteLevel")


def _keeps_text(split: dict[str, Any]) -> bool:
    return (
        split["type"] in ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")
        and split.get("behavior") != "Removed"
    )
