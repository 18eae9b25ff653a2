"""Answers with values of their steps: four forms of rows, their errors, and the tokens at which steps are scored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config.data import Source, Template
from burnish.config.errors import UserError
from burnish.config.schema import StepValues
from burnish.data.preference_pairs import EncodingOptions
from burnish.data.step_values import AnswerSteps, load_stepped_answers, parse_steps
from burnish.data.tasks.registry import make_step_values
from burnish.models.answer_steps import scored_positions
from burnish.models.tokenizer import Tokenizer

SEMICOLON = StepValues(delimiter=";")
STEP_MARK = "<step>"
CHAT = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
LETTERS = "abcdefghijklmnopqrstuvwxyz>;<[]\n"


def parse(record: dict[str, Any], steps: StepValues = SEMICOLON) -> list[AnswerSteps]:
    return parse_steps(record, "rows.jsonl:7", steps)


def load(folder: Path, tokenizer: Tokenizer, steps: StepValues, *rows: dict[str, Any], max_tokens: int = 64) -> Any:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = EncodingOptions(tokenizer, Template(), max_tokens, base=folder)
    return load_stepped_answers([Source(path="rows.jsonl")], options, steps)


# --- forms -------------------------------------------------------------------------------------------------------------


def test_steps_and_values_with_other_columns_beside_them() -> None:
    row = {"prompt": "p", "steps": ["a", "b", "c"], "values": [1, 0.25, None], "counts": [8, 8, 0], "id": 3}
    assert parse(row) == [AnswerSteps("p", ["a", "b", "c"], [1.0, 0.25, None])]


@pytest.mark.parametrize(("neutral", "value"), [(1.0, 1.0), (0.5, 0.5), (None, None)])
def test_ratings_are_values_and_neutral_is_an_option(neutral: float | None, value: float | None) -> None:
    steps = StepValues(delimiter=";", neutral=neutral)
    expected = [AnswerSteps("p", ["a", "b", "c", "d"], [1.0, value, 0.0, None])]
    ratings = [1, 0, -1, None]
    assert parse({"prompt": "p", "steps": ["a", "b", "c", "d"], "ratings": ratings}, steps) == expected
    rated = [{"text": text, "rating": rating} for text, rating in zip("abcd", ratings, strict=True)]
    assert parse({"prompt": "p", "steps": rated}, steps) == expected


def test_trl_s_completions_and_labels() -> None:
    found = parse({"prompt": "p", "completions": ["a", "b"], "labels": [True, False]})
    assert found == [AnswerSteps("p", ["a", "b"], [1.0, 0.0])]


def test_math_shepherd_s_texts() -> None:
    """The question itself may mention a first step; the answer begins with the last one before the first tag."""
    text = "Step 1: of what? Step 1: 1 + 1 = 2. {}\nStep 2: 2 + 1 = 4. {}\nStep 3: The answer is: 4 {}"
    row = {"input": text.format("ки", "ки", "ки"), "label": text.format("+", "-", "-"), "task": "GSM8K"}
    steps = ["Step 1: 1 + 1 = 2.", "Step 2: 2 + 1 = 4.", "Step 3: The answer is: 4"]
    assert parse(row) == [AnswerSteps("Step 1: of what?", steps, [1.0, 0.0, 0.0])]
    other = {"input": text.format("#", "#", "#"), "label": text.format("+", "-", "-")}
    assert parse(other, StepValues(delimiter=";", tag="#")) == parse(row)
    cut = {key: value[: value.index("Step 3")] + "Step 3: and so" for key, value in row.items() if key != "task"}
    assert parse(cut) == [AnswerSteps("Step 1: of what?", [*steps[:2], "Step 3: and so"], [1.0, 0.0, None])]


def test_prm800k_s_tree_gives_the_chosen_path_and_every_other_completion_once() -> None:
    def rated(**ratings: int | None) -> list[dict[str, Any]]:
        return [{"text": text, "rating": rating, "flagged": None} for text, rating in ratings.items()]

    tree = [
        {"completions": rated(a=-1, b=1), "human_completion": None, "chosen_completion": 1},
        {"completions": rated(c=-1), "human_completion": {"text": "d", "rating": None}, "chosen_completion": None},
        {"completions": rated(e=0, f=None), "human_completion": None, "chosen_completion": None},
    ]
    row = {"question": {"problem": "p"}, "label": {"steps": tree, "finish_reason": "found_error"}, "labeler": "x"}
    assert parse(row) == [
        AnswerSteps("p", ["b", "d", "e"], [1.0, None, 1.0]),
        AnswerSteps("p", ["a"], [0.0], "/1.1"),
        AnswerSteps("p", ["b", "c"], [None, 0.0], "/2.1"),
    ]


GOOD = {"prompt": "p", "steps": ["a", "b"], "values": [1, 0]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({**GOOD, "values": [1]}, "2 steps and 1 values"),
        ({**GOOD, "steps": ["a", "b;c"]}, "step 2 contains the delimiter ';'"),
        ({**GOOD, "steps": ["a", " "]}, "step 2 should be a text that is not blank"),
        ({**GOOD, "values": [1, 1.5]}, r"values\[1\] should be a number from 0 to 1"),
        ({**GOOD, "values": [1, float("nan")]}, r"values\[1\] should be a number from 0 to 1"),
        ({**GOOD, "values": None}, "the steps have no values"),
        ({**GOOD, "ratings": [1, 1]}, "values in several places"),
        ({**GOOD, "finished": "no"}, "finished should be true, false or null"),
        ({"prompt": "p", "steps": ["a"], "ratings": [2]}, r"ratings\[0\] should be -1"),
        ({"steps": ["a"], "values": [1]}, "no column 'prompt'"),
        ({"prompt": "p", "answer": "a"}, "no steps; a row has prompt, steps and values"),
        ({"prompt": "p", "completions": ["a"]}, "no column 'labels'"),
        ({"input": "q Step 1: a", "label": "q Step 1: a"}, "no step tag 'ки'"),
        ({"input": "q Step 1: a ки", "label": "q Step 1: a ?"}, r"\+ or - in place of every 'ки', and step 1 is not"),
        ({"input": "a ки", "label": "a +"}, "a question followed by 'Step 1:'"),
    ],
)
def test_a_row_that_cannot_be_used_names_file_and_line(row: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"rows.jsonl:7: .*{words}"):
        parse(row)


def test_the_task_s_values_fall_at_the_first_wrong_digit() -> None:
    rows = make_step_values("sort_digits", {"num": 60}, 0, "test")
    wrong = 0
    for row in rows:
        right = sorted(row["prompt"][:-1])
        assert sorted(row["steps"]) == right
        assert row["values"] == [float(row["steps"][: i + 1] == right[: i + 1]) for i in range(len(right))]
        wrong += 0.0 in row["values"]
    assert 15 < wrong < 45


# --- tokens ------------------------------------------------------------------------------------------------------------


def test_a_step_is_scored_at_its_delimiter_and_the_last_at_the_end_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_characters(LETTERS)
    rows, left_out = load(tmp_path, tokenizer, SEMICOLON, {"prompt": "p>", "steps": ["ab", "c"], "values": [None, 0.5]})
    (row,) = rows
    assert tokenizer.decode(row.tokens, skip_special=False) == "p>ab;c<eos>"
    assert (row.positions, row.values, row.labelled) == ([4, 6], [None, 0.5], [(6, 0.5)])
    assert left_out.notes == []


def test_an_unfinished_answer_ends_with_its_delimiter_and_has_no_end_token(tmp_path: Path) -> None:
    """Its last step is scored where a search reads a partial answer; the steps before it as in a finished one."""
    row = {"prompt": "p>", "steps": ["ab", "c"], "values": [1, 0.5]}
    for finished, text, positions in (
        (True, "p>ab;c<eos>", [4, 6]),
        (None, "p>ab;c<eos>", [4, 6]),
        (False, "p>ab;c;", [4, 6]),
    ):
        tokenizer = Tokenizer.from_characters(LETTERS)
        ((found,), _) = load(tmp_path, tokenizer, SEMICOLON, {**row, "finished": finished})
        assert tokenizer.decode(found.tokens, skip_special=False) == text
        assert (found.positions, found.values) == (positions, [1.0, 0.5])
    wide = StepValues(delimiter=";;")
    ((found,), _) = load(tmp_path, tokenizer, wide, {**row, "finished": False})
    assert (tokenizer.decode(found.tokens), found.positions) == ("p>ab;;c;;", [5, 8])


@pytest.mark.parametrize(("delimiter", "ends"), [(STEP_MARK, [STEP_MARK, STEP_MARK]), (";", [";", ";"])])
def test_an_unfinished_answer_of_a_chat_ends_inside_the_turn(tmp_path: Path, delimiter: str, ends: list[str]) -> None:
    tokenizer = Tokenizer.from_characters(LETTERS, [STEP_MARK, "<end>"], CHAT)
    row = {"prompt": "p", "steps": ["ab", "c"], "values": [1, 0], "finished": False}
    ((found,), _) = load(tmp_path, tokenizer, StepValues(delimiter=delimiter), row)
    pieces = tokenizer.pieces(found.tokens, skip_special=False)
    assert "".join(pieces) == f"[user]p<end>\n[assistant]ab{delimiter}c{delimiter}"
    assert [pieces[at] for at in found.positions] == ends
    assert found.positions[-1] == len(pieces) - 1


def test_the_name_of_a_special_token_divides_and_a_template_s_last_line_break_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_characters(LETTERS, [STEP_MARK, "<end>"], CHAT)
    monkeypatch.setattr(tokenizer._inner, "get_vocab", lambda: pytest.fail("reads the whole vocabulary for a row"))
    steps = StepValues(delimiter=STEP_MARK)
    ((row,), _) = load(tmp_path, tokenizer, steps, {"prompt": "p", "steps": ["ab", "c", "d"], "values": [1, 1, 0]})
    pieces = tokenizer.pieces(row.tokens, skip_special=False)
    assert "".join(pieces) == "[user]p<end>\n[assistant]ab<step>c<step>d<end>\n"
    assert [pieces[at] for at in row.positions] == [STEP_MARK, STEP_MARK, "<end>"]
    # What a policy writes ends with the end of turn.
    start, end = pieces.index("a", pieces.index("]", 8)), len(pieces) - 1
    written = [at >= start for at in range(end)]
    assert scored_positions(row.tokens[:end], written, tokenizer, STEP_MARK) == row.positions


def test_answers_that_cannot_be_used_are_left_out_and_counted(tmp_path: Path) -> None:
    """Of the delimiter `;;`, a first step `;` is read as a blank one before `;b`."""
    tokenizer = Tokenizer.from_characters(LETTERS)
    rows = [
        {"prompt": "p", "steps": ["a", "b"], "values": [1, 0]},
        {"prompt": "p", "steps": ["a", "b"], "values": [None, None]},
        {"prompt": "p", "steps": ["a" * 30, "b"], "values": [1, 0]},
        {"prompt": "p", "steps": [";", "b"], "values": [1, 0]},
    ]
    found, left_out = load(tmp_path, tokenizer, StepValues(delimiter=";;"), *rows, max_tokens=20)
    assert [row.id for row in found] == ["rows.jsonl/0"]
    assert (left_out.overlong, left_out.unlabelled, left_out.merged) == (1, 1, 1)
    assert len(left_out.notes) == 3
    with pytest.raises(UserError, match=r"no answers left in rows.jsonl: 1 answers have no step with a value"):
        load(tmp_path, tokenizer, SEMICOLON, rows[1])
