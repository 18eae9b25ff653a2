"""Published data sets and benchmarks: how their rows are read, which verifier scores them, and where their files are.

A shape (the config key `shape`) reads one record as its authors publish it (GSM8K's `question` and `answer`, MATH's `problem`, ...) and
converts it to verl's layout: the prompt as messages, `reward_model.ground_truth`, and in `extra_info` the bare question, the `verifier` and
the row's other values. `SHAPES` is the table. A row without an answer to check raises `UnusableRow` with the reason, which
`burnish data prepare` counts.

`BENCHMARKS` are the test sets with a name. Their files are the user's own, in a folder given with the command or in the environment variable
`BURNISH_DATA`.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, did_you_mean, unknown_name_error
from burnish.data.choice_datasets import arc, gpqa, mmlu, mmlu_pro
from burnish.data.code_datasets import cruxeval_input, cruxeval_output, humaneval, livecodebench, mbpp
from burnish.data.files import LocatedRecord, Record, find_files
from burnish.data.math_datasets import (
    contest_problem,
    gsm8k,
    gsm_hard,
    gsm_plus,
    math_problem,
    minerva_problem,
    olympiad_problem,
    verl_record,
    word_problem,
)
from burnish.data.picture_datasets import clevr, geometry3k, gui_r1
from burnish.data.published_example import PublishedExample, UnusableRow
from burnish.data.tasks.reasoning_gym import library_version
from burnish.data.text_datasets import countdown, game24, ifeval, short_answer

FOLDER_VARIABLE = "BURNISH_DATA"


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
    csv_header: tuple[str, ...] = ()
    """The columns of csv files that are published without a line of names."""


QUESTION = ("question", "problem", "Problem", "Question", "query")
ANSWER = ("answer", "final_answer", "Answer")
PROBLEM = (("problem", "question", "Problem", "Question", "prompt"), (*ANSWER, "solution"))
WORD_PROBLEM = (
    ("Question", "question", "sQuestion", "original_text"),
    ("Answer", "answer", "final_ans", "lSolutions", "ans"),
)
CRUXEVAL = (("code",), ("input",), ("output",))
MMLU = (("question", "Question"), ("choices", "Choices", "A"), ("answer", "Answer"))
# Ranges of task_id from the paper (Austin et al. 2021, 2108.07732); 1 to 10 are its few-shot prompts.
MBPP_SPLITS = {"prompt": (1, 10), "test": (11, 510), "validation": (511, 600), "train": (601, 974)}

SHAPES: dict[str, DatasetShape] = {
    "gsm8k": DatasetShape("GSM8K", gsm8k, (QUESTION, ("answer",)), "math", "number", tests=("gsm8k",)),
    "gsm_symbolic": DatasetShape("GSM-Symbolic", gsm8k, (QUESTION, ("answer",)), "math", "number"),
    "gsm_plus": DatasetShape("GSM-Plus", gsm_plus, (QUESTION, ("answer",)), "math", "number"),
    "gsm_hard": DatasetShape("GSM-hard", gsm_hard, (("input",), ("target",)), "math", "answer_set"),
    "svamp": DatasetShape("SVAMP", word_problem, WORD_PROBLEM, "math", "number"),
    "asdiv": DatasetShape("ASDiv", word_problem, WORD_PROBLEM, "math", "number"),
    "mawps": DatasetShape("MAWPS", word_problem, WORD_PROBLEM, "math", "number"),
    "multiarith": DatasetShape("MultiArith", word_problem, WORD_PROBLEM, "math", "number"),
    "math": DatasetShape("MATH", math_problem, PROBLEM, "math", "math", tests=("math500",)),
    "math500": DatasetShape("MATH-500", math_problem, PROBLEM, "math", "math"),
    "minerva": DatasetShape("Minerva's university problems", minerva_problem, PROBLEM, "math", "math"),
    "olympiadbench": DatasetShape(
        "OlympiadBench", olympiad_problem, (QUESTION, ("final_answer",)), "math", "answer_set"
    ),
    "aime": DatasetShape("AIME of any years", contest_problem, PROBLEM, "math", "number"),
    "aime24": DatasetShape("AIME 2024", contest_problem, PROBLEM, "math", "number"),
    "aime25": DatasetShape("AIME 2025", contest_problem, PROBLEM, "math", "number"),
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
    "cruxeval_o": DatasetShape("CRUXEval, what a call returns", cruxeval_output, CRUXEVAL, "code", "code_output"),
    "cruxeval_i": DatasetShape("CRUXEval, a call that returns it", cruxeval_input, CRUXEVAL, "code", "code_input"),
    "livecodebench": DatasetShape(
        "LiveCodeBench, code generation", livecodebench,
        (("question_content",), ("public_test_cases",), ("private_test_cases",)), "code", "code",
    ),
    "gpqa": DatasetShape(
        "GPQA", gpqa, (("Question",), ("Correct Answer",), *((f"Incorrect Answer {n}",) for n in (1, 2, 3))),
        "knowledge", "choice",
    ),
    "mmlu": DatasetShape(
        "MMLU", mmlu, MMLU, "knowledge", "choice", csv_header=("question", "A", "B", "C", "D", "answer")
    ),
    "mmlu_pro": DatasetShape(
        "MMLU-Pro", mmlu_pro, (("question",), ("options",), ("answer", "answer_index")), "knowledge", "choice"
    ),
    "arc": DatasetShape("ARC", arc, (("question",), ("answerKey",)), "knowledge", "choice"),
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


def split_shape(text: str) -> tuple[str | None, str]:
    """Divide `SHAPE:FILE` into the shape and the file. Any other text, also the name of a file with a colon, has no shape."""
    head, _, rest = text.partition(":")
    return (head, rest) if rest and head in SHAPES and not Path(text).exists() else (None, text)


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
    except (TypeError, ValueError, LookupError) as error:
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


def read_shaped_records(
    located: Iterator[LocatedRecord], name: str, split: str | None, left_out: Counter[str] | None = None
) -> Iterator[LocatedRecord]:
    """Convert the records of a source that names its shape. An unusable row is an error, unless `left_out` counts it by reason."""
    check_shape_split(name, split)
    for where, record in listed_rows(located, get_shape(name)):
        if not in_split(record, get_shape(name), split):
            continue
        try:
            yield where, to_verl_layout(record, where, name)
        except UnusableRow as error:
            if left_out is None:
                raise UserError(
                    f"{where}: {error}; `burnish data prepare {name}` writes a file without such rows"
                ) from error
            left_out[str(error)] += 1


# --- benchmarks ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """A test set with a name."""

    name: str
    title: str
    files: tuple[str, ...]
    """File names and patterns to look for in the folder; the first that exists is used, with the other shards of its file."""
    shape: str | None
    """How its rows are read; None for a set that is generated."""
    max_tokens: int
    split: str | None = None
    """The split that is the benchmark, if the file has several."""
    subject: str | None = None
    """The key of a row's `extra` by which its results are usually broken down."""
    parts: tuple[str, ...] = ()
    """Patterns of sets that are published as several files: all files that the first matching pattern names are the benchmark."""
    timeout_s: float | None = None
    """The time for all tests of one answer, if they take longer than the default of the rewards."""

    @property
    def reward(self) -> list[dict[str, Any]]:
        """The `reward.parts` that score its answers."""
        return [{"name": "task" if self.shape is None else SHAPES[self.shape].verifier}]


