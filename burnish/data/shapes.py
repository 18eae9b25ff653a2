"""Published data sets by the shape of their rows: what is asked, what the answer is, and which verifier judges it.

A shape reads one record of a file as its authors publish it (GSM8K's `question` and `answer`, MATH's `problem`, ...) and
gives the record burnish trains on, in verl's layout: the prompt as messages, `reward_model.ground_truth`, and in
`extra_info` the bare question, the `verifier` and what else the row carries. `SHAPES` is the table; the functions that
read are in `data/readers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from burnish.config.errors import UserError, nearest, unknown
from burnish.data import readers
from burnish.data.files import Located, Record
from burnish.data.readers import Example, Unusable


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
    "gsm8k": Shape("GSM8K", readers.gsm8k, (QUESTION, ("answer",)), "math", "number", tests=("gsm8k",)),
    "math": Shape("MATH", readers.mathematics, PROBLEM, "math", "math", tests=("math500",)),
    "math500": Shape("MATH-500", readers.mathematics, PROBLEM, "math", "math"),
    "aime24": Shape("AIME 2024", readers.whole_number, PROBLEM, "math", "number"),
    "amc": Shape("AMC", readers.whole_number, PROBLEM, "math", "number"),
    "deepscaler": Shape(
        "DeepScaleR, in verl's layout", readers.verl, (("prompt",), ("reward_model",)), "math", "math",
        tests=("math500", "aime24", "amc"),
    ),
    "mbpp": Shape(
        "MBPP", readers.mbpp, (("prompt", "text"), ("test_list",), ("task_id",)), "code", "code",
        splits=MBPP_SPLITS, tests=("mbpp", "humaneval"),
    ),
    "humaneval": Shape(
        "HumanEval", readers.humaneval, (("prompt",), ("test",), ("entry_point",)), "code", "code"
    ),
    "ifeval": Shape("IFEval", readers.ifeval, (("prompt",), ("instruction_id_list",), ("kwargs",)), "text", "ifeval"),
    "nq": Shape("Natural Questions (open)", readers.short_answer, (QUESTION, ("answer", "answers")), "knowledge", "qa"),
    "hotpotqa": Shape("HotpotQA", readers.short_answer, (QUESTION, ("answer", "answers")), "knowledge", "qa"),
    "countdown": Shape("Countdown", readers.countdown, (("numbers", "nums"), ("target",)), "puzzle", "task"),
    "game24": Shape("Game of 24", readers.game24, (("Puzzles", "numbers"),), "puzzle", "task"),
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
