"""Runs in the program's process of a session: executes one cell of Python after the other, as a notebook does.

Names stay from cell to cell. What a cell prints goes to standard output, followed by the value of its last expression or by its error.
"""

from __future__ import annotations

import ast
import linecache
import os
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

from burnish.sandbox.program_process import new_module, reset_interpreter
from burnish.sandbox.rpc import receive_message, send_message

MAX_ERROR_CHARS = 2_000


def run_cells(channel: socket.socket) -> NoReturn:
    """Execute the cells that arrive on the channel, and report the end of each. The process ends when the channel is closed."""
    module = new_module("__main__")
    reset_interpreter()
    _ignore_interrupts()
    number = 0
    while True:
        try:
            cell = receive_message(channel)
        except EOFError:
            os._exit(0)
        number += 1
        try:
            signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # the supervisor interrupts a cell that is out of time
            raised = _run_cell(cell["code"], f"cell{number}.py", module.__dict__, cell["has_traceback"])
        except KeyboardInterrupt:  # after the cell's last line
            raised = "KeyboardInterrupt"
        _ignore_interrupts()
        send_message(channel, {"raised": raised})


def _ignore_interrupts() -> None:
    """Ignore SIGINT between two cells. A late one would otherwise end the reading of the next cell."""
    while True:
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            return
        except KeyboardInterrupt:
            continue


def _run_cell(code: str, filename: str, names: dict[str, Any], has_traceback: bool) -> str | None:
    """Execute one cell; return the name of the exception that ended it, if any."""
    raised = None
    linecache.cache[filename] = (len(code), None, code.splitlines(keepends=True), filename)  # for lines in tracebacks
    try:
        try:
            _execute(code, filename, names)
        except SystemExit as request:
            if request.code not in (None, 0):
                raise
    except BaseException as error:  # noqa: BLE001 - any exception of the program, KeyboardInterrupt too
        raised = type(error).__name__
        _print_error(error, filename, has_traceback)
    _flush()
    return raised


def _execute(code: str, filename: str, names: dict[str, Any]) -> None:
    """Execute the statements. The value of a last expression is printed, unless it is None or a semicolon follows it."""
    tree = ast.parse(code, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr) or code.rstrip().endswith(";"):
        exec(compile(tree, filename, "exec"), names)
        return
    body = ast.Module(tree.body[:-1], tree.type_ignores)
    exec(compile(body, filename, "exec"), names)
    value = eval(compile(ast.Expression(last.value), filename, "eval"), names)
    if value is not None:
        names["_"] = value
        print(repr(value))


def _print_error(error: BaseException, filename: str, has_traceback: bool) -> None:
    """Print the error: its last line, or the traceback from the first line of a cell on."""
    try:
        trace = error.__traceback__
        while trace is not None and not trace.tb_frame.f_code.co_filename.startswith("cell"):
            trace = trace.tb_next
        if has_traceback and not isinstance(error, SyntaxError):
            lines = traceback.format_exception(type(error), error, trace, limit=-8)
        else:
            lines = traceback.format_exception_only(type(error), error)
            lines = lines if has_traceback else lines[-1:]
        text = "".join(lines)
    except BaseException:  # noqa: BLE001 - `str` of a program's exception may itself raise
        text = f"{type(error).__name__}\n"
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS // 2]}\n...\n{text[-MAX_ERROR_CHARS // 2 :]}"
    _flush()
    os.write(2, text.encode(errors="replace"))


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except BaseException:  # noqa: BLE001 - a stream that the program has replaced or closed
            continue
