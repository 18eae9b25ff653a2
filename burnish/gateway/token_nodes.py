"""`NodeTree`: the token nodes of a session while it grows. It is a radix tree: contexts share the nodes in which their tokens agree.

A node is a run of tokens that the model sampled in one call, or that it only read. A context is added behind the longest beginning that is in
the tree already. If it leaves a read node in the middle, that node is split there, so that both contexts share its beginning. A sampled node is
never split: it is one action with one turn. A context that agrees with a part of it forks before it and reads the common part again.

A placeholder of an image is in the tree as a negative number that no other image has (`Picture.token_numbers`), so that contexts with other images
differ, and no node ends within an image. `tokens_of` and `pictures_of` give what the engine reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from burnish.core.pictures import Picture, PictureSpan, distinct_tokens, shifted


@dataclass(eq=False, slots=True)
class Node:
    """A run of tokens. Its number names it for good: where a node is split, the part that ends where it ended keeps the number."""

    number: int
    parent: Node | None
    """None for the root, which has no tokens."""
    tokens: np.ndarray  # int64; placeholders of images are negative
    logp: np.ndarray | None = None  # float32
    version: np.ndarray | None = None  # int32
    observed: np.ndarray | None = None  # int8
    """Only of a node that was read: which of its tokens are the body of a message, by the number of its role."""
    children: list[Node] = field(default_factory=list)

    @property
    def is_sampled(self) -> bool:
        return self.logp is not None

    def path(self) -> Iterator[Node]:
        """Yield the nodes from this one up to the root, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def mark(self, observed: np.ndarray) -> None:
        """Mark the bodies of messages among the tokens that end with this node. A token that is marked already keeps its mark."""
        end = len(observed)
        for node in self.path():
            start = end - len(node.tokens)
            if node.is_sampled or end <= 0:
                return
            own = observed[max(start, 0) : end]
            if own.any():
                marks = np.zeros(len(node.tokens), dtype=np.int8) if node.observed is None else node.observed.copy()
                tail = marks[len(marks) - len(own) :]
                tail[tail == 0] = own[tail == 0]
                node.observed = marks
            end = start


class NodeTree:
    """All nodes of a session."""

    def __init__(self) -> None:
        self.root = Node(-1, None, np.zeros(0, dtype=np.int64))
        self.nodes: list[Node] = []
        """By number."""
        self._placeholders: dict[int, int] = {}
        """The token of each negative number."""
        self._pictures: dict[int, Picture] = {}
        """Images by the number of their first placeholder."""

    def insert(self, start: Node, tokens: Sequence[int], pictures: Sequence[PictureSpan] = ()) -> Node:
        """Add tokens that the model reads behind a node, with the images among them. Returns the node with which they end.

        Nodes in which the tokens agree are shared. Of equal sampled nodes the latest is taken.
        """
        context = np.array(distinct_tokens(tokens, pictures), dtype=np.int64)
        for start_of, picture in pictures:
            numbers = picture.token_numbers.tolist()
            self._pictures[numbers[0]] = picture
            self._placeholders |= zip(numbers, tokens[start_of : start_of + len(numbers)], strict=True)
        node, at, part = self._deepest(start, context)
        if part is not None:
            child, size = part
            node, at = self._split(child, size), at + size
        return node if at == len(context) else self._add(Node(len(self.nodes), node, context[at:]))

    def add_sampled(self, parent: Node, tokens: np.ndarray, logp: np.ndarray, version: np.ndarray) -> Node:
        """Add what the model sampled behind a node."""
        return self._add(Node(len(self.nodes), parent, tokens, logp, version))

    def tokens_to(self, node: Node) -> tuple[int, ...]:
        """Return all tokens from the root to the end of a node."""
        parts = [self.tokens_of(one) for one in node.path()][::-1]
        return tuple(np.concatenate(parts).tolist()) if parts else ()

    def tokens_of(self, node: Node) -> np.ndarray:
        """Return the tokens of a node as the engine reads them."""
        if not self._pictures or node.is_sampled or not (node.tokens < 0).any():
            return node.tokens
        return np.array([self._placeholders.get(token, token) for token in node.tokens.tolist()], dtype=np.int64)

    def pictures_of(self, node: Node) -> tuple[PictureSpan, ...]:
        """Return the images of a node; starts count from its first token."""
        if not self._pictures or node.is_sampled:
            return ()
        places = np.flatnonzero(node.tokens < 0).tolist()
        numbers = ((at, int(node.tokens[at])) for at in places)
        return tuple(PictureSpan(at, self._pictures[number]) for at, number in numbers if number in self._pictures)

    def pictures_to(self, node: Node) -> tuple[PictureSpan, ...]:
        """Return all images from the root to the end of a node."""
        found, at = list[PictureSpan](), 0
        for one in reversed(list(node.path()) if self._pictures else []):
            found += shifted(self.pictures_of(one), at)
            at += len(one.tokens)
        return tuple(found)

    def _deepest(self, start: Node, context: np.ndarray) -> tuple[Node, int, tuple[Node, int] | None]:
        """Return the node behind which a context leaves the tree, the number of tokens up to there, and perhaps a part of a read child.

        Several sampled siblings may begin alike, so all paths that agree are followed.
        """
        best: tuple[Node, int, tuple[Node, int] | None] = (start, 0, None)
        best_size = 0
        pending = [(start, 0)]
        while pending:
            node, at = pending.pop()
            if at > best_size:
                best, best_size = (node, at, None), at
            for child in node.children:  # the last one is popped first
                size = _num_common(child.tokens, context[at:])
                if size == len(child.tokens):
                    pending.append((child, at + size))
                elif size and not child.is_sampled and at + size > best_size:
                    best, best_size = (node, at, (child, size)), at + size
        return best

    def _split(self, node: Node, size: int) -> Node:
        """Split a read node behind some of its tokens. Returns the new node, which holds these tokens."""
        assert node.parent is not None
        upper = Node(len(self.nodes), node.parent, node.tokens[:size], children=[node])
        self.nodes.append(upper)
        node.parent.children[node.parent.children.index(node)] = upper
        node.parent, node.tokens = upper, node.tokens[size:]
        if node.observed is not None:
            upper.observed, node.observed = node.observed[:size], node.observed[size:]
        return upper

    def _add(self, node: Node) -> Node:
        assert node.parent is not None
        node.parent.children.append(node)
        self.nodes.append(node)
        return node


def _num_common(left: np.ndarray, right: np.ndarray) -> int:
    """Return the number of equal tokens at the beginning of two arrays."""
    size = min(len(left), len(right))
    if not size or left[0] != right[0]:
        return 0
    differs = left[:size] != right[:size]
    first = int(differs.argmax())
    return first if differs[first] else size
