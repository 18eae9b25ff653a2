"""What the live view shows, as a function of the run's numbers and the terminal's width: nothing in it is ever wider than that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

BARS = "▁▂▃▄▅▆▇█"
NARROW_BAR, WIDE_BAR = 8, 40


@dataclass
class View:
    """What there is to show."""

    title: str = ""
    step: int = 0
    total: int = 0
    clock: str = ""
    """Time gone and time left, in words."""
    values: list[tuple[str, str]] = field(default_factory=list)
    history: list[float] = field(default_factory=list)
    """Rewards or losses so far, the last at the end."""
    history_name: str = ""
    phase: str = ""
    can_draw: bool = True
    """Whether the terminal has more letters than ASCII."""
    held_out: str = ""
    """What the last validation measured, and at which step: a line of its own, since it is older than the numbers."""


def spark(values: Sequence[float], width: int) -> str:
    """The course of a number in `width` letters at most: each the mean of a stretch, between the lowest and the highest."""
    known = [value for value in values if math.isfinite(value)]
    count = min(width, len(known))
    if count < 2:
        return ""
    bounds = [round(k * len(known) / count) for k in range(count + 1)]
    means = [sum(known[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(BARS[min(7, int((mean - low) / span * 8))] for mean in means)


class Panel:
    """A `View` as rich draws it."""

    def __init__(self, view: View) -> None:
        self.view = view

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from self.lines(options.max_width)

    def lines(self, width: int) -> list[Any]:
        """Texts of rich, each a line that fits."""
        view = self.view
        found = [_fitting(view.title, width, "bold"), self._progress(width), *self._numbers(width)]
        if view.held_out:
            found.append(_fitting(f" {view.held_out}", width, "cyan"))
        room = min(60, width - len(view.history_name) - 3)
        if view.can_draw and room >= 10 and (drawn := spark(view.history, room)):
            found.append(_joined([(f" {view.history_name} ", "dim"), (drawn, "green")]))
        if view.phase:
            found.append(_fitting(f" {view.phase}", width, "dim italic"))
        return found

    def _progress(self, width: int) -> Any:
        """A bar where there is room for one, the steps, the time as far as it fits."""
        view = self.view
        steps = f"{view.step}/{view.total}"
        room = width - len(steps) - len(view.clock) - 3
        parts = []
        if room >= NARROW_BAR:
            bar = min(room, WIDE_BAR)
            done = min(bar, bar * view.step // max(1, view.total))
            full, empty = ("━", "─") if view.can_draw else ("#", ".")
            parts = [(full * done, "green"), (empty * (bar - done), "dim"), (" ", "")]
        line = _joined([*parts, (steps, "bold"), (f" {view.clock}", "dim")])
        line.truncate(width, overflow="ellipsis" if view.can_draw else "crop")
        return line

    def _numbers(self, width: int) -> list[Any]:
        """The numbers, as many on a line as fit."""
        lines: list[list[tuple[str, str]]] = [[]]
        used = 0
        for label, value in self.view.values:
            needed = 1 + len(label) + 1 + len(value) + (1 if used else 0)
            if used and used + needed > width:
                lines.append([])
                used = 0
                needed -= 1
            lines[-1] += [(f"{'  ' if used else ' '}{label} ", "dim"), (value, "cyan")]
            used += needed
        texts = [_joined(parts) for parts in lines if parts]
        for text in texts:
            text.truncate(width)
        return texts


def _joined(parts: Sequence[tuple[str, str]]) -> Any:
    from rich.text import Text

    return Text.assemble(*parts, no_wrap=True, end="\n")


def _fitting(text: str, width: int, style: str) -> Any:
    """One line of the text, cut where it is too wide; letters of double width count twice."""
    from rich.text import Text

    line = Text(text.replace("\n", " "), style=style, no_wrap=True, end="\n")
    line.truncate(width, overflow="ellipsis")
    return line
