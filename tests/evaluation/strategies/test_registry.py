"""What the registry says of strategies: their plug-ins, their widths, and what they score."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from burnish.config.errors import UserError
from burnish.config.records import Plugin
from burnish.evaluation.strategies.registry import (
    PLUGIN_WIDTH,
    load_strategy,
    strategy_record,
    strategy_verifier,
    strategy_width,
)
from burnish.evaluation.strategies.search import Question, Search
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.spec import ByDifficulty
from burnish.rewards.score_types import Score
from tests.evaluation.strategies.toy import ToyEngine, sampling, toy_tokenizer

PLUGIN = """
from burnish.evaluation.strategies.search import Choice


async def nothing(search):
    pass


async def a_list(search):
    return Choice([search.root])


async def root(search):
    return Choice(search.root)
"""


def started(name: str, folder: Path) -> SearchProgram:
    (folder / "own.py").write_text(PLUGIN)
    tokenizer = toy_tokenizer()
    search = Search(Question("q", "?", tuple(tokenizer.encode("?")), "exact"), tokenizer, sampling(tokenizer))
    return SearchProgram(search, load_strategy(Plugin(name=f"own.py:{name}"), folder)(search))


@pytest.mark.parametrize(("name", "found"), [("nothing", "None"), ("a_list", r"Choice\(node=\[")])
def test_a_plugin_that_returns_no_choice_is_named_with_what_it_returned(name: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"strategy own.py:{name} returned {found}.*expected a Choice"):
        started(name, tmp_path)


def test_the_choice_of_a_plugin_is_that_of_the_search(tmp_path: Path) -> None:
    program = started("root", tmp_path)
    assert program.choice is not None
    assert program.choice.node is program.search.root


@pytest.mark.parametrize(
    ("name", "options", "width"),
    [
        ("single", {}, 1),
        ("majority", {"n": 7}, 7),
        ("early_stopping", {"n": 16, "window": 3}, 3),
        ("early_stopping", {"n": 2}, 2),
        ("revise", {"chains": 5, "rounds": 3}, 5),
        ("mcts", {"parallel": 4, "children": 4}, 16),
        ("mcts", {"parallel": 4, "children": 2, "value": "rollout", "rollouts": 8}, 32),
        ("mcts", {"parallel": 4, "children": 4, "simulations": 2}, 8),
        ("step_values", {"n": 3, "rollouts": 8}, 24),
        ("by_difficulty", {"probe": 4}, 16),
        ("by_difficulty", {"probe": 40}, 40),
        ("by_difficulty", {"levels": [{"strategy": {"name": "mcts", "parallel": 8}}]}, 32),
    ],
)
def test_the_width_of_a_strategy_is_what_one_search_asks_for_at_once(
    name: str, options: dict[str, Any], width: int
) -> None:
    assert strategy_width(strategy_record(name, **options)) == width


def test_a_search_of_mcts_fills_its_width_and_no_more() -> None:
    most = 0
    options = {"simulations": 24, "parallel": 4, "children": 3, "step": "a", "exploration": 5.0}
    record = strategy_record("mcts", **options)
    tokenizer = toy_tokenizer()
    search = Search(Question("q", "?", tuple(tokenizer.encode("?")), "exact"), tokenizer, sampling(tokenizer, 12))
    program = SearchProgram(search, load_strategy(record)(search))
    engine = ToyEngine(tokenizer, lambda text: {"a": 0.4, "b": 0.3, "c": 0.3})
    while not program.is_done:
        requests = program.requests()
        most = max(most, len(requests))
        engine.submit(requests)
        for completion in engine.stream():
            program.take(completion)
        for request in program.score_requests():
            program.take_score(Score(request.id, 0.5, None))
    assert most == record.width == 12


def test_a_plugin_has_a_stated_width() -> None:
    assert strategy_width(Plugin(name="own.py:root")) == PLUGIN_WIDTH


@pytest.mark.parametrize(
    ("name", "options", "verifier"),
    [
        ("best_of_n", {}, "likelihood"),
        ("revise", {}, None),
        ("revise", {"choose": "best"}, "likelihood"),
        ("by_difficulty", {}, None),
        ("by_difficulty", {"predict": "score"}, "likelihood"),
        ("by_difficulty", {"levels": [{"strategy": "revise"}]}, None),
        ("by_difficulty", {"levels": [{"strategy": "rebase"}]}, "likelihood"),
    ],
)
def test_a_strategy_that_scores_nothing_has_no_verifier(
    name: str, options: dict[str, Any], verifier: str | None
) -> None:
    part = strategy_verifier(strategy_record(name, **options))
    assert (None if part is None else part.name) == verifier


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("early_stopping", {"n": 4, "window": 5}, "early_stopping.window 5 is above n 4"),
        ("revise", {"rounds": 2, "stop_when_same": 3}, "revise.stop_when_same 3 ends no chain early, with rounds 2"),
        ("revise", {"rounds": 2, "stop_when_same": 2}, "revise.stop_when_same 2 ends no chain early"),
        (
            "by_difficulty",
            {
                "verifier": "self_certainty",
                "levels": [{"strategy": {"name": "best_of_n", "verifier": "likelihood"}}],
            },
            r"best_of_n has a verifier \(likelihood\) of its own",
        ),
    ],
)
def test_options_that_change_nothing_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        strategy_record(name, **options)


def test_sizes_for_scaling_keep_their_options_valid() -> None:
    assert strategy_record("early_stopping").at_budget(2) == strategy_record("early_stopping", n=2)
    assert strategy_record("early_stopping", window=8).at_budget(2) == strategy_record("early_stopping", n=2, window=2)
    assert strategy_record("revise", rounds=4, stop_when_same=2).at_budget(3) == strategy_record("revise", rounds=2)
    levels = [{"strategy": "best_of_n"}]
    mixed = strategy_record("by_difficulty", verifier="self_certainty", levels=levels).at_budget(8)
    assert isinstance(mixed, ByDifficulty)
    assert [level.strategy for level in mixed.levels] == [strategy_record("best_of_n", n=8)]
