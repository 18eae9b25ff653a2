"""Drawn shapes and letters, and the tasks whose prompts are drawn pictures."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.data.drawing import (
    BLACK,
    COLOURS,
    GLYPHS,
    SHAPES,
    canvas,
    draw_frame,
    draw_text,
    fill_rectangle,
    fill_shape,
    text_width,
)
from burnish.data.tasks.click_target import ICONS, button_box
from burnish.data.tasks.read_chart import draw_chart
from burnish.data.tasks.registry import make_demonstrations, make_task, score_answer
from burnish.data.tasks.task import Dice

TASKS = ("count_shapes", "read_chart", "click_target")


def pixels(row: Any) -> np.ndarray:
    prompt = row["prompt"] if isinstance(row, dict) else row.prompt
    return prompt[0]["content"][0]["image"].load()


def question(row: Any) -> str:
    prompt = row["prompt"] if isinstance(row, dict) else row.prompt
    return prompt[0]["content"][1]["text"]


def test_shapes_have_the_areas_of_their_geometry() -> None:
    areas = {
        "circle": np.pi,
        "square": 4 * 0.85**2,
        "triangle": 1.8 * 1.8 / 2,
        "diamond": 2 * 1.1**2,
        "cross": 4 * 0.7 - 0.7**2,
    }
    for shape in SHAPES:
        image = canvas(200, 200)
        fill_shape(image, shape, 100, 100, 80, BLACK)
        assert (image == 0).all(axis=2).sum() / 80**2 == pytest.approx(areas[shape], rel=0.02), shape


def test_what_lies_outside_is_cut_off() -> None:
    image = canvas(10, 10)
    fill_rectangle(image, -5, 8, 4, 20, BLACK)
    assert (image == 0).all(axis=2).sum() == 4 * 2
    draw_text(image, 8, -2, "HH", BLACK)
    draw_frame(image, 0, 0, 10, 10, BLACK)
    assert (image[0] == 0).all()


def test_every_character_has_a_glyph_of_its_own() -> None:
    assert len(set(GLYPHS.values())) == len(GLYPHS)
    image = canvas(5, text_width("I1"))
    draw_text(image, 0, 0, "i1", BLACK)
    written = ["".join("#" if pixel.sum() == 0 else "." for pixel in row) for row in image]
    assert written == ["###..#.", ".#..##.", ".#...#.", ".#...#.", "###.###"]


@pytest.mark.parametrize("name", TASKS)
def test_rows_with_pictures_depend_on_the_index_alone_and_splits_never_overlap(name: str) -> None:
    task, again = make_task(name, {}, 3), make_task(name, {}, 3)
    for index in (5, 0, 2):
        first, second = task.row("train", index), again.row("train", index)
        assert (first.id, first.answer, question(first)) == (second.id, second.answer, question(second))
        assert np.array_equal(pixels(first), pixels(second))
        assert (
            pixels(first).shape
            == {"count_shapes": (32, 32, 3), "read_chart": (64, 64, 3), "click_target": (64, 48, 3)}[name]
        )
    seen = {
        split: {(pixels(row).tobytes(), question(row)) for row in (task.row(split, i) for i in range(100))}
        for split in ("train", "test")
    }
    assert len(seen["train"]) == 100
    assert not seen["train"] & seen["test"]
    with pytest.raises(UserError, match="side should be a whole number of pixels"):
        make_task(name, {"side": 8}, 0)


@pytest.mark.parametrize("name", TASKS)
def test_the_alphabet_writes_all_prompts_and_demonstrations(name: str) -> None:
    for options in ({}, {"words": True}):
        task = make_task(name, options, 0)
        rows = make_demonstrations(name, {"num": 30, **options}, 0)
        used = set("".join(question(row) + row["completion"] for row in rows))
        assert used <= set(task.alphabet or "")


def test_as_many_shapes_are_drawn_as_the_answer_says() -> None:
    task = make_task("count_shapes", {"asked": ["colour"], "min_shapes": 1}, 0)
    for index in range(60):
        row = task.row("train", index)
        colour = COLOURS[question(row)[:-1]]
        assert num_regions((pixels(row) == colour).all(axis=2)) == int(row.answer)


def num_regions(mask: np.ndarray) -> int:
    """Connected regions of a mask, by flood fill."""
    left, count = {(int(y), int(x)) for y, x in zip(*mask.nonzero(), strict=True)}, 0
    while left:
        count, edge = count + 1, [left.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
    return count


def test_all_counts_are_about_as_frequent_as_the_scene_allows() -> None:
    task = make_task("count_shapes", {"min_shapes": 6, "max_shapes": 6}, 0)
    answers = [int(task.row("train", i).answer) for i in range(350)]
    assert set(answers) == set(range(7))
    assert max(answers.count(n) for n in range(7)) < 80  # 50 of each on average


def test_a_careless_counter_sees_all_shapes_and_overlooks_some_that_count() -> None:
    careful, careless = (make_demonstrations("count_shapes", {"num": 200, "overlooked": o}, 0) for o in (0.0, 0.55))
    right = []
    for clean, said in zip(careful, careless, strict=True):
        counted = [row["completion"].rpartition("=")[2] for row in (clean, said)]
        assert int(counted[1]) <= int(counted[0])
        seen = [re.sub(r"\d", "", row["completion"]) for row in (clean, said)]
        assert seen[0] == seen[1]
        assert re.fullmatch(r"A(..)B(..)C(..)D(..)=", seen[0])
        right.append(counted[0] == counted[1])
    assert 0.2 < sum(right) / 200 < 0.6
    task = make_task("count_shapes", {}, 0)
    assert (
        task.score("rc1...=3", "3", {})
        == task.score("<answer>3</answer>", "3", {})
        == task.score(" 3\n", "3", {})
        == 1.0
    )
    assert task.score("3 or 4", "3", {}) == 0.0
    with pytest.raises(UserError, match="overlooked should be a share"):
        make_demonstrations("count_shapes", {"overlooked": 1.0}, 0)


def test_bars_are_as_high_as_their_numbers() -> None:
    image = draw_chart((9, 0, 4), 128, Dice("colours"))
    columns = [(image[:-8, x] != image[0, x]).any(axis=1).sum() for x in range(14, 128)]
    assert len(set(columns)) > 2
    heights = [max(columns[place * 38 + 10 : place * 38 + 28]) for place in range(3)]
    assert heights[0] > 2 * heights[2] > 2 * heights[1]


def test_a_click_inside_the_box_is_right_and_its_form_is_rewarded() -> None:
    task = make_task("click_target", {}, 0)
    row = task.row("train", 0)
    left, top, right, bottom = row.answer["gt_bbox"]
    x, y = (left + right) // 2, (top + bottom) // 2
    assert score_answer("click_target", f"{x},{y}", row.answer, row.extra) == 1.0
    assert score_answer("click_target", f"{left},{bottom}", row.answer, row.extra) == 1.0
    assert score_answer("click_target", f"{right + 1},{y}", row.answer, row.extra) == pytest.approx(0.2)
    assert score_answer("click_target", "somewhere", row.answer, row.extra) == 0.0
    colour = COLOURS[question(row).split()[0]]
    assert tuple(pixels(row)[y, x]) == colour


def test_notes_before_a_point_are_not_scored() -> None:
    row = make_task("click_target", {}, 0).row("train", 0)
    left, top = row.answer["gt_bbox"][:2]
    inside = f"{left + 2},{top + 2}"
    assert score_answer("click_target", f"A..Brc={inside}", row.answer, row.extra) == 1.0
    assert score_answer("click_target", f"{inside}=", row.answer, row.extra) == 0.0
    assert score_answer("click_target", f"A..Brc{inside}", row.answer, row.extra) == 0.0


def test_a_hasty_user_sees_all_buttons_and_clicks_on_the_asked_one_or_the_first() -> None:
    tints, letters = {"red": "r", "green": "g", "blue": "b", "yellow": "y"}, ICONS
    hits = {"asked": 0, "first": 0}
    for row in make_demonstrations("click_target", {"num": 200, "right": 0.4}, 0):
        notes, _, point = row["completion"].partition("=")
        seen = re.findall(r"([A-I])(..)", notes[:-1])
        assert [name for name, _ in seen] == list("ABCDEFGHI")
        cells = [cell for cell, (_, what) in enumerate(seen) if what != ".."]
        assert len(cells) == 4
        image = pixels(row)
        for cell in cells:
            left, top, right, bottom = button_box(cell, 3, 48)
            middle = tuple(image[(top + bottom) // 2, (left + right) // 2])
            assert {letter: COLOURS[tint] for tint, letter in tints.items()}[seen[cell][1][0]] == middle
        x, y = map(int, point.split(","))
        boxes = [button_box(cell, 3, 48) for cell in cells]
        hit = next(
            cell for cell, box in zip(cells, boxes, strict=True) if box[0] <= x <= box[2] and box[1] <= y <= box[3]
        )
        assert notes[-1] == "ABCDEFGHI"[hit]
        tint, icon = question(row).split()
        is_asked = seen[hit][1] == tints[tint] + letters[icon]
        assert is_asked or hit == cells[0]
        hits["asked" if is_asked else "first"] += 1
    assert 85 < hits["asked"] < 140  # 40% attentive clicks, and a quarter of the hasty ones: 110 on average
    said = make_demonstrations("click_target", {"num": 1, "words": True}, 0)[0]["completion"]
    assert re.fullmatch(r"<think>(?:[A-I]..){9}[A-I]</think><answer>\[.*'click'.*\]</answer>", said)


def test_buttons_do_not_overlap() -> None:
    boxes = [button_box(cell, 3, 48) for cell in range(9)]
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            assert a[2] < b[0] or b[2] < a[0] or a[3] < b[1] or b[3] < a[1]
