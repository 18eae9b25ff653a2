"""The search tool: BM25 over a local corpus (`burnish/data/search_corpus/bm25_index.py`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.data.search_corpus.bm25_index import BM25Index, find_corpus
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.passages import SEARCH_R1, check_format, format_passages, search_schema
from burnish.environments.tools.values import WrongArguments, check_arguments, error_result

MAX_QUERY_CHARS = 2000


class SearchBM25(Tool):
    """Searches a corpus with BM25 and returns the best passages. It runs in worker processes, which share the index."""

    def __init__(
        self,
        corpus: str,
        base: str | None = None,
        name: str = "search",
        top_k: int = 3,
        k1: float = 0.9,
        b: float = 0.4,
        cache: str | None = None,
        format: str = SEARCH_R1,
        max_passage_chars: int = 2000,
    ) -> None:
        """Options:

        - `corpus`: a jsonl file of `{"id", "title", "text"}` or `{"id", "contents"}`, relative to `base` or else to the
          working directory.
        - `top_k`: how many passages a search returns. A passage that shares no word with the query is left out.
        - `k1`, `b`: the parameters of BM25; Anserini's by default.
        - `cache`: the folder of the index; `<corpus>.bm25` by default.
        - `format`: the line of a passage, with {number}, {id}, {title}, {text} and {score}; Search-R1's by default.
        - `max_passage_chars`: of a longer passage, the middle is left out.
        """
        for key, value in (("top_k", top_k), ("max_passage_chars", max_passage_chars)):
            if value < 1:
                raise UserError(f"BM25 search: {key} must be 1 or more, not {value}")
        self._format, self._top_k, self._max_passage_chars = (
            check_format(format, "BM25 search"),
            top_k,
            max_passage_chars,
        )
        folder = None if cache is None else Path(base or ".") / cache
        self.index = BM25Index(find_corpus(corpus, base), k1, b, folder)
        self.schema = search_schema(name, "Search a collection of passages for words, and return the best ones.")

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Search, and return the passages as text."""
        try:
            query = check_arguments(self.schema, arguments)["query"]
        except WrongArguments as error:
            return error_result(str(error), "wrong_arguments")
        passages = self.index.search([query[:MAX_QUERY_CHARS]], self._top_k)[0]
        return format_passages(passages, self._format, self._max_passage_chars)
