"""`Policy.solve`: the answer that a strategy chooses, its votes and its cost."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

import burnish


@pytest.fixture
def policy(model: Path) -> burnish.Policy:
    return burnish.Policy.load(model, device="cpu", seed=5)


def test_a_vote_counts_the_answers_of_its_tree_and_returns_the_most_frequent(policy: burnish.Policy) -> None:
    first, second = policy.solve(["1+1=", "2+2="], n=12, max_tokens=1, reward="exact")
    for solution in (first, second):
        texts = [node["text"] for node in solution.tree[1:]]
        assert solution.votes == Counter(text for text in texts if text.strip())
        assert solution.votes[solution.answer or ""] == max(solution.votes.values())
        assert solution.completion == solution.answer
        assert (solution.requests, len(texts)) == (12, 12)
        assert solution.tokens == sum(node["tokens"] for node in solution.tree[1:])
        assert solution.trajectory is not None
        assert solution.trajectory.completion == solution.completion
    assert first.tree[0]["text"] == "1+1="
    assert first.votes != second.votes


def test_a_prompt_that_is_solved_again_is_searched_anew_and_a_seed_repeats_it(
    policy: burnish.Policy, model: Path
) -> None:
    found = [policy.solve("1+1=", n=4, max_tokens=4)[0] for _ in range(2)]
    trees = [[node["text"] for node in solution.tree] for solution in found]
    assert trees[0] != trees[1]
    again = burnish.Policy.load(model, device="cpu", seed=5).solve(["1+1=", "1+1="], n=4, max_tokens=4)
    assert [[node["text"] for node in solution.tree] for solution in again] == trees


def test_best_of_n_has_the_highest_score_and_counts_its_verifier(policy: burnish.Policy) -> None:
    (solution,) = policy.solve({"prompt": "1+1=", "answer": "2"}, "best_of_n", n=6, max_tokens=4)
    scores = [node["score"] for node in solution.tree[1:]]
    assert solution.score == max(scores)
    assert (solution.verifier_calls, solution.votes) == (6, {})
    (other,) = policy.solve("1+1=", {"name": "best_of_n", "n": 2, "verifier": "self_certainty"}, max_tokens=4)
    assert other.score is not None
    assert other.score > 0 > solution.score


def test_a_budget_bounds_the_tokens_of_each_prompt(policy: burnish.Policy) -> None:
    for solution in policy.solve(["1+1=", "2+2="], n=8, max_tokens=4, budget=9):
        assert 0 < solution.tokens <= 9
        assert solution.tokens == sum(node["tokens"] for node in solution.tree if node["sampled"])


def test_a_solution_prints_its_tree_votes_and_cost(policy: burnish.Policy) -> None:
    (solution,) = policy.solve("1+1=", n=3, max_tokens=1, reward="exact")
    lines = str(solution).splitlines()
    assert lines[0].startswith("* 1+1=")
    assert sum(line.startswith("* ") for line in lines) == 2  # the root and the chosen answer
    assert lines[-1].startswith(
        f"cost        {solution.tokens} tokens in 3 requests over 12 context tokens, 0 verifier"
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"strategy": "majorty"}, "did you mean 'majority'"),
        ({"strategy": "majority", "m": 3}, "majority has no option 'm'"),
        ({"strategy": {"name": "majority", "n": 3}, "n": 4}, "n is given twice"),
        ({"strategy": "best_of_n", "verifier": "oracle"}, "expected answer"),
        ({"temperature": 0}, "they are all alike"),
        ({"budget": 0}, "budget: got 0"),
        ({"reward": "numbr"}, "did you mean 'number'"),
        ({"max_tokens": 0}, "expected at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(policy: burnish.Policy, given: dict[str, object], message: str) -> None:
    with pytest.raises(burnish.UserError, match=message):
        policy.solve("1+1=", **given)  # type: ignore[arg-type]


def test_an_answer_longer_than_the_model_is_cut_with_a_note(
    policy: burnish.Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    (solution,) = policy.solve("1+1=", "single", max_tokens=10**6)
    assert "max_tokens cut from 1000000" in capsys.readouterr().err
    assert solution.tokens > 0


def test_progress_counts_prompts_and_tokens_and_may_go_to_a_function(
    policy: burnish.Policy, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    found = policy.solve(["1+1=", "2+2=", "3+3="], n=4, max_tokens=4, progress=said.append)
    assert said[-1] == f"solved 3/3, {sum(solution.tokens for solution in found)} tokens"
    done = [int(text.removeprefix("solved ").partition("/")[0]) for text in said]
    assert done == sorted(done)
    assert len(said) >= 12  # with every answer
    assert capsys.readouterr().err == ""


def test_progress_is_a_line_on_stderr_unless_it_is_off(
    policy: burnish.Policy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("burnish.cli.eval.LINE_EVERY_S", 0.0)
    (solution,) = policy.solve("1+1=", n=4, max_tokens=4)
    assert capsys.readouterr().err.splitlines()[-1] == f"solved 1/1, {solution.tokens} tokens"
    policy.solve("1+1=", n=4, max_tokens=4, progress=False)
    assert capsys.readouterr().err == ""
