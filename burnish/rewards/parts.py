"""The parts of a reward: checked before a run starts, and put together once each has an outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError, unknown
from burnish.config.fits import is_verdict, may_judge
from burnish.config.plugins import is_plugin
from burnish.config.reward import RewardPart
from burnish.rewards.judge.options import JudgeOptions
from burnish.rewards.plugin import UserScorer, load_scorer, required_columns
from burnish.rewards.scorer_options import ScorerOptions
from burnish.rewards.types import Result, Score, ScoreRequest, out_of_range
from burnish.rewards.verifiers import VERIFIERS, check_verifier

MODEL, JUDGE = "model", "judge"
NEEDED_COLUMNS = {"task": ("task",), "row": ("verifier",)}
"""Columns of a row that a built-in verifier cannot do without."""


@dataclass(frozen=True)
class Part:
    """A checked part of the sum."""

    label: str  # its name in `Score.parts`
    config: RewardPart
    is_batch: bool  # a user's function that takes many samples a call
    required: tuple[str, ...]  # columns of a row it cannot do without
    user: UserScorer | None = None  # a user's function

    @property
    def place(self) -> str:
        """Where it is computed: in the workers of verifiers or of a user's functions, by a judge's threads, by a model."""
        if self.config.name in (MODEL, JUDGE):
            return self.label
        return "users" if is_plugin(self.config.name) else "verifiers"


@dataclass
class Open:
    """A request some of whose parts are still being scored."""

    request: ScoreRequest
    missing: set[int]
    results: dict[int, Result] = field(default_factory=dict)
    timed_out: bool = False
    errors: list[str] = field(default_factory=list)


def check_parts(parts: Sequence[RewardPart], base: Path | None) -> list[Part]:
    """Everything that can be wrong with the parts before a run starts, found now."""
    if not parts:
        raise UserError(
            f"reward.parts is empty: name at least one of {', '.join(VERIFIERS)}, {MODEL}, {JUDGE}, path/to/file.py:function or package.module:function"
        )
    checked: list[Part] = []
    for index, part in enumerate(parts):
        where = f"reward.parts[{index}] ({part.name})"
        if part.sources is not None and not part.sources:
            raise UserError(f"{where}: sources is empty, so it would never apply; remove it to apply to all rows")
        user: UserScorer | None = None
        is_batch, required = False, list(NEEDED_COLUMNS.get(part.name, ()))
        if is_plugin(part.name):
            user = load_scorer(part.name, base, part.options, where)
            is_batch, required = user.is_batch, required_columns(user, part.options)
        elif part.name in VERIFIERS:
            check_verifier(part.name, part.options, where)
        elif part.name == JUDGE:
            JudgeOptions.of(part.options, where)
        elif part.name == MODEL:
            ScorerOptions.of(part.options, where)
        else:
            raise unknown(
                "reward", part.name, [*VERIFIERS, MODEL, JUDGE, "path/to/file.py:function", "package.module:function"]
            )
        name = part.name.rpartition(":")[2]
        same = sum(p.config.name.rpartition(":")[2] == name for p in checked)
        checked.append(Part(f"{name}_{same + 1}" if same else name, part, is_batch, tuple(required), user))
    return checked


def accuracy_of(part: RewardPart, result: Result) -> float | None:
    """Whether a part calls an answer correct; None where its value is graded, so that no value of it means correct.

    A threshold in the config decides first, then what the part itself says. The built-in verifiers give 1 to correct answers alone. The
    scale of a user's function is not known: a 1 may be the best or the worst of it.
    """
    if result.value is None or not may_judge(part):
        return None
    if result.timed_out:
        return 0.0
    if part.correct_at is not None:
        return float(result.value >= part.correct_at)
    if result.accuracy is not None:
        return result.accuracy
    return float(result.value >= 1) if is_verdict(part) else None


def combine(parts: Sequence[Part], done: Open) -> Score:
    """The score of a request all of whose parts have an outcome; sums in the order of the config."""
    values: dict[str, float] = {}
    details: dict[str, str] = {}
    reward, accuracy = 0.0, None
    steps: list[tuple[int, float]] = []
    extra: dict[str, Any] = {}
    errors, num_values = list(done.errors), 0
    for index, part in enumerate(parts):
        result = done.results.get(index)
        if result is None:
            continue
        logged = {f"{part.label}/{key}": value for key, value in result.parts.items()}
        extra |= {f"{part.label}/{key}": value for key, value in result.extra.items()}
        details |= {part.label: result.details} if result.details else {}
        if result.value is None:
            values |= logged
            continue
        num_values += 1
        values |= {part.label: result.value, **logged}
        if wrong := out_of_range(result.value):
            errors.append(f"reward part {part.label!r} of row {done.request.id!r}: {wrong}")
            continue
        reward += part.config.weight * result.value
        steps += [(position, part.config.weight * value) for position, value in result.steps]
        if accuracy is None:
            accuracy = accuracy_of(part.config, result)
    if not num_values and not errors:
        errors = [f"no reward part gave a value for row {done.request.id!r}: each function returned None for it"]
    elif not errors and (wrong := out_of_range(reward)):
        errors = [f"the weighted sum of row {done.request.id!r}: {wrong} (reward.parts.*.weight)"]
    if errors:
        return Score(done.request.id, None, None, values, done.timed_out, "\n".join(errors), details, extra=extra)
    return Score(done.request.id, reward, accuracy, values, done.timed_out, None, details, steps, extra)
