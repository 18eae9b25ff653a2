"""Who holds which page of the KV cache, and which pages hold the start of a prompt someone asks for again.

A page holds the keys and values of `size` consecutive tokens. Full pages of prompts are *published* under their tokens
and the page before them, so a later prompt that begins alike holds the same pages instead of computing them. A
published page that nobody holds stays findable until its room is needed, the longest unused first. Page 0 is never
given out: rows that are not there write to it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count


class BlockManager:
    """The accounts of pages 1 to `num_pages` - 1."""

    def __init__(self, num_pages: int, size: int) -> None:
        self.size = size
        self.total = num_pages - 1
        self.free = list(range(num_pages - 1, 0, -1))
        self.holders = [0] * num_pages
        self.idle: OrderedDict[int, None] = OrderedDict()  # published, held by nobody; longest unused first
        # The page before is named by a number that is never used twice: a page's own number may come back with other content.
        self._found: dict[tuple[int, tuple[int, ...]], int] = {}
        self._names: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._serials: dict[int, int] = {}
        self._next = count(1)

    @property
    def available(self) -> int:
        """Pages that can be taken now."""
        return len(self.free) + len(self.idle)

    def needed(self, tokens: int) -> int:
        """Pages that so many tokens fill."""
        return -(-tokens // self.size)

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The published pages this context begins with; they end before its last token, whose logits are wanted."""
        pages: list[int] = []
        serial = 0
        for k in range((len(tokens) - 1) // self.size):
            page = self._found.get((serial, tuple(tokens[k * self.size : (k + 1) * self.size])))
            if page is None:
                break
            pages.append(page)
            serial = self._serials[page]
        return pages

    def take(self, number: int) -> list[int]:
        """So many pages, held once; the caller has seen that they are `available`."""
        taken = []
        for _ in range(number):
            page = self.free.pop() if self.free else self._evict()
            self.holders[page] = 1
            taken.append(page)
        return taken

    def hold(self, pages: Sequence[int]) -> None:
        """One holder more for each of the pages."""
        for page in pages:
            self.holders[page] += 1
            self.idle.pop(page, None)

    def drop(self, pages: Sequence[int]) -> None:
        """One holder fewer; what nobody holds can be taken, or found again if it was published."""
        for page in reversed(pages):  # the end of a prompt loses its room before its beginning, which finds it
            self.holders[page] -= 1
            assert self.holders[page] >= 0, f"page {page} was dropped more often than held"
            if self.holders[page] == 0:
                if page in self._names:
                    self.idle[page] = None
                else:
                    self.free.append(page)

    def publish(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Make the full pages of this context findable; those found already stay as they are."""
        serial = 0
        for k in range(len(tokens) // self.size):
            name = (serial, tuple(tokens[k * self.size : (k + 1) * self.size]))
            page = self._found.get(name)
            if page is None:
                page = pages[k]
                if page in self._names:
                    return
                self._found[name], self._names[page], self._serials[page] = page, name, next(self._next)
            serial = self._serials[page]

    def forget(self) -> None:
        """Nothing published is found any more: the weights have changed."""
        self.free.extend(self.idle)
        self.idle.clear()
        self._found.clear()
        self._names.clear()
        self._serials.clear()

    def _evict(self) -> int:
        page, _ = self.idle.popitem(last=False)
        del self._found[self._names.pop(page)]
        del self._serials[page]
        return page
