"""The parts of a reward: checked before a run starts, and combined into a score once each has a result.

A verifier without an expected answer would score every sample 0, and a run would go on like this for hours. `check_row` therefore
rejects a row without an answer, before anything is sampled, if a part that applies to the row needs one.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from burnish.config.consistency import gives_verdict, may_give_verdict
from burnish.config.data import RewardPart
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.extras import install_hint
from burnish.config.plugins import check_options, is_plugin
from burnish.data.row import VERL_MODEL_STYLE, Row, likely_answer
from burnish.rewards import verifiers
from burnish.rewards.judge_options import JudgeOptions
from burnish.rewards.score_types import PartResult, Score, ScoreRequest, is_missing, reward_problem
from burnish.rewards.user_rewards import UserScorer, load_user_scorer, required_columns
from burnish.rewards.verifiers import VERIFIERS, check_verifier

MODEL, JUDGE = "model", "judge"
REWARD_MODEL_DTYPES = ("float32", "bfloat16", "float64")
EACH_STEP = "each"
"""The aggregation that gives every step its own score, at the step's last token."""
RULES = (*verifiers.NEEDS_ANSWER, "row", "task")
"""Verifiers that check an answer by a rule."""
DEFAULT_AGGREGATION = "min"
NEEDED_COLUMNS = {"task": ("task",), "row": ("verifier",)}
"""Columns of a row that a built-in verifier needs."""
STEP_SCORE_AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {
        "last": lambda scores: scores[-1],
        "min": min,
        "prod": math.prod,
        "mean": lambda scores: sum(scores) / len(scores),
    }
)
"""last: the score of the last step. min: of the worst step. prod: the chance that all steps are right. mean: of all steps."""


def check_row(row: Row, parts: Sequence[tuple[str, RewardPart]], answer_key: str) -> None:
    """Raise a UserError for a row that its parts cannot score.

    `parts` are the parts that apply to the row, each with its place in the config. `answer_key` is the config key, with `=`, that names
    the answer's column, such as `data.train.answer_key=`.
    """
    _check_verl_style(row, [part for _, part in parts])
    for where, part in parts:
        verifier = row.extra.get("verifier") if part.name == "row" else part.name
        if part.name == "row" and verifier == "math" and importlib.util.find_spec("math_verify") is None:
            raise UserError(
                f"{row.place}: the row's verifier is math, which needs math-verify; install it with {install_hint('math')}"
            )
        if part_needs_answer(part, verifier, where) and is_missing(row.answer):
            raise UserError(
                f"{row.place}: the row has no answer, and {where} compares with one; {_missing_answer_advice(row, answer_key)}"
            )


def part_needs_answer(part: RewardPart, verifier: str | None, where: str) -> bool:
    """Whether a part compares a completion with the row's answer."""
    if part.name == "judge":
        return JudgeOptions.of(part.options, where).shows_expected
    return verifier is not None and verifier in verifiers.NEEDS_ANSWER


def _missing_answer_advice(row: Row, answer_key: str) -> str:
    likely = likely_answer(row.extra)
    if likely is not None:
        return f"column {likely!r} probably holds it: set {answer_key}{likely}"
    columns = ", ".join(map(str, row.extra)) or "none besides the prompt"
    return (
        f"add a column `answer`, name another column with {answer_key}COLUMN (the row has: {columns}), leave the row out, or use a reward "
        "that needs no answer (format, model, a judge without {expected}, your own function)"
    )


def parts_without_rules(parts: Sequence[RewardPart]) -> list[RewardPart]:
    """The parts that score a row of verl's style `model`, if a reward model or a judge is among them: all but rules for all sources.

    A rule compares with an answer, which such a row need not have. A rule whose `sources` name the row's source stays.
    """
    if not any(part.name in (MODEL, JUDGE) for part in parts):
        return list(parts)
    return [part for part in parts if part.sources is not None or part.name not in RULES]


def _check_verl_style(row: Row, parts: Sequence[RewardPart]) -> None:
    """Raise a UserError for a row that verl would score with a reward model, if no part of the reward can do that."""
    if row.style != VERL_MODEL_STYLE or any(part.name in ("model", "judge") or is_plugin(part.name) for part in parts):
        return
    raise UserError(
        f"{row.place}: reward_model.style is 'model', so a reward model should score the row, but none of the reward's parts "
        f"({', '.join(part.name for part in parts)}) is one: add {{name: model, options: {{path: DIRECTORY}}, sources: "
        f"[{row.data_source}]}} to reward.parts (or name: judge), and limit the rules to the other sources"
    )


@dataclass(frozen=True)
class RewardModelOptions:
    """Options of the reward part `model`."""

    path: str
    """A model directory for sequence classification with one label, or a directory of its adapters. The path is relative to the recipe or
    to the working directory."""
    device: str = "auto"
    dtype: str = "float32"
    token_budget: int = 8192
    """Most tokens in one forward pass."""
    standardise: bool = False
    """Subtract the mean of the model's scores on held-out answers and divide by their standard deviation (`scores.json`)."""
    clip: float | None = None
    """Clip scores to -clip..clip, after standardising."""
    delimiter: str | None = None
    """The text between the steps of an answer, such as a blank line. Each step is scored at its end, as the probability
    1 / (1 + exp(-score)) that it is right, after standardising and clipping. None takes the delimiter that the directory names
    (`steps.json`). If it names none, the answer is scored as a whole."""
    aggregate: str | None = None
    """How step scores become the score of an answer: last, min, prod, mean; or each, which rewards every step at its last token. None is min."""

    @staticmethod
    def of(options: Mapping[str, Any], where: str) -> RewardModelOptions:
        """Parse the options of a part; raise a UserError for what is wrong with them."""
        check_options(RewardModelOptions, options, where)
        if not isinstance(options.get("path"), str):
            raise UserError(f"{where}: give options.path, the directory of a reward model")
        made = RewardModelOptions(**options)
        if made.dtype not in REWARD_MODEL_DTYPES:
            raise UserError(f"{where}: dtype {made.dtype!r} is not one of {', '.join(REWARD_MODEL_DTYPES)}")
        if not isinstance(made.token_budget, int) or made.token_budget < 1:
            raise UserError(f"{where}: token_budget should be a whole number above 0, got {made.token_budget!r}")
        if made.clip is not None and not (isinstance(made.clip, int | float) and made.clip > 0):
            raise UserError(f"{where}: clip should be a number above 0, got {made.clip!r}")
        if made.delimiter is not None and not (isinstance(made.delimiter, str) and made.delimiter):
            raise UserError(f"{where}: delimiter should be a text, got {made.delimiter!r}")
        if made.aggregate not in (*STEP_SCORE_AGGREGATIONS, EACH_STEP, None):
            raise UserError(
                f"{where}: aggregate {made.aggregate!r} is not one of {', '.join(STEP_SCORE_AGGREGATIONS)}, {EACH_STEP}"
            )
        return made


