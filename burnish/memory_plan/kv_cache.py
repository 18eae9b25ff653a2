"""How much memory the paged KV cache takes and what fits into it: arithmetic on plain numbers, before anything is made.

A token takes its keys and values in every layer, a page a fixed number of tokens, a row of the batch the pages of the
longest request. Asked for nothing else, the cache takes what every row at its longest needs, at most a share of what is
free, since the learner needs the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from burnish.config.errors import UserError

BLOCK_SIZE = 16  # tokens a page
MAX_PREFILL_TOKENS = 16384  # computed in one forward, at most
MAX_FREE_SHARE = 0.4  # of the GPU memory that is free when the cache is made, at most
GRAPH_BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024)  # then every further 1024 rows
GIB = 2**30
PROGRAMS_TO_FILL_GPU = 132 * 4  # programs that fill a large GPU
MAX_SPLITS = 32
MAX_PROGRAMS = 1 << 15  # each has a place for its sums, which take 96 MiB with six queries of 128 numbers
KEYS_PER_PROGRAM = 512  # keys that one program reads where there are programs enough
UNEVEN_RATIO = 1.5  # the longest row over the mean, from which on long ones are cut


def graph_batch_size(rows: int, most: int) -> int:
    """The number of rows a decode step is made for when so many are needed, and `most` can be there."""
    larger = next((size for size in GRAPH_BATCH_SIZES if size >= rows), -(-rows // 1024) * 1024)
    return min(larger, most)


def num_splits(rows: int, kv_heads: int, lengths: Sequence[int]) -> int:
    """How many stretches the past of a row may be cut into in a decode step: a power of two, since each is a graph of its own.

    Enough programs for the chip where rows are few; and where some row is much longer than most, enough that it is not the one
    all others wait for.
    """
    longest = max(lengths, default=1)
    is_unequal = longest * len(lengths) > UNEVEN_RATIO * sum(lengths)
    return max_splits(rows, kv_heads, longest) if is_unequal else _splits_to_fill(rows, kv_heads)


def max_splits(rows: int, kv_heads: int, longest: int) -> int:
    """The same where the longest row is longer than most."""
    long = -(-longest // min_split_keys(rows, kv_heads))
    room = max(1, min(MAX_SPLITS, MAX_PROGRAMS // (rows * kv_heads)))
    return min(_power_of_two_below(room), max(_splits_to_fill(rows, kv_heads), 1 << (long - 1).bit_length()))


def min_split_keys(rows: int, kv_heads: int) -> int:
    """Keys that a stretch has at least."""
    return max(64, KEYS_PER_PROGRAM // _splits_to_fill(rows, kv_heads))


def _splits_to_fill(rows: int, kv_heads: int) -> int:
    """The largest power of two of programs for each key head of a row that a large GPU runs at once."""
    return _power_of_two_below(max(1, min(MAX_SPLITS, PROGRAMS_TO_FILL_GPU // (rows * kv_heads))))


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def kv_token_bytes(num_layers: int, num_kv_heads: int, head_dim: int, element_bytes: int, scale_bytes: int = 0) -> int:
    """Bytes of one token's keys and values; `scale_bytes` stand beside each head's vector where it is quantised."""
    return 2 * num_layers * num_kv_heads * (head_dim * element_bytes + scale_bytes)


@dataclass(frozen=True)
class CachePlan:
    """What a cache is made of."""

    token_bytes: int
    page: int
    """Tokens a page."""
    num_pages: int
    """With the one that nobody holds."""
    max_rows: int
    longest: int
    """Tokens of the longest request, prompt and new ones."""
    free_bytes: int | None
    """What was free when this was planned; None where nobody knows."""
    kv_heads: int | None
    """Of the model whose decode steps cut long rows into stretches; None where rows stay whole."""

    @property
    def width(self) -> int:
        """Pages of the longest request."""
        return -(-self.longest // self.page)

    @property
    def tokens(self) -> int:
        """Tokens that rows can hold."""
        return (self.num_pages - 1) * self.page

    @property
    def rows(self) -> int:
        """Rows that fit when all are at their longest; more run as long as they are shorter."""
        return min(self.max_rows, max(0, self.num_pages - 1) // self.width)

    @property
    def bytes(self) -> int:
        """Memory of the cache."""
        return self.num_pages * self.page * self.token_bytes

    @property
    def graphs(self) -> int:
        """Decode steps that may be captured, each when it is first needed: of a number of rows and of stretches each."""
        sizes = {graph_batch_size(rows, self.max_rows) for rows in range(1, self.max_rows + 1)}
        if self.kv_heads is None:
            return len(sizes)
        longest = self.width * self.page
        stretches = [(_splits_to_fill(rows, self.kv_heads), max_splits(rows, self.kv_heads, longest)) for rows in sizes]
        return sum((most // few).bit_length() for few, most in stretches)

    @property
    def text(self) -> str:
        """One line for a person."""
        free = "" if self.free_bytes is None else f" of {self.free_bytes / GIB:.1f} GiB free"
        return (
            f"KV cache: {self.bytes / GIB:.2f} GiB{free}, {self.num_pages - 1:,} pages of {self.page} tokens ({self.token_bytes:,} bytes "
            f"a token) = {self.tokens:,} tokens: {self.rows:,} of {self.max_rows:,} rows at the longest request ({self.longest:,} tokens); "
            f"up to {self.graphs} graphs"
        )

    def require_one(self, where: str) -> None:
        """Raise unless the longest request fits; `where` says who set the size."""
        if self.rows < 1:
            raise UserError(
                f"{where}: {self.bytes / GIB:.3g} GiB hold {max(0, self.num_pages - 1)} pages of {self.page} tokens at {self.token_bytes:,} "
                f"bytes a token, and the longest request needs {self.width} ({self.longest:,} tokens, "
                f"{(self.width + 1) * self.page * self.token_bytes / GIB:.3g} GiB); give more, or lower max_tokens"
            )


def plan_cache(
    *,
    token_bytes: int,
    max_rows: int,
    longest: int,
    free_bytes: int | None = None,
    cache_bytes: int | None = None,
    page: int = BLOCK_SIZE,
    kv_heads: int | None = None,
) -> CachePlan:
    """The cache for `max_rows` rows of up to `longest` tokens; `kv_heads` as in the plan.

    With `cache_bytes` exactly what these hold: fewer pages than all rows need set rows aside when they grow, more keep the
    beginnings of more prompts. Without, what all rows need, at most `FREE_SHARE` of `free_bytes`.
    """
    page_bytes = page * token_bytes
    num_pages = max_rows * -(-longest // page) + 1
    if cache_bytes is not None:
        num_pages = cache_bytes // page_bytes
    elif free_bytes is not None:
        num_pages = min(num_pages, int(free_bytes * MAX_FREE_SHARE) // page_bytes)
    return CachePlan(token_bytes, page, num_pages, max_rows, longest, free_bytes, kv_heads)
