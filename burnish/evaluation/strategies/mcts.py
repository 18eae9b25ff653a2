"""Monte-Carlo tree search over steps (AlphaZero-like tree search, 2309.17179; with rollouts as in rStar, 2408.06195).

An iteration selects up to `parallel` leaves, each under a virtual loss: a selected path counts as visited with the lowest value until its own
value is known. So later selections of the iteration turn elsewhere, and the engine gets all expansions at once, then all rollouts. A leaf is
evaluated at its first visit and expanded at its second, so that a leaf of low value costs no further tokens.

A rollout is a completion to the end of the answer. Its first step is one of the children when its leaf is expanded, with the rollout's score
as its first visit, and so on down. These tokens are not sampled again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import Mcts
from burnish.evaluation.strategies.step_tree import StepTree, repeated
from burnish.evaluation.strategies.votes import best_scored

ROUNDING = 1e-9
"""A number of children that exceeds an integer by less counts as that integer."""


class Continuation(NamedTuple):
    """The rest of a rollout behind a node."""

    rollout: SearchNode
    start: int
    """Where the rest begins among the rollout's tokens."""
    value: float


@dataclass(eq=False)
class Branch:
    """A node of the tree with its statistics."""

    node: SearchNode
    prior: float = 1.0
    visits: int = 0
    total: float = 0.0
    largest: float = -math.inf
    in_flight: int = 0
    """Selected paths through it whose values are not known yet."""
    children: list[Branch] = field(default_factory=list)
    num_drawn: int = 0
    """Steps that were drawn for it, by rollouts and expansions. Some may be equal."""
    continuations: list[Continuation] = field(default_factory=list)

    def child(self, tokens: Sequence[int]) -> Branch | None:
        """Return the child with these tokens."""
        return next((child for child in self.children if child.node.tokens == tokens), None)

    def add(self, value: float) -> None:
        """Count a visit with this value."""
        self.visits += 1
        self.total += value
        self.largest = max(self.largest, value)

    def value(self, backup: str) -> float:
        """Return the mean or the largest value; 0 before the first visit."""
        if not self.visits:
            return 0.0
        return self.total / self.visits if backup == "mean" else self.largest


async def mcts(search: Search, options: Mcts) -> Choice:
    """Run the simulations and choose."""
    return await TreeSearch(search, options).run()


