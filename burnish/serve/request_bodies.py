"""Request bodies: read, parsed and tokenised within a bound of memory.

A body takes 25 times its bytes while it is parsed, and a text 300 times its bytes while it is tokenised. Large bodies are therefore worked on
one at a time, in a thread, and their bytes together are bounded until they are prompts. Small bodies are always admitted: their number is
bounded by that of the connections. Clients that send large bodies and stall would use up the bound, so a stalled body is refused when
another large body needs its room.
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

from burnish.models.tokenizer import Tokenizer
from burnish.serve.openai_schema import ApiError

T = TypeVar("T")
LARGE_BODY = 2**18
"""Bytes from which on a body is large."""
MAX_LARGE_BODIES = 4
"""The bound on the bytes of all large bodies, as a multiple of the largest body."""
PROGRESS_BYTES = 2**16
STALL_TIMEOUT_S = 2.0
"""A large body is stalled if it has brought fewer than STEP bytes for longer than this. That is less than half the rate at which a body of 8 MiB
meets the limit of 120 s."""
RETRY_AFTER_S = 1
CLOSE_HEADER = {"Connection": "close"}
"""For a refusal before the end of the body: the rest of it is not read."""


@dataclass(eq=False)
class _Body:
    """A body that is being read or worked on."""

    step_at: float
    """When the last STEP bytes were complete."""
    step_size: int = 0
    """The size of the body at that time."""
    data: bytearray = field(default_factory=bytearray)
    reading: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))
    """Ends the reading when the body is refused for another one."""
    is_whole: bool = False

    @property
    def is_refused(self) -> bool:
        """Whether the body was refused for another one."""
        return self.reading.when() is not None


@dataclass
class BodyReader:
    """The bodies of all requests until each has become prompts. Used on the event loop."""

    max_body: int
    """Bytes of one body."""
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    """Bytes of the bodies, small and large, that are read or worked on now."""
    _large: set[_Body] = field(default_factory=set)
    _working: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Locked while a large body is worked on."""

    @property
    def max_bytes(self) -> int:
        """Bytes of all large bodies together."""
        return MAX_LARGE_BODIES * self.max_body

    async def work(self, request: Request, prepare: Callable[[bytearray], T]) -> T:
        """What `prepare` makes of the body of a request, in a thread."""
        async with self._read(request) as data:
            if len(data) < LARGE_BODY:
                return await asyncio.to_thread(prepare, data)
            async with self._working:
                return await asyncio.to_thread(prepare, data)

    @contextlib.asynccontextmanager
    async def _read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, if it is JSON and not larger than allowed; its bytes count until the block ends."""
        _check_content_type(request)
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
                    # The timeout takes effect in the next turn of the event loop; a part may come before.
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
            message = f"the body is larger than the {self.max_body} bytes this server takes"
            raise ApiError(413, message, code="body_too_large", headers=CLOSE_HEADER)
        if size < LARGE_BODY:
            return
        self._large.add(body)
        if size - body.step_size >= PROGRESS_BYTES:
            body.step_at, body.step_size = self.clock(), size
        while sum(len(one.data) for one in self._large) > self.max_bytes:
            self._make_room(body)

    def _make_room(self, body: _Body) -> None:
        """Refuse the large body that is stalled longest; if none is stalled, or it is this one, refuse this one."""
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
        f"the body came too slowly, and another large request needed its room: send bodies of {LARGE_BODY} bytes and more with at least "
        f"{PROGRESS_BYTES} bytes in {STALL_TIMEOUT_S:g} s"
    )
    return ApiError(408, message, code="body_too_slow", headers=CLOSE_HEADER)


def _check_content_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page in a browser may send some other types to a server on loopback without a CORS preflight, but not this one.
        raise ApiError(
            415, f"expected Content-Type: application/json, got {kind or 'none'}", code="unsupported_media_type"
        )


# --- texts that cannot fit -----------------------------------------------------------------------------------------------

TOKENS_PER_POSITION = 2
"""A text is refused if a beginning of it has more than this many times as many tokens as there are positions."""
PREFIX_GROWTH = (2, 8)
"""The least and the largest factor by which the next beginning is longer."""
MAX_NFC_RATIO = 4
"""The most characters that NFC composes into one."""


@dataclass(frozen=True)
class TextLimit:
    """Finds texts that are certain to have more tokens than there are positions, without tokenising all of them.

    The first test divides the length of the text by that of the longest token. The second one tokenises ever longer beginnings of
    the text: what follows a beginning changes its tokens near the cut alone, so twice as many tokens as positions are too many.
    """

    tokenizer: Tokenizer
    max_positions: int | None

    def check(self, text: str, param: str) -> None:
        """Raise for a text that cannot fit; one that passes may still be too long by a little."""
        if self.max_positions is None:
            return
        least = self.least_tokens(text)
        if least > self.max_positions:
            raise self._refusal(text, least, param)
        limit = TOKENS_PER_POSITION * self.max_positions
        size = limit
        while size < len(text):
            num = len(self.tokenizer.encode(text[:size]))
            if num > limit:
                raise self._refusal(text, self.max_positions + 1, param)
            least_growth, most_growth = PREFIX_GROWTH
            size = int(size * max(least_growth, min(most_growth, 1.2 * limit / max(1, num))))

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least."""
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
    """How much of a text one token stands for at most."""

    size: int
    in_bytes: bool
    """Whether the size is in bytes of UTF-8, else in characters."""
    is_composed: bool
    """Whether the text is brought to NFC first, which makes it shorter."""


def longest_token(tokenizer: Tokenizer) -> LongestToken | None:
    """The longest token of a tokenizer; None where a token may stand for any number of characters.

    That is so where the tokenizer drops or joins characters: unknown ones, white space around a special token, what its
    normaliser removes. Only the steps that are known not to do so are accepted.
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
    """Whether any text has tokens, so that no part of it is dropped or joined as unknown."""
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
