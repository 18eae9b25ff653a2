"""Sample tables: what is written is what is read, null stays null."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from burnish.config.errors import UserError
from burnish.core.pictures import Picture
from burnish.run.picture_files import picture_file, picture_name
from burnish.run.samples import (
    SAMPLE_COLUMNS,
    WORST_TOKEN_COLUMNS,
    WorstTokensFile,
    read_samples,
    read_table,
    read_worst_tokens,
    sample_files,
    write_samples,
)


def row(**changes: object) -> dict[str, object]:
    return {
        "group": "p7",
        "sample": 0,
        "data_source": "sort_digits",
        "prompt": "21>",
        "completion": "12",
        "answer": "12",
        "reward": 1.0,
        "accuracy": 1.0,
        "parts": {"task": 1.0},
        "advantage": 0.5,
        "truncated": False,
        "length": 2,
        "pieces": ["1", "2"],
        "logp": [-0.5, -0.25],
        "finish": None,
        "advantages": None,
        "gap": None,
        "entropy": None,
        "mask": None,
        "turns": None,
        "pictures": None,
        "role": None,
        "opponent": None,
        "last_words": None,
        "events": None,
        "details": None,
        "extra": {"mine/expected": "7"},
        "error": None,
    } | changes


def test_rows_read_back_with_step_and_kind(tmp_path: Path) -> None:
    path = write_samples(tmp_path, 10, "train", [row(), row(sample=1, reward=None, error="Traceback")])
    assert path.name == "train-000010.parquet"
    first, second = read_samples(tmp_path)
    assert list(first) == list(SAMPLE_COLUMNS)
    assert first == row() | {"step": 10, "kind": "train", "parts": '{"task": 1.0}', "extra": '{"mine/expected": "7"}'}
    assert second["reward"] is None
    assert second["error"] == "Traceback"


def test_tables_come_in_order_of_steps_and_any_kind_is_a_file_name(tmp_path: Path) -> None:
    write_samples(tmp_path, 20, "train", [row()])
    write_samples(tmp_path, 3, "validation-a/b", [row(advantage=None)])
    assert [r["kind"] for r in read_samples(tmp_path)] == ["validation-a/b", "train"]
    assert [step for step, _, _ in sample_files(tmp_path)] == [3, 20]


def test_an_empty_table_and_all_null_columns_are_fine(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "train", [])
    write_samples(tmp_path, 2, "train", [{"group": "g", "prompt": "p"}])
    (only,) = read_samples(tmp_path)
    assert only["pieces"] is None
    assert only["step"] == 2


def test_text_that_utf8_cannot_hold_does_not_stop_the_run(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "train", [row(prompt="a\ud800b", pieces=["\udfff", "x"])])
    (only,) = read_samples(tmp_path)
    assert (only["prompt"], only["pieces"]) == ("a?b", ["?", "x"])


def test_an_unknown_column_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'rewrad'; did you mean 'reward'"):
        write_samples(tmp_path, 1, "train", [row(rewrad=1)])
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_table_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "train-000001.parquet").write_text("nonsense")
    with pytest.raises(UserError, match=r"train-000001\.parquet"):
        read_samples(tmp_path)


def test_values_of_tokens_read_back_with_their_gaps(tmp_path: Path) -> None:
    write_samples(tmp_path, 1, "train", [row(advantages=[0.5, None], gap=[-0.25, 0.125], finish="length"), row()])
    first, second = read_samples(tmp_path)
    assert (first["advantages"], first["gap"], first["finish"]) == ([0.5, None], [-0.25, 0.125], "length")
    assert (second["advantages"], second["gap"], second["finish"]) == (None, None, None)


# worst_tokens.jsonl: rows read back as written, and a resumed run drops later steps.


def token_row(**changes: Any) -> dict[str, Any]:
    return {
        "group": "p7#0",
        "sample": 3,
        "position": 12,
        "token": 5,
        "before": "2",
        "text": "1",
        "after": ">",
        "behaviour_logp": -0.1,
        "trainer_logp": -1.5,
        "gap": -1.4,
        "weight": None,
    } | changes


@pytest.fixture
def tokens(tmp_path: Path) -> WorstTokensFile:
    return WorstTokensFile(tmp_path / "worst_tokens.jsonl")


def test_rows_read_back_with_their_step_in_the_order_of_the_columns(tokens: WorstTokensFile) -> None:
    tokens.append(2, [token_row(), token_row(weight=0.0, text='a\n\r\u2028"b\ud800')])
    tokens.append(3, [token_row()])
    first, second, third = read_worst_tokens(tokens.path)
    assert list(first) == list(WORST_TOKEN_COLUMNS)
    assert first == {"step": 2, **token_row()}
    assert (second["weight"], second["text"]) == (0.0, 'a\n\r\u2028"b?')
    assert third["step"] == 3


def test_a_step_without_rows_leaves_nothing(tokens: WorstTokensFile) -> None:
    tokens.append(1, [])
    tokens.sync()
    tokens.truncate_after(0)
    assert read_worst_tokens(tokens.path) == []
    assert not tokens.path.exists()


def test_a_run_that_goes_on_drops_later_steps_and_a_torn_line_and_ends_with_the_same_bytes(
    tokens: WorstTokensFile,
) -> None:
    for step in (1, 2, 3):
        tokens.append(step, [token_row(sample=step), token_row()])
    whole = tokens.path.read_bytes()
    tokens.path.write_bytes(whole + b'{"step": 4, "gro')
    assert len(read_worst_tokens(tokens.path)) == 6, "the last line is still being written"
    tokens.truncate_after(1)
    assert [r["step"] for r in read_worst_tokens(tokens.path)] == [1, 1]
    for step in (2, 3):
        tokens.append(step, [token_row(sample=step), token_row()])
    assert tokens.path.read_bytes() == whole


def test_a_number_that_json_does_not_have_is_a_mistake_here(tokens: WorstTokensFile) -> None:
    with pytest.raises(ValueError, match="JSON"):
        tokens.append(1, [token_row(gap=float("nan"))])
    assert not tokens.path.exists()


@pytest.mark.parametrize(
    ("line", "said"), [("nonsense", "Expecting value"), ("[1]", "not an object"), ("{}", "no 'step'")]
)
def test_a_damaged_line_is_named(tokens: WorstTokensFile, line: str, said: str) -> None:
    tokens.append(1, [token_row()])
    tokens.path.write_text(tokens.path.read_text() + line + "\n")
    with pytest.raises(UserError, match=rf"worst_tokens\.jsonl, line 2: not a row of worst tokens \({said}"):
        read_worst_tokens(tokens.path)


def test_images_of_samples_are_png_files_written_once_and_named_in_the_table(tmp_path: Path) -> None:
    from matplotlib.image import imread

    noise = np.random.default_rng(0).integers(0, 256, (2, 5, 7, 3), dtype=np.uint8)
    picture = Picture(noise, (2, 1, 1), 0.5)
    path = write_samples(tmp_path, 1, "train", [{"prompt": "a", "pictures": [picture]}, {"prompt": "b"}])
    assert [row["pictures"] for row in read_table(path)] == [[picture_name(picture.key)], None]
    file = picture_file(tmp_path, picture_name(picture.key))
    pixels = np.rint(imread(file) * 255).astype(np.uint8)
    np.testing.assert_array_equal(pixels, np.concatenate([noise[0], noise[1]], axis=1))
    before = file.stat()
    write_samples(tmp_path, 2, "train", [{"prompt": "a", "pictures": [picture]}])
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
