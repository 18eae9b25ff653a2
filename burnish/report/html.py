"""report.html: one file that shows what a run did, to open anywhere, now or in ten years.

Headline numbers, curves, where sampler and trainer disagree, the config, what the run had to say, and sample rollouts
with each token shaded by its log-prob. It is made from the run directory alone (metrics.jsonl, samples/, config.yaml, log.txt), loads nothing from the
network, and is a few megabytes at most.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.report import page, svg
from burnish.report.curves import Chart, charts, other_charts, series
from burnish.report.gap import is_profile, profile_charts, worst_table
from burnish.report.rollouts import collect
from burnish.run import metrics
from burnish.run.display import duration
from burnish.run.files import atomic_write

POINTS, OTHER_POINTS = 400, 120
MAX_OTHER_CHARTS = 60
MAX_NOTES = 200
MAX_NOTE = 4_000  # characters of one line


def write_report(run: Path) -> Path:
    """Write `<run>/report.html` and return its path. A folder that is not a run, or has no metrics yet, is a `UserError`."""
    config = run / "config.yaml"
    if not config.is_file():
        raise UserError(f"{run} is not a run: it has no config.yaml")
    rows = metrics.read(run / "metrics.jsonl")
    if not rows:
        raise UserError(f"{run / 'metrics.jsonl'} has no lines yet: there is nothing to report before the first step")
    groups, left_out = collect(run / "samples")
    shown = charts(rows)
    others = [chart for chart in other_charts(rows, shown) if not is_profile(chart.title)][:MAX_OTHER_CHARTS]
    drawn: list[dict[str, object]] = []
    name = run.resolve().name
    body = "\n".join(
        [
            f"<h1>{escape(name)}</h1>",
            headline(rows),
            breakdown(rows),
            f'<h2>Curves</h2><div class="charts">{_figures(shown, POINTS, drawn)}</div>',
            _fold("Every other metric", f'<div class="charts">{_figures(others, OTHER_POINTS, drawn)}</div>')
            if others
            else "",
            gap_part(run / "samples" / "worst_tokens.jsonl", rows, drawn),
            "<h2>Sample rollouts</h2>",
            f'<p class="dim">{escape(left_out)}</p>' if left_out else "",
            page.FILTERS if groups else '<p class="dim">This run has written no samples yet.</p>',
            notes(run / "log.txt"),
            _fold("Config", f"<pre>{escape(config.read_text(errors='replace'))}</pre>"),
        ]
    )
    data = json.dumps({"charts": drawn, "groups": groups}, separators=(",", ":"), allow_nan=False)
    path = run / "report.html"
    atomic_write(path, page.frame(name, body, page.data_block(data)))
    return path


def headline(rows: list[dict[str, Any]]) -> str:
    """Held-out accuracy at the first and the last validation of each mode, steps done, and the time they took."""
    lines = series(rows)
    boxes = []
    for name, points in lines.items():
        if match := re.fullmatch(r"validation/([^/]+)/accuracy", name):
            (first, before), (last, after) = points[0], points[-1]
            label = f"held-out accuracy, {match[1]}"
            if len(points) == 1:
                boxes.append((label, f"{after:.3f}", f"at step {last}"))
            else:
                boxes.append((label, f"{before:.3f} → {after:.3f}", f"step {first} → step {last}"))
    if rewards := lines.get("reward/mean"):
        boxes.append(("mean reward", f"{rewards[0][1]:.3f} → {rewards[-1][1]:.3f}", "first step → last step"))
    boxes.append(("steps", f"{max(row['step'] for row in rows):,}", ""))
    if times := lines.get("time/step_s"):
        total = sum(seconds for _, seconds in times)
        boxes.append(("time in steps", duration(total), f"{total / len(times):.2f} s a step"))
    cells = (
        f'<div>{escape(label)}<b>{escape(value)}</b><span class="dim">{escape(hint)}</span></div>'
        for label, value, hint in boxes
    )
    return f'<div class="numbers">{"".join(cells)}</div>'


def breakdown(rows: list[dict[str, Any]]) -> str:
    """Held-out accuracy by a column of the rows, where the run measured it."""
    cells = []
    for name, points in series(rows).items():
        if match := re.fullmatch(r"validation/([^/]+)/accuracy/(.+)", name):
            values = (match[1], match[2], f"{points[0][1]:.3f}", f"{points[-1][1]:.3f}")
            cells.append("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>")
    if not cells:
        return ""
    head = "<tr><th>mode</th><th>rows</th><th>before</th><th>after</th></tr>"
    return f'<h2>Held-out accuracy by part</h2><div class="scroll"><table>{head}{"".join(cells)}</table></div>'


def gap_part(tokens: Path, rows: list[dict[str, Any]], drawn: list[dict[str, object]]) -> str:
    """Where sampler and trainer disagree, as far as the run has recorded it."""
    profiles, worst = profile_charts(rows), worst_table(tokens)
    if not profiles and not worst:
        return ""
    figures = f'<div class="charts">{_figures(profiles, POINTS, drawn)}</div>' if profiles else ""
    return f"<h2>Sampler against trainer</h2>{figures}{worst}"


def notes(log: Path) -> str:
    """What the run said besides its steps, from log.txt: the last lines, oldest first."""
    if not log.exists():
        return ""
    said = [
        line for line in log.read_text(errors="replace").splitlines() if not re.match(r"\S+ \S+  step \d+/\d+  ", line)
    ]
    if not said:
        return ""
    shown = [line if len(line) <= MAX_NOTE else line[:MAX_NOTE] + " [...]" for line in said[-MAX_NOTES:]]
    if len(said) > len(shown):
        shown.insert(0, f"[{len(said) - len(shown)} earlier lines are in log.txt]")
    return _fold("Notes", f'<pre class="text">{escape(chr(10).join(shown))}</pre>')


def _figures(shown: list[Chart], points: int, drawn: list[dict[str, object]]) -> str:
    figures = []
    for chart in shown:
        image, scale = svg.draw(chart, points)
        figures.append(svg.figure(chart, len(drawn), image))
        drawn.append(scale)
    return "".join(figures)


def _fold(title: str, inner: str) -> str:
    return f"<details><summary><b>{escape(title)}</b></summary>{inner}</details>"
