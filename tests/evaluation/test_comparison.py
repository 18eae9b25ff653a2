"""Comparisons of known completions, and what cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.evaluation.comparison import Pair, compare, comparison_table, find_pairs
from burnish.evaluation.completions import write_completions
from tests.evaluation.made import row


def greedy(*accuracies: float | None) -> list[dict[str, Any]]:
    return [row(f"q{i}", 0, accuracy, completion=f"c{i}") for i, accuracy in enumerate(accuracies)]


def test_one_sample_each_worked_by_hand() -> None:
    a, b = greedy(1, 1, 0, 0, 0, 0), greedy(1, 0, 1, 1, 1, 0)
    found = compare(a, b)
    assert (found.both, found.only_a, found.only_b, found.neither) == (1, 1, 3, 1)
    assert (found.a.mean, found.b.mean) == pytest.approx((2 / 6, 4 / 6))
    assert found.difference.mean == pytest.approx(2 / 6)
    assert found.p_value == pytest.approx(2 * (4 + 1) / 16)  # three or four of four heads, or tails
    assert [(r["id"], r["difference"]) for r in found.changed] == [("q1", -1), ("q2", 1), ("q3", 1), ("q4", 1)]
    assert not found.is_sampled
    mirrored = compare(b, a)
    assert mirrored.difference == pytest.approx([-found.difference.mean, -found.difference.high, -found.difference.low])
    assert mirrored.p_value == found.p_value


def test_samples_are_averaged_and_an_example_of_each_side_is_kept() -> None:
    a = [row("q", i, float(i == 0), completion=f"a{i}") for i in range(4)]
    b = [row("q", i, float(i != 0), completion=f"b{i}") for i in range(4)]
    same = [row("p", i, 1.0) for i in range(4)]
    found = compare([*a, *same], [*b, *same])
    assert (found.both, found.only_a, found.only_b, found.neither) == (1, 0, 1, 0)
    assert found.difference.mean == 0.25
    assert found.p_value == 1.0  # one question that changed can change either way
    (change,) = found.changed
    assert (change["a"], change["b"], change["a_completion"], change["b_completion"]) == (0.25, 0.75, "a1", "b1")
    assert found.is_sampled


def test_questions_of_one_side_and_failed_ones_are_left_out_and_counted() -> None:
    found = compare(greedy(1, 0, None), greedy(1, 1, 1, 1))
    assert (found.num_questions, found.num_left_out) == (2, 2)
    text = comparison_table(found, Pair("d", Path("a"), Path("b")))
    assert "d            2 questions (2 are only in one, or not scored)" in text


def test_other_questions_are_refused() -> None:
    with pytest.raises(UserError, match="question q0 has the answer '7' in A and '8' in B"):
        compare(greedy(1), [row("q0", 0, 1.0, answer="8")])
    with pytest.raises(UserError, match="no question in common"):
        compare(greedy(1), [row("other", 0, 1.0)])


def test_results_are_found_in_folders_and_files(tmp_path: Path) -> None:
    for folder, names in (("a", ("x", "y")), ("b", ("y", "z"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "results.json").write_text("{}")
        for name in names:
            write_completions(tmp_path / folder / f"{name}.jsonl", greedy(1))
            result = {"settings": {}, "completions": f"{name}.jsonl"}
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(result))
    a, b = tmp_path / "a", tmp_path / "b"
    assert find_pairs(a, b) == [("y", a / "y.jsonl", b / "y.jsonl")]
    assert find_pairs(a / "x.jsonl", b / "z.json") == [("z", a / "x.jsonl", b / "z.jsonl")]
    assert find_pairs(a / "y.jsonl", b) == [("y", a / "y.jsonl", b / "y.jsonl")]
    with pytest.raises(UserError, match="no data set in common"):
        find_pairs(a / "x.jsonl", b)
    with pytest.raises(UserError, match="holds no finished evaluation"):
        find_pairs(a, tmp_path)
    with pytest.raises(UserError, match="neither a folder"):
        find_pairs(a, tmp_path / "missing.jsonl")