class TreeSearch:
    """The search for one question."""

    def __init__(self, search: Search, options: Mcts) -> None:
        self.search, self.options = search, options
        self.tree = StepTree(search, options)
        self.root = Branch(search.root)
        self.lowest = 0.0
        """The lowest value found, or 0 if that is lower: the value of a virtual loss, and of a path whose scoring failed."""
        self._cut: list[SearchNode] = []

    async def run(self) -> Choice:
        """Simulate until the number of simulations or the budget is reached, then choose."""
        done, largest_round = 0, 0
        while done < self.options.simulations and self.tree.may_branch:
            before = self.search.cost.tokens
            done += await self._iterate(min(self.options.parallel, self.options.simulations - done))
            self.tree.round_tokens = largest_round = max(largest_round, self.search.cost.tokens - before)
        return await self._choose(done)

    # --- One iteration -----------------------------------------------------------------------------------------------------

    async def _iterate(self, count: int) -> int:
        """Select, expand, evaluate and back up `count` paths, or fewer if some meet in a leaf. Return their number."""
        paths = await self._select(count)
        by_leaf = {path[-1]: path for path in reversed(paths)}
        values = await self._evaluate(_leaves(paths))
        for path in paths:
            _mark(path, -1)
            if by_leaf[path[-1]] is path:
                self._back_up(path, values.get(path[-1], []))
        return len(by_leaf)

    async def _select(self, count: int) -> list[list[Branch]]:
        """Select paths from the root to leaves, each under the virtual loss of the others. Nodes on the way get the children that are due.

        A path ends at an unvisited leaf, at a finished answer, or at a child that was added for it.
        """
        paths = [[self.root] for _ in range(count)]
        for path in paths:
            self._descend(path)
        waiting = paths
        while due := [end for end in _leaves(waiting) if self._num_missing(end)]:
            added = await self._expand(due)
            stopped = [path for path in waiting if path[-1] in added]
            waiting = []
            for path in stopped:
                _mark(path, -1)
                if new := [child for child in added[path[-1]] if not child.in_flight]:
                    path.append(self._best(path[-1], new))
                    _mark(path, 1)
                else:
                    self._descend(path)
                    waiting.append(path)
        return paths

    def _descend(self, path: list[Branch]) -> None:
        """Extend a path down to a leaf, or to a node that is to get more children first. Put it under the virtual loss."""
        while path[-1].children and not self._num_missing(path[-1]):
            path.append(self._best(path[-1], path[-1].children))
        _mark(path, 1)

    def _best(self, parent: Branch, children: Sequence[Branch]) -> Branch:
        return max(children, key=lambda child: self.priority(parent, child))

    def priority(self, parent: Branch, child: Branch) -> float:
        """Return what selection maximises among the children of a node."""
        c, backup = self.options.exploration, self.options.backup
        count, above = child.visits + child.in_flight, max(1, parent.visits + parent.in_flight)
        if not count and self.options.select == "uct":
            return math.inf
        value = parent.value(backup)
        if count:
            value = (child.visits * child.value(backup) + child.in_flight * self.lowest) / count
        if self.options.select == "uct":
            return value + c * math.sqrt(math.log(above) / count)
        return value + c * child.prior * math.sqrt(above) / (1 + count)

    def _num_missing(self, branch: Branch) -> int:
        """Return how many steps are to be drawn for a node now. The root needs no value first."""
        if not branch.node.is_open or not (branch is self.root or branch.visits):
            return 0
        wanted = self.options.children * max(1, branch.visits) ** self.options.widening
        return max(0, math.ceil(wanted - ROUNDING) - branch.num_drawn)

    async def _expand(self, branches: Sequence[Branch]) -> dict[Branch, list[Branch]]:
        """Give nodes their children: first steps of rollouts, then newly sampled steps. Return the new ones of each."""
        known = {branch: len(branch.children) for branch in branches}
        for branch in branches:
            if not branch.num_drawn:
                branch.num_drawn = len(branch.continuations)
                for rest in branch.continuations:
                    self._reuse(branch, rest)
        missing = [self._num_missing(branch) for branch in branches]
        parents = repeated([branch.node for branch in branches], missing)
        by_node = {branch.node: branch for branch in branches}
        for node in await self.tree.expand(parents) if parents else []:
            assert node.parent is not None
            branch = by_node[node.parent]
            if branch.child(node.tokens) is None:
                branch.children.append(Branch(node))
        for branch, number in zip(branches, missing, strict=True):
            branch.num_drawn += number
            _set_priors(branch.children)
        return {branch: branch.children[number:] for branch, number in known.items()}

    def _reuse(self, leaf: Branch, rest: Continuation) -> None:
        """Make the next step of a rollout a child of the node that it has reached."""
        end = self.tree.step_end(rest.rollout.tokens, rest.start)
        tokens = rest.rollout.tokens[rest.start : end]
        child = leaf.child(tokens)
        if child is None:
            child = Branch(self.search.part(leaf.node, rest.rollout, rest.start, end))
            leaf.children.append(child)
        child.add(rest.value)
        self._note(child)
        if end < len(rest.rollout.tokens):
            child.continuations.append(Continuation(rest.rollout, end, rest.value))

    async def _evaluate(self, leaves: Sequence[Branch]) -> dict[Branch, list[float]]:
        """Return the values of leaves. One that the budget left without a rollout has none."""
        if self.options.value == "verifier":
            await self.tree.score([leaf.node for leaf in leaves])
            return {leaf: [self._value(leaf.node)] for leaf in leaves}
        ended = [leaf for leaf in leaves if not leaf.node.is_open]
        opened = {leaf.node: leaf for leaf in leaves if leaf.node.is_open}
        rollouts = await self.search.sample(list(opened), self.options.rollouts)
        finished = [node for node in rollouts if not node.is_open]
        self.tree.answers += finished
        self._cut += [node for node in rollouts if node.is_open]
        await self.tree.score([*(leaf.node for leaf in ended), *finished])
        values = {leaf: [self._value(leaf.node)] for leaf in ended}
        for node in finished:
            assert node.parent is not None
            leaf, value = opened[node.parent], self._value(node)
            leaf.continuations.append(Continuation(node, 0, value))
            values.setdefault(leaf, []).append(value)
        return values

    def _value(self, node: SearchNode) -> float:
        if node.score is None:
            return self.lowest
        value = math.exp(node.score) if self.search.log_scores else node.score
        self.lowest = min(self.lowest, value)
        return value

    def _back_up(self, path: Sequence[Branch], values: Sequence[float]) -> None:
        for branch in path:
            for value in values:
                branch.add(value)
            self._note(branch)

    def _note(self, branch: Branch) -> None:
        branch.node.notes |= {"visits": branch.visits, "value": branch.value(self.options.backup)}

    # --- The choice --------------------------------------------------------------------------------------------------------

    async def _choose(self, simulations: int) -> Choice:
        """Return the choice. The most visited path is completed if it is wanted, or if no answer has finished."""
        tree, how = self.tree, self.options.choose
        end = self._most_visited()
        is_by_visits = how == "visits"
        needs_end = end.node.is_open and (not tree.answers or (is_by_visits and not end.continuations))
        open_paths = await tree.complete([end.node]) if needs_end else []
        if is_by_visits and tree.answers:
            answers = [end.node] if not end.node.is_open else _answers_behind(end, tree.answers)
            if answers:
                await tree.score(answers)
                return Choice(best_scored(answers), numbers=tree.numbers() | {"simulations": simulations})
        return await tree.choose(
            "vote" if how == "vote" else "best", [*open_paths, *self._cut], simulations=simulations
        )

    def _most_visited(self) -> Branch:
        """Return the end of the path of most visits; of equal ones the more valuable, then the likelier."""
        end, backup = self.root, self.options.backup
        while end.children:
            end = max(end.children, key=lambda child: (child.visits, child.value(backup), child.prior))
        return end


def _answers_behind(end: Branch, answers: Sequence[SearchNode]) -> list[SearchNode]:
    """Return the finished answers that go on from a leaf."""
    through = [rest.rollout for rest in end.continuations]
    return through or [answer for answer in answers if answer.parent is end.node]


def _leaves(paths: Sequence[Sequence[Branch]]) -> list[Branch]:
    return list(dict.fromkeys(path[-1] for path in paths))


def _mark(path: Sequence[Branch], change: int) -> None:
    for branch in path:
        branch.in_flight += change


def _set_priors(children: Sequence[Branch]) -> None:
    """Set priors: exp of the mean log-prob of each step, divided by the sum over the siblings."""
    weights = [math.exp(float(child.node.logp.mean(dtype=float))) for child in children if child.node.logp is not None]
    for child, weight in zip(children, weights, strict=True):
        child.prior = weight / sum(weights)
        child.node.notes["prior"] = child.prior
