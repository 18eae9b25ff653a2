"""The page as one self-contained HTML document: report.html with the data inside, or the live page, which asks its server.

Both have the same style and script (`static/`). report.html is made from the run directory alone and loads nothing from the
network. Its data are the answers that the live server would give (`page_data.py`), and a bounded selection of samples.

No completion can become markup. All data are in the page as compressed base64, and the script shows text only as text. As a second
defence, the content security policy allows this one script by its hash, and connections only to the live page's own server.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.report.embedded_samples import collect_groups, compress_base64, embed_samples
from burnish.report.live_samples import json_bytes
from burnish.report.page_data import RunData
from burnish.run.durable_files import atomic_write

SCRIPTS = (
    "base.js",
    "source.js",
    "scale.js",
    "charts.js",
    "curves.js",
    "store.js",
    "tokens.js",
    "list.js",
    "filter.js",
    "episode.js",
    "samples.js",
    "scored.js",
    "overview.js",
    "runs.js",
    "page.js",
)


@cache
def static_file(name: str) -> str:
    """Return the content of a file in `static/`."""
    return files("burnish.report").joinpath("static", name).read_text(encoding="utf-8")


def page_script() -> str:
    """Return the whole script of the page."""
    return "".join(static_file(name) for name in SCRIPTS)


def security_policy(connections: str) -> str:
    """Return the content security policy with the script's hash and the allowed connections."""
    digest = base64.b64encode(hashlib.sha256(page_script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src {connections}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def html_document(title: str, data: str, blocks: str = "", connections: str = "'none'") -> str:
    """Return the whole document. `data` and `blocks` hold elements from `data_block`; a page without any asks its server.

    The blocks of samples, which may be many megabytes, come after the script. So curves are drawn before all is read.
    """
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{security_policy(connections)}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{static_file('style.css')}</style></head>\n"
        f"<body>\n{static_file('page.html')}\n{data}\n<script>{page_script()}</script>\n{blocks}\n</body></html>\n"
    )


def data_block(path: str, content: str) -> str:
    """Return an element with the compressed base64 of an answer."""
    return f'<script type="application/octet-stream" data-path="{escape(path)}">{content}</script>'


@cache
def live_document() -> tuple[str, str]:
    """Return the live page and its content security policy."""
    return html_document("burnish", "", connections="'self'"), security_policy("'self'")


def write_report(run: Path) -> Path:
    """Write `<run>/report.html` and return its path. A folder that is no run, or has no metrics yet, is a `UserError`."""
    if not (run / "config.yaml").is_file():
        raise UserError(f"{run} is not a run: it has no config.yaml")
    data = RunData("run", run)
    main = data.metrics("main")
    if main["rows"] == 0:
        raise UserError(
            f"{run / 'metrics.jsonl'} has no lines: the run has not finished a step yet, or the file was cut or deleted"
        )
    samples, blocks = selected_samples(run / "samples")
    answers: dict[str, Any] = {
        "runs": {"runs": [data.summary()], "scalings": []},
        "runs/run": data.overview(),
        "runs/run/metrics/main": main,
        "runs/run/metrics/other": data.metrics("other"),
        "runs/run/config": data.config(),
        "runs/run/samples": samples,
    }
    elements = [data_block(path, compress_base64(json_bytes(answer))) for path, answer in answers.items()]
    path = run / "report.html"
    atomic_write(path, html_document(run.resolve().name, "\n".join(elements), "\n".join(blocks)))
    return path


def selected_samples(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the index of the samples in a report, and the elements with their blocks."""
    groups, left_out = collect_groups(folder)
    found = embed_samples(groups)
    index = {"generation": 0, "since": 0, "waiting": 0, "num_groups": len(groups), "left_out": left_out, **found.index}
    blocks = []
    for k, (texts, tokens) in enumerate(found.blocks):
        blocks += [data_block(f"runs/run/texts/{k}", texts), data_block(f"runs/run/tokens/{k}", tokens)]
    return index, blocks
