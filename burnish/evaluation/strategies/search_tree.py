"""`SearchNode`: a run of tokens in the tree of answers that a strategy grows, and the trajectory of a finished answer.

The root holds the prompt. A sampled node has log-probs; a written node has none: a strategy put its tokens there. Every node has a random
key that follows from the path to it, so a tree does not depend on the other questions of an engine or on the order of completions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from burnish.core.pictures import PictureSpan
from burnish.core.trajectory import TokenNode, Trajectory, TrajectoryFinish

SEARCH = "search"
"""Metadata key of a trajectory that a strategy chose: what the search cost, its votes and its numbers."""
NodeEnd = Literal["open", "stop", "length"]
"""open: the answer goes on (a step ended, or a strategy wrote the node). stop: an end token. length: the answer's limit of tokens."""


@dataclass(eq=False)
class SearchNode:
    """A run of tokens behind its parent. Strategies compare nodes by identity."""

    parent: SearchNode | None
    key: int
    """Random key of the node's first token."""
    index: int
    """Place among the nodes of its search, in the order in which they were asked for."""
    tokens: tuple[int, ...] = ()
    logp: np.ndarray | None = None
    """float32 log-probs of sampled tokens; None for a root and for tokens that a strategy wrote."""
    version: int = 0
    """Version of the weights that sampled it."""
    end: NodeEnd = "open"
    score: float | None = None
    """The verifier's score of the path to this node; None if it was not scored, or if scoring failed."""
    pictures: tuple[PictureSpan, ...] = ()
    """Images of a root, with their places among its tokens."""
    num_children: int = 0
    limit: int = 0
    """Most tokens that may be sampled for it."""
    stop: tuple[str, ...] = ()
    """Texts that end it, besides end tokens."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end it, besides end tokens."""
    temperature: float | None = None
    """Temperature of its tokens if it is not that of the search."""
    notes: dict[str, Any] = field(default_factory=dict)
    """What the strategy remembers of it and the report shows, such as visits and values."""

    @property
    def is_root(self) -> bool:
        return self.parent is None

    @property
    def is_open(self) -> bool:
        """Whether the answer can go on behind this node."""
        return self.end == "open"

    @property
    def depth(self) -> int:
        """Number of nodes between the root and this node, itself included."""
        return sum(1 for _ in self.upwards()) - 1

    @property
    def is_sampled(self) -> bool:
        return self.logp is not None

    def upwards(self) -> Iterator[SearchNode]:
        """Yield this node, its parent and so on up to the root."""
        node: SearchNode | None = self
        while node is not None:
            yield node
            node = node.parent

    def path(self) -> list[SearchNode]:
        """Return the nodes from the root to this node."""
        return list(self.upwards())[::-1]

    @cached_property
    def context(self) -> tuple[int, ...]:
        """All tokens up to the end of this node. Its children share the object, so engines see that they share a prefix.

        Read it only when the node's tokens are final.
        """
        return self.tokens if self.parent is None else (*self.parent.context, *self.tokens)

    def forget_context(self) -> None:
        """Compute `context` again when it is read next, because the tokens have changed."""
        self.__dict__.pop("context", None)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens behind the root."""
        return sum(len(node.tokens) for node in self.upwards() if not node.is_root)


def mean_logp(node: SearchNode) -> float:
    """Return the mean log-prob of the sampled tokens on the path to a node."""
    parts = [one.logp for one in node.upwards() if one.logp is not None and len(one.logp)]
    return float(np.concatenate(parts).mean(dtype=np.float64)) if parts else 0.0


def answer_trajectory(
    chosen: SearchNode, prompt_id: str, visit: int, sample: int, completion: str, metadata: dict[str, Any]
) -> Trajectory:
    """Return the path to a node as a trajectory: its prompt, what was sampled, and what the strategy wrote between."""
    path = chosen.path()
    nodes = [
        TokenNode(
            parent=number - 1,
            tokens=np.asarray(node.tokens, dtype=np.int64),
            logp=node.logp,
            version=None if node.logp is None else np.full(len(node.tokens), node.version, dtype=np.int32),
            pictures=node.pictures,
        )
        for number, node in enumerate(_with_tokens(path))
    ]
    finish: TrajectoryFinish = "stop" if chosen.end == "stop" else "length"
    length = len(path[0].tokens)
    return Trajectory(
        prompt_id, visit, sample, nodes, finish, completion, metadata={"prompt_length": length} | metadata
    )


def _with_tokens(path: Sequence[SearchNode]) -> list[SearchNode]:
    """Leave out nodes without tokens, which a trajectory does not allow."""
    return [node for node in path if node.is_root or node.tokens]
