"""Answers in the shapes of OpenAI's two APIs, whole and as the chunks of a stream.

Beyond them, with `return_token_ids`: `token_ids` of each choice, and `prompt_token_ids` (of a chat beside the choices, of a completion
in each choice). Log-probs and token ids are of every token sampled, the end token and those of a stop string included.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from burnish.core.engine import Request
from burnish.models.tokenizer import Tokenizer
from burnish.serve.choices import Delta
from burnish.serve.schema import ChatRequest, CompletionRequest

Json = dict[str, Any]
Top = Sequence[tuple[int, float]]
"""Tokens with their log-probs, the likeliest first."""


@dataclass
class Echo:
    """A prompt that is part of the answer."""

    text: str
    tokens: list[int]
    logp: list[float] | None = None
    """The log-probs of all tokens but the first, under the model itself; None unless the request has `logprobs`."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)


class Answer(ABC):
    """What both shapes share. A subclass says what a choice looks like."""

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
        # n samples of a prompt count it once.
        self.num_prompt_tokens = sum(len(r.tokens) for r in requests[:: asked.n])
        self._opened: set[int] = set()  # choices of which a chunk was made
        options = asked.stream_options
        self.usage_at_end = options is not None and options.include_usage

    def whole(self, deltas: Sequence[Delta], num_tokens: int) -> Json:
        """The answer to a request without `stream`."""
        choices = [self._choice(delta) for delta in sorted(deltas, key=lambda delta: delta.index)]
        return self._framed(self.object, choices) | self._prompt() | {"usage": self.usage(num_tokens)}

    def chunk(self, delta: Delta) -> Json | None:
        """One event of a stream; None where a client has nothing to learn from it."""
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
        """The event after all choices, if the client wants the counts there."""
        if not self.usage_at_end:
            return None
        return self._framed(self.chunk_object, []) | {"usage": self.usage(num_tokens)}

    def usage(self, num_tokens: int) -> Json:
        """Tokens read and written."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_tokens,
            "total_tokens": self.num_prompt_tokens + num_tokens,
        }

    def _framed(self, kind: str, choices: list[Json]) -> Json:
        return {**self.head, "object": kind, "choices": choices}

    @abstractmethod
    def _choice(self, delta: Delta) -> Json:
        """A choice of a whole answer."""

    @abstractmethod
    def _part(self, delta: Delta, is_first: bool) -> Json:
        """A choice of one event."""

    def _prompt(self) -> Json:
        return {}

    def _ids(self, delta: Delta) -> Json:
        return {"token_ids": delta.tokens} if self.asked.return_token_ids else {}

    def _name(self, token: int, piece: str) -> str:
        """A token as its text; markup, which has none, by its name."""
        return self._alone(token) if self.tokenizer.is_special(token) else piece

    def _alone(self, token: int) -> str:
        """A token as its text where it stands alone, which may be a part of a character."""
        return self.tokenizer.decode([token], skip_special=False)

    def _alternatives(
        self, token: int, name: str, logp: float, top: Top | None, num_top: int
    ) -> list[tuple[str, float]]:
        """Names and log-probs of the likeliest tokens. The token itself is added if it is not among them, with the engine's log-prob."""
        if top is None:  # drawn greedily: the token is the likeliest
            return [(name, logp)] if num_top else []
        found = [(name, logp) if other == token else (self._alone(other), value) for other, value in top[:num_top]]
        return found if token in [other for other, _ in top[:num_top]] else [*found, (name, logp)]


class CompletionAnswer(Answer):
    """`text_completion`: a chunk looks like the whole."""

    object = chunk_object = "text_completion"
    echoes: Sequence[Echo] = ()
    """One for each prompt; empty unless the request has `echo`."""

    def _choice(self, delta: Delta) -> Json:
        return self._part(delta, is_first=True)

    def _part(self, delta: Delta, is_first: bool) -> Json:
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

    def _logprobs(self, delta: Delta, echo: Echo | None) -> Json | None:
        num_top = self.asked.logprobs
        if num_top is None or delta.logp is None:
            return None
        found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [] if num_top else None, "text_offset": []}
        if echo is not None and echo.logp is not None:
            # The first token of a text has no past, and so no log-prob.
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
        top: Sequence[Top | None] | None,
        start: int,
        end: int,
    ) -> None:
        """Append tokens whose text goes from `start` to `end`."""
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


class ChatAnswer(Answer):
    """`chat.completion` and `chat.completion.chunk`."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def _choice(self, delta: Delta) -> Json:
        message: Json = {"role": "assistant", "content": (delta.text or None) if delta.calls else delta.text}
        if delta.calls:
            message["tool_calls"] = delta.calls
        return self._around(delta, {"message": message})

    def _part(self, delta: Delta, is_first: bool) -> Json:
        part: Json = {"role": "assistant"} if is_first else {}
        if delta.text or (is_first and not delta.calls):
            part["content"] = delta.text
        if delta.calls:
            part["tool_calls"] = [{"index": i, **call} for i, call in enumerate(delta.calls)]
        return self._around(delta, {"delta": part})

    def _around(self, delta: Delta, content: Json) -> Json:
        found = {"index": delta.index, "logprobs": self._logprobs(delta), "finish_reason": delta.finish}
        return found | content | self._ids(delta)

    def _prompt(self) -> Json:
        return {"prompt_token_ids": list(self.requests[0].tokens)} if self.asked.return_token_ids else {}

    def _logprobs(self, delta: Delta) -> Json | None:
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
