"""Published data sets and benchmarks: how their rows are read, which verifier scores them, and where their files are.

A shape (the config key `shape`) reads one record as its authors publish it (GSM8K's `question` and `answer`, MATH's `problem`, ...) and
converts it to verl's layout: the prompt as messages, `reward_model.ground_truth`, and in `extra_info` the bare question, the `verifier` and
the row's other values. `SHAPES` is the table. A row without an answer to check raises `UnusableRow` with the reason, which
`burnish data prepare` counts.

`BENCHMARKS` are the test sets with a name. Their files are the user's own, in a folder given with the command or in the environment variable
`BURNISH_DATA`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, did_you_mean, unknown_name_error
from burnish.data.files import LocatedRecord, Record
from burnish.data.picture_datasets import clevr, geometry3k, gui_r1
from burnish.data.published_example import (
    PublishedExample,
    UnusableRow,
    first_value,
    question_of,
    renamed_columns,
    user_messages,
)
from burnish.data.tasks import arithmetic as countdown_task

FOLDER_VARIABLE = "BURNISH_DATA"
BOXED_INSTRUCTION = "\nPlease reason step by step, and put your final answer within \\boxed{}."
TAGGED_INSTRUCTION = "\nThink step by step, then give the answer alone, in a few words, inside <answer> </answer>."
NUMBER = re.compile(r"-?\d+(\.\d+)?(/\d+)?")


# --- mathematics -----------------------------------------------------------------------------------------------------


def gsm8k(record: Record) -> PublishedExample:
    """GSM8K: the answer is the number after `####`, without commas."""
    question, solution = question_of(record), record["answer"]
    if solution is None:
        raise UnusableRow("no answer")
    answer = plain_number(str(solution).rpartition("####")[2])
    if answer is None:
        raise UnusableRow("no number behind ####")
    return PublishedExample(question, user_messages(question + BOXED_INSTRUCTION), answer)


def plain_number(text: str) -> str | None:
    """`$1,450.0` as `1450`; None for a text that is not a number."""
    digits = text.strip().replace(",", "").replace("$", "").rstrip(".")
    if not NUMBER.fullmatch(digits):
        return None
    return re.sub(r"\.0+$", "", digits)


def contest_problem(record: Record) -> PublishedExample:
    """AIME and AMC: contest problems whose answer is a number."""
    question, value = question_of(record), first_value(record, "answer", "final_answer", "Answer")
    if value is None:
        raise UnusableRow("no answer")
    answer = plain_number(str(value))
    if answer is None:
        raise UnusableRow("the answer is no number")
    return PublishedExample(
        question, user_messages(question + BOXED_INSTRUCTION), answer, renamed_columns(record, difficulty="difficulty")
    )


def math_problem(record: Record) -> PublishedExample:
    r"""MATH and similar sets: the answer is `answer` in LaTeX, or the last `\boxed{}` of `solution`."""
    question, answer = question_of(record), first_value(record, "answer", "final_answer", "Answer")
    if answer is None and record.get("solution") is not None:
        answer = last_boxed_answer(str(record["solution"]))
    if answer is None or not str(answer).strip():
        raise UnusableRow("no answer")
    extra = renamed_columns(record, subject="subject") or renamed_columns(record, subject="type")
    level = first_value(record, "level", "difficulty")
    if level is not None:
        found = re.search(r"\d+(\.\d+)?", str(level))
        extra["level"] = float(found[0]) if found else None
    return PublishedExample(question, user_messages(question + BOXED_INSTRUCTION), str(answer).strip(), extra)


def last_boxed_answer(solution: str) -> str | None:
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


def verl_record(record: Record) -> PublishedExample:
    """A record that is in verl's layout already: prompt and ground truth are taken as they are."""
    truth = (record["reward_model"] or {}).get("ground_truth")
    if (record["reward_model"] or {}).get("style") == "model":
        raise UnusableRow("reward_model.style is model, so no rule checks its answer")
    if truth is None or truth == "":
        raise UnusableRow("no answer")
    messages = record["prompt"]
    if not isinstance(messages, list) or not messages:
        raise TypeError(f"prompt should be a list of messages, got {type(messages).__name__}")
    plain_messages = [{"role": message["role"], "content": message["content"]} for message in messages]
    question = "\n".join(message["content"] for message in plain_messages if message["role"] == "user")
    return PublishedExample(strip_format_request(question), plain_messages, truth)


