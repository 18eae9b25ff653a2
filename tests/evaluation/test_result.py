"""The numbers of known completions, worked by hand."""

import math

import pytest

from burnish.evaluation.result import Lengths, TableEntry, result_json, result_text, summarise, summary_table
from burnish.evaluation.statistics import wilson_interval
from tests.evaluation.completion_rows import row

SAMPLED = [
    row("a", 0, 1.0, answered="7", formatted=True, length=2),
    row("a", 1, 0.0, answered="8", formatted=True, length=4, truncated=True, finish="length"),
    row("a", 2, 1.0, answered="7.0", formatted=True, length=6),
    row("b", 0, 0.0, answered=None, formatted=False, length=8),
    row("b", 1, 0.0, answered="9", formatted=True, length=10),
    row("b", 2, 0.0, answered="9", formatted=True, length=30, timed_out=True),
]


def test_the_numbers_of_known_completions() -> None:
    result = summarise(SAMPLED)
    assert (result.num_prompts, result.num_samples, result.n) == (2, 6, 3)
    assert (result.num_failed, result.num_timed_out) == (0, 1)
    assert result.accuracy is not None
    assert result.accuracy.mean == pytest.approx(1 / 3)  # (2/3 + 0) / 2
    assert {k: e.mean for k, e in result.pass_at.items()} == pytest.approx({1: 1 / 3, 2: 0.5, 3: 0.5})
    # Two of a: right twice in one pair of three (1), once in two (a tie, 1/2 each); both spellings of 7 are one vote.
    assert {k: e.mean for k, e in result.maj_at.items()} == pytest.approx({2: (1 + 0.5 + 0.5) / 3 / 2, 3: 0.5})
    assert result.best_at == {}  # rewards of 0 and 1: that is pass@k
    assert result.lengths == Lengths(mean=10.0, median=7.0, p95=30.0, longest=30, right=4.0, wrong=13.0)
    assert result.truncated.mean == pytest.approx(1 / 6)
    assert result.formatted is not None
    assert result.formatted.mean == pytest.approx(5 / 6)
    assert (result.tables, result.parts) == ({}, {})


def test_every_number_is_in_the_table_and_in_the_json() -> None:
    result = summarise(SAMPLED)
    text = result_text(result)
    for line in ("prompts      2 x 3 samples", "mean@3       0.333", "pass@2       0.500", "maj@3        0.500"):
        assert line in text
    assert (
        "truncated    16.7%\nin format    83.3%\nmean length  10.0 tokens (median 7, 95% up to 30, longest 30; right 4, wrong 13)"
        in text
    )
    found = result_json(result)
    assert list(found["metrics"]) == ["mean@3", "pass@1", "pass@2", "pass@3", "maj@2", "maj@3"]
    assert found["ci"] == [found["metrics"]["mean@3"]["low"], found["metrics"]["mean@3"]["high"]]
    assert found["length"]["p95"] == 30.0
    expected = "x        2        3  0.333   0.045 to 0.841  0.500   0.500  16.7%      83.3%      10"
    assert summary_table({"x": result}).splitlines()[1].split() == expected.split()


def test_greedy_samples_have_wilsons_interval_and_nothing_to_choose_from() -> None:
    result = summarise([row("a", 0, 1.0, answered="7"), row("b", 0, 0.0), row("c", 0, 1.0, answered="7")])
    assert result.accuracy == pytest.approx(wilson_interval(2 / 3, 3))
    assert (result.maj_at, result.best_at, result.formatted) == ({}, {}, None)
    assert "accuracy     0.667" in result_text(result)
    assert "pass@1" not in result_text(result)


def test_a_failed_scorer_is_counted_and_never_a_zero() -> None:
    result = summarise([row("a", 0, 1.0), row("b", 0, None)])
    assert result.accuracy == wilson_interval(1.0, 1)
    assert (result.num_failed, result.first_error) == (1, "boom")


def test_nothing_scored_is_no_accuracy() -> None:
    result = summarise([row("a", 0, None), row("a", 1, None)])
    assert (result.accuracy, result.reward, result.pass_at, result.maj_at) == (None, None, {}, {})
    assert result_json(result)["accuracy"] is None
    with pytest.raises(ValueError, match="no completions"):
        summarise([])


def test_several_sources_subjects_and_levels_are_told_apart() -> None:
    rows = [
        row("a", 0, 1.0, data_source="x", tags={"level": 10, "subject": "Algebra"}),
        row("b", 0, 0.0, data_source="y", tags={"level": 2.0, "subject": "Algebra"}),
        row("c", 0, 0.0, data_source="y", tags={"level": 2, "subject": "Algebra"}),
    ]
    result = summarise(rows)
    assert result.tables == {
        "data_source": {"x": TableEntry(1, wilson_interval(1.0, 1)), "y": TableEntry(2, wilson_interval(0.0, 2))},
        "level": {"2": TableEntry(2, wilson_interval(0.0, 2)), "10": TableEntry(1, wilson_interval(1.0, 1))},
    }
    assert list(result.tables["level"]) == ["2", "10"]  # as numbers
    assert "by level\n  2          0.000  (95% interval 0.000 to 0.658)  2 questions" in result_text(result)
    assert result_json(result)["by"]["data_source"]["y"]["num_questions"] == 2


def test_questions_without_a_subject_are_a_kind_of_their_own() -> None:
    rows = [row("a", 0, 1.0, tags={"subject": "x"}), row("b", 0, 0.0), row("c", 0, 0.0, tags={"subject": 3})]
    assert list(summarise(rows).tables["subject"]) == ["3", "None", "x"]


def test_graded_rewards_have_their_best_of_k() -> None:
    rows = [row("a", i, 0.0, reward=value, parts={"judge": value}) for i, value in enumerate((0.1, 0.5, 0.9))]
    result = summarise(rows)
    assert {k: e.mean for k, e in result.best_at.items()} == pytest.approx({2: 6.1 / 9, 3: 20.7 / 27})
    assert result.reward is not None
    assert result.reward.mean == pytest.approx(0.5)
    assert "best@3       0.767" in result_text(result)
    assert "mean reward  0.500" in result_text(result)


def test_a_part_may_choose_and_the_accuracy_judges_its_choice() -> None:
    scores = ((0.9, 0.0), (0.4, 1.0), (0.1, 1.0))
    rows = [
        row("a", i, right, reward=right + s, parts={"number": right, "style": s}) for i, (s, right) in enumerate(scores)
    ]
    result = summarise(rows, best_by="style")
    assert {k: e.mean for k, e in result.best_at.items()} == pytest.approx({2: 4 / 9, 3: 8 / 27})
    assert result.best_by == "style"
    assert result.parts == pytest.approx({"number": 2 / 3, "style": 1.4 / 3})
    assert result_json(result)["best_by"] == "style"
    assert summarise(rows, best_by="other").best_at == {}


def test_intervals_are_over_questions() -> None:
    few, many = ([row(f"q{q}", i, float(q % 2)) for q in range(20) for i in range(k)] for k in (1, 8))
    assert summarise(many).accuracy == pytest.approx(summarise(few).accuracy)
    spread = summarise([row(f"q{q}", i, float((q + i) % 2)) for q in range(20) for i in range(8)]).accuracy
    assert spread == wilson_interval(0.5, 160)
    assert math.isclose(spread.mean, 0.5)
