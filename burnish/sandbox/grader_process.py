"""Runs in the grader's process: executes the tests of a row against a program in another confined process.

The tests call the program's functions over a socket (burnish.sandbox.rpc). Everything else belongs to the grader: `assert`, `==`, `set`,
`math`, and what the row itself defines. So a program cannot reach what decides about it. It cannot exit with a good status, patch a
builtin, trace the tests, find expected values in a frame, or return an object that equals everything. It can only answer calls.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import json
import os
import random
import socket
import sys
import types
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any

from burnish.sandbox.program_process import names_defined, whole_statements
from burnish.sandbox.rpc import ProgramClient, ProgramGone, Untransferable

PASSED, FAILED = "passed", "failed"
MAX_OUTCOME_CHARS = 300
SEED = 0


def run_grader(channel: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
    """Run the tests against the program at the other end of the channel. Write verdicts to a pipe that only the grader has."""
    write = functools.partial(_write_verdict, verdicts)
    sys.set_int_max_str_digits(0)
    random.seed(SEED)
    program = ProgramClient(channel)
    try:
        loaded = program.receive()
        if not (isinstance(loaded, dict) and loaded.get("loaded") is True):
            why = loaded.get("why") if isinstance(loaded, dict) else None
            write(loaded=False, why=str(why)[:MAX_OUTCOME_CHARS])
            return
        tests = RowTestRunner(program, spec)
        for number in range(tests.count):
            write(test=number, outcome=tests.run(number))
        write(done=True)
    except ProgramGone as error:
        write(gone=str(error)[:MAX_OUTCOME_CHARS])
    except (Untransferable, BrokenTest) as error:
        write(broken=str(error)[:MAX_OUTCOME_CHARS])


def _write_verdict(descriptor: int, **message: Any) -> None:
    """Write one message as a line of JSON."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


class BrokenTest(BaseException):
    """The tests of the row cannot run with any program: an error in the data."""


class RowTestRunner:
    """Runs the tests of one row; holds the names that they use."""

    def __init__(self, program: ProgramClient, spec: dict[str, Any]) -> None:
        self._program = program
        self._entry_point: str | None = spec.get("entry_point")
        module = types.ModuleType("tests")
        sys.modules["tests"] = module
        self._names = module.__dict__
        self._fetched: set[str] = set()
        self._check = spec.get("check")
        texts = [self._check] if self._check is not None else spec["asserts"]
        self.count = len(texts)
        self._used = [_names_used(text) for text in texts]
        setup = spec.get("setup", "")
        try:
            exec(compile(setup, "setup.py", "exec"), self._names)
            self._codes = [compile(text, f"test{n}.py", "exec") for n, text in enumerate(texts)]
            helpers = self._define_helpers(spec.get("prefix", ""))
            self._may_expect_exceptions = [any(map(_has_handlers, (setup, helpers, text))) for text in texts]
        except Exception as error:
            raise BrokenTest(f"{type(error).__name__}: {error}") from error

    def _define_helpers(self, prefix: str) -> str:
        """Execute the prefix here if tests call its functions, because the program could have redefined its own copies.

        The function under test is always the program's, even if a helper calls it. Returns the executed source, if any.
        """
        helpers = whole_statements(prefix)
        if not names_defined(ast.parse(helpers).body) & (set().union(*self._used) - {self._entry_point}):
            return ""
        exec(compile(helpers, "prefix.py", "exec"), self._names)
        if self._entry_point is not None:
            self._used = [names | {self._entry_point} for names in self._used]
        return helpers

    def run(self, number: int) -> str:
        """The outcome of one test: passed, or failed with the reason."""
        self._program.raised = None
        try:
            self._bind(self._used[number])
            exec(self._codes[number], self._names)
            if self._check is not None:
                if not callable(self._names.get("check")):
                    raise BrokenTest("the tests define no function `check`")
                returned = self._names["check"](self._program.ask("get", name=self._entry_point))
                if isinstance(returned, Generator | Coroutine | AsyncGenerator):
                    raise BrokenTest("`check` has `yield` or is `async`, so that calling it does not run it")
        except AssertionError as error:
            return f"{FAILED}: {error}"[:MAX_OUTCOME_CHARS].rstrip(": ")
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - any exception of a test is its outcome
            return f"{FAILED}: {type(error).__name__}: {error}"[:MAX_OUTCOME_CHARS].rstrip(": ")
        if self._program.gone is not None:
            raise ProgramGone(self._program.gone)
        if self._program.raised is not None and not self._may_expect_exceptions[number]:
            return f"{FAILED}: {self._program.raised}, which ended a loop and not the test"[:MAX_OUTCOME_CHARS]
        return PASSED

    def _bind(self, names: set[str]) -> None:
        """Bind the names that a test uses: the function under test first, then the row's and Python's names, then the program's."""
        for name in sorted(names - self._fetched):
            if name != self._entry_point:
                if name in self._names or hasattr(builtins, name):
                    continue
                if name in sys.stdlib_module_names:
                    self._names[name] = importlib.import_module(name)
                    continue
            self._names[name] = self._program.ask("get", name=name)
            self._fetched.add(name)


def _has_handlers(source: str) -> bool:
    """Whether a source may expect an exception. If not, an exception that did not end the test was swallowed by a loop."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Try | ast.TryStar | ast.With | ast.AsyncWith):
            return True
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if "raises" in name.lower():  # such as unittest's assertRaises
            return True
    return False


def _names_used(source: str) -> set[str]:
    """The names that a test uses but does not define."""
    tree = ast.parse(source)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    defined = {node.id for node in names if isinstance(node.ctx, ast.Store | ast.Del)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            defined.add(node.name)
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - defined
