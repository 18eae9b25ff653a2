"""The proof checker: formulas, theorems and proofs of classical propositional logic, read from text and checked line by line.

    theorem   p & q |- q & p               premises, then the conclusion; `|- p -> p` has no premise
    proof     1 p & q given
              2 p left 1
              3 q right 1
              4 q & p and 3 2

A proof is natural deduction in Lemmon's style. Every line is a number, a formula, a rule and the numbers of earlier lines. The kernel gives each
line the set of `assume` lines it depends on, so a line stands for the sequent "premises and these assumptions entail the formula". Each
rule keeps that sequent valid. The last line must be the conclusion and depend on no assumption.

A formula is a nested tuple: ("p",), ("F",), ("&", A, B), ("|", A, B) or (">", A, B). `~A` is written for `A -> F`; the kernel knows only the latter.

This file is all that must be trusted: what `check_proof` accepts is a tautology (tests/data/test_proofs.py compares it with truth tables).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

Formula = tuple  # recursive; mypy has no recursive tuple of this kind
FALSE: Formula = ("F",)
MAX_DEPTH = 64
"""Nesting of a formula. Beyond it, comparing tuples would recurse too deeply."""
MAX_LINES = 1000
MAX_LINE_CHARS = 2000
_TOKEN = re.compile(r"\s*(->|[a-z][a-z]+|[a-z][0-9]*|[0-9]+|\S)")
_VARIABLE = re.compile(r"[a-z][0-9]*")
_RULE_NAME = re.compile(r"[a-z]{2,}")
_NUMBER = re.compile(r"[1-9][0-9]{0,5}")
_LEVELS = ((">", "->"), ("|", "|"), ("&", "&"))  # from the loosest; all associate to the right


class ProofError(Exception):
    """A proof or formula is wrong; the text says why, and in which line of a proof."""


class Theorem(NamedTuple):
    """Premises and the conclusion that should follow from them."""

    premises: tuple[Formula, ...]
    conclusion: Formula


class Line(NamedTuple):
    """One line of a proof as it is written."""

    formula: Formula
    rule: str
    references: tuple[int, ...]


class Sequent(NamedTuple):
    """A checked line: its formula, the numbers of the `assume` lines it depends on, and whether it is one."""

    formula: Formula
    assumptions: frozenset[int]
    is_assumption: bool = False


# --- formulas as text ------------------------------------------------------------------------------------------------


def negation(formula: Formula) -> Formula:
    """`~A`, which is `A -> F`."""
    return (">", formula, FALSE)


def parse_formula(text: str) -> Formula:
    """The formula of a text; ProofError if it is none."""
    return _parse_whole(_tokens(text))


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_LINE_CHARS:
        raise ProofError(f"{len(text)} characters in a line, and {MAX_LINE_CHARS} are allowed")
    return _TOKEN.findall(text)


def _parse_whole(tokens: Sequence[str]) -> Formula:
    formula, end = _parse(tokens, 0, 0, 0)
    if end < len(tokens):
        raise ProofError(f"unexpected {tokens[end]!r} after the formula {format_formula(formula)}")
    return formula


def _parse(tokens: Sequence[str], at: int, level: int, depth: int) -> tuple[Formula, int]:
    """The formula that begins at a token, with operators of this level or tighter, and the position behind it."""
    if depth > MAX_DEPTH:
        raise ProofError(f"a formula is nested more than {MAX_DEPTH} deep")
    if level == len(_LEVELS):
        return _parse_unit(tokens, at, depth)
    left, at = _parse(tokens, at, level + 1, depth)
    if at == len(tokens) or tokens[at] != _LEVELS[level][1]:
        return left, at
    right, at = _parse(tokens, at + 1, level, depth + 1)
    return (_LEVELS[level][0], left, right), at


def _parse_unit(tokens: Sequence[str], at: int, depth: int) -> tuple[Formula, int]:
    if at >= len(tokens):
        raise ProofError("the formula ends too early")
    token = tokens[at]
    if token == "~":
        formula, at = _parse(tokens, at + 1, len(_LEVELS), depth + 1)
        return negation(formula), at
    if token == "(":
        formula, at = _parse(tokens, at + 1, 0, depth + 1)
        if at >= len(tokens) or tokens[at] != ")":
            raise ProofError("a parenthesis is not closed")
        return formula, at + 1
    if token == "F" or _VARIABLE.fullmatch(token):
        return (token,), at + 1
    raise ProofError(f"expected a formula (a letter, F, ~ or a parenthesis), got {token!r}")


def format_formula(formula: Formula) -> str:
    """A formula as text, with the fewest parentheses. `A -> F` is written `~A`."""
    return _format(formula, 0)


def _format(formula: Formula, level: int) -> str:
    if len(formula) == 1:
        return str(formula[0])
    operator, left, right = formula
    if operator == ">" and right == FALSE:
        return "~" + _format(left, len(_LEVELS))
    own = next(number for number, (symbol, _) in enumerate(_LEVELS) if symbol == operator)
    text = f"{_format(left, own + 1)} {_LEVELS[own][1]} {_format(right, own)}"
    return f"({text})" if own < level else text


def parse_theorem(text: str) -> Theorem:
    """The theorem of a text, `A, B |- C`; ProofError if it is none."""
    before, turnstile, conclusion = text.partition("|-")
    if not turnstile:
        raise ProofError(f"a theorem is written `A, B |- C`; got {text!r}")
    premises = tuple(map(parse_formula, before.split(","))) if before.strip() else ()
    return Theorem(premises, parse_formula(conclusion))


def format_theorem(theorem: Theorem) -> str:
    """A theorem as text."""
    return (", ".join(map(format_formula, theorem.premises)) + " |- " + format_formula(theorem.conclusion)).strip()


# --- proofs as text --------------------------------------------------------------------------------------------------


def parse_line(text: str, number: int) -> Line:
    """The line of a proof that must have this number; ProofError if it cannot be read."""
    tokens = _tokens(text)
    if tokens[0] != str(number):
        raise ProofError(f"a line begins with its number, here {number}; got {tokens[0]!r}")
    at = next((i for i, token in enumerate(tokens) if _RULE_NAME.fullmatch(token)), None)
    if at is None:
        raise ProofError(f"no rule; a line ends with one of {', '.join(RULES)} and the numbers of lines it uses")
    if tokens[at] not in RULES:
        raise ProofError(f"unknown rule {tokens[at]!r} (known: {', '.join(RULES)})")
    for token in tokens[at + 1 :]:
        if not _NUMBER.fullmatch(token):
            raise ProofError(f"expected numbers of earlier lines after {tokens[at]}, got {token!r}")
    return Line(_parse_whole(tokens[1:at]), tokens[at], tuple(int(token) for token in tokens[at + 1 :]))


def format_proof(lines: Sequence[Line]) -> str:
    """A proof as text."""
    return "\n".join(
        " ".join([str(number), format_formula(line.formula), line.rule, *map(str, line.references)])
        for number, line in enumerate(lines, start=1)
    )


# --- rules -----------------------------------------------------------------------------------------------------------
# Each takes the written formula and the sequents of the lines it refers to, and returns the assumptions that the line depends on.

Rule = Callable[..., frozenset[int]]


def _require(is_right: bool, reason: str) -> None:
    if not is_right:
        raise ProofError(reason)


def _and(formula: Formula, a: Sequent, b: Sequent) -> frozenset[int]:
    _require(formula == ("&", a.formula, b.formula), f"`and` gives {format_formula(('&', a.formula, b.formula))}")
    return a.assumptions | b.assumptions


def _side(formula: Formula, a: Sequent, index: int, rule: str) -> frozenset[int]:
    _require(a.formula[0] == "&", f"`{rule}` needs a conjunction A & B, and the line it names is {_shown(a)}")
    _require(formula == a.formula[index], f"`{rule}` gives {format_formula(a.formula[index])}")
    return a.assumptions


def _weaken(formula: Formula, a: Sequent, index: int, rule: str) -> frozenset[int]:
    _require(formula[0] == "|", f"`{rule}` gives a disjunction A | B, and this is {format_formula(formula)}")
    side = "left" if index == 1 else "right"
    _require(formula[index] == a.formula, f"`{rule}` needs {_shown(a)} on the {side} of |")
    return a.assumptions


def _intro(formula: Formula, a: Sequent, b: Sequent, discharged: int) -> frozenset[int]:
    _require(a.is_assumption, "`intro` names an `assume` line first, then the line that was derived from it")
    _require(formula == (">", a.formula, b.formula), f"`intro` gives {format_formula(('>', a.formula, b.formula))}")
    return b.assumptions - {discharged}


def _apply(formula: Formula, a: Sequent, b: Sequent) -> frozenset[int]:
    _require(a.formula[0] == ">", f"`apply` names an implication A -> B first, and that line is {_shown(a)}")
    _require(a.formula[1] == b.formula, f"`apply` needs {format_formula(a.formula[1])}, and the second is {_shown(b)}")
    _require(formula == a.formula[2], f"`apply` gives {format_formula(a.formula[2])}")
    return a.assumptions | b.assumptions


def _cases(formula: Formula, a: Sequent, b: Sequent, c: Sequent) -> frozenset[int]:
    _require(a.formula[0] == "|", f"`cases` names a disjunction A | B first, and that line is {_shown(a)}")
    for side, other in ((a.formula[1], b), (a.formula[2], c)):
        needed = (">", side, formula)
        _require(other.formula == needed, f"`cases` needs {format_formula(needed)}, and the line is {_shown(other)}")
    return a.assumptions | b.assumptions | c.assumptions


def _absurd(formula: Formula, a: Sequent) -> frozenset[int]:
    _require(a.formula == FALSE, f"`absurd` needs F, and the line it names is {_shown(a)}")
    return a.assumptions


def _classical(formula: Formula, a: Sequent) -> frozenset[int]:
    needed = negation(negation(formula))
    _require(a.formula == needed, f"`classical` needs {format_formula(needed)}, and the line it names is {_shown(a)}")
    return a.assumptions


def _shown(line: Sequent) -> str:
    return format_formula(line.formula)


RULES: dict[str, tuple[int, Rule | None]] = {
    "given": (0, None),
    "assume": (0, None),
    "and": (2, _and),
    "left": (1, lambda formula, a: _side(formula, a, 1, "left")),
    "right": (1, lambda formula, a: _side(formula, a, 2, "right")),
    "inl": (1, lambda formula, a: _weaken(formula, a, 1, "inl")),
    "inr": (1, lambda formula, a: _weaken(formula, a, 2, "inr")),
    "intro": (2, _intro),
    "apply": (2, _apply),
    "cases": (3, _cases),
    "absurd": (1, _absurd),
    "classical": (1, _classical),
}
"""How many lines each rule names, and what checks it. `given` and `assume` name none."""


# --- checking --------------------------------------------------------------------------------------------------------


def check_line(line: Line, number: int, earlier: Sequence[Sequent], theorem: Theorem) -> Sequent:
    """The sequent of a line, which follows from the earlier ones; ProofError with the reason if it does not."""
    count, rule = RULES[line.rule]
    if len(line.references) != count:
        raise ProofError(f"`{line.rule}` names {count} lines, got {len(line.references)}")
    for reference in line.references:
        if not 1 <= reference < number:
            raise ProofError(f"line {reference} is not an earlier line")
    if line.rule == "given":
        _require(line.formula in theorem.premises, f"{format_formula(line.formula)} is not a premise of the theorem")
        return Sequent(line.formula, frozenset())
    if rule is None:
        return Sequent(line.formula, frozenset({number}), is_assumption=True)
    named = [earlier[reference - 1] for reference in line.references]
    extra = (line.references[0],) if line.rule == "intro" else ()
    return Sequent(line.formula, rule(line.formula, *named, *extra))


def check_proof(theorem: Theorem, text: str) -> list[Sequent]:
    """The sequents of a proof's lines; ProofError, which names the line and the reason, if it does not prove the theorem."""
    written = [row for row in text.splitlines() if row.strip()]
    if not written:
        raise ProofError("the proof is empty")
    if len(written) > MAX_LINES:
        raise ProofError(f"{len(written)} lines, and {MAX_LINES} are allowed")
    checked: list[Sequent] = []
    for number, row in enumerate(written, start=1):
        try:
            checked.append(check_line(parse_line(row, number), number, checked, theorem))
        except ProofError as error:
            raise ProofError(f"line {number}: {error}") from None
    last = checked[-1]
    if last.formula != theorem.conclusion:
        expected = format_formula(theorem.conclusion)
        raise ProofError(f"line {len(checked)}: the last line is {_shown(last)}, and the theorem ends with {expected}")
    if last.assumptions:
        names = ", ".join(map(str, sorted(last.assumptions)))
        raise ProofError(f"line {len(checked)}: it still depends on the assumptions of lines {names}; use `intro`")
    return checked
