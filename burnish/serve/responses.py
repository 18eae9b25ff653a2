"""Responses of OpenAI's two APIs, whole and as chunks of a stream.

With `return_token_ids` each choice also has `token_ids`, and there are `prompt_token_ids`: next to the choices of a chat, in each
choice of a completion. Log-probs and token ids are of all sampled tokens, with the end token and those of a stop string.
"""

from __future__ import annotations

import itertools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.core.engine import Completion, Request
from burnish.environments.tools.call_formats import END_THINK, FORMATS, CallFormat, ParsedCall
from burnish.evaluation.model_source import TextStream
from burnish.models.tokenizer import Tokenizer
from burnish.serve.async_engine import EngineEvent
from burnish.serve.openai_schema import ChatRequest, CompletionRequest, nan_error

Json = dict[str, Any]

# --- the text of a completion --------------------------------------------------------------------------------------------
#
# The text ends before the stop string that is complete first, as OpenAI cuts it. An end token has no text. Streamed pieces join to
# the whole text, and are final: no half character, and no text that may turn out to be part of a stop string.


def stop_position(text: str, stops: Sequence[str]) -> int | None:
    """Start of the stop string that is complete first, of two the longer one; None without one."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


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
    shown = [token for token in tokens if not tokenizer.is_special(token) or token in shown_ids]
    text = tokenizer.decode(shown, skip_special=False)
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

    def push(self, token: int) -> str:
        """Add a token; return the text that is final now, perhaps none."""
        if self._has_stopped or token in self.end_tokens:
            return ""
        return self._show(self._stream.push(token), is_last=False)

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


# --- choices ------------------------------------------------------------------------------------------------------------


@dataclass
class ChoiceDelta:
    """New content of one choice; all of it in a whole answer."""

    index: int
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logp: list[float] | None = None
    """Log-probs of the tokens, raw if the request asks for these; known when the choice has ended."""
    finish: str | None = None
    top: list[list[tuple[int, float]]] | None = None
    """The likeliest tokens at each position with their log-probs, if computed."""


class Choice:
    """State of one choice."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, offered: OfferedTools | None) -> None:
        self.index, self.request, self.tokenizer = index, request, tokenizer
        self.num_tokens = 0
        # The control tokens of calls must not be lost in decoding.
        self._shown_ids = frozenset() if offered is None else tokenizer.special_ids(offered.format.control_tokens)
        self._text = VisibleText(
            tokenizer, request.sampling.stop_tokens, request.sampling.stop, shown_ids=self._shown_ids
        )
        self._calls = None if offered is None else ToolCallStream(offered.format, offered.schemas)

    def take(self, tokens: list[int], completion: Completion | None) -> ChoiceDelta:
        """Add tokens, or the completion, which has all tokens; return the new content."""
        delta = ChoiceDelta(self.index, tokens=tokens)
        if completion is not None:
            if not np.isfinite(completion.logp).all():
                raise nan_error()
            delta.tokens = completion.tokens[self.num_tokens :].tolist()
            logp = completion.logp if completion.raw_logp is None else completion.raw_logp
            delta.logp = logp[self.num_tokens :].tolist()
            delta.finish = completion.finish
        text = self._show(delta.tokens, completion is not None)
        self.num_tokens += len(delta.tokens)
        delta.text = text if self._calls is None else self._calls.push(text)
        if self._calls is not None and completion is not None:
            rest, delta.calls = self._calls.finish()
            delta.text += rest
            delta.finish = "tool_calls" if delta.calls else delta.finish
        return delta

    def _show(self, tokens: list[int], is_last: bool) -> str:
        if is_last and not self.num_tokens:  # decode the whole text, which is much faster than token by token
            options = self.request.sampling
            return completion_text(tokens, self.tokenizer, options.stop_tokens, options.stop, self._shown_ids)
        text = "".join([self._text.push(token) for token in tokens])
        return text + self._text.finish() if is_last else text


class Choices:
    """The choices of an answer."""

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer, offered: OfferedTools | None) -> None:
        self.all = [Choice(i, request, tokenizer, offered) for i, request in enumerate(requests)]
        self.finishes: Counter[str] = Counter()

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return sum(choice.num_tokens for choice in self.all)

    def take(self, events: Iterable[EngineEvent]) -> Iterator[ChoiceDelta]:
        """Yield the new content of each choice in a batch of events."""
        tokens: dict[int, list[int]] = {}
        ended: dict[int, Completion] = {}
        for event in events:
            heard = tokens.setdefault(event.index, [])
            if isinstance(event.payload, Completion):
                ended[event.index] = event.payload
            else:
                heard.append(event.payload)
        for index, heard in tokens.items():
            delta = self.all[index].take(heard, ended.get(index))
            if delta.finish is not None:
                self.finishes[delta.finish] += 1
            yield delta


