"""The settings and results of `bench/learning.py`: every preset takes part, and the page says what the results say."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from burnish.algorithms.presets import PRESETS
from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.environments.base import Answer, Episode, Observation
from burnish.models.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> Iterator[ModuleType]:
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "bench"))
        yield importlib.import_module("learning")
    for name in set(sys.modules) - known:  # `common` is a name that other modules may have
        del sys.modules[name]


def test_every_preset_takes_part_and_says_how_it_differs(bench: ModuleType) -> None:
    assert set(bench.ROWS) == set(PRESETS)
    for name, row in bench.ROWS.items():
        assert row.why or not row.overrides, f"{name} differs from the others without a reason"
        if row.command != "train":
            continue
        teachers = {start: Path(start) for start in bench.teachers_of(row)}
        overrides = bench.with_teachers(bench.overrides_of(bench.Job(name, 0)), teachers)
        config = load(TrainConfig, bench.BASE, [*overrides, *bench.from_model(Path("start"))]).config
        assert config.algorithm.preset == name
        assert config.training.optimizer.lr == (5e-5 if name == "opsd" else 2e-4)


def test_page_and_picture_are_those_of_the_results(bench: ModuleType, tmp_path: Path) -> None:
    """`python bench/learning.py --report` after a change of presets, settings or results."""
    bench.report(ROOT / "bench" / "results" / "learning.json", tmp_path)
    for name in ("learning.md", "learning.svg"):
        written, shown = ((folder / name).read_text(encoding="utf-8") for folder in (tmp_path, ROOT / "docs"))
        assert written == shown, f"docs/{name} is not what the results say"


def test_rows_of_a_preset_that_changed_are_made_again(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    job, other = bench.Job("dapo", 0), bench.Job("grpo", 0)
    before, of_other = bench.digest(job), bench.digest(other)
    assert bench.digest(bench.Job("dapo", 1)) == before
    slots = PRESETS["dapo"].slots
    changed = dataclasses.replace(PRESETS["dapo"], slots={**slots, "clip": {**slots["clip"], "high": 0.3}})
    monkeypatch.setitem(PRESETS, "dapo", changed)
    bench.digest_of_any_seed.cache_clear()
    after = bench.digest(job), bench.digest(other)
    bench.digest_of_any_seed.cache_clear()
    assert after[0] != before
    assert after[1] == of_other


def test_an_option_that_is_off_is_not_in_the_digest(bench: ModuleType) -> None:
    known = {"clip": {"high": 0.3}, "filters": [{"name": "a"}]}
    newer = {
        "clip": {"high": 0.3, "drift": None},
        "filters": [{"name": "a", "least": 0.0}],
        "replay": None,
        "router": {},
    }
    assert bench.without_off(newer) == bench.without_off(known) == known
    assert bench.without_off({"clip": {"high": 0.3, "drift": 2}}) != bench.without_off(known)


@pytest.mark.parametrize(
    ("answers", "reward", "success"), [("123", 3 * 0.25 + 1, True), ("231", 0.25, False), ("x23", 2 * 0.25, False)]
)
def test_a_game_in_turns_pays_for_right_turns_and_for_all_of_them(
    bench: ModuleType, answers: str, reward: float, success: bool
) -> None:
    game = importlib.import_module("learning_toys").SortInTurns(turn_reward=0.25)
    seen = asyncio.run(game.start(Episode("", 0, "1324>")))
    earned, turns = 0.0, 0
    while isinstance(seen, Observation):
        seen = asyncio.run(game.step(Answer(answers[turns], answers[turns])))
        earned, turns = earned + seen.reward, turns + 1
    assert (turns, earned, seen.success) == (3, reward, success)


@pytest.mark.parametrize(("answers", "reward", "turns"), [("123", 1.0, 3), ("131", 0.0, 2), ("x", 0.0, 1)])
def test_a_game_in_conversations_forgets_and_ends_with_the_first_mistake(
    bench: ModuleType, answers: str, reward: float, turns: int
) -> None:
    game = importlib.import_module("learning_toys").SortInConversations()
    seen, asked = asyncio.run(game.start(Episode("", 0, "1324>"))), list[Observation]()
    while isinstance(seen, Observation):
        asked.append(seen)
        seen = asyncio.run(game.step(Answer(answers[len(asked) - 1], answers[len(asked) - 1])))
    assert all(one.new_conversation for one in asked)
    assert [one.messages[0]["content"] for one in asked] == ["1324>", "324>", "34>"][:turns]
    assert (seen.reward, len(asked)) == (reward, turns)


def test_rows_of_two_orders_name_their_teacher(bench: ModuleType) -> None:
    toys = importlib.import_module("learning_toys")
    rows = toys.both_orders(20, "train") + toys.both_orders(20, "test")
    for row in rows:
        digits = sorted(row["prompt"].strip(">"), reverse=row["kind"] == "falling")
        assert (row["answer"], row["prompt"][0] == ">") == ("".join(digits), row["kind"] == "falling")
    assert {row["kind"] for row in rows} == {"rising", "falling"}
    paths = load(TrainConfig, bench.BASE, bench.overrides_of(bench.Job("mopd", 0))).config.algorithm.kl.reference.paths
    assert set(paths) == {"rising", "falling"}


def test_a_policy_of_another_tokenizer_writes_pairs(bench: ModuleType, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(bench.untrained(tmp_path, bench.STARTS["pairs"].merges, 0))
    assert [len(tokenizer.encode(text)) for text in ("0123", "1032", "45>")] == [2, 4, 2]
    assert tokenizer.decode(tokenizer.encode("9013>")) == "9013>"


def test_the_page_names_what_failed_did_not_learn_and_is_missing(bench: ModuleType, tmp_path: Path) -> None:
    common = {"seed": 0, "cpu_s": 8.0, "cpu": "a"}
    rows = [
        {"preset": "grpo", "before": 0.4, "after": 0.95, "curve": [[0, 0.4], [20, 0.91], [40, 0.95]], **common},
        {"preset": "grpo", "before": 0.4, "after": 0.85, "curve": [[0, 0.4], [40, 0.85]], **common},
        {"preset": "ssd", "before": 0.4, "after": 0.41, "curve": [[0, 0.4], [40, 0.41]], **common, "cpu": "b"},
        {"preset": "ppo", "error": "ValueError: no critic", **common},
    ]
    lines = bench.summaries(rows)
    bench.write_page(tmp_path / "learning.md", lines, "", "")
    bench.write_picture(tmp_path / "learning.svg", lines)
    page, picture = (tmp_path / name for name in ("learning.md", "learning.svg"))
    text = page.read_text()
    assert "| `grpo` | sort | 2 | 0.400 | 0.900 (0.850 to 0.950) | 20 (1 of 2) | 8 |" in text
    assert "1\nof the 2 presets measured so far learn" in text
    assert "- `ssd`: from 0.400 to 0.410; it has no reward, and" in text
    assert "made the rows of `ssd`." in text
    assert "- `ppo`: a run failed: ValueError: no critic" in text
    assert "- 0 of 3 seeds measured: `reinforce`," in text
    assert picture.read_text().count('class="dot"') == 2
