"""The frame of the HTML page: its style sheet, its script and the blocks of data it carries.

What a model wrote reaches the page compressed and base64-encoded, or as JSON in a data block, and the script puts it on screen
only as text, or it is escaped where a table shows single tokens; so no completion can become markup. The content
security policy allows this one script by its hash and no connection to anywhere, should that ever be got wrong.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from html import escape
from importlib.resources import files

SCRIPTS = ("base.js", "scale.js", "charts.js", "store.js", "tokens.js", "list.js", "filter.js", "samples.js")


@cache
def static(name: str) -> str:
    """A file of the page that never changes."""
    return files("burnish.report").joinpath("static", name).read_text(encoding="utf-8")


def script() -> str:
    """The whole script of the page."""
    return "".join(static(name) for name in SCRIPTS)


def frame(title: str, body: str, data: str) -> str:
    """The whole document. `body` is markup, escaped by its maker; `data` are blocks from `json_block` and `packed_block`."""
    code = script()
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{static('style.css')}</style></head>\n<body>\n{body}\n"
        f"{data}\n<script>{code}</script>\n</body></html>\n"
    )


def json_block(name: str, text: str) -> str:
    """JSON in a script element: no character of it can end the element or begin a comment."""
    safe = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return f'<script type="application/json" id="{name}">{safe}</script>'


def packed_block(name: str, letters: str) -> str:
    """What `embed.squeeze` made."""
    return f'<script type="application/octet-stream" id="{name}">{letters}</script>'


def navigation(title: str, parts: list[tuple[str, str]]) -> str:
    """A bar with the run's name and a link to each part that is there."""
    links = "".join(f'<a href="#{name}">{escape(text)}</a>' for name, text in parts)
    return f'<nav aria-label="parts of this page"><div><b>{escape(title)}</b>{links}</div></nav>'
