"""Where sampler and trainer disagree: charts of the log-prob gap by position and by probability, and a table of the worst tokens.

The profiles are metrics such as `mismatch/by_position/3/abs`; a bucket is named by its lower bound. The tokens come from
samples/worst_tokens.jsonl. A run without both has no such section in its report.
"""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path
from typing import Any

from burnish.report.curves import Chart
from burnish.run.samples import read_worst_tokens

PROFILE_METRIC = r"mismatch/by_(position|probability)/([^/]+)/(abs|signed|tokens)"
PROFILE_TITLES = {
    "position": "Mean log-prob gap by position in the completion",
    "probability": "Mean log-prob gap by the sampler's probability",
}
MAX_AXIS_LABELS = 10  # names that fit under an axis
MAX_CONTEXT_CHARS = 120  # characters kept of what stands around a token
TABLE_COLUMNS = "step|prompt|sample|position|in context|token id|sampler|trainer|gap|weight"
TABLE_NOTE = (
    "The tokens on which sampler and trainer disagree most, in the first step that has any, in that of the largest gap and "
    "in the last: the log-prob each gave, and trainer less sampler. All steps are in samples/worst_tokens.jsonl."
)

Row = dict[str, Any]


def is_profile(name: str) -> bool:
    """Whether a metric is one bucket of a profile. `profile_charts` shows those."""
    return re.fullmatch(PROFILE_METRIC, name) is not None


def profile_charts(rows: list[Row]) -> list[Chart]:
    """Return one chart per profile: the mean |gap| of each bucket, at the first and the last step that have the profile."""
    charts = []
    for kind, title in PROFILE_TITLES.items():
        found = [(row["step"], buckets) for row in rows if (buckets := _buckets(row, kind))]
        if not found:
            continue
        shown = dict((found[0], found[-1]))
        ends = sorted({end for buckets in shown.values() for end in buckets}, key=float)
        series = {
            f"step {step}": [
                (ends.index(end), values["abs"]) for end, values in sorted(buckets.items(), key=_bucket_start)
            ]
            for step, buckets in shown.items()
        }
        last = found[-1][1]
        hints = [f"{_bucket_text(kind, end)}: {last.get(end, {}).get('tokens', 0):,.0f} tokens" for end in ends]
        charts.append(Chart(title, series, places=_axis_labels(ends), hints=hints))
    return charts


def worst_tokens_table(path: Path) -> str:
    """Return a table of the worst tokens of the first step, the step with the largest gap, and the last; empty if there are none."""
    rows = read_worst_tokens(path)
    if not rows:
        return ""
    worst = max(rows, key=lambda row: abs(row["gap"]))
    chosen = {row["step"] for row in (rows[0], worst, rows[-1])}
    lines = "".join(_table_row(row) for row in rows if row["step"] in chosen)
    head = "".join(f"<th>{name}</th>" for name in TABLE_COLUMNS.split("|"))
    return f'<p class="dim">{TABLE_NOTE}</p><div class="scroll"><table><tr>{head}</tr>{lines}</table></div>'


def visible_text(text: str) -> str:
    """Return text on one line, with line breaks and control characters as escape sequences."""
    return json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')


def _buckets(row: Row, kind: str) -> dict[str, dict[str, float]]:
    """Return the buckets of one profile in one step's metrics, by their lower bound."""
    found: dict[str, dict[str, float]] = {}
    for name, value in row.items():
        if (match := re.fullmatch(PROFILE_METRIC, name)) and match[1] == kind:
            found.setdefault(match[2], {})[match[3]] = value
    return found


def _bucket_start(item: tuple[str, Any]) -> float:
    return float(item[0])


def _axis_labels(ends: list[str]) -> list[str]:
    """Return the labels under the axis. If there are many, every second one is empty."""
    return [end if len(ends) <= MAX_AXIS_LABELS or k % 2 == 0 else "" for k, end in enumerate(ends)]


def _bucket_text(kind: str, end: str) -> str:
    """Describe a bucket in words."""
    low = float(end)
    if kind == "position":
        return f"position {end}" if low == 0 else f"positions {end} to {2 * int(end)}"
    return f"probability {low:g} to {10 * low:g}" if low else "probability below 1e-06"


def _table_row(row: Row) -> str:
    """Return one row of the table. Text that the model wrote is escaped."""
    before, text, after = (visible_text(row[name] or "") for name in ("before", "text", "after"))
    context = f"<code>{escape(before[-MAX_CONTEXT_CHARS:])}<mark>{escape(text[:MAX_CONTEXT_CHARS])}</mark>{escape(after[:MAX_CONTEXT_CHARS])}</code>"
    weight = "" if row["weight"] is None else f"{row['weight']:.3g}"
    cells = [
        *(escape(str(row[name])) for name in ("step", "group", "sample", "position")),
        context,
        str(row["token"]),
        *(f"{row[name]:.4g}" for name in ("behaviour_logp", "trainer_logp", "gap")),
        weight,
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
