"""The progress display: a live panel in a terminal or a notebook cell, plain lines elsewhere, and log.txt in all cases.

A terminal gets rich's live view. A notebook gets the same panel as text that is updated in place. A pipe or a file gets at
most one line per step: every step while steps are slow, one line every few seconds when they are fast, and always the first
and the last. log.txt gets every step and every note. A display never stops a run. If the terminal or rich fails, it reports
this once and falls back to plain lines. A note may contain text of a model, so control characters are shown as escapes and
never reach the terminal.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from burnish.config.yaml_text import printable
from burnish.run.metrics import HELD_OUT_FIGURES, held_out_figures
from burnish.run.notebook_cell import NotebookCell, open_cell

SPARK_BARS = "▁▂▃▄▅▆▇█"
MIN_BAR_WIDTH, MAX_BAR_WIDTH = 8, 40
LINE_EVERY_S = 2.0
PHASE_EVERY_S = 30.0
FEW_STEPS = 20
"""A run with at most this many steps prints every step."""
SPEED_WINDOW = 50
"""Number of recent steps that the remaining time is estimated from. Early steps may be much slower."""
MAX_HISTORY = 2000
CELL_WIDTH = 100
"""Characters of a line in a notebook."""


@dataclass
class ProgressView:
    """The content of the live panel."""

    title: str = ""
    step: int = 0
    total: int = 0
    clock: str = ""
    """Elapsed and remaining time, as text."""
    values: list[tuple[str, str]] = field(default_factory=list)
    history: list[float] = field(default_factory=list)
    """Rewards or losses so far, oldest first."""
    history_name: str = ""
    phase: str = ""
    can_draw: bool = True
    """Whether the terminal can show characters beyond ASCII."""
    held_out: str = ""
    """The last validation result and its step. It has a separate line, because it is older than the other numbers."""


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve with at most `width` characters. Each is the mean of one window, scaled between the lowest and the highest."""
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 2:
        return ""
    bounds = [round(k * len(finite) / count) for k in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low, high = min(means), max(means)
    span = high - low or 1.0
    return "".join(SPARK_BARS[min(7, int((mean - low) / span * 8))] for mean in means)


class ProgressPanel:
    """Draws a `ProgressView` with rich. No line is wider than the terminal."""

    def __init__(self, view: ProgressView) -> None:
        self.view = view

    def __rich_console__(self, console: Any, options: Any) -> Any:
        yield from self.lines(options.max_width)

    def lines(self, width: int) -> list[Any]:
        """Return the lines as rich texts."""
        view = self.view
        lines = [_fitted_line(view.title, width, "bold"), self._progress(width), *self._numbers(width)]
        if view.held_out:
            lines.append(_fitted_line(f" {view.held_out}", width, "cyan"))
        spark_width = min(60, width - len(view.history_name) - 3)
        if view.can_draw and spark_width >= 10 and (drawn := sparkline(view.history, spark_width)):
            lines.append(_text_line([(f" {view.history_name} ", "dim"), (drawn, "green")]))
        if view.phase:
            lines.append(_fitted_line(f" {view.phase}", width, "dim italic"))
        return lines

    def _progress(self, width: int) -> Any:
        """Return a progress bar if it fits, the steps, and as much of the time as fits."""
        view = self.view
        steps = f"{view.step}/{view.total}"
        free_width = width - len(steps) - len(view.clock) - 3
        parts = []
        if free_width >= MIN_BAR_WIDTH:
            bar = min(free_width, MAX_BAR_WIDTH)
            done = min(bar, bar * view.step // max(1, view.total))
            full, empty = ("━", "─") if view.can_draw else ("#", ".")
            parts = [(full * done, "green"), (empty * (bar - done), "dim"), (" ", "")]
        line = _text_line([*parts, (steps, "bold"), (f" {view.clock}", "dim")])
        line.truncate(width, overflow="ellipsis" if view.can_draw else "crop")
        return line

    def _numbers(self, width: int) -> list[Any]:
        """Return the numbers, as many per line as fit."""
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
        texts = [_text_line(parts) for parts in lines if parts]
        for text in texts:
            text.truncate(width)
        return texts


def _text_line(parts: Sequence[tuple[str, str]]) -> Any:
    from rich.text import Text

    return Text.assemble(*parts, no_wrap=True, end="\n")


def _fitted_line(text: str, width: int, style: str) -> Any:
    """Return the text on one line, cut to the width. Double-width characters count twice."""
    from rich.text import Text

    line = Text(text.replace("\n", " "), style=style, no_wrap=True, end="\n")
    line.truncate(width, overflow="ellipsis")
    return line


def headline_numbers(values: dict[str, Any]) -> dict[str, float]:
    """Return the main numbers of a training step under short names."""
    names = {
        "reward": ("reward/mean",),
        "loss": ("sft/loss", "reward_model/loss", "preference/loss", "loss"),
        "length": ("rollout/length_mean",),
        "entropy": ("actor/entropy",),
        "kl": ("actor/kl_ref", "actor/kl_reward"),
        "mismatch": ("mismatch/mean",),
        "s/step": ("time/step_s",),
        "tokens/s": ("time/tokens_per_s",),
        "mfu": ("performance/mfu",),
    }
    found = {label: next((values[n] for n in options if n in values), None) for label, options in names.items()}
    return {label: float(value) for label, value in found.items() if isinstance(value, int | float)}


def held_out_text(step: int, values: dict[str, Any]) -> str:
    """Return `held-out accuracy 0.412 at step 50 (greedy)` for a step with a validation; else an empty string."""
    for mode, figure in held_out_figures(values).items():
        value = values[f"validation/{mode}/{figure}"]
        return f"{HELD_OUT_FIGURES[figure]} {value:.3f} {'before step 1' if step == 0 else f'at step {step}'} ({mode})"
    return ""


def format_duration(seconds: float) -> str:
    """Format seconds as `42s`, `3m07s` or `2h05m`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def format_number(label: str, value: float) -> str:
    """Format a value with the precision for its label."""
    form = {"mfu": ".1%", "tokens/s": ",.0f", "length": ".1f", "mismatch": ".1g", "kl": ".2g", "s/step": ".3g"}
    return format(value, form.get(label, ".3f"))


class Display:
    """Shows the progress of one run. Use it in a `with` block, so that the terminal is always restored."""

    def __init__(self, log: Path, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._log: Path | None = log
        self._stream: TextIO | None = stream or sys.stdout
        self._clock = clock
        self._live: Any = None
        self._cell: NotebookCell | None = None
        self._title = ""
        self._total = self._first = self._step = 0
        self._started = self._last_line = clock()
        self._values: dict[str, float] = {}
        self._held_out = ""  # of the last validation
        self._seen: deque[tuple[int, float]] = deque([(0, self._started)], maxlen=SPEED_WINDOW)
        self._history: deque[float] = deque(maxlen=MAX_HISTORY)
        self._phase = ""
        self._unshown = ""
        self._is_first = True

    def start(self, title: str, total_steps: int, first_step: int = 0) -> None:
        """Begin a stage of `total_steps`. A resumed run has done `first_step` of them before."""
        self.stop()
        title = printable(title)
        self._title, self._total, self._first, self._step = title, total_steps, first_step, first_step
        self._values, self._phase, self._started, self._is_first = {}, "", self._clock(), True
        self._held_out = ""
        self._seen.clear()
        self._seen.append((first_step, self._started))
        self._history.clear()
        self.note(title if first_step == 0 else f"{title}, going on after step {first_step} of {total_steps}")
        if self._is_terminal():
            self._begin_live()
        elif self._stream is sys.stdout:
            self._cell = open_cell()
            self._show_cell()

    def step(self, step: int, values: dict[str, Any]) -> None:
        """Show a finished step."""
        self._values = headline_numbers(values)  # a new dictionary, because rich's thread may be reading the old one
        self._step, self._phase = step, ""
        if step > self._seen[-1][0]:
            self._seen.append((step, self._clock()))
        if self._followed in self._values:
            self._history.append(self._values[self._followed])
        measured = held_out_text(step, values)
        self._held_out = measured or self._held_out
        line = self._line(measured)
        self._write_log(line)
        if self._cell is not None:
            self._show_cell()
        if self._live is not None or self._cell is not None:
            return
        now = self._clock()
        is_first, self._is_first = self._is_first, False
        is_due = self._total <= FEW_STEPS or step >= self._total or now - self._last_line >= LINE_EVERY_S
        if is_first or measured or is_due:
            self._unshown = ""
            self._print(line)
        else:
            self._unshown = line

    def phase(self, text: str, of: str | None = None) -> None:
        """Show the current activity, such as `rollout 312/512`. The call is cheap and may be made often.

        It belongs to the next step, unless `of` names something else, such as `validation before step 1`.
        """
        text = printable(text)
        self._phase = text if of is None else f"{of}: {text}"
        if self._cell is not None:
            self._show_cell()
        elif self._live is None and self._clock() - self._last_line >= PHASE_EVERY_S:
            line = f"{of or f'step {self._step + 1}/{self._total}'}: {text}"
            self._write_log(line)
            self._print(line)

    def note(self, text: str) -> None:
        """Print a line above the display and in log.txt."""
        text = printable(text)
        self._write_log(text)
        if self._live is not None:
            console = self._live.console
            self._with_rich(lambda: console.print(text, markup=False, highlight=False, soft_wrap=True))
        if self._live is None:
            self._print(text)

    def stop(self) -> None:
        """End the stage: print a last step that was not shown, and restore the terminal. Safe to call twice."""
        live, self._live = self._live, None
        cell, self._cell = self._cell, None
        if cell is not None:
            self._phase = ""
            self._with_rich(lambda: cell.show(self._panel_text, is_final=True))
        if live is not None:
            try:
                live.stop()
            except Exception as error:  # noqa: BLE001 -- no failure of rich in an unusual terminal may stop the run
                self._write_log(f"live display: {type(error).__name__}: {error}")
            if self._step > self._first:
                self._print(self._line(self._held_out))
        elif self._unshown:
            self._print(self._unshown)
        self._unshown = ""

    def __enter__(self) -> Display:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _line(self, measured: str) -> str:
        """Return the line of the current step: its numbers, then the validation result with its own step."""
        if self._step == 0:
            return measured or f"step 0/{self._total}"
        shown = [f"{label} {format_number(label, value)}" for label, value in self._values.items()]
        left = self._time_left()
        ending = [f"left {format_duration(left)}"] if left else []
        return "  ".join([f"step {self._step}/{self._total}", *shown, *ending]) + (
            f"  | {measured}" if measured else ""
        )

    def _time_left(self) -> float | None:
        if len(self._seen) < 2 or self._step >= self._total:
            return None
        (first, began), (last, ended) = self._seen[0], self._seen[-1]
        return max(0.0, (ended - began) / (last - first) * (self._total - last) - (self._clock() - ended))

    @property
    def _followed(self) -> str:
        """The number that the sparkline shows."""
        return "reward" if "reward" in self._values else "loss"

    def _is_terminal(self) -> bool:
        return self._stream is not None and self._stream.isatty() and os.environ.get("TERM") != "dumb"

    def _print(self, text: str) -> None:
        self._last_line = self._clock()
        if self._stream is None:
            return
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding) + "\n")
            self._stream.flush()
        except (OSError, ValueError) as error:  # the pipe's reader ended, or the stream was closed
            self._stream = None
            self._write_log(
                f"the output cannot be written any more ({error}); the run goes on, this file has every line"
            )

    def _write_log(self, text: str) -> None:
        if self._log is None:
            return
        try:
            with open(self._log, "a", encoding="utf-8", errors="replace") as file:
                file.write(f"{datetime.now().isoformat(sep=' ', timespec='seconds')}  {text}\n")
        except OSError as error:
            path, self._log = self._log, None
            self.note(f"cannot write {path} ({error.strerror}); the run goes on without it")

    def _begin_live(self) -> None:
        def begin() -> None:
            from rich.console import Console
            from rich.live import Live

            live = Live(
                console=Console(file=self._stream), get_renderable=self._render, refresh_per_second=4, transient=True
            )
            live.start()
            self._live = live

        self._with_rich(begin)

    def _show_cell(self) -> None:
        """Show the panel in the notebook cell, if there is one."""
        if (cell := self._cell) is not None:
            self._with_rich(lambda: cell.show(self._panel_text))

    def _panel_text(self) -> str:
        return "\n".join(line.plain for line in self._render().lines(CELL_WIDTH))

    def _with_rich(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 -- no failure of rich in an unusual terminal may stop the run
            self.stop()
            self.note(f"the live display failed ({type(error).__name__}: {error}); going on with plain lines")

    def _render(self) -> Any:
        """Build the panel. rich's thread calls this a few times per second; it reads plain fields that the run sets."""
        left = self._time_left()
        encoding = (getattr(self._stream, "encoding", None) or "utf-8").lower()
        view = ProgressView(
            title=self._title,
            step=self._step,
            total=self._total,
            clock=format_duration(self._clock() - self._started) + (f", {format_duration(left)} left" if left else ""),
            values=[(label, format_number(label, value)) for label, value in self._values.items()],
            history=list(self._history),
            history_name=self._followed,
            phase=self._phase,
            can_draw=encoding.startswith("utf"),
            held_out=self._held_out,
        )
        return ProgressPanel(view)
