"""Arithmetic tasks: addition and countdown.

Addition: `17+5=` is answered by `22`. A hash of the unordered pair decides the split. A chat model can be asked in words (`prompt`) and
scored by the reward `number`.

Countdown: combine all the given numbers, each once, with + - * / to reach a target. Every problem has a solution, because it is generated
from one. Answers are parsed with `ast` against a whitelist of four operators and computed in exact fractions, so nothing in an answer is
ever executed. A hash of the sorted numbers and the target decides the split.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.data.tasks.task import Dice, check_span, final_answer, first_on_split

ADDITION = "addition"
COUNTDOWN = "countdown"
COUNTDOWN_PROMPT = (
    "Using all the numbers {numbers}, each exactly once, write an arithmetic expression that equals {target}. "
    "Use only + - * / and parentheses. Give the expression alone, or inside <answer> </answer>."
)
MAX_EXPRESSION_CHARS = 200  # far more than any solution; keeps the parser from inputs that are made to exhaust it
OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def score_addition(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 for exactly the sum in digits, ignoring spaces around it; else 0."""
    return float(completion.strip() == answer)


class Addition:
    """Add two numbers of `min_digits` to `max_digits` digits. Every pair of lengths is equally frequent."""

    name = ADDITION
    alphabet = "0123456789+="
    score = staticmethod(score_addition)

    def __init__(self, seed: int, min_digits: int = 1, max_digits: int = 3, prompt: str = "{a}+{b}=") -> None:
        check_span(ADDITION, "digits", min_digits, max_digits, least=1, most=64)
        if "{a}" not in prompt or "{b}" not in prompt:
            raise UserError(
                f"task {ADDITION}: the prompt {prompt!r} must contain {{a}} and {{b}}, where the two numbers go"
            )
        self.seed, self.min_digits, self.max_digits, self.prompt = seed, min_digits, max_digits, prompt

    def row(self, split: str, index: int) -> Row:
        """The index-th problem of a split; extra["length"] is the number of digits of the longer number."""

        def propose(attempt: int) -> tuple[str, tuple[int, int]]:
            dice = Dice(self.seed, ADDITION, split, index, attempt)
            a, b = self._number(dice), self._number(dice)
            return f"{ADDITION} {min(a, b)} {max(a, b)}", (a, b)

        a, b = first_on_split(split, propose, ADDITION)
        extra = {"task": ADDITION, "length": len(str(max(a, b)))}
        asked = self.prompt.replace("{a}", str(a)).replace("{b}", str(b))
        return Row(f"{ADDITION}/{split}/{index}", asked, ADDITION, str(a + b), extra)

    def _number(self, dice: Dice) -> int:
        length = dice.between(self.min_digits, self.max_digits)
        first = dice.between(0 if length == 1 else 1, 9)
        return int("".join(str(d) for d in [first, *(dice.between(0, 9) for _ in range(length - 1))]))


def score_countdown(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 for an expression that uses exactly the numbers of `extra["numbers"]` and equals the target, else 0."""
    result = evaluate_expression(final_answer(completion))
    if result is None:
        return 0.0
    value, used = result
    return float(value == answer and sorted(used) == sorted(extra["numbers"]))


def evaluate_expression(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an expression and the numbers in it; None for anything but numbers, + - * / and parentheses."""
    if len(expression) > MAX_EXPRESSION_CHARS or not re.fullmatch(r"[0-9+\-*/() ]+", expression):
        return None
    used: list[int] = []
    try:
        return _expression_value(ast.parse(expression, mode="eval").body, used), used
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _expression_value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_expression_value(node.left, used), _expression_value(node.right, used))
    raise ValueError("not plain arithmetic")


class Countdown:
    """`min_numbers` to `max_numbers` numbers from 1 to `max_number`, with a whole target from 1 to `max_target`.

    Each problem has a solution that uses only `signs`; RAGEN's problems are those of `+-`.
    """

    name = COUNTDOWN
    alphabet = "".join(sorted(set(COUNTDOWN_PROMPT) - set("{}") | set("0123456789, ")))
    score = staticmethod(score_countdown)

    def __init__(
        self,
        seed: int,
        min_numbers: int = 3,
        max_numbers: int = 4,
        max_number: int = 25,
        max_target: int = 100,
        signs: str = "+-*/",
    ) -> None:
        if not isinstance(signs, str) or not set(signs) <= set("+-*/") or not set(signs) - {"/"}:
            raise UserError(f"{COUNTDOWN}: signs should be some of + - * /, and not / alone, got {signs!r}")
        check_span(COUNTDOWN, "numbers", min_numbers, max_numbers, least=2, most=6)
        for key, value, least in (("max_number", max_number, 4), ("max_target", max_target, 1)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise UserError(f"{COUNTDOWN}: {key} should be a whole number of {least} or more, got {value!r}")
        self.seed, self.min_numbers, self.max_numbers = seed, min_numbers, max_numbers
        self.max_number, self.max_target, self.signs = max_number, max_target, signs

    def row(self, split: str, index: int) -> Row:
        """The index-th problem of a split; extra has its numbers and one solution."""
        count = Dice(self.seed, COUNTDOWN, split, index).between(self.min_numbers, self.max_numbers)

        def propose(attempt: int) -> tuple[str, tuple[list[int], int, str]] | None:
            dice = Dice(self.seed, COUNTDOWN, split, index, attempt)
            numbers = [dice.between(1, self.max_number) for _ in range(count)]
            target, solution = random_expression(numbers, dice, self.signs)
            if target.denominator != 1 or not 1 <= target <= self.max_target:
                return None
            return f"{COUNTDOWN} {sorted(numbers)} {target}", (numbers, int(target), solution)

        numbers, target, solution = first_on_split(split, propose, COUNTDOWN)
        prompt = COUNTDOWN_PROMPT.replace("{numbers}", ", ".join(map(str, numbers))).replace("{target}", str(target))
        extra = {"task": COUNTDOWN, "numbers": numbers, "solution": solution, "length": len(numbers)}
        return Row(f"{COUNTDOWN}/{split}/{index}", prompt, COUNTDOWN, target, extra)


def random_expression(numbers: list[int], dice: Dice, signs: str = "+-*/") -> tuple[Fraction, str]:
    """A random expression of these signs that uses every number once; its value and its text."""
    parts = [(Fraction(n), str(n)) for n in numbers]
    while len(parts) > 1:
        left_value, left = parts.pop(dice.between(0, len(parts) - 1))
        right_value, right = parts.pop(dice.between(0, len(parts) - 1))
        possible = signs if right_value else signs.replace("/", "")
        sign = possible[dice.between(0, len(possible) - 1)]
        operation = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[sign]
        parts.append((operation(left_value, right_value), f"({left} {sign} {right})"))
    value, text = parts[0]
    return value, text[1:-1]