def strip_format_request(question: str) -> str:
    """A question without the sentence that asks for a format, which differs between data sets with the same question."""
    return re.sub(r"\s*(Let's think|Please reason) step by step[^.]*\\boxed\{\}\.?\s*$", "", question)


# --- code ------------------------------------------------------------------------------------------------------------


def mbpp(record: Record) -> PublishedExample:
    """MBPP: a task in words, with the tests that its function must pass. The tests also show the function's name."""
    question, tests = str(first_value(record, "prompt", "text")), list(record["test_list"])
    if not tests:
        raise UnusableRow("no tests")
    setup = record.get("test_setup_code") or "\n".join(record.get("test_imports") or [])
    listed = "\n".join(tests)
    prompt = (
        f"{question}\nYour code should pass these tests:\n\n{listed}\n\nGive the whole program in a ```python block."
    )
    answer = {"asserts": tests, **({"setup": setup} if setup else {})}
    return PublishedExample(question, user_messages(prompt), json.dumps(answer), {"task_id": int(record["task_id"])})


def humaneval(record: Record) -> PublishedExample:
    """HumanEval: the beginning of a function to complete. The hidden tests are a function `check`."""
    function_start = record["prompt"]
    prompt = f"Complete this Python function. Give the whole function in a ```python block.\n\n```python\n{function_start.rstrip()}\n```"
    answer = {"check": record["test"], "entry_point": record["entry_point"], "prefix": function_start}
    return PublishedExample(
        function_start, user_messages(prompt), json.dumps(answer), renamed_columns(record, task_id="task_id")
    )


# --- text and knowledge ----------------------------------------------------------------------------------------------


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


# --- puzzles ---------------------------------------------------------------------------------------------------------


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


