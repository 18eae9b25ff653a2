"""The process in which tests run: a sandbox of its own beside the program's, with Python as it was before the program.

What the tests call is the program's, over the line (burnish.sandbox.rpc); everything else, `assert`, `==`, `set`, `math`, and what
the row itself defines, is the judge's own. So a program cannot reach what decides over it: it cannot exit with a good status, patch a builtin, trace the
tests, find the expected values in a frame, or return something that equals everything. It can only answer.
"""

from __future__ import annotations

import ast
import builtins
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

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
MAX_OUTCOME_CHARS = 300
SEED = 0


class VerdictWriter:
    """What is said of each test, on a pipe that only the judge has."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def say(self, **message: Any) -> None:
        """One line of JSON."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


def run_grader(channel: socket.socket, verdicts: int, spec: dict[str, Any]) -> None:
    """Run the tests against the program at the other end of the channel, and say what became of each."""
    say = VerdictWriter(verdicts).say
    sys.set_int_max_str_digits(0)
    random.seed(SEED)
    peer = ProgramClient(channel)
    try:
        loaded = peer.receive()
        if not (isinstance(loaded, dict) and loaded.get("loaded") is True):
            why = loaded.get("why") if isinstance(loaded, dict) else None
            say(loaded=False, why=str(why)[:MAX_OUTCOME_CHARS])
            return
        tests = RowTestRunner(peer, spec)
        for number in range(tests.count):
            say(test=number, outcome=tests.run(number))
        say(done=True)
    except ProgramGone as error:
        say(gone=str(error)[:MAX_OUTCOME_CHARS])
    except (Untransferable, BrokenTest) as error:
        say(broken=str(error)[:MAX_OUTCOME_CHARS])


class BrokenTest(BaseException):
    """The tests of the row cannot run, whatever the program: a mistake in the data."""


class RowTestRunner:
    """The tests of one row, with the names they use."""

    def __init__(self, peer: ProgramClient, spec: dict[str, Any]) -> None:
        self._peer = peer
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
        """Give tests that call functions of the prefix the prefix's own: the program could have redefined its copies.

        The function under test is the program's also where a helper calls it. Returns what was executed, if anything.
        """
        helpers = whole_statements(prefix)
        if not names_defined(ast.parse(helpers).body) & (set().union(*self._used) - {self._entry_point}):
            return ""
        exec(compile(helpers, "prefix.py", "exec"), self._names)
        if self._entry_point is not None:
            self._used = [names | {self._entry_point} for names in self._used]
        return helpers

    def run(self, number: int) -> str:
        """What became of one test: passed, failed, or the error it ended with."""
        self._peer.raised = None
        try:
            self._bind(self._used[number])
            exec(self._codes[number], self._names)
            if self._check is not None:
                if not callable(self._names.get("check")):
                    raise BrokenTest("the tests define no function `check`")
                returned = self._names["check"](self._peer.ask("get", name=self._entry_point))
                if isinstance(returned, Generator | Coroutine | AsyncGenerator):
                    raise BrokenTest("`check` has `yield` or is `async`, so that calling it does not run it")
        except AssertionError as error:
            return f"{FAILED}: {error}"[:MAX_OUTCOME_CHARS].rstrip(": ")
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - any of a test's is its outcome
            return f"{FAILED}: {type(error).__name__}: {error}"[:MAX_OUTCOME_CHARS].rstrip(": ")
        if self._peer.gone is not None:
            raise ProgramGone(self._peer.gone)
        if self._peer.raised is not None and not self._may_expect_exceptions[number]:
            return f"{FAILED}: {self._peer.raised}, which ended a loop and not the test"[:MAX_OUTCOME_CHARS]
        return PASSED

    def _bind(self, names: set[str]) -> None:
        """Give the names a test uses their meaning: the function under test first, then the row's and Python's, then the program's."""
        for name in sorted(names - self._fetched):
            if name != self._entry_point:
                if name in self._names or hasattr(builtins, name):
                    continue
                if name in sys.stdlib_module_names:
                    self._names[name] = importlib.import_module(name)
                    continue
            self._names[name] = self._peer.ask("get", name=name)
            self._fetched.add(name)


def _has_handlers(source: str) -> bool:
    """Whether tests can expect an exception. In others Python itself has caught one that did not end the test."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Try | ast.TryStar | ast.With | ast.AsyncWith):
            return True
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if "raises" in name.lower():  # unittest's assertRaises as a function
            return True
    return False


def _names_used(source: str) -> set[str]:
    """The names that a test needs from outside itself."""
    tree = ast.parse(source)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    given = {node.id for node in names if isinstance(node.ctx, ast.Store | ast.Del)}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            given.add(node.name)
        elif isinstance(node, ast.arg):
            given.add(node.arg)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            given |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ExceptHandler) and node.name:
            given.add(node.name)
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - given
