"""State of the running rows on the device. A decode step reads and writes it without the host.

A row is live until it draws one of its stop tokens or reaches its limit. Its position then becomes -1: it attends to nothing,
writes nothing and draws nothing until the host assigns the row to another request. Drawn tokens go to a ring buffer for each
row, which the host reads every few steps.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.core.random_keys import to_int64, uniforms
from burnish.inference.engine_common import MAX_BIASES
from burnish.inference.native.sampler import Bias, sample
from burnish.models.kernels.device import to_device, use_triton
from burnish.models.kernels.exact import log_softmax_at_temperature

LIVE, PRODUCED, LAST_TOKEN, POSITION, LIMIT, KEY, DRAWN = range(7)
"""Rows of `DeviceRows.ints`; the sampling kernel has the same order."""
MAX_STOP_TOKENS = 8
"""Stop tokens of a row that the device checks. The host checks any further ones."""
RING_SIZE = 32
"""Tokens that a row may draw before the host must read its ring."""


class SamplerFlags(NamedTuple):
    """Sampling features that some row uses. Each combination that occurs has CUDA graphs of its own."""

    truncated: bool = False
    """A row uses top-k, top-p or min-p."""
    biased: bool = False
    """A row has a logit bias."""
    raw: bool = False
    """A row asks for log-probs of the model itself."""

    def __or__(self, other: SamplerFlags) -> SamplerFlags:
        return SamplerFlags(self.truncated or other.truncated, self.biased or other.biased, self.raw or other.raw)


@dataclass(frozen=True)
class NewRow:
    """State of a row before its first token is drawn."""

    row: int
    position: int
    """Position of the last token of the context."""
    limit: int
    """Maximum number of tokens to draw."""
    key: int
    drawn: int
    """Tokens drawn for this sample before; the random stream continues after them."""
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop_tokens: Sequence[int]
    bias: Bias = ()
    rotation_delta: int = 0
    """Rotation position minus position of the tokens to draw: other than 0 after pictures."""


@dataclass(frozen=True)
class RingSnapshot:
    """Host copy of the rings after a step. On a GPU it is complete after the event `ready`."""

    ints: Tensor  # [2, rows]: live, produced
    tokens: Tensor  # [rows, RING_SIZE]
    logp: Tensor  # [rows, RING_SIZE]
    raw: Tensor | None  # [rows, RING_SIZE] if some row asks for raw log-probs
    ready: torch.cuda.Event | None
    drafts: Tensor | None = None  # [2]: draft tokens fed and accepted in the launch, if it verified drafts


class DeviceRows:
    """State of `size` rows, each with a block table of up to `max_blocks` entries."""

    def __init__(
        self,
        size: int,
        max_blocks: int,
        device: torch.device,
        never: Collection[int] = (),
        has_deltas: bool = False,
    ) -> None:
        self.size, self.device = size, device
        self.never = torch.tensor(sorted(never), device=device) if never else None
        """Tokens that no row draws."""
        self.rotation_delta = torch.zeros(size, dtype=torch.int64, device=device) if has_deltas else None
        """Rotation position minus position of each row, if the model has rotation positions of its own."""
        self.ints = torch.zeros(7, size, dtype=torch.int64, device=device)
        self.ints[POSITION] = -1
        self.temperature = torch.ones(size, dtype=torch.float64, device=device)
        self.counts = torch.zeros(2, size, dtype=torch.int64, device=device)  # top_k, number of biases
        self.thresholds = torch.zeros(2, size, dtype=torch.float64, device=device)  # top_p, min_p
        self.thresholds[0] = 1.0
        self.stop = torch.full((size, MAX_STOP_TOKENS), -1, dtype=torch.int64, device=device)
        self.block_table = torch.zeros(size, max_blocks, dtype=torch.int32, device=device)
        self.ring_token = torch.zeros(size, RING_SIZE, dtype=torch.int32, device=device)
        self.ring_logp = torch.zeros(size, RING_SIZE, dtype=torch.float32, device=device)
        self.ring_raw = torch.zeros(size, RING_SIZE, dtype=torch.float32, device=device)
        self.bias_token = torch.zeros(size, MAX_BIASES, dtype=torch.int32, device=device)
        self.bias_value = torch.zeros(size, MAX_BIASES, dtype=torch.float64, device=device)

    def start(self, rows: Sequence[NewRow]) -> None:
        """Write the state of new rows."""
        index = self._send(np.array([r.row for r in rows]))
        ints = [(1, 0, 0, r.position, r.limit, to_int64(r.key), r.drawn) for r in rows]
        self.ints.index_copy_(1, index, self._send(np.array(ints, dtype=np.int64).T.copy()))
        self.temperature.index_copy_(0, index, self._send(np.array([r.temperature for r in rows], dtype=np.float64)))
        self.counts.index_copy_(1, index, self._send(np.array([(r.top_k, len(r.bias)) for r in rows]).T.copy()))
        thresholds = np.array([(r.top_p, r.min_p) for r in rows], dtype=np.float64).T.copy()
        self.thresholds.index_copy_(1, index, self._send(thresholds))
        stops = np.full((len(rows), MAX_STOP_TOKENS), -1)
        for k, row in enumerate(rows):
            checked = list(row.stop_tokens)[:MAX_STOP_TOKENS]
            stops[k, : len(checked)] = checked
        self.stop.index_copy_(0, index, self._send(stops))
        if self.rotation_delta is not None:
            deltas = np.array([r.rotation_delta for r in rows], dtype=np.int64)
            self.rotation_delta.index_copy_(0, index, self._send(deltas))
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
        """Make rows inactive."""
        index = self._send(np.array(rows, dtype=np.int64))
        self.ints[LIVE].index_fill_(0, index, 0)
        self.ints[POSITION].index_fill_(0, index, -1)

    def reorder(self, order: Sequence[int]) -> None:
        """Move row `order[i]` to row i. The rows after the last one become inactive."""
        index = self._send(np.array(order, dtype=np.int64))
        count = len(order)
        for tensor in (self.ints, self.counts, self.thresholds):
            tensor[:, :count] = tensor[:, index]
        rings = (self.ring_token, self.ring_logp, self.ring_raw)
        deltas = () if self.rotation_delta is None else (self.rotation_delta,)
        for tensor in (self.temperature, self.stop, *rings, self.bias_token, self.bias_value, *deltas):
            tensor[:count] = tensor[index]
        self.ints[LIVE, count:] = 0
        self.ints[POSITION, count:] = -1

    def rotation(self, rows: int) -> Tensor | None:
        """Rows of the rotation table for the next token of the first rows; None if they are the positions."""
        if self.rotation_delta is None:
            return None
        return (self.ints[POSITION, :rows] + self.rotation_delta[:rows]).clamp_(min=0)

    def set_block_table(self, table: np.ndarray) -> None:
        """Write the upper left part of the block table: int32 [rows, blocks]."""
        self.block_table[: table.shape[0], : table.shape[1]].copy_(self._send(table), non_blocking=True)

    def draw(self, logits: Tensor, source: Tensor, row: Tensor, flags: SamplerFlags) -> None:
        """Draw a token for each live row of `row` [n] from `logits[source]`, append it to the ring, and advance or end the row."""
        if use_triton(logits):
            self._draw_with_triton(logits, source, row, flags)
            return
        own = logits[source]
        biased = self._add_bias(own, row) if flags.biased else own
        live, produced, _, position, limit, key, drawn = self.ints[:, row]
        top_k = self.counts[0, row] if flags.truncated else None
        top_p, min_p = self.thresholds[:, row] if flags.truncated else (None, None)
        numbers = uniforms(key, drawn)
        tokens, logp = sample(biased, numbers, self.temperature[row], top_k, top_p, min_p, self.never)
        is_live = live.bool()
        slot = (row * RING_SIZE + produced % RING_SIZE)[is_live]
        self.ring_token.view(-1)[slot] = tokens[is_live].int()
        self.ring_logp.view(-1)[slot] = logp[is_live].float()
        if flags.raw:
            self.ring_raw.view(-1)[slot] = (
                log_softmax_at_temperature(own, 1.0).gather(1, tokens[:, None])[is_live, 0].float()
            )
        stopped = (self.stop[row] == tokens[:, None]).any(1)
        stays_live = is_live & ~stopped & (produced + 1 < limit)
        after = torch.stack(
            [stays_live.long(), produced + 1, tokens, torch.where(stays_live, position + 1, -1), limit, key, drawn + 1]
        )
        self.ints[:, row] = torch.where(is_live, after, self.ints[:, row])

    def _add_bias(self, logits: Tensor, row: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        given = torch.arange(MAX_BIASES, device=self.device) < self.counts[1, row, None]
        values = torch.where(given, self.bias_value[row], 0.0).to(wide.dtype)
        return wide.scatter_add_(1, torch.where(given, self.bias_token[row], 0).long(), values)

    def _draw_with_triton(self, logits: Tensor, source: Tensor, row: Tensor, flags: SamplerFlags) -> None:
        from burnish.models.kernels.triton import sampling, truncation

        bias = (self.bias_token, self.bias_value, self.counts[1]) if flags.biased else None
        cut = None
        if flags.truncated:
            options = self.temperature, self.counts[0], self.thresholds[0], self.thresholds[1]
            possible = logits if self.never is None else logits.index_fill(1, self.never, -torch.inf)
            cut = truncation.find_cut(possible, source, row, *options, bias)
        rings = self.ring_token, self.ring_logp
        raw = self.ring_raw if flags.raw else None
        sampling.draw(logits, source, row, self.temperature, self.ints, self.stop, *rings, cut, bias, raw, self.never)

    def snapshot(self, rows: int, flags: SamplerFlags, drafts: Tensor | None = None) -> RingSnapshot:
        """Start to copy the rings of the first rows, and the counts of `drafts`, to the host."""
        parts = [self.ints[:2, :rows], self.ring_token[:rows], self.ring_logp[:rows]]
        parts += [self.ring_raw[:rows]] if flags.raw else []
        parts += [] if drafts is None else [drafts]
        if self.device.type != "cuda":
            copies, ready = [part.clone() for part in parts], None
        else:
            copies = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in parts]
            for host, part in zip(copies, parts, strict=True):
                host.copy_(part, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        ints, tokens, logp, *more = copies
        return RingSnapshot(
            ints, tokens, logp, more[0] if flags.raw else None, ready, None if drafts is None else more[-1]
        )

    def _send(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)
