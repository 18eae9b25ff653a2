"""Theorems of propositional logic to prove, in the language of `burnish.data.proofs.kernel`, which checks every line of an answer.

A theorem is drawn at random, kept if our prover finds a proof of `min_lines` to `max_lines` lines that uses all its premises, and so is always
provable. `extra["length"]` is the number of lines of that proof, the difficulty.

With `words` a chat model is told the rules and answers inside `<proof>`. Without words `p&q|-q&p` and a newline are answered by the bare lines, for
small models from nothing. The split depends on the theorem up to the names of its variables and the order of its premises.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from burnish.config.errors import UserError
from burnish.data.proofs.kernel import (
    FALSE,
    Formula,
    Line,
    ProofError,
    Theorem,
    check_proof,
    format_formula,
    format_proof,
    format_theorem,
    parse_theorem,
)
from burnish.data.proofs.prover import find_proof
from burnish.data.row import Row
from burnish.data.tasks.task import Dice, check_span, first_on_split

PROOFS = "proofs"
VARIABLES = "pqrs"
OPERATORS = "&|>>"  # implications twice: they make most theorems
NEGATION_CHANCE = 0.2
PROVED = "the proof is complete"
PROMPT = """\
Prove the theorem below in propositional logic. Write the proof between <proof> and </proof>, one step a line: the number of the line, a formula, \
a rule, and the numbers of the earlier lines that the rule uses. Formulas have the operators ~ & | -> in order of binding, F for false, \
and ~A is the same as A -> F. The last line is what stands behind |- and may not depend on an assumption.

given: a premise of the theorem
assume: any formula, as an assumption
and i j: A & B from i: A and j: B
left i: A from i: A & B
right i: B from i: A & B
inl i: A | B from i: A
inr i: A | B from i: B
intro i j: A -> B from the assumption i: A and j: B; j no longer depends on i
apply i j: B from i: A -> B and j: A
cases i j k: C from i: A | B, j: A -> C and k: B -> C
absurd i: any formula from i: F
classical i: A from i: ~~A

For example, p | q |- q | p is proved by
<proof>
1 p | q given
2 p assume
3 q | p inr 2
4 p -> q | p intro 2 3
5 q assume
6 q | p inl 5
7 q -> q | p intro 5 6
8 q | p cases 1 4 7
</proof>

