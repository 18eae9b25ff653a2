"""Request bodies: read, parsed and tokenised within a bound of memory.

A body takes 25 times its bytes while it is parsed, and a text 300 times its bytes while it is tokenised. So the bytes of all bodies that are
not yet prompts are counted, and past a bound a body is refused. Large bodies are worked on one at a time, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from starlette.requests import Request

from burnish.models.tokenizer import Tokenizer
from burnish.serve.errors import ApiError

T = TypeVar("T")
LARGE = 2**18
"""Bytes of a body that is worked on alone."""
BODIES = 4
"""Largest bodies that may be in work at once, as a multiple of one."""
RETRY_AFTER_S = 1
CLOSE = {"Connection": "close"}
"""For a refusal before the end of the body: the rest of it is not read."""


@dataclass
class Intake:
    """The bodies of all requests until each has become prompts. Used on the event loop."""

    max_body: int
    """Bytes of one body."""
    num_bytes: int = 0
    """Bytes of the bodies that are read or worked on now."""
    _large: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def max_bytes(self) -> int:
        """Bytes of all bodies together."""
        return BODIES * self.max_body

    async def work(self, request: Request, prepare: Callable[[bytearray], T]) -> T:
        """What `prepare` makes of the body of a request, in a thread."""
        async with self._read(request) as body:
            if len(body) < LARGE:
                return await asyncio.to_thread(prepare, body)
            async with self._large:
                return await asyncio.to_thread(prepare, body)

    @contextlib.asynccontextmanager
    async def _read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body, if it is JSON and not larger than allowed; its bytes count until the block ends."""
        _check_type(request)
        body = bytearray()
        try:
            async for part in request.stream():
                self.num_bytes += len(part)
                body += part
                self._check_size(len(body))
            yield body
        finally:
            self.num_bytes -= len(body)

    def _check_size(self, size: int) -> None:
        if size > self.max_body:
            message = f"the body is larger than the {self.max_body} bytes this server takes"
            raise ApiError(413, message, code="body_too_large", headers=CLOSE)
        if self.num_bytes > self.max_bytes:
            message = f"requests of {self.max_bytes} bytes are being read at once, which is all this server holds; try again later"
            raise ApiError(429, message, code="too_many_bytes", headers={"Retry-After": str(RETRY_AFTER_S)} | CLOSE)


def _check_type(request: Request) -> None:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A page in a browser may send other types to a server on loopback without asking; this one it may not.
        raise ApiError(
            415, f"expected Content-Type: application/json, got {kind or 'none'}", code="unsupported_media_type"
        )


# --- texts that cannot fit -----------------------------------------------------------------------------------------------

MARGIN = 2
"""How many times the positions the tokens of a text's beginning must be before the whole text is refused for them."""
GROWTH = (2, 8)
"""Least and most by which the next beginning is longer."""
COMPOSED = 4
"""Characters that NFC makes one of, at most."""


@dataclass(frozen=True)
class TextLimit:
    """Tells texts that are certain to have more tokens than there are positions, without tokenising all of them.

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
        limit = MARGIN * self.max_positions
        size = limit
        while size < len(text):
            num = len(self.tokenizer.encode(text[:size]))
            if num > limit:
                raise self._refusal(text, self.max_positions + 1, param)
            least_growth, most_growth = GROWTH
            size = int(size * max(least_growth, min(most_growth, 1.2 * limit / max(1, num))))

    def least_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least."""
        if self._longest is None:
            return 0
        size = len(text.encode()) if self._longest.in_bytes else len(text)
        shrunk = COMPOSED if self._longest.is_composed and not text.isascii() else 1
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
    if tokenizer.is_of_characters:
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
    """The steps of a normaliser or pre-tokeniser, of a sequence each."""
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
