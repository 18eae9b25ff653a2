"""report.html: one self-contained HTML file that shows what a run did.

It has headline numbers, the lines of the health check, curves, the mismatch between sampler and trainer, searchable samples
with each token coloured by log-prob, advantage or mismatch, the config, and the run's notes. It is made from the run
directory alone (metrics.jsonl, samples/, config.yaml, log.txt) and loads nothing from the network.

No completion can become markup. Text of the model is in the page as compressed base64 or as JSON in a data block, and the
script shows it only as text; tables of single tokens escape it. As a second defence, the content security policy allows
this one script by its hash and forbids every connection.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.report import curves
from burnish.report.curves import Chart, main_charts, metric_series, other_charts
from burnish.report.embedded_samples import collect_groups, compress_base64, embed_samples
from burnish.report.mismatch_charts import is_profile, profile_charts, worst_tokens_table
from burnish.run import metrics
from burnish.run.checkpoint.checkpoints import Checkpoint, Checkpoints, best_of
from burnish.run.display import format_duration
from burnish.run.durable_files import atomic_write
from burnish.run.samples import EventExamplesFile

POINTS, OTHER_POINTS = 400, 120
"""Points per line in the SVG of a main chart and of any other chart."""
KEPT_POINTS, OTHER_KEPT_POINTS = 2000, 400
"""Points per line that the script has when it zooms in."""
MAX_OTHER_CHARTS = 60
MAX_NOTES = 200
MAX_HEALTH_LINES = 20
MAX_LINE_CHARS = 4_000
SCRIPTS = (
    "base.js",
    "scale.js",
    "charts.js",
    "store.js",
    "tokens.js",
    "list.js",
    "filter.js",
    "episode.js",
    "samples.js",
)


@cache
def static_file(name: str) -> str:
    """Return the content of a file in `static/`."""
    return files("burnish.report").joinpath("static", name).read_text(encoding="utf-8")


def page_script() -> str:
    """Return the whole script of the page."""
    return "".join(static_file(name) for name in SCRIPTS)


def html_document(title: str, body: str, data: str) -> str:
    """Return the whole document. `body` is escaped markup; `data` holds blocks from `json_block` and `packed_block`."""
    code = page_script()
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{static_file('style.css')}</style></head>\n<body>\n{body}\n"
        f"{data}\n<script>{code}</script>\n</body></html>\n"
    )


def json_block(name: str, text: str) -> str:
    """Return JSON in a script element. No character of it can end the element or begin a comment."""
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="{name}">{safe}</script>'


def packed_block(name: str, letters: str) -> str:
    """Return the output of `compress_base64` in a script element."""
    return f'<script type="application/octet-stream" id="{name}">{letters}</script>'


def navigation_bar(title: str, parts: list[tuple[str, str]]) -> str:
    """Return a bar with the run's name and a link to each section."""
    links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in parts)
    return f'<nav aria-label="parts of this page"><div><b>{escape(title)}</b>{links}</div></nav>'


def write_report(run: Path) -> Path:
    """Write `<run>/report.html` and return its path. A folder that is no run, or has no metrics yet, is a `UserError`."""
    config = run / "config.yaml"
    if not config.is_file():
        raise UserError(f"{run} is not a run: it has no config.yaml")
    rows = metrics.read_metrics(run / "metrics.jsonl")
    if not rows:
        raise UserError(
            f"{run / 'metrics.jsonl'} has no lines: the run has not finished a step yet, or the file was cut or deleted"
        )
    drawn: list[dict[str, object]] = []
    name = run.resolve().name
    shown = main_charts(rows)
    samples, blocks = samples_section(run / "samples")
    best = best_of(Checkpoints(run / "checkpoints", keep_last=1).all())
    sections = [
        (
            "overview",
            "Overview",
            f"<h1>{escape(name)}</h1>{headline_section(rows, best)}{health_section(run / 'log.txt')}{breakdown_section(rows)}",
        ),
        ("curves", "Curves", f"<h2>Curves</h2>{static_file('curves.html')}{_charts_html(shown, drawn)}"),
        ("other", "", other_metrics_section(rows, shown, drawn)),
        ("mismatch", "Sampler against trainer", mismatch_section(run / "samples" / "worst_tokens.jsonl", rows, drawn)),
        ("events", "Events", events_section(run / "samples" / "events.jsonl", rows)),
        ("samples", "Samples", samples),
        ("notes", "Notes", notes_section(run / "log.txt")),
        ("config", "Config", _details("Config", f"<pre>{escape(config.read_text(errors='replace'))}</pre>")),
    ]
    sections = [section for section in sections if section[2]]
    body = "\n".join(f'<section id="{anchor}">{markup}</section>' for anchor, _, markup in sections)
    links = [(anchor, text) for anchor, text, _ in sections if text]
    data = [json_block("charts", json.dumps(drawn, separators=(",", ":"), allow_nan=False)), *blocks]
    path = run / "report.html"
    content = html_document(name, f"{navigation_bar(name, links)}\n<main>\n{body}\n</main>", "\n".join(data))
    atomic_write(path, content)
    return path


