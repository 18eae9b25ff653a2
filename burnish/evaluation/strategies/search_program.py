"""`SearchProgram` runs the coroutine of a strategy: it turns what the coroutine waits for into requests, and takes their results.

It does no input or output by itself, so that one implementation serves a runner over many questions, a command and a server.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import numpy as np

from burnish.core.engine import Completion, Request
from burnish.evaluation.strategies.search import Choice, Search, SearchFailed
from burnish.evaluation.strategies.search_tree import SearchNode
from burnish.rewards.score_types import Score, ScoreRequest


def node_index(request: str) -> int:
    """Return the index of the node of a request, from the request's id."""
    return int(request.rpartition("/")[2])


class SearchProgram:
    """A strategy that runs: gives engine requests and score requests, and takes their results.

    The requests of one wait come in waves if a budget cannot hold them all: a wave is what the budget is sure to cover.
    """

    def __init__(self, search: Search, strategy: Coroutine[Any, Any, Choice]) -> None:
        self.search = search
        self.choice: Choice | None = None
        """The result, once the strategy has ended."""
        self.error: str | None = None
        """Why it ended without a choice."""
        self.score_error: str | None = None
        """Why the verifier failed, the first time that it did."""
        self._strategy = strategy
        self._to_sample: deque[SearchNode] = deque()
        self._sampling: dict[int, SearchNode] = {}
        self._to_score: list[SearchNode] = []
        self._scoring: dict[int, SearchNode] = {}
        self._advance()

    @property
    def is_done(self) -> bool:
        return self.choice is not None or self.error is not None

    @property
    def running(self) -> list[str]:
        """The ids of the requests that were given out and have no completion yet."""
        return [f"{self.search.name}/{index}" for index in self._sampling]

    def requests(self) -> list[Request]:
        """Return the engine requests that can be submitted now. Call it after every step until the program is done."""
        found: list[Request] = []
        while not found and self._to_sample:
            found = self._next_wave()
            if not found and self._sampling:
                break  # what is being sampled may leave tokens of the budget
            self._advance_if_answered()
        return found

    def _next_wave(self) -> list[Request]:
        """Return the requests of the first waiting nodes that the budget is sure to cover. Nodes for which nothing is left are dropped."""
        found: list[Request] = []
        left = self.search.tokens_left
        reserved = sum(node.limit for node in self._sampling.values())
        while self._to_sample:
            node = self._to_sample[0]
            assert node.parent is not None
            wanted = max(0, min(node.limit, self.search.room(node.parent)))
            granted = wanted if left is None else min(wanted, left - reserved)
            if granted < wanted and self._sampling:
                break
            self._to_sample.popleft()
            if granted < 1:
                continue
            node.limit = granted
            reserved += granted
            self._sampling[node.index] = node
            found.append(self._request(node, granted))
        return found

    def score_requests(self) -> list[ScoreRequest]:
        """Return the paths that are to be scored now."""
        found = [self._score_request(node) for node in self._to_score]
        self._scoring.update((node.index, node) for node in self._to_score)
        self._to_score.clear()
        return found

    def score_by(self, value: Callable[[SearchNode], float]) -> bool:
        """Score the paths that wait for it with a function of the node. Return whether there were any."""
        nodes, self._to_score = self._to_score, []
        for node in nodes:
            self.search.cost.scores += 1
            node.score = value(node)
        if nodes:
            self._advance_if_answered()
        return bool(nodes)

    def take(self, completion: Completion) -> None:
        """Take the completion of one of the requests."""
        index = node_index(completion.id)
        node, search = self._sampling.pop(index), self.search
        node.tokens = tuple(completion.tokens.tolist())
        node.logp, node.version = np.asarray(completion.logp, dtype=np.float32), completion.version
        has_ended = bool(node.tokens) and node.tokens[-1] in search.sampling.stop_tokens
        node.end = "stop" if has_ended or _ends_with(search, node) else "open"
        if node.end == "open" and search.room(node) < 1:
            node.end = "length"
        search.cost.tokens += len(node.tokens)
        if node.end != "open" and search.is_whole(node):
            search.cost.whole_answers += 1
            search.cost.whole_tokens += len(node.tokens)
        self._advance_if_answered()

    def take_score(self, score: Score) -> None:
        """Take one of the scores. A failed score stays None and is counted."""
        node = self._scoring.pop(node_index(score.id))
        value = None if score.timed_out else score.reward
        node.score = value if value is not None and math.isfinite(value) else None
        node.verifier_tokens = score.num_tokens
        cost = self.search.cost
        cost.failed_scores += node.score is None
        if cost.score_tokens is not None:
            cost.score_tokens = None if score.num_tokens is None else cost.score_tokens + score.num_tokens
        if self.score_error is None and node.score is None:
            late = "the verifier exceeded its deadline (reward.timeout_s)" if score.timed_out else None
            self.score_error = score.error or late or f"the score is {value}"
        if score.details:
            node.notes["verifier"] = "\n".join(score.details.values())
        self._advance_if_answered()

    def close(self) -> None:
        """End the strategy."""
        self._strategy.close()

    def _advance_if_answered(self) -> None:
        if not (self.is_done or self._sampling or self._to_sample or self._scoring or self._to_score):
            self._advance()

    def _advance(self) -> None:
        """Let the strategy go on until it waits for something, or ends."""
        while not self.is_done and not (self._to_sample or self._to_score):
            try:
                asks = self._strategy.send(None)
            except StopIteration as stop:
                self.choice = stop.value
            except SearchFailed as failure:
                self.error = str(failure)
            else:
                self._to_sample.extend(node for ask in asks if not ask.is_score for node in ask)
                self._to_score += [node for ask in asks if ask.is_score for node in ask]

    def _request(self, node: SearchNode, limit: int) -> Request:
        search, parent = self.search, node.parent
        assert parent is not None
        sampling = search.sampling
        options = replace(
            sampling,
            max_tokens=limit,
            stop=(*sampling.stop, *node.stop),
            stop_tokens=(*sampling.stop_tokens, *node.stop_tokens),
        )
        if node.temperature is not None:
            options = replace(options, temperature=node.temperature)
        search.cost.requests += 1
        search.cost.context_tokens += len(parent.context)
        pictures = next(one for one in parent.upwards() if one.is_root).pictures
        return Request(
            f"{search.name}/{node.index}",
            parent.context,
            options,
            node.key,
            priority=search.priority,
            may_continue=node.may_continue or bool(node.stop or node.stop_tokens) or limit < search.room(parent),
            pictures=pictures,
        )

    def _score_request(self, node: SearchNode) -> ScoreRequest:
        search, question = self.search, self.search.question
        path = node.path()
        said = [token for one in path[1:] for token in one.tokens]
        search.cost.scores += 1
        return ScoreRequest(
            id=f"{search.name}/{node.index}",
            prompt=question.prompt,
            completion=search.text(node),
            data_source=question.data_source,
            answer=None,
            extra={},
            truncated=node.end != "stop",
            # A revised answer is scored as an answer to the question, whatever was said before it.
            tokens=(*question.tokens, *said),
            written=[False] * len(question.tokens) + [True] * len(said),
            num_prompt=len(question.tokens),
        )


def _ends_with(search: Search, node: SearchNode) -> bool:
    """Whether a text of the sampling options, which end answers, ended the node."""
    stops = search.sampling.stop
    if not stops or not node.tokens:
        return False
    text = search.tokenizer.decode(node.tokens)
    return any(stop in text for stop in stops)
