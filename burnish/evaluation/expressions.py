r"""Writes LaTeX expressions in a normal form, so that equal ones become equal texts: `\frac{\sqrt8}{4}` and `\sqrt{2}/2` are `\sqrt{2}/2`.

An expression is expanded to a sum of terms: a rational coefficient times powers of atoms. Atoms are letters, the primes under roots
(2^(1/2) for \sqrt{2}), and what is not expanded: functions, denominators with several terms, roots of letters. All numbers are exact.
Equality is proved only as far as this goes; other equal expressions may have different normal forms. Sizes are bounded, so no text takes long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction

Term = tuple[tuple[str, Fraction], ...]
"""The atoms of a term with their exponents, in order."""
Sum = Mapping[Term, Fraction]
"""The coefficient of each term. Zero has no terms."""

MAX_CHARS = 400
MAX_DEPTH = 20
MAX_TERMS = 100
MAX_BITS = 4_000
"""Most bits of a number."""
MAX_EXPONENT = 32
"""Largest power that a sum is expanded to."""
MAX_FACTORED = 10**8
"""Largest number whose roots are simplified."""
_TOKENS = re.compile(r"\d+(?:\.\d+)?|\.\d+|\\[A-Za-z]+|[A-Za-z]|[-+*/^_{}()\[\]]|(\s+)|(.)", re.DOTALL)
_LETTER_NAMES = (
    "alpha beta gamma delta epsilon varepsilon zeta eta theta lambda mu nu xi pi rho sigma tau phi varphi chi psi omega "
    "Gamma Delta Theta Lambda Sigma Phi Psi Omega infty"
)
_FUNCTION_NAMES = "ln log lg exp sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh"
_LETTERS, _FUNCTIONS = (frozenset("\\" + name for name in names.split()) for names in (_LETTER_NAMES, _FUNCTION_NAMES))
_CLOSING = {"(": ")", "{": "}", "[": "]"}
_HALF = Fraction(1, 2)


class Unreadable(Exception):
    """Raised for a text that is no expression, that has several readings, or that is too large."""


def normal_expression(text: str) -> str | None:
    """Return the normal form of an expression; None if the text is none that can be read."""
    try:
        reader = _Reader(text)
        value = reader.sum()
        if reader.next is not None:
            raise Unreadable
    except Unreadable:
        return None
    return sum_text(value)


# --- arithmetic ----------------------------------------------------------------------------------------------------------


def constant(value: Fraction | int) -> Sum:
    """Return a number as a sum."""
    return {(): Fraction(value)} if value else {}


def atom(name: str, exponent: Fraction | int = 1) -> Sum:
    """Return a power of an atom as a sum."""
    return {((name, Fraction(exponent)),): Fraction(1)}


def add(left: Sum, right: Sum, sign: int = 1) -> Sum:
    """Return left + sign * right."""
    found = dict(left)
    for term, coefficient in right.items():
        found[term] = found.get(term, Fraction(0)) + sign * coefficient
    return _bounded({term: value for term, value in found.items() if value})


def multiply(left: Sum, right: Sum) -> Sum:
    """Return the product, expanded."""
    if len(left) * len(right) > MAX_TERMS:
        raise Unreadable
    found: dict[Term, Fraction] = {}
    for one, a in left.items():
        for other, b in right.items():
            for term, coefficient in _product(one, other, a * b).items():
                found[term] = found.get(term, Fraction(0)) + coefficient
    return _bounded({term: value for term, value in found.items() if value})


def _product(left: Term, right: Term, coefficient: Fraction) -> Sum:
    exponents = dict(left)
    for name, exponent in right:
        exponents[name] = exponents.get(name, Fraction(0)) + exponent
    for name, exponent in exponents.items():
        if name.isdigit():  # 2^(3/2) is 2 * 2^(1/2)
            whole = math.floor(exponent)
            coefficient *= Fraction(int(name)) ** whole
            exponents[name] = exponent - whole
    return {tuple(sorted((name, e) for name, e in exponents.items() if e)): coefficient}


def power(base: Sum, exponent: Fraction) -> Sum:
    """Return a rational power. Positive numbers come out of roots; other parts of a root stay under it."""
    if not base and exponent <= 0:
        raise Unreadable
    if not base:
        return base
    if exponent.denominator != 1:
        return _root_power(base, exponent)
    if len(base) == 1:
        ((term, coefficient),) = base.items()
        size = coefficient.numerator.bit_length() + coefficient.denominator.bit_length()
        if size * abs(exponent) > MAX_BITS:
            raise Unreadable
        return _product(tuple((name, e * exponent) for name, e in term), (), coefficient ** int(exponent))
    if exponent < 0:
        content, rest = _divided_by_content(base, sign=True)
        return multiply(power(content, exponent), atom(f"({sum_text(rest)})", exponent))
    if exponent > MAX_EXPONENT:
        raise Unreadable
    found = constant(1)
    for _ in range(int(exponent)):
        found = multiply(found, base)
    return found


def _root_power(base: Sum, exponent: Fraction) -> Sum:
    content, rest = _divided_by_content(base, sign=False)
    ((_, number),) = content.items()
    found = multiply(
        _number_power(Fraction(number.numerator), exponent), _number_power(Fraction(number.denominator), -exponent)
    )
    if rest == constant(1):
        return found
    if len(rest) == 1:  # primes leave the root, letters stay
        ((term, coefficient),) = rest.items()
        primes = tuple((name, e) for name, e in term if name.isdigit())
        found = multiply(found, _product(tuple((name, e * exponent) for name, e in primes), (), Fraction(1)))
        rest = {tuple(one for one in term if one not in primes): coefficient}
        if rest == constant(1):
            return found
        if rest == constant(-1):
            raise Unreadable  # an imaginary number
    index = "" if exponent.denominator == 2 else f"[{exponent.denominator}]"
    return multiply(found, atom(rf"\sqrt{index}{{{sum_text(rest)}}}", exponent.numerator))


def _number_power(number: Fraction, exponent: Fraction) -> Sum:
    left = int(number)
    if left > MAX_FACTORED:
        raise Unreadable
    found, prime = constant(1), 2
    while left > 1:
        prime = prime if prime * prime <= left else left
        while left % prime == 0:
            left //= prime
            found = multiply(found, _product(((str(prime), exponent),), (), Fraction(1)))
        prime += 1
    return found


def _divided_by_content(value: Sum, sign: bool) -> tuple[Sum, Sum]:
    """Return the greatest common divisor of the coefficients, with the sign of the first term if asked, and the rest."""
    divisor = Fraction(
        math.gcd(*(c.numerator for c in value.values())), math.lcm(*(c.denominator for c in value.values()))
    )
    if sign and value[_in_order(value)[0]] < 0:
        divisor = -divisor
    return constant(divisor), {term: coefficient / divisor for term, coefficient in value.items()}


def _bounded(value: Sum) -> Sum:
    sizes = (max(c.numerator.bit_length(), c.denominator.bit_length()) for c in value.values())
    if len(value) > MAX_TERMS or max(sizes, default=0) > MAX_BITS:
        raise Unreadable
    return value


# --- texts ---------------------------------------------------------------------------------------------------------------


def sum_text(value: Sum) -> str:
    """Return a sum as text. `normal_expression` of the text is the text."""
    text = ""
    for term in _in_order(value):
        coefficient = value[term]
        text += ("-" if coefficient < 0 else "+" if text else "") + _term_text(term, abs(coefficient))
    return text or "0"


def _in_order(value: Sum) -> list[Term]:
    def degree(term: Term) -> Fraction:
        return sum((exponent for name, exponent in term if not name.isdigit()), Fraction(0))

    return sorted(value, key=lambda term: (-degree(term), -len(term), term))


def _term_text(term: Term, coefficient: Fraction) -> str:
    under_root = math.prod(int(name) for name, exponent in term if name.isdigit() and exponent == _HALF)
    factors = [rf"\sqrt{{{under_root}}}"] if under_root > 1 else []
    below = [name for name, exponent in term if exponent == -1]
    divisor = below[0] if len(below) == 1 and coefficient.denominator == 1 else None
    for name, exponent in term:
        if name == divisor or (name.isdigit() and exponent == _HALF):
            continue
        shown = str(exponent)
        factors.append(name if exponent == 1 else f"{name}^{shown if len(shown) == 1 else f'{{{shown}}}'}")
    text = "" if coefficient.numerator == 1 and factors else str(coefficient.numerator)
    for factor in factors:
        if text and factor[0].isdigit():
            text += r"\cdot "
        elif re.search(r"\\[A-Za-z]+$", text) and factor[0].isalpha():
            text += " "
        text += factor
    divisor = divisor or (str(coefficient.denominator) if coefficient.denominator != 1 else None)
    return f"{text}/{divisor}" if divisor else text


# --- reading -------------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads one expression by recursive descent."""

    def __init__(self, text: str) -> None:
        found = list(_TOKENS.finditer(text[: MAX_CHARS + 1]))
        if len(text) > MAX_CHARS or any(one[2] for one in found):
            raise Unreadable
        self.tokens = [one[0] for one in reversed(found) if one[1] is None]
        self.depth = 0

    @property
    def next(self) -> str | None:
        return self.tokens[-1] if self.tokens else None

    def take(self, *expected: str) -> str:
        if self.next is None or (expected and self.next not in expected):
            raise Unreadable
        return self.tokens.pop()

    def sum(self) -> Sum:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise Unreadable
        sign = self.sign()
        found = add({}, self.product(), sign)
        while self.next in ("+", "-"):
            sign = 1 if self.take() == "+" else -1
            found = add(found, self.product(), sign)
        self.depth -= 1
        return found

    def sign(self) -> int:
        return -1 if self.next in ("+", "-") and self.take() == "-" else 1

    def product(self) -> Sum:
        found = self.implicit_product()
        while self.next in ("*", "/", r"\cdot", r"\times", r"\div"):
            is_division = self.take() in ("/", r"\div")
            sign = constant(self.sign())
            factor = power(self.factor(), Fraction(-1)) if is_division else self.implicit_product()
            if is_division and self.starts_factor():
                raise Unreadable  # 1/2x has two readings
            found = multiply(found, multiply(sign, factor))
        return found

    def implicit_product(self) -> Sum:
        """Read factors without a sign between them. A number follows nothing, but the fraction of a mixed number follows an integer."""
        is_integer = self.next is not None and self.next.isdigit()
        found = self.factor()
        if is_integer and self.next == r"\frac" and set(found) <= {()}:
            fraction = self.factor()
            found = add(found, fraction) if set(fraction) == {()} else multiply(found, fraction)
        while self.starts_factor():
            assert self.next is not None
            if self.next[0].isdigit() or self.next[0] == ".":
                raise Unreadable
            found = multiply(found, self.factor())
        return found

    def starts_factor(self) -> bool:
        if self.next is None:
            return False
        named = self.next in _LETTERS or self.next in _FUNCTIONS or self.next in (r"\frac", r"\sqrt")
        return named or self.next in "({" or self.next[0].isdigit() or self.next[0] == "." or self.next.isalpha()

    def factor(self) -> Sum:
        base = self.atom()
        if self.next != "^":
            return base
        self.take()
        sign = self.sign()
        exponent = multiply(constant(sign), self.group() if self.next == "{" else self.atom())
        if set(exponent) <= {()}:
            return power(base, exponent.get((), Fraction(0)))
        text = sum_text(base)
        return atom(f"{text if len(text) == 1 else f'({text})'}^{{{sum_text(exponent)}}}")

    def atom(self) -> Sum:
        if self.next in ("(", "{", "["):
            return self.group()
        token = self.take()
        if token == r"\frac":
            numerator, denominator = self.argument(), self.argument()
            return multiply(numerator, power(denominator, Fraction(-1)))
        if token == r"\sqrt":
            index = self.group() if self.next == "[" else constant(2)
            if set(index) != {()} or index[()].denominator != 1:
                raise Unreadable
            return power(self.argument(), 1 / index[()])
        if token in _FUNCTIONS:
            return self.function(token)
        if token[0].isdigit() or token[0] == ".":
            if self.next == "_":
                raise Unreadable  # a base
            return constant(Fraction(token))
        if token.isalpha() or token in _LETTERS:
            return atom(token + self.subscript())
        raise Unreadable

    def group(self) -> Sum:
        closing = _CLOSING[self.take(*_CLOSING)]
        found = self.sum()
        self.take(closing)
        return found

    def argument(self) -> Sum:
        r"""Read an argument of \frac or \sqrt: a group, or one character. Of the number in \frac12 it takes one digit."""
        if self.next is not None and self.next.isdigit() and len(self.next) > 1:
            digit, rest = self.next[0], self.next[1:]
            self.tokens[-1:] = [rest]
            return constant(int(digit))
        return self.group() if self.next == "{" else self.atom()

    def subscript(self) -> str:
        if self.next != "_":
            return ""
        self.take()
        found = sum_text(self.group() if self.next == "{" else self.atom())
        return f"_{{{found}}}"

    def function(self, name: str) -> Sum:
        name += self.subscript()
        exponent = Fraction(1)
        if self.next == "^":
            self.take()
            given = self.group() if self.next == "{" else self.atom()
            if set(given) != {()} or given[()].denominator != 1 or given[()] < 1:
                raise Unreadable  # \sin^{-1} has two readings
            exponent = given[()]
        argument = self.group() if self.next in ("(", "{") else self.implicit_product()
        return atom(f"{name}({sum_text(argument)})", exponent)