def samples_section(folder: Path) -> tuple[str, list[str]]:
    """Return the sample explorer, and the data blocks that it reads."""
    groups, left_out = collect_groups(folder)
    if not groups:
        return '<h2>Samples</h2><p class="dim">This run has written no samples yet.</p>', []
    found = embed_samples(groups)
    index = json.dumps(found.index, separators=(",", ":"), allow_nan=False).encode()
    blocks = [packed_block("samples-index", compress_base64(index))]
    for k, (texts, tokens) in enumerate(found.blocks):
        blocks += [packed_block(f"block-x{k}", texts), packed_block(f"block-t{k}", tokens)]
    note = f'<p class="dim">{escape(left_out)}</p>' if left_out else ""
    return f"<h2>Samples</h2>{note}{static_file('samples.html')}", blocks


def health_section(log: Path) -> str:
    """Return the lines of the health check, each with its cause and remedy, or a sentence that there are none."""
    said = [line for line in _lines(log) if "; likely cause: " in line and "; try: " in line]
    if not said:
        return '<div class="health">Health: nothing left its healthy range.</div>'
    items = []
    for line in said[-MAX_HEALTH_LINES:]:
        seen, _, rest = line.partition("; likely cause: ")
        cause, _, remedy = rest.partition("; try: ")
        when = re.sub(r"^\S+ \S+  ", "", seen)
        texts = [escape(text[:MAX_LINE_CHARS]) for text in (cause, when, remedy)]
        items.append(f'<li><b>{texts[0]}</b><br><span class="dim">{texts[1]}</span><br>Try: {texts[2]}</li>')
    more = (
        f'<p class="dim">The last {MAX_HEALTH_LINES} of {len(said)}; all are in log.txt.</p>'
        if len(said) > MAX_HEALTH_LINES
        else ""
    )
    return f'<div class="health ill">Health: {len(said)} to look at<ul>{"".join(items)}</ul>{more}</div>'


def other_metrics_section(rows: list[dict[str, Any]], shown: list[Chart], drawn: list[dict[str, object]]) -> str:
    """Return a folded section with every metric that is in no other chart."""
    others = [chart for chart in other_charts(rows, shown) if not is_profile(chart.title)][:MAX_OTHER_CHARTS]
    if not others:
        return ""
    return _details("Every other metric", _charts_html(others, drawn, OTHER_POINTS, OTHER_KEPT_POINTS))


def headline_section(rows: list[dict[str, Any]], best: Checkpoint | None = None) -> str:
    """Return the headline boxes: held-out figure of each mode at its first and last validation, best checkpoint, steps, time."""
    lines = metric_series(rows)
    boxes = []
    for mode, figure in _held_out_figures(rows).items():
        points = lines[f"validation/{mode}/{figure}"]
        (first, before), (last, after) = points[0], points[-1]
        label = f"{metrics.HELD_OUT_FIGURES[figure]}, {mode}"
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
        boxes.append(("time in steps", format_duration(total), f"{total / len(times):.2f} s a step"))
    cells = (
        f'<div>{escape(label)}<b>{escape(value)}</b><span class="dim">{escape(hint)}</span></div>'
        for label, value, hint in boxes
    )
    return f'<div class="numbers">{"".join(cells)}</div>'


