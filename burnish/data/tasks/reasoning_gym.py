"""Tasks of the reasoning-gym library as `reasoning-gym/<name>` (extra: tasks), with the library's own checkers.

Each row is entry 0 of a data set of size one. Its seed is derived from the split and the index: even seeds for train, odd for test. In that
library, entry i of seed s is often entry 0 of seed s+i, so different seeds do not guarantee different problems. A hash of the question
therefore decides the split as well. `extra` holds what the checker needs. Several of the library's checkers run `eval` on the answer, so
score only inside reward workers. Some give partial credit; the number is passed on as it is.
"""

from __future__ import annotations

import functools
import json
import os
import random
from collections.abc import Iterator
from typing import Any

from burnish.config.errors import UserError, unknown_name_error
from burnish.config.extras import install_hint
from burnish.core.random_keys import fold
from burnish.data.row import Row
from burnish.data.tasks.task import final_answer, first_on_split

PREFIX = "reasoning-gym/"
HASH_ORDERED = (
    "intermediate_integration",
    "isomorphic_strings",
    "knight_swap",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Tasks whose generators iterate over sets of strings, so that their entries depend on Python's hash seed."""
BENCHMARK_TASKS = (
    "aiw", "base_conversion", "calendar_arithmetic", "circuit_logic", "coin_flip", "color_cube_rotation", "course_schedule",
    "family_relationships", "knights_knaves", "largest_island", "leg_counting", "letter_counting", "number_sequence",
    "self_reference", "shortest_path", "spell_backward", "syllogism", "time_intervals", "tower_of_hanoi", "word_sorting",
)  # fmt: skip
"""The tasks of the benchmark: quick to generate, the same in every process, and with scorers that evaluate no code."""
BENCHMARK_PROBLEMS_PER_TASK = 25
BENCHMARK_INSTRUCTION = "\n\nThink step by step, then give the answer alone inside <answer> </answer>."


def score(name: str, completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """The library's score, in 0..1, of the last `<answer>` in the completion, or of all of it."""
    entry = {"question": extra["question"], "answer": answer, "metadata": extra["metadata"]}
    dataset = _dataset(name, json.dumps(extra["options"], sort_keys=True), 0)
    return float(dataset.score_answer(final_answer(completion), entry))


class ReasoningGymTask:
    """One reasoning-gym task with the library's own options."""

    alphabet = None

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self.name, self.seed, self.options = name, seed, dict(options)
        for key in ("seed", "size"):
            if key in options:
                raise UserError(f"{name}: {key} is not an option here; it is derived from the run's seed and the split")
        short = name.removeprefix(PREFIX)
        if short in HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise UserError(
                f"{name}: its generator depends on Python's string hashing, so a restarted run would get other "
                "problems; set PYTHONHASHSEED=0 in the environment"
            )
        try:
            self._options_text = json.dumps(self.options, sort_keys=True)
        except TypeError as error:
            raise UserError(f"{name}: options should be plain values: {error}") from error
        _make(name, self.options, 0)  # report a wrong name or option before the run starts

    def row(self, split: str, index: int) -> Row:
        """The index-th entry of a split."""

        def propose(attempt: int) -> tuple[str, dict[str, Any]]:
            key = fold(self.seed, self.name, split, index, attempt)
            entry = _entry(self.name, self.options, 2 * (key % 2**30) + (split == "test"))
            return f"{self.name} {entry['question']}", entry

        entry = first_on_split(split, propose, self.name)
        extra = {
            "task": self.name,
            "question": entry["question"],
            "metadata": entry["metadata"],
            "options": self.options,
        }
        return Row(f"{self.name}/{split}/{index}", entry["question"], self.name, entry["answer"], extra)

    def score(self, completion: str, answer: Any, extra: dict[str, Any]) -> float:
        """The library's score."""
        return score(self.name, completion, answer, extra)


def _entry(name: str, options: dict[str, Any], seed: int) -> dict[str, Any]:
    """One entry. A few generators also use Python's and numpy's global random state, so it is seeded meanwhile."""
    import numpy

    saved = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        entry: dict[str, Any] = _make(name, options, seed)[0]
        return entry
    finally:
        random.setstate(saved[0])
        numpy.random.set_state(saved[1])


def _make(name: str, options: dict[str, Any], seed: int) -> Any:
    """The library's data set of one entry; a wrong name or option is a UserError."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"{name} needs the reasoning-gym library: {install_hint('tasks')}") from error
    short = name.removeprefix(PREFIX)
    if short not in DATASETS:
        raise unknown_name_error("reasoning-gym task", short, DATASETS)
    try:
        return reasoning_gym.create_dataset(short, seed=seed, size=1, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{name}: options {options} do not fit: {error}") from error


@functools.lru_cache(maxsize=16)
def _dataset(name: str, options_text: str, seed: int) -> Any:
    """The data set whose checker scores. It is cached, because some load word lists or puzzles when created."""
    return _make(name, json.loads(options_text), seed)


def library_version() -> str:
    """The version of the installed library; a UserError if there is none."""
    from importlib import metadata

    try:
        return metadata.version("reasoning-gym")
    except metadata.PackageNotFoundError as error:
        raise UserError(f"reasoning_gym needs the reasoning-gym library: {install_hint('tasks')}") from error


def held_out_rows(version: str) -> Iterator[dict[str, Any]]:
    """The rows of the benchmark `reasoning_gym`: held-out problems of each task, the same for every seed of an evaluation.

    `version` is the library's. It is a setting of the evaluation, because another version may generate other problems.
    """
    if version != library_version():
        raise UserError(f"reasoning_gym: reasoning-gym {library_version()} is installed, but {version} was asked for")
    for task in BENCHMARK_TASKS:
        generated = ReasoningGymTask(PREFIX + task, {}, seed=0)
        for index in range(BENCHMARK_PROBLEMS_PER_TASK):
            row = generated.row("test", index)
            yield {
                "prompt": f"{row.prompt}{BENCHMARK_INSTRUCTION}",
                "answer": row.answer,
                **row.extra,
                "subject": task,
                "verifier": "task",
            }
