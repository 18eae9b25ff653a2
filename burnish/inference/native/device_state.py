"""What the device knows of each running row: a decode step reads it and writes it, without asking the host.

A row is live until it draws one of its stop tokens or reaches its limit; then its position becomes -1 and it sees, writes
and draws nothing until the host gives the row to another request. What a row drew stands in a ring that the host reads
every few steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.core.random_keys import to_int64, uniforms
from burnish.inference.native.engine_common import MAX_BIASES, Bias, sample
from burnish.models.kernels.device import to_device, use_triton
from burnish.models.kernels.exact import log_softmax_at_temperature

LIVE, PRODUCED, LAST_TOKEN, POSITION, LIMIT, KEY, DRAWN = range(7)
MAX_STOP_TOKENS = 8  # stop tokens the device looks for; the host finds any further ones
RING_SIZE = 32  # tokens a row may draw between two looks of the host


class SamplerFlags(NamedTuple):
    """What a draw must do because some row asks for it; a decode step is captured for each combination that occurs."""

    truncated: bool = False
    """A row draws from less than the whole distribution."""
    biased: bool = False
    """A row adds to logits."""
    raw: bool = False
    """A row asks for log-probs of the model itself."""

    def __or__(self, other: SamplerFlags) -> SamplerFlags:
        return SamplerFlags(self.truncated or other.truncated, self.biased or other.biased, self.raw or other.raw)


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
    bias: Bias = ()


@dataclass(frozen=True)
class RingSnapshot:
    """The rings as they were after a step; on a GPU `ready` says when they have arrived."""

    ints: Tensor  # [2, rows]: live, produced
    tokens: Tensor  # [rows, RING]
    logp: Tensor
    raw: Tensor | None  # where some row asks for it
    ready: torch.cuda.Event | None


class DeviceRows:
    """State of `size` rows."""

    def __init__(self, size: int, width: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.ints = torch.zeros(7, size, dtype=torch.int64, device=device)
        self.ints[POSITION] = -1
        self.temperature = torch.ones(size, dtype=torch.float64, device=device)
        self.counts = torch.zeros(2, size, dtype=torch.int64, device=device)  # top_k, how many biases
        self.tails = torch.zeros(2, size, dtype=torch.float64, device=device)  # top_p, min_p
        self.tails[0] = 1.0
        self.stop = torch.full((size, MAX_STOP_TOKENS), -1, dtype=torch.int64, device=device)
        self.table = torch.zeros(size, width, dtype=torch.int32, device=device)
        self.ring_token = torch.zeros(size, RING_SIZE, dtype=torch.int32, device=device)
        self.ring_logp = torch.zeros(size, RING_SIZE, dtype=torch.float32, device=device)
        self.ring_raw = torch.zeros(size, RING_SIZE, dtype=torch.float32, device=device)
        self.bias_token = torch.zeros(size, MAX_BIASES, dtype=torch.int32, device=device)
        self.bias_value = torch.zeros(size, MAX_BIASES, dtype=torch.float64, device=device)

    def start(self, rows: Sequence[NewRow]) -> None:
        """Take new rows in."""
        index = self._send(np.array([r.row for r in rows]))
        ints = [(1, 0, 0, r.position, r.limit, to_int64(r.key), r.drawn) for r in rows]
        self.ints.index_copy_(1, index, self._send(np.array(ints, dtype=np.int64).T.copy()))
        self.temperature.index_copy_(0, index, self._send(np.array([r.temperature for r in rows], dtype=np.float64)))
        self.counts.index_copy_(1, index, self._send(np.array([(r.top_k, len(r.bias)) for r in rows]).T.copy()))
        tails = np.array([(r.top_p, r.min_p) for r in rows], dtype=np.float64).T.copy()
        self.tails.index_copy_(1, index, self._send(tails))
        stops = np.full((len(rows), MAX_STOP_TOKENS), -1)
        for k, row in enumerate(rows):
            known = list(row.stop_tokens)[:MAX_STOP_TOKENS]
            stops[k, : len(known)] = known
        self.stop.index_copy_(0, index, self._send(stops))
        if any(row.bias for row in rows):
            self._start_biases(rows, index)

    def _start_biases(self, rows: Sequence[NewRow], index: Tensor) -> None:
        tokens = np.zeros((len(rows), MAX_BIASES), dtype=np.int32)
        values = np.zeros((len(rows), MAX_BIASES), dtype=np.float64)
        for k, row in enumerate(rows):
            if row.bias:
                tokens[k, : len(row.bias)], values[k, : len(row.bias)] = zip(*row.bias, strict=True)
        self.bias_token.index_copy_(0, index, self._send(tokens))
        self.bias_value.index_copy_(0, index, self._send(values))

    def stop_rows(self, rows: Sequence[int]) -> None:
        """These rows are not there any more."""
        index = self._send(np.array(rows, dtype=np.int64))
        self.ints[LIVE].index_fill_(0, index, 0)
        self.ints[POSITION].index_fill_(0, index, -1)

    def reorder(self, order: Sequence[int]) -> None:
        """Row i becomes what row `order[i]` was; the rows after those given are not there any more."""
        index = self._send(np.array(order, dtype=np.int64))
        count = len(order)
        for tensor in (self.ints, self.counts, self.tails):
            tensor[:, :count] = tensor[:, index]
        rings = (self.ring_token, self.ring_logp, self.ring_raw)
        for tensor in (self.temperature, self.stop, *rings, self.bias_token, self.bias_value):
            tensor[:count] = tensor[index]
        self.ints[LIVE, count:] = 0
        self.ints[POSITION, count:] = -1

    def set_table(self, table: np.ndarray) -> None:
        """The first pages of the first rows, [rows, up to width] int32."""
        self.table[: table.shape[0], : table.shape[1]].copy_(self._send(table), non_blocking=True)

    def draw(self, logits: Tensor, source: Tensor, row: Tensor, wants: SamplerFlags) -> None:
        """Each live row of `row` [n] draws from `logits[source]`: token and log-prob to its ring, then it goes on or ends."""
        if use_triton(logits):
            self._draw_by_kernels(logits, source, row, wants)
            return
        lines = logits[source]
        biased = self._add_bias(lines, row) if wants.biased else lines
        live, produced, _, position, limit, key, drawn = self.ints[:, row]
        tails = (self.counts[0, row], *self.tails[:, row]) if wants.truncated else ()
        tokens, logp = sample(biased, uniforms(key, drawn), self.temperature[row], *tails)
        on = live.bool()
        slot = (row * RING_SIZE + produced % RING_SIZE)[on]
        self.ring_token.view(-1)[slot] = tokens[on].int()
        self.ring_logp.view(-1)[slot] = logp[on].float()
        if wants.raw:
            self.ring_raw.view(-1)[slot] = (
                log_softmax_at_temperature(lines, 1.0).gather(1, tokens[:, None])[on, 0].float()
            )
        stopped = (self.stop[row] == tokens[:, None]).any(1)
        goes_on = on & ~stopped & (produced + 1 < limit)
        after = torch.stack(
            [goes_on.long(), produced + 1, tokens, torch.where(goes_on, position + 1, -1), limit, key, drawn + 1]
        )
        self.ints[:, row] = torch.where(on, after, self.ints[:, row])

    def _add_bias(self, lines: Tensor, row: Tensor) -> Tensor:
        wide = lines.to(torch.promote_types(lines.dtype, torch.float32), copy=True)
        given = torch.arange(MAX_BIASES, device=self.device) < self.counts[1, row, None]
        values = torch.where(given, self.bias_value[row], 0.0).to(wide.dtype)
        return wide.scatter_add_(1, torch.where(given, self.bias_token[row], 0).long(), values)

    def _draw_by_kernels(self, logits: Tensor, source: Tensor, row: Tensor, wants: SamplerFlags) -> None:
        from burnish.models.kernels.triton import sampling, truncation

        bias = (self.bias_token, self.bias_value, self.counts[1]) if wants.biased else None
        cut = None
        if wants.truncated:
            options = self.temperature, self.counts[0], self.tails[0], self.tails[1]
            cut = truncation.find_cut(logits, source, row, *options, bias)
        rings = self.ring_token, self.ring_logp
        raw = self.ring_raw if wants.raw else None
        sampling.draw(logits, source, row, self.temperature, self.ints, self.stop, *rings, cut, bias, raw)

    def snapshot(self, rows: int, wants: SamplerFlags) -> RingSnapshot:
        """What the first rows have drawn, on its way to the host."""
        parts = [self.ints[:2, :rows], self.ring_token[:rows], self.ring_logp[:rows]]
        parts += [self.ring_raw[:rows]] if wants.raw else []
        if self.device.type != "cuda":
            there, ready = [part.clone() for part in parts], None
        else:
            there = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
            for host, part in zip(there, parts, strict=True):
                host.copy_(part, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return RingSnapshot(there[0], there[1], there[2], there[3] if wants.raw else None, ready)

    def _send(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)
