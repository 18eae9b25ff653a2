"""The proof kernel accepts no proof of a non-theorem, the prover proves every theorem, and the generated task keeps its splits apart."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.data.proofs import kernel
from burnish.data.proofs.kernel import (
    MAX_DEPTH,
    MAX_LINES,
    RULES,
    Line,
    ProofError,
    Theorem,
    check_line,
    check_proof,
    format_formula,
    format_proof,
    format_theorem,
    parse_formula,
    parse_theorem,
)
from burnish.data.proofs.prover import find_proof
from burnish.data.tasks.proofs import canonical_text, checked_answer, extract_proof, score
from burnish.data.tasks.registry import make_demonstrations, make_task
from burnish.data.tasks.task import is_held_out

VARIABLES = "pqr"
ATOMS = st.sampled_from([*((name,) for name in VARIABLES), ("F",)])
FORMULAS = st.recursive(ATOMS, lambda inner: st.tuples(st.sampled_from("&|>"), inner, inner), max_leaves=6)
THEOREMS = st.builds(lambda premises, end: Theorem(tuple(premises), end), st.lists(FORMULAS, max_size=2), FORMULAS)


def truth(formula: tuple) -> int:
    """The truth table of a formula over p, q, r as eight bits, written independently of the task's own."""
    if formula == ("F",):
        return 0
    if len(formula) == 1:
        place = VARIABLES.index(formula[0])
        return sum(1 << world for world in range(8) if world >> place & 1)
    left, right = truth(formula[1]), truth(formula[2])
    return {"&": left & right, "|": left | right, ">": ~left & 0xFF | right}[formula[0]]


def entails(premises: list[tuple], conclusion: tuple) -> bool:
    worlds = 0xFF
    for premise in premises:
        worlds &= truth(premise)
    return worlds & ~truth(conclusion) == 0


def assert_sound(theorem: Theorem, text: str) -> bool:
    """Whether the kernel accepts a proof; every line that it accepts, of any proof, must follow from premises and assumptions."""
    checked: list[kernel.Sequent] = []
    for number, row in enumerate(text.splitlines(), start=1):
        try:
            checked.append(check_line(kernel.parse_line(row, number), number, checked, theorem))
        except ProofError:
            break
        assumed = [checked[at - 1].formula for at in checked[-1].assumptions]
        assert entails([*theorem.premises, *assumed], checked[-1].formula), text
    try:
        check_proof(theorem, text)
    except ProofError:
        return False
    assert entails(list(theorem.premises), theorem.conclusion), text
    return True


@settings(max_examples=150, deadline=None)
@given(THEOREMS)
def test_the_prover_proves_exactly_the_theorems_that_hold(theorem: Theorem) -> None:
    lines = find_proof(theorem)
    assert (lines is not None) == entails(list(theorem.premises), theorem.conclusion)
    if lines is not None:
        assert len(check_proof(theorem, format_proof(lines))) == len(lines)
        assert parse_theorem(format_theorem(theorem)) == theorem


def mutated(lines: list[Line], draw: random.Random) -> list[Line]:
    """A proof with a few random changes: formulas, rules, references, lines that are gone, doubled or swapped."""
    lines = list(lines)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(lines))
        line, other = lines[at], draw.choice(lines)
        kind = draw.randrange(6)
        if kind == 0:
            lines[at] = line._replace(
                formula=draw.choice([other.formula, *other.formula[1:], (">", line.formula, other.formula)])
            )
        elif kind == 1:
            rule = draw.choice(list(RULES))
            lines[at] = Line(line.formula, rule, tuple(draw.randint(1, at + 1) for _ in range(RULES[rule][0])))
        elif kind == 2:
            lines[at] = line._replace(references=tuple(draw.randint(1, len(lines)) for _ in line.references))
        elif kind == 3 and len(lines) > 1:
            del lines[at]
        elif kind == 4:
            lines.insert(at, other)
        else:
            lines[at] = line._replace(rule=draw.choice(["assume", "given", "intro", "absurd", "classical"]))
    return lines


