"""What a judge said, as a number; nothing is guessed."""

from __future__ import annotations

import pytest

from burnish.rewards.judge.options import check_parser, parse, settle


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('They agree.\n{"correct": true}', 1.0),
        ('{"correct": true}\nNo wait.\n{"correct": false}\n\n', 0.0),
        ('{"correct": true} and that is final', None),
        ('{"correct": "true"}', None),
        ('{"correct": 1}', None),
        ('{"verdict": true}', None),
        ('[{"correct": true}]', None),
        ('so it is {"correct": true}', None),
        ("", None),
        ("[" * 100_000, None),
    ],
)
def test_a_verdict_is_one_line_of_json_at_the_end(text: str, expected: float | None) -> None:
    assert parse(text, "verdict") == expected


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        ("boxed", r"first \boxed{1}, no: \boxed{ 7 }", 0.7),
        ("boxed", r"\boxed{seven}", None),
        ("boxed", "7", None),
        ("score", "Score: 3\nScore: 8", 0.8),
        ("score", "**Score:** 4.5", 0.45),
        ("score", "score = **4.5**", 0.45),
        ("score", "Score: 11", None),
        ("score", "Score: -1", None),
        (r"rating (?P<score>\d+)/10", "rating 2/10, rating 9/10", 0.9),
        (r"rating (?P<score>\w+)", "rating high", None),
    ],
)
def test_a_score_is_the_last_one_and_within_its_scale(parser: str, text: str, expected: float | None) -> None:
    assert parse(text, parser, 0, 10) == expected


def test_the_scale_goes_from_low_to_high() -> None:
    assert [parse(f"Score: {k}", "score", 1, 5) for k in (1, 3, 5)] == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("parser", ["(", r"(\d+)", "verdicts"])
def test_a_parser_that_is_none_is_refused(parser: str) -> None:
    with pytest.raises(ValueError, match="verdict, boxed, score, or a regular expression"):
        check_parser(parser)


def test_votes_settle_on_their_median_and_tell_how_many_disagree() -> None:
    assert settle([1.0, 0.0, 1.0]) == (1.0, pytest.approx(1 / 3))
    assert settle([0.0]) == (0.0, 0.0)
    assert settle([0.2, 0.9, 0.4]) == (0.4, pytest.approx(2 / 3))
    assert settle([1.0, 0.0]) == (0.5, 0.5)
