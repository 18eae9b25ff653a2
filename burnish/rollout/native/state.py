"""What the device knows of each running row: a decode step reads it and writes it, without asking the host.

A row is live until it draws one of its stop tokens or reaches its limit; then its position becomes -1 and it sees, writes
and draws nothing until the host gives the row to another request. What a row drew stands in a ring that the host reads
every few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from burnish.core.noise import signed, uniforms
from burnish.models.ops.device import use_kernels
from burnish.models.ops.transfer import send
from burnish.rollout.native.sampler import sample, truncate

LIVE, PRODUCED, LAST, POSITION, LIMIT, KEY, DRAWN = range(7)
STOPS = 8  # stop tokens the device looks for; the host finds any further ones
RING = 32  # tokens a row may draw between two looks of the host


@dataclass(frozen=True)
class NewRow:
    """What a row starts with, before its first token is drawn."""

    row: int
    position: int  # of the last token of its context
    limit: int
    key: int
    drawn: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_tokens: Sequence[int]


@dataclass(frozen=True)
class Snapshot:
    """The rings as they were after a step; on a GPU `ready` says when they have arrived."""

    ints: Tensor  # [2, rows]: live, produced
    tokens: Tensor  # [rows, RING]
    logp: Tensor
    ready: torch.cuda.Event | None


class RowState:
    """State of `size` rows."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.ints = torch.zeros(7, size, dtype=torch.int64, device=device)
        self.ints[POSITION] = -1
        self.temperature = torch.ones(size, dtype=torch.float64, device=device)
        self.top_k = torch.zeros(size, dtype=torch.int64, device=device)
        self.tails = torch.zeros(2, size, dtype=torch.float64, device=device)  # top_p, min_p
        self.stop = torch.full((size, STOPS), -1, dtype=torch.int64, device=device)
        self.table = torch.zeros(size, width, dtype=torch.int32, device=device)
        self.ring_token = torch.zeros(size, RING, dtype=torch.int32, device=device)
        self.ring_logp = torch.zeros(size, RING, dtype=torch.float32, device=device)

    def start(self, rows: Sequence[NewRow]) -> None:
        """Take new rows in."""
        index = self._send(np.array([r.row for r in rows]))
        ints = [(1, 0, 0, r.position, r.limit, signed(r.key), r.drawn) for r in rows]
        self.ints.index_copy_(1, index, self._send(np.array(ints, dtype=np.int64).T.copy()))
        self.temperature.index_copy_(0, index, self._send(np.array([r.temperature for r in rows], dtype=np.float64)))
        self.top_k.index_copy_(0, index, self._send(np.array([r.top_k for r in rows])))
        tails = np.array([(r.top_p, r.min_p) for r in rows], dtype=np.float64).T.copy()
        self.tails.index_copy_(1, index, self._send(tails))
        stops = np.full((len(rows), STOPS), -1)
        for k, row in enumerate(rows):
            known = list(row.stop_tokens)[:STOPS]
            stops[k, : len(known)] = known
        self.stop.index_copy_(0, index, self._send(stops))

    def stop_rows(self, rows: Sequence[int]) -> None:
        """These rows are not there any more."""
        index = self._send(np.array(rows, dtype=np.int64))
        self.ints[LIVE].index_fill_(0, index, 0)
        self.ints[POSITION].index_fill_(0, index, -1)

    def reorder(self, order: Sequence[int]) -> None:
        """Row i becomes what row `order[i]` was; the rows after those given are not there any more."""
        index = self._send(np.array(order, dtype=np.int64))
        count = len(order)
        for tensor in (self.ints, self.tails):
            tensor[:, :count] = tensor[:, index]
        for tensor in (self.temperature, self.top_k, self.stop, self.ring_token, self.ring_logp):
            tensor[:count] = tensor[index]
        self.ints[LIVE, count:] = 0
        self.ints[POSITION, count:] = -1

    def set_table(self, table: np.ndarray) -> None:
        """The pages of the first rows, [rows, width] int32."""
        self.table[: table.shape[0]].copy_(self._send(table), non_blocking=True)

    def draw(self, logits: Tensor, source: Tensor, row: Tensor, truncated: bool) -> None:
        """Each live row of `row` [n] draws from `logits[source]`: token and log-prob to its ring, then it goes on or ends."""
        temperature = self.temperature
        if truncated:
            greedy = temperature[row] == 0
            scale = torch.where(greedy, 1.0, temperature[row])[:, None]
            wide = logits[source].to(torch.promote_types(logits.dtype, torch.float32))
            wide = wide / scale.to(wide.dtype)
            logits = truncate(wide.log_softmax(-1), self.top_k[row], self.tails[0][row], self.tails[1][row])
            source = torch.arange(row.shape[0], device=self.device)
            temperature = torch.where(temperature == 0, 0.0, 1.0)
        if use_kernels(logits):
            from burnish.models.ops.kernels import sampling

            sampling.draw(logits, source, row, temperature, self.ints, self.stop, self.ring_token, self.ring_logp)
            return
        live, produced, _, position, limit, key, drawn = self.ints[:, row]
        tokens, logp = sample(logits[source], uniforms(key, drawn), temperature[row])
        on = live.bool()
        slot = row * RING + produced % RING
        self.ring_token.view(-1)[slot[on]] = tokens[on].int()
        self.ring_logp.view(-1)[slot[on]] = logp[on].float()
        stopped = (self.stop[row] == tokens[:, None]).any(1)
        goes_on = on & ~stopped & (produced + 1 < limit)
        after = torch.stack(
            [goes_on.long(), produced + 1, tokens, torch.where(goes_on, position + 1, -1), limit, key, drawn + 1]
        )
        self.ints[:, row] = torch.where(on, after, self.ints[:, row])

    def snapshot(self, rows: int) -> Snapshot:
        """What the first rows have drawn, on its way to the host."""
        parts = (self.ints[:2, :rows], self.ring_token[:rows], self.ring_logp[:rows])
        if self.device.type != "cuda":
            ints, tokens, logp = (part.clone() for part in parts)
            return Snapshot(ints, tokens, logp, None)
        ints, tokens, logp = (torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts)
        for there, part in zip((ints, tokens, logp), parts, strict=True):
            there.copy_(part, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return Snapshot(ints, tokens, logp, ready)

    def _send(self, array: np.ndarray) -> Tensor:
        return send(array, self.device)
