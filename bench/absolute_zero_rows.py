"""Rows of `bench/absolute_zero.py`: the warm start's demonstrations, and the tasks that are held out from them.

The language is the one-line form of the task `absolute_zero`. A program takes a tuple of digits and returns one of them, such as `max(x)` or `sorted(x)[1]`. A hash
of the tuple holds a quarter of the inputs out: no demonstration has one.
"""

from __future__ import annotations

from typing import Any

from burnish.core.random_keys import hash_text
from burnish.data.tasks.code_tasks import KINDS, CodeTask, Kind, expression_program, propose_prompt, solve_prompt
from burnish.data.tasks.task import Dice

RIGHT = {"x[0]": 0.9, "x[-1]": 0.7, "max(x)": 0.5, "min(x)": 0.5, "sorted(x)[1]": 0.3}
"""The programs, and how often a demonstration solves one; a wrong solution is that of `x[0]`."""
PROGRAMS = tuple(RIGHT)
INPUTS = 4
"""Of an induction task; two of them are shown."""
NUM_HELD_OUT = 120
"""Of each type of task."""


def result(program: str, digits: tuple[int, ...]) -> int:
    """What a program returns."""
    rising = sorted(digits)
    return {
        "x[0]": digits[0],
        "x[-1]": digits[-1],
        "max(x)": rising[-1],
        "min(x)": rising[0],
        "sorted(x)[1]": rising[1],
    }[program]


def draw_digits(dice: Dice, split: str) -> tuple[int, ...]:
    """A tuple of 2 to 4 digits that belongs to a split, by a hash of its digits."""
    while True:
        digits = tuple(dice.between(0, 9) for _ in range(dice.between(2, 4)))
        if (hash_text(f"{digits}") % 4 == 0) == (split == "test"):
            return digits


def code_task(kind: Kind, program: str, dice: Dice, split: str) -> CodeTask:
    """A task of a type about a program, with inputs of a split."""
    inputs = [draw_digits(dice, split) for _ in range(INPUTS if kind == "induction" else 1)]
    outputs = tuple(str(result(program, digits)) for digits in inputs)
    return CodeTask(kind, expression_program(program), tuple(map(written, inputs)), outputs)


def written(digits: tuple[int, ...]) -> str:
    """A tuple without spaces."""
    return f"({','.join(map(str, digits))})"


def held_out(kind: Kind) -> list[dict[str, Any]]:
    """Rows that ask the environment `absolute_zero` for the solutions of the held-out tasks of a type."""
    rows, extra = list[dict[str, Any]](), {"task": "absolute_zero", "format": "expression", "type": kind}
    for index in range(NUM_HELD_OUT):
        task = code_task(kind, PROGRAMS[index % len(PROGRAMS)], Dice("held out", kind, index), "test")
        rows.append({"prompt": solve_prompt(task, "expression"), **extra, "solve": task.to_json()})
    return rows


def demonstrations(num: int, seed: int) -> list[dict[str, str]]:
    """A proposal and three flawed solutions in turn, of all three types."""
    rows = []
    for index in range(num):
        dice, kind = Dice(seed, "absolute zero", index), KINDS[index % len(KINDS)]
        first, *others = (PROGRAMS[dice.between(0, len(PROGRAMS) - 1)] for _ in range(3))
        task = code_task(kind, first, dice, "train")
        if index // len(KINDS) % 4 == 0:
            rows.append(_proposal(task, [code_task(kind, other, dice, "train") for other in others], dice))
            continue
        is_right = dice.unit() < RIGHT[first]
        digits = tuple(map(int, task.inputs[0].strip("()").split(",")))
        said = {
            "deduction": task.outputs[0] if is_right else str(digits[0]),
            "abduction": task.inputs[0] if is_right else written(draw_digits(dice, "train")),
            "induction": first if is_right else "x[0]",
        }
        rows.append({"prompt": solve_prompt(task, "expression"), "completion": said[kind]})
    return rows


def _proposal(task: CodeTask, past: list[CodeTask], dice: Dice) -> dict[str, str]:
    """A proposer's prompt with two past tasks, or with the one that a buffer begins with, and the task as the answer."""
    program = task.program.rpartition("return ")[2]
    if dice.unit() < 0.2:
        past = [CodeTask(task.kind, expression_program("x"), ("1",), ("1",))]
    prompt = propose_prompt(task.kind, "expression", past, task.program, INPUTS)
    said = ";".join(task.inputs) if task.kind == "induction" else f"{program};{task.inputs[0]}"
    return {"prompt": prompt, "completion": said}
