"""What became of each choice of an answer, from what the engine says of its requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from burnish.core.engine import Completion, Request
from burnish.models.tokenizer import Tokenizer
from burnish.serve.errors import not_a_number
from burnish.serve.loop import Event
from burnish.serve.text import ShownText, whole_text
from burnish.serve.tools import CallStream


@dataclass
class Delta:
    """What is new of one choice; all of it, if nothing of it was seen before."""

    index: int
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logp: list[float] | None = None
    """Of the tokens, under the model itself where the request asked for that; known when the choice has ended."""
    finish: str | None = None
    top: list[list[tuple[int, float]]] | None = None
    """The likeliest tokens at each place with their log-probs, where they were computed."""


class Choice:
    """One choice, token by token or all at once."""

    def __init__(self, index: int, request: Request, tokenizer: Tokenizer, with_calls: bool) -> None:
        self.index, self.request, self.tokenizer = index, request, tokenizer
        self.num_tokens = 0
        self._text = ShownText(tokenizer, request.sampling.stop_tokens, request.sampling.stop)
        self._calls = CallStream() if with_calls else None

    def take(self, tokens: list[int], completion: Completion | None) -> Delta:
        """What these tokens add, and the end if the completion is there; it has all tokens, also those taken before."""
        delta = Delta(self.index, tokens=tokens)
        if completion is not None:
            if not np.isfinite(completion.logp).all():
                raise not_a_number()
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
        if is_last and not self.num_tokens:  # the whole at once, which is much faster than token by token
            options = self.request.sampling
            return whole_text(tokens, self.tokenizer, options.stop_tokens, options.stop)
        text = "".join([self._text.push(token) for token in tokens])
        return text + self._text.finish() if is_last else text


class Choices:
    """All choices of an answer."""

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer, with_calls: bool) -> None:
        self.all = [Choice(i, request, tokenizer, with_calls) for i, request in enumerate(requests)]
        self.finishes: Counter[str] = Counter()

    @property
    def num_tokens(self) -> int:
        """Tokens sampled so far."""
        return sum(choice.num_tokens for choice in self.all)

    def take(self, events: Iterable[Event]) -> Iterator[Delta]:
        """What a batch of events adds, one delta a choice."""
        tokens: dict[int, list[int]] = {}
        ended: dict[int, Completion] = {}
        for event in events:
            heard = tokens.setdefault(event.index, [])
            if isinstance(event.what, Completion):
                ended[event.index] = event.what
            else:
                heard.append(event.what)
        for index, heard in tokens.items():
            delta = self.all[index].take(heard, ended.get(index))
            if delta.finish is not None:
                self.finishes[delta.finish] += 1
            yield delta
