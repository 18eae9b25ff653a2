"""A small terminal: what a person would see of a program that runs in one of a given size."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

from rich.cells import cell_len

CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b\][^\x07]*\x07|(\r\n|\r|\n)|([^\x1b\r\n])", re.DOTALL)


def record(script: str, columns: int, rows: int = 24, deadline: float = 60.0, **environment: str) -> str:
    """All that a Python script writes to a terminal of that size."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    keep = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "CI")}
    settings = keep | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment
    process = subprocess.Popen([sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    written, end = b"", time.monotonic() + deadline
    try:
        while select.select([ours], [], [], max(0.0, end - time.monotonic()))[0]:
            try:
                found = os.read(ours, 1 << 16)
            except OSError:  # nobody has the other end any more
                break
            if not found:
                break
            written += found
        assert process.wait(timeout=max(1.0, end - time.monotonic())) == 0, written.decode(errors="replace")
    finally:
        process.kill()
        os.close(ours)
    return written.decode()


class Screen:
    """Lines of letters, a cursor, and what was on them before each time something was taken away."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._cells: list[list[str]] = [[]]
        self.row = self.column = 0
        self.num_wraps = 0
        self.states: list[list[str]] = []
        self.is_cursor_hidden = False
        self._is_erasing = False

    @property
    def lines(self) -> list[str]:
        return ["".join(cells).rstrip() for cells in self._cells]

    def feed(self, written: str) -> Screen:
        for numbers, letter, end, text in CODE.findall(written):
            self._is_erasing = self._is_erasing and letter in tuple("AK")
            if text:
                self._put(text)
            elif end:
                self.column = 0 if "\r" in end else self.column
                if "\n" in end:
                    self._down()
            elif letter:
                self._control(numbers, letter)
        return self

    def _put(self, text: str) -> None:
        width = cell_len(text)
        if self.column + width > self.columns:
            self.num_wraps += 1
            self.column = 0
            self._down()
        cells = self._cells[self.row]
        cells += [" "] * (self.column + width - len(cells))
        cells[self.column : self.column + width] = [text, *[""] * (width - 1)][: max(width, 1)] if width else []
        self.column += width

    def _down(self) -> None:
        self.row += 1
        self._cells += [[] for _ in range(self.row + 1 - len(self._cells))]

    def _control(self, numbers: str, letter: str) -> None:
        if letter == "A":
            self.row = max(0, self.row - int(numbers or 1))
        elif letter == "K":
            if not self._is_erasing:
                self.states.append(self.lines)
            self._is_erasing = True
            self._cells[self.row] = []
        elif letter in "lh" and numbers == "?25":
            self.is_cursor_hidden = letter == "l"
