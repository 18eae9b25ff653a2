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
VOTING = ("majority", "weighted_vote", "early_stopping")
"""Strategies that count votes with all options. Others have, or have not, votes in all of their searches; a mixture chooses for each."""
MIXTURE = "by_difficulty"
ORACLE_NOTE = "oracle: it chose by the expected answers, so this is a bound and no result of a model"


@dataclass(frozen=True)
class SearchResult:
    """The searches of an evaluation. Means are over searches."""

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
    verifier_tokens: float | None
    """Mean tokens that the verifier read and wrote; None if it did not say so of every score."""
    wall_s: float
    """Mean seconds from the start of a search to its end. Other searches run at the same time."""
    num_searches: int
    num_questions: int
    num_without_votes: int
    """Searches that voted and found no answer to compare in any sample, so that the first one was taken."""

    @property
    def is_oracle(self) -> bool:
        return self.verifier == ORACLE

    @property
    def unit(self) -> str:
        """Return what the means are of: a question, or one of several searches for it."""
        return "question" if self.num_searches == self.num_questions else "search"

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
    searched = [row for row in rows if SEARCH in row]
    found = [row[SEARCH] for row in searched]
    if not found:
        return None
    n = len(found)
    # Rows of older evaluations do not say.
    read = [one["verifier_tokens"] for one in found if one.get("verifier_tokens") is not None]
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
        verifier_tokens=sum(read) / n if len(read) == n else None,
        wall_s=sum(one["wall_s"] for one in found) / n,
        num_searches=n,
        num_questions=len({row["id"] for row in searched}),
        num_without_votes=_num_without_votes([row[SEARCH] for row in searched if row.get("error") is None]),
    )


def _num_without_votes(found: Sequence[dict[str, Any]]) -> int:
    """Return how many of the searches that did not fail voted without any vote."""
    without = [one for one in found if not one.get("votes")]
    strategy = found[0].get("strategy", "") if found else ""
    voted = strategy in VOTING or (strategy != MIXTURE and len(without) < len(found))
    return len(without) if voted else 0


def search_lines(found: SearchResult) -> list[tuple[str, str]]:
    """Return the lines of the result text: names and values."""
    unit, plural = found.unit, "questions" if found.unit == "question" else "searches"
    times = found.times_one_answer
    multiple = "" if times is None else f", {times:.1f} times one answer ({found.answer_tokens:,.1f})"
    lines = [
        ("strategy", found.name + (f" ({ORACLE_NOTE})" if found.is_oracle else "")),
        ("tokens", f"{found.tokens:,.1f} a {unit}{multiple}; {found.total_tokens:,} in all"),
        ("requests", f"{found.requests:,.1f} a {unit}, {found.wall_s:,.2f} s from its start to its end"),
    ]
    if found.verifier is not None:
        failed = f"; {found.verifier_failures:,} in all failed" if found.verifier_failures else ""
        read = "-" if found.verifier_tokens is None else f"{found.verifier_tokens:,.1f}"
        lines.append(("verifier", f"{found.verifier_calls:,.1f} calls of {read} tokens a {unit}{failed}"))
    if found.num_without_votes:
        first = "no sample had an answer to compare, and the first was taken"
        lines.append(("no votes", f"{found.num_without_votes:,} of {found.num_searches:,} {plural}: {first}"))
    return lines


def searches_json(found: SearchResult) -> dict[str, Any]:
    """Return the numbers as plain values, by search where they are means."""
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
        "verifier_tokens": found.verifier_tokens,
        "wall_s": found.wall_s,
        "searches": found.num_searches,
        "questions": found.num_questions,
        "without_votes": found.num_without_votes,
    }


def cache_hit_rate(context_tokens: int, prefilled_tokens: int | None) -> float | None:
    """Return the share of the tokens of all contexts that the engine did not prefill; None if it does not count them."""
    if prefilled_tokens is None or not context_tokens:
        return None
    return 1 - prefilled_tokens / context_tokens
