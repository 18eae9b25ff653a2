"""Readers of published code tasks: MBPP, HumanEval, CRUXEval in both directions, LiveCodeBench. `published_datasets.SHAPES` names them."""

from __future__ import annotations

import ast
import base64
import binascii
import io
import json
import pickle
import zlib
from typing import Any

from burnish.data.files import Record
from burnish.data.published_example import PublishedExample, UnusableRow, first_value, renamed_columns, user_messages


def mbpp(record: Record) -> PublishedExample:
    """MBPP: a task in words, with the tests that its function must pass. The tests also show the function's name."""
    question, tests = str(first_value(record, "prompt", "text")), list(record["test_list"])
    if not tests:
        raise UnusableRow("no tests")
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or [])
    listed = "\n".join(tests)
    prompt = (
        f"{question}\nYour code should pass these tests:\n\n{listed}\n\nGive the whole program in a ```python block."
    )
    answer = {"asserts": tests, **({"setup": setup} if setup else {})}
    return PublishedExample(question, user_messages(prompt), json.dumps(answer), {"task_id": int(record["task_id"])})


def humaneval(record: Record) -> PublishedExample:
    """HumanEval: the beginning of a function to complete. The hidden tests are a function `check`."""
    function_start = record["prompt"]
    prompt = f"Complete this Python function. Give the whole function in a ```python block.\n\n```python\n{function_start.rstrip()}\n```"
    answer = {"check": record["test"], "entry_point": record["entry_point"], "prefix": function_start}
    return PublishedExample(
        function_start, user_messages(prompt), json.dumps(answer), renamed_columns(record, task_id="task_id")
    )


# --- CRUXEval --------------------------------------------------------------------------------------------------------


def cruxeval_output(record: Record) -> PublishedExample:
    """CRUXEval-O: `code` (a function `f`), `input`, `output`. The question is what the call returns (Gu et al. 2024, 2401.03065)."""
    source, given, output = _cruxeval_columns(record)
    prompt = (
        f"Here is a Python function:\n\n```python\n{source}\n```\n\nWhat does `f({given})` return?\n"
        "Think step by step, then give the value alone, as a Python literal, inside <answer> </answer>."
    )
    return PublishedExample(
        f"{source}\nf({given})", user_messages(prompt), output, renamed_columns(record, task_id="id")
    )


def cruxeval_input(record: Record) -> PublishedExample:
    """CRUXEval-I: the question is a call of `f` that returns `output`; any such call is right, which running it decides."""
    source, given, output = _cruxeval_columns(record)
    prompt = (
        f"Here is a Python function:\n\n```python\n{source}\n```\n\nFind a call of `f` that returns `{output}`. "
        "There may be several; give one.\n"
        "Think step by step, then give the call alone, such as `f('a', 1)`, inside <answer> </answer>."
    )
    answer = json.dumps({"code": source, "output": output})
    return PublishedExample(
        f"{source}\nf({given})", user_messages(prompt), answer, renamed_columns(record, task_id="id")
    )


def _cruxeval_columns(record: Record) -> tuple[str, str, str]:
    source, given, output = (str(record[name]).strip() for name in ("code", "input", "output"))
    try:
        ast.literal_eval(output)
    except (ValueError, SyntaxError):
        raise UnusableRow("its output is no literal") from None
    try:
        defined = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
        ast.parse(f"f({given})", mode="eval")
    except SyntaxError as error:
        raise ValueError(f"code and input should be Python: {error}") from error
    if "f" not in defined:
        raise ValueError("code should define a function f")
    return source, given, output


# --- LiveCodeBench ---------------------------------------------------------------------------------------------------

