"""Runs the model on a device for the paged engine: prefill in packed chunks, decode steps as whole graphs.

On a GPU a decode step, from the embedding to the drawn token and the row's bookkeeping, is captured once for each number
of rows (and of stretches that long ones are cut into) and replayed; the host only says how many steps. Elsewhere the same
step runs operation by operation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from burnish.inference.native.device_state import LAST_TOKEN, POSITION, DeviceRows, SamplerFlags
from burnish.inference.native.engine_common import EngineStats
from burnish.inference.native.kernel_warmup import warm_up_kernels
from burnish.inference.native.vmm_arena import VmmArena
from burnish.memory_plan.kv_cache import CachePlan, graph_batch_size, min_split_keys, num_splits
from burnish.models.cached_forward import PagedAttend, paged_forward
from burnish.models.decoder import Decoder
from burnish.models.kernels.attention import window_of
from burnish.models.kernels.device import to_device, use_triton
from burnish.models.kernels.exact import exact_attention, exact_linear, exact_logits
from burnish.models.kernels.inference_ops import PrefillAttention, decode_attention, rotate_store
from burnish.models.kernels.paged_cache import FP8, Fp8Cache, HeadNorms, KVCache, Pages, Placement


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one row that a prefill computes: those of `tokens` from position `start` on."""

    row: int
    tokens: Sequence[int]
    start: int


