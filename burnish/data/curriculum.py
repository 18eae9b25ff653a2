"""Curricula: choose which prompts of a source a step draws, by success rate, by difficulty, or only the hard ones.

A curriculum returns indices of one source. Its choice depends only on the seed, the data, the step and the statistics observed so far. Its
own state is one or two counters, so it continues exactly where it was saved.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from burnish.algorithms.curriculum.prompt_selection import difficulty_buckets, hard_prompts
from burnish.algorithms.curriculum.spec import (
    EasyToHardCurriculum,
    HardOnlyCurriculum,
    NoCurriculum,
    PrioritisedCurriculum,
)
from burnish.config.errors import UserError, did_you_mean
from burnish.config.records import Slot
from burnish.core.random_keys import fold, permutation, uniform_from_key
from burnish.core.trajectory import Trajectory, with_accuracy
from burnish.data.prompt_pool import PromptPool


@dataclass(frozen=True)
class PromptRecord:
    """How well one prompt has been answered so far."""

    success: float = 0.0
    """Moving average of the accuracy per visit."""
    visits: int = 0
    right: float = 0.0
    """Sum of accuracies; an accuracy between 0 and 1 counts as a fraction."""
    total: int = 0


NO_RECORD = PromptRecord()


class PromptStatistics:
    """A record for each prompt that was drawn, updated by every visit."""

    def __init__(self, ema: float = 0.5) -> None:
        self.ema = ema
        self.version = 0
        """Increases with every change."""
        self._records: dict[str, PromptRecord] = {}

    def __getitem__(self, prompt_id: str) -> PromptRecord:
        return self._records.get(prompt_id, NO_RECORD)

    def __len__(self) -> int:
        return len(self._records)

    def observe(self, prompt_id: str, right: float, total: int) -> None:
        """Record one visit with `right` of `total` judged answers. A visit without judged answers changes nothing."""
        if total == 0:
            return
        self.version += 1
        old = self[prompt_id]
        success = (1 - self.ema) * old.success + self.ema * right / total
        self._records[prompt_id] = PromptRecord(success, old.visits + 1, old.right + right, old.total + total)

    def state(self) -> dict[str, Any]:
        """The state as plain JSON values."""
        return {name: [r.success, r.visits, r.right, r.total] for name, r in self._records.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore what `state()` returned."""
        self._records = {name: PromptRecord(*values) for name, values in state.items()}
        self.version += 1


def visit_accuracies(trajectories: Iterable[Trajectory]) -> list[tuple[str, float, int]]:
    """(prompt id, right, judged) for each visit among the trajectories, in order of first appearance."""
    found: dict[tuple[str, int], tuple[float, int]] = {}
    for t, accuracy in with_accuracy(trajectories):
        right, total = found.get((t.prompt_id, t.visit), (0.0, 0))
        found[t.prompt_id, t.visit] = right + accuracy, total + 1
    return [(prompt_id, right, total) for (prompt_id, _), (right, total) in found.items()]


