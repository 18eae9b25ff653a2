"""Readers of published texts and puzzles: IFEval, short answers, Countdown, Game of 24. `published_datasets.SHAPES` names them."""

from __future__ import annotations

import json
from typing import Any

from burnish.data.files import Record
from burnish.data.published_example import (
    PublishedExample,
    UnusableRow,
    first_value,
    question_of,
    renamed_columns,
    user_messages,
)
from burnish.data.tasks import arithmetic as countdown_task

TAGGED_INSTRUCTION = "\nThink step by step, then give the answer alone, in a few words, inside <answer> </answer>."


def ifeval(record: Record) -> PublishedExample:
    """IFEval: the answer is the list of instructions as JSON, with the arguments that are set."""
    prompt, ids, arguments = str(record["prompt"]), record["instruction_id_list"], record["kwargs"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if len(ids) != len(arguments):
        raise ValueError(f"{len(ids)} instructions with {len(arguments)} sets of arguments")
    instructions = [
        {"id": name, **{key: value for key, value in (given or {}).items() if value is not None}}
        for name, given in zip(ids, arguments, strict=True)
    ]
    return PublishedExample(
        prompt, user_messages(prompt), json.dumps(instructions, sort_keys=True), renamed_columns(record, key="key")
    )


def short_answer(record: Record) -> PublishedExample:
    """Natural Questions and HotpotQA: a question with one or several accepted answers."""
    question, value = question_of(record), first_value(record, "answer", "answers")
    value = value.get("value") if isinstance(value, dict) else value
    answers = [str(item).strip() for item in (value if isinstance(value, list) else [value]) if item is not None]
    if not any(answers):
        raise UnusableRow("no answer")
    return PublishedExample(
        question,
        user_messages(question + TAGGED_INSTRUCTION),
        [a for a in answers if a],
        renamed_columns(record, type="type"),
    )


def countdown(record: Record) -> PublishedExample:
    """Countdown: numbers and a target, asked as the built-in task asks, so that its checker can score the answer."""
    numbers, target = [int(n) for n in first_value(record, "numbers", "nums")], int(record["target"])
    return _puzzle(numbers, target, renamed_columns(record, solution="solution"))


def game24(record: Record) -> PublishedExample:
    """Game of 24: four numbers that make 24. The rank, by how long people take, is kept."""
    value = first_value(record, "Puzzles", "numbers")
    numbers = [int(n) for n in (value.split() if isinstance(value, str) else value)]
    rank = record.get("Rank")
    return _puzzle(numbers, 24, {} if rank is None else {"rank": int(rank)})


def _puzzle(numbers: list[int], target: int, extra: dict[str, Any]) -> PublishedExample:
    if len(numbers) < 2 or any(n < 0 for n in numbers):
        raise ValueError(f"expected two or more positive numbers, got {numbers}")
    listed = ", ".join(map(str, numbers))
    prompt = countdown_task.COUNTDOWN_PROMPT.replace("{numbers}", listed).replace("{target}", str(target))
    # Two puzzles are the same if their numbers are, in any order.
    question = f"{' '.join(map(str, sorted(numbers)))} make {target}"
    return PublishedExample(
        question, user_messages(prompt), target, {"task": countdown_task.COUNTDOWN, "numbers": numbers, **extra}
    )
