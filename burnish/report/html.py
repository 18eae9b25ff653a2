"""report.html: one file that shows what a run did, to open anywhere, now or in ten years.

Headline numbers, what the health check said, curves, where sampler and trainer disagree, sample rollouts to search and filter, with
each token coloured by its log-prob, advantage or mismatch, the config, and what the run had to say. It is made from the run
directory alone (metrics.jsonl, samples/, config.yaml, log.txt) and loads nothing from the network.
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
from burnish.report.embed import embed, squeeze
from burnish.report.gap import is_profile, profile_charts, worst_table
from burnish.report.rollouts import collect
from burnish.run import metrics
from burnish.run.checkpoints import Checkpoint, Checkpoints, best_of
from burnish.run.display import duration
from burnish.run.files import atomic_write

POINTS, OTHER_POINTS = 400, 120
KEPT_POINTS, OTHER_KEPT_POINTS = 2000, 400
"""Of a line, in what the script draws when it zooms in."""
MAX_OTHER_CHARTS = 60
MAX_NOTES = 200
MAX_HEALTH = 20
MAX_NOTE = 4_000  # characters of one line


def write_report(run: Path) -> Path:
    """Write `<run>/report.html` and return its path. A folder that is not a run, or has no metrics yet, is a `UserError`."""
    config = run / "config.yaml"
    if not config.is_file():
        raise UserError(f"{run} is not a run: it has no config.yaml")
    rows = metrics.read(run / "metrics.jsonl")
    if not rows:
        raise UserError(
            f"{run / 'metrics.jsonl'} has no lines: the run has not finished a step yet, or the file was cut or deleted"
        )
    drawn: list[dict[str, object]] = []
    name = run.resolve().name
    shown = charts(rows)
    samples, blocks = samples_part(run / "samples")
    best = best_of(Checkpoints(run / "checkpoints", keep_last=1).all())
    parts = [
        (
            "overview",
            "Overview",
            f"<h1>{escape(name)}</h1>{headline(rows, best)}{health(run / 'log.txt')}{breakdown(rows)}",
        ),
        ("curves", "Curves", f"<h2>Curves</h2>{page.static('curves.html')}{_charts(shown, drawn)}"),
        ("other", "", other_part(rows, shown, drawn)),
        ("mismatch", "Sampler against trainer", gap_part(run / "samples" / "worst_tokens.jsonl", rows, drawn)),
        ("samples", "Samples", samples),
        ("notes", "Notes", notes(run / "log.txt")),
        ("config", "Config", _fold("Config", f"<pre>{escape(config.read_text(errors='replace'))}</pre>")),
    ]
    there = [part for part in parts if part[2]]
    body = "\n".join(f'<section id="{place}">{markup}</section>' for place, _, markup in there)
    links = [(place, text) for place, text, _ in there if text]
    data = [page.json_block("charts", json.dumps(drawn, separators=(",", ":"), allow_nan=False)), *blocks]
    path = run / "report.html"
    content = page.frame(name, f"{page.navigation(name, links)}\n<main>\n{body}\n</main>", "\n".join(data))
    atomic_write(path, content)
    return path


def samples_part(folder: Path) -> tuple[str, list[str]]:
    """The explorer of samples, and the blocks of data it reads."""
    groups, left_out = collect(folder)
    if not groups:
        return '<h2>Samples</h2><p class="dim">This run has written no samples yet.</p>', []
    found = embed(groups)
    index = json.dumps(found.index, separators=(",", ":"), allow_nan=False).encode()
    blocks = [page.packed_block("samples-index", squeeze(index))]
    for k, (texts, tokens) in enumerate(found.blocks):
        blocks += [page.packed_block(f"block-x{k}", texts), page.packed_block(f"block-t{k}", tokens)]
    note = f'<p class="dim">{escape(left_out)}</p>' if left_out else ""
    return f"<h2>Samples</h2>{note}{page.static('samples.html')}", blocks


def health(log: Path) -> str:
    """What the health check said, each line with its cause and what to try; or that it had nothing to say."""
    said = [line for line in _lines(log) if "; likely cause: " in line and "; try: " in line]
    if not said:
        return '<div class="health">Health: nothing left its healthy range.</div>'
    items = []
    for line in said[-MAX_HEALTH:]:
        seen, _, rest = line.partition("; likely cause: ")
        cause, _, remedy = rest.partition("; try: ")
        when = re.sub(r"^\S+ \S+  ", "", seen)
        texts = [escape(text[:MAX_NOTE]) for text in (cause, when, remedy)]
        items.append(f'<li><b>{texts[0]}</b><br><span class="dim">{texts[1]}</span><br>Try: {texts[2]}</li>')
    more = (
        f'<p class="dim">The last {MAX_HEALTH} of {len(said)}; all are in log.txt.</p>'
        if len(said) > MAX_HEALTH
        else ""
    )
    return f'<div class="health ill">Health: {len(said)} to look at<ul>{"".join(items)}</ul>{more}</div>'


def other_part(rows: list[dict[str, Any]], shown: list[Chart], drawn: list[dict[str, object]]) -> str:
    """Every metric that no chart above has, folded away."""
    others = [chart for chart in other_charts(rows, shown) if not is_profile(chart.title)][:MAX_OTHER_CHARTS]
    if not others:
        return ""
    return _fold("Every other metric", _charts(others, drawn, OTHER_POINTS, OTHER_KEPT_POINTS))


def headline(rows: list[dict[str, Any]], best: Checkpoint | None = None) -> str:
    """The held-out figure of each mode at its first and last validation, the best checkpoint, steps done, and the time they took."""
    lines = series(rows)
    boxes = []
    for mode, figure in _figures(rows).items():
        points = lines[f"validation/{mode}/{figure}"]
        (first, before), (last, after) = points[0], points[-1]
        label = f"{metrics.FIGURES[figure]}, {mode}"
        if len(points) == 1:
            boxes.append((label, f"{after:.3f}", f"at step {last}"))
        else:
            boxes.append((label, f"{before:.3f} → {after:.3f}", f"step {first} → step {last}"))
    boxes += [("best checkpoint", f"step {best.step}", f"by {best.score_text}")] if best is not None else []
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
    """The held-out figure by a column of the rows, where the run measured it."""
    figures, cells = _figures(rows), []
    for name, points in series(rows).items():
        match = re.fullmatch(r"validation/([^/]+)/([^/]+)/(.+)", name)
        if match and figures.get(match[1]) == match[2]:
            (first, before), (last, after) = points[0], points[-1]
            values = (match[1], match[3], f"{before:.3f} (step {first})", f"{after:.3f} (step {last})")
            cells.append("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>")
    if not cells:
        return ""
    title = " and ".join(dict.fromkeys(metrics.FIGURES[figure].capitalize() for figure in figures.values()))
    head = "<tr><th>mode</th><th>rows</th><th>before</th><th>after</th></tr>"
    return f'<h2>{title} by part</h2><div class="scroll"><table>{head}{"".join(cells)}</table></div>'


def _figures(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The figure of each validation mode: accuracy, or the mean reward where the last validation of the mode has no accuracy."""
    return {mode: figure for row in rows for mode, figure in metrics.held_out_figures(row).items()}


