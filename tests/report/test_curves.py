"""Curves: the right metrics in the right chart, no spike lost, a real PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.report.curves import main_charts, other_charts, thinned_indices, thinned_points, write_curves_png
from burnish.report.run_files import MetricsTail, Series
from burnish.run.metrics import MetricsFile

ROWS: list[dict[str, Any]] = [
    {"step": 0, "validation/greedy/accuracy": 0.4, "validation/greedy/accuracy/length=4": 0.5},
    {
        "step": 1,
        "reward/mean": 0.5,
        "reward/task": 0.5,
        "reward/answer_timeout": 2,
        "rollout/length_mean": 6.0,
        "actor/entropy": float("nan"),
        "actor/lr": 1e-4,
        "note": "text",
    },
    {"step": 2, "reward/mean": 0.75, "actor/entropy": 1.0, "validation/greedy/accuracy": 0.9},
]


def series_of(folder: Path, rows: list[dict[str, Any]]) -> dict[str, Series]:
    """The series of a metrics.jsonl with these rows."""
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    metrics = MetricsFile(folder / "metrics.jsonl")
    for row in rows:
        metrics.append(int(row["step"]), {k: v for k, v in row.items() if k != "step"})
    tail = MetricsTail(metrics.path)
    tail.update()
    return tail.series


def test_each_metric_is_in_its_chart_and_the_rest_in_charts_of_their_own(tmp_path: Path) -> None:
    series = series_of(tmp_path, ROWS)
    shown = main_charts(series)
    assert {c.title: c.names for c in shown} == {
        "Reward": ["reward/mean", "reward/task"],
        "Held-out accuracy": ["validation/greedy/accuracy"],
        "Completion length (tokens)": ["rollout/length_mean"],
        "Entropy": ["actor/entropy"],
    }
    assert [c.title for c in other_charts(series, shown)] == [
        "actor/lr",
        "reward/answer_timeout",
        "validation/greedy/accuracy/length=4",
    ]


def test_a_held_out_reward_that_is_the_accuracy_again_has_no_chart_of_its_own(tmp_path: Path) -> None:
    rows = [{"step": step, "validation/a/accuracy": 0.5, "validation/a/reward_mean": 0.5} for step in range(3)]
    graded = [{"step": step, "validation/a/reward_mean": 7.0} for step in range(3)]
    both = [row | {"validation/a/reward_mean": 1.5} for row in rows]
    found = [[chart.title for chart in main_charts(series_of(tmp_path, each))] for each in (rows, graded, both)]
    assert found == [["Held-out accuracy"], ["Held-out reward"], ["Held-out accuracy", "Held-out reward"]]


def test_points_are_by_step_and_finite(tmp_path: Path) -> None:
    lines = series_of(tmp_path, ROWS)
    assert lines["validation/greedy/accuracy"].points() == [(0, 0.4), (2, 0.9)]
    assert lines["actor/entropy"].points() == [(2, 1.0)]
    assert thinned_points(lines["reward/mean"], 100, since_step=2) == [[2, 0.75]]
    assert "note" not in lines


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(2, 40))
def test_thinning_keeps_the_extremes_the_ends_and_the_order(values: list[float], limit: int) -> None:
    kept = thinned_indices(np.array(values), limit).tolist()
    assert kept == sorted(set(kept))
    assert len(kept) <= limit + 2
    assert kept[-1] == len(values) - 1
    assert {min(values), max(values)} <= {values[k] for k in kept}


def test_the_png_is_written(tmp_path: Path) -> None:
    series_of(tmp_path, ROWS)
    path = write_curves_png(tmp_path)
    assert path == tmp_path / "curves.png"
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_no_metrics_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no numbers to draw"):
        write_curves_png(tmp_path)
    assert list(tmp_path.iterdir()) == []
