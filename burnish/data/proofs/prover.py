"""A prover for classical propositional logic, which writes proofs for the kernel. It is not trusted: the kernel checks what it writes.

The search is Dyckhoff's contraction-free calculus LJT (1992), which terminates without a loop check and is complete for intuitionistic
logic. A theorem that needs classical logic is proved by way of its double negation (Glivenko's theorem). The search builds a proof term; a term
is reduced, so that no step is introduced only to be eliminated, and then written as lines, equal parts once.

A term is a nested tuple. Assumptions are identified by their formula: discharging one discharges every use of that formula, which can only
leave fewer assumptions.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from burnish.data.proofs.kernel import FALSE, RULES, Formula, Line, Theorem, negation

Term = tuple  # ("given", A), ("assume", A), ("intro", A, t), ("and", s, t), ("inl", A | B, t), ("absurd", A, t), ...
Context = dict[Formula, Term]
MAX_STEPS = 20_000
"""Steps of one search. A theorem that needs more counts as not proved."""

MAX_REDUCTIONS = 100


class SearchTooLong(Exception):
    """The search used up its steps."""


def find_proof(theorem: Theorem) -> list[Line] | None:
    """A proof of a theorem; None if it does not hold, or if the search would be too long."""
    context: Context = {premise: ("given", premise) for premise in theorem.premises}
    search = Search()
    try:
        term = search.prove(context, theorem.conclusion)
        if term is None:
            goal = negation(theorem.conclusion)
            denied = search.prove({**context, goal: ("assume", goal)}, FALSE)
            if denied is None:
                return None
            term = ("classical", theorem.conclusion, ("intro", goal, denied))
    except SearchTooLong:
        return None
    return as_lines(reduced(term))


class Search:
    """One search: counts its steps."""

    def __init__(self) -> None:
        self.steps = 0

    def prove(self, context: Mapping[Formula, Term], goal: Formula) -> Term | None:
        """A term of the goal from the context, or None if there is none."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise SearchTooLong
        simpler = _simplified(dict(context))
        if goal in simpler:
            return simpler[goal]
        if FALSE in simpler:
            return ("absurd", goal, simpler[FALSE])
        if goal[0] == ">":
            body = self.prove({**simpler, goal[1]: simpler.get(goal[1], ("assume", goal[1]))}, goal[2])
            return None if body is None else ("intro", goal[1], body)
        if goal[0] == "&":
            sides = [self.prove(simpler, side) for side in goal[1:]]
            return None if None in sides else ("and", *sides)
        either = next((formula for formula in simpler if formula[0] == "|"), None)
        if either is not None:
            return self._by_cases(simpler, either, goal)
        return self._by_choice(simpler, goal)

    def _by_cases(self, context: Context, either: Formula, goal: Formula) -> Term | None:
        rest = {formula: term for formula, term in context.items() if formula != either}
        branches = []
        for side in either[1:]:
            branch = self.prove({**rest, side: rest.get(side, ("assume", side))}, goal)
            if branch is None:
                return None
            branches.append(("intro", side, branch))
        return ("cases", goal, context[either], *branches)

    def _by_choice(self, context: Context, goal: Formula) -> Term | None:
        """The rules that cannot be undone: a side of a disjunction, and an implication whose premise is an implication."""
        if goal[0] == "|":
            for rule, side in (("inl", goal[1]), ("inr", goal[2])):
                term = self.prove(context, side)
                if term is not None:
                    return (rule, goal, term)
        for formula, term in context.items():
            if formula[0] != ">" or formula[1][0] != ">":
                continue
            (_, (_, a, b), c) = formula
            rest = {other: one for other, one in context.items() if other != formula}
            weaker = (">", b, c)  # b -> (a -> b) -> c
            shorter = ("intro", b, ("apply", term, ("intro", a, ("assume", b))))
            inner = self.prove({**rest, weaker: rest.get(weaker, shorter)}, formula[1])
            if inner is None:
                continue
            outer = self.prove({**rest, c: rest.get(c, ("apply", term, inner))}, goal)
            if outer is not None:
                return outer
        return None


def _simplified(context: Context) -> Context:
    """The context after all rules that lose nothing: conjunctions are split, and implications whose premise is known are applied."""
    while True:
        for formula, term in context.items():
            news = _consequences(formula, term, context)
            if news is not None:
                break
        else:
            return context
        del context[formula]
        for other, one in news:
            context.setdefault(other, one)


