"""The running rows of the native engine: everything a decode step needs to know about each, as arrays.

Row i of every array belongs to `requests[i]`; rows stay dense, like the cache's. A hundred numbers are added to or compared
faster by numpy than by torch, so the columns are arrays; what the model and the sampler read is also a tensor on the same memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from burnish.core.engine import Completion, Request
from burnish.core.noise import signed


class Wants(NamedTuple):
    """What any of the rows asks of a draw beside a token at temperature 1."""

    temperature: bool
    top_k: bool
    top_p: bool
    min_p: bool
    bias: bool
    raw_logprobs: bool
    stops: bool
    """Whether a token or a string may end a row before its limit."""


class Rows:
    """State of up to `size` running requests."""

    def __init__(self, size: int) -> None:
        self.requests: list[Request] = []
        self.versions: list[int] = []
        self.last_token = np.zeros(size, dtype=np.int64)
        self.position = np.zeros(size, dtype=np.int64)  # where the last token stands in its sequence
        self.produced = np.zeros(size, dtype=np.int64)
        self.limit = np.zeros(size, dtype=np.int64)
        self.key = np.zeros(size, dtype=np.int64)
        self.drawn = np.zeros(size, dtype=np.int64)  # tokens drawn for this sample, earlier requests included
        self.temperature = np.zeros(size, dtype=np.float64)
        self.top_k = np.zeros(size, dtype=np.int64)
        self.top_p = np.zeros(size, dtype=np.float64)
        self.min_p = np.zeros(size, dtype=np.float64)
        self.tokens = np.zeros((size, 0), dtype=np.int64)
        self.logp = np.zeros((size, 0), dtype=np.float32)
        self.raw_logp = np.zeros((size, 0), dtype=np.float32)  # of rows whose requests ask for it
        self.index = np.arange(size)
        self.tokens_in, self.positions = torch.from_numpy(self.last_token), torch.from_numpy(self.position)
        self._wants: Wants | None = None

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def wants(self) -> Wants:
        """Of all rows; looked at again when they are others."""
        if self._wants is None:
            options = {id(request.sampling): request.sampling for request in self.requests}.values()
            self._wants = Wants(
                any(o.temperature != 1 for o in options),
                any(o.top_k for o in options),
                any(o.top_p < 1 for o in options),
                any(o.min_p > 0 for o in options),
                any(o.logit_bias for o in options),
                any(o.raw_logprobs for o in options),
                any(o.stop_tokens or o.stop for o in options),
            )
        return self._wants

    def add(self, request: Request, version: int) -> int:
        """A new row at the end; its prompt is in the cache, its first token not yet drawn."""
        i, options = len(self.requests), request.sampling
        self.requests.append(request)
        self.versions.append(version)
        self.position[i] = len(request.tokens) - 1
        self.produced[i] = 0
        self.limit[i] = options.max_tokens
        self.key[i] = signed(request.key)
        self.drawn[i] = request.generated
        self.temperature[i] = options.temperature
        self.top_k[i] = options.top_k
        self.top_p[i] = options.top_p
        self.min_p[i] = options.min_p
        self._wants = None
        return i

    def record(self, rows: slice, tokens: np.ndarray, logp: np.ndarray, raw_logp: np.ndarray | None) -> None:
        """Append one drawn token to each of the rows."""
        index, column = self.index[rows], self.produced[rows]
        longest = int(column.max()) + 1
        if longest > self.tokens.shape[1]:
            self._grow(max(64, 2 * self.tokens.shape[1], longest))
        self.tokens[index, column] = tokens
        self.logp[index, column] = logp
        if raw_logp is not None:
            self.raw_logp[index, column] = raw_logp
        self.last_token[rows] = tokens
        for count in (self.position, self.produced, self.drawn):
            count[rows] += 1

    def _grow(self, capacity: int) -> None:
        for name in ("tokens", "logp", "raw_logp"):
            old = getattr(self, name)
            setattr(self, name, np.pad(old, ((0, 0), (0, capacity - old.shape[1]))))

    def completion(self, row: int, finish: str) -> Completion:
        """What a row has produced."""
        count, raw = int(self.produced[row]), self.requests[row].sampling.raw_logprobs
        return Completion(
            id=self.requests[row].id,
            tokens=self.tokens[row, :count].copy(),
            logp=self.logp[row, :count].copy(),
            finish=finish,  # type: ignore[arg-type]
            version=self.versions[row],
            raw_logp=self.raw_logp[row, :count].copy() if raw else None,
        )

    def is_nan(self, row: int) -> bool:
        """Whether the model has given a row no number, so that its keys and values may be none either."""
        return bool(np.isnan(self.logp[row, : self.produced[row]]).any())

    def remove(self, row: int) -> int:
        """Take a row out by moving the last one into its place; returns which row that was."""
        last = len(self.requests) - 1
        if row != last:
            self.requests[row], self.versions[row] = self.requests[last], self.versions[last]
            for column in (
                self.last_token, self.position, self.produced, self.limit, self.key, self.drawn,
                self.temperature, self.top_k, self.top_p, self.min_p, self.tokens, self.logp, self.raw_logp,
            ):  # fmt: skip
                column[row] = column[last]
        self.requests.pop()
        self.versions.pop()
        self._wants = None
        return last
