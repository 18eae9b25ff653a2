"""What searches add to a result: the unit of their means, and questions without a vote."""

from __future__ import annotations

from typing import Any

from burnish.evaluation.search_results import search_lines, summarise_searches


def row(
    question: int, sample: int = 0, error: str | None = None, strategy: str = "majority", **more: Any
) -> dict[str, Any]:
    search = {
        "strategy": strategy,
        "tokens": 10 * (question + 1),
        "requests": 4,
        "verifier_calls": 0,
        "verifier_failures": 0,
    }
    return {"id": f"q{question}", "sample": sample, "error": error, "search": search | {"wall_s": 1.0} | more}


def lines(*rows: dict[str, Any]) -> dict[str, str]:
    found = summarise_searches(rows)
    assert found is not None
    return dict(search_lines(found))


def test_means_of_several_searches_of_a_question_are_said_to_be_per_search() -> None:
    votes = {"votes": {"1": 4.0}}
    once = lines(row(0, **votes), row(1, **votes))
    twice = lines(*(row(question, sample, verifier="model", **votes) for question in (0, 1) for sample in (0, 1)))
    assert once["tokens"] == "15.0 a question; 30 in all"
    assert once["requests"].startswith("4.0 a question,")
    assert twice["tokens"] == "15.0 a search; 60 in all"
    assert twice["requests"].startswith("4.0 a search,")
    assert twice["verifier"] == "0.0 calls of - tokens a search"


def test_the_tokens_of_a_verifier_are_a_mean_if_all_searches_know_them() -> None:
    known = [row(k, verifier="model", verifier_calls=2, verifier_tokens=tokens) for k, tokens in enumerate((10, 31))]
    assert lines(*known)["verifier"] == "2.0 calls of 20.5 tokens a question"
    assert lines(*known, row(2, verifier="model", verifier_tokens=None))["verifier"].endswith("of - tokens a question")


def test_questions_without_any_vote_are_counted_and_failed_ones_are_not() -> None:
    found = lines(row(0, votes={"1": 4.0}), row(1), row(2, error="no answer"))
    assert found["no votes"] == "1 of 3 questions: no sample had an answer to compare, and the first was taken"
    assert lines(row(0), row(1))["no votes"].startswith("2 of 2 questions")
    assert "no votes" not in lines(row(0, votes={"1": 4.0}))


def test_a_strategy_that_does_not_vote_lacks_no_votes() -> None:
    assert "no votes" not in lines(row(0, strategy="best_of_n"), row(1, strategy="best_of_n"))
    # A mixture may vote on some questions and not on others.
    mixed = (row(0, strategy="by_difficulty", votes={"1": 4.0}), row(1, strategy="by_difficulty"))
    assert "no votes" not in lines(*mixed)
    assert "no votes" in lines(row(0, strategy="rebase", votes={"1": 4.0}), row(1, strategy="rebase"))
