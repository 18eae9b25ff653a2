"""Responses of OpenAI's two APIs, whole and as chunks of a stream.

With `return_token_ids` each choice also has `token_ids`, and there are `prompt_token_ids`: next to the choices of a chat, in each
choice of a completion. Log-probs and token ids are of all sampled tokens, with the end token and those of a stop string.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.core.engine import Completion, Request
from burnish.gateway.completion_text import Json, OfferedTools, ToolCallStream, VisibleText, completion_text
from burnish.gateway.openai_schema import ChatRequest, CompletionRequest, nan_error
from burnish.models.tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineEvent:
    """New tokens of a request, or its completion."""

    index: int
    """Index of the request in its generation."""
    payload: list[int] | Completion


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
        text = self._text.push(tokens)
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
                heard += event.payload
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
        names = pieces
        if self.tokenizer.has_special(tokens):
            names = [self._name(token, piece) for token, piece in zip(tokens, pieces, strict=True)]
        found["tokens"] += names
        found["token_logprobs"] += logp
        starts = list(itertools.accumulate(map(len, pieces[:-1]), initial=start)) if pieces else []
        found["text_offset"] += starts if not starts or starts[-1] <= end else [min(at, end) for at in starts]
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
