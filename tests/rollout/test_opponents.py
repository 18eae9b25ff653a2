"""The pool of earlier weights: which are in it, which play, and an engine that keeps their requests apart."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from burnish.config.rollout import Opponents
from burnish.core.engine import Request, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.inference.opponent_engine import Opponent, OpponentEngine
from burnish.rollout.opponents import OpponentPool, chosen_versions, opponent_metrics, pool_versions
from tests.inference.slow_engine import SlowEngine


def test_the_pool_of_a_step_is_its_last_snapshots() -> None:
    options = Opponents(every=5, keep=3)
    pools = {version: pool_versions(options, version) for version in (0, 4, 5, 14, 15, 21)}
    assert pools == {0: [0], 4: [0], 5: [0, 5], 14: [0, 5, 10], 15: [5, 10, 15], 21: [10, 15, 20]}


def counts(options: Opponents) -> Counter[int]:
    return Counter(v for seed in range(400) for v in chosen_versions(options, 31, seed))


def test_snapshots_are_picked_as_the_option_says() -> None:
    pool = [0, 10, 20, 30]
    uniform, recent = counts(Opponents()), counts(Opponents(pick="recent"))
    assert set(uniform) == set(pool)
    assert all(70 < uniform[v] < 130 for v in pool)
    assert [recent[v] / 400 for v in pool] == pytest.approx([0.1, 0.2, 0.3, 0.4], abs=0.06)
    assert counts(Opponents(pick="newest")) == {30: 400}
    for pick in ("uniform", "recent", "newest"):
        two = chosen_versions(Opponents(pick=cast(Any, pick), at_once=2), 31, 7)
        assert len(set(two)) == 2
        assert two == sorted(two) == chosen_versions(Opponents(pick=cast(Any, pick), at_once=2), 31, 7)
    assert chosen_versions(Opponents(at_once=3), 4, 0) == [0]  # fewer than wanted are there


def test_a_share_of_the_draws_is_played_against_a_snapshot_as_every_player() -> None:
    none = cast(Any, None)
    pool = OpponentPool(Opponents(share=0.25), ("X", "O"), 3, none, [], none, list)
    pool.playing = [0, 10]
    draws = [SimpleNamespace(prompt=SimpleNamespace(row=SimpleNamespace(id=f"r{k}")), visit=0) for k in range(800)]
    games = Counter(pool.game_of(cast(Any, draw)) for draw in draws)
    assert len(games) == 5
    assert games[None] / 800 == pytest.approx(0.75, abs=0.05)
    assert all(games[game] / 800 == pytest.approx(0.25 / 4, abs=0.03) for game in games if game is not None)


def test_win_rates_are_counted_by_age() -> None:
    def game(version: int, reward: float | None) -> Trajectory:
        return Trajectory("p", 0, 0, [], "stop", "", reward, metadata={"opponent": version})

    self_play = Trajectory("p", 0, 0, [], "stop", "", 1.0)
    found = opponent_metrics([game(0, 1), game(0, -1), game(10, 0), game(10, 2), game(10, None), self_play], 17, 10)
    assert found == {
        "opponents/games": 5,
        "opponents/reward": 0.5,
        "opponents/win_rate": 0.625,
        "opponents/win_rate/age=0": 0.75,
        "opponents/win_rate/age=10": 0.5,
    }
    assert opponent_metrics([self_play], 17, 10) == {"opponents/games": 0}


class Scripted(SlowEngine):
    """Prompts may be anything."""

    def submit(self, requests: Any) -> None:
        for request in requests:
            self.rows[request.id] = request, [], []


def request(name: str, opponent: int | None) -> Request:
    return Request(name, (5, 6), SamplingOptions(max_tokens=6, stop_tokens=(1,)), 9, opponent=opponent)


def engines() -> tuple[OpponentEngine, Opponent]:
    opponent = Opponent(cast(Any, None), cast(Any, Scripted()))
    opponent.load(4, lambda policy: None)
    return OpponentEngine(cast(Any, Scripted()), [opponent]), opponent


def test_every_request_is_answered_by_the_weights_it_names() -> None:
    engine, opponent = engines()
    engine.load(7, ())
    engine.submit([request("a", None), request("b", 4), request("c", None)])
    found = {completion.id: completion.version for completion in engine.stream()}
    assert found == {"a": 7, "b": 4, "c": 7}
    with pytest.raises(RuntimeError, match=r"asks for the weights of step 5, but only \[4\] are loaded"):
        engine.submit([request("d", 5)])
    opponent.engine.load(5, ())  # behind the back of the opponent
    engine.submit([request("e", 4)])
    with pytest.raises(RuntimeError, match="weights of step 5 played instead of step 4"):
        list(engine.stream())


def test_a_new_request_to_the_other_engine_is_answered_in_the_same_stream_and_an_interrupt_ends_it() -> None:
    engine, _ = engines()
    engine.submit([request("a", None)])
    seen = []
    for completion in engine.stream():
        seen.append(completion.id)
        if completion.id == "a":
            engine.submit([request("b", 4)])
        if completion.id == "b":
            engine.submit([request("c", None)])
    assert seen == ["a", "b", "c"]
    engine.submit([request("d", None), request("e", 4)])
    engine.interrupt()
    assert list(engine.stream()) == []
    assert {completion.id for completion in engine.abort(["d", "e"], keep=True)} == {"d", "e"}
    assert list(engine.stream()) == []
