"""A text in the output of a notebook cell that is updated in place, without widgets.

It uses display ids of the Jupyter protocol (`display_data`, then `update_display_data`), which every frontend knows. So a saved notebook
shows the last state, and no extension is needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any

MIN_INTERVAL_S = 0.25
"""Shortest time between two updates. Each is a message to the browser."""


def open_cell() -> NotebookCell | None:
    """A text in the cell that runs now; None outside of a notebook kernel, as in a terminal with IPython."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return NotebookCell() if hasattr(shell, "kernel") else None


class NotebookCell:
    """The updatable text. It appears with the first `show`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._handle: Any = None
        self._clock, self._shown = clock, -MIN_INTERVAL_S

    def show(self, text: Callable[[], str], is_final: bool = False) -> None:
        """Show a text in place of the one before. Calls in quick succession are left out, unless one is final."""
        now = self._clock()
        if now - self._shown < MIN_INTERVAL_S and not is_final:
            return
        self._shown = now
        shown = text()
        bundle = {"text/plain": shown, "text/html": f"<pre>{escape(shown)}</pre>"}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