@dataclass(frozen=True)
class CheckedPart:
    """A reward part whose config has been checked."""

    label: str  # its name in `Score.parts`
    config: RewardPart
    is_batch: bool  # a user's function that takes many samples per call
    required: tuple[str, ...]  # columns that a row must have
    user: UserScorer | None = None  # the user's function, if it is one

    @property
    def backend(self) -> str:
        """What computes the part: the workers for verifiers, the workers for users' functions, or the judge or model of this label."""
        if self.config.name in (MODEL, JUDGE):
            return self.label
        return "users" if is_plugin(self.config.name) else "verifiers"


@dataclass
class PendingScore:
    """A request with parts that are still being scored."""

    request: ScoreRequest
    missing: set[int]
    results: dict[int, PartResult] = field(default_factory=dict)
    timed_out: bool = False
    errors: list[str] = field(default_factory=list)


def check_parts(parts: Sequence[RewardPart], base: Path | None) -> list[CheckedPart]:
    """Check the parts before a run starts; raise a UserError for anything that is wrong with them."""
    if not parts:
        raise UserError(
            f"reward.parts is empty; name at least one of {', '.join(VERIFIERS)}, {MODEL}, {JUDGE}, path/to/file.py:function or package.module:function"
        )
    checked: list[CheckedPart] = []
    for index, part in enumerate(parts):
        where = f"reward.parts[{index}] ({part.name})"
        if part.sources is not None and not part.sources:
            raise UserError(f"{where}: sources is empty, so the part would never apply; remove it to apply to all rows")
        user: UserScorer | None = None
        is_batch, required = False, list(NEEDED_COLUMNS.get(part.name, ()))
        if is_plugin(part.name):
            user = load_user_scorer(part.name, base, part.options, where)
            is_batch, required = user.is_batch, required_columns(user, part.options)
        elif part.name in VERIFIERS:
            check_verifier(part.name, part.options, where)
        elif part.name == JUDGE:
            JudgeOptions.of(part.options, where)
        elif part.name == MODEL:
            RewardModelOptions.of(part.options, where)
        else:
            raise unknown_name_error(
                "reward", part.name, [*VERIFIERS, MODEL, JUDGE, "path/to/file.py:function", "package.module:function"]
            )
        name = part.name.rpartition(":")[2]
        same = sum(p.config.name.rpartition(":")[2] == name for p in checked)
        checked.append(CheckedPart(f"{name}_{same + 1}" if same else name, part, is_batch, tuple(required), user))
    return checked


def accuracy_of(part: RewardPart, result: PartResult) -> float | None:
    """Whether a part calls an answer correct; None if its value is graded, so that no value means correct.

    `correct_at` of the config decides first, then the accuracy that the part gives. Built-in verifiers give 1 to correct answers only. The
    scale of a user's function is unknown: 1 may be its best or its worst value.
    """
    if result.value is None or not may_give_verdict(part):
        return None
    if result.timed_out:
        return 0.0
    if part.correct_at is not None:
        return float(result.value >= part.correct_at)
    if result.accuracy is not None:
        return result.accuracy
    return float(result.value >= 1) if gives_verdict(part) else None


def combine_parts(parts: Sequence[CheckedPart], done: PendingScore) -> Score:
    """The score of a request whose parts are all scored. The sum follows the order of the config."""
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
        if wrong := reward_problem(result.value):
            errors.append(f"reward part {part.label!r} of row {done.request.id!r}: {wrong}")
            continue
        reward += part.config.weight * result.value
        steps += [(position, part.config.weight * value) for position, value in result.steps]
        if accuracy is None:
            accuracy = accuracy_of(part.config, result)
    if not num_values and not errors:
        errors = [f"no reward part gave a value for row {done.request.id!r}: every function returned None"]
    elif not errors and (wrong := reward_problem(reward)):
        errors = [f"the weighted sum of row {done.request.id!r}: {wrong} (reward.parts.*.weight)"]
    if errors:
        return Score(done.request.id, None, None, values, done.timed_out, "\n".join(errors), details, extra=extra)
    num_tokens = _total(result.num_tokens for result in done.results.values())
    return Score(done.request.id, reward, accuracy, values, done.timed_out, None, details, steps, extra, num_tokens)


def _total(counts: Iterable[int | None]) -> int | None:
    """The sum; None if a count is not known."""
    known = list(counts)
    return None if None in known else sum(filter(None, known))


def aggregate_step_scores(scores: Sequence[float], how: str) -> float:
    """One score from the scores of one or more steps."""
    return float(STEP_SCORE_AGGREGATIONS[how](scores))
