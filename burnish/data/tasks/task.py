"""The protocol of a generated task, and how its train and test splits are kept apart.

A row is a pure function of (task options, seed, split, index), so every machine generates the same one. The split of a problem depends on
the problem alone (on a hash of what identifies it), never on the seed. So no test problem is ever trained on, whatever the seeds of
demonstrations, training and validation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from burnish.config.errors import UserError, unknown_name_error
from burnish.core.random_keys import fold, hash_text, uniform_from_key
from burnish.data.row import Row

HELD_OUT_ONE_IN = 4
MAX_ATTEMPTS = 1000  # the probability of missing the smaller split (a quarter) this often is 1e-125
SPLITS = ("train", "test")

T = TypeVar("T")


class Task(Protocol):
    """Endless problems of one kind, with their checker.

    A task may also have `demonstrations(num, seed, ...)`, which returns rows of prompt and completion,
    `preferences(num, seed, split, ...)`, which returns rows of prompt, chosen and rejected, and
    `step_values(num, seed, split, ...)`, which returns rows of prompt, steps and values.
    """

    @property
    def name(self) -> str: ...

    @property
    def alphabet(self) -> str | None:
        """The characters of its prompts and answers, for a character tokenizer; None if they are not a small set."""

    def row(self, split: str, index: int) -> Row: ...

    def score(self, completion: str, answer: Any, extra: dict[str, Any]) -> float: ...


@runtime_checkable
class GrowingTask(Protocol):
    """What a task has besides whose rows depend on what earlier steps made.

    Its rows are functions of the index and of the tasks made so far, which a file of the run keeps. So draws cannot be repeated later: only
    `rollout.source=sync` can use it.
    """

    def open_journal(self, path: Path, step: int) -> None:
        """Keep what is made in a file, and read from it what was made in steps up to `step`."""

    def observe(self, step: int, records: Sequence[tuple[str, dict[str, Any]]]) -> None:
        """Take what the episodes of a step made (`End.record`), each with the id of its first trajectory."""

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last observed step."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides the file, as plain JSON values."""

    def restore(self, state: dict[str, Any]) -> None:
        """Check that the file has what it had when `state()` was taken; a UserError otherwise."""


def is_held_out(problem: str) -> bool:
    """Whether a problem belongs to the test split, from the text that identifies it. About one in four does."""
    return hash_text(problem) % HELD_OUT_ONE_IN == 0


def first_on_split(split: str, propose: Callable[[int], tuple[str, T] | None], where: str) -> T:
    """The first of propose(0), propose(1), ... that belongs to the split.

    `propose` returns (the text that identifies the problem, the problem), or None for a failed attempt.
    """
    if split not in SPLITS:
        raise unknown_name_error("split", split, SPLITS)
    for attempt in range(MAX_ATTEMPTS):
        proposal = propose(attempt)
        if proposal is not None and is_held_out(proposal[0]) == (split == "test"):
            return proposal[1]
    raise UserError(
        f"{where}: no {split} problem in {MAX_ATTEMPTS} attempts; its options allow too few different problems for "
        "two splits"
    )


class Dice:
    """Random numbers that depend only on a key: the same on every machine and Python version."""

    def __init__(self, *key: int | str) -> None:
        self._key = fold(*key)
        self._count = 0

    def unit(self) -> float:
        """A number in [0, 1)."""
        self._count += 1
        return uniform_from_key(fold(self._key, self._count))

    def between(self, low: int, high: int) -> int:
        """A whole number in low..high, both included."""
        return low + int(self.unit() * (high - low + 1))


def check_span(where: str, what: str, low: Any, high: Any, least: int, most: int) -> None:
    """Raise a UserError unless least <= `min_<what>` <= `max_<what>` <= most."""
    for key, value in ((f"min_{what}", low), (f"max_{what}", high)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{where}: {key} should be a whole number, got {value!r}")
    if not least <= low <= high <= most:
        raise UserError(
            f"{where}: expected {least} <= min_{what} <= max_{what} <= {most}, got min_{what}={low}, max_{what}={high}"
        )


def final_answer(completion: str) -> str:
    """The answer of a completion: its last `<answer>...</answer>`, or all of it."""
    tagged = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
    return str(tagged[-1] if tagged else completion).strip()
