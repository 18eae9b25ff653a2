"""One published record in, one question with its answer out: the functions behind `data/published_sets.py`.

Each takes the record as the data set's authors wrote it, in any of the column names under which it is found, and gives an
`Example`. A row that has no answer to check is `Unusable` with the reason, which `burnish data prepare` counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from burnish.config.errors import UserError, nearest, unknown
from burnish.data.files import Located, Record
from burnish.data.tasks import arithmetic as countdown_task

Message = dict[str, Any]
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TAGGED = "\nThink step by step, then give the answer alone, in a few words, inside <answer> </answer>."
NUMBER = re.compile(r"-?\d+(\.\d+)?(/\d+)?")


class Unusable(Exception):
    """A row that cannot be trained on or measured with; the text is the reason."""


@dataclass(frozen=True)
class Example:
    """A question as the data set has it, the messages that ask it, and the answer."""

    question: str
    messages: list[Message]
    answer: Any
    extra: dict[str, Any] = field(default_factory=dict)


def asked(text: str) -> list[Message]:
    """A text as what the user says."""
    return [{"role": "user", "content": text}]


def first_of(record: Record, *names: str) -> Any:
    """The first of these columns that has a value, or None."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def question_of(record: Record) -> str:
    """The question, which some files keep as a conversation of one turn."""
    value = first_of(record, "question", "problem", "Problem", "query", "prompt", "text")
    if isinstance(value, list):
        turns = [turn.get("content", turn.get("value")) for turn in value if isinstance(turn, dict)]
        if len(turns) != 1:
            raise ValueError(f"expected one turn in the prompt, got {len(turns)}")
        value = turns[0]
    if value is not None and not isinstance(value, str):
        raise TypeError(f"the question should be text, got {type(value).__name__}")
    if not value or not value.strip():
        raise Unusable("no question")
    return str(value).strip()


def kept(record: Record, **columns: str) -> dict[str, Any]:
    """Those columns of a record that are there, under our names."""
    return {ours: record[theirs] for ours, theirs in columns.items() if record.get(theirs) is not None}


# --- mathematics -----------------------------------------------------------------------------------------------------


def gsm8k(record: Record) -> Example:
    """The number behind `####`, without commas."""
    question, solution = question_of(record), record["answer"]
    if solution is None:
        raise Unusable("no answer")
    answer = plain_number(str(solution).rpartition("####")[2])
    if answer is None:
        raise Unusable("no number behind ####")
    return Example(question, asked(question + BOXED), answer)


def plain_number(text: str) -> str | None:
    """`$1,450.0` as `1450`; None for what is no number."""
    digits = text.strip().replace(",", "").replace("$", "").rstrip(".")
    if not NUMBER.fullmatch(digits):
        return None
    return re.sub(r"\.0+$", "", digits)


def whole_number(record: Record) -> Example:
    """Contest problems whose answer is a number (AIME, AMC)."""
    question, value = question_of(record), first_of(record, "answer", "final_answer", "Answer")
    if value is None:
        raise Unusable("no answer")
    answer = plain_number(str(value))
    if answer is None:
        raise Unusable("the answer is no number")
    return Example(question, asked(question + BOXED), answer, kept(record, difficulty="difficulty"))


def mathematics(record: Record) -> Example:
    r"""MATH and its relatives: `answer` in LaTeX, or what the last `\boxed` of `solution` holds."""
    question, answer = question_of(record), first_of(record, "answer", "final_answer", "Answer")
    if answer is None and record.get("solution") is not None:
        answer = boxed(str(record["solution"]))
    if answer is None or not str(answer).strip():
        raise Unusable("no answer")
    extra = kept(record, subject="subject") or kept(record, subject="type")
    level = first_of(record, "level", "difficulty")
    if level is not None:
        found = re.search(r"\d+(\.\d+)?", str(level))
        extra["level"] = float(found[0]) if found else None
    return Example(question, asked(question + BOXED), str(answer).strip(), extra)


def boxed(solution: str) -> str | None:
    r"""The inside of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 5`) of a solution, or None."""
    starts = list(re.finditer(r"\\f?boxed\s*|\\fbox\s*", solution))
    if not starts:
        return None
    rest = solution[starts[-1].end() :]
    if not rest.startswith("{"):
        return re.split(r"[\s$.,]", rest, maxsplit=1)[0] or None
    depth = 0
    for at, brace in ((m.start(), m[0]) for m in re.finditer(r"(?<!\\)[{}]", rest)):
        depth += 1 if brace == "{" else -1
        if depth == 0:
            return rest[1:at]
    return None


