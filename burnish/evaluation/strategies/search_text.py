"""Searches as text: the tree with one line for each node, the votes, and one line on how far a search is."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from burnish.config.yaml_text import printable
from burnish.evaluation.strategies.search import Search
from burnish.evaluation.strategies.search_program import node_index
from burnish.evaluation.strategies.search_tree import STEP_TEXT, SearchNode
from burnish.evaluation.strategies.votes import count_votes

MAX_INDENT = 40
"""Columns of indentation. Deeper nodes stand below each other."""
MAX_CHARS = 1000
"""Characters of a node's text that a line may have."""
MAX_LINES = 40
"""Lines of a tree that is printed in short."""
NODE_KEYS = frozenset({"node", "parent", "text", "tokens", "sampled", "end", "score", "chosen", STEP_TEXT})
"""Keys of a node in `tree_record`. The others are notes of the strategy."""


def clipped(text: str, width: int) -> str:
    """Return a text on one line of at most `width` columns, with an ellipsis in place of what does not fit."""
    text = printable(" ".join(text.split()))
    if columns(text) <= width:
        return text
    used, end = 0, 0
    while end < len(text) and used + columns(text[end]) <= width - 1:
        used += columns(text[end])
        end += 1
    return text[:end] + "…"


def clipped_start(text: str, width: int) -> str:
    """Return the end of a text on one line of at most `width` columns, with an ellipsis in place of what does not fit."""
    text = printable(" ".join(text.split()))
    if columns(text) <= width:
        return text
    used, start = 0, len(text)
    while start > 0 and used + columns(text[start - 1]) <= width - 1:
        start -= 1
        used += columns(text[start])
    return "…" + text[start:]


def columns(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    return len(text) + wide - sum(unicodedata.combining(character) > 0 for character in text)


def tree_lines(tree: Sequence[Mapping[str, Any]], width: int, max_lines: int | None = None) -> list[str]:
    """Return one line for each node of a tree (`tree_record`), children below their parent. `*` marks the chosen path.

    With `max_lines`, chosen nodes come first, then those asked for first; a last line counts the others.
    """
    order = _depth_first(tree)
    if max_lines is not None and len(order) > max_lines:
        preferred = sorted(order, key=lambda item: (not item[1]["chosen"], item[1]["node"]))[: max_lines - 1]
        shown = {node["node"] for _, node in preferred}
        left = len(order) - len(shown)
        order = [item for item in order if item[1]["node"] in shown]
    else:
        left = 0
    lines = [_node_line(depth, node, width) for depth, node in order]
    return [*lines, f"  ... and {left} nodes more"] if left else lines


def _depth_first(tree: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """Return the nodes with their depths. A parent stands before its children, and siblings are in the order of the search."""
    children: dict[int | None, list[Mapping[str, Any]]] = {}
    for node in tree:
        children.setdefault(node["parent"], []).append(node)
    found: list[tuple[int, Mapping[str, Any]]] = []
    waiting = [(0, node) for node in reversed(children.get(None, []))]
    while waiting:
        depth, node = waiting.pop()
        found.append((depth, node))
        waiting += [(depth + 1, child) for child in reversed(children.get(node["node"], []))]
    return found


def _node_line(depth: int, node: Mapping[str, Any], width: int) -> str:
    facts = [] if node["score"] is None else [f"score {node['score']:.4g}"]
    facts += [
        f"{name} {short_value(value)}" for name, value in node.items() if name not in NODE_KEYS and name != "verifier"
    ]
    facts += [counted(node["tokens"], "token")] if node["parent"] is not None else ["prompt"]
    if node["end"] == "length":
        facts.append("cut at its limit")
    if node["parent"] is not None and not node["sampled"]:
        facts.append("written by the strategy" if node["tokens"] else "not sampled: the budget was spent")
    start = ("* " if node["chosen"] else "  ") + "  " * min(depth, MAX_INDENT // 2)
    free = width - columns(start) - 2
    text = clipped(node["text"], MAX_CHARS) or "(no text)"
    ending = clipped(f"({', '.join(facts)})", max(8, free - min(columns(text), max(8, width // 3))))
    return f"{start}{clipped(text, max(8, free - columns(ending)))}  {ending}"


def short_value(value: Any) -> str:
    """Return a value of a note in a few characters."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return clipped(str(value), 24)


def tree_text(tree: Sequence[Mapping[str, Any]]) -> str:
    """Return the tree with the whole text of each node, indented below its line."""
    lines: list[str] = []
    for depth, node in _depth_first(tree):
        start = "  " * (min(depth, MAX_INDENT // 2) + 2)
        lines.append(_node_line(depth, {**node, "text": f"node {node['node']}"}, 200))
        lines += [start + printable(line) for line in node["text"].splitlines()]
    return "\n".join(lines)


def votes_lines(votes: Mapping[str, float], width: int, limit: int = 10) -> list[str]:
    """Return the answers with their votes, the most voted first."""
    ranked = sorted(votes.items(), key=lambda item: -item[1])
    lines = [f"{clipped(answer, width - 12)}  {weight:.4g}" for answer, weight in ranked[:limit]]
    left = ranked[limit:]
    return [*lines, f"... and {len(left)} others with {sum(w for _, w in left):.4g} together"] if left else lines


def counted(number: int, thing: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1."""
    return f"{number:,} {thing}" + ("" if number == 1 else "s")


def running_lines(search: Search, running: Mapping[str, Sequence[int]], width: int, limit: int) -> list[str]:
    """Return the ends of the texts that are being written, one a line: those of the first requests. `running` has tokens by request."""
    first = sorted(running, key=node_index)[:limit]
    return [f"  > {clipped_start(search.tokenizer.decode(running[one][-width:]), max(8, width - 4))}" for one in first]


def ended_answers(search: Search) -> list[SearchNode]:
    """Return the nodes at which a sampled answer has ended, so far."""
    return [node for node in search.nodes if node.is_sampled and not node.is_open]


def votes_so_far(search: Search) -> dict[str, float]:
    """Return how many of the ended answers have each answer. A strategy may weigh them otherwise."""
    return count_votes([search.answer(node) for node in ended_answers(search)])


def progress_text(search: Search, tokens: int) -> str:
    """Return how far a search is, on one line. `tokens` counts those of running requests too."""
    of = "" if search.budget is None else f" of {search.budget:,}"
    ended = len(ended_answers(search))
    parts = [f"{tokens:,}{of} tokens", counted(search.cost.requests, "request"), counted(ended, "answer")]
    if search.cost.scores:
        parts.append(counted(search.cost.scores, "verifier call"))
    ranked = sorted(votes_so_far(search).items(), key=lambda item: -item[1])
    if ranked:
        parts.append("so far " + ", ".join(f"{clipped(answer, 24)} x{count:g}" for answer, count in ranked[:4]))
    scores = [node.score for node in search.nodes if node.score is not None]
    if scores:
        parts.append(f"best score {max(scores):.4g}")
    return "; ".join(parts)
