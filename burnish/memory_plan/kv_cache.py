"""Size of the paged KV cache and what fits into it, computed before anything is allocated.

A token needs its keys and values in every layer. A block holds `BLOCK_SIZE` tokens. A row of the batch needs the blocks of the
longest request. By default the cache has blocks for all rows at their longest, up to a share of the free memory: the learner
needs the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.errors import UserError
from burnish.models.architecture import Architecture
from burnish.models.latent_shape import HEADS_PER_PROGRAM

BLOCK_SIZE = 16
"""Tokens of a block."""
MAX_PREFILL_TOKENS = 16384
"""Most tokens of one prefill forward."""
MAX_FREE_SHARE = 0.4
"""Most of the free GPU memory that the cache takes by default."""
GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)
"""Batch sizes with CUDA graphs; above these every multiple of 1024."""
MAX_CACHE_RANKS = 8
"""Neighbours that divide a cache of latents exchange queries and results in every layer, which should stay within a machine."""
GIB = 2**30
PROGRAMS_TO_FILL_GPU = 132 * 4
MAX_SPLITS = 32
MAX_PROGRAMS = 1 << 15
"""Most programs of a split decode. Their partial sums take 96 MiB with six queries of 128 numbers."""
KEYS_PER_PROGRAM = 512
"""Keys that one program reads if there are enough programs."""
UNEVEN_RATIO = 1.5
"""Longest row over mean length above which long rows are split."""


def graph_batch_size(rows: int, most: int) -> int:
    """The batch size of the CUDA graph for so many rows, `most` at most."""
    larger = next((size for size in GRAPH_BATCH_SIZES if size >= rows), -(-rows // 1024) * 1024)
    return min(larger, most)


def num_splits(rows: int, kv_heads: int, lengths: Sequence[int]) -> int:
    """How many splits the keys of a row are cut into in a decode step: a power of two, since each number has its own graph.

    With few rows the splits fill the GPU. With one row much longer than the others, they keep the others from waiting for it.
    """
    longest = max(lengths, default=1)
    is_unequal = longest * len(lengths) > UNEVEN_RATIO * sum(lengths)
    return max_splits(rows, kv_heads, longest) if is_unequal else _splits_to_fill(rows, kv_heads)


def max_splits(rows: int, kv_heads: int, longest: int) -> int:
    """The number of splits where the longest row is much longer than the mean."""
    for_longest = -(-longest // min_split_keys(rows, kv_heads))
    limit = max(1, min(MAX_SPLITS, MAX_PROGRAMS // (rows * kv_heads)))
    return min(_power_of_two_below(limit), max(_splits_to_fill(rows, kv_heads), 1 << (for_longest - 1).bit_length()))


def min_split_keys(rows: int, kv_heads: int) -> int:
    """Least number of keys of a split."""
    return max(64, KEYS_PER_PROGRAM // _splits_to_fill(rows, kv_heads))


def _splits_to_fill(rows: int, kv_heads: int) -> int:
    """The largest power of two of programs for each key head of a row that a large GPU runs at the same time."""
    return _power_of_two_below(max(1, min(MAX_SPLITS, PROGRAMS_TO_FILL_GPU // (rows * kv_heads))))


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def cache_token_bytes(arch: Architecture, element_bytes: int, scale_bytes: int = 0, is_expanded: bool = False) -> int:
    """Bytes of one token in the cache of a model. Latent attention caches latents, unless its heads are expanded (exact mode, CPU engine)."""
    if arch.latent is None or is_expanded:
        return kv_token_bytes(arch.num_layers, arch.num_kv_heads, arch.head_dim, element_bytes, scale_bytes)
    return arch.num_layers * ((arch.latent.rank + arch.latent.rope_dim) * element_bytes + 2 * scale_bytes)


def num_cache_ranks(size: int) -> int:
    """How many neighbours among the ranks of an engine divide the blocks of a cache of latents."""
    return max(num for num in range(1, MAX_CACHE_RANKS + 1) if size % num == 0)


def num_row_programs(arch: Architecture, cache_ranks: int = 1) -> int:
    """Programs of the decode kernel for one row and one split: one for each key head, or for each `HEADS_PER_PROGRAM` heads with latents.

    The ranks that divide a cache of latents have the heads of all of them.
    """
    return arch.num_kv_heads if arch.latent is None else -(-arch.num_heads * cache_ranks // HEADS_PER_PROGRAM)


def kv_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int, scale_bytes: int = 0) -> int:
    """Bytes of one token's keys and values. A quantised cache has `scale_bytes` for each head's vector."""
    return 2 * num_layers * num_kv_heads * (head_dim * element_bytes + scale_bytes)


@dataclass(frozen=True)
class CachePlan:
    """Size of a paged cache."""

    token_bytes: int
    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """All blocks, with block 0, which is never allocated."""
    max_rows: int
    longest: int
    """Most tokens of a request: prompt and completion."""
    free_bytes: int | None
    """Free memory at the time of planning; None if unknown."""
    kv_heads: int | None
    """Key heads of the model if decode steps split long rows; None if rows stay whole."""
    wide_layers: tuple[int, ...] = ()
    """Layers of an 8-bit cache that are not in 8 bits."""

    @property
    def blocks_per_row(self) -> int:
        """Blocks of the longest request."""
        return -(-self.longest // self.block_size)

    @property
    def tokens(self) -> int:
        """Tokens that the rows can hold together."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def rows(self) -> int:
        """Rows that fit at their longest. More rows run as long as they are shorter."""
        return min(self.max_rows, max(0, self.num_blocks - 1) // self.blocks_per_row)

    @property
    def bytes(self) -> int:
        """Memory of the cache."""
        return self.num_blocks * self.block_size * self.token_bytes

    @property
    def graphs(self) -> int:
        """CUDA graphs that may be captured: one for each batch size and number of splits."""
        sizes = {graph_batch_size(rows, self.max_rows) for rows in range(1, self.max_rows + 1)}
        if self.kv_heads is None:
            return len(sizes)
        longest = self.blocks_per_row * self.block_size
        splits = [(_splits_to_fill(rows, self.kv_heads), max_splits(rows, self.kv_heads, longest)) for rows in sizes]
        return sum((most // few).bit_length() for few, most in splits)

    @property
    def text(self) -> str:
        """The plan in one line for the user."""
        free = "" if self.free_bytes is None else f" of {self.free_bytes / GIB:.1f} GiB free"
        return (
            f"KV cache: {self.bytes / GIB:.2f} GiB{free}, {self.num_blocks - 1:,} blocks of {self.block_size} tokens ({self.token_bytes:,} bytes "
            f"a token) = {self.tokens:,} tokens: {self.rows:,} of {self.max_rows:,} rows at the longest request ({self.longest:,} tokens); "
            f"up to {self.graphs} graphs{self._wide_text}"
        )

    @property
    def _wide_text(self) -> str:
        if not self.wide_layers:
            return ""
        names = ", ".join(map(str, self.wide_layers))
        return f"; layers {names} are not in 8 bits, which would change their attention (docs/engine.md)"

    def require_one(self, where: str) -> None:
        """Raise unless the longest request fits. `where` names what set the size."""
        if self.rows < 1:
            raise UserError(
                f"{where}: {self.bytes / GIB:.3g} GiB hold {max(0, self.num_blocks - 1)} blocks of {self.block_size} tokens at {self.token_bytes:,} "
                f"bytes a token, and the longest request needs {self.blocks_per_row} ({self.longest:,} tokens, "
                f"{(self.blocks_per_row + 1) * self.block_size * self.token_bytes / GIB:.3g} GiB); give more, or lower max_tokens"
            )


def plan_cache(
    *,
    token_bytes: int,
    max_rows: int,
    longest: int,
    free_bytes: int | None = None,
    cache_bytes: int | None = None,
    block_size: int = BLOCK_SIZE,
    kv_heads: int | None = None,
    num_contexts: int = 0,
    wide_layers: tuple[int, ...] = (),
) -> CachePlan:
    """Plan the cache for `max_rows` rows of up to `longest` tokens.

    With `cache_bytes` the cache has exactly that size. Fewer blocks than all rows need lead to preemption; more keep more
    prefixes. Without, it has what all rows need, at most `MAX_FREE_SHARE` of `free_bytes`. `num_contexts` episodes that wait for their
    environments keep their blocks too, so that a further turn computes its new tokens only.
    """
    block_bytes = block_size * token_bytes
    num_blocks = max(max_rows, num_contexts) * -(-longest // block_size) + 1
    if cache_bytes is not None:
        num_blocks = cache_bytes // block_bytes
    elif free_bytes is not None:
        num_blocks = min(num_blocks, int(free_bytes * MAX_FREE_SHARE) // block_bytes)
    return CachePlan(token_bytes, block_size, num_blocks, max_rows, longest, free_bytes, kv_heads, wide_layers)