class ModelRunner:
    """A model, its cache and the state of its rows on one device."""

    def __init__(
        self, model: Decoder, plan: CachePlan, stats: EngineStats, exact: bool = False, quantised: bool = False
    ) -> None:
        weight = model.embedding.weight
        self.model, self.device, self.page, self.exact, self.stats = model, weight.device, plan.page, exact, stats
        self.arena = VmmArena(plan.bytes, weight.device) if weight.is_cuda else None
        self.cache = self._make_cache(plan, weight.dtype, quantised)
        self.has_kernels = use_triton(weight)
        self._clear()
        self.state = DeviceRows(plan.max_rows, plan.width, weight.device)
        self.windows = model.arch.windows
        self.rotations = [model.rotations(plan.width * plan.page, layer) for layer in range(model.arch.num_layers)]
        self.every = torch.arange(plan.max_rows, device=weight.device)
        self._graphs: dict[tuple[int, SamplerFlags, int], torch.cuda.CUDAGraph] = {}

    def bucket(self, rows: int) -> int:
        """The number of rows a step is made for when so many are needed."""
        return graph_batch_size(rows, self.state.size)

    def compile(self, rows: int, wants: SamplerFlags) -> None:
        """Have the kernels ready for so many rows; without this each is compiled when it is first needed."""
        if self.has_kernels:
            started = time.perf_counter()
            state = self._nobody()
            place = Placement(self.every[:rows], state.ints[POSITION, :rows], state.table)
            warm_up_kernels(self.model, self.cache, self.rotations[0], state, place, wants, self.exact)
            self.stats.compile_s += time.perf_counter() - started

    # --- memory ------------------------------------------------------------------------------------------------------

    def _make_cache(self, plan: CachePlan, dtype: torch.dtype, quantised: bool) -> KVCache:
        arch = self.model.arch
        vectors = (arch.num_layers, 2, plan.num_pages, arch.num_kv_heads, plan.page)
        shape = (*vectors, arch.head_dim)

        def memory(shape: tuple[int, ...], dtype: torch.dtype, start: int = 0) -> Tensor:
            if self.arena is None:
                return torch.empty(shape, dtype=dtype)
            return self.arena.tensor(shape, dtype, start)

        if not quantised:
            return memory(shape, dtype)
        return Fp8Cache(memory(shape, FP8), memory(vectors, torch.float32, math.prod(shape)))

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
            for tensor in self._tensors():
                tensor.zero_()

    def _tensors(self) -> list[Tensor]:
        """What the cache is made of; 8-bit floats as plain bytes, which can be copied everywhere."""
        if isinstance(self.cache, Tensor):
            return [self.cache]
        return [self.cache.data.view(torch.uint8), self.cache.scale]

    # --- prefill -----------------------------------------------------------------------------------------------------

    def prefill(self, stretches: Sequence[PrefillChunk], wanted: Sequence[bool]) -> Tensor:
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
        attend = PrefillAttention(rows, starts, lengths, place, self.rotations, self.page, self.windows)
        return self._logits(tokens, attend, last)

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """The pages of `source` into those of `target`, in all layers."""
        there, here = (self._send(np.array(x, dtype=np.int64)) for x in (target, source))
        for tensor in self._tensors():
            tensor[:, :, there] = tensor[:, :, here]

    def draw(self, logits: Tensor, source: Sequence[int], rows: Sequence[int], wants: SamplerFlags) -> None:
        """The rows draw their first tokens, each from its line of the logits."""
        lines, drawing = (self._send(np.array(x, dtype=np.int64)) for x in (source, rows))
        self.state.draw(logits, lines, drawing, wants)

    # --- decode ------------------------------------------------------------------------------------------------------

    def decode(self, rows: int, steps: int, wants: SamplerFlags, lengths: Sequence[int]) -> None:
        """So many steps of the first `rows` rows; those that are there are up to `lengths` tokens long then."""
        if not self.has_kernels:  # torch's twins ask the device how long the rows are: no graph can do that
            for _ in range(steps):
                self._step(self.state, rows, wants, 1)
            return
        splits = self._splits(rows, lengths)
        graph = self._graphs.get((rows, wants, splits)) or self._capture(rows, wants, splits)
        for _ in range(steps):
            graph.replay()

    def _splits(self, rows: int, lengths: Sequence[int]) -> int:
        return 1 if self.exact else num_splits(rows, self.model.arch.num_kv_heads, lengths)

    def _step(self, state: DeviceRows, rows: int, wants: SamplerFlags, splits: int) -> None:
        every = self.every[:rows]
        place = Placement(every, state.ints[POSITION, :rows], state.table)
        least = min_split_keys(rows, self.model.arch.num_kv_heads)

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None, keys: Pages, values: Pages) -> Tensor:
            window = window_of(self.windows, layer)
            return decode_attention(qkv, *self.rotations[layer], place, norms, keys, values, window, splits, least)

        logits = self._logits(state.ints[LAST_TOKEN, :rows], self._exact_attend(place) if self.exact else attend)
        state.draw(logits, every, every, wants)

    def _logits(self, tokens: Tensor, attend: PagedAttend, which: Tensor | None = None) -> Tensor:
        """Logits after the tokens, or after some of them."""
        if self.exact:
            hidden = paged_forward(self.model, tokens, self.cache, attend, exact_linear, which)
            return exact_logits(hidden, self.model.head_weight)
        return self.model.logits(paged_forward(self.model, tokens, self.cache, attend, which=which))

    def _exact_attend(self, place: Placement) -> PagedAttend:
        """Every token a query of its own, in prefill as in decoding: then both give it the same bits."""

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor) -> Tensor:
            q = rotate_store(qkv, *self.rotations[layer], place, norms, keys, values)
            return exact_attention(q, keys, values, place, window_of(self.windows, layer))

        return attend

    def capture(self, rows: int, wants: SamplerFlags) -> None:
        """Capture the step of every number of rows up to this one, of like length; else each is captured when it is first needed."""
        if self.has_kernels:
            # The largest first: the others fit into its memory.
            for size in sorted({self.bucket(r) for r in range(1, rows + 1)}, reverse=True):
                splits = self._splits(size, [1])
                if (size, wants, splits) not in self._graphs:
                    self._capture(size, wants, splits)

    def _capture(self, rows: int, wants: SamplerFlags, splits: int) -> torch.cuda.CUDAGraph:
        started = time.perf_counter()
        # The kernels compile and the libraries take their workspaces in a step of rows that are not there.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(self._nobody(), rows, wants, splits)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._step(self.state, rows, wants, splits)
        self._graphs[rows, wants, splits] = graph
        self.stats.capture_s += time.perf_counter() - started
        self.stats.graphs += 1
        return graph

    def _nobody(self) -> DeviceRows:
        """Rows of which none is there."""
        return DeviceRows(self.state.size, self.state.table.shape[1], self.device)

    def _send(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)
