"""The task `absolute_zero`: rows that ask the model to propose tasks about programs, from a buffer of tasks that it proposed before.

The buffer has a list for each type of task and begins with one identity triplet (`f(x) = x`). A train row depends on the buffer when it is
drawn: it shows `references` past tasks of its type, or for induction a program of the buffer, and has a past task for the solver in case the
proposal is not valid. The environment of the same name plays the row. After a step, `observe` adds its valid proposals to the buffer.

Test rows are a fixed list of tasks to solve. They do not depend on the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, unknown_name_error
from burnish.core.random_keys import hash_text
from burnish.data.row import Row
from burnish.data.tasks.code_tasks import (
    FORMATS,
    KINDS,
    CodeTask,
    Format,
    Kind,
    arguments,
    expression_program,
    program_key,
    propose_prompt,
    solve_prompt,
    task_from_json,
)
from burnish.data.tasks.task import SPLITS, Dice
from burnish.run.task_journal import TaskJournal

ABSOLUTE_ZERO = "absolute_zero"
SEED_TRIPLETS = {
    "blocks": ("def f(x):\n    return x", "'Hello World'", "'Hello World'"),
    "expression": (expression_program("x"), "1", "1"),
}
"""Program, input and output of the only task that a buffer begins with."""
HELD_OUT_PROGRAMS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "blocks": (
        ("def f(xs):\n    return sorted(set(xs))[::-1]", ("[3, 1, 3]", "[]", "[5]", "[2, 9, 4, 9]")),
        ("def f(s, k):\n    return s[k:] + s[:k]", ("'abcd', 1", "'hello', 3", "'', 2", "'xy', 2")),
        ("def f(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a", ("1", "7", "10", "0")),
        ("def f(s):\n    return {c: s.count(c) for c in sorted(set(s))}", ("'banana'", "''", "'aab'", "'xyx'")),
        ("def f(n):\n    steps = 0\n    while n != 1:\n        n = n // 2 if n % 2 == 0 else 3 * n + 1\n        steps += 1\n    return steps", ("6", "1", "8", "27")),
        ("def f(xs):\n    total, out = 0, []\n    for x in xs:\n        total += x\n        out.append(total)\n    return out", ("[1, 2, 3]", "[]", "[5, -5]", "[2, 2, 2]")),
        ("def f(a, b):\n    while b:\n        a, b = b, a % b\n    return a", ("12, 18", "7, 3", "10, 0", "48, 36")),
        ("def f(words):\n    return max(words, key=len, default='')[::-1]", ("['a', 'abc']", "[]", "['xy', 'zw']", "['one', 'three']")),
    ),
    "expression": tuple((expression_program(e), ("2", "5", "0", "7")) for e in ("x+3", "x*2", "9-x", "x*x", "x%3", "x//2")),
}  # fmt: skip
"""Programs and inputs of the test rows."""


def score(completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """Raise a UserError: a text alone cannot be scored, because the environment gives the rewards."""
    raise UserError(
        f"task {ABSOLUTE_ZERO} has no checker of texts: set environment.name={ABSOLUTE_ZERO}, which proposes, runs and solves its tasks"
    )


class AbsoluteZeroTask:
    """Rows to propose tasks, in turn deduction, abduction and induction, and the buffer of all tasks so far."""

    name = ABSOLUTE_ZERO
    alphabet = "".join(map(chr, range(32, 127))) + "\n"
    score = staticmethod(score)

    def __init__(
        self,
        seed: int,
        references: int = 6,
        inputs: int = 10,
        max_reference_chars: int = 8_000,
        max_tasks: int = 16_384,
        format: Format = "blocks",
    ) -> None:
        """Options:

        - `references`: past tasks in the prompt of a proposer (K).
        - `inputs`: inputs of an induction task (N), half of which the solver sees.
        - `max_reference_chars`: past tasks beyond this many characters are left out of a prompt; the first is always shown.
        - `max_tasks`: the newest tasks of each type that rows draw from.
        - `format`: `blocks`, as in the paper, or `expression`, the one-line language for tiny models.
        """
        if references < 1 or inputs < 2 or max_tasks < 1 or max_reference_chars < 1:
            raise UserError(
                f"task {ABSOLUTE_ZERO}: expected references, max_reference_chars and max_tasks of 1 or more and inputs of 2 or more"
            )
        if format not in FORMATS:
            raise unknown_name_error(f"format of task {ABSOLUTE_ZERO}:", format, FORMATS)
        self.seed, self.references, self.inputs, self.format = seed, references, inputs, format
        self.max_reference_chars, self.max_tasks = max_reference_chars, max_tasks
        self._journal: TaskJournal | None = None
        self._metrics: dict[str, float] = {}
        self._clear()

    # --- rows

    def row(self, split: str, index: int) -> Row:
        """The index-th row. One of the train split depends on the buffer as it is now."""
        if split not in SPLITS:
            raise unknown_name_error("split", split, SPLITS)
        name = f"{ABSOLUTE_ZERO}/{split}/{index}"
        extra: dict[str, Any] = {"task": ABSOLUTE_ZERO, "format": self.format}
        if split == "test":
            task = self.held_out()[index % len(self.held_out())]
            extra |= {"type": task.kind, "solve": task.to_json()}
            return Row(name, solve_prompt(task, self.format), ABSOLUTE_ZERO, None, extra)
        kind, dice = KINDS[index % len(KINDS)], Dice(self.seed, ABSOLUTE_ZERO, index)
        past = self.buffer[kind]
        extra |= {"type": kind, "inputs": self.inputs}
        program = ""
        if kind == "induction":
            programs = [*self.buffer["deduction"], *self.buffer["abduction"]]
            program = extra["program"] = programs[dice.between(0, len(programs) - 1)].program
        shown = [] if kind == "induction" else self._that_fit(_draw_distinct(past, self.references, dice))
        extra["fill"] = past[dice.between(0, len(past) - 1)].to_json() if past else None
        prompt = propose_prompt(kind, self.format, shown, program, self.inputs)
        return Row(name, prompt, ABSOLUTE_ZERO, None, extra)

    def _that_fit(self, tasks: Sequence[CodeTask]) -> list[CodeTask]:
        shown, num_chars = list[CodeTask](), 0
        for task in tasks:
            num_chars += len(task.program) + sum(map(len, (*task.inputs, *task.outputs)))
            if shown and num_chars > self.max_reference_chars:
                break
            shown.append(task)
        return shown

    def held_out(self) -> list[CodeTask]:
        """The tasks of the test rows: every program as deduction, abduction and induction."""
        found = list[CodeTask]()
        for program, inputs in HELD_OUT_PROGRAMS[self.format]:
            space: dict[str, Any] = {}
            exec(program, space)
            outputs = tuple(repr(space["f"](*arguments(text))) for text in inputs)
            found += [CodeTask("deduction", program, inputs[:1], outputs[:1])]
            found += [CodeTask("abduction", program, inputs[-1:], outputs[-1:])]
            found += [CodeTask("induction", program, inputs, outputs)]
        return found

    # --- the buffer

    def _clear(self) -> None:
        program, one, other = SEED_TRIPLETS[self.format]
        self.buffer: dict[Kind, list[CodeTask]] = {kind: [] for kind in KINDS}
        self.num_tasks = 0
        """Tasks that were added, without the seed."""
        self._programs = {hash_text(program_key(program))}
        for kind in ("deduction", "abduction"):
            self.buffer[kind].append(CodeTask(kind, program, (one,), (other,)))

    def _add(self, task: CodeTask) -> None:
        tasks = self.buffer[task.kind]
        tasks.append(task)
        del tasks[: max(0, len(tasks) - self.max_tasks)]
        self._programs.add(hash_text(program_key(task.program)))
        self.num_tasks += 1

    def open_journal(self, path: Path, step: int) -> None:
        """Keep the tasks in a file from here on, and read those of steps up to `step` from it."""
        self._journal = TaskJournal(path, step)
        self._clear()
        for made in self._journal.tasks:
            self._add(task_from_json(made.task))

    def observe(self, step: int, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Add the valid proposals of a step. A record is what the environment says of an episode, with the id of its proposer's sample."""
        self._metrics = self._measured([record for _, record in records])
        made = [(id, record["proposed"]) for id, record in records if record["proposed"] is not None]
        if self._journal is not None:
            self._journal.append(step, made)
        for _, task in made:
            self._add(task_from_json(task))

    def metrics(self) -> dict[str, float]:
        """The metrics of the last step, and the size of the buffer."""
        sizes = {f"{kind}/size": float(len(self.buffer[kind])) for kind in KINDS}
        return self._metrics | sizes | {"distinct_programs": float(len(self._programs))}

    def _measured(self, records: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Return shares and means over the episodes of each type, before their tasks are added."""
        found: dict[str, float] = {}
        seen = set(self._programs)
        for kind in KINDS:
            own = [record for record in records if record["type"] == kind]
            valid = [record for record in own if record["proposed"] is not None]
            solved = [value for record in own for value in record["solved"]]
            values = {
                "valid": [float(record["proposed"] is not None) for record in own],
                "learnability": [record["learnability"] for record in valid],
                "solved": solved,
                "solved_proposed": [value for record in valid for value in record["solved"]],
            }
            if kind != "induction":  # its programs come from the buffer
                keys = [hash_text(program_key(record["proposed"]["program"])) for record in valid]
                values["new_program"] = []
                for key in keys:
                    values["new_program"].append(float(key not in seen))
                    seen.add(key)
            found |= {f"{kind}/{name}": sum(v) / len(v) for name, v in values.items() if v}
        return found

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: how many tasks there are. The tasks are in the file."""
        return {"num_tasks": self.num_tasks}

    def restore(self, state: dict[str, Any]) -> None:
        """Check that the file has the tasks that a checkpoint was saved with."""
        if self.num_tasks != state["num_tasks"]:
            where = "in memory" if self._journal is None else f"in {self._journal.path}"
            raise UserError(
                f"cannot resume: the run had made {state['num_tasks']} tasks when it was saved, and {self.num_tasks} are {where}; restore the "
                "file from a copy, or start a new run"
            )

    # --- demonstrations of the one-line language

    def demonstrations(self, num: int = 512, seed: int = 0, right: float = 0.7) -> list[dict[str, str]]:
        """Rows of prompt and completion in the one-line language: proposals with one operation on a digit, and their solutions.

        A share `right` of the solutions is right. The others, and proposals of constants, leave something to learn.
        """
        if self.format != "expression":
            raise UserError(f"task {ABSOLUTE_ZERO}: only format=expression has demonstrations")
        rows, held_out = list[dict[str, str]](), {program for program, _ in HELD_OUT_PROGRAMS["expression"]}
        index = 0
        while len(rows) < num:
            dice = Dice(seed, ABSOLUTE_ZERO, "demonstrations", index)
            index += 1
            expression, kind = _simple_expression(dice), KINDS[index % len(KINDS)]
            program, xs = expression_program(expression), [dice.between(0, 9) for _ in range(self.inputs)]
            if program in held_out:
                continue
            if index % 2:
                row = self.row("train", len(KINDS) * dice.between(0, 99) + KINDS.index(kind))
                written = ";".join(map(str, xs)) if kind == "induction" else f"{expression};{xs[0]}"
                rows.append({"prompt": str(row.prompt), "completion": written})
                continue
            outputs = [_value(expression, x) for x in xs]
            pairs = list(zip(map(str, xs), map(str, outputs), strict=True))
            used = pairs if kind == "induction" else pairs[:1]
            task = CodeTask(kind, program, tuple(i for i, _ in used), tuple(o for _, o in used))
            best = {"deduction": pairs[0][1], "abduction": pairs[0][0], "induction": expression}[kind]
            wrong = expression.replace("x", "1", 1) if kind == "induction" else str(dice.between(0, 9))
            rows.append(
                {"prompt": solve_prompt(task, "expression"), "completion": best if dice.unit() < right else wrong}
            )
        return rows


def _simple_expression(dice: Dice) -> str:
    digit, operator = dice.between(1, 9), "+-*%"[dice.between(0, 3)]
    return f"x{operator}{digit}" if dice.unit() < 0.7 else ("x", f"{digit}+x", f"{digit}")[dice.between(0, 2)]


def _value(expression: str, x: int) -> int:
    """The value of `_simple_expression`, a digit or x with at most one operation on a digit."""
    for operator in "+-*%":
        left, found, right = expression.partition(operator)
        if found:
            a, b = (x if part == "x" else int(part) for part in (left, right))
            return {"+": a + b, "-": a - b, "*": a * b, "%": a % b if b else 0}[operator]
    return x if expression == "x" else int(expression)


def _draw_distinct(tasks: Sequence[CodeTask], num: int, dice: Dice) -> list[CodeTask]:
    """Draw up to `num` different tasks, all equally likely."""
    left = list(range(len(tasks)))
    return [tasks[left.pop(dice.between(0, len(left) - 1))] for _ in range(min(num, len(left)))]
