"""Strategies by predicted difficulty: questions get the strategy of their level, and the probe is not sampled twice."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from burnish.config.explain import help_text
from burnish.config.records import Record, walk_keys
from burnish.evaluation.strategies.registry import STRATEGIES, strategy_needs, strategy_record
from burnish.evaluation.strategies.spec import STRATEGY_RECORDS, Majority, Strategy
from tests.evaluation.strategies.toy import END, solve

EASY, HARD = "E?", "H?"
LEVELS = [
    {"at_least": 0.75, "strategy": {"name": "majority", "n": 4}},
    {"strategy": {"name": "majority", "n": 20}},
]


def model(text: str) -> dict[str, float]:
    """Answers 1 to easy questions, and a digit at random to hard ones."""
    if not text.endswith("?"):
        return {END: 1.0}
    return {"1": 1.0} if text == EASY else {str(k): 0.1 for k in range(10)}


def test_an_easy_question_costs_the_probe_and_a_hard_one_its_full_strategy() -> None:
    easy, easy_program = solve("by_difficulty", model, prompt=EASY, probe=4, levels=LEVELS)
    hard, hard_program = solve("by_difficulty", model, prompt=HARD, probe=4, levels=LEVELS)
    assert easy_program.choice is not None
    assert hard_program.choice is not None
    assert easy_program.choice.numbers == {"predicted": 1.0, "level": 0.0}
    assert easy_program.choice.votes == {"1": 4.0}
    assert hard_program.choice.numbers["level"] == 1
    assert hard_program.choice.numbers["predicted"] <= 0.5
    assert (easy.cost.tokens, hard.cost.tokens) == (8, 40)
    all_hard = sum(solve("majority", model, prompt=prompt, n=20)[0].cost.tokens for prompt in (EASY, HARD))
    assert easy.cost.tokens + hard.cost.tokens == 48 < all_hard == 80


@pytest.mark.parametrize("seed", range(4))
def test_a_strategy_behind_the_probe_has_the_samples_that_it_has_alone(seed: int) -> None:
    mixed, program = solve("by_difficulty", model, prompt=HARD, probe=6, levels=LEVELS, seed=seed)
    alone, plain = solve("majority", model, prompt=HARD, n=20, seed=seed)
    keys = [node.key for node in mixed.nodes if node.parent is mixed.root]
    assert keys == [node.key for node in alone.nodes if node.parent is alone.root]
    assert len(set(keys)) == mixed.cost.requests == 20
    assert program.choice is not None
    assert plain.choice is not None
    assert program.choice.votes == plain.choice.votes
    assert program.choice.node.key == plain.choice.node.key


def test_a_probe_larger_than_the_strategy_lends_it_the_first_answers() -> None:
    search, program = solve("by_difficulty", model, prompt=EASY, probe=8, levels=LEVELS)
    assert program.choice is not None
    assert program.choice.votes == {"1": 4.0}
    assert search.cost.requests == 8


@pytest.mark.parametrize(("score", "level"), [(0.9, 0), (0.75, 0), (0.5, 1)])
def test_the_mean_score_predicts_and_no_answer_is_scored_twice(score: float, level: int) -> None:
    levels = [
        {"at_least": 0.75, "strategy": {"name": "best_of_n", "n": 4}},
        {"strategy": {"name": "best_of_n", "n": 10}},
    ]
    search, program = solve(
        "by_difficulty", model, prompt=HARD, score=lambda text: score, predict="score", probe=4, levels=levels
    )
    assert program.choice is not None
    assert program.choice.numbers == {"predicted": pytest.approx(score), "level": float(level)}
    assert search.cost.scores == search.cost.requests == (4, 10)[level]


def test_a_probe_whose_scores_all_failed_predicts_nothing() -> None:
    _, program = solve("by_difficulty", model, prompt=HARD, score=lambda text: None, predict="score")
    assert program.error == "the verifier failed for every answer of the probe, so there is no prediction"


def test_a_strategy_that_forces_thinking_samples_its_own_answers() -> None:
    forced = {"name": "budget_forcing", "answer_tokens": 4, "think_end": "#", "answer_prompt": "=", "waits": 0}
    search, program = solve("by_difficulty", model, prompt=HARD, probe=2, levels=[{"strategy": forced}])
    assert program.choice is not None
    roots = [node for node in search.nodes if node.parent is search.root]
    assert len(roots) == len({node.key for node in roots}) == 3
    assert program.choice.node.path()[1] is roots[2]
    assert program.choice.numbers["waits"] == 0
    assert program.choice.numbers["level"] == 0


@pytest.mark.parametrize("budget", [3, 8, 11, 25])
def test_the_budget_holds_the_probe_and_what_follows(budget: int) -> None:
    search, program = solve("by_difficulty", model, prompt=HARD, probe=4, levels=LEVELS, budget=budget)
    assert search.cost.tokens == budget
    assert program.choice is not None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"levels": [{"at_least": 0.5, "strategy": "single"}]}, "the last level, and no other, has at_least null"),
        ({"levels": [{"strategy": "single"}, {"strategy": "majority"}]}, "the last level, and no other"),
        (
            {"levels": [{"at_least": x, "strategy": "single"} for x in (0.2, 0.5)] + [{"strategy": "single"}]},
            r"at_least must fall, and is \[0.2, 0.5\]",
        ),
        (
            {"levels": [{"strategy": {"name": "best_of_n", "verifier": "self_certainty"}}]},
            r"best_of_n has a verifier \(self_certainty\) of its own",
        ),
        ({"verifier": "self_certainty"}, "verifier has no effect: predict is agreement"),
        ({"levels": [{"strategy": "by_difficulty"}]}, "by_difficulty"),
    ],
)
def test_levels_that_make_no_sense_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        strategy_record("by_difficulty", **options)


def test_every_record_has_a_function_and_the_needs_of_levels_are_those_of_their_strategies() -> None:
    assert {record.model_fields["name"].default for record in STRATEGY_RECORDS} == set(STRATEGIES)
    assert strategy_needs(strategy_record("by_difficulty")) == set()
    assert strategy_needs(strategy_record("by_difficulty", levels=[{"strategy": "revise"}])) == {"chat"}


def test_help_lists_the_options_of_the_strategies_of_levels_once() -> None:
    class Settings(Record):
        strategy: Strategy = Majority()
        """The strategy."""

    paths = [key.path for key in walk_keys(Settings)]
    assert "strategy.levels.<i>.strategy" in paths
    assert not [path for path in paths if path.startswith("strategy.levels.<i>.strategy.")]
    assert "strategy.waits" in paths
    text = help_text(Settings)
    assert "levels (a list of sections; default [{at_least: 0.75, strategy: majority}, {strategy: majority}])" in text
