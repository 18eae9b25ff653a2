"""Answers in the shapes of OpenAI's two APIs, whole and as the chunks of a stream.

Beyond them, with `return_token_ids`: `token_ids` of each choice, and `prompt_token_ids` (of a chat beside the choices, of a completion
in each choice). Log-probs and token ids are of every token sampled, the end token and those of a stop string included.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from burnish.core.engine import Request
from burnish.models.tokenizer import Tokenizer
from burnish.serve.choices import Delta
from burnish.serve.schema import ChatRequest, CompletionRequest

Json = dict[str, Any]


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
        return self.tokenizer.decode([token], skip_special=False) if self.tokenizer.is_special(token) else piece


class CompletionAnswer(Answer):
    """`text_completion`: a chunk looks like the whole."""

    object = chunk_object = "text_completion"

    def _choice(self, delta: Delta) -> Json:
        return self._part(delta, is_first=True)

    def _part(self, delta: Delta, is_first: bool) -> Json:
        found = {
            "index": delta.index,
            "text": delta.text,
            "logprobs": self._logprobs(delta),
            "finish_reason": delta.finish,
        }
        if is_first and self.asked.return_token_ids:
            found["prompt_token_ids"] = list(self.requests[delta.index].tokens)
        return found | self._ids(delta)

    def _logprobs(self, delta: Delta) -> Json | None:
        num_top = self.asked.logprobs
        if num_top is None or delta.logp is None:
            return None
        pieces = self.tokenizer.pieces(delta.tokens)
        names = [self._name(token, piece) for token, piece in zip(delta.tokens, pieces, strict=True)]
        starts = itertools.accumulate(map(len, pieces[:-1]), initial=0)
        return {
            "tokens": names,
            "token_logprobs": delta.logp,
            "top_logprobs": [{n: x} for n, x in zip(names, delta.logp, strict=True)] if num_top else None,
            "text_offset": [min(start, len(delta.text)) for start in starts],
        }


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
        for token, piece, logp in zip(delta.tokens, pieces, delta.logp, strict=True):
            name = self._name(token, piece)
            entry = {"token": name, "logprob": logp, "bytes": list(piece.encode()) if name == piece else None}
            content.append({**entry, "top_logprobs": [entry] if asked.top_logprobs else []})
        return {"content": content, "refusal": None}
