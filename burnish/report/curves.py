"""The curves of a run: which metrics share a chart, and each chart as inline SVG or all of them as a PNG.

`main_charts` selects metrics by their names in metrics.jsonl and shows what the run has: without a reference there is no KL
chart, and a supervised run has no reward chart. The page's script adds the values under the pointer to the SVG.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.extras import install_hint
from burnish.run import metrics
from burnish.run.durable_files import atomic_write

Point = tuple[int, float]
WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 26
NUM_COLOURS = 6
"""Classes c0 to c5 in the style sheet."""
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
    """Lines that share a plot. The x of a point is a step, or an index into `places`."""

    title: str
    series: dict[str, list[Point]] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)
    """Labels of the x axis if it does not count steps."""
    hints: list[str] = field(default_factory=list)
    """Text shown for each place under the pointer."""


def metric_series(rows: list[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return the finite (step, value) points of each numeric metric, in the order in which the names first appear."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, []).append((row["step"], float(value)))
    return found


def main_charts(rows: list[dict[str, Any]]) -> list[Chart]:
    """Return the charts of `MAIN_CHARTS` for which the run has metrics."""
    lines = metric_series(rows)
    built = []
    for title, pattern in MAIN_CHARTS:
        names = [name for name in lines if re.fullmatch(pattern, name) and not _is_accuracy_again(name, lines)]
        if names:
            built.append(Chart(title, {name: lines[name] for name in sorted(names, key=_mean_first)}))
    return built


def _is_accuracy_again(name: str, lines: dict[str, list[Point]]) -> bool:
    """Whether a held-out reward equals the accuracy everywhere, as it does with a single verifier."""
    mode, _, last = name.rpartition("/")
    return last == "reward_mean" and lines[name] == lines.get(f"{mode}/accuracy")


def other_charts(rows: list[dict[str, Any]], shown: Iterable[Chart]) -> list[Chart]:
    """Return one chart for each metric that is in no chart of `shown`."""
    taken = {name for chart in shown for name in chart.series}
    return [Chart(name, {name: points}) for name, points in sorted(metric_series(rows).items()) if name not in taken]


def thin_points(points: list[Point], limit: int) -> list[Point]:
    """Thin a line to about `limit` points: the minimum and maximum of each window, so that no spike is lost, and the last point."""
    if len(points) <= limit:
        return points
    width = math.ceil(len(points) / (limit // 2))
    kept = []
    for start in range(0, len(points), width):
        window = points[start : start + width]
        extremes = {min(window, key=lambda p: p[1]), max(window, key=lambda p: p[1])}
        kept += sorted(extremes)
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _mean_first(name: str) -> tuple[bool, str]:
    return (not name.endswith("/mean"), name)


def axis_ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Return about `count` round numbers inside [low, high], spaced by 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def axis_range(values: list[float]) -> tuple[float, float]:
    """Return the range of the values, widened if they are all equal."""
    low, high = min(values), max(values)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    pad = abs(low) * 0.1 or 1.0
    return low - pad, high + pad


def draw_svg(chart: Chart, limit: int, kept: int) -> tuple[str, dict[str, object]]:
    """Return the SVG of a chart, and the data with which the script shows values and redraws: names, points, axis geometry.

    The SVG has about `limit` points of each line. The script gets about `kept` points, which it needs when a user zooms in.
    """
    lines = {name: thin_points(points, limit) for name, points in chart.series.items()}
    x_low, x_high = axis_range([float(x) for points in lines.values() for x, _ in points])
    y_low, y_high = axis_range([y for points in lines.values() for _, y in points])

    def x_of(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def y_of(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    for y in axis_ticks(y_low, y_high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y)}" y2="{y_of(y)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y_of(y) + 4}" text-anchor="end">{y:.4g}</text>')
    labels = dict(enumerate(chart.places)) or {int(x): str(int(x)) for x in axis_ticks(x_low, x_high, 5) if x == int(x)}
    for x, label in labels.items():
        parts.append(f'<text class="tick" x="{x_of(x)}" y="{HEIGHT - 8}" text-anchor="middle">{escape(label)}</text>')
    for index, points in enumerate(lines.values()):
        colour = f"c{index % NUM_COLOURS}"
        if len(points) > 1:
            path = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in points)
            parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        if len(points) <= 20:
            parts += [f'<circle class="dot {colour}" cx="{x_of(x)}" cy="{y_of(y)}" r="2.5"/>' for x, y in points]
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>')
    shown = {n: [[x, float(f"{y:.6g}")] for x, y in thin_points(points, kept)] for n, points in chart.series.items()}
    sizes = {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "width": WIDTH, "height": HEIGHT}
    return "".join(parts), {
        "series": shown,
        "hints": chart.hints,
        "places": chart.places,
        "x": [x_low, x_high],
        **sizes,
    }


def figure_html(chart: Chart, index: int, svg: str) -> str:
    """Return the SVG with its title, a legend if there are several lines, and an element for the values."""
    legend = ""
    if len(chart.series) > 1:
        names = enumerate(chart.series)
        legend = "".join(f'<span><i class="swatch c{i % NUM_COLOURS}"></i>{escape(name)}</span>' for i, name in names)
    title = f"<figcaption>{escape(chart.title)}</figcaption>"
    kind = "chart several" if legend else "chart"
    return f'<figure class="{kind}" data-chart="{index}" tabindex="0">{title}{svg}<div class="legend">{legend}</div><output></output></figure>'


def write_curves_png(run: Path) -> Path:
    """Write `<run>/curves.png` and return its path. A run without metrics, or a missing matplotlib, is a `UserError`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(
            f"curves.png needs matplotlib, which is not installed ({error}): {install_hint('plot')}; "
            "report.html shows the same curves without it"
        ) from error
    rows = metrics.read_metrics(run / "metrics.jsonl")
    shown = main_charts(rows) or other_charts(rows, [])
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
