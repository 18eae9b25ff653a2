"""The text of the passages that a search returns, as the model reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from burnish.config.errors import UserError
from burnish.data.search_corpus.bm25_index import Passage
from burnish.environments.tools.values import cut_middle, tool_schema

SEARCH_R1 = "Doc {number}(Title: {title}) {text}"
"""The line of one passage in Search-R1 (2503.09516)."""
NO_RESULTS = "No results."


def check_format(line: str, where: str) -> str:
    """The format of a passage's line; UserError if it names unknown fields or shows no text."""
    try:
        shown = line.format(number=1, id="i", title="t", text="\0", score=1.0)
    except (KeyError, IndexError, ValueError) as error:
        raise UserError(
            f"{where}: format {line!r} cannot be used ({type(error).__name__}: {error}); "
            "its fields are {number}, {id}, {title}, {text} and {score}"
        ) from error
    if "\0" not in shown:
        raise UserError(f"{where}: format {line!r} does not show {{text}}")
    return line


def format_passages(passages: Sequence[Passage], line: str, max_chars: int) -> str:
    """The text that the model reads: one line for each passage. Each passage is cut to `max_chars`."""
    if not passages:
        return NO_RESULTS
    return "\n".join(
        line.format(number=number, id=p.id, title=p.title, text=cut_middle(p.text.strip(), max_chars), score=p.score)
        for number, p in enumerate(passages, 1)
    )


def search_schema(name: str, what: str) -> dict[str, Any]:
    """The schema of a search tool."""
    query = {"type": "string", "description": "What to search for."}
    return tool_schema(name, what, {"query": query}, ["query"])
