"""The one exception meant for people.

`UserError` says what was wrong, where, and what to do. The command line prints it without a traceback and exits
with status 2; everything else that escapes is a bug and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user can fix. The message carries what, where and what to do."""


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known name, or the empty string."""
    names = list(known)
    match = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or difflib.get_close_matches(
        name.lower(), names, n=1, cutoff=0.5
    )
    return f"; did you mean {match[0]!r}?" if match else ""


def unknown(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that is not in a table: names the nearest one and lists them all."""
    names = sorted(known)
    return UserError(f"unknown {kind} {name!r}{nearest(name, names)} (known: {', '.join(names)})")