class Curriculum(Protocol):
    """Chooses the prompts of one source."""

    def next(self, step: int) -> int | None:
        """The index of the next prompt; None if the source's usual order applies at this step."""

    def is_empty(self, step: int) -> bool:
        """Whether nothing of this source can be drawn at this step."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: dict[str, Any]) -> None: ...


class ShuffledCycle:
    """Cycles through a list for ever, in a new order each round. The position is one number."""

    def __init__(self, indices: list[int], *key: int | str) -> None:
        self._indices, self._key = indices, key
        self._order: list[int] = []
        self._round = -1

    def at(self, position: int) -> int:
        """The index at a position of the endless sequence."""
        turn, place = divmod(position, len(self._indices))
        if turn != self._round:
            self._order, self._round = permutation(len(self._indices), *self._key, turn), turn
        return self._indices[self._order[place]]


class Prioritised:
    """Draws with replacement, with probability proportional to 1 - success rate."""

    def __init__(
        self, record: PrioritisedCurriculum, pool: PromptPool, statistics: PromptStatistics, seed: int
    ) -> None:
        self._warmup, self._statistics, self._key = record.warmup_steps, statistics, (seed, "prioritised", pool.name)
        self._indices = pool.indices()
        self._ids = [pool.row(index).id for index in self._indices]
        self._cumulative: list[float] = []
        self._version = -1
        self._num_draws = 0

    def is_empty(self, step: int) -> bool:
        return False

    def next(self, step: int) -> int | None:
        if step <= self._warmup:
            return None
        if self._version != self._statistics.version:
            self._version = self._statistics.version
            self._cumulative = list(
                itertools.accumulate(priority_weights([self._statistics[i].success for i in self._ids]))
            )
        point = uniform_from_key(fold(*self._key, self._num_draws)) * self._cumulative[-1]
        self._num_draws += 1
        return self._indices[min(bisect.bisect_right(self._cumulative, point), len(self._indices) - 1)]

    def state(self) -> dict[str, Any]:
        return {"num_draws": self._num_draws}

    def restore(self, state: dict[str, Any]) -> None:
        self._num_draws = state["num_draws"]


def priority_weights(success: list[float]) -> list[float]:
    """The weights of `prioritised_probabilities` without normalisation: 1 - s for each success rate, or 1 for all if all are 1.

    Computed in Python, which sums from left to right. A sum in torch rounds differently with other thread counts, and a draw could change.
    """
    return [1 - s for s in success] if any(s < 1 for s in success) else [1.0] * len(success)


class EasyToHard:
    """Draws from one bucket of difficulty after another."""

    def __init__(self, record: EasyToHardCurriculum, pool: PromptPool, seed: int) -> None:
        self._record = record
        indices = pool.indices()
        if len(indices) < record.buckets:
            raise UserError(f"{pool.name}: {len(indices)} prompts cannot fill {record.buckets} buckets; lower buckets")
        difficulties = torch.tensor([row_difficulty(pool, i, record.column) for i in indices], dtype=torch.float64)
        parts: list[list[int]] = [[] for _ in range(record.buckets)]
        for index, bucket in zip(indices, difficulty_buckets(difficulties, record.buckets).tolist(), strict=True):
            parts[bucket].append(index)
        self._buckets = [ShuffledCycle(part, seed, "bucket", pool.name, b) for b, part in enumerate(parts)]
        self._positions = [0] * record.buckets

    def is_empty(self, step: int) -> bool:
        return False

    def next(self, step: int) -> int | None:
        if step <= self._record.warmup_steps:
            return None
        bucket = self.bucket(step)
        self._positions[bucket] += 1
        return self._buckets[bucket].at(self._positions[bucket] - 1)

    def bucket(self, step: int) -> int:
        """The bucket that a step after the warm-up draws from."""
        record = self._record
        return min(record.buckets - 1, record.buckets * (step - record.warmup_steps - 1) // record.steps)

    def state(self) -> dict[str, Any]:
        return {"positions": list(self._positions)}

    def restore(self, state: dict[str, Any]) -> None:
        self._positions = list(state["positions"])


def row_difficulty(pool: PromptPool, index: int, column: str) -> float:
    """The number in the difficulty column of a row; anything else is an error that names the row."""
    row = pool.row(index)
    if column not in row.extra:
        known = ", ".join(row.extra) or "none besides prompt and answer"
        raise UserError(
            f"row {row.id} has no column {column!r} to order by{did_you_mean(column, row.extra)} (has: {known})"
        )
    value = row.extra[column]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UserError(f"row {row.id}: column {column!r} should be a number to order by, got {value!r}")
    return float(value)


class HardOnly:
    """Draws only prompts that were hard when the curriculum started. They are determined once and kept in the state."""

    def __init__(self, record: HardOnlyCurriculum, pool: PromptPool, statistics: PromptStatistics, seed: int) -> None:
        self._record, self._pool, self._statistics, self._seed = record, pool, statistics, seed
        self._position = 0
        self._hard: list[int] | None = None
        self._cycle: ShuffledCycle | None = None

    def is_empty(self, step: int) -> bool:
        return step >= self._record.start and not self._hard_indices()

    def next(self, step: int) -> int | None:
        if step < self._record.start:
            return None
        if self._cycle is None:
            self._cycle = ShuffledCycle(self._hard_indices(), self._seed, "hard", self._pool.name)
        self._position += 1
        return self._cycle.at(self._position - 1)

    def state(self) -> dict[str, Any]:
        return {"hard": self._hard, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        self._hard, self._position, self._cycle = state["hard"], state["position"], None

    def _hard_indices(self) -> list[int]:
        if self._hard is None:
            indices = self._pool.indices()
            seen = [self._statistics[self._pool.row(i).id] for i in indices]
            right = torch.tensor([record.right for record in seen], dtype=torch.float64)
            hard = hard_prompts(right, torch.tensor([record.total for record in seen]), self._record.below)
            self._hard = list(itertools.compress(indices, hard.tolist()))
        return self._hard


def make_curriculum(record: Slot, pool: PromptPool, statistics: PromptStatistics, seed: int) -> Curriculum | None:
    """Make the curriculum of one source; None if the source's usual order applies."""
    if isinstance(record, NoCurriculum):
        return None
    if pool.size is None:
        raise UserError(
            f"{pool.name} is an endless generated task, whose prompts never come back for a curriculum to choose from: "
            "set the source's limit"
        )
    if isinstance(record, PrioritisedCurriculum):
        return Prioritised(record, pool, statistics, seed)
    if isinstance(record, EasyToHardCurriculum):
        return EasyToHard(record, pool, seed)
    if isinstance(record, HardOnlyCurriculum):
        return HardOnly(record, pool, statistics, seed)
    raise TypeError(f"no curriculum for {record!r}")
