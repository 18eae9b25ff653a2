"""What a strategy adds to the result of an evaluation: its name, its verifier, and what its searches cost.

The rows are those of `burnish.evaluation.completions.completion_row`, whose column `search` holds the record of a search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from burnish.evaluation.strategies.search_tree import SEARCH
from burnish.evaluation.strategies.spec import ORACLE

Row = dict[str, Any]
ORACLE_NOTE = "oracle: it chose by the expected answers, so this is a bound and no result of a model"


@dataclass(frozen=True)
class SearchResult:
    """The searches of an evaluation. Means are over searches; with one search a question, over questions."""

    strategy: str
    verifier: str | None
    """None for a strategy that compares no scores."""
    tokens: float
    """Mean tokens sampled, in all branches."""
    total_tokens: int
    answer_tokens: float | None
    """Mean tokens of one whole answer that one request sampled; None if the strategy samples none."""
    requests: float
    verifier_calls: float
    verifier_failures: int
    """In all searches."""
    wall_s: float
    """Mean seconds from the start of a search to its end. Other searches run at the same time."""

    @property
    def is_oracle(self) -> bool:
        return self.verifier == ORACLE

    @property
    def times_one_answer(self) -> float | None:
        """Return the tokens of a search as a multiple of those of one answer; None if the latter are not known."""
        return self.tokens / self.answer_tokens if self.answer_tokens else None

    @property
    def name(self) -> str:
        """Return the strategy with its verifier, such as `best_of_n by self_certainty`."""
        return self.strategy + (f" by {self.verifier}" if self.verifier else "")


def summarise_searches(rows: Sequence[Row]) -> SearchResult | None:
    """Summarise the rows of a strategy, failed searches included; None if no strategy chose the completions."""
    found = [row[SEARCH] for row in rows if SEARCH in row]
    if not found:
        return None
    n = len(found)
    answers = [one["answer_tokens"] for one in found if "answer_tokens" in one]
    return SearchResult(
        strategy=found[0].get("strategy", ""),
        verifier=found[0].get("verifier"),
        tokens=sum(one["tokens"] for one in found) / n,
        total_tokens=sum(one["tokens"] for one in found),
        answer_tokens=sum(answers) / len(answers) if answers else None,
        requests=sum(one["requests"] for one in found) / n,
        verifier_calls=sum(one["verifier_calls"] for one in found) / n,
        verifier_failures=sum(one["verifier_failures"] for one in found),
        wall_s=sum(one["wall_s"] for one in found) / n,
    )


def search_lines(found: SearchResult) -> list[tuple[str, str]]:
    """Return the lines of the result text: names and values."""
    times = found.times_one_answer
    multiple = "" if times is None else f", {times:.1f} times one answer ({found.answer_tokens:,.1f})"
    lines = [
        ("strategy", found.name + (f" ({ORACLE_NOTE})" if found.is_oracle else "")),
        ("tokens", f"{found.tokens:,.1f} a question{multiple}; {found.total_tokens:,} in all"),
        ("requests", f"{found.requests:,.1f} a question, {found.wall_s:,.2f} s from its start to its end"),
    ]
    if found.verifier is not None:
        failed = f"; {found.verifier_failures:,} in all failed" if found.verifier_failures else ""
        lines.append(("verifier", f"{found.verifier_calls:,.1f} calls a question{failed}"))
    return lines


def searches_json(found: SearchResult) -> dict[str, Any]:
    """Return the numbers as plain values, by question where they are means."""
    return {
        "strategy": found.strategy,
        "verifier": found.verifier,
        "oracle": found.is_oracle,
        "tokens": found.tokens,
        "total_tokens": found.total_tokens,
        "answer_tokens": found.answer_tokens,
        "times_one_answer": found.times_one_answer,
        "requests": found.requests,
        "verifier_calls": found.verifier_calls,
        "verifier_failures": found.verifier_failures,
        "wall_s": found.wall_s,
    }


def cache_hit_rate(context_tokens: int, prefilled_tokens: int | None) -> float | None:
    """Return the share of the tokens of all contexts that the engine did not prefill; None if it does not count them."""
    if prefilled_tokens is None or not context_tokens:
        return None
    return 1 - prefilled_tokens / context_tokens
