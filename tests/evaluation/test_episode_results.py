"""Evaluations in environments: their settings, the rows of games of several players, and what the result says about episodes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from burnish.config.data import Template
from burnish.core.engine import SamplingOptions
from burnish.data.prompt_pool import Prompt
from burnish.environments.base import Answer, End, Environment, Episode, Event, Observation
from burnish.environments.dialogue import ChatRenderer
from burnish.environments.host import EnvironmentHost, EnvironmentKind
from burnish.evaluation.completions import PartialCompletions, read_completions, whole_games, write_completions
from burnish.evaluation.evaluate import fingerprint, in_data_order, sample_and_score
from burnish.evaluation.result import Row, result_json, result_text, summarise
from burnish.evaluation.settings import EvalConfig, load_settings, usual_game
from burnish.inference.native.dense_engine import DenseEngine
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import RolloutRunner
from tests.rollout.test_async_source import Judge
from tests.rollout.test_in_flight import TOKENIZER, draws
from tests.tiny_engines import tools  # noqa: F401

SAMPLING = SamplingOptions(max_tokens=6, stop_tokens=(1, 3, 4, 5))


class Duel(Environment):
    """The second player has a turn unless the text of the first answer has an even sum."""

    async def start(self, episode: Episode) -> Observation:
        return Observation(messages=({"role": "user", "content": "1>"},), role="first")

    async def step(self, answer: Answer) -> Observation | End:
        slow = Event("slow", "step", "a message")
        if answer.turn == 0 and sum(map(ord, answer.text)) % 2:
            return Observation(messages=({"role": "user", "content": "2>"},), role="second", events=(slow,))
        return End(rewards={"first": 1.0, "second": -1.0}, metrics={"moves": answer.turn + 1}, text="over")


@pytest.fixture(scope="module")
def runner(tools: Any) -> RolloutRunner:  # noqa: F811 (the fixture)
    kind = EnvironmentKind("duel", "runner", make=Duel, takes_truncated=True, roles=("first", "second"))
    renderer = ChatRenderer(TOKENIZER, Template(kind="plain"))
    engine = DenseEngine(tools.decoder())
    return RolloutRunner(engine, None, TOKENIZER, 7, 2, host=EnvironmentHost(kind), renderer=renderer)


def evaluated(runner: RolloutRunner, journal: PartialCompletions, prompts: Sequence[Prompt]) -> list[Row]:
    done = {(row["id"], row["sample"]) for row in journal.rows}
    rewards = cast(Rewards, Judge())
    sample_and_score(runner, rewards, prompts, 4, SAMPLING, lambda text: None, journal.add, (), done)
    return in_data_order(journal.rows, prompts)


def test_a_kill_between_the_rows_of_two_players_loses_neither(runner: RolloutRunner, tmp_path: Path) -> None:
    prompts = [draw.prompt for draw in draws()]
    path = tmp_path / "d.partial.jsonl"
    with PartialCompletions(path, {}) as journal:
        expected = evaluated(runner, journal, prompts)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + len(expected) > 1 + 8  # some games have both players
    assert len(expected) < 16  # and some have one
    for kept in range(1, len(lines) + 1):
        path.write_bytes(b"".join(lines[:kept]))
        with PartialCompletions(path, {}) as journal:
            assert evaluated(runner, journal, prompts) == expected
        with PartialCompletions(path, {}) as journal:  # a second look at what both wrote
            assert in_data_order(journal.rows, prompts) == expected


def test_rows_hold_turns_events_and_the_prompt_that_the_model_read(runner: RolloutRunner, tmp_path: Path) -> None:
    prompts = [draw.prompt for draw in draws()]
    with PartialCompletions(tmp_path / "d.partial.jsonl", {}) as journal:
        rows = evaluated(runner, journal, prompts)
    second = next(row for row in rows if row["role"] == "second")
    first = next(row for row in rows if (row["id"], row["episode"]) == (second["id"], second["episode"]))
    assert (first["prompt"], second["prompt"]) == ("1>", "2>")
    assert first["players"] == second["players"] == 2
    assert first["turns"] == [{"who": "model", "reward": 1.0, "text": first["completion"]}]
    assert first["last_words"] == "over"
    assert whole_games([first]) == []
    for name in ("o.jsonl", "o.parquet"):
        write_completions(tmp_path / name, rows)
        assert read_completions(tmp_path / name) == rows
    result = summarise(rows)
    games = {(row["id"], row["episode"]) for row in rows}
    num_seconds = len(rows) - len(games)
    assert (result.num_prompts, result.n) == (2, 4)
    assert result.episodes is not None
    assert result.episodes.events == {"slow": num_seconds}  # once a game, not once a player
    assert [result.episodes.players[role].won.mean for role in ("first", "second")] == [1.0, 0.0]
    assert result_json(result)["episodes"]["players"]["second"]["num_games"] == num_seconds
    text = result_text(result)
    assert f"  first   {len(games)}      1.000  0.000  0.000  1.000" in text
    assert f"events       slow {num_seconds}" in text
    assert "accuracy" not in text


def made(data: str, flags: dict[str, Any] | None = None, *overrides: str, run: Any = None) -> EvalConfig:
    return load_settings(data, flags or {}, overrides, run or {}).config


def test_a_game_takes_its_environment_and_its_usual_turns() -> None:
    assert usual_game("task:sokoban", {}, (), {}) == {"environment.name": "sokoban", "environment.max_turns": 5}
    assert usual_game("task:sokoban", {}, ("environment.max_turns=2",), {}) == {"environment.name": "sokoban"}
    assert usual_game("task:addition", {}, (), {}) == {}
    played = made("task:sokoban", None, "environment.options.words=false").environment
    assert (played.name, played.max_turns, played.options) == ("sokoban", 5, {"words": False})
    run = {"environment": {"name": "sokoban", "max_turns": 7, "options": {"size": 5}}}
    assert usual_game("task:sokoban", {}, (), run) == {}
    assert made("task:sokoban", run=run).environment.max_turns == 7
    other = made("task:frozen_lake", {"environment.name": "frozen_lake"}, run=run).environment
    assert (other.max_turns, other.options) == (5, {})


def test_a_file_played_in_an_environment_needs_no_reward(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"question": "1>", "answer": "1"}) + "\n")
    config = made(str(path), {"environment.name": "games.py:Mine"})
    assert config.environment.name == "games.py:Mine"
    assert [part.name for part in config.reward.parts] == ["task"]


def test_a_changed_tool_is_another_evaluation(tmp_path: Path) -> None:
    (tmp_path / "tool.py").write_text("def twice(x: int) -> int:\n    return 2 * x\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    resolved = load_settings("task:addition", {}, ("environment={name: tools, tools: ['tool.py:twice']}",), {}).resolved
    before = fingerprint(resolved, tmp_path, tmp_path / "model")
    (tmp_path / "tool.py").write_text("def twice(x: int) -> int:\n    return 3 * x\n")
    after = fingerprint(resolved, tmp_path, tmp_path / "model")
    assert {key for key in before if before[key] != after[key]} == {"tool.content of tool.py:twice"}
