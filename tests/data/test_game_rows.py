from __future__ import annotations

from difflib import SequenceMatcher

import pytest

from burnish.config.errors import UserError
from burnish.data.tasks.games import GAME_TASKS
from burnish.data.tasks.registry import make_demonstrations, make_task, score_answer


@pytest.mark.parametrize("name", sorted(GAME_TASKS))
def test_rows_of_games_have_the_published_seeds(name: str) -> None:
    task = make_task(name, {}, 0)
    assert [task.row("train", index).extra["seed"] for index in range(3)] == [10_000, 10_001, 10_002]
    assert [task.row("test", index).extra["seed"] for index in (0, 511)] == [123, 634]
    row = task.row("test", 0)
    assert (row.id, row.data_source, row.extra["task"], row.extra["split"]) == (f"{name}/test/0", name, name, "test")
    assert row.prompt == f"{name} 123"


def test_run_seeds_change_train_rows_but_not_test_rows() -> None:
    seeds = {
        (split, run): {make_task("sokoban", {}, run).row(split, index).extra["seed"] for index in range(100)}
        for split in ("train", "test")
        for run in (0, 1)
    }
    assert not seeds["train", 0] & seeds["train", 1]
    assert seeds["test", 0] == seeds["test", 1]


def test_a_text_alone_is_not_scored_and_unknown_splits_and_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"set environment.name=sokoban"):
        score_answer("sokoban", "<answer>Up</answer>", None, {"task": "sokoban"})
    with pytest.raises(UserError, match="unknown split 'validation'"):
        make_task("sokoban", {}, 0).row("validation", 0)
    with pytest.raises(UserError, match="unknown option 'size'"):
        make_task("sokoban", {"size": 6}, 0)


def test_reversed_texts_are_right_and_splits_are_disjoint() -> None:
    for words in (True, False):
        texts: dict[str, set[str]] = {}
        for split in ("train", "test"):
            for seed in (0, 1):
                task = make_task("reverse_text", {"words": words}, seed)
                rows = [task.row(split, index) for index in range(200)]
                texts.setdefault(split, set()).update(row.answer for row in rows)
                for row in rows:
                    assert (row.answer[::-1] in row.prompt, row.extra["words"]) == (True, words)
                    assert len(row.answer.split() if words else row.answer) == row.extra["length"]
        assert not texts["train"] & texts["test"]
        assert min(len(texts["train"]), len(texts["test"])) > 300


def test_reverse_text_scores_the_similarity_of_the_last_tagged_text() -> None:
    extra = {"words": True}
    assert score_answer("reverse_text", "<reversed_text> cba </reversed_text>", "cba", extra) == 1.0
    assert score_answer("reverse_text", "cba", "cba", extra) == 0.0
    nearly = SequenceMatcher(None, "cab", "cba").ratio()
    assert score_answer("reverse_text", "<reversed_text>cab</reversed_text>", "cba", extra) == nearly
    assert score_answer("reverse_text", "cba\n", "cba", {"words": False}) == 1.0
    assert score_answer("reverse_text", "a" * 100_000, "cba", {"words": False}) == 0.0


def test_reverse_text_demonstrations_are_right() -> None:
    for words in (True, False):
        rows = make_demonstrations("reverse_text", {"num": 20, "words": words}, 3)
        for row in rows:
            text = row["prompt"].rpartition("\n")[2] if words else row["prompt"][:-1]
            assert score_answer("reverse_text", row["completion"], text[::-1], {"words": words}) == 1.0
    assert make_task("reverse_text", {}, 0).alphabet is None
    assert set(rows[0]["prompt"] + rows[0]["completion"]) <= set(
        make_task("reverse_text", {"words": False}, 0).alphabet or ""
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [({"words": 1}, "true or false"), ({"min_length": 9, "max_length": 3}, "min_length=9, max_length=3")],
)
def test_wrong_options_of_reverse_text_are_refused(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_task("reverse_text", options, 0)