def gap_part(tokens: Path, rows: list[dict[str, Any]], drawn: list[dict[str, object]]) -> str:
    """Where sampler and trainer disagree, as far as the run has recorded it."""
    profiles, worst = profile_charts(rows), worst_table(tokens)
    if not profiles and not worst:
        return ""
    figures = _charts(profiles, drawn) if profiles else ""
    return f"<h2>Sampler against trainer</h2>{figures}{worst}"


def notes(log: Path) -> str:
    """What the run said besides its steps, from log.txt: the last lines, oldest first."""
    said = [line for line in _lines(log) if not re.match(r"\S+ \S+  step \d+/\d+  ", line)]
    if not said:
        return ""
    shown = [line if len(line) <= MAX_NOTE else line[:MAX_NOTE] + " [...]" for line in said[-MAX_NOTES:]]
    if len(said) > len(shown):
        shown.insert(0, f"[{len(said) - len(shown)} earlier lines are in log.txt]")
    return _fold("Notes", f'<pre class="text">{escape(chr(10).join(shown))}</pre>')


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def _charts(shown: list[Chart], drawn: list[dict[str, object]], points: int = POINTS, kept: int = KEPT_POINTS) -> str:
    figures = []
    for chart in shown:
        image, scale = svg.draw(chart, points, kept)
        figures.append(svg.figure(chart, len(drawn), image))
        drawn.append(scale)
    return f'<div class="charts">{"".join(figures)}</div>'


def _fold(title: str, inner: str) -> str:
    return f"<details><summary><b>{escape(title)}</b></summary>{inner}</details>"
