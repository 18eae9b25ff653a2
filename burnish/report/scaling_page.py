"""The chart and the page of `burnish eval --scaling`: one HTML file without scripts, made from the folder's files alone.

Texts of a model are escaped, and the content security policy allows no script and no connection.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from burnish.evaluation.completions import read_completions
from burnish.evaluation.output_paths import read_result
from burnish.evaluation.result import Row
from burnish.evaluation.scaling import Scaling, envelope, scaling_json, scaling_of_json
from burnish.evaluation.strategies.search_tree import SEARCH
from burnish.report.html_report import static_file
from burnish.report.scaling_files import (
    HTML_NAME,
    JSON_NAME,
    POINT_COLUMNS,
    POLICY,
    SVG_NAME,
    no_scaling,
    point_rows,
    read_scaling,
)
from burnish.report.svg_chart import svg_chart
from burnish.run.durable_files import atomic_write

MAX_TREES = 6
"""Searches of each file that the page shows as trees."""
MAX_NODES = 400
"""Nodes of one tree that the page shows."""
MAX_TEXT = 2000
"""Characters of a node that the page shows."""
STYLE = (
    "table{border-collapse:collapse;font-size:0.86em;font-variant-numeric:tabular-nums}td,th{padding:2px 10px 2px 0;text-align:left;"
    "border-bottom:1px solid var(--edge);white-space:nowrap}figure svg{max-width:760px}figure text{fill:var(--fg)}"
    ".tree ul{list-style:none;margin:0;padding-left:1.2em;border-left:1px solid var(--edge)}.tree pre{margin:2px 0;white-space:pre-wrap;"
    "overflow-wrap:anywhere;font-size:0.84em}.tree .chosen>pre{background:var(--good-bg);border-left:3px solid var(--good);padding-left:6px}"
    ".scroll{overflow-x:auto}"
)


def scaling_chart(scaling: Scaling) -> str:
    """Return the chart: accuracy with its interval against mean tokens a question, and the envelope behind."""
    curves: dict[str, list[list[float]]] = {}
    bars: dict[str, list[tuple[float, float, float]]] = {}
    for point in scaling.points:
        curves.setdefault(point.name, []).append([max(point.tokens, 1.0), point.accuracy.mean])
        bars.setdefault(point.name, []).append((max(point.tokens, 1.0), point.accuracy.low, point.accuracy.high))
    best = [[max(point.tokens, 1.0), point.accuracy.mean] for point in envelope(scaling.points)]
    title = f"{scaling.name}: accuracy by mean tokens a question; grey: the best at each cost"
    return svg_chart(curves, title, bars=bars, best=best, log_x=True, x_label="mean tokens a question", below=True)


def write_scaling(folder: Path, scaling: Scaling) -> list[Path]:
    """Write scaling.json, scaling.svg and scaling.html, and return their paths."""
    atomic_write(folder / JSON_NAME, json.dumps(scaling_json(scaling), indent=1) + "\n")
    atomic_write(folder / SVG_NAME, scaling_chart(scaling))
    return [folder / JSON_NAME, folder / SVG_NAME, write_scaling_page(folder)]


def write_scaling_page(folder: Path) -> Path:
    """Write scaling.html of a folder that holds scaling.json, and return its path."""
    try:
        scaling = scaling_of_json(read_scaling(folder))
    except (KeyError, TypeError) as error:
        raise no_scaling(folder, error) from error
    atomic_write(folder / HTML_NAME, scaling_document(scaling, kept_trees(folder)))
    return folder / HTML_NAME


def kept_trees(folder: Path) -> dict[str, list[Row]]:
    """Return the first rows with a tree of each evaluation in a folder, by its name."""
    found: dict[str, list[Row]] = {}
    for path in sorted(folder.glob("*.json")):
        result = read_result(path)
        if result is None or "search" not in result:
            continue
        rows = read_completions(folder / result["completions"])
        with_tree = [row for row in rows if "tree" in row.get(SEARCH, {})][:MAX_TREES]
        if with_tree:
            found[path.stem] = with_tree
    return found


def scaling_document(scaling: Scaling, trees: Mapping[str, Sequence[Row]]) -> str:
    """Return the page."""
    title = f"{scaling.name}: test-time scaling"
    numbers = {
        "questions": f"{scaling.num_questions:,}",
        "samples in the pool": f"{scaling.pool_size:,} of each",
        "tokens of one answer": f"{scaling.answer_tokens:,.1f}",
        "model": scaling.model,
    }
    heads = "".join(f"<div>{escape(name)}<b>{escape(value)}</b></div>" for name, value in numbers.items())
    oracle = (
        "<p>A strategy marked oracle chose by the expected answers: a bound, and no result of a model.</p>"
        if any(point.is_oracle for point in scaling.points)
        else ""
    )
    body = [
        f"<h1>{escape(title)}</h1><div class=numbers>{heads}</div>",
        f"<h2>Accuracy by tokens</h2><figure>{scaling_chart(scaling)}<figcaption>Bars are 95% intervals over questions. The grey line is "
        f"the best strategy at each cost.</figcaption></figure>{oracle}",
        "<h2>All strategies and budgets</h2><p class=dim>A search may spend more or fewer tokens than its budget of parallel answers. At equal "
        "tokens it is compared with the vote of as many samples as cost the same. The best of several strategies is a selected maximum.</p><div"
        f" class=scroll>{_points_table(scaling)}</div>",
    ]
    if trees:
        body.append("<h2>Searches</h2><p class=dim>The chosen path is marked. Scores are those of the verifier.</p>")
        for name, rows in trees.items():
            body += [f"<h3>{escape(name)}</h3>", *map(_search_block, rows)]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escape(title)}</title>\n'
        f"<style>{static_file('style.css')}{STYLE}</style></head>\n<body><div class=frame><main>{''.join(body)}</main></div></body></html>\n"
    )


def _points_table(scaling: Scaling) -> str:
    rows = ["<tr>" + "".join(f"<th>{name}</th>" for name in POINT_COLUMNS) + "</tr>"]
    for cells in point_rows(scaling_json(scaling)):
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _search_block(row: Row) -> str:
    search = row[SEARCH]
    nodes = search["tree"][:MAX_NODES]
    children: dict[int | None, list[dict[str, Any]]] = {}
    for node in nodes:
        children.setdefault(node["parent"], []).append(node)
    verdict = "failed" if row["accuracy"] is None else "right" if row["accuracy"] >= 1 else "wrong"
    left_out = len(search["tree"]) - len(nodes)
    more = f"<p class=dim>{left_out:,} more nodes are in the file of completions</p>" if left_out else ""
    label = f"{row['id']}: {verdict}, {search['tokens']:,} tokens, {search['verifier_calls']:,} verifier calls"
    return f"<details class=tree><summary>{escape(label)}</summary>{_branches(children)}{more}</details>"


def _branches(children: Mapping[int | None, Sequence[dict[str, Any]]]) -> str:
    """Return nested lists. The walk is a loop with a stack, because a chain of steps may be longer than Python's recursion allows."""
    parts: list[str] = []
    stack: list[tuple[str, dict[str, Any] | None]] = [("", node) for node in reversed(children.get(None, []))]
    while stack:
        text, node = stack.pop()
        if node is None:
            parts.append(text)
            continue
        below = children.get(node["node"], [])
        parts.append(_node_text(node))
        stack.append(("</ul></li>" if below else "</li>", None))
        stack += [("", child) for child in reversed(below)]
        if below:
            stack.append(("<ul>", None))
    return f"<ul>{''.join(parts)}</ul>"


def _node_text(node: Mapping[str, Any]) -> str:
    score = "" if node["score"] is None else f", score {node['score']:.4g}"
    notes = {"node", "parent", "text", "tokens", "sampled", "end", "score", "chosen", "step_text"}
    more = "".join(
        f", {name} {value:.4g}" for name, value in node.items() if name not in notes and isinstance(value, int | float)
    )
    text = node["text"] if len(node["text"]) <= MAX_TEXT else node["text"][:MAX_TEXT] + " [...]"
    kind = "" if node["sampled"] or node["parent"] is None else ", written by the strategy"
    head = f"{node['tokens']} tokens, {node['end']}{score}{more}{kind}"
    mark = " class=chosen" if node["chosen"] else ""
    return f"<li{mark}><span class=dim>{escape(head)}</span><pre>{escape(text)}</pre>"
