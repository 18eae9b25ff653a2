"""An arithmetic calculator. It walks the syntax tree of an expression, and never evaluates code.

Integers are exact. Bounds on length, depth and the size of numbers keep each call under a millisecond, so the tool runs in the runner.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any, ClassVar

from burnish.config.errors import UserError, did_you_mean
from burnish.environments.base import RunsIn
from burnish.environments.tools.base import Tool, ToolResult
from burnish.environments.tools.values import WrongArguments, check_arguments, error_result, tool_schema

MAX_DEPTH = 50
MAX_BITS = 4096
"""The largest integer has this many bits."""
MAX_FACTORIAL = 200
MAX_ROUND_DIGITS = 1000
MAX_SHOWN_CHARS = 100
SIGNIFICANT_DIGITS = 12

Number = int | float
CONSTANTS: dict[str, Number] = {"pi": math.pi, "e": math.e, "tau": math.tau}


class CannotCalculate(Exception):
    """The expression is not arithmetic, passes a bound or has no value. The message is for the model."""


def _power(base: Number, exponent: Number) -> Number:
    if (
        isinstance(base, int)
        and isinstance(exponent, int)
        and base.bit_length() * abs(exponent) > MAX_BITS
        and abs(base) > 1
    ):
        raise CannotCalculate(f"the power is too large: integers have at most {MAX_BITS} bits")
    value = base**exponent
    if isinstance(value, complex):
        raise CannotCalculate("a root of a negative number is not real")
    return value


def _factorial(number: Number) -> int:
    if not isinstance(number, int) or not 0 <= number <= MAX_FACTORIAL:
        raise CannotCalculate(f"factorial takes an integer from 0 to {MAX_FACTORIAL}")
    return math.factorial(number)


def _round(number: Number, digits: Number = 0) -> Number:
    if not isinstance(digits, int) or abs(digits) > MAX_ROUND_DIGITS:
        raise CannotCalculate("round takes the number of digits as an integer")
    return round(number, digits) if digits else round(number)


BINARY: dict[type, Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
UNARY: dict[type, Callable[[Any], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
FUNCTIONS: dict[str, tuple[Callable[..., Number], int, int]] = {  # function, least and most arguments
    "abs": (abs, 1, 1),
    "acos": (math.acos, 1, 1),
    "asin": (math.asin, 1, 1),
    "atan": (math.atan, 1, 1),
    "atan2": (math.atan2, 2, 2),
    "ceil": (math.ceil, 1, 1),
    "cos": (math.cos, 1, 1),
    "degrees": (math.degrees, 1, 1),
    "exp": (math.exp, 1, 1),
    "factorial": (_factorial, 1, 1),
    "floor": (math.floor, 1, 1),
    "gcd": (math.gcd, 2, 2),
    "lcm": (math.lcm, 2, 2),
    "log": (math.log, 1, 2),
    "log10": (math.log10, 1, 1),
    "log2": (math.log2, 1, 1),
    "max": (max, 2, 20),
    "min": (min, 2, 20),
    "radians": (math.radians, 1, 1),
    "round": (_round, 1, 2),
    "sin": (math.sin, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "tan": (math.tan, 1, 1),
}


class Calculator(Tool):
    """Calculates `+ - * / // % **`, parentheses, and functions such as `sqrt`, `log`, `round`, `min` and `max`."""

    runs_in: ClassVar[RunsIn] = "runner"

    def __init__(self, name: str = "calculator", max_chars: int = 200) -> None:
        """`max_chars` bounds the length of an expression, at most 1000."""
        if not 1 <= max_chars <= 1000:
            raise UserError(f"calculator: max_chars must be from 1 to 1000, not {max_chars}")
        self._max_chars = max_chars
        description = (
            "Calculate an arithmetic expression, such as (3 + 4) * 2 ** 0.5. It knows + - * / // % **, parentheses, "
            "pi, e, and sqrt, abs, round, min, max, floor, ceil, log, exp, sin, cos, tan."
        )
        expression = {"type": "string", "description": "The expression."}
        self.schema = tool_schema(name, description, {"expression": expression}, ["expression"])

    async def call(self, arguments: dict[str, Any]) -> ToolResult | str:
        """Calculate the expression. An expression that has no value gives an error text."""
        try:
            expression = check_arguments(self.schema, arguments)["expression"]
        except WrongArguments as error:
            return error_result(str(error), "wrong_arguments")
        if len(expression) > self._max_chars:
            return error_result(f"the expression has {len(expression)} characters, and {self._max_chars} are allowed")
        try:
            return format_number(calculate(expression))
        except CannotCalculate as error:
            return error_result(str(error))


def calculate(expression: str) -> Number:
    """The value of an expression; CannotCalculate with the reason if it has none."""
    text = expression.strip().replace("^", "**").replace("×", "*").replace("·", "*").replace("÷", "/").replace("−", "-")
    text = (
        re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text) if "(" not in text else text
    )  # 1,234; not the commas of a call
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CannotCalculate(f"{_shown(expression)} is not an arithmetic expression") from None
    try:
        return _value(tree.body, 0)
    except ZeroDivisionError:
        raise CannotCalculate("division by zero") from None
    except OverflowError:
        raise CannotCalculate("a number is too large") from None
    except RecursionError:
        raise CannotCalculate(f"the expression has more than {MAX_DEPTH} levels") from None
    except (ValueError, TypeError) as error:
        raise CannotCalculate(f"{_shown(expression)} has no value ({error})") from None


def _value(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise CannotCalculate(f"the expression has more than {MAX_DEPTH} levels")
    match node:
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int() | float() as value):
            return _checked(value)
        case ast.BinOp(left, operation, right) if type(operation) in BINARY:
            return _checked(BINARY[type(operation)](_value(left, depth + 1), _value(right, depth + 1)))
        case ast.UnaryOp(operation, operand) if type(operation) in UNARY:
            return UNARY[type(operation)](_value(operand, depth + 1))
        case ast.Name(name) if name in CONSTANTS:
            return CONSTANTS[name]
        case ast.Name(name):
            known = [*CONSTANTS, *FUNCTIONS]
            raise CannotCalculate(f"unknown name {_shown(name)}{did_you_mean(name, known)}")
        case ast.Call(func, positional, []):
            return _checked(_call(_function_name(func), [_value(argument, depth + 1) for argument in positional]))
    raise CannotCalculate(f"{_shown(ast.unparse(node))} is not arithmetic")


def _function_name(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(ast.Name("math"), name):
            return name
    raise CannotCalculate(f"{_shown(ast.unparse(node))} is not a function of the calculator")


def _call(name: str, arguments: list[Number]) -> Number:
    if name not in FUNCTIONS:
        known = ", ".join(FUNCTIONS)
        raise CannotCalculate(f"unknown function {_shown(name)}{did_you_mean(name, FUNCTIONS)} (known: {known})")
    function, least, most = FUNCTIONS[name]
    if not least <= len(arguments) <= most:
        takes = f"{least}" if least == most else f"{least} to {most}"
        raise CannotCalculate(f"{name} takes {takes} arguments, got {len(arguments)}")
    return function(*arguments)


def _checked(value: Number) -> Number:
    if isinstance(value, int):
        if value.bit_length() > MAX_BITS:
            raise CannotCalculate(f"a number is too large: integers have at most {MAX_BITS} bits")
    elif not math.isfinite(value):
        raise CannotCalculate("a number is too large")
    return value


def format_number(value: Number) -> str:
    """Integers exactly, other numbers with at most 12 significant digits."""
    if isinstance(value, int):
        return str(value)
    if value.is_integer() and abs(value) < 10**SIGNIFICANT_DIGITS:
        return str(int(value))
    return f"{value:.{SIGNIFICANT_DIGITS}g}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "...")