def verl(record: Record) -> Example:
    """A row in verl's layout already: its prompt and ground truth as they are."""
    truth = (record["reward_model"] or {}).get("ground_truth")
    if (record["reward_model"] or {}).get("style") == "model":
        raise Unusable("reward_model.style is model, so no rule checks its answer")
    if truth is None or truth == "":
        raise Unusable("no answer")
    messages = record["prompt"]
    if not isinstance(messages, list) or not messages:
        raise TypeError(f"prompt should be a list of messages, got {type(messages).__name__}")
    said = [{"role": message["role"], "content": message["content"]} for message in messages]
    question = "\n".join(message["content"] for message in said if message["role"] == "user")
    return Example(bare(question), said, truth)


def bare(question: str) -> str:
    """A question without what asks for the format of its answer: two data sets may ask differently for the same."""
    return re.sub(r"\s*(Let's think|Please reason) step by step[^.]*\\boxed\{\}\.?\s*$", "", question)


# --- code ------------------------------------------------------------------------------------------------------------


def mbpp(record: Record) -> Example:
    """A task in words, with the tests its function must pass, which also tell the function's name."""
    question, tests = str(first_of(record, "prompt", "text")), list(record["test_list"])
    if not tests:
        raise Unusable("no tests")
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or [])
    listed = "\n".join(tests)
    prompt = (
        f"{question}\nYour code should pass these tests:\n\n{listed}\n\nGive the whole program in a ```python block."
    )
    answer = {"asserts": tests, **({"setup": setup} if setup else {})}
    return Example(question, asked(prompt), json.dumps(answer), {"task_id": int(record["task_id"])})


def humaneval(record: Record) -> Example:
    """A function's beginning to complete; the hidden tests are a function `check`."""
    begun = record["prompt"]
    prompt = f"Complete this Python function. Give the whole function in a ```python block.\n\n```python\n{begun.rstrip()}\n```"
    answer = {"check": record["test"], "entry_point": record["entry_point"], "prefix": begun}
    return Example(begun, asked(prompt), json.dumps(answer), kept(record, task_id="task_id"))


# --- text and knowledge ----------------------------------------------------------------------------------------------


