"""Measurements of `burnish eval --scaling` as pages list them, from the files in their folders alone.

A folder has `scaling.json` with all numbers, `scaling.svg` with the chart and `scaling.html` with the whole page. The evaluation writes
them again after each of its parts. This module loads neither torch nor the evaluation, so that the live page starts fast.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.report.run_status import file_stamp

JSON_NAME, SVG_NAME, HTML_NAME = "scaling.json", "scaling.svg", "scaling.html"
CONFIG_NAME = "config.yaml"
"""The file that makes a folder a run."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
"""Content security policy of a page with a measurement: no script, no connection."""
POINT_COLUMNS = (
    "strategy", "budget", "accuracy", "95% interval", "minus majority", "minus majority at equal tokens", "tokens",
    "times one answer", "verifier calls",
    "verifier tokens", "failed", "seconds", "cache", "estimate",
)  # fmt: skip
Json = dict[str, Any]


def find_scalings(path: Path, depth: int) -> Iterator[Path]:
    """Yield the folders of measurements at and below a path, at most `depth` folders down. Of a run, only those directly in it."""
    if os.path.isfile(path / JSON_NAME):
        yield path
        return
    left = 1 if os.path.isfile(path / CONFIG_NAME) else depth
    if left == 0:
        return
    try:
        names = sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:  # a folder that this user may not read, or that was removed meanwhile
        return
    for name in names:
        yield from find_scalings(path / name, left - 1)


def run_scalings(run: Path) -> list[Path]:
    """Return the folders of measurements in the folder of a run."""
    return sorted(path.parent for path in run.glob(f"*/{JSON_NAME}"))


def scalings_stamp(run: Path) -> str:
    """Return a text that changes when a measurement in the folder of a run changes; empty if there is none."""
    return " ".join(f"{folder.name} {file_stamp(folder / JSON_NAME)}" for folder in run_scalings(run))


def read_scaling(folder: Path) -> Json:
    """Return the numbers of a measurement."""
    try:
        found: Json = json.loads((folder / JSON_NAME).read_text(encoding="utf-8"))
        point_rows(found)
        return found | {key: found[key] for key in ("name", "model", "num_questions")}
    except (ValueError, KeyError, TypeError) as error:
        raise no_scaling(folder, error) from error


def no_scaling(folder: Path, error: Exception) -> UserError:
    """Return the error for a file that is not what its name says."""
    return UserError(f"{folder / JSON_NAME} is no result of `burnish eval --scaling` ({error!r})")


def point_rows(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the cells of each point under `POINT_COLUMNS`."""
    best = {(point["strategy"], point["budget"]) for point in found["envelope"]}
    return [_point_cells(point, (point["strategy"], point["budget"]) in best) for point in found["points"]]


def _point_cells(p: Mapping[str, Any], is_best: bool) -> list[str]:
    accuracy, read = p["accuracy"], p.get("verifier_tokens")
    return [
        p["strategy"] + (" (oracle)" if p["is_oracle"] and "oracle" not in p["strategy"] else ""),
        str(p["budget"]),
        f"{accuracy['mean']:.3f}" + (" (best at its cost)" if is_best else ""),
        f"{accuracy['low']:.3f} to {accuracy['high']:.3f}",
        _difference(p["versus_majority"]),
        _difference(p.get("versus_equal_tokens")),
        f"{p['tokens']:,.1f}",
        f"{p['times_one_answer']:.1f}",
        f"{p['verifier_calls']:,.1f}",
        "-" if read is None else f"{read:,.1f}",
        str(p["num_failed"]),
        "-" if p["wall_s"] is None else f"{p['wall_s']:,.2f}",
        "-" if p["cache_hit_rate"] is None else f"{p['cache_hit_rate']:.1%}",
        p["estimate"],
    ]


def _difference(versus: Json | None) -> str:
    return "" if versus is None else f"{versus['mean']:+.3f} ({versus['low']:+.3f} to {versus['high']:+.3f})"


def scaling_section(run: Path) -> tuple[list[Json], list[str]]:
    """Return the measurements in the folder of a run as the page of the run shows them, and why others cannot be read."""
    found: list[Json] = []
    damaged: list[str] = []
    for folder in run_scalings(run):
        try:
            numbers = read_scaling(folder)
        except UserError as error:
            damaged.append(str(error))
            continue
        svg = folder / SVG_NAME
        found.append(
            {
                "name": folder.name,
                "data": str(numbers["name"]),
                "model": str(numbers["model"]),
                "questions": numbers["num_questions"],
                "chart": svg.read_text(encoding="utf-8") if svg.is_file() else "",
                "columns": list(POINT_COLUMNS),
                "rows": point_rows(numbers),
            }
        )
    return found, damaged


def scaling_index(links: Mapping[str, str], style: str) -> str:
    """Return a page with a link to each measurement by its name, for folders without a run."""
    items = "".join(f'<li><a href="{escape(link)}">{escape(name)}</a></li>' for name, link in links.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n<title>burnish</title>\n<style>{style}</style></head>\n'
        f"<body><div class=frame><main><h1>Test-time scaling</h1><ul>{items}</ul></main></div></body></html>\n"
    )
