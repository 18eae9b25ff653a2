"""Model execution for the paged engine: prefill in packed chunks, decode steps as CUDA graphs.

On a GPU a decode step is captured once and replayed, from the embedding to the drawn token and the state of the rows. There is a
graph for each batch size and each number of splits that long rows are cut into. Without kernels the same step runs operation by
operation.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from burnish.config.rollout import Speculation
from burnish.core.pictures import PictureSpan
from burnish.inference.engine_common import EngineStats
from burnish.inference.native.device_state import LAST_TOKEN, POSITION, DeviceRows, SamplerFlags
from burnish.inference.native.kernel_warmup import warm_up_kernels
from burnish.inference.native.speculation import ChunkRows
from burnish.inference.native.vmm_arena import VmmArena
from burnish.memory_plan.kv_cache import (
    CachePlan,
    cache_token_bytes,
    graph_batch_size,
    min_split_keys,
    num_row_programs,
    num_splits,
)
from burnish.models.cached_forward import PagedAttend, paged_forward, pass_rotations
from burnish.models.decoder import Decoder
from burnish.models.kernels.attention import window_of
from burnish.models.kernels.device import to_device, use_triton
from burnish.models.kernels.exact import exact_attention, exact_logits
from burnish.models.kernels.fp8 import FP8, FP8_SCALE_BYTES
from burnish.models.kernels.inference_ops import PrefillAttention, decode_attention, rotate_store
from burnish.models.kernels.latent_ops import (
    CacheRanks,
    LatentHeads,
    LatentPrefill,
    latent_decode,
    num_own_pages,
    own_pages,
    own_placement,
)
from burnish.models.kernels.paged_cache import (
    Fp8Cache,
    HeadNorms,
    KVCache,
    LatentCache,
    Pages,
    Placement,
)
from burnish.models.kernels.picture_attention import PictureAttention, piece_blocks, tokens_ahead
from burnish.models.layer_products import LayerProducts
from burnish.models.router_pass import EngineRecorder
from burnish.models.vision.interfaces import PicturePass
from burnish.models.vision.pieces import Piece, piece_pass


@dataclass(frozen=True)
class PrefillChunk:
    """Consecutive tokens of one row to prefill: `tokens[start:]`."""

    row: int
    tokens: Sequence[int]
    start: int
    pictures: tuple[PictureSpan, ...] = ()
    """Pictures of `tokens`, and perhaps of later ones."""


def _pieces(chunks: Sequence[PrefillChunk]) -> list[Piece]:
    return [Piece(chunk.start, len(chunk.tokens), chunk.pictures) for chunk in chunks]


def row_options(model: Decoder) -> tuple[frozenset[int], bool]:
    """Tokens that no row of a model draws, and whether its rows have rotation positions of their own."""
    shape = model.arch.vision
    return (frozenset(), False) if shape is None else (shape.placeholder_tokens, shape.rotation is not None)


def token_bytes_of(model: Decoder, in_8_bits: Sequence[bool], exact: bool) -> int:
    """Bytes of a token in an engine's cache, of whose layers some are in 8 bits."""
    num, num_small = model.arch.num_layers, sum(in_8_bits)
    wide = cache_token_bytes(model.arch, model.embedding.weight.element_size(), is_expanded=exact)
    small = cache_token_bytes(model.arch, 1, FP8_SCALE_BYTES, is_expanded=exact)
    return (wide * (num - num_small) + small * num_small) // num