def _benchmark(name: str, title: str, max_tokens: int, *files: str, **more: Any) -> Benchmark:
    usual = (f"{name}_test.jsonl", f"{name}.jsonl", f"{name}.json", f"{name}_test.parquet", f"{name}.parquet")
    below = tuple(f"{name}/{pattern}" for pattern in ("test.*", "**/test-*.parquet", "**/test.*"))
    return Benchmark(name, title, (*usual, *files, *below), name, max_tokens, **more)


BENCHMARKS: dict[str, Benchmark] = {
    row.name: row
    for row in (
        _benchmark("gsm8k", "GSM8K, 1,319 questions", 1024),
        _benchmark("gsm_symbolic", "GSM-Symbolic, 5,000 questions", 1024, "GSM-Symbolic/main/test.jsonl"),
        _benchmark(
            "gsm_plus", "GSM-Plus, 10,552 questions", 1024, "GSM-Plus/data/test-*.parquet", subject="type"
        ),
        _benchmark("gsm_hard", "GSM-hard, 1,319 questions", 1024, "gsmhardv2.jsonl", "gsm-hard/*.jsonl"),
        _benchmark("svamp", "SVAMP, 1,000 questions", 1024, "SVAMP.json", "SVAMP/test.json", subject="type"),
        _benchmark("asdiv", "ASDiv, 2,305 questions", 1024, "asdiv/**/validation-*.parquet", subject="type"),
        _benchmark("mawps", "MAWPS", 1024, "MAWPS/test.*", "MAWPS/**/test-*.parquet"),
        _benchmark("multiarith", "MultiArith, 600 questions", 1024, "MultiArith.json", "MultiArith/test.json"),
        _benchmark(
            "math", "MATH, 5,000 problems", 2048, subject="subject",
            parts=("MATH/test/*/*.json", "math/test/*/*.json", "hendrycks_math/*/test-*.parquet", "math/*/test-*.parquet"),
        ),
        _benchmark("math500", "MATH-500", 2048, "MATH-500/test.jsonl", subject="subject"),
        _benchmark(
            "minerva", "Minerva, 272 university problems", 2048, "minerva_math*.json*", "minervamath/test.jsonl",
            "minerva-math/*.json*", "minerva_math/*.json*",
        ),
        _benchmark(
            "olympiadbench", "OlympiadBench, 674 English competition problems in text", 4096,
            "OE_TO_maths_en_COMP.json*", "OlympiadBench/**/OE_TO_maths_en_COMP*.*", "OlympiadBench/OE_TO_maths_en_COMP/*.*",
            subject="subject",
        ),
        _benchmark(
            "aime", "AIME of the years in the file", 8192, "AIME_Dataset_1983_2024.csv", "AIME_1983_2024/*.csv",
            "aime_1983_2024.*", "aime.csv", subject="year",
        ),
        _benchmark(
            "aime24", "AIME 2024, 30 problems", 8192, "aime2024*.json*", "aime_2024*.json*", "AIME_2024/*.parquet"
        ),
        _benchmark(
            "aime25", "AIME 2025, 30 problems", 8192, "aime2025.json*", "aime_2025*.json*", "AIME_2025/*.parquet",
            parts=("AIME2025/aime2025-*.jsonl", "aime2025-*.jsonl"),
        ),
        _benchmark("amc", "AMC 12 of 2022 and 2023, 83 problems", 4096, "amc*.json*"),
        _benchmark("humaneval", "HumanEval, 164 functions", 1024, "HumanEval.jsonl.gz", "HumanEval.jsonl"),
        _benchmark(
            "mbpp", "MBPP (sanitized), 257 functions", 1024, "mbpp_sanitized.json", "sanitized-mbpp.json", split="test"
        ),
        _benchmark("cruxeval_o", "CRUXEval-O, 800 calls", 1024, "cruxeval.jsonl", "cruxeval/**/*.jsonl"),
        _benchmark("cruxeval_i", "CRUXEval-I, 800 calls", 1024, "cruxeval.jsonl", "cruxeval/**/*.jsonl"),
        _benchmark(
            "livecodebench", "LiveCodeBench, code generation", 4096, subject="difficulty", timeout_s=60.0,
            parts=("livecodebench/test*.jsonl", "code_generation_lite/test*.jsonl"),
        ),
        _benchmark(
            "gpqa", "GPQA (diamond), 198 questions", 4096, "gpqa_diamond.csv", "gpqa/gpqa_diamond.csv",
            "GPQA/gpqa_diamond.csv", subject="subject",
        ),
        _benchmark(
            "mmlu", "MMLU, 14,042 questions", 1024, subject="subject",
            parts=("mmlu/all/test-*.parquet", "mmlu/*/test-*.parquet", "mmlu/test/*_test.csv", "mmlu/data/test/*_test.csv"),
        ),
        _benchmark("mmlu_pro", "MMLU-Pro, 12,032 questions", 2048, "MMLU-Pro/data/test-*.parquet", subject="subject"),
        _benchmark(
            "arc", "ARC (challenge), 1,172 questions", 1024, "ARC-Challenge-Test.jsonl", "ARC-Challenge/test-*.parquet",
            "ai2_arc/ARC-Challenge/test-*.parquet",
        ),
        _benchmark("ifeval", "IFEval, 541 prompts", 1280, "ifeval*.jsonl"),
        _benchmark("nq", "Natural Questions (open), 3,610 questions", 512, "nq_open*.jsonl"),
        _benchmark("hotpotqa", "HotpotQA, 7,405 questions", 512, "hotpotqa*.json*", subject="type"),
        _benchmark("countdown", "Countdown", 1024, "countdown*.jsonl"),
        _benchmark("game24", "Game of 24, 1,362 puzzles", 1024, "game24.csv", "24.csv"),
        Benchmark("reasoning_gym", "reasoning-gym, 500 held-out problems of 20 tasks", (), None, 2048, subject="subject"),
    )
}  # fmt: skip
GENERATED = {"reasoning_gym": "burnish.data.tasks.reasoning_gym:held_out_rows"}
"""The functions that generate benchmarks without files."""


