"""A request that vLLM works on, and what it has produced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from burnish.core.engine import Completion, Finish, Request

TEXT_TAIL = 8
"""Tokens that show no text, which a stop string may span besides one for each of its bytes."""


@dataclass
class Row:
    """Tokens as they come; ended when `finish` is set, complete when nothing is scored any more."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    raw_logp: list[float] | None = None
    """Where they are another distribution's and have been computed."""
    finish: Finish | None = None

    def extend(
        self, tokens: Sequence[int], logp: Sequence[float], decode: Callable[[list[int]], str] | None
    ) -> list[int]:
        """Take what was drawn, up to a stop string; returns the tokens that were taken."""
        stop, before = self.request.sampling.stop, len(self.tokens)
        for token, value in zip(tokens, logp, strict=True):
            self.tokens.append(token)
            self.logp.append(value)
            if stop and self._ends_with(stop, decode):
                self.finish = "stop"
                break
        return self.tokens[before:]

    def _ends_with(self, stop: Sequence[str], decode: Callable[[list[int]], str] | None) -> bool:
        assert decode is not None, "checked when the request was submitted"
        tail = max(len(text.encode()) for text in stop) + TEXT_TAIL
        text = decode(self.tokens[-tail:])
        return any(s in text for s in stop)

    def completion(self, version: int) -> Completion:
        """What it has."""
        raw = None
        if self.request.sampling.raw_logprobs:
            raw = np.array(self.logp if self.raw_logp is None else self.raw_logp, dtype=np.float32)
        return Completion(
            self.request.id,
            np.array(self.tokens, dtype=np.int64),
            np.array(self.logp, dtype=np.float32),
            self.finish or "aborted",
            version,
            raw_logp=raw,
        )
