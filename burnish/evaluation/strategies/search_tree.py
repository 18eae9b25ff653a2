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
STEP_TEXT = "step_text"
"""Key of a node in the record of a tree: its text with the name of the special token that ends a step."""
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
    verifier_tokens: int | None = None
    """Tokens that the verifier read and wrote for the score; None if it does not say."""
    pictures: tuple[PictureSpan, ...] = ()
    """Images of a root, with their places among its tokens."""
    num_before: int = 0
    """Tokens between the root and this node."""
    num_children: int = 0
    limit: int = 0
    """Most tokens that may be sampled for it."""
    stop: tuple[str, ...] = ()
    """Texts that end it, besides end tokens."""
    stop_tokens: tuple[int, ...] = ()
    """Tokens that end it, besides end tokens."""
    temperature: float | None = None
    """Temperature of its tokens if it is not that of the search."""
    may_continue: bool = False
    """Whether another request may continue it even if it ends, so that its engine should keep what it has in its cache."""
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
        tail: list[SearchNode] = []
        for node in self.upwards():
            if node is not self and "context" in node.__dict__:
                return (*node.context, *(token for one in reversed(tail) for token in one.tokens))
            tail.append(node)
        return tuple(token for one in reversed(tail) for token in one.tokens) if self.parent else self.tokens

    @cached_property
    def logp_total(self) -> tuple[float, int]:
        """Sum and number of the log-probs of the sampled tokens up to the end of this node. Read it when they are final."""
        total, count = 0.0, 0
        for node in self.upwards():
            if node is not self and "logp_total" in node.__dict__:
                return total + node.logp_total[0], count + node.logp_total[1]
            if node.logp is not None:
                total, count = total + float(node.logp.sum(dtype=np.float64)), count + len(node.logp)
        return total, count

    def forget_totals(self) -> None:
        """Compute what depends on the tokens again when it is read next, because they have changed."""
        for name in ("context", "logp_total"):
            self.__dict__.pop(name, None)

    @property
    def num_answer_tokens(self) -> int:
        """Tokens behind the root."""
        return 0 if self.is_root else self.num_before + len(self.tokens)


def mean_logp(node: SearchNode) -> float:
    """Return the mean log-prob of the sampled tokens on the path to a node."""
    total, count = node.logp_total
    return total / count if count else 0.0


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