TopTokens = Sequence[tuple[int, float]]
"""Tokens with their log-probs, the likeliest first."""


@dataclass
class EchoedPrompt:
    """A prompt that the answer repeats (`echo`)."""

    text: str
    tokens: list[int]
    logp: list[float] | None = None
    """Raw log-probs of all tokens but the first; None unless the request has `logprobs`."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class ApiResponse(ABC):
    """Base of both response formats. A subclass formats a choice."""

    object = chunk_object = ""

    def __init__(
        self,
        name: str,
        asked: CompletionRequest | ChatRequest,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
    ) -> None:
        self.asked, self.requests, self.tokenizer = asked, requests, tokenizer
        self.head = {"id": name, "created": int(time.time()), "model": asked.model}
        # n samples of a prompt count it once
        self.num_prompt_tokens = sum(len(r.tokens) for r in requests[:: asked.n])
        self._opened: set[int] = set()  # choices with at least one chunk
        options = asked.stream_options
        self.usage_at_end = options is not None and options.include_usage

    def whole(self, deltas: Sequence[ChoiceDelta], num_tokens: int) -> Json:
        """The whole response, without `stream`."""
        choices = [self._choice(delta) for delta in sorted(deltas, key=lambda delta: delta.index)]
        return self._framed(self.object, choices) | self._prompt() | {"usage": self.usage(num_tokens)}

    def chunk(self, delta: ChoiceDelta) -> Json | None:
        """One chunk of a stream; None if it has no content."""
        if not (delta.text or delta.calls or delta.finish or (delta.tokens and self.asked.return_token_ids)):
            return None
        is_first = delta.index not in self._opened
        self._opened.add(delta.index)
        usage = {"usage": None} if self.usage_at_end else {}
        return (
            self._framed(self.chunk_object, [self._part(delta, is_first)])
            | (self._prompt() if is_first else {})
            | usage
        )

    def last_chunk(self, num_tokens: int) -> Json | None:
        """The last chunk with the token counts; None unless the request asks for it."""
        if not self.usage_at_end:
            return None
        return self._framed(self.chunk_object, []) | {"usage": self.usage(num_tokens)}

    def usage(self, num_tokens: int) -> Json:
        """Numbers of prompt and completion tokens."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
        }

    def _framed(self, kind: str, choices: list[Json]) -> Json:
        return {**self.head, "object": kind, "choices": choices}

    @abstractmethod
    def _choice(self, delta: ChoiceDelta) -> Json:
        """A choice of a whole response."""

    @abstractmethod
    def _part(self, delta: ChoiceDelta, is_first: bool) -> Json:
        """A choice of one chunk."""

    def _prompt(self) -> Json:
        return {}

    def _ids(self, delta: ChoiceDelta) -> Json:
        return {"token_ids": delta.tokens} if self.asked.return_token_ids else {}

    def _name(self, token: int, piece: str) -> str:
        """A token as its text; a special token, which has none, by its name."""
        return self._alone(token) if self.tokenizer.is_special(token) else piece

    def _alone(self, token: int) -> str:
        """A token decoded alone, which may be a part of a character."""
        return self.tokenizer.decode([token], skip_special=False)

    def _alternatives(
        self, token: int, name: str, logp: float, top: TopTokens | None, num_top: int
    ) -> list[tuple[str, float]]:
        """Names and log-probs of the likeliest tokens. The token itself is added if it is missing, with the engine's log-prob."""
        if top is None:  # greedy: the token is the likeliest
            return [(name, logp)] if num_top else []
        found = [(name, logp) if other == token else (self._alone(other), value) for other, value in top[:num_top]]
        return found if token in [other for other, _ in top[:num_top]] else [*found, (name, logp)]


