"""Any task of the reasoning-gym library as `reasoning-gym/<name>` (extra: tasks), with the library's own checker.

Each row is entry 0 of a data set of size one, whose seed is folded from the row's place: even seeds for train, odd
for held-out. Entry i of seed s is often entry 0 of seed s+i in that library, so seeds alone prove nothing; a hash of
the question's text decides the side as well. What the checker needs travels in `extra`. Several of the library's
checkers run the answer through `eval`: score only inside the reward workers. Some pay for partial or odd answers;
the number is passed on as the library gives it.
"""

from __future__ import annotations

import functools
import json
import os
import random
from typing import Any

from burnish.config.errors import UserError, unknown_name_error
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
"""Tasks that walk through sets of strings while generating, so that their entries change with Python's hash seed."""


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
                raise UserError(f"{name}: {key} is not an option here; it follows from the run's seed and the split")
        short = name.removeprefix(PREFIX)
        if short in HASH_ORDERED and os.environ.get("PYTHONHASHSEED", "random") == "random":
            raise UserError(
                f"{name}: its generator depends on Python's string hashing, so a restarted run would get other "
                "problems; start with PYTHONHASHSEED=0 in the environment"
            )
        try:
            self._options_text = json.dumps(self.options, sort_keys=True)
        except TypeError as error:
            raise UserError(f"{name}: options should be plain values: {error}") from error
        _make(name, self.options, 0)  # a wrong name or option should stop the run before it starts

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
    """One entry. A few generators also draw from global randomness (Python's, numpy's), so it is pinned meanwhile."""
    import numpy

    outside = random.getstate(), numpy.random.get_state()
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        entry: dict[str, Any] = _make(name, options, seed)[0]
        return entry
    finally:
        random.setstate(outside[0])
        numpy.random.set_state(outside[1])


def _make(name: str, options: dict[str, Any], seed: int) -> Any:
    """The library's data set of one entry; a wrong name or option is an error for the user."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise UserError(f"{name} needs the reasoning-gym library: pip install 'burnish[tasks]'") from error
    short = name.removeprefix(PREFIX)
    if short not in DATASETS:
        raise unknown_name_error("reasoning-gym task", short, DATASETS)
    try:
        return reasoning_gym.create_dataset(short, seed=seed, size=1, **options)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(f"{name}: options {options} do not fit: {error}") from error


@functools.lru_cache(maxsize=16)
def _dataset(name: str, options_text: str, seed: int) -> Any:
    """The data set whose checker scores; kept, because some load word lists or puzzles when they are made."""
    return _make(name, json.loads(options_text), seed)
