"""Curves as one SVG that stands alone, with its style and legend inside, for pages without a script and for the docs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 26
PALETTE = ("#1f6feb", "#d1495b", "#2a9d4a", "#8957e5", "#e08b00", "#0a8f8f", "#6b7280")
DASHES = ("", "5 3", "2 3")
STYLE = "text{font:11px sans-serif;fill:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.6}"
LEGEND_ROW = 15


def svg_chart(
    curves: Mapping[str, Sequence[Sequence[float]]],
    title: str,
    *,
    bars: Mapping[str, Sequence[tuple[float, float, float]]] | None = None,
    best: Sequence[Sequence[float]] = (),
    log_x: bool = False,
    x_label: str = "",
    below: bool = False,
) -> str:
    """Draw curves of [x, y]. `bars` has (x, low, high) of intervals by curve, `best` a wide grey line behind the curves.

    With `log_x`, equal ratios of x are equally far apart. With `below`, the legend and `x_label` are under the chart, which has room for
    many curves: their colours repeat with dashes.
    """
    assert below or len(PALETTE) >= len(curves)
    bars = bars or {}
    points = [point for curve in curves.values() for point in curve]
    ends = [y for each in bars.values() for _, low, high in each for y in (low, high)]
    scale = math.log2 if log_x else float
    (x_low, x_high), (y_low, y_high) = _range([scale(p[0]) for p in points]), _range([*(p[1] for p in points), *ends])
    height = HEIGHT + (LEGEND_ROW * (len(curves) + 2) if below else 0)

    def x_of(x: float) -> float:
        return round(LEFT + (scale(x) - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def y_of(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
    ]
    for y in _ticks(y_low, y_high, 4):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y)}" y2="{y_of(y)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(y) + 4}" text-anchor="end">{y:.4g}</text>')
    for x in _powers(x_low, x_high) if log_x else _ticks(x_low, x_high, 5):
        parts.append(f'<text x="{x_of(x)}" y="{HEIGHT - 8}" text-anchor="middle">{x:.4g}</text>')
    if best:
        path = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in best)
        parts.append(f'<polyline fill="none" stroke="#999" stroke-opacity="0.35" stroke-width="8" points="{path}"/>')
    for row, (name, curve) in enumerate(curves.items()):
        colour, dash = PALETTE[row % len(PALETTE)], DASHES[row // len(PALETTE) % len(DASHES)]
        dashed = f' stroke-dasharray="{dash}"' if dash else ""
        path = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in curve)
        parts.append(f'<polyline class="line" stroke="{colour}"{dashed} points="{path}"/>')
        for x, low, high in bars.get(name, ()):
            parts.append(
                f'<line stroke="{colour}" stroke-opacity="0.45" x1="{x_of(x)}" x2="{x_of(x)}" y1="{y_of(low)}" y2="{y_of(high)}"/>'
            )
        if below:
            parts += [f'<circle cx="{x_of(x)}" cy="{y_of(y)}" r="2.4" fill="{colour}"/>' for x, y in curve]
        left, top = (LEFT, HEIGHT + LEGEND_ROW * (row + 1)) if below else (330, 128 + 13 * row)
        parts.append(f'<rect x="{left}" y="{top}" width="9" height="9" fill="{colour}"/>')
        parts.append(f'<text x="{left + 14}" y="{top + 8}">{escape(name)}</text>')
    if x_label:
        parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT + 6}" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(parts) + "</svg>\n"


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, high + 1)


def _powers(low: float, high: float) -> list[float]:
    """About five values that are equally far apart on an axis of logarithms."""
    return [2.0 ** (low + k * (high - low) / 5) for k in range(6)]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers inside [low, high], spaced by 1, 2 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
