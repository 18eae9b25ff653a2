"""Runs the model on a device for the paged engine: prefill in packed chunks, decode steps as whole graphs.

On a GPU a decode step, from the embedding to the drawn token and the row's bookkeeping, is captured once for each number
of rows and replayed; the host only says how many steps. Elsewhere the same step runs operation by operation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from burnish.models.decoder import Decoder
from burnish.models.inference import PagedAttend, paged_forward
from burnish.models.ops.device import use_kernels
from burnish.models.ops.exact import exact_attention, exact_linear, exact_logits
from burnish.models.ops.paged import Norms, Placement, decode_attention, rotate_store
from burnish.models.ops.paged_prefill import PrefillAttention
from burnish.models.ops.transfer import send
from burnish.rollout.native.arena import Arena
from burnish.rollout.native.state import LAST, POSITION, RowState

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # then every further 1024 rows


@dataclass(frozen=True)
class Stretch:
    """Consecutive tokens of one row that a prefill computes: those of `tokens` from position `start` on."""

    row: int
    tokens: Sequence[int]
    start: int


class Runner:
    """A model, its cache and the state of its rows on one device."""

    def __init__(self, model: Decoder, rows: int, num_pages: int, page: int, width: int, exact: bool = False) -> None:
        weight, arch = model.embedding.weight, model.arch
        self.model, self.device, self.page, self.exact = model, weight.device, page, exact
        shape = (arch.num_layers, 2, num_pages, arch.num_kv_heads, page, arch.head_dim)
        self.arena: Arena | None = None
        if weight.is_cuda:
            self.arena = Arena(math.prod(shape) * weight.element_size(), weight.device)
            self.cache = self.arena.tensor(shape, weight.dtype)
        else:
            self.cache = torch.empty(shape, dtype=weight.dtype)
        self.has_kernels = use_kernels(weight)
        self._clear()
        self.state = RowState(rows, width, weight.device)
        self.rotations = model.rotations(width * page)
        self.every = torch.arange(rows, device=weight.device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}

    def bucket(self, rows: int) -> int:
        """The number of rows a step is made for when so many are needed."""
        larger = next((size for size in BUCKETS if size >= rows), -(-rows // 1024) * 1024)
        return min(larger, self.state.size)

    # --- memory ------------------------------------------------------------------------------------------------------

    @property
    def held_bytes(self) -> int:
        """GPU memory behind the cache."""
        return self.arena.size.value if self.arena is not None and self.arena.mapped else 0

    def sleep(self) -> bool:
        """Give the cache's memory back and keep its addresses; False where that cannot be done."""
        if self.arena is not None:
            self.arena.unmap()
        return self.arena is not None

    def wake(self) -> None:
        """Take the memory again, if it was given back."""
        if self.arena is not None and not self.arena.mapped:
            self.arena.map()
            self._clear()

    def _clear(self) -> None:
        # The kernels read nothing that a row does not hold; torch's twins multiply what a mask hides by 0.
        if not self.has_kernels:
            self.cache.zero_()

    # --- prefill -----------------------------------------------------------------------------------------------------

    def prefill(self, stretches: Sequence[Stretch], wanted: Sequence[bool]) -> Tensor:
        """Compute the stretches in one forward; logits [wanted, vocab] after the last token of those `wanted`."""
        lengths = np.array([len(s.tokens) - s.start for s in stretches])
        tokens = self._send(np.concatenate([np.asarray(s.tokens[s.start :], dtype=np.int64) for s in stretches]))
        position = self._send(np.concatenate([np.arange(s.start, len(s.tokens)) for s in stretches]))
        owner = self._send(np.repeat([s.row for s in stretches], lengths))
        place = Placement(owner, position, self.state.table)
        last = self._send((np.cumsum(lengths) - 1)[np.array(wanted)])
        if self.exact:
            return self._logits(tokens, self._exact_attend(place), last)
        rows, starts = (np.array(x) for x in zip(*((s.row, s.start) for s in stretches), strict=True))
        attend = PrefillAttention(rows, starts, lengths, place, self.rotations, self.page, self.model.arch.window)
        return self._logits(tokens, attend, last)

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """The pages of `source` into those of `target`, in all layers."""
        there, here = (self._send(np.array(x, dtype=np.int64)) for x in (target, source))
        self.cache[:, :, there] = self.cache[:, :, here]

    def draw(self, logits: Tensor, source: Sequence[int], rows: Sequence[int], truncated: bool) -> None:
        """The rows draw their first tokens, each from its line of the logits."""
        lines, drawing = (self._send(np.array(x, dtype=np.int64)) for x in (source, rows))
        self.state.draw(logits, lines, drawing, truncated)

    # --- decode ------------------------------------------------------------------------------------------------------

    def decode(self, rows: int, steps: int, truncated: bool) -> None:
        """So many steps of the first `rows` rows."""
        if not self.has_kernels:  # torch's twins ask the device how long the rows are: no graph can do that
            for _ in range(steps):
                self._step(self.state, rows, truncated)
            return
        graph = self._graphs.get((rows, truncated)) or self._capture(rows, truncated)
        for _ in range(steps):
            graph.replay()

    def _step(self, state: RowState, rows: int, truncated: bool) -> None:
        every = self.every[:rows]
        place = Placement(every, state.ints[POSITION, :rows], state.table)

        def attend(qkv: Tensor, norms: Norms | None, keys: Tensor, values: Tensor) -> Tensor:
            return decode_attention(qkv, *self.rotations, place, norms, keys, values, self.model.arch.window)

        logits = self._logits(state.ints[LAST, :rows], self._exact_attend(place) if self.exact else attend)
        state.draw(logits, every, every, truncated)

    def _logits(self, tokens: Tensor, attend: PagedAttend, which: Tensor | None = None) -> Tensor:
        """Logits after the tokens, or after some of them."""
        if self.exact:
            hidden = paged_forward(self.model, tokens, self.cache, attend, exact_linear)
            return exact_logits(hidden if which is None else hidden[which], self.model.head_weight)
        hidden = paged_forward(self.model, tokens, self.cache, attend)
        return self.model.logits(hidden if which is None else hidden[which])

    def _exact_attend(self, place: Placement) -> PagedAttend:
        """Every token a query of its own, in prefill as in decoding: then both give it the same bits."""

        def attend(qkv: Tensor, norms: Norms | None, keys: Tensor, values: Tensor) -> Tensor:
            q = rotate_store(qkv, *self.rotations, place, norms, keys, values)
            return exact_attention(q, keys, values, place, self.model.arch.window)

        return attend

    def _capture(self, rows: int, truncated: bool) -> torch.cuda.CUDAGraph:
        # The kernels compile and the libraries take their workspaces in a step of rows that are not there.
        nobody = RowState(self.state.size, self.state.table.shape[1], self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(nobody, rows, truncated)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._step(self.state, rows, truncated)
        self._graphs[rows, truncated] = graph
        return graph

    def _send(self, array: np.ndarray) -> Tensor:
        return send(array, self.device)
