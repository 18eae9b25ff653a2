"""What every strategy relies on: searches are deterministic, share their samples with `burnish eval`, and keep to a budget."""

import numpy as np
import pytest

from burnish.core.engine import Completion
from burnish.core.random_keys import sample_key
from burnish.evaluation.strategies.search import Choice, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from tests.evaluation.strategies.toy import END, solve


def coin(text: str) -> dict[str, float]:
    """Answers `1` with probability 0.7 and `2` with 0.3, then ends."""
    return {"1": 0.7, "2": 0.3} if text.endswith("?") else {END: 1.0}


def numbers(text: str) -> dict[str, float]:
    """Writes characters of equal probability for ever."""
    return {"1": 0.5, "2": 0.5}


def test_the_kth_answer_has_the_random_key_of_the_kth_sample_of_an_evaluation() -> None:
    search, _ = solve("majority", coin, n=4)
    keys = [node.key for node in search.nodes if node.parent is search.root]
    assert keys == [sample_key(0, "eval", search.question.id, 0, k) for k in range(4)]


def test_two_searches_for_one_question_draw_different_answers_and_each_repeats() -> None:
    first, second = (
        [search.text(node) for node in search.nodes]
        for search, _ in (solve("majority", numbers, n=4, number=k, max_tokens=16) for k in (0, 1))
    )
    again = solve("majority", numbers, n=4, number=1, max_tokens=16)[0]
    assert first != second
    assert [again.text(node) for node in again.nodes] == second


def test_majority_takes_the_most_frequent_answer() -> None:
    search, program = solve("majority", coin, n=16)
    assert program.choice is not None
    counts = {answer: sum(search.answer(node) == answer for node in search.nodes[1:]) for answer in "12"}
    assert program.choice.votes == {answer: float(count) for answer, count in counts.items()}
    assert search.text(program.choice.node) == max(counts, key=counts.__getitem__)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [("majority", {"n": 5}), ("weighted_vote", {"n": 5}), ("early_stopping", {"n": 5, "window": 5})],
)
def test_spellings_of_one_value_win_over_a_wrong_answer_together(strategy: str, options: dict[str, int]) -> None:
    said = [r"\boxed{3}", r"\boxed{\frac12}", r"\boxed{3}", r"\boxed{x = 0.50}", r"\boxed{1/2}"]
    search, program = solve(
        strategy, {"": [f"{text}{END}" for text in said]}, kind="math", score=lambda text: 1, **options
    )
    assert program.choice is not None
    assert program.choice.votes == {"3": 2, "1/2": 3}
    assert search.answer(program.choice.node) == "1/2"


def test_best_of_n_takes_the_highest_score_and_leaves_out_what_could_not_be_scored() -> None:
    values = {"1": None, "2": 0.1}
    search, program = solve("best_of_n", coin, n=16, score=lambda text: values[text])
    assert program.choice is not None
    assert search.text(program.choice.node) == "2"
    assert search.cost.scores == 16
    assert search.cost.failed_scores == sum(search.text(node) == "1" for node in search.nodes[1:]) > 0


def test_a_verifier_that_fails_for_every_candidate_is_an_error_and_no_choice() -> None:
    _, program = solve("best_of_n", coin, n=4, score=lambda text: None)
    assert program.choice is None
    assert program.error == "the verifier failed for every candidate"


@pytest.mark.parametrize("budget", [1, 7, 16, 40, 1000])
def test_a_search_never_samples_more_than_its_budget(budget: int) -> None:
    search, program = solve("majority", numbers, n=8, max_tokens=10, budget=budget)
    assert search.cost.tokens == min(budget, 80)
    assert program.choice is not None


def test_a_budget_that_some_answers_leave_goes_to_the_next_ones() -> None:
    # Two tokens an answer, at most ten: 24 tokens hold twelve answers, though only two are sure to fit at once.
    search, _ = solve("majority", coin, n=30, max_tokens=10, budget=24)
    assert search.cost.tokens == 24
    assert sum(node.is_sampled for node in search.nodes) == 12


def test_weighted_votes_add_up_the_scores() -> None:
    search, program = solve("weighted_vote", coin, n=16, score=lambda text: 0.9 if text == "2" else 0.1)
    assert program.choice is not None
    twos = sum(search.text(node) == "2" for node in search.nodes[1:])
    assert program.choice.votes == pytest.approx({"1": 0.1 * (16 - twos), "2": 0.9 * twos})


def test_gathered_programs_advance_in_lock_step_and_keep_their_order() -> None:
    order: list[str] = []

    async def child(search: Search, name: str, rounds: int) -> str:
        for k in range(rounds):
            order.append(f"{name}{k}")
            await search.sample(search.root, 1)
        return name

    async def strategy(search: Search) -> Choice:
        names = await search.gather(child(search, "a", 1), child(search, "b", 3), child(search, "c", 2))
        assert names == ["a", "b", "c"]
        return Choice(search.nodes[1])

    search, _ = solve("single", coin)
    program = SearchProgram(search, strategy(search))
    rounds = 0
    while not program.is_done:
        requests = program.requests()
        assert requests
        rounds += 1
        for request in requests:
            program.take(Completion(request.id, np.array([0]), np.zeros(1, dtype=np.float32), "length", 0))
    assert rounds == 3
    assert order == ["a0", "b0", "c0", "b1", "c1", "b2"]
