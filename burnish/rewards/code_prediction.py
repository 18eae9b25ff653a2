"""Verifiers of predictions about a program: what a call returns, and which call returns a value (CRUXEval, 2401.03065).

`code_output` compares two literals and runs nothing. `code_input` runs the row's function in the sandbox with the arguments of the
completion. An argument is an expression of literals, operators and constructors of built-in types, so it has a plain value, whose `==`
is Python's own. Everything else is a wrong answer.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from burnish.rewards.answer_texts import answer_block
from burnish.rewards.code_reward import PASSED, ProgramTests, parse_tests, process_runner
from burnish.rewards.score_types import PartResult, require_answer

MAX_CHARS = 10_000
"""Longer predictions are wrong: no row needs them, and parsing deep nesting takes memory."""
UNREADABLE = (ValueError, SyntaxError, TypeError, RecursionError, MemoryError)
PLAIN_NODES = (
    ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp, ast.BinOp, ast.Starred, ast.keyword,
    ast.operator, ast.unaryop, ast.expr_context,
)  # fmt: skip
CONSTRUCTORS = frozenset(
    (
        "bool",
        "bytearray",
        "bytes",
        "chr",
        "complex",
        "dict",
        "float",
        "frozenset",
        "int",
        "list",
        "range",
        "set",
        "str",
        "tuple",
    )
)


def code_output(completion: str, answer: Any, extra: Mapping[str, Any]) -> float:
    """1 if the literal in the `<answer>` block equals the expected one. `f(1) == 2` and `assert f(1) == 2` answer 2."""
    require_answer(answer)
    expected, predicted = expected_output(answer), predicted_expression(completion)
    if predicted is None:
        return 0.0
    if isinstance(predicted, ast.Compare):
        predicted = predicted.comparators[-1]
    try:
        return float(ast.literal_eval(predicted) == expected)
    except UNREADABLE:
        return 0.0


def expected_output(answer: Any) -> Any:
    """The value of a row's expected output; ValueError if it is no literal."""
    try:
        return ast.literal_eval(str(answer))
    except UNREADABLE as error:
        raise ValueError(f"the expected output {answer!r} is not a Python literal") from error


def code_input(completion: str, answer: Any, extra: Mapping[str, Any]) -> PartResult:
    """1 if the call `f(...)` in the `<answer>` block returns the expected value. The row's function runs in the sandbox."""
    require_answer(answer)
    tests, arguments = prediction_tests(answer), predicted_arguments(completion)
    if arguments is None:
        return PartResult(0.0, accuracy=0.0, details="no call of f with plain arguments in <answer>")
    program = (
        "def as_given(*positional, **named):\n    return positional, named\n\n"
        f"def predicted_input():\n    return as_given({arguments})\n"
    )
    (outcome,), ran_out = process_runner().outcomes(program, tests, stops_early=True)
    is_right = float(outcome == PASSED)
    return PartResult(is_right, accuracy=is_right, details=outcome.encode(errors="replace").decode(), timed_out=ran_out)


def prediction_tests(answer: Any) -> ProgramTests:
    """The test of a row: its function, called with the predicted arguments, returns the expected output."""
    row = json.loads(answer) if isinstance(answer, str) else answer
    if not isinstance(row, Mapping) or not all(isinstance(row.get(key), str) for key in ("code", "output")):
        raise ValueError("the expected answer should be an object with code and output")
    expected_output(row["output"])
    test = f"given = predicted_input()\nassert f(*given[0], **given[1]) == ({row['output']})"
    return parse_tests({"asserts": [test], "setup": row["code"], "entry_point": "predicted_input"})


def predicted_expression(completion: str) -> ast.expr | None:
    """The expression in the last `<answer>` block, without backticks and `assert`; None if there is none."""
    text = (answer_block(completion) or "").strip("`").removeprefix("python").strip().removeprefix("assert ").strip()
    if not text or len(text) > MAX_CHARS:
        return None
    try:
        return ast.parse(text, mode="eval").body
    except UNREADABLE:
        return None


def predicted_arguments(completion: str) -> str | None:
    """The arguments of the predicted call of `f` as source; None for anything else than a call with plain arguments."""
    call = predicted_expression(completion)
    if isinstance(call, ast.Compare):
        call = call.left
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.func.id != "f":
        return None
    parts = [*call.args, *call.keywords]
    try:
        return ", ".join(ast.unparse(part) for part in parts) if all(map(is_plain, parts)) else None
    except RecursionError:
        return None


def is_plain(node: ast.AST) -> bool:
    """Whether an expression has only literals, operators and constructors of built-in types."""
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in CONSTRUCTORS
        return named and all(is_plain(part) for part in (*node.args, *node.keywords))
    return isinstance(node, PLAIN_NODES) and all(is_plain(child) for child in ast.iter_child_nodes(node))
