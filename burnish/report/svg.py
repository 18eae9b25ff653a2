"""A chart as inline SVG: lines, axes with round numbers, a legend. The page's script adds the values under the pointer."""

from __future__ import annotations

import math
from html import escape

from burnish.report.curves import Chart, thin

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 26
COLOURS = 6  # classes c0 to c5 in the style sheet


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """About `count` round numbers (1, 2 or 5 times a power of ten apart) inside [low, high]."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def bounds(values: list[float]) -> tuple[float, float]:
    """The range to draw: that of the values, widened where they are all the same."""
    low, high = min(values), max(values)
    if high - low > 1e-12 * max(abs(low), abs(high)):
        return low, high
    pad = abs(low) * 0.1 or 1.0
    return low - pad, high + pad


def draw(chart: Chart, limit: int, kept: int) -> tuple[str, dict[str, object]]:
    """The SVG of a chart, and what the script needs to show values and to draw it anew: names, points, the place of the axes.

    The SVG has about `limit` points of each line, the script about `kept`, so that there is more to see where it zooms in.
    """
    lines = {name: thin(points, limit) for name, points in chart.series.items()}
    x_low, x_high = bounds([float(x) for points in lines.values() for x, _ in points])
    y_low, y_high = bounds([y for points in lines.values() for _, y in points])

    def x_of(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def y_of(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    for y in ticks(y_low, y_high):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y)}" y2="{y_of(y)}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y_of(y) + 4}" text-anchor="end">{y:.4g}</text>')
    names = dict(enumerate(chart.places)) or {int(x): str(int(x)) for x in ticks(x_low, x_high, 5) if x == int(x)}
    for at, name in names.items():
        parts.append(f'<text class="tick" x="{x_of(at)}" y="{HEIGHT - 8}" text-anchor="middle">{escape(name)}</text>')
    for index, points in enumerate(lines.values()):
        colour = f"c{index % COLOURS}"
        if len(points) > 1:
            path = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in points)
            parts.append(f'<polyline class="line {colour}" points="{path}"/>')
        if len(points) <= 20:
            parts += [f'<circle class="dot {colour}" cx="{x_of(x)}" cy="{y_of(y)}" r="2.5"/>' for x, y in points]
    parts.append(f'<line class="cursor" y1="{TOP}" y2="{HEIGHT - BOTTOM}" x1="-9" x2="-9"/></svg>')
    shown = {n: [[x, float(f"{y:.6g}")] for x, y in thin(points, kept)] for n, points in chart.series.items()}
    sizes = {"left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM, "width": WIDTH, "height": HEIGHT}
    return "".join(parts), {
        "series": shown,
        "hints": chart.hints,
        "places": chart.places,
        "x": [x_low, x_high],
        **sizes,
    }


def figure(chart: Chart, index: int, svg: str) -> str:
    """The SVG with its title, its legend where there is more than one line, and a place for the values."""
    legend = ""
    if len(chart.series) > 1:
        names = enumerate(chart.series)
        legend = "".join(f'<span><i class="swatch c{i % COLOURS}"></i>{escape(name)}</span>' for i, name in names)
    title = f"<figcaption>{escape(chart.title)}</figcaption>"
    kind = "chart several" if legend else "chart"
    return f'<figure class="{kind}" data-chart="{index}" tabindex="0">{title}{svg}<div class="legend">{legend}</div><output></output></figure>'