Theorem: {theorem}"""
_FENCE = re.compile(r"^[ \t]*```[^\n]*\n?", re.MULTILINE)


def extract_proof(completion: str) -> str:
    """The proof in a completion: the last `<proof>` block, else the last fenced block, else all. Text up to `</think>` is ignored."""
    text = completion.rpartition("</think>")[2]
    if "<proof>" in text:
        return text.rpartition("<proof>")[2].partition("</proof>")[0]
    blocks = _FENCE.split(text)
    last = len(blocks) - (
        2 if len(blocks) % 2 else 1
    )  # blocks are between an odd and an even fence; the last may be open
    return blocks[max(0, last)]


def theorem_of_row(answer: Any) -> Theorem:
    """The theorem that is the answer of a row; ValueError if it cannot be read."""
    try:
        return parse_theorem(str(answer))
    except ProofError as error:
        raise ValueError(f"the theorem {str(answer)!r} of the row cannot be read: {error}") from None


def checked_answer(completion: str, theorem: str) -> tuple[bool, str]:
    """Whether a completion proves a theorem, and the checker's message. A theorem that cannot be read raises ValueError."""
    expected = theorem_of_row(theorem)
    try:
        check_proof(expected, extract_proof(completion))
    except ProofError as error:
        return False, str(error)
    return True, PROVED


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 for a proof of the theorem, else 0."""
    return float(checked_answer(completion, str(answer))[0])


class Proofs:
    """Theorems with up to `variables` variables, whose proof by our prover has `min_lines` to `max_lines` lines."""

    name = PROOFS
    score = staticmethod(score)

    def __init__(
        self, seed: int, words: bool = True, min_lines: int = 3, max_lines: int = 12, variables: int = 3
    ) -> None:
        if not isinstance(words, bool):
            raise UserError(f"{PROOFS}: words should be true or false, got {words!r}")
        if variables not in range(1, len(VARIABLES) + 1):
            raise UserError(f"{PROOFS}: variables should be from 1 to {len(VARIABLES)}, got {variables!r}")
        check_span(PROOFS, "lines", min_lines, max_lines, least=2, most=40)
        self.seed, self.words, self.min_lines, self.max_lines = seed, words, min_lines, max_lines
        self.variables = VARIABLES[:variables]

    @property
    def alphabet(self) -> str | None:
        return None if self.words else f"{VARIABLES}0123456789abcdefghijklmnotuvwxyF&|>-~(), \n"

    def row(self, split: str, index: int) -> Row:
        """The index-th theorem of a split; its answer is the theorem as text."""
        theorem, lines = self._problem(split, self.seed, PROOFS, split, index)
        extra = {"task": PROOFS, "length": len(lines)}
        return Row(f"{PROOFS}/{split}/{index}", self._prompt(theorem), PROOFS, format_theorem(theorem), extra)

    def demonstrations(self, num: int = 2000, seed: int = 0, flawed: float = 0.0) -> list[dict[str, str]]:
        """Theorems of the train split with the proofs of our prover. A share `flawed` has one line with another rule or other references."""
        if not 0 <= flawed <= 1:
            raise UserError(f"{PROOFS}: flawed should be a share from 0 to 1, got {flawed!r}")
        rows = []
        for index in range(num):
            theorem, lines = self._problem("train", seed, PROOFS, "demonstrations", index)
            dice = Dice(seed, PROOFS, "student", index)
            if dice.unit() < flawed:
                lines = _spoilt(lines, dice)
            rows.append({"prompt": self._prompt(theorem), "completion": self._written(lines)})
        return rows

    def _prompt(self, theorem: Theorem) -> str:
        text = format_theorem(theorem)
        return PROMPT.replace("{theorem}", text) if self.words else text.replace(" ", "") + "\n"

    def _written(self, lines: Sequence[Line]) -> str:
        if self.words:
            return f"<proof>\n{format_proof(lines)}\n</proof>"
        rows = [
            [str(number), format_formula(line.formula).replace(" ", ""), line.rule, *map(str, line.references)]
            for number, line in enumerate(lines, start=1)
        ]
        return "\n".join(map(" ".join, rows))

    def _problem(self, split: str, *key: int | str) -> tuple[Theorem, list[Line]]:
        def propose(attempt: int) -> tuple[str, tuple[Theorem, list[Line]]] | None:
            theorem = random_theorem(Dice(*key, attempt), self.variables)
            lines = find_proof(theorem) if holds(theorem) else None
            if lines is None or not self.min_lines <= len(lines) <= self.max_lines:
                return None
            used = {line.formula for line in lines if line.rule == "given"}
            if used != set(theorem.premises) or len(used) < len(theorem.premises):
                return None
            return f"{PROOFS} {canonical_text(theorem)}", (theorem, lines)

        return first_on_split(split, propose, PROOFS)


def _spoilt(lines: Sequence[Line], dice: Dice) -> list[Line]:
    """A proof with one line changed: its references if it has some, else its rule."""
    at = dice.between(0, len(lines) - 1)
    line = lines[at]
    if line.references:
        references = tuple(dice.between(1, len(lines)) for _ in line.references)
        line = line._replace(references=references)
    else:
        line = line._replace(rule="given" if line.rule == "assume" else "assume")
    return [*lines[:at], line, *lines[at + 1 :]]


def random_theorem(dice: Dice, variables: str) -> Theorem:
    """Up to two premises and a conclusion, at random. It may not hold."""
    num_premises = (0, 1, 1, 2)[dice.between(0, 3)]
    premises = tuple(_random_formula(dice, variables, dice.between(1, 3)) for _ in range(num_premises))
    return Theorem(premises, _random_formula(dice, variables, dice.between(0, 3) if premises else dice.between(2, 6)))


def _random_formula(dice: Dice, variables: str, num_operators: int) -> Formula:
    if num_operators == 0:
        return (variables[dice.between(0, len(variables) - 1)],)
    if dice.unit() < NEGATION_CHANCE:
        return (">", _random_formula(dice, variables, num_operators - 1), FALSE)
    operator = OPERATORS[dice.between(0, len(OPERATORS) - 1)]
    left = dice.between(0, num_operators - 1)
    return (
        operator,
        _random_formula(dice, variables, left),
        _random_formula(dice, variables, num_operators - 1 - left),
    )


def holds(theorem: Theorem) -> bool:
    """Whether a theorem holds, by its truth table. No proof is involved."""
    names = sorted(set().union(*map(variables_of, (*theorem.premises, theorem.conclusion))))
    for values in itertools.product((False, True), repeat=len(names)):
        truth = dict(zip(names, values, strict=True))
        if all(value_of(one, truth) for one in theorem.premises) and not value_of(theorem.conclusion, truth):
            return False
    return True


def variables_of(formula: Formula) -> set[str]:
    """The names of a formula's variables."""
    if len(formula) == 1:
        return set() if formula == FALSE else {formula[0]}
    return variables_of(formula[1]) | variables_of(formula[2])


def value_of(formula: Formula, truth: dict[str, bool]) -> bool:
    """The truth value of a formula."""
    if len(formula) == 1:
        return formula != FALSE and truth[formula[0]]
    operator, left, right = formula[0], value_of(formula[1], truth), value_of(formula[2], truth)
    return left and right if operator == "&" else left or right if operator == "|" else right or not left


def canonical_text(theorem: Theorem) -> str:
    """The same text for theorems that differ only in the names of variables and in the order of premises."""
    names = sorted(set().union(*map(variables_of, (*theorem.premises, theorem.conclusion))))
    texts = []
    for order in itertools.permutations(VARIABLES[: len(names)]):
        renaming = dict(zip(names, order, strict=True))
        premises = sorted(format_formula(_renamed(premise, renaming)) for premise in theorem.premises)
        texts.append(f"{', '.join(premises)} |- {format_formula(_renamed(theorem.conclusion, renaming))}")
    return min(texts)


def _renamed(formula: Formula, renaming: dict[str, str]) -> Formula:
    if len(formula) == 1:
        return (renaming.get(formula[0], formula[0]),)
    return (formula[0], _renamed(formula[1], renaming), _renamed(formula[2], renaming))
