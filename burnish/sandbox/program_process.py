"""Runs in the program's process. It knows the program and nothing else: no test, no expected value, no other program."""

from __future__ import annotations

import ast
import atexit
import os
import random
import socket
import sys
import threading
import traceback
import types
from typing import Any, NoReturn

from burnish.sandbox.rpc import ProgramGone, send_message, serve_program

SEED = 0  # gives a program that draws random numbers the same verdict each time


def reset_interpreter() -> None:
    """Make the interpreter look as if it had just started for the program: arguments, random seed, no burnish modules."""
    sys.argv, sys.executable, sys.orig_argv = ["program.py"], "", ["python"]
    random.seed(SEED)
    for name in [n for n in sys.modules if n.split(".")[0] == "burnish"]:
        del sys.modules[name]


def new_module(name: str) -> types.ModuleType:
    """An empty module that programs can import under this name."""
    module = types.ModuleType(name)
    sys.modules[name] = module
    return module


def _exit_like_python(code: int) -> NoReturn:
    """Exit like Python: wait for threads, call exit functions, flush output; but do not tear down the interpreter."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter calls; it has no public name
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.__stdout__, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:  # noqa: BLE001 - raised by the program's own exit functions and streams
        traceback.print_exc(file=sys.__stderr__)
        code = code or 1
    finally:
        os._exit(code)


def run_stdio(source: str) -> NoReturn:
    """Run a program that reads standard input and writes standard output."""
    module, code = new_module("__main__"), 0
    reset_interpreter()
    try:
        exec(compile(source, "program.py", "exec"), module.__dict__)
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
    except BaseException as error:  # noqa: BLE001 - any exception of the program
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
        traceback.print_exception(type(error), error, trace, file=sys.__stderr__)
        code = 1
    _exit_like_python(code & 0xFF)


def run_calls(channel: socket.socket, spec: dict[str, Any]) -> NoReturn:
    """Load a program, then let the grader call what it defines."""
    module = new_module("program")
    reset_interpreter()
    sys.set_int_max_str_digits(0)
    try:
        for number, source in enumerate(program_sources(spec)):
            exec(compile(source, f"program{number or ''}.py", "exec"), module.__dict__)
    except BaseException as error:  # noqa: BLE001 - any exception of the program, SystemExit too
        send_message(channel, {"loaded": False, "why": traceback.format_exception_only(type(error), error)[-1].strip()})
        os._exit(1)
    send_message(channel, {"loaded": True})
    try:
        serve_program(channel, module.__dict__)
    except (OSError, ProgramGone):
        os._exit(1)
    os._exit(0)


def program_sources(spec: dict[str, Any]) -> list[str]:
    """The sources to execute, in order: the setup, then prefix and program, joined if the program continues the prefix.

    Before a complete program, an unfinished function at the end of the prefix is left out.
    """
    setup, prefix, program = spec.get("setup", ""), spec.get("prefix", ""), spec["program"]
    entry_point = spec.get("entry_point")
    if prefix and entry_point and not defines(program, entry_point):
        return [setup, prefix.rstrip("\n") + "\n" + program]
    return [setup, whole_statements(prefix), program]


def whole_statements(source: str) -> str:
    """A prefix without the end that does not parse, and without the last statement if that end belongs to it."""
    lines = source.split("\n")
    for end in range(len(lines), 0, -1):
        try:
            body = ast.parse("\n".join(lines[:end])).body
        except (SyntaxError, ValueError):
            continue
        left = [line for line in lines[end:] if line.strip()]
        if body and left and left[0][0].isspace():
            starts = [body[-1].lineno, *(node.lineno for node in getattr(body[-1], "decorator_list", []))]
            end = min(starts) - 1
        return "\n".join(lines[:end])
    return ""


def defines(source: str, name: str) -> bool:
    """Whether a program defines a name at its top level."""
    try:
        return name in names_defined(ast.parse(source).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def names_defined(body: list[ast.stmt]) -> set[str]:
    """The names that these top-level statements define."""
    found: set[str] = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        else:
            found |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            found |= {
                a.asname or a.name
                for n in ast.walk(node)
                if isinstance(n, ast.Import | ast.ImportFrom)
                for a in n.names
            }
    return found
