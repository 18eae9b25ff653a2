"""worst_tokens.jsonl: what is appended is what is read, a run that goes on cuts what came after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.run.samples import WORST_TOKEN_COLUMNS, WorstTokens, read


def row(**changes: Any) -> dict[str, Any]:
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
def tokens(tmp_path: Path) -> WorstTokens:
    return WorstTokens(tmp_path / "worst_tokens.jsonl")


def test_rows_read_back_with_their_step_in_the_order_of_the_columns(tokens: WorstTokens) -> None:
    tokens.append(2, [row(), row(weight=0.0, text='a\n\r\u2028"b\ud800')])
    tokens.append(3, [row()])
    first, second, third = read(tokens.path)
    assert list(first) == list(WORST_TOKEN_COLUMNS)
    assert first == {"step": 2, **row()}
    assert (second["weight"], second["text"]) == (0.0, 'a\n\r\u2028"b?')
    assert third["step"] == 3


def test_a_step_without_rows_leaves_nothing(tokens: WorstTokens) -> None:
    tokens.append(1, [])
    tokens.sync()
    tokens.truncate_after(0)
    assert read(tokens.path) == []
    assert not tokens.path.exists()


def test_a_run_that_goes_on_drops_later_steps_and_a_torn_line_and_ends_with_the_same_bytes(tokens: WorstTokens) -> None:
    for step in (1, 2, 3):
        tokens.append(step, [row(sample=step), row()])
    whole = tokens.path.read_bytes()
    tokens.path.write_bytes(whole + b'{"step": 4, "gro')
    assert len(read(tokens.path)) == 6, "the last line is still being written"
    tokens.truncate_after(1)
    assert [r["step"] for r in read(tokens.path)] == [1, 1]
    for step in (2, 3):
        tokens.append(step, [row(sample=step), row()])
    assert tokens.path.read_bytes() == whole


def test_a_number_that_json_does_not_have_is_a_mistake_here(tokens: WorstTokens) -> None:
    with pytest.raises(ValueError, match="JSON"):
        tokens.append(1, [row(gap=float("nan"))])
    assert not tokens.path.exists()


@pytest.mark.parametrize(
    ("line", "said"), [("nonsense", "Expecting value"), ("[1]", "not an object"), ("{}", "no 'step'")]
)
def test_a_damaged_line_is_named(tokens: WorstTokens, line: str, said: str) -> None:
    tokens.append(1, [row()])
    tokens.path.write_text(tokens.path.read_text() + line + "\n")
    with pytest.raises(UserError, match=rf"worst_tokens\.jsonl, line 2: not a row of worst tokens \({said}"):
        read(tokens.path)
