"""Points, envelope and bootstrap of a scaling measurement, from plain numbers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from burnish.evaluation.scaling import (
    Scaling,
    ScalingPoint,
    envelope,
    interpolated,
    paired_bootstrap,
    samples_at_equal_tokens,
    scaling_json,
    scaling_of_json,
    scaling_table,
)
from burnish.evaluation.statistics import Estimate
from burnish.report.scaling_page import scaling_chart, scaling_document


def point(strategy: str, budget: int, accuracy: float, tokens: float, **more: object) -> ScalingPoint:
    plain = {
        "strategy": strategy,
        "budget": budget,
        "estimate": "exact",
        "accuracy": Estimate(accuracy, accuracy - 0.1, accuracy + 0.1),
        "tokens": tokens,
        "times_one_answer": tokens / 10,
        "requests": 1.0,
        "verifier_calls": 0.0,
        "verifier_failures": 0,
        "wall_s": None,
        "cache_hit_rate": None,
        "num_questions": 5,
        "num_failed": 0,
        "is_oracle": False,
    }
    return ScalingPoint(**{**plain, **more})  # type: ignore[arg-type]


POINTS = [
    point("majority", 1, 0.3, 10.0),
    point("majority", 4, 0.4, 40.0),
    point("trees", 4, 0.45, 35.0, wall_s=1.5, cache_hit_rate=0.5, verifier_tokens=1234.5, versus_majority=Estimate(0.05, -0.1, 0.2),
          versus_equal_tokens=Estimate(0.07, -0.05, 0.25), equal_samples=3.5),
    point("trees", 8, 0.42, 80.0),
    point("best@oracle", 4, 0.9, 40.0, is_oracle=True),
]  # fmt: skip
SCALING = Scaling("toy", "m", 5, 4, 10.0, POINTS)


def test_the_envelope_has_what_nothing_cheaper_reaches_and_no_oracle() -> None:
    assert [(p.strategy, p.budget) for p in envelope(POINTS)] == [("majority", 1), ("trees", 4)]


def test_the_bootstrap_is_seeded_and_agrees_with_the_normal_interval() -> None:
    generator = np.random.default_rng(0)
    a = {str(i): float(generator.random() < 0.5) for i in range(400)}
    b = {key: float(generator.random() < 0.6) for key in a}
    found, num = paired_bootstrap(a, b, 0, "x", 4)
    changes = np.array([b[key] - a[key] for key in a])
    half = 1.96 * changes.std() / 20
    assert num == 400
    assert found.mean == changes.mean()
    assert (found.low, found.high) == (
        pytest.approx(found.mean - half, abs=0.01),
        pytest.approx(found.mean + half, abs=0.01),
    )
    assert paired_bootstrap(a, b, 0, "x", 4)[0] == found
    assert paired_bootstrap(a, b, 1, "x", 4)[0] != found
    assert paired_bootstrap(a, {**dict.fromkeys(list(a)[:3], 1.0), "other": 0.0}, 0)[1] == 3
    assert paired_bootstrap(a, a, 0)[0] == Estimate(0.0, 0.0, 0.0)


def test_a_vote_at_equal_tokens_is_between_its_neighbours_and_within_the_pool() -> None:
    curve = {1: {"a": 0.0, "b": 0.5}, 2: {"a": 0.4, "b": 0.5}, 3: {"a": 1.0, "b": 0.0}}
    assert interpolated(curve.__getitem__, 1.0) == curve[1]
    assert interpolated(curve.__getitem__, 3.0) == curve[3]  # where there is no larger number
    assert interpolated(curve.__getitem__, 2.25) == pytest.approx({"a": 0.55, "b": 0.375})
    assert samples_at_equal_tokens(6.2, 16) == 6.2
    assert samples_at_equal_tokens(0.7, 16) == 1  # no vote costs less than one answer
    assert samples_at_equal_tokens(16.1, 16) == 16
    assert samples_at_equal_tokens(17, 16) is None


def test_differences_are_shown_at_the_same_budget_and_at_equal_tokens() -> None:
    table, page = scaling_table(SCALING), scaling_document(SCALING, {})
    (line,) = (line.split() for line in table.splitlines() if line.startswith("trees  ") and "1.50" in line)
    assert line[6:14] == ["+0.050", "-0.100", "to", "+0.200", "+0.070", "-0.050", "to", "+0.250"]
    assert "<td>+0.050 (-0.100 to +0.200)</td><td>+0.070 (-0.050 to +0.250)</td>" in page


def test_json_holds_all_that_the_page_is_made_of() -> None:
    assert scaling_of_json(json.loads(json.dumps(scaling_json(SCALING)))) == SCALING


def test_the_tokens_of_a_verifier_are_shown_and_a_dash_where_it_does_not_say() -> None:
    for text in (scaling_table(SCALING), scaling_document(SCALING, {})):
        assert text.count("1,234.5") == 1
    cells = [line.split() for line in scaling_table(SCALING).splitlines()[1:6]]
    column = cells[2].index("1,234.5")
    assert [row[column] for row in cells if len(row) == len(cells[2])] == ["1,234.5"]
    assert cells[3][-5] == "-"  # call tokens, failed, seconds, cache, estimate
    old = scaling_json(SCALING)
    for one in old["points"]:
        del one["verifier_tokens"]  # as versions before this number wrote it
    assert scaling_of_json(old).points[2].verifier_tokens is None


def test_oracles_are_marked_in_the_table_the_chart_and_the_page() -> None:
    hidden = Scaling("toy", "m", 5, 4, 10.0, [*POINTS, point("plug", 4, 0.9, 40.0, is_oracle=True)])
    for text in (scaling_table(hidden), scaling_chart(hidden), scaling_document(hidden, {})):
        assert "plug (oracle)" in text
        assert "best@oracle" in text
    assert "chose by the expected answers" in scaling_document(hidden, {})


def test_texts_of_a_model_are_no_markup_and_a_long_chain_of_nodes_is_shown() -> None:
    nodes = [
        {"node": i, "parent": i - 1 if i else None, "text": "<script>x</script>", "tokens": 3, "sampled": i > 0, "end": "open"}
        | {"score": 0.25, "chosen": i < 3, "visits": 7}
        for i in range(390)
    ]  # fmt: skip
    row = {"id": "<b>", "accuracy": 1.0, "search": {"tree": nodes, "tokens": 5, "verifier_calls": 2}}
    page = scaling_document(SCALING, {"trees-4": [row]})
    assert "<script" not in page
    assert page.count("&lt;script&gt;x") == 390
    assert page.count("<ul>") == page.count("</ul>") == 390
    assert page.count(" class=chosen") == 3
    assert "3 tokens, open, score 0.25, visits 7" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