FUNCTION_IMPORTS = """\
import bisect, collections, copy, datetime, functools, heapq, itertools, json, math, operator, random, re, string
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""
"""What the starter code of LeetCode takes for granted."""
MAX_TEST_BYTES = 1 << 30
"""Most bytes that the private tests of a problem may have after decompression."""


def livecodebench(record: Record) -> PublishedExample:
    """LiveCodeBench: `question_content`, `starter_code`, `public_test_cases`, `private_test_cases`, `metadata`, `difficulty`.

    The tests are JSON text; private ones may be base64 of zlib of a pickled text. They are either stdin with the expected stdout, or the
    arguments of the method `func_name` of `Solution`, one JSON value a line, with the value it should return (2403.07974).
    """
    question, starter = str(record["question_content"] or "").strip(), str(record.get("starter_code") or "").rstrip()
    if not question:
        raise UnusableRow("no question")
    tests = [
        test for name in ("public_test_cases", "private_test_cases") for test in read_test_cases(record.get(name), name)
    ]
    kinds = {test["testtype"] for test in tests}
    if not tests:
        raise UnusableRow("no tests")
    if len(kinds) != 1 or not kinds <= {"stdin", "functional"}:
        raise ValueError(
            f"testtype should be stdin or functional, the same for all tests; got {', '.join(sorted(kinds))}"
        )
    if kinds == {"stdin"}:
        form = "Write a program that reads the input from stdin and writes the answer to stdout."
        answer = {"stdio": [{"input": test["input"], "output": test["output"]} for test in tests]}
    else:
        form = f"Complete this starter code:\n\n```python\n{starter}\n```"
        answer = functional_tests(tests, record.get("metadata"))
    prompt = f"{question}\n\n{form}\nGive the whole program in a ```python block."
    extra = renamed_columns(record, task_id="question_id", difficulty="difficulty", category="platform")
    year = str(record.get("contest_date") or "")[:4]
    extra |= {"year": int(year)} if year.isdecimal() else {}
    return PublishedExample(question, user_messages(prompt), json.dumps(answer), extra)


def functional_tests(tests: list[dict[str, str]], metadata: Any) -> dict[str, Any]:
    """The tests of a method of `Solution` as asserts. A tuple counts as a list, as it does in the authors' evaluation."""
    about = json.loads(metadata) if isinstance(metadata, str) else metadata or {}
    name = about.get("func_name")
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"metadata should name the tested method in func_name, got {name!r}")
    asserts = []
    for test in tests:
        arguments, expected = test["input"].strip().split("\n"), test["output"].strip()
        for text in (*arguments, expected):
            json.loads(text)
        call = f"Solution().{name}(*map(json.loads, {arguments!r}))"
        asserts.append(
            f"assert (lambda it: list(it) if isinstance(it, tuple) else it)({call}) == json.loads({expected!r})"
        )
    return {"asserts": asserts, "setup": FUNCTION_IMPORTS, "entry_point": "Solution"}


def read_test_cases(value: Any, name: str) -> list[dict[str, str]]:
    """Read the tests of one column: a list, JSON text of one, or base64 of zlib of a pickle of that text."""
    if value is None or value == "":
        return []
    if isinstance(value, str):
        value = json.loads(value if value.lstrip().startswith("[") else unpack_text(value, name))
    fields = ("input", "output", "testtype")
    if not isinstance(value, list) or not all(
        isinstance(test, dict) and all(isinstance(test.get(field), str) for field in fields) for test in value
    ):
        raise ValueError(f"{name} should be a list of tests with input, output and testtype as text")
    return value


def unpack_text(packed: str, name: str) -> str:
    """The text in base64 of zlib of a pickle. A pickle of anything but a text is refused: loading it could run code."""
    try:
        inflate = zlib.decompressobj()
        data = inflate.decompress(base64.b64decode(packed, validate=True), MAX_TEST_BYTES)
        if not inflate.eof:
            reason = f"more than {MAX_TEST_BYTES:,} bytes" if inflate.unconsumed_tail else "cut off"
            raise ValueError(f"{name} is packed text that is {reason}")
        text = TextUnpickler(io.BytesIO(data)).load()
    except (
        binascii.Error,
        zlib.error,
        EOFError,
        IndexError,
        KeyError,
        AttributeError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(f"{name} is neither JSON nor base64 of zlib of a pickled text: {error}") from error
    if isinstance(text, bytes):
        text = text.decode()
    if not isinstance(text, str):
        raise ValueError(f"{name} is a pickle of {type(text).__name__}; only a pickled text is read")
    return text


class TextUnpickler(pickle.Unpickler):
    """Loads pickles of plain values, which name no class and so can call nothing."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"the pickle names {module_name}.{global_name}, and only a pickled text is read")