def _consequences(formula: Formula, term: Term, context: Context) -> list[tuple[Formula, Term]] | None:
    """What replaces a formula of the context, or None if no rule applies to it."""
    if formula[0] == "&":
        return [(formula[1], ("left", term)), (formula[2], ("right", term))]
    if formula[0] != ">":
        return None
    _, premise, then = formula
    if premise in context and premise != formula:
        return [(then, ("apply", term, context[premise]))]
    if premise == FALSE:
        return []
    if premise[0] == "&":
        _, a, b = premise
        inner = ("intro", b, ("apply", term, ("and", ("assume", a), ("assume", b))))
        return [((">", a, (">", b, then)), ("intro", a, inner))]
    if premise[0] == "|":
        return [
            ((">", side, then), ("intro", side, ("apply", term, (rule, premise, ("assume", side)))))
            for rule, side in (("inl", premise[1]), ("inr", premise[2]))
        ]
    return None


# --- terms -----------------------------------------------------------------------------------------------------------


def reduced(term: Term) -> Term:
    """A term without detours: `apply` of an `intro`, `left` of an `and`, `cases` of an `inl`, and `intro` of an `apply` to the same."""
    for _ in range(MAX_REDUCTIONS):  # a term that is not fully reduced is a proof too
        smaller = _reduced_once(term)
        if smaller == term:
            break
        term = smaller
    return term


def _reduced_once(term: Term) -> Term:
    rule = term[0]
    if rule in ("given", "assume"):
        return term
    parts = [_reduced_once(part) if _is_term(part) else part for part in term[1:]]
    match (rule, *parts):
        case ("apply", ("intro", a, body), argument):
            return _substituted(body, a, argument)
        case ("left", ("and", s, _)):
            return s
        case ("right", ("and", _, t)):
            return t
        case ("cases", _, ("inl", _, s), branch, _):
            return ("apply", branch, s)
        case ("cases", _, ("inr", _, s), _, branch):
            return ("apply", branch, s)
        case ("intro", a, ("apply", function, ("assume", b))) if a == b and a not in _assumed(function):
            return function
        case ("absurd", formula, inner) if formula == FALSE:
            return inner
    return (rule, *parts)


def _is_term(part: object) -> bool:
    return isinstance(part, tuple) and part[0] in RULES


def _assumed(term: Term) -> set[Formula]:
    """The formulas of the open assumptions of a term."""
    if term[0] == "assume":
        return {term[1]}
    inside = set(itertools.chain.from_iterable(_assumed(part) for part in term[1:] if _is_term(part)))
    return inside - {term[1]} if term[0] == "intro" else inside


def _substituted(term: Term, formula: Formula, proof: Term) -> Term:
    if term[0] == "assume":
        return proof if term[1] == formula else term
    if term[0] == "given" or (term[0] == "intro" and term[1] == formula):
        return term
    return (term[0], *(_substituted(part, formula, proof) if _is_term(part) else part for part in term[1:]))


# --- lines -----------------------------------------------------------------------------------------------------------


def as_lines(term: Term) -> list[Line]:
    """A term as the lines of a proof; equal terms are one line."""
    lines: list[Line] = []
    numbers: dict[Term, int] = {}
    _write(term, lines, numbers)
    return lines


def _write(term: Term, lines: list[Line], numbers: dict[Term, int]) -> int:
    """The number of the term's line, which is written if it is new."""
    if term in numbers:
        return numbers[term]
    rule, *parts = term
    if rule == "intro":
        parts[0] = ("assume", parts[0])
    references = tuple(_write(part, lines, numbers) for part in parts if _is_term(part))
    named = [lines[number - 1].formula for number in references]
    lines.append(Line(_formula_of(rule, term, named), rule, references))
    numbers[term] = len(lines)
    return len(lines)


def _formula_of(rule: str, term: Term, named: list[Formula]) -> Formula:
    """What a line says, from the formulas of the lines that it names."""
    match rule:
        case "and":
            return ("&", *named)
        case "left" | "right":
            return named[0][1 if rule == "left" else 2]
        case "apply":
            return named[0][2]
        case "intro":
            return (">", *named)
    return term[1]
