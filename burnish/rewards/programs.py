"""What stands around a program: finding it in a completion, reading the tests of a row, comparing what it printed.

The answer of a row is one JSON object (text, or a mapping), with exactly one of

    asserts   a list of tests, each one or more statements (MBPP)
    check     the text of a function `check(candidate)` (HumanEval), with `entry_point`: whom it is given
    stdio     a list of {"input": text, "output": text} (APPS, TACO, LiveCodeBench)

and, besides asserts or check: `entry_point`, `setup` (imports for program and tests), `prefix` (code before the program, whose functions
tests may call).
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

KINDS = ("asserts", "check", "stdio")
TEXTS = ("entry_point", "setup", "prefix")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_PYTHON = ("python", "py", "python3", "py3")
MAX_DIGITS = 100  # longer numbers are compared as text


def program_of(completion: str) -> str:
    """The program in a completion: its last fenced block of Python, else its last fenced block, else all of it.

    A block that is not closed goes to the end. What a model thinks before `</think>` is no answer.
    """
    text = completion.rpartition("</think>")[2]
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), text[opened.end() + 1 : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[2].lower(), text[opened.end() + 1 :]))
    tagged = [block for tag, block in blocks if tag in _PYTHON]
    return (tagged or [block for _, block in blocks] or [text])[-1]


@dataclass(frozen=True)
class Tests:
    """The tests of one row; one of the three lists has something in it."""

    asserts: tuple[str, ...] = ()
    check: str | None = None
    stdio: tuple[tuple[str, str], ...] = ()
    entry_point: str | None = None
    setup: str = ""
    prefix: str = ""

    @property
    def count(self) -> int:
        """How many outcomes there are; a `check` function is one test."""
        return len(self.asserts) + len(self.stdio) + (self.check is not None)

    def for_judge(self) -> dict[str, Any]:
        """What the judge is told."""
        tests = {"asserts": list(self.asserts)} if self.check is None else {"check": self.check}
        return tests | {"setup": self.setup, "prefix": self.prefix, "entry_point": self.entry_point}

    def for_program(self, program: str) -> dict[str, Any]:
        """What the program's process is told: nothing of the tests."""
        return {"program": program, "setup": self.setup, "prefix": self.prefix, "entry_point": self.entry_point}


def read_tests(answer: Any) -> Tests:
    """The tests in a row's answer; ValueError, naming what is wrong, for anything else than the format above."""
    try:
        record = json.loads(answer) if isinstance(answer, str | bytes) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer of a row for the code reward is one JSON object, but: {error}") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"the answer of a row for the code reward is one JSON object, not a {type(record).__name__}")
    record = {key: value for key, value in record.items() if value is not None}
    unknown = [key for key in record if key not in (*KINDS, *TEXTS)]
    if unknown:
        raise ValueError(
            f"the tests of the row have an unknown key {unknown[0]!r} (known: {', '.join((*KINDS, *TEXTS))})"
        )
    given = [kind for kind in KINDS if kind in record]
    if len(given) != 1:
        raise ValueError(f"the tests of the row need exactly one of {', '.join(KINDS)}; they have {given or 'none'}")
    for key in TEXTS:
        if not isinstance(record.get(key, ""), str):
            raise ValueError(f"{key} of the row's tests should be text, not a {type(record[key]).__name__}")
    texts = {key: record[key] for key in TEXTS if key in record}
    _compiled(texts.get("setup", ""), "setup")
    if given == ["stdio"]:
        if texts:
            raise ValueError(f"{next(iter(texts))} has no effect beside stdio: such a program runs as it is")
        return Tests(stdio=_pairs(record["stdio"]))
    if given == ["check"]:
        if not isinstance(record["check"], str) or "entry_point" not in texts:
            raise ValueError(
                "check should be the text of the test function, and entry_point the name it is called with"
            )
        return Tests(check=_compiled(record["check"]), **texts)
    asserts = record["asserts"]
    if not isinstance(asserts, list | tuple) or not asserts or not all(isinstance(a, str) for a in asserts):
        raise ValueError("asserts should be a list of texts, with one at least")
    texts = {"entry_point": _hidden_entry_point(asserts), **texts}
    return Tests(asserts=tuple(_compiled(text) for text in asserts), **texts)


def _hidden_entry_point(asserts: Sequence[str]) -> str | None:
    """Where every name in the tests is one of Python's own, the first that is called is the program's after all.

    MBPP has a function called `sum`. Only the tests decide this, never the program.
    """
    calls: list[str] = []
    for text in asserts:
        nodes = list(ast.walk(ast.parse(_compiled(text))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        if any(not hasattr(builtins, name) and name not in sys.stdlib_module_names for name in names):
            return None
        calls += [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return calls[0] if calls else None


def _pairs(pairs: Any) -> tuple[tuple[str, str], ...]:
    is_list = isinstance(pairs, list | tuple) and len(pairs) > 0
    if not is_list or not all(isinstance(p, Mapping) and set(p) == {"input", "output"} for p in pairs):
        raise ValueError('stdio should be a list of {"input": text, "output": text}, with one at least')
    if not all(isinstance(text, str) for pair in pairs for text in pair.values()):
        raise ValueError("input and output of stdio tests should be text")
    return tuple((pair["input"], pair["output"]) for pair in pairs)


def _compiled(source: str, what: str = "a test") -> str:
    """A test, as it is, if it is Python."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} of the row is no Python ({error}): {source[:200]!r}") from None
    return source


def same_output(expected: str, printed: str) -> bool:
    """Whether a program printed what was expected: line by line, words apart, 1.50 being 1.5 (as LiveCodeBench has it)."""
    left, right = (_lines(text) for text in (expected, printed))
    return len(left) == len(right) and all(map(_same_words, left, right))


def _lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.strip().splitlines()]
    return lines or [[]]


def _same_words(left: list[str], right: list[str]) -> bool:
    return len(left) == len(right) and all(
        a == b or (_number(a) is not None and _number(a) == _number(b)) for a, b in zip(left, right, strict=True)
    )


def _number(word: str) -> Decimal | None:
    try:
        value = Decimal(word) if len(word) <= MAX_DIGITS else None
    except InvalidOperation:
        return None
    return value if value is not None and value.is_finite() else None
