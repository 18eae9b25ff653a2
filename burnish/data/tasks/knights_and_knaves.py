"""Knights and knaves (Smullyan): knights always tell the truth, knaves always lie, and each inhabitant says one sentence.

The puzzles of Logic-RL (2502.14768; generated as by Xie et al., 2410.23123): statements are built of "X is a knight" with not, and, or,
if and if-and-only-if. All 2^n assignments are tried, and only puzzles with exactly one solution are used. A hash of the statements without
the names decides the split, so that a held-out puzzle is not a training puzzle with other names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.data.row import Row
from burnish.data.tasks.task import Dice, check_span, final_answer, first_on_split

KNIGHTS_AND_KNAVES = "knights_and_knaves"
NAMES = [
    "Abigail",
    "Aiden",
    "Alexander",
    "Amelia",
    "Aurora",
    "Ava",
    "Avery",
    "Benjamin",
    "Charlotte",
    "Chloe",
    "Daniel",
    "David",
    "Elizabeth",
    "Ella",
    "Emily",
    "Emma",
    "Ethan",
    "Evelyn",
    "Grace",
    "Harper",
    "Henry",
    "Isabella",
    "Jack",
    "Jacob",
    "James",
    "Joseph",
    "Laura",
    "Liam",
    "Lily",
    "Logan",
    "Lucas",
    "Luke",
    "Mason",
    "Matthew",
    "Mia",
    "Michael",
    "Noah",
    "Oliver",
    "Olivia",
    "Owen",
    "Penelope",
    "Riley",
    "Samuel",
    "Scarlett",
    "Sebastian",
    "Sofia",
    "Sophia",
    "Victoria",
    "William",
    "Zoey",
]
RULES = (
    "A very special island is inhabited only by knights and knaves. Knights always tell the truth, and knaves always lie. You meet {count} "
    "inhabitants: {names}. {statements} So who is a knight and who is a knave? Give the answer inside <answer> </answer>, with a line such as "
    "(1) {first} is a knight for each of them."
)
JOINED = {
    "and": "{a} and {b}",
    "or": "{a} or {b}",
    "if": "if {a} then {b}",
    "iff": "{a} if and only if {b}",
}
MEANING: dict[str, Callable[[bool, bool], bool]] = {
    "and": lambda a, b: a and b,
    "or": lambda a, b: a or b,
    "if": lambda a, b: not a or b,
    "iff": lambda a, b: a == b,
}


@dataclass(frozen=True)
class Claim:
    """`person` is a knight (or a knave)."""

    person: int
    is_knight: bool

    def holds(self, knights: Sequence[bool]) -> bool:
        return knights[self.person] == self.is_knight

    def text(self, names: Sequence[str]) -> str:
        return f"{names[self.person]} is a {'knight' if self.is_knight else 'knave'}"


@dataclass(frozen=True)
class Compound:
    """Two claims joined by and, or, if or iff."""

    kind: str
    left: Claim
    right: Claim

    def holds(self, knights: Sequence[bool]) -> bool:
        return MEANING[self.kind](self.left.holds(knights), self.right.holds(knights))

    def text(self, names: Sequence[str]) -> str:
        return JOINED[self.kind].format(a=self.left.text(names), b=self.right.text(names))


Statement = Claim | Compound


def solutions(statements: Sequence[Statement]) -> Iterator[tuple[bool, ...]]:
    """The assignments in which exactly the knights' statements are true. Statement i is said by person i."""
    for knights in itertools.product((False, True), repeat=len(statements)):
        if all(said.holds(knights) == knights[i] for i, said in enumerate(statements)):
            yield knights


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """1 if the answer says of every inhabitant the one thing that is true, else 0. A name with two kinds is wrong."""
    said: dict[str, set[str]] = {}
    for name, kind in re.findall(r"\b([A-Z][a-z]+) is a (knight|knave)\b", final_answer(completion)):
        said.setdefault(name, set()).add(kind)
    return float(said == {name: {kind} for name, kind in extra["kinds"].items()})


class KnightsAndKnaves:
    """Puzzles with `min_people` to `max_people` inhabitants; every number is equally frequent."""

    name = KNIGHTS_AND_KNAVES
    alphabet = None
    score = staticmethod(score)

    def __init__(self, seed: int, min_people: int = 3, max_people: int = 7) -> None:
        check_span(KNIGHTS_AND_KNAVES, "people", min_people, max_people, least=2, most=10)
        self.seed, self.min_people, self.max_people = seed, min_people, max_people

    def row(self, split: str, index: int) -> Row:
        """The index-th puzzle of a split; extra["length"] is the number of inhabitants, extra["kinds"] the kind of each."""
        people = Dice(self.seed, KNIGHTS_AND_KNAVES, split, index).between(self.min_people, self.max_people)

        def propose(attempt: int) -> tuple[str, tuple[list[Statement], tuple[bool, ...]]] | None:
            dice = Dice(self.seed, KNIGHTS_AND_KNAVES, split, index, attempt)
            statements = [_statement(dice, person, people) for person in range(people)]
            found = list(itertools.islice(solutions(statements), 2))
            return (f"{KNIGHTS_AND_KNAVES} {statements}", (statements, found[0])) if len(found) == 1 else None

        statements, knights = first_on_split(split, propose, KNIGHTS_AND_KNAVES)
        names = _names(Dice(self.seed, KNIGHTS_AND_KNAVES, split, index, "names"), people)
        lines = [f'{name} says, "{said.text(names)}".' for name, said in zip(names, statements, strict=True)]
        kinds = {name: "knight" if is_knight else "knave" for name, is_knight in zip(names, knights, strict=True)}
        prompt = RULES.format(
            count=people,
            names=f"{', '.join(names[:-1])} and {names[-1]}",
            statements=" ".join(lines),
            first=names[0],
        )
        answer = "\n".join(f"({number}) {name} is a {kind}" for number, (name, kind) in enumerate(kinds.items(), 1))
        extra = {"task": KNIGHTS_AND_KNAVES, "length": people, "kinds": kinds}
        return Row(f"{KNIGHTS_AND_KNAVES}/{split}/{index}", prompt, KNIGHTS_AND_KNAVES, answer, extra)


def _statement(dice: Dice, speaker: int, people: int) -> Statement:
    """Draw a claim about another person, or two joined claims. The second of two may be about the speaker."""
    others = [person for person in range(people) if person != speaker]
    first = Claim(others[dice.between(0, len(others) - 1)], dice.unit() < 0.5)
    if dice.unit() < 0.25:
        return first
    rest = [person for person in range(people) if person != first.person]
    second = Claim(rest[dice.between(0, len(rest) - 1)], dice.unit() < 0.5)
    return Compound(tuple(JOINED)[dice.between(0, len(JOINED) - 1)], first, second)


def _names(dice: Dice, count: int) -> list[str]:
    """Different names in random order."""
    left = list(NAMES)
    return [left.pop(dice.between(0, len(left) - 1)) for _ in range(count)]
