"""The calculator."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.environments.tools import calculator
from burnish.environments.tools.base import ToolResult
from burnish.environments.tools.calculator import Calculator


def calculate(expression: str) -> str:
    result = asyncio.run(Calculator().call({"expression": expression}))
    return result.text if isinstance(result, ToolResult) else result


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("(3 + 4) * -2", "-14"),
        ("2**100", str(2**100)),
        ("2^10", "1024"),
        ("7 // 2 + 7 % 4", "6"),
        ("10 / 4", "2.5"),
        ("12 / 4", "3"),
        ("1/3", "0.333333333333"),
        ("0.1 + 0.2", "0.3"),
        ("1,234 * 2", "2468"),
        ("sqrt(16) + abs(-2) + round(2.567, 1)", "8.6"),
        ("max(1, 2, 3) - min(4, 5)", "-1"),
        ("floor(2.7) + ceil(2.1)", "5"),
        ("log(e) + exp(0) + sin(0)", "2"),
        ("math.gcd(12, 18)", "6"),
        ("6 × 7", "42"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1/0", "division by zero"),
        ("9**9**9", "too large"),
        ("10**1300", "too large"),
        ("1e400", "too large"),
        ("factorial(1000)", "factorial takes an integer"),
        ("sqrt(-1)", "has no value"),
        ("(-8) ** 0.5", "not real"),
        ("2 +", "is not an arithmetic expression"),
        ("sqroot(2)", "did you mean 'sqrt'?"),
        ("round()", "round takes 1 to 2 arguments, got 0"),
        ("-" * 150 + "1", "more than 50 levels"),
        ("[" + "-" * 150 + "1]", "is not arithmetic"),
        ("__import__('os').system('true')", "is not a function of the calculator"),
        ("().__class__", "is not arithmetic"),
        ("1" * 201, "201 characters"),
        ("True + 1", "is not arithmetic"),
    ],
)
def test_what_is_not_arithmetic_is_an_error_text(expression: str, problem: str) -> None:
    text = calculate(expression)
    assert text.startswith("Error: ")
    assert problem in text


@given(st.text("0123456789+-*/%(). ", max_size=40))
def test_any_text_gives_pythons_value_or_an_error(expression: str) -> None:
    try:
        value = calculator.calculate(expression)
    except calculator.CannotCalculate:
        return
    assert math.isclose(float(calculator.format_number(value)), eval(expression.strip()), rel_tol=1e-11)


def test_options_are_checked() -> None:
    with pytest.raises(UserError, match="max_chars"):
        Calculator(max_chars=0)
    assert Calculator(name="sums").name == "sums"
