"""`DeepRetrieval`: the model writes one query for a search, and is paid for what the search finds (2503.00223)."""

from __future__ import annotations

import json
import re
from typing import ClassVar, Literal

from burnish.config.errors import UserError
from burnish.data.search_corpus.bm25_index import BM25Index, find_corpus
from burnish.environments.base import Answer, End, Environment, Episode, Observation, RunsIn

TIERS = ((0.7, 5.0), (0.5, 4.0), (0.4, 3.0), (0.3, 1.0), (0.1, 0.5), (0.05, 0.1))
"""Rewards by the least recall, from the paper's search of publications."""
NOTHING_FOUND, FAILED, WELL_FORMED, ILL_FORMED = -3.5, -4.0, 1.0, -4.0
MAX_QUERY_CHARS = 2000
_FORM = re.compile(r"(.*)<think>(.*)</think>(.*)<answer>(.*)</answer>(.*)", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def query_of(text: str) -> str | None:
    """The query of an answer `{"query": "..."}`; None if it is not such an object or the query is empty."""
    try:
        written = json.loads(text)
    except (ValueError, RecursionError):
        return None
    query = written.get("query") if isinstance(written, dict) else None
    return query[:MAX_QUERY_CHARS] if isinstance(query, str) and query.strip() else None


def recall_reward(recall: float) -> float:
    """The reward of a recall."""
    return next((reward for least, reward in TIERS if recall >= least), NOTHING_FOUND)


class DeepRetrieval(Environment):
    """The model writes a query in one turn and earns the recall of its search. It answers the row's prompt with `<think>...</think><answer>{"query": "..."}</answer>`.

    The recall is the share of the passages in the row's column `needs` among the best `top_k`. The reward is 1 for the form plus the
    reward of the recall (`TIERS`), or plus -4 if the answer holds no query. An answer in another form gets -4 and is not searched. An
    episode with a recall of `success_at` or more counts as correct.
    """

    runs_in: ClassVar[RunsIn] = "worker"
    is_reusable: ClassVar[bool] = True

    def __init__(
        self, corpus: str, base: str | None = None, top_k: int = 10, column: str = "needs", success_at: float = 1.0
    ) -> None:
        if top_k < 1:
            raise UserError(f"environment deep_retrieval: top_k={top_k}; expected 1 or more")
        if not 0 < success_at <= 1:
            raise UserError(f"environment deep_retrieval: success_at={success_at:g}; expected a share above 0")
        self.top_k, self.column, self.success_at = top_k, column, success_at
        self.index = BM25Index(find_corpus(corpus, base))
        self.needs: list[str] = []

    async def start(self, episode: Episode) -> Observation:
        needs = episode.extra.get(self.column)
        if not isinstance(needs, list) or not needs:
            raise UserError(f"environment deep_retrieval: row {episode.id} has no ids of passages in {self.column!r}")
        self.needs = [str(need) for need in needs]
        return Observation()

    async def step(self, answer: Answer) -> Observation | End:
        form = _FORM.fullmatch(answer.text)
        if form is None or any(answer.text.count(tag) != 1 for tag in _TAGS):
            return self._end(ILL_FORMED, 0.0, 0.0)
        query = query_of(form[4])
        if query is None:
            return self._end(WELL_FORMED + FAILED, 0.0, 1.0)
        found = {passage.id for passage in self.index.search([query], self.top_k)[0]}
        recall = sum(need in found for need in self.needs) / len(self.needs)
        return self._end(WELL_FORMED + recall_reward(recall), recall, 1.0)

    async def end(self, reason: Literal["turns", "length"]) -> End:
        """An answer that was cut off has not the right form."""
        return self._end(ILL_FORMED, 0.0, 0.0)

    def _end(self, reward: float, recall: float, formed: float) -> End:
        metrics = {"recall": recall, "well_formed": formed}
        return End(reward=reward, success=recall >= self.success_at, metrics=metrics)