# --- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DatasetShape:
    """How the rows of one published data set are read."""

    title: str
    read: Callable[[Record], PublishedExample]
    columns: tuple[tuple[str, ...], ...]
    """Columns that a record must have: one name of each tuple."""
    ability: str
    verifier: str
    splits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For a file with several splits: the first and last `task_id` of each."""
    tests: tuple[str, ...] = ()
    """Benchmarks that must not overlap with this data."""
    rows_under: str | None = None
    """For a file that is one object: the key of the list of its rows."""


QUESTION = ("question", "problem", "Problem", "query")
ANSWER = ("answer", "final_answer", "Answer")
PROBLEM = (("problem", "question", "Problem", "prompt"), (*ANSWER, "solution"))
# Ranges of task_id from the paper (Austin et al. 2021, 2108.07732); 1 to 10 are its few-shot prompts.
MBPP_SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}

SHAPES: dict[str, DatasetShape] = {
    "gsm8k": DatasetShape("GSM8K", gsm8k, (QUESTION, ("answer",)), "math", "number", tests=("gsm8k",)),
    "math": DatasetShape("MATH", math_problem, PROBLEM, "math", "math", tests=("math500",)),
    "math500": DatasetShape("MATH-500", math_problem, PROBLEM, "math", "math"),
    "aime24": DatasetShape("AIME 2024", contest_problem, PROBLEM, "math", "number"),
    "amc": DatasetShape("AMC", contest_problem, PROBLEM, "math", "number"),
    "deepscaler": DatasetShape(
        "DeepScaleR, in verl's layout", verl_record, (("prompt",), ("reward_model",)), "math", "math",
        tests=("math500", "aime24", "amc"),
    ),
    "mbpp": DatasetShape(
        "MBPP", mbpp, (("prompt", "text"), ("test_list",), ("task_id",)), "code", "code",
        splits=MBPP_SPLITS, tests=("mbpp", "humaneval"),
    ),
    "humaneval": DatasetShape(
        "HumanEval", humaneval, (("prompt",), ("test",), ("entry_point",)), "code", "code"
    ),
    "ifeval": DatasetShape("IFEval", ifeval, (("prompt",), ("instruction_id_list",), ("kwargs",)), "text", "ifeval"),
    "nq": DatasetShape("Natural Questions (open)", short_answer, (QUESTION, ("answer", "answers")), "knowledge", "qa"),
    "hotpotqa": DatasetShape("HotpotQA", short_answer, (QUESTION, ("answer", "answers")), "knowledge", "qa"),
    "countdown": DatasetShape("Countdown", countdown, (("numbers", "nums"), ("target",)), "puzzle", "task"),
    "game24": DatasetShape("Game of 24", game24, (("Puzzles", "numbers"),), "puzzle", "task"),
    "geometry3k": DatasetShape(
        "Geometry3K, with images", geometry3k, (("images",), ("problem",), ("answer",)), "geometry", "math"
    ),
    "clevr": DatasetShape(
        "CLEVR, with images", clevr, (("image", "images", "image_filename"), ("question", "problem"), ("answer", "solution")),
        "counting", "qa", rows_under="questions",
    ),
    "gui_r1": DatasetShape(
        "GUI-R1, screenshots with an action", gui_r1, (("image", "images"), ("instruction",), ("gt_action",)), "gui", "gui_r1"
    ),
}  # fmt: skip


def get_shape(name: str) -> DatasetShape:
    """The shape with this name; an unknown name is an error that lists the shapes."""
    if name not in SHAPES:
        raise unknown_name_error("data set", name, SHAPES)
    return SHAPES[name]


def to_verl_layout(record: Record, where: str, name: str) -> Record:
    """Convert a published record to verl's layout; UnusableRow if it has no answer, UserError if it has another shape."""
    shape = get_shape(name)
    if record.get("data_source") == name and "verifier" in (record.get("extra_info") or {}):
        return record  # already prepared
    for names in shape.columns:
        if not any(key in record for key in names):
            raise UserError(
                f"{where}: a row of {name} has a column {' or '.join(map(repr, names))}{did_you_mean(names[0], map(str, record))} "
                f"(this one has: {', '.join(map(str, record))})"
            )
    try:
        example = shape.read(record)
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{where}: not a row of {name}: {error}") from error
    images = {"images": list(example.images)} if example.images else {}
    return images | {
        "data_source": name,
        "prompt": example.messages,
        "ability": shape.ability,
        "reward_model": {"style": "rule", "ground_truth": example.answer},
        "extra_info": {"question": example.question, "verifier": shape.verifier, **example.extra},
    }


def listed_rows(located: Iterator[LocatedRecord], shape: DatasetShape) -> Iterator[LocatedRecord]:
    """The records of a file; of one that is a single object with a list of rows (`rows_under`), its rows."""
    for where, record in located:
        rows = record.get(shape.rows_under) if shape.rows_under is not None else None
        if not isinstance(rows, list):
            yield where, record
            continue
        for index, row in enumerate(rows):
            place = f"{where}, {shape.rows_under}[{index}]"
            if not isinstance(row, dict):
                raise UserError(f"{place}: expected an object with named columns, got {type(row).__name__}")
            yield place, row


def in_split(record: Record, shape: DatasetShape, split: str | None) -> bool:
    """Whether a record belongs to the requested split. Files of most data sets hold one split."""
    if split is None or not shape.splits:
        return True
    first, last = shape.splits[split]
    return first <= int(record["task_id"]) <= last


def check_shape_split(name: str, split: str | None) -> None:
    """Raise a UserError for a split that the shape cannot tell apart."""
    shape = get_shape(name)
    if split is not None and split not in shape.splits:
        known = f"one of {', '.join(shape.splits)}" if shape.splits else "none, because each file is one split"
        raise UserError(f"shape {name!r} has no split {split!r}; it can tell apart {known}")


