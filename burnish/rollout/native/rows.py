"""The running rows of the native engine: everything a decode step needs to know about each, as tensors.

Row i of every tensor belongs to `requests[i]`; rows stay dense, like the cache's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from burnish.core.engine import Completion, Request
from burnish.core.noise import signed


class Rows:
    """State of up to `size` running requests."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.device = device
        self.requests: list[Request] = []
        self.versions: list[int] = []

        def column(dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.last_token = column(torch.int64)
        self.position = column(torch.int64)  # where the last token stands in its sequence
        self.produced = column(torch.int64)
        self.limit = column(torch.int64)
        self.key = column(torch.int64)
        self.drawn = column(torch.int64)  # tokens drawn for this sample, earlier requests included
        self.temperature = column(torch.float64)
        self.top_k = column(torch.int64)
        self.top_p = column(torch.float64)
        self.min_p = column(torch.float64)
        self.capacity = 0
        self.tokens = torch.zeros(size, 0, dtype=torch.int64, device=device)
        self.logp = torch.zeros(size, 0, dtype=torch.float32, device=device)
        self.raw_logp = torch.zeros(size, 0, dtype=torch.float32, device=device)  # of rows whose requests ask for it
        self.columns = [
            self.last_token, self.position, self.produced, self.limit, self.key, self.drawn,
            self.temperature, self.top_k, self.top_p, self.min_p,
        ]  # fmt: skip

    def __len__(self) -> int:
        return len(self.requests)

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
        return i

    def record(self, rows: slice, tokens: Tensor, logp: Tensor, raw_logp: Tensor | None, longest: int) -> None:
        """Append one drawn token to each of the rows; `longest` bounds how many any has afterwards."""
        if longest > self.capacity:
            self._grow(max(64, 2 * self.capacity, longest))
        index = torch.arange(rows.start, rows.stop, device=self.device) * self.capacity + self.produced[rows]
        self.tokens.view(-1).index_copy_(0, index, tokens)
        self.logp.view(-1).index_copy_(0, index, logp.float())
        if raw_logp is not None:
            self.raw_logp.view(-1).index_copy_(0, index, raw_logp.float())
        self.last_token[rows] = tokens
        self.position[rows] += 1
        self.produced[rows] += 1
        self.drawn[rows] += 1

    def _grow(self, capacity: int) -> None:
        for name in ("tokens", "logp", "raw_logp"):
            old = getattr(self, name)
            new = torch.zeros(old.shape[0], capacity, dtype=old.dtype, device=self.device)
            new[:, : self.capacity] = old
            setattr(self, name, new)
        self.capacity = capacity

    def completion(self, row: int, finish: str) -> Completion:
        """What a row has produced."""
        count = int(self.produced[row])
        raw = self.requests[row].sampling.raw_logprobs
        return Completion(
            id=self.requests[row].id,
            tokens=self.tokens[row, :count].cpu().numpy().copy(),
            logp=self.logp[row, :count].cpu().numpy().astype(np.float32, copy=True),
            finish=finish,  # type: ignore[arg-type]
            version=self.versions[row],
            raw_logp=self.raw_logp[row, :count].cpu().numpy().astype(np.float32, copy=True) if raw else None,
        )

    def remove(self, row: int) -> int:
        """Take a row out by moving the last one into its place; returns which row that was."""
        last = len(self.requests) - 1
        if row != last:
            self.requests[row], self.versions[row] = self.requests[last], self.versions[last]
            for column in (*self.columns, self.tokens, self.logp, self.raw_logp):
                column[row] = column[last]
        self.requests.pop()
        self.versions.pop()
        return last