class ModelRunner:
    """A model, its paged cache and the state of its rows on one device."""

    capture_error_mode = "global"
    """Which threads may not call CUDA functions that a capture forbids (`torch.cuda.graph`)."""
    cache_ranks: CacheRanks | None = None
    """The ranks that divide the blocks of a cache of latents, if several do."""

    def __init__(
        self,
        model: Decoder,
        plan: CachePlan,
        stats: EngineStats,
        products: LayerProducts,
        exact: bool = False,
        in_8_bits: Sequence[bool] = (),
        speculation: Speculation | None = None,
    ) -> None:
        weight = model.embedding.weight
        self.model, self.device, self.exact, self.stats = model, weight.device, exact, stats
        self.products = products
        self.block_size = plan.block_size
        self.num_pages = (
            plan.num_blocks if self.cache_ranks is None else num_own_pages(plan.num_blocks, self.cache_ranks)
        )
        self.row_programs = num_row_programs(model.arch, 1 if self.cache_ranks is None else self.cache_ranks.num)
        size = self.num_pages * plan.block_size * token_bytes_of(model, in_8_bits, exact)
        self.arena = VmmArena(size, weight.device) if weight.is_cuda else None
        self.cache = self._make_cache(plan, weight.dtype, in_8_bits)
        self.has_kernels = use_triton(weight)
        self._clear()
        self.rows = self._make_rows(plan.max_rows, plan.blocks_per_row)
        self.windows, self.softcap = model.arch.windows, model.arch.score_softcap
        num_positions = plan.blocks_per_row * plan.block_size
        self.rotations = [model.rotations(num_positions, layer) for layer in range(model.arch.num_layers)]
        self.chunks = None if speculation is None else self._make_chunks(speculation, plan)
        num_rows = plan.max_rows if self.chunks is None else max(plan.max_rows, self.chunks.rows.size)
        self.row_ids = torch.arange(num_rows, device=weight.device)
        self.recorder = EngineRecorder(model, plan.num_blocks, plan.block_size) if model.records_experts else None
        self._graphs: dict[tuple[int, SamplerFlags, int], torch.cuda.CUDAGraph] = {}
        self._verification_graphs: dict[tuple[int, SamplerFlags, int], torch.cuda.CUDAGraph] = {}

    def batch_size(self, rows: int) -> int:
        """The batch size of a decode step with `rows` rows."""
        return graph_batch_size(rows, self.rows.size)

    def compile(self, rows: int, flags: SamplerFlags) -> None:
        """Compile the kernels for `rows` rows. Without this call each is compiled at its first use."""
        if self.has_kernels:
            started = time.perf_counter()
            rows_off = self._inactive_rows()
            position, rotation = rows_off.ints[POSITION, :rows], rows_off.rotation(rows)
            place = Placement(self.row_ids[:rows], position, rows_off.block_table, rotation)
            warm_up_kernels(
                self.model, self.products, self.cache, self.rotations[0], rows_off, place, flags, self.exact
            )
            self.stats.compile_s += time.perf_counter() - started

    # --- memory ------------------------------------------------------------------------------------------------------

    def _make_cache(self, plan: CachePlan, dtype: torch.dtype, in_8_bits: Sequence[bool]) -> KVCache:
        arch, num_small = self.model.arch, sum(in_8_bits)
        start = 0

        def memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            """The next part of the cache's memory."""
            nonlocal start
            begin, start = start, start + math.prod(shape) * dtype.itemsize
            if self.arena is None or 0 in shape:
                return torch.empty(shape, dtype=dtype, device=self.device)
            return self.arena.tensor(shape, dtype, begin)

        if arch.latent is not None and not self.exact:
            vectors = (arch.num_layers, 1, self.num_pages, 1, plan.block_size)
            kept = FP8 if num_small else dtype
            latents, keys = (memory((*vectors, width), kept) for width in (arch.latent.rank, arch.latent.rope_dim))
            if not num_small:
                return LatentCache(latents, keys)
            return LatentCache(latents, keys, (memory(vectors, torch.float32), memory(vectors, torch.float32)))
        pages = (2, self.num_pages, arch.num_kv_heads, plan.block_size)
        wide = memory((arch.num_layers - num_small, *pages, arch.head_dim), dtype)
        if not num_small:
            return wide
        small = memory((num_small, *pages, arch.head_dim), FP8)
        return Fp8Cache(small, memory((num_small, *pages), torch.float32), wide, in_8_bits)

    @property
    def held_bytes(self) -> int:
        """GPU memory that the cache takes now."""
        return self.arena.size.value if self.arena is not None and self.arena.is_mapped else 0

    def sleep(self) -> bool:
        """Free the memory of the cache and keep its addresses; False where that is not possible."""
        if self.arena is not None:
            self.arena.unmap()
        return self.arena is not None

    def wake(self) -> None:
        """Allocate the memory of the cache again, if `sleep` freed it."""
        if self.arena is not None and not self.arena.is_mapped:
            self.arena.map()
            self._clear()

    def _clear(self) -> None:
        # The kernels read only blocks of their row. The torch versions multiply masked values by 0, and 0 * NaN is NaN.
        if not self.has_kernels:
            for tensor in self._tensors():
                tensor.zero_()

    def _tensors(self) -> list[Tensor]:
        """The tensors of the cache. 8-bit floats are viewed as bytes, which every device can copy."""
        cache = self.cache
        if isinstance(cache, Tensor):
            return [cache]
        if isinstance(cache, LatentCache):
            return [
                *(data if cache.scales is None else data.view(torch.uint8) for data in cache.data),
                *(cache.scales or ()),
            ]
        return [cache.data.view(torch.uint8), cache.scale, cache.wide]

    # --- prefill -----------------------------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[PrefillChunk], wanted: Sequence[bool]) -> Tensor:
        """Compute chunks in one forward; return logits [n, vocab] after the last token of those that are `wanted`."""
        lengths = np.array([len(s.tokens) - s.start for s in chunks])
        tokens = self._send(np.concatenate([np.asarray(s.tokens[s.start :], dtype=np.int64) for s in chunks]))
        position = self._send(np.concatenate([np.arange(s.start, len(s.tokens)) for s in chunks]))
        owner = self._send(np.repeat([s.row for s in chunks], lengths))
        place = Placement(owner, position, self.rows.block_table)
        last = self._send((np.cumsum(lengths) - 1)[np.array(wanted)])
        with self.model.with_pictures(self._picture_pass(chunks)) as pictures:
            rotations = self.rotations
            if pictures is not None and pictures.rotation is not None:
                rotations = pass_rotations(self.model, pictures.num_positions)
                place = replace(place, rotation=torch.arange(tokens.shape[0], device=self.device))
            blocks = None
            if pictures is not None and self.model.arch.attends_both_ways:
                blocks = piece_blocks(_pieces(chunks))
            if self.exact:
                if blocks is not None:
                    place = replace(place, last=position + self._send(tokens_ahead(blocks, tokens.shape[0])))
                return self._logits(tokens, self._exact_attend(place, rotations), place, last)
            rows, starts = (np.array(x) for x in zip(*((s.row, s.start) for s in chunks), strict=True))
            seen = None if blocks is None else PictureAttention(blocks, self.device)
            made = LatentPrefill if isinstance(self.cache, LatentCache) else PrefillAttention
            attend = made(rows, starts, lengths, place, rotations, self.block_size, self.windows, self.softcap, seen)
            if isinstance(attend, LatentPrefill):
                attend.ranks = self.cache_ranks
            return self._logits(tokens, attend, place, last)

    def _picture_pass(self, chunks: Sequence[PrefillChunk]) -> PicturePass | None:
        """The pictures of chunks with their features, which the tower computes once for all requests."""
        shape, cache = self.model.arch.vision, self.model.feature_cache
        if shape is None or cache is None:
            return None
        found = piece_pass(_pieces(chunks), shape, self.device)
        return None if found is None else replace(found, features=cache.features(found.pictures, self.exact))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks into others, in all layers."""
        to, of = (self._send(np.array(x, dtype=np.int64)) for x in (targets, sources))
        for tensor in self._tensors():
            if self.cache_ranks is None:
                tensor[:, :, to] = tensor[:, :, of]
            else:
                self._copy_divided(tensor, of, to, self.cache_ranks)
        if self.recorder is not None:
            self.recorder.copy_pages(of, to)

    def _copy_divided(self, tensor: Tensor, of: Tensor, to: Tensor, ranks: CacheRanks) -> None:
        """Copy blocks that may be on other ranks: each gives those that it has."""
        source, is_own = own_pages(of, ranks)
        found = tensor[:, :, source]
        found.masked_fill_(~is_own.view(1, 1, -1, *[1] * (tensor.dim() - 3)), 0)
        tensor[:, :, own_pages(to, ranks)[0]] = ranks.sum(found)

    def draw(self, logits: Tensor, source: Sequence[int], rows: Sequence[int], flags: SamplerFlags) -> None:
        """Draw the first token of each row from `logits[source]`."""
        sources, targets = (self._send(np.array(x, dtype=np.int64)) for x in (source, rows))
        self.rows.draw(logits, sources, targets, flags)

    # --- decode ------------------------------------------------------------------------------------------------------

    def decode(self, rows: int, steps: int, flags: SamplerFlags, lengths: Sequence[int]) -> None:
        """Run decode steps on the first `rows` rows. `lengths` are the largest lengths of the live rows after the steps."""
        if not self.has_kernels:  # the torch versions read row lengths on the host, which no graph can do
            for _ in range(steps):
                self._step(self.rows, rows, flags, 1)
            return
        splits = self._splits(rows, lengths)
        graph = self._graphs.get((rows, flags, splits)) or self._capture(rows, flags, splits)
        for _ in range(steps):
            graph.replay()

    def write_texts(self, rows: Sequence[int], answers: Sequence[np.ndarray], tokens: Sequence[np.ndarray]) -> None:
        """Write the texts that drafts of these rows come from: earlier answers, and all tokens of the rows."""
        assert self.chunks is not None, "the engine has speculation"
        self.chunks.write(rows, answers, tokens)

    def verify(self, rows: int, steps: int, flags: SamplerFlags, lengths: Sequence[int]) -> None:
        """Run steps on the first `rows` rows that each draft tokens and verify them. `lengths` as in `decode`."""
        assert self.chunks is not None, "the engine has speculation"
        self.chunks.counts.zero_()
        if not self.has_kernels:
            for _ in range(steps):
                self._verification_step(self.rows, rows, flags, 1)
            return
        splits = self._splits(rows * self.chunks.width, lengths)
        graph = self._verification_graphs.get((rows, flags, splits)) or self._capture_verification(rows, flags, splits)
        for _ in range(steps):
            graph.replay()

    def _verification_step(self, state: DeviceRows, num_rows: int, flags: SamplerFlags, splits: int) -> None:
        chunks = self.chunks
        assert chunks is not None, "the engine has speculation"
        draft = chunks.propose(state, num_rows)
        is_fed = chunks.expand(state, draft, flags)
        self._step(chunks.rows, num_rows * chunks.width, flags, splits, shares_pages=True)
        chunks.accept(state, draft, is_fed, flags)

    def _make_chunks(self, speculation: Speculation, plan: CachePlan) -> ChunkRows:
        num_rows = self.batch_size(min(speculation.rows, plan.max_rows))
        rows = self._make_rows(num_rows * (speculation.draft + 1), plan.blocks_per_row)
        return ChunkRows(speculation, rows, num_rows, plan.blocks_per_row * plan.block_size)

    def _splits(self, rows: int, lengths: Sequence[int]) -> int:
        return 1 if self.exact else num_splits(rows, self.row_programs, lengths)

    def _step(
        self, state: DeviceRows, num_rows: int, flags: SamplerFlags, splits: int, shares_pages: bool = False
    ) -> None:
        """A token of each row: the forward pass, the draw, and the new state. With `shares_pages` rows may see each other's tokens."""
        row_ids = self.row_ids[:num_rows]
        place = Placement(row_ids, state.ints[POSITION, :num_rows], state.block_table, state.rotation(num_rows))
        least = min_split_keys(num_rows, self.row_programs)

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None, keys: Pages, values: Pages) -> Tensor:
            window = window_of(self.windows, layer)
            cos, sin = self.rotations[layer]
            return decode_attention(
                qkv, cos, sin, place, norms, keys, values, window, splits, least, self.softcap, shares_pages
            )

        tokens = state.ints[LAST_TOKEN, :num_rows]
        chosen = self._latent_attend(place, splits, least) if isinstance(self.cache, LatentCache) else attend
        logits = self._logits(tokens, self._exact_attend(place, self.rotations) if self.exact else chosen, place)
        state.draw(logits, row_ids, row_ids, flags)

    def _latent_attend(self, place: Placement, splits: int, least: int) -> PagedAttend:
        """Attention of a decode step over a cache of latents."""
        own: tuple[CacheRanks, Placement] | None = None
        if self.cache_ranks is not None:
            place, here = own_placement(place, place.position.shape[0], self.block_size, self.cache_ranks)
            own = self.cache_ranks, here

        def attend(layer: int, heads: LatentHeads, norms: HeadNorms | None, latents: Pages, keys: Pages) -> Tensor:
            return latent_decode(heads, *self.rotations[layer], place, latents, keys, splits, least, own)

        return attend

    def _logits(self, tokens: Tensor, attend: PagedAttend, place: Placement, which: Tensor | None = None) -> Tensor:
        """Logits after all tokens, or after those of index `which`."""
        if self.recorder is None:
            return self._computed_logits(tokens, attend, which)
        self.recorder.begin(place, which)
        self.model.set_router_pass(self.recorder)
        try:
            return self._computed_logits(tokens, attend, which)
        finally:
            self.model.set_router_pass(None)

    def _computed_logits(self, tokens: Tensor, attend: PagedAttend, which: Tensor | None) -> Tensor:
        hidden = paged_forward(self.model, tokens, self.cache, attend, self.products, which)
        if self.exact:
            return exact_logits(hidden, self.model.head_weight, self.model.arch.logit_softcap)
        return self.model.logits(hidden)

    def _exact_attend(self, place: Placement, rotations: Sequence[tuple[Tensor, Tensor]]) -> PagedAttend:
        """Attention with one query for each token, in prefill as in decode, so that both give the same bits."""

        def attend(layer: int, qkv: Tensor, norms: HeadNorms | None, keys: Tensor, values: Tensor) -> Tensor:
            q = rotate_store(qkv, *rotations[layer], place, norms, keys, values)
            return exact_attention(q, keys, values, place, window_of(self.windows, layer), self.softcap)

        return attend

    def capture(self, rows: int, flags: SamplerFlags) -> None:
        """Capture the step of every batch size up to `rows`, for rows of similar length. Otherwise each is captured at its first use."""
        if self.has_kernels:
            # The largest first, so that the others fit into its memory.
            for size in sorted({self.batch_size(r) for r in range(1, rows + 1)}, reverse=True):
                splits = self._splits(size, [1])
                if (size, flags, splits) not in self._graphs:
                    self._capture(size, flags, splits)
                if self.chunks is not None and size <= self.chunks.num_rows:
                    splits = self._splits(size * self.chunks.width, [1])
                    if (size, flags, splits) not in self._verification_graphs:
                        self._capture_verification(size, flags, splits)

    def _capture(self, rows: int, flags: SamplerFlags, splits: int) -> torch.cuda.CUDAGraph:
        graph = self._captured(lambda state: self._step(state, rows, flags, splits))
        self._graphs[rows, flags, splits] = graph
        return graph

    def _capture_verification(self, rows: int, flags: SamplerFlags, splits: int) -> torch.cuda.CUDAGraph:
        graph = self._captured(lambda state: self._verification_step(state, rows, flags, splits))
        self._verification_graphs[rows, flags, splits] = graph
        return graph

    def _captured(self, step: Callable[[DeviceRows], None]) -> torch.cuda.CUDAGraph:
        started = time.perf_counter()
        # A step of inactive rows first: kernels compile and libraries allocate workspaces outside of the capture.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step(self._inactive_rows())
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        others = [*self._graphs.values(), *self._verification_graphs.values()]
        pool = others[0].pool() if others else None
        # thread_local: a learner that trains in another thread may allocate memory meanwhile (rollout.source=ahead or async).
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            step(self.rows)
        self.stats.capture_s += time.perf_counter() - started
        self.stats.graphs += 1
        return graph

    def _inactive_rows(self) -> DeviceRows:
        return self._make_rows(self.rows.size, self.rows.block_table.shape[1])

    def _make_rows(self, size: int, max_blocks: int) -> DeviceRows:
        return DeviceRows(size, max_blocks, self.device, *row_options(self.model))

    def _send(self, array: np.ndarray) -> Tensor:
        return to_device(array, self.device)