def read_shaped_records(located: Iterator[LocatedRecord], name: str, split: str | None) -> Iterator[LocatedRecord]:
    """Convert the records of a source that names its shape. An unusable row is an error."""
    check_shape_split(name, split)
    for where, record in listed_rows(located, get_shape(name)):
        if in_split(record, get_shape(name), split):
            try:
                yield where, to_verl_layout(record, where, name)
            except UnusableRow as error:
                raise UserError(
                    f"{where}: {error}; `burnish data prepare {name}` writes a file without such rows"
                ) from error


# --- benchmarks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """A test set with a name."""

    name: str
    title: str
    files: tuple[str, ...]
    """File names and patterns to look for in the folder; the first that exists is used."""
    shape: str
    max_tokens: int
    split: str | None = None
    """The split that is the benchmark, if the file has several."""
    subject: str | None = None
    """The key of a row's `extra` that names its subject."""

    @property
    def reward(self) -> list[dict[str, Any]]:
        """The `reward.parts` that score its answers."""
        return [{"name": SHAPES[self.shape].verifier}]


def _benchmark(name: str, title: str, max_tokens: int, *files: str, **more: Any) -> Benchmark:
    usual = (f"{name}_test.jsonl", f"{name}.jsonl", f"{name}.json", f"{name}_test.parquet", f"{name}.parquet")
    below = tuple(f"{name}/{pattern}" for pattern in ("test.*", "**/test-*.parquet", "**/test.*"))
    return Benchmark(name, title, (*usual, *files, *below), name, max_tokens, **more)


BENCHMARKS: dict[str, Benchmark] = {
    row.name: row
    for row in (
        _benchmark("gsm8k", "GSM8K, 1,319 questions", 1024),
        _benchmark("math500", "MATH-500", 2048, "MATH-500/test.jsonl", subject="subject"),
        _benchmark(
            "aime24", "AIME 2024, 30 problems", 8192, "aime2024*.json*", "aime_2024*.json*", "AIME_2024/*.parquet"
        ),
        _benchmark("amc", "AMC 12 of 2022 and 2023, 83 problems", 4096, "amc*.json*"),
        _benchmark("humaneval", "HumanEval, 164 functions", 1024, "HumanEval.jsonl.gz", "HumanEval.jsonl"),
        _benchmark(
            "mbpp", "MBPP (sanitized), 257 functions", 1024, "mbpp_sanitized.json", "sanitized-mbpp.json", split="test"
        ),
        _benchmark("ifeval", "IFEval, 541 prompts", 1280, "ifeval*.jsonl"),
    )
}


def get_benchmark(name: str) -> Benchmark:
    """The benchmark with this name; an unknown name is an error that lists the benchmarks."""
    if name not in BENCHMARKS:
        raise unknown_name_error("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]


def find_benchmark_file(name: str, folder: Path | None) -> Path:
    """Find the file of a benchmark in a folder, or in the folder of `BURNISH_DATA`."""
    files = get_benchmark(name).files
    given = folder or (Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None)
    if given is None:
        raise UserError(
            f"no folder given for the files of {name}: give it with --data-dir, or in the environment variable {FOLDER_VARIABLE}"
        )
    if not given.is_dir():
        raise UserError(f"{given} is not a folder; it should contain the files of {name}")
    found = look_for_benchmark_file(name, given)
    if found is None:
        raise UserError(f"{given} has no file of {name}; looked for {', '.join(files)}")
    return found


def look_for_benchmark_file(name: str, folder: Path) -> Path | None:
    """The file of a benchmark in a folder, or None."""
    for pattern in get_benchmark(name).files:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        if found:
            return found[0]
    return None


def benchmark_source(name: str, folder: Path | None) -> dict[str, Any]:
    """The data source of a benchmark, in the form of the config."""
    row = get_benchmark(name)
    source = {"path": str(find_benchmark_file(name, folder)), "shape": row.shape, "name": row.name}
    return {**source, **({"split": row.split} if row.split else {})}