def random_step(draw: random.Random, lines: list[Line]) -> Line:
    """A step forward that is often legal, from the lines so far."""
    formulas = [line.formula for line in lines]
    rule, i, j, k = draw.choice(list(RULES)), *(draw.randrange(len(lines)) for _ in range(3))
    a, b = formulas[i], formulas[j]
    atom = (draw.choice("pqrF"),)
    result = {
        "and": ("&", a, b),
        "left": a[1] if len(a) == 3 else a,
        "right": a[2] if len(a) == 3 else a,
        "inl": ("|", a, atom),
        "inr": ("|", atom, a),
        "intro": (">", a, b),
        "apply": a[2] if len(a) == 3 else a,
        "cases": b[2] if len(b) == 3 else b,
        "classical": a[1][1] if len(a) == 3 and len(a[1]) == 3 else a,
    }.get(rule, draw.choice([atom, ("|", atom, ("p",)), (">", atom, ("F",)), (">", (">", atom, ("F",)), ("F",)), a]))
    return Line(result, rule, (i + 1, j + 1, k + 1)[: RULES[rule][0]])


def test_no_mutated_or_random_proof_of_a_non_theorem_is_accepted() -> None:
    draw = random.Random(5)
    task = make_task("proofs", {"max_lines": 14}, 1)
    accepted = rejected = 0
    for index in range(60):
        theorem = parse_theorem(task.row("train", index).answer)
        lines = find_proof(theorem)
        assert lines is not None
        for _ in range(15):
            goal = Theorem(theorem.premises, draw.choice(lines).formula) if draw.random() < 0.5 else theorem
            is_right = assert_sound(goal, format_proof(mutated(lines, draw)))
            accepted, rejected = accepted + is_right, rejected + (not is_right)
    assert accepted > 20  # the check is about accepted proofs, so there must be some
    assert rejected > 300
    num_steps = num_accepted = 0
    for _ in range(60):
        premises = tuple(one for one in ((">", ("p",), ("q",)), ("|", ("p",), ("r",))) if draw.random() < 0.5)
        theorem, lines = Theorem(premises, ("p",)), [Line(("p",), "assume", ())]
        checked = [check_line(lines[0], 1, [], theorem)]
        for _ in range(60):
            step = random_step(draw, lines)
            try:
                checked.append(check_line(step, len(lines) + 1, checked, theorem))
            except ProofError:
                continue
            lines.append(step)
        num_steps += len(lines)
        num_accepted += assert_sound(Theorem(premises, lines[-1].formula), format_proof(lines))
    assert num_steps > 1000
    assert num_accepted > 0  # every accepted line was compared too


@given(FORMULAS)
def test_a_formula_is_read_as_it_is_written(formula: tuple) -> None:
    assert parse_formula(format_formula(formula)) == formula
    assert parse_formula(format_formula(formula).replace(" ", "")) == formula


@settings(deadline=None)
@given(st.text(alphabet="pq1 2&|~->()F\nandleftgivenassume,\x00é", max_size=120))
def test_any_text_is_accepted_or_refused_with_a_reason(text: str) -> None:
    is_right, message = checked_answer(text, "p |- p")
    assert message
    assert not is_right or "p" in text


@pytest.mark.parametrize(
    ("proof", "reason"),
    [
        ("", "the proof is empty"),
        ("2 p given", "line 1: a line begins with its number, here 1; got '2'"),
        ("1 p & q given\n2 q left 1", "line 2: `left` gives p"),
        ("1 p & q given\n2 r given", "line 2: r is not a premise of the theorem"),
        ("1 p & q given\n2 p lef 1", "line 2: unknown rule 'lef' (known: given"),
        ("1 p & q given\n2 p & q", "line 2: no rule; a line ends with one of"),
        ("1 p & q given\n2 q right 2", "line 2: line 2 is not an earlier line"),
        ("1 p & q given\n2 q right 1 1", "line 2: `right` names 1 lines, got 2"),
        ("1 p & q given\n2 q right 0", "line 2: expected numbers of earlier lines after right, got '0'"),
        ("1 p & q given\n2 (q right 1", "line 2: a parenthesis is not closed"),
        ("1 p & q given\n2 q p right 1", "line 2: unexpected 'p' after the formula q"),
        ("1 p & q given\n2 & right 1", "line 2: expected a formula (a letter, F, ~ or a parenthesis), got '&'"),
        ("1 p & q given\n2 right 1", "line 2: the formula ends too early"),
        ("1 p & q given", "line 1: the last line is p & q, and the theorem ends with q & p"),
        ("1 q & p assume", "line 1: it still depends on the assumptions of lines 1; use `intro`"),
        ("1 p & q given\n2 q & p -> q & p intro 1 1", "`intro` names an `assume` line first"),
        ("1 p | q assume\n2 p cases 1 1 1", "line 2: `cases` needs p -> p, and the line is p | q"),
        ("1 p assume\n2 q absurd 1", "line 2: `absurd` needs F, and the line it names is p"),
        ("1 ~p assume\n2 p classical 1", "line 2: `classical` needs ~~p, and the line it names is ~p"),
        ("1 p -> q assume\n2 q apply 1 1", "line 2: `apply` needs p, and the second is p -> q"),
        (f"1 {'~' * (MAX_DEPTH + 2)}p assume", f"line 1: a formula is nested more than {MAX_DEPTH} deep"),
        ("1 p assume\n" * (MAX_LINES + 1), f"{MAX_LINES + 1} lines, and {MAX_LINES} are allowed"),
        ("1 " + "p & " * 600 + "p assume", "line 1: 2410 characters in a line, and 2000 are allowed"),
    ],
)
def test_a_wrong_proof_is_refused_with_line_and_reason(proof: str, reason: str) -> None:
    is_right, message = checked_answer(proof, "p & q |- q & p")
    assert not is_right
    assert reason in message


