"""The parts of a reward: checked before a run starts, and put together once each has an outcome."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from burnish.algorithms.shaping.shapers import STEP_SCORE_AGGREGATIONS
from burnish.config.consistency import gives_verdict, may_give_verdict
from burnish.config.data import RewardPart
from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import check_options, is_plugin
from burnish.data.row import Row
from burnish.data.row_formats import VERL_MODEL_STYLE, likely_answer
from burnish.rewards import verifiers
from burnish.rewards.judge_options import JudgeOptions
from burnish.rewards.score_types import PartResult, Score, ScoreRequest, is_missing, reward_problem
from burnish.rewards.user_rewards import UserScorer, load_user_scorer, required_columns
from burnish.rewards.verifiers import VERIFIERS, check_verifier

# --- Whether a row has what its reward compares with, found before anything is sampled.
#
# A verifier that gets no answer scores every sample 0, and a run would go on like this for hours. So a row without an answer
# is refused where a part of the reward that applies to it needs one.


def check_row(row: Row, parts: Sequence[tuple[str, RewardPart]], answer_key: str) -> None:
    """Refuse a row that the parts that apply to it cannot score.

    `parts` are those, each with its place in the config. `answer_key` is how a user names the column of the answer,
    such as `data.train.answer_key=`.
    """
    _check_verl_style(row, [part for _, part in parts])
    for where, part in parts:
        verifier = row.extra.get("verifier") if part.name == "row" else part.name
        if part.name == "row" and verifier == "math" and importlib.util.find_spec("math_verify") is None:
            raise UserError(
                f"{row.place}: its verifier is math, which needs math-verify; install it with pip install 'burnish[math]'"
            )
        if part_needs_answer(part, verifier, where) and is_missing(row.answer):
            raise UserError(
                f"{row.place}: the row has no answer, and {where} compares with one; {_missing_answer_advice(row, answer_key)}"
            )


def part_needs_answer(part: RewardPart, verifier: str | None, where: str) -> bool:
    """Whether a part compares a completion with the row's answer."""
    if part.name == "judge":
        return JudgeOptions.of(part.options, where).shows_expected
    return verifier is not None and verifiers.verifier_needs_answer(verifier)


def _missing_answer_advice(row: Row, answer_key: str) -> str:
    likely = likely_answer(row.extra)
    if likely is not None:
        return f"column {likely!r} probably holds it: set {answer_key}{likely}"
    columns = ", ".join(map(str, row.extra)) or "none besides the prompt"
    return (
        f"give a column `answer`, or name another with {answer_key}COLUMN (its columns: {columns}), leave the row out, or use a reward "
        "that needs no answer (format, model, a judge without {expected}, a function of yours)"
    )


def _check_verl_style(row: Row, parts: Sequence[RewardPart]) -> None:
    """Refuse a row that verl would have a reward model score, where no part of the reward can stand for it."""
    if row.style != VERL_MODEL_STYLE or any(part.name in ("model", "judge") or is_plugin(part.name) for part in parts):
        return
    raise UserError(
        f"{row.place}: reward_model.style is 'model', so a reward model should score the row, and none of the reward's parts "
        f"({', '.join(part.name for part in parts)}) is one: add {{name: model, options: {{path: DIRECTORY}}, sources: "
        f"[{row.data_source}]}} to reward.parts (or name: judge), and limit the rules to the other sources"
    )


# --- What can be set of the reward part `model`, checked before a run starts.

REWARD_MODEL_DTYPES = ("float32", "bfloat16", "float64")
EACH_STEP = "each"
"""The aggregation that leaves the score of every step where the step ends."""


@dataclass(frozen=True)
class RewardModelOptions:
    """Options of the reward part `model`."""

    path: str
    """A directory for sequence classification with one label, or of its adapters, relative to the recipe or to the working directory."""
    device: str = "auto"
    dtype: str = "float32"
    token_budget: int = 8192
    """Most tokens of one forward pass."""
    standardise: bool = False
    """Subtract the mean of its scores of held-out answers and divide by their standard deviation (`scores.json`)."""
    clip: float | None = None
    """Scores are cut to -clip..clip, after standardising."""
    delimiter: str | None = None
    """What stands between the steps of an answer, such as a blank line: each is scored at its end, as the chance 1 / (1 + exp(-score))
    that it is right, after standardising and clipping. Without one the answer is scored as a whole."""
    aggregate: str = "min"
    """The score of an answer from those of its steps: last, min, prod, mean; or each, which rewards every step at its last token."""

    @staticmethod
    def of(options: Mapping[str, Any], where: str) -> RewardModelOptions:
        """From the options of a part; the error for what is wrong with them."""
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
        if made.aggregate not in (*STEP_SCORE_AGGREGATIONS, EACH_STEP):
            raise UserError(
                f"{where}: aggregate {made.aggregate!r} is not one of {', '.join(STEP_SCORE_AGGREGATIONS)}, {EACH_STEP}"
            )
        if made.delimiter is None and "aggregate" in options:
            raise UserError(
                f"{where}: aggregate has no effect without delimiter, by which an answer is divided into steps"
            )
        return made


MODEL, JUDGE = "model", "judge"
NEEDED_COLUMNS = {"task": ("task",), "row": ("verifier",)}
"""Columns of a row that a built-in verifier cannot do without."""


@dataclass(frozen=True)
class CheckedPart:
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
class PendingScore:
    """A request some of whose parts are still being scored."""

    request: ScoreRequest
    missing: set[int]
    results: dict[int, PartResult] = field(default_factory=dict)
    timed_out: bool = False
    errors: list[str] = field(default_factory=list)


def check_parts(parts: Sequence[RewardPart], base: Path | None) -> list[CheckedPart]:
    """Everything that can be wrong with the parts before a run starts, found now."""
    if not parts:
        raise UserError(
            f"reward.parts is empty: name at least one of {', '.join(VERIFIERS)}, {MODEL}, {JUDGE}, path/to/file.py:function or package.module:function"
        )
    checked: list[CheckedPart] = []
    for index, part in enumerate(parts):
        where = f"reward.parts[{index}] ({part.name})"
        if part.sources is not None and not part.sources:
            raise UserError(f"{where}: sources is empty, so it would never apply; remove it to apply to all rows")
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
    """Whether a part calls an answer correct; None where its value is graded, so that no value of it means correct.

    A threshold in the config decides first, then what the part itself says. The built-in verifiers give 1 to correct answers alone. The
    scale of a user's function is not known: a 1 may be the best or the worst of it.
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
        if wrong := reward_problem(result.value):
            errors.append(f"reward part {part.label!r} of row {done.request.id!r}: {wrong}")
            continue
        reward += part.config.weight * result.value
        steps += [(position, part.config.weight * value) for position, value in result.steps]
        if accuracy is None:
            accuracy = accuracy_of(part.config, result)
    if not num_values and not errors:
        errors = [f"no reward part gave a value for row {done.request.id!r}: each function returned None for it"]
    elif not errors and (wrong := reward_problem(reward)):
        errors = [f"the weighted sum of row {done.request.id!r}: {wrong} (reward.parts.*.weight)"]
    if errors:
        return Score(done.request.id, None, None, values, done.timed_out, "\n".join(errors), details, extra=extra)
    return Score(done.request.id, reward, accuracy, values, done.timed_out, None, details, steps, extra)
