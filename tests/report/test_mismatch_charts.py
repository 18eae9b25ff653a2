"""The part of the report that shows where sampler and trainer disagree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from burnish.report.curves import draw_svg, main_charts, other_charts
from burnish.report.html_report import write_report
from burnish.report.mismatch_charts import is_profile, profile_charts, worst_tokens_table
from burnish.run.metrics import MetricsFile
from burnish.run.samples import WorstTokensFile


def profile(step: int, kind: str, **buckets: tuple[float, float]) -> dict[str, Any]:
    """A line of metrics with (mean |gap|, tokens) of some buckets."""
    row: dict[str, Any] = {"step": step}
    for name, (size, count) in buckets.items():
        end = name.removeprefix("_").replace("_", "-")
        row |= {f"mismatch/by_{kind}/{end}/{k}": v for k, v in (("abs", size), ("signed", -size), ("tokens", count))}
    return row


def worst(step: int, text: str = "x", **changes: Any) -> dict[str, Any]:
    return {
        "group": f"p{step}#0",
        "sample": 1,
        "position": 7,
        "token": 42,
        "before": "left ",
        "text": text,
        "after": " right",
        "behaviour_logp": -0.25,
        "trainer_logp": -3.5,
        "gap": -3.25,
        "weight": None,
    } | changes


def test_a_profile_is_drawn_at_the_first_and_the_last_step_that_has_it() -> None:
    rows = [
        {"step": 0, "reward/mean": 1.0},
        profile(1, "position", _0=(0.1, 4), _1=(0.2, 8)),
        profile(2, "position", _0=(9.0, 4)),
        profile(3, "position", _15=(0.5, 1500), _0=(0.3, 4), _3=(0.4, 16)),
        {"step": 4, "reward/mean": 1.0},
    ]
    (chart,) = profile_charts(rows)
    assert chart.series == {"step 1": [(0, 0.1), (1, 0.2)], "step 3": [(0, 0.3), (2, 0.4), (3, 0.5)]}
    assert chart.places == ["0", "1", "3", "15"]
    assert chart.hints == [
        "position 0: 4 tokens",
        "positions 1 to 2: 0 tokens",
        "positions 3 to 6: 16 tokens",
        "positions 15 to 30: 1,500 tokens",
    ]


def test_probabilities_go_from_the_least_likely_up() -> None:
    (chart,) = profile_charts([profile(1, "probability", **{"1e_1": (0.1, 9), "1e_2": (0.2, 3), "_0": (5.0, 1)})])
    assert chart.series == {"step 1": [(0, 5.0), (1, 0.2), (2, 0.1)]}
    assert chart.places == ["0", "1e-2", "1e-1"]
    assert chart.hints[:2] == ["probability below 1e-06: 1 tokens", "probability 0.01 to 0.1: 3 tokens"]


def test_names_under_an_axis_thin_out_where_there_are_many() -> None:
    buckets = {f"_{2**k - 1}": (0.1, 1.0) for k in range(12)}
    (chart,) = profile_charts([profile(1, "position", **buckets)])
    assert chart.places[:4] == ["0", "", "3", ""]
    assert len(chart.hints) == 12


@pytest.mark.parametrize("num", [1, 3])
def test_a_chart_of_places_has_their_names_under_its_axis(num: int) -> None:
    buckets = {f"_{2**k - 1}": (0.1 * k, 1.0) for k in range(num)}
    (chart,) = profile_charts([profile(1, "position", **buckets)])
    image, scale = draw_svg(chart, 100, 200)
    assert image.count('text-anchor="middle"') == num
    assert f'text-anchor="middle">{2 ** (num - 1) - 1}<' in image
    assert scale["hints"] == chart.hints


def test_buckets_have_no_chart_of_their_own(tmp_path: Path) -> None:
    row = profile(1, "position", _0=(0.1, 4)) | {"mismatch/mean": 0.5, "mismatch/rollout_is_mean": 1.0}
    others = other_charts([row], main_charts([row]))
    assert [chart.title for chart in others if not is_profile(chart.title)] == ["mismatch/rollout_is_mean"]
    page = report(tmp_path, [row])
    assert "by_position" not in page
    assert "Mean log-prob gap by position" in page
    assert "by the sampler" not in page


def report(folder: Path, rows: list[dict[str, Any]]) -> str:
    (folder / "config.yaml").write_text("seed: 0\n")
    metrics = MetricsFile(folder / "metrics.jsonl")
    for row in rows:
        metrics.append(row["step"], {k: v for k, v in row.items() if k != "step"})
    return write_report(folder).read_text()


def test_a_run_without_a_gap_has_no_such_part(tmp_path: Path) -> None:
    assert "Sampler against trainer" not in report(tmp_path, [{"step": 1, "reward/mean": 1.0}])


def table_of(folder: Path, *rows: dict[str, Any], steps: tuple[int, ...] = (1,)) -> str:
    """The table of a run whose steps have these rows."""
    tokens = WorstTokensFile(folder / "worst_tokens.jsonl")
    for step in steps:
        tokens.append(step, list(rows) or [worst(step, gap={5: 9.0}.get(step, -1.0))])
    return worst_tokens_table(tokens.path)


def test_the_table_has_the_first_step_the_worst_and_the_last(tmp_path: Path) -> None:
    table = table_of(tmp_path, steps=(2, 5, 7, 9))
    assert [f"p{step}#0" in table for step in (2, 5, 7, 9)] == [True, True, False, True]
    assert worst_tokens_table(tmp_path / "none") == ""


def test_a_row_shows_the_token_in_its_place_and_both_log_probs(tmp_path: Path) -> None:
    table = table_of(tmp_path, worst(1, "a<b>\n", weight=0.5), worst(1, behaviour_logp=-300.0))
    assert "<code>left <mark>a&lt;b&gt;\\n</mark> right</code>" in table
    assert "<td>42</td><td>-0.25</td><td>-3.5</td><td>-3.25</td><td>0.5</td>" in table
    assert "<td>-300</td><td>-3.5</td><td>-3.25</td><td></td>" in table


def test_a_long_surrounding_is_cut_to_what_is_next_to_the_token(tmp_path: Path) -> None:
    table = table_of(tmp_path, worst(1, before="A" + "b" * 500, after="c" * 500 + "D"))
    assert "b<mark>x</mark>c" in table
    assert "A" not in table.split("<code>")[1]
    assert "D" not in table.split("<code>")[1]