def ifeval(record: Record) -> Example:
    """Instructions that a program can check; the answer is their list as JSON, with the arguments that are set."""
    prompt, ids, arguments = str(record["prompt"]), record["instruction_id_list"], record["kwargs"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if len(ids) != len(arguments):
        raise ValueError(f"{len(ids)} instructions with {len(arguments)} sets of arguments")
    instructions = [
        {"id": name, **{key: value for key, value in (given or {}).items() if value is not None}}
        for name, given in zip(ids, arguments, strict=True)
    ]
    return Example(prompt, asked(prompt), json.dumps(instructions, sort_keys=True), kept(record, key="key"))


def short_answer(record: Record) -> Example:
    """A question with one or several accepted answers."""
    question, value = question_of(record), first_of(record, "answer", "answers")
    value = value.get("value") if isinstance(value, dict) else value
    answers = [str(item).strip() for item in (value if isinstance(value, list) else [value]) if item is not None]
    if not any(answers):
        raise Unusable("no answer")
    return Example(question, asked(question + TAGGED), [a for a in answers if a], kept(record, type="type"))


# --- puzzles ---------------------------------------------------------------------------------------------------------


def countdown(record: Record) -> Example:
    """Numbers and a target, asked as the built-in task asks, so that its checker judges the answer."""
    numbers, target = [int(n) for n in first_of(record, "numbers", "nums")], int(record["target"])
    return _puzzle(numbers, target, kept(record, solution="solution"))


def game24(record: Record) -> Example:
    """Four numbers that make 24; the rank by how long people take is kept."""
    value = first_of(record, "Puzzles", "numbers")
    numbers = [int(n) for n in (value.split() if isinstance(value, str) else value)]
    rank = record.get("Rank")
    return _puzzle(numbers, 24, {} if rank is None else {"rank": int(rank)})


def _puzzle(numbers: list[int], target: int, extra: dict[str, Any]) -> Example:
    if len(numbers) < 2 or any(n < 0 for n in numbers):
        raise ValueError(f"expected two or more positive numbers, got {numbers}")
    listed = ", ".join(map(str, numbers))
    prompt = countdown_task.PROMPT.replace("{numbers}", listed).replace("{target}", str(target))
    # Two puzzles are the same if their numbers are, in whatever order.
    question = f"{' '.join(map(str, sorted(numbers)))} make {target}"
    return Example(question, asked(prompt), target, {"task": countdown_task.COUNTDOWN, "numbers": numbers, **extra})


# --- Published data sets by the shape of their rows: what is asked, what the answer is, and which verifier judges it.
#
# A shape reads one record of a file as its authors publish it (GSM8K's `question` and `answer`, MATH's `problem`, ...) and
# gives the record burnish trains on, in verl's layout: the prompt as messages, `reward_model.ground_truth`, and in
# `extra_info` the bare question, the `verifier` and what else the row carries. `SHAPES` is the table; the functions that
# read are in `data/published_sets.py`.


@dataclass(frozen=True)
class Shape:
    """How the rows of one published data set are read."""

    title: str
    read: Callable[[Record], Example]
    columns: tuple[tuple[str, ...], ...]
    """What a record must have: of each of these names one."""
    ability: str
    verifier: str
    splits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of a file that holds several splits: the first and last `task_id` of each."""
    tests: tuple[str, ...] = ()
    """The benchmarks that should not be in it."""


QUESTION = ("question", "problem", "Problem", "query")
ANSWER = ("answer", "final_answer", "Answer")
PROBLEM = (("problem", "question", "Problem", "prompt"), (*ANSWER, "solution"))
# The ranges of task_id of the paper (Austin et al. 2021, 2108.07732); 1 to 10 are its few-shot prompts.
MBPP_SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}

SHAPES: dict[str, Shape] = {
    "gsm8k": Shape("GSM8K", gsm8k, (QUESTION, ("answer",)), "math", "number", tests=("gsm8k",)),
    "math": Shape("MATH", mathematics, PROBLEM, "math", "math", tests=("math500",)),
    "math500": Shape("MATH-500", mathematics, PROBLEM, "math", "math"),
    "aime24": Shape("AIME 2024", whole_number, PROBLEM, "math", "number"),
    "amc": Shape("AMC", whole_number, PROBLEM, "math", "number"),
    "deepscaler": Shape(
        "DeepScaleR, in verl's layout", verl, (("prompt",), ("reward_model",)), "math", "math",
        tests=("math500", "aime24", "amc"),
    ),
    "mbpp": Shape(
        "MBPP", mbpp, (("prompt", "text"), ("test_list",), ("task_id",)), "code", "code",
        splits=MBPP_SPLITS, tests=("mbpp", "humaneval"),
    ),
    "humaneval": Shape(
        "HumanEval", humaneval, (("prompt",), ("test",), ("entry_point",)), "code", "code"
    ),
    "ifeval": Shape("IFEval", ifeval, (("prompt",), ("instruction_id_list",), ("kwargs",)), "text", "ifeval"),
    "nq": Shape("Natural Questions (open)", short_answer, (QUESTION, ("answer", "answers")), "knowledge", "qa"),
    "hotpotqa": Shape("HotpotQA", short_answer, (QUESTION, ("answer", "answers")), "knowledge", "qa"),
    "countdown": Shape("Countdown", countdown, (("numbers", "nums"), ("target",)), "puzzle", "task"),
    "game24": Shape("Game of 24", game24, (("Puzzles", "numbers"),), "puzzle", "task"),
}  # fmt: skip


def shape_of(name: str) -> Shape:
    """The shape of a name; an unknown one is an error that lists them."""
    if name not in SHAPES:
        raise unknown("data set", name, SHAPES)
    return SHAPES[name]


def shaped(record: Record, where: str, name: str) -> Record:
    """A published record in burnish's own layout; `Unusable` where it has no answer, an error where it is another shape."""
    shape = shape_of(name)
    if record.get("data_source") == name and "verifier" in (record.get("extra_info") or {}):
        return record  # prepared before
    for names in shape.columns:
        if not any(key in record for key in names):
            raise UserError(
                f"{where}: a row of {name} has a column {' or '.join(map(repr, names))}{nearest(names[0], map(str, record))} "
                f"(this one has: {', '.join(map(str, record))})"
            )
    try:
        example = shape.read(record)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{where}: not a row of {name}: {error}") from error
    return {
        "data_source": name,
        "prompt": example.messages,
        "ability": shape.ability,
        "reward_model": {"style": "rule", "ground_truth": example.answer},
        "extra_info": {"question": example.question, "verifier": shape.verifier, **example.extra},
    }


def in_split(record: Record, shape: Shape, split: str | None) -> bool:
    """Whether a record belongs to the split asked for; files of most data sets are one split."""
    if split is None or not shape.splits:
        return True
    first, last = shape.splits[split]
    return first <= int(record["task_id"]) <= last


def check_split(name: str, split: str | None) -> None:
    """Refuse a split that the shape cannot tell apart."""
    shape = shape_of(name)
    if split is not None and split not in shape.splits:
        known = f"one of {', '.join(shape.splits)}" if shape.splits else "none: a file of it is its own split"
        raise UserError(f"shape {name!r} has no split {split!r}; it can tell apart {known}")


def shaped_records(located: Iterator[Located], name: str, split: str | None) -> Iterator[Located]:
    """Published records as burnish's own, for a source that names its shape; what cannot be used is an error."""
    check_split(name, split)
    for where, record in located:
        if in_split(record, shape_of(name), split):
            try:
                yield where, shaped(record, where, name)
            except Unusable as error:
                raise UserError(
                    f"{where}: {error}; `burnish data prepare {name}` writes a file without such rows"
                ) from error
