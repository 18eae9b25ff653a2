"""The curves of a run: which metrics share a chart, how a long line is thinned, and all charts as a PNG.

`main_charts` selects metrics by their names in metrics.jsonl and shows what the run has: without a reference there is no KL
chart, and a supervised run has no reward chart. `static/charts.js` draws the charts of the page.
"""

from __future__ import annotations

import io
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from burnish.config.errors import UserError
from burnish.config.extras import install_hint
from burnish.report.run_files import MetricsTail, Series
from burnish.run.durable_files import atomic_write

MAIN_CHARTS = (
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
    """The names of the metrics that share a plot."""

    title: str
    names: list[str] = field(default_factory=list)


def main_charts(series: Mapping[str, Series]) -> list[Chart]:
    """Return the charts of `MAIN_CHARTS` for which the run has metrics."""
    built = []
    for title, pattern in MAIN_CHARTS:
        names = [name for name in series if re.fullmatch(pattern, name) and not _is_accuracy_again(name, series)]
        if names:
            built.append(Chart(title, sorted(names, key=_mean_first)))
    return built


def _is_accuracy_again(name: str, series: Mapping[str, Series]) -> bool:
    """Whether a held-out reward equals the accuracy everywhere, as it does with a single verifier."""
    mode, _, last = name.rpartition("/")
    return last == "reward_mean" and series[name] == series.get(f"{mode}/accuracy")


def other_charts(series: Iterable[str], shown: Iterable[Chart]) -> list[Chart]:
    """Return one chart for each metric that is in no chart of `shown`."""
    taken = {name for chart in shown for name in chart.names}
    return [Chart(name, [name]) for name in sorted(series) if name not in taken]


def _mean_first(name: str) -> tuple[bool, str]:
    return (not name.endswith("/mean"), name)


def thinned_indices(values: np.ndarray, limit: int) -> np.ndarray:
    """Return the indices of about `limit` points of a line [T]: the minimum and maximum of each window, and the last point.

    So no spike is lost.
    """
    num = len(values)
    if num <= limit:
        return np.arange(num)
    width = math.ceil(num / max(1, limit // 2))
    starts = np.arange(0, num, width)
    padded = np.full(len(starts) * width, np.nan)
    padded[:num] = values
    windows = padded.reshape(-1, width)
    extremes = (np.nanargmin(windows, axis=1) + starts, np.nanargmax(windows, axis=1) + starts)
    return np.unique(np.concatenate([*extremes, [num - 1]]))


def thinned_points(line: Series, limit: int, since_step: int = -1) -> list[list[float]]:
    """Return [step, value] of about `limit` points of a metric, from a step on, with six digits each."""
    start = bisect_left(line.steps, since_step)
    values = np.array(line.values)[start:]
    kept = thinned_indices(values, limit)
    steps = np.array(line.steps)[start:][kept].tolist()
    return [[step, float(f"{value:.6g}")] for step, value in zip(steps, values[kept].tolist(), strict=True)]


def write_curves_png(run: Path) -> Path:
    """Write `<run>/curves.png` and return its path. A run without metrics, or a missing matplotlib, is a `UserError`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"curves.png needs matplotlib, which is not installed ({error}): {install_hint('plot')}; "
            "report.html shows the same curves without it"
        ) from error
    metrics = MetricsTail(run / "metrics.jsonl")
    metrics.update()
    shown = main_charts(metrics.series) or other_charts(metrics.series, [])
    if not shown:
        raise UserError(
            f"{run / 'metrics.jsonl'} has no numbers to draw: the run has not finished a step yet, or the file was cut or deleted"
        )
    columns = min(3, len(shown))
    lines = math.ceil(len(shown) / columns)
    # `Figure` instead of pyplot: it needs no window system and leaves no global state.
    figure = Figure(figsize=(4.6 * columns, 3.1 * lines), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for axis, chart in zip(axes, shown, strict=False):
        for name in chart.names:
            line = metrics.series[name]
            marker = "o" if len(line.values) <= 20 else None
            axis.plot(line.steps, line.values, label=name, marker=marker, markersize=3, linewidth=1.2)
        axis.set_title(chart.title, fontsize=10)
        axis.set_xlabel("step", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        if len(chart.names) > 1:
            axis.legend(fontsize=7)
    for axis in axes[len(shown) :]:
        axis.set_visible(False)
    figure.suptitle(run.resolve().name, fontsize=11, parse_math=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    path = run / "curves.png"
    atomic_write(path, buffer.getvalue())
    return path
