"""The text of a completion, whole and in pieces of a stream, and the tool calls in it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.environments.tools.call_formats import END_THINK, FORMATS, CallFormat, ParsedCall
from burnish.models.tokenizer import MAX_CHARACTER_BYTES, MAX_PENDING_TOKENS, REPLACEMENT_CHARACTER, Tokenizer

Json = dict[str, Any]


class TextStream:
    """Decodes one completion token by token. The outputs of `push` and `finish`, joined, are the decoded completion.

    A character that spans several tokens is shown with its last token. New tokens are decoded together with the last ones
    shown, because decoders drop the space before the first word of a text.
    """

    def __init__(self, tokenizer: Tokenizer, shown_ids: frozenset[int] = frozenset()) -> None:
        self.tokenizer = tokenizer
        self.shown_ids = shown_ids
        """Special tokens that are shown by their names."""
        self._plain_pieces = tokenizer.plain_pieces
        self._tokens: list[int] = []  # the last tokens shown, then those not shown yet
        self._num_shown = 0
        self._shown = ""

    def push(self, token: int) -> str:
        """Return the text that this token completes; it may be empty."""
        piece = self._plain_pieces[token]
        if piece is not None and len(self._tokens) == self._num_shown:  # no part of a character is waiting
            self._tokens, self._num_shown, self._shown = [token], 1, piece
            return piece
        if self.tokenizer.is_special(token) and token not in self.shown_ids:
            return ""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if not text.endswith(REPLACEMENT_CHARACTER):
            return self._show(text, len(self._tokens))
        if (
            len(self._tokens) - self._num_shown > MAX_PENDING_TOKENS
        ):  # bytes that are no text: what is old enough stays as it is
            early = len(self._tokens) - MAX_CHARACTER_BYTES
            part = self._decode(self._tokens[:early])
            return self._show(part, early) if text.startswith(part) else ""
        return ""

    def finish(self) -> str:
        """Return the rest: an incomplete character, as the decoder writes it."""
        return self._show(self._decode(self._tokens), len(self._tokens))

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special=False)  # `push` left out those that are not shown

    def _show(self, text: str, count: int) -> str:
        """Return the new part of the text of the first `count` tokens."""
        new = text[len(self._shown) :]
        if new:  # a token without text is no context: the next word would lose its leading space
            context = self._tokens[self._num_shown : count]
            self._tokens = context + self._tokens[count:]
            self._num_shown = len(context)
            self._shown = self._decode(context)
        return new


# --- the text of a completion --------------------------------------------------------------------------------------------
#
# The text ends before the stop string that is complete first, as OpenAI cuts it. An end token has no text. Streamed pieces join to
# the whole text, and are final: no half character, and no text that may turn out to be part of a stop string.


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Start of the stop string that is complete first, of two the longer one; None without one."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def matched_stop(text: str, stops: Sequence[str]) -> str | None:
    """The stop string at `stop_position`; None without one."""
    at = stop_position(text, stops)
    # Of the stop strings that begin there, the shortest is complete first.
    return None if at is None else min((stop for stop in stops if text.startswith(stop, at)), key=len)


def partial_match(text: str, marks: Sequence[str]) -> int:
    """Length of the longest suffix of a text that is a proper prefix of one of the marks."""
    longest = max((len(mark) - 1 for mark in marks), default=0)
    for size in range(min(longest, len(text)), 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0


def completion_text(
    tokens: Sequence[int],
    tokenizer: Tokenizer,
    end_tokens: Sequence[int],
    stops: Sequence[str],
    shown_ids: frozenset[int] = frozenset(),
) -> str:
    """The whole text of a completion. Special tokens have no text, except those in `shown_ids`."""
    if tokens and tokens[-1] in end_tokens:
        tokens = tokens[:-1]
    if tokenizer.has_special(tokens):
        tokens = [token for token in tokens if not tokenizer.is_special(token) or token in shown_ids]
    text = tokenizer.decode(tokens, skip_special=False)
    return text[: stop_position(text, stops)]


class VisibleText:
    """The text of a completion in pieces, token by token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        end_tokens: Sequence[int],
        stops: Sequence[str],
        shown_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.end_tokens, self.stops = end_tokens, stops
        self._stream = TextStream(tokenizer, shown_ids)
        self._pending = ""  # decoded text that may be the start of a stop string
        self._has_stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; return the text that is final now, perhaps none."""
        if self._has_stopped:
            return ""
        text = "".join([self._stream.push(token) for token in tokens if token not in self.end_tokens])
        return self._show(text, is_last=False) if self.stops else text

    def finish(self) -> str:
        """The rest of the text after the last token."""
        return "" if self._has_stopped else self._show(self._stream.finish(), is_last=True)

    def _show(self, text: str, is_last: bool) -> str:
        self._pending += text
        at = stop_position(self._pending, self.stops)
        if at is not None:
            self._has_stopped = True
        else:
            at = len(self._pending) - (0 if is_last else partial_match(self._pending, self.stops))
        shown, self._pending = self._pending[:at], self._pending[at:]
        return shown


# --- tool calls ----------------------------------------------------------------------------------------------------------
#
# Serving is stricter than training. An answer has calls only if everything from the first call on consists of calls without a mistake.
# Otherwise all of it stays text: an incomplete or malformed call is not repaired.

HERMES = FORMATS["hermes"]


@dataclass(frozen=True)
class OfferedTools:
    """The tools of a request, and the format in which the model calls them."""

    format: CallFormat
    schemas: Sequence[Json]


def split_tool_calls(
    text: str, call_format: CallFormat = HERMES, tools: Sequence[Json] = ()
) -> tuple[str, list[dict[str, Any]]]:
    """Split an answer into the text before its tool calls and the calls in OpenAI's format. Without calls all of it is text."""
    found = call_format.parse(text, tools)
    calls = [call for call in found.calls if isinstance(call, ParsedCall)]
    if found.calls_at is None or len(calls) < len(found.calls) or found.text_after:
        return (found.content if call_format.is_framed and not found.calls else text), []
    return found.content if call_format.is_framed else text[: found.calls_at].rstrip(), [
        {
            "id": f"call_{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in calls
    ]


class ToolCallStream:
    """Splits a streamed answer: text passes until it may be the start of a call."""

    def __init__(self, call_format: CallFormat = HERMES, tools: Sequence[Json] = ()) -> None:
        self.format, self.tools = call_format, tools
        # A bare call may also follow the model's reasoning.
        self._marks = [*call_format.marks, *([END_THINK] if call_format.is_bare else [])]
        self._shown: list[str] = []
        self._pending = ""

    def push(self, text: str) -> str:
        """Add text; return what certainly stands before any call."""
        self._pending += text
        if self.format.is_framed:
            return ""
        at = min((at for mark in self._marks if (at := self._pending.find(mark)) >= 0), default=-1)
        if at < 0:
            at = len(self._pending) - partial_match(self._pending, self._marks)
        if self.format.is_bare and not self._shown and self._pending.lstrip()[:1] in ("", "{"):
            at = 0
        at = len(self._pending[:at].rstrip())  # drop white space before a call
        shown, self._pending = self._pending[:at], self._pending[at:]
        if shown:
            self._shown.append(shown)
        return shown

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest: text, or calls."""
        shown = "".join(self._shown)
        text, calls = split_tool_calls(shown + self._pending, self.format, self.tools)
        return text[len(shown) :], calls