def test_the_kernel_is_small() -> None:
    assert len(Path(kernel.__file__).read_text(encoding="utf-8").splitlines()) <= 300


# --- the task --------------------------------------------------------------------------------------------------------


def renamings(theorem: Theorem) -> set[str]:
    """The texts of a theorem under all renamings of its variables and orders of its premises, by substitution in the text."""
    found = set()
    for premises in itertools.permutations(theorem.premises):
        text = format_theorem(Theorem(premises, theorem.conclusion))
        for names in itertools.permutations("pqrs"):
            table = dict(zip("pqrs", names, strict=True))
            found.add(re.sub("[pqrs]", lambda letter, table=table: table[letter[0]], text))
    return found


@pytest.mark.parametrize("options", [{}, {"words": False, "variables": 2, "min_lines": 2, "max_lines": 6}])
def test_train_and_test_theorems_do_not_overlap_up_to_renaming_and_all_are_provable(options: dict) -> None:
    texts: dict[str, set[str]] = {"train": set(), "test": set()}
    for split, seed in (("train", 0), ("test", 7)):
        task = make_task("proofs", options, seed)
        for index in range(60):
            row = task.row(split, index)
            theorem = parse_theorem(row.answer)
            lines = find_proof(theorem)
            assert lines is not None
            assert row.extra["length"] == len(lines)
            assert task.min_lines <= len(lines) <= task.max_lines
            texts[split] |= renamings(theorem)
            assert {is_held_out(f"proofs {canonical_text(parse_theorem(t))}") for t in renamings(theorem)} == {
                split == "test"
            }
    assert not texts["train"] & texts["test"]


@pytest.mark.parametrize("words", [True, False])
def test_demonstrations_are_proofs_in_the_alphabet_of_the_task(words: bool) -> None:
    task = make_task("proofs", {"words": words}, 0)
    for row in make_demonstrations("proofs", {"words": words, "num": 40}, 3):
        theorem = row["prompt"].strip().rpartition("Theorem: ")[2]
        assert score(row["completion"], theorem, {}) == 1.0
        assert words or set(row["prompt"] + row["completion"]) <= set(task.alphabet or "")
        spoilt = row["completion"].replace("given", "assume")
        assert score(spoilt, theorem, {}) == float(spoilt == row["completion"])
    flawed = make_demonstrations("proofs", {"words": words, "num": 40, "flawed": 1.0}, 3)
    right = [score(row["completion"], row["prompt"].strip().rpartition("Theorem: ")[2], {}) for row in flawed]
    assert sum(right) < 10  # a change may be harmless


def test_a_proof_is_found_in_tags_in_a_fence_or_bare_and_thoughts_are_ignored() -> None:
    for text in (
        "<proof>a</proof>b<proof>x</proof>",
        "<proof>x",
        "words\n```\nx\n```\nmore",
        "<think><proof>y</proof></think>x",
        "x",
    ):
        assert extract_proof(text).strip() == "x"


@pytest.mark.parametrize(
    "options", [{"words": 1}, {"variables": 5}, {"min_lines": 1}, {"min_lines": 9, "max_lines": 4}]
)
def test_wrong_options_are_refused(options: dict) -> None:
    with pytest.raises(UserError, match="proofs: "):
        make_task("proofs", options, 0)


def test_a_theorem_that_cannot_be_read_is_an_error_of_the_row() -> None:
    with pytest.raises(ValueError, match="the theorem 'p and q' of the row cannot be read"):
        score("1 p given", "p and q", {})
