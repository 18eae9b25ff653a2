"""The curves of a run: which metrics belong in one chart, and the PNG of the charts that matter.

`charts` is shared with the HTML page. It goes by the names in metrics.jsonl and shows what is there: a run without a
reference has no KL chart, a supervised one has no reward.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.run import metrics
from burnish.run.files import atomic_write

Point = tuple[int, float]

CHARTS = (
    ("Reward", r"reward/(?!.*(timeout|fail|error|drop|std)).*"),
    ("Held-out accuracy", r"validation/[^/]+/accuracy"),
    ("Held-out reward", r"validation/[^/]+/reward_mean"),
    ("Completion length (tokens)", r"rollout/length_mean|validation/[^/]+/length_mean"),
    ("Entropy", r"[^/]+/entropy"),
    ("KL to the reference", r"[^/]+/kl_ref"),
    ("Sampler against trainer: mean log-prob gap", r"mismatch/mean"),
    ("Sampler against trainer: largest log-prob gap", r"mismatch/max"),
    ("Gradient norm", r"[^/]+/grad_norm"),
    ("Loss", r"([^/]+/)?loss"),
    ("Truncated and without signal", r"rollout/(truncated|zero_signal)"),
    ("Tokens per second", r"time/tokens_per_s|performance/[^/]+_tokens_per_s"),
    ("Share of the GPU's peak", r"performance/[mh]fu"),
    ("Memory (GiB)", r"memory/[^/]+_gib"),
)


@dataclass
class Chart:
    """Lines that share a plot: name of each, and its points by step, or by the number of a place that has a name."""

    title: str
    series: dict[str, list[Point]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    """What stands under the axis, where that is no number of steps."""
    hints: list[str] = field(default_factory=list)
    """What is said of each place when it is pointed at."""


def series(rows: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """Each numeric metric as its (step, value) points, without non-finite values, in the order names first appear."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, []).append((row["step"], float(value)))
    return found


def charts(rows: list[dict[str, Any]]) -> list[Chart]:
    """The charts that matter, as far as the run has their metrics."""
    lines = series(rows)
    built = []
    for title, pattern in CHARTS:
        names = [name for name in lines if re.fullmatch(pattern, name) and not _is_accuracy_again(name, lines)]
        if names:
            built.append(Chart(title, {name: lines[name] for name in sorted(names, key=_mean_first)}))
    return built


def _is_accuracy_again(name: str, lines: dict[str, list[Point]]) -> bool:
    """Whether a held-out reward has the very values of the accuracy, as that of a single verifier has."""
    mode, _, last = name.rpartition("/")
    return last == "reward_mean" and lines[name] == lines.get(f"{mode}/accuracy")


def other_charts(rows: list[dict[str, Any]], shown: Iterable[Chart]) -> list[Chart]:
    """One small chart for every metric that is in none of the others."""
    taken = {name for chart in shown for name in chart.series}
    return [Chart(name, {name: points}) for name, points in sorted(series(rows).items()) if name not in taken]


def thin(points: list[Point], limit: int) -> list[Point]:
    """At most about `limit` points: of each stretch the lowest and the highest, so that no spike disappears; and the last."""
    if len(points) <= limit:
        return points
    width = math.ceil(len(points) / (limit // 2))
    kept = []
    for start in range(0, len(points), width):
        stretch = points[start : start + width]
        extremes = {min(stretch, key=lambda p: p[1]), max(stretch, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def write_curves(run: Path) -> Path:
    """Write `<run>/curves.png` and return its path. A run without metrics is a `UserError`."""
    from matplotlib.figure import Figure

    rows = metrics.read(run / "metrics.jsonl")
    shown = charts(rows) or other_charts(rows, [])
    if not shown:
        raise UserError(
            f"{run / 'metrics.jsonl'} has no numbers to draw: the run has not finished a step yet, or the file was cut or deleted"
        )
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    # A Figure of its own, not pyplot: no window system, no global state left in the training process.
    figure = Figure(figsize=(4.6 * columns, 3.1 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, chart in zip(axes, shown, strict=False):
        for name, points in chart.series.items():
            marker = "o" if len(points) <= 20 else None
            axis.plot(
                [x for x, _ in points], [y for _, y in points], label=name, marker=marker, markersize=3, linewidth=1.2
            )
        axis.set_title(chart.title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if len(chart.series) > 1:
            axis.legend(fontsize=7)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    figure.suptitle(run.resolve().name, fontsize=11, parse_math=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    path = run / "curves.png"
    atomic_write(path, buffer.getvalue())
    return path


def _mean_first(name: str) -> tuple[bool, str]:
    return (not name.endswith("/mean"), name)
