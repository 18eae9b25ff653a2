"""Curves as one SVG that stands alone, with its style and legend inside, for the docs."""

from __future__ import annotations

import math

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 26
PALETTE = ("#1f6feb", "#d1495b", "#2a9d4a", "#8957e5", "#e08b00", "#0a8f8f", "#6b7280")
STYLE = "text{font:11px sans-serif;fill:#555}.grid{stroke:#ddd}.line{fill:none;stroke-width:1.6}"


def svg_chart(curves: dict[str, list[list[float]]], title: str) -> str:
    """Draw at most as many curves of [x, y] as the palette has colours."""
    assert len(PALETTE) >= len(curves)
    xs, ys = ([point[k] for curve in curves.values() for point in curve] for k in (0, 1))
    (x_low, x_high), (y_low, y_high) = _range(xs), _range(ys)

    def x_of(x: float) -> float:
        return round(LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT), 1)

    def y_of(y: float) -> float:
        return round(HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM), 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"><style>{STYLE}</style>'
    ]
    for y in _ticks(y_low, y_high, 4):
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y_of(y)}" y2="{y_of(y)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y_of(y) + 4}" text-anchor="end">{y:.4g}</text>')
    for x in _ticks(x_low, x_high, 5):
        parts.append(f'<text x="{x_of(x)}" y="{HEIGHT - 8}" text-anchor="middle">{x:.4g}</text>')
    for (name, curve), colour, row in zip(curves.items(), PALETTE, range(len(curves)), strict=False):
        path = " ".join(f"{x_of(x)},{y_of(y)}" for x, y in curve)
        parts.append(f'<polyline class="line" stroke="{colour}" points="{path}"/>')
        parts.append(f'<rect x="330" y="{128 + 13 * row}" width="9" height="9" fill="{colour}"/>')
        parts.append(f'<text x="344" y="{136 + 13 * row}">{name}</text>')
    return "".join(parts) + "</svg>\n"


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, high + 1)


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers inside [low, high], spaced by 1, 2 or 5 times a power of ten."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    return [k * step for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