def breakdown_section(rows: list[dict[str, Any]]) -> str:
    """Return a table of the held-out figure by a column of the validation rows; empty if the run has none."""
    figures, cells = _held_out_figures(rows), []
    for name, points in metric_series(rows).items():
        match = re.fullmatch(r"validation/([^/]+)/([^/]+)/(.+)", name)
        if match and figures.get(match[1]) == match[2]:
            (first, before), (last, after) = points[0], points[-1]
            values = (match[1], match[3], f"{before:.3f} (step {first})", f"{after:.3f} (step {last})")
            cells.append("<tr>" + "".join(f"<td>{escape(value)}</td>" for value in values) + "</tr>")
    if not cells:
        return ""
    title = " and ".join(dict.fromkeys(metrics.HELD_OUT_FIGURES[figure].capitalize() for figure in figures.values()))
    head = "<tr><th>mode</th><th>rows</th><th>before</th><th>after</th></tr>"
    return f'<h2>{title} by part</h2><div class="scroll"><table>{head}{"".join(cells)}</table></div>'


def _held_out_figures(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return the figure of each validation mode: accuracy, or mean reward if the mode's last validation has no accuracy."""
    return {mode: figure for row in rows for mode, figure in metrics.held_out_figures(row).items()}


def mismatch_section(tokens: Path, rows: list[dict[str, Any]], drawn: list[dict[str, object]]) -> str:
    """Return the mismatch profiles and the worst tokens; empty if the run has neither."""
    profiles, worst = profile_charts(rows), worst_tokens_table(tokens)
    if not profiles and not worst:
        return ""
    figures = _charts_html(profiles, drawn) if profiles else ""
    return f"<h2>Sampler against trainer</h2>{figures}{worst}"


def events_section(path: Path, rows: list[dict[str, Any]]) -> str:
    """Return what went wrong in episodes: each kind with its number in all metrics and its first example; empty if nothing did."""
    cells = []
    for event in EventExamplesFile(path).read():
        name = f"environment/{event['kind']}"
        number = sum(value for row in rows for key, value in row.items() if key == name or key.endswith(f"/{name}"))
        where = f"step {event['step']}, {event['sample']}, {event['what']}"
        traceback = _details("traceback", f'<pre class="text">{escape(event["traceback"])}</pre>')
        example = f"{escape(event['message'])}{traceback if event['traceback'] else ''}"
        cells.append(
            f"<tr><td>{escape(event['kind'])}</td><td>{number:g}</td><td>{escape(where)}</td><td>{example}</td></tr>"
        )
    if not cells:
        return ""
    head = "<tr><th>kind</th><th>number</th><th>first in</th><th>example</th></tr>"
    return f'<h2>What went wrong in episodes</h2><div class="scroll"><table>{head}{"".join(cells)}</table></div>'


def notes_section(log: Path) -> str:
    """Return the last lines of log.txt that are not about steps, oldest first."""
    said = [line for line in _lines(log) if not re.match(r"\S+ \S+  step \d+/\d+  ", line)]
    if not said:
        return ""
    shown = [line if len(line) <= MAX_LINE_CHARS else line[:MAX_LINE_CHARS] + " [...]" for line in said[-MAX_NOTES:]]
    if len(said) > len(shown):
        shown.insert(0, f"[{len(said) - len(shown)} earlier lines are in log.txt]")
    return _details("Notes", f'<pre class="text">{escape(chr(10).join(shown))}</pre>')


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines() if log.exists() else []


def _charts_html(
    shown: list[Chart], drawn: list[dict[str, object]], points: int = POINTS, kept: int = KEPT_POINTS
) -> str:
    figures = []
    for chart in shown:
        image, scale = curves.draw_svg(chart, points, kept)
        figures.append(curves.figure_html(chart, len(drawn), image))
        drawn.append(scale)
    return f'<div class="charts">{"".join(figures)}</div>'


def _details(title: str, inner: str) -> str:
    return f"<details><summary><b>{escape(title)}</b></summary>{inner}</details>"
