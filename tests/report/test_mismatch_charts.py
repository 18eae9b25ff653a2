"""Where sampler and trainer disagree: the profiles by position and probability, and the worst tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.report.curves import main_charts, other_charts
from burnish.report.mismatch_charts import is_profile, profile_charts
from burnish.report.page_data import RunData
from burnish.report.run_files import Series, WorstTokensTail
from burnish.run.metrics import MetricsFile
from burnish.run.samples import WorstTokensFile


def series_of(rows: list[dict[str, Any]]) -> dict[str, Series]:
    found: dict[str, Series] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step":
                found.setdefault(name, Series()).add(row["step"], value)
    return found


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
    (chart,) = profile_charts(series_of(rows))
    assert chart["series"] == {"step 1": [[0, 0.1], [1, 0.2]], "step 3": [[0, 0.3], [2, 0.4], [3, 0.5]]}
    assert chart["places"] == ["0", "1", "3", "15"]
    assert chart["hints"] == [
        "position 0: 4 tokens",
        "positions 1 to 2: 0 tokens",
        "positions 3 to 6: 16 tokens",
        "positions 15 to 30: 1,500 tokens",
    ]


def test_probabilities_go_from_the_least_likely_up() -> None:
    row = profile(1, "probability", **{"1e_1": (0.1, 9), "1e_2": (0.2, 3), "_0": (5.0, 1)})
    (chart,) = profile_charts(series_of([row]))
    assert chart["series"] == {"step 1": [[0, 5.0], [1, 0.2], [2, 0.1]]}
    assert chart["places"] == ["0", "1e-2", "1e-1"]
    assert chart["hints"][:2] == ["probability below 1e-06: 1 tokens", "probability 0.01 to 0.1: 3 tokens"]


def test_names_under_an_axis_thin_out_where_there_are_many() -> None:
    buckets = {f"_{2**k - 1}": (0.1, 1.0) for k in range(12)}
    (chart,) = profile_charts(series_of([profile(1, "position", **buckets)]))
    assert chart["places"][:4] == ["0", "", "3", ""]
    assert len(chart["hints"]) == 12


def run_with(folder: Path, rows: list[dict[str, Any]]) -> RunData:
    (folder / "config.yaml").write_text("seed: 0\n")
    metrics = MetricsFile(folder / "metrics.jsonl")
    for row in rows:
        metrics.append(row["step"], {k: v for k, v in row.items() if k != "step"})
    return RunData("it", folder)


def test_buckets_have_no_chart_of_their_own(tmp_path: Path) -> None:
    row = profile(1, "position", _0=(0.1, 4)) | {"mismatch/mean": 0.5, "mismatch/rollout_is_mean": 1.0}
    series = series_of([row])
    others = other_charts(series, main_charts(series))
    assert [chart.title for chart in others if not is_profile(chart.title)] == ["mismatch/rollout_is_mean"]
    run = run_with(tmp_path, [row])
    assert [chart["title"] for chart in run.metrics("other")["charts"]] == ["mismatch/rollout_is_mean"]
    assert [chart["title"] for chart in run.overview()["profiles"]] == [
        "Mean log-prob gap by position in the completion"
    ]


def test_a_run_without_a_gap_has_no_such_part(tmp_path: Path) -> None:
    overview = run_with(tmp_path, [{"step": 1, "reward/mean": 1.0}]).overview()
    assert (overview["profiles"], overview["worst_tokens"]) == ([], [])


def test_the_worst_tokens_are_of_the_first_step_the_worst_and_the_last_while_they_are_written(tmp_path: Path) -> None:
    written, tail = WorstTokensFile(tmp_path / "worst_tokens.jsonl"), WorstTokensTail(tmp_path / "worst_tokens.jsonl")
    assert tail.rows() == []
    expected = {2: [2], 5: [2, 5], 7: [2, 5, 7], 9: [2, 5, 9]}
    for step, steps in expected.items():
        written.append(step, [worst(step, gap={5: 9.0}.get(step, -1.0)), worst(step, gap=0.5)])
        tail.update()
        assert [row["step"] for row in tail.rows()] == [step for step in steps for _ in range(2)]
    written.truncate_after(5)
    tail.update()
    assert [row["step"] for row in tail.rows()] == [2, 2, 5, 5]