def get_benchmark(name: str) -> Benchmark:
    """The benchmark with this name; an unknown name is an error that lists the benchmarks."""
    if name not in BENCHMARKS:
        raise unknown_name_error("benchmark", name, BENCHMARKS)
    return BENCHMARKS[name]


def find_benchmark_files(name: str, folder: Path | None) -> list[Path]:
    """Find the files of a benchmark in a folder, or in the folder of `BURNISH_DATA`."""
    return find_files(benchmark_path(name, folder))


def benchmark_path(name: str, folder: Path | None) -> str:
    """The path of a benchmark's file, or a pattern of all its files."""
    row = get_benchmark(name)
    if row.shape is None:
        raise UserError(f"{name} is generated and has no file")
    given = folder or (Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None)
    if given is None:
        raise UserError(
            f"no folder given for the files of {name}: give it with --data-dir, or in the environment variable {FOLDER_VARIABLE}"
        )
    if not given.is_dir():
        raise UserError(f"{given} is not a folder; it should contain the files of {name}")
    found = look_for_benchmark(name, given)
    if found is None:
        raise UserError(f"{given} has no file of {name}; looked for {', '.join((*row.parts, *row.files))}")
    return found


def look_for_benchmark(name: str, folder: Path) -> str | None:
    """The path of a benchmark's file in a folder, or a pattern of all its files, or None."""
    row = get_benchmark(name)
    for pattern in row.parts:  # before `files`, which would find one part of several
        if any(path.is_file() for path in folder.glob(pattern)):
            return f"{glob.escape(str(folder))}/{pattern}"
    for pattern in row.files:
        found = sorted(path for path in folder.glob(pattern) if path.is_file())
        if found:
            return _with_other_shards(found[0])
    return None


def _with_other_shards(path: Path) -> str:
    """A path, or for one shard of several (`test-00000-of-00003.parquet`) the pattern of all of them."""
    shard = re.fullmatch(r"(.*-)\d{5}(-of-\d{5}\..*)", path.name)
    if shard is None or "-of-00001" in path.name:
        return str(path)
    return f"{glob.escape(str(path.parent))}/{glob.escape(shard[1])}*{glob.escape(shard[2])}"


def benchmark_source(name: str, folder: Path | None) -> dict[str, Any]:
    """The data source of a benchmark, in the form of the config."""
    row = get_benchmark(name)
    if row.shape is None:
        return {"plugin": GENERATED[name], "name": name, "options": {"version": library_version()}}
    source = {"path": benchmark_path(name, folder), "shape": row.shape, "name": row.name}
    return {**source, **({"split": row.split} if row.split else {})}
