"""Allocation of KV-cache blocks, with a prefix cache.

A block holds the keys and values of `block_size` consecutive tokens. Full blocks of a prompt are added to the prefix cache
under their tokens and the block before them. A later prompt with the same beginning shares these blocks and does not compute
them again. A cached block without references can be found until its memory is needed; the least recently used is evicted first.
Block 0 is never allocated: rows without a request write to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count


class BlockManager:
    """Reference counts and prefix cache of blocks 1 to `num_blocks` - 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self.free = list(range(num_blocks - 1, 0, -1))
        self.ref_counts = [0] * num_blocks
        self.evictable: OrderedDict[int, None] = OrderedDict()
        """Cached blocks without references, the least recently used first."""
        # A prefix key is (serial number of the block before, tokens). Serial numbers are never reused; a block id may come
        # back with other content.
        self._block_of: dict[tuple[int, tuple[int, ...]], int] = {}
        self._key_of: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._serials: dict[int, int] = {}
        self._next_serial = count(1)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now."""
        return len(self.free) + len(self.evictable)

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, tokens: Sequence[int]) -> list[int]:
        """Return the cached blocks that a context begins with. They end before its last token, whose logits are needed."""
        blocks: list[int] = []
        serial = 0
        for k in range((len(tokens) - 1) // self.block_size):
            block = self._block_of.get((serial, tuple(tokens[k * self.block_size : (k + 1) * self.block_size])))
            if block is None:
                break
            blocks.append(block)
            serial = self._serials[block]
        return blocks

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks with one reference each. The caller has checked `num_available`."""
        allocated = []
        for _ in range(num_blocks):
            block = self.free.pop() if self.free else self._evict()
            self.ref_counts[block] = 1
            allocated.append(block)
        return allocated

    def acquire(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            self.ref_counts[block] += 1
            self.evictable.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block. A block without references becomes free, or evictable if it is cached."""
        for block in reversed(blocks):  # evict the end of a prompt first: a prefix is found from its beginning
            self.ref_counts[block] -= 1
            assert self.ref_counts[block] >= 0, f"block {block} was released more often than acquired"
            if self.ref_counts[block] == 0:
                if block in self._key_of:
                    self.evictable[block] = None
                else:
                    self.free.append(block)

    def cache_prefix(self, tokens: Sequence[int], blocks: Sequence[int]) -> None:
        """Add the full blocks of a context to the prefix cache. Blocks that are cached already stay."""
        serial = 0
        for k in range(len(tokens) // self.block_size):
            key = (serial, tuple(tokens[k * self.block_size : (k + 1) * self.block_size]))
            block = self._block_of.get(key)
            if block is None:
                block = blocks[k]
                if block in self._key_of:
                    return
                self._block_of[key], self._key_of[block], self._serials[block] = block, key, next(self._next_serial)
            serial = self._serials[block]

    def clear_prefix_cache(self) -> None:
        """Empty the prefix cache, as new weights require."""
        self.free.extend(self.evictable)
        self.evictable.clear()
        self._block_of.clear()
        self._key_of.clear()
        self._serials.clear()

    def _evict(self) -> int:
        block, _ = self.evictable.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        del self._serials[block]
        return block