class CompletionResponse(ApiResponse):
    """`text_completion`, for whole responses and chunks."""

    object = chunk_object = "text_completion"
    echoes: Sequence[EchoedPrompt] = ()
    """One for each prompt; empty unless the request has `echo`."""

    def _choice(self, delta: ChoiceDelta) -> Json:
        return self._part(delta, is_first=True)

    def _part(self, delta: ChoiceDelta, is_first: bool) -> Json:
        echo = self.echoes[delta.index // self.asked.n] if self.echoes else None
        found = {
            "index": delta.index,
            "text": delta.text if echo is None else echo.text + delta.text,
            "logprobs": self._logprobs(delta, echo),
            "finish_reason": delta.finish,
        }
        if is_first and self.asked.return_token_ids:
            found["prompt_token_ids"] = list(self.requests[delta.index].tokens)
        return found | self._ids(delta)

    def _logprobs(self, delta: ChoiceDelta, echo: EchoedPrompt | None) -> Json | None:
        num_top = self.asked.logprobs
        if num_top is None or delta.logp is None:
            return None
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if num_top else None, "text_offset": []}
        if echo is not None and echo.logp is not None:
            # The first token of a text has no log-prob.
            top = [None, *echo.top] if num_top else None
            self._add(found, echo.tokens, [None, *echo.logp], top, 0, len(echo.text))
        start = 0 if echo is None else len(echo.text)
        self._add(found, delta.tokens, delta.logp, delta.top, start, start + len(delta.text))
        return found

    def _add(
        self,
        found: Json,
        tokens: Sequence[int],
        logp: Sequence[float | None],
        top: Sequence[TopTokens | None] | None,
        start: int,
        end: int,
    ) -> None:
        """Append tokens whose text is at `start` to `end`."""
        num_top = self.asked.logprobs
        pieces = self.tokenizer.pieces(tokens)
        names = [self._name(token, piece) for token, piece in zip(tokens, pieces, strict=True)]
        found["tokens"] += names
        found["token_logprobs"] += logp
        starts = itertools.accumulate(map(len, pieces[:-1]), initial=start) if pieces else []
        found["text_offset"] += [min(at, end) for at in starts]
        if not num_top:
            return
        for k, (token, name, value) in enumerate(zip(tokens, names, logp, strict=True)):
            if value is None:
                found["top_logprobs"].append(None)
                continue
            others = self._alternatives(token, name, value, None if top is None else top[k], num_top)
            # Tokens with the same text share a key: the likelier one comes last and is kept.
            found["top_logprobs"].append(dict(sorted(others, key=lambda pair: pair[1])))


class ChatResponse(ApiResponse):
    """`chat.completion` and `chat.completion.chunk`."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _choice(self, delta: ChoiceDelta) -> Json:
        message: Json = {"role": "assistant", "content": (delta.text or None) if delta.calls else delta.text}
        if delta.calls:
            message["tool_calls"] = delta.calls
        return self._around(delta, {"message": message})

    def _part(self, delta: ChoiceDelta, is_first: bool) -> Json:
        part: Json = {"role": "assistant"} if is_first else {}
        if delta.text or (is_first and not delta.calls):
            part["content"] = delta.text
        if delta.calls:
            part["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta.calls)]
        return self._around(delta, {"delta": part})

    def _around(self, delta: ChoiceDelta, content: Json) -> Json:
        found = {"index": delta.index, "logprobs": self._logprobs(delta), "finish_reason": delta.finish}
        return found | content | self._ids(delta)

    def _prompt(self) -> Json:
        return {"prompt_token_ids": list(self.requests[0].tokens)} if self.asked.return_token_ids else {}

    def _logprobs(self, delta: ChoiceDelta) -> Json | None:
        asked = self.asked
        if not asked.logprobs or delta.logp is None:
            return None
        assert isinstance(asked, ChatRequest)
        content = []
        pieces = self.tokenizer.pieces(delta.tokens)
        for k, (token, piece, logp) in enumerate(zip(delta.tokens, pieces, delta.logp, strict=True)):
            name = self._name(token, piece)
            entry = {"token": name, "logprob": logp, "bytes": list(piece.encode()) if name == piece else None}
            top = None if delta.top is None else delta.top[k]
            others = self._alternatives(token, name, logp, top, asked.top_logprobs)[: asked.top_logprobs]
            content.append(entry | {"top_logprobs": [self._other(other, entry) for other in others]})
        return {"content": content, "refusal": None}

    @staticmethod
    def _other(other: tuple[str, float], entry: Json) -> Json:
        name, logp = other
        if name == entry["token"] and logp == entry["logprob"]:
            return dict(entry)
        return {"token": name, "logprob": logp, "bytes": list(name.encode())}
