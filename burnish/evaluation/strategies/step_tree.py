"""`StepTree`: what searches over steps share. It samples steps, scores paths, completes them near the end of a budget, and chooses.

A step ends with the text `step` (or the special token of this name), after `step_tokens`, or with the answer. Every finished answer is a candidate of the choice, whether the
search went on from its siblings or not. An answer that reaches its limit of tokens is finished, with the end `length`.
"""

from __future__ import annotations

from collections.abc import Sequence

from burnish.config.errors import UserError
from burnish.evaluation.strategies.search import Choice, Search, SearchFailed
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.evaluation.strategies.spec import StepSearch
from burnish.evaluation.strategies.votes import best_scored, elect, vote_weights

COPY = "copy_of"
"""Note of a path with the text of another one of its round: the index of that one."""
RESERVED_ROUNDS = 2
"""Steps are sampled while the budget has this many times the tokens that the last ones took. Then open paths are completed."""


class StepTree:
    """The tree of one search, with its finished answers."""

    def __init__(self, search: Search, options: StepSearch) -> None:
        self.search = search
        self.answers: list[SearchNode] = []
        """Finished answers, in the order in which they ended."""
        self.num_steps = 0
        """How many times steps were sampled."""
        self.round_tokens = 0
        """Tokens that the last round of steps took."""
        self._scores: dict[tuple[str, bool], float | None] = {}
        token = None if options.step is None else special_step_token(search, options.step)
        search.step_token = token
        self._stop = () if options.step is None or token is not None else (options.step,)
        self._stop_tokens = () if token is None else (token,)
        self._step_tokens = options.step_tokens

    @property
    def may_branch(self) -> bool:
        """Whether the budget has room for another round. Less than two rounds are left for completing what is open."""
        left = self.search.tokens_left
        return left is None or left >= max(1, RESERVED_ROUNDS * self.round_tokens)

    async def expand(self, parents: Sequence[SearchNode]) -> list[SearchNode]:
        """Sample one step behind each of `parents`, which names a node as often as it gets children."""
        before = self.search.cost.tokens
        children = await self.search.sample(
            parents, stop=self._stop, stop_tokens=self._stop_tokens, max_tokens=self._step_tokens
        )
        self.round_tokens = self.search.cost.tokens - before
        self.num_steps += 1
        self.answers += [node for node in children if not node.is_open]
        return children

    async def score(self, nodes: Sequence[SearchNode]) -> list[SearchNode]:
        """Score paths, each text once in the search, and return them with the best first. Mark those with the text of another one."""
        keys = [(self._scored_text(node), node.is_open) for node in nodes]
        first: dict[tuple[str, bool], SearchNode] = {}
        for key, node in zip(keys, nodes, strict=True):
            original = first.setdefault(key, node)
            if original is not node:
                node.notes[COPY] = original.index
        fresh = {key: node for key, node in first.items() if key not in self._scores}
        scores = await self.search.score(list(fresh.values()))
        self._scores.update(zip(fresh, scores, strict=True))
        for key, node in zip(keys, nodes, strict=True):
            node.score = self._scores[key]
        return by_score(nodes)

    def step_end(self, tokens: Sequence[int], start: int) -> int:
        """Return where the step that begins at `start` ends among the tokens of a completion."""
        last = len(tokens) if self._step_tokens is None else min(len(tokens), start + self._step_tokens)
        if not self._ends_step(tokens[start:last]):
            return last
        low, high = start, last  # a step ends behind `low`, and at `high` at the latest
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._ends_step(tokens[start:middle]) else (middle, high)
        return high

    async def complete(self, paths: Sequence[SearchNode]) -> list[SearchNode]:
        """Sample open paths to their ends, the first ones first, as far as the budget reaches. Return what is still open."""
        if self.search.tokens_left == 0:
            return list(paths)
        found = await self.search.sample(paths)
        self.answers += [node for node in found if not node.is_open]
        extended = {node.parent for node in found}
        return [node for node in (*found, *(path for path in paths if path not in extended)) if node.is_open]

    async def choose(self, how: str, open_paths: Sequence[SearchNode], **numbers: float) -> Choice:
        """Return the choice among finished answers, `best` or `vote`; the best open path if there are none.

        `open_paths` are what the search ended with, the best first. They are completed if tokens are left.
        """
        cut = await self.complete(open_paths) if open_paths else []
        numbers = self.numbers() | numbers
        found = await self.score(self.answers or [node for node in cut if not node.is_root])
        if how == "best" or not self.answers:
            return Choice(best_scored(found), numbers=numbers)
        if found[0].score is None:
            raise SearchFailed("the verifier failed for every candidate")
        scores = [node.score for node in found]
        chosen = elect(
            self.search, found, vote_weights(scores, None, self.search.log_scores, "set strategy.choose=best")
        )
        return Choice(chosen.node, chosen.votes, numbers)

    def numbers(self) -> dict[str, float]:
        """Return what the result says of the search: finished answers, whether the chosen one is cut off, and rounds of steps."""
        return {"finished": len(self.answers), "cut": 0 if self.answers else 1, "steps": self.num_steps}

    def _ends_step(self, tokens: Sequence[int]) -> bool:
        if self._stop_tokens:
            return not set(self._stop_tokens).isdisjoint(tokens)
        return any(stop in self.search.tokenizer.decode(tokens) for stop in self._stop)

    def _scored_text(self, node: SearchNode) -> str:
        """Return what tells apart the paths that the verifier scores. A special token that ends steps is part of it."""
        if not self._stop_tokens:
            return self.search.text(node)
        return "".join(self.search.text_with_steps(one) for one in node.path()[1:])


def special_step_token(search: Search, step: str) -> int | None:
    """Return the special token that `step` names; None for a text. A text that no sampled answer can have raises a `UserError`.

    Special tokens have no text in an answer, so a search for the text would never end a step.
    """
    token = next(iter(search.tokenizer.special_ids([step])), None)
    if token is None and (names := search.tokenizer.special_names_in(step)):
        raise UserError(
            f"strategy.step {step!r} has the special token {names[0]} beside a text, and never ends a step: name the special token alone, "
            "or give a text without it"
        )
    if token in search.sampling.stop_tokens:
        raise UserError(
            f"strategy.step {step!r} is a token that ends the whole answer, so that every answer would be one step: give what ends a step "
            "inside an answer"
        )
    return token


def by_score(nodes: Sequence[SearchNode]) -> list[SearchNode]:
    """Sort paths, the best first. Equal ones stay in the order in which they were asked for; those whose scoring failed are last."""
    return sorted(nodes, key=lambda node: (node.score is None, -(node.score or 0.0), node.index))


def repeated(nodes: Sequence[SearchNode], counts: Sequence[int]) -> list[SearchNode]:
    """Return every node as often as its count says."""
    return [node for node, count in zip(nodes, counts, strict=True) for _ in range(count)]
