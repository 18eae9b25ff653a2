"""Trees of answers: each node's tokens are continued several times, so that answers share their beginnings (SPO-tree, 2505.23564).

A prompt has n children of `segment` tokens; each that has not ended has `branches[0]` children of its own, and so on. The edges of
the last level go on to the end of the answer. An answer that ends earlier is a leaf where it ends. What comes out are the paths
from the prompt to the leaves, as trajectories: whole answers, whose metadata says which nodes they pass (`core/branches.py`).

The children of a node are requests with equal prompts, submitted together: an engine computes what they begin with once. The
random key of an edge is folded from that of the edge above it and its place among its siblings: it follows from the path alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from burnish.core.branches import ENDS, NODES, SHARED_TOKENS, path_names
from burnish.core.engine import Completion, Request
from burnish.core.keys import fold
from burnish.core.trajectory import Finish, Trajectory
from burnish.rollout.flight import Flight, Running

if TYPE_CHECKING:
    from burnish.rollout.driver import Driver

LISTS = ("context", "action", "logp", "version", "turns", "ends")
"""What every child goes on with on its own."""


@dataclass(frozen=True)
class Tree:
    """The shape of a tree below the samples of a prompt."""

    branches: tuple[int, ...]
    """Children of each node, level by level."""
    segment: int
    """Tokens of an edge, except on the last level."""

    def leaf(self, sample: int, path: tuple[int, ...]) -> int:
        """A number for the answer at the end of a path, in the order of the tree; an answer that ends early has the first of those
        that its continuations would have had."""
        for level, width in enumerate(self.branches):
            sample = sample * width + (path[level] if level < len(path) else 0)
        return sample

    @property
    def leaves(self) -> int:
        """Answers of one sample of a prompt, at most."""
        return prod(self.branches)


class TreeFlight(Flight):
    """Answers on their way that branch."""

    def __init__(self, driver: Driver, tree: Tree) -> None:
        super().__init__(driver)
        self.tree = tree

    def take(self, completion: Completion) -> Trajectory | None:
        one = self.running[completion.id]
        if completion.finish != "length" or one.partial + len(completion.tokens) >= one.sampling.max_tokens:
            return super().take(completion)
        del self.running[completion.id]
        self._record(one, completion)
        one.ends.append(len(one.context))
        self.aside += [self._child(one, k) for k in range(self.tree.branches[len(one.path)])]
        return None

    def _child(self, one: Running, number: int) -> Running:
        lists: dict[str, Any] = {name: list(getattr(one, name)) for name in LISTS}
        return replace(one, key=fold(one.key, number), path=(*one.path, number), **lists)

    def _request(self, one: Running) -> Request:
        request = super()._request(one)
        goes_on = len(one.path) < len(self.tree.branches)
        if goes_on and self.tree.segment < request.sampling.max_tokens:
            request = replace(request, sampling=replace(request.sampling, max_tokens=self.tree.segment))
        return replace(request, goes_on=goes_on)

    def _trajectory(self, one: Running, finish: Finish, *args: Any, **options: Any) -> Trajectory:
        trajectory = super()._trajectory(one, finish, *args, **options)
        starts, ends = [one.prompt_length, *one.ends], [*one.ends, len(one.context)]
        # What all children of a node begin with is counted with the path of its first child.
        shared = [end - start for k, (start, end) in enumerate(zip(starts, ends, strict=True)) if any(one.path[k:])]
        trajectory.sample = self.tree.leaf(one.sample, one.path)
        trajectory.metadata |= {NODES: path_names(one.sample, one.path), ENDS: ends, SHARED_TOKENS: sum(shared)}
        return trajectory
