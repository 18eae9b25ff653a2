"""Whether a row has what its reward compares with, found before anything is sampled.

A verifier that gets no answer scores every sample 0, and a run would go on like this for hours. So a row without an answer
is refused where a part of the reward that applies to it needs one.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from burnish.config.errors import UserError
from burnish.config.plugins import is_plugin
from burnish.config.reward import RewardPart
from burnish.data.columns import likely_answer
from burnish.data.rows import VERL_MODEL, Row
from burnish.rewards import verifiers
from burnish.rewards.judge.options import JudgeOptions
from burnish.rewards.types import is_missing


def check_row(row: Row, parts: Sequence[tuple[str, RewardPart]], answer_key: str) -> None:
    """Refuse a row that the parts that apply to it cannot score.

    `parts` are those, each with its place in the config. `answer_key` is how a user names the column of the answer,
    such as `data.train.answer_key=`.
    """
    _check_style(row, [part for _, part in parts])
    for where, part in parts:
        verifier = row.extra.get("verifier") if part.name == "row" else part.name
        if part.name == "row" and verifier == "math" and importlib.util.find_spec("math_verify") is None:
            raise UserError(
                f"{row.place}: its verifier is math, which needs math-verify; install it with pip install 'burnish[math]'"
            )
        if needs_answer(part, verifier, where) and is_missing(row.answer):
            raise UserError(
                f"{row.place}: the row has no answer, and {where} compares with one; {_advice(row, answer_key)}"
            )


def needs_answer(part: RewardPart, verifier: str | None, where: str) -> bool:
    """Whether a part compares a completion with the row's answer."""
    if part.name == "judge":
        return JudgeOptions.of(part.options, where).shows_expected
    return verifier is not None and verifiers.needs_answer(verifier)


def _advice(row: Row, answer_key: str) -> str:
    likely = likely_answer(row.extra)
    if likely is not None:
        return f"column {likely!r} probably holds it: set {answer_key}{likely}"
    columns = ", ".join(map(str, row.extra)) or "none besides the prompt"
    return (
        f"give a column `answer`, or name another with {answer_key}COLUMN (its columns: {columns}), leave the row out, or use a reward "
        "that needs no answer (format, model, a judge without {expected}, a function of yours)"
    )


def _check_style(row: Row, parts: Sequence[RewardPart]) -> None:
    """Refuse a row that verl would have a reward model score, where no part of the reward can stand for it."""
    if row.style != VERL_MODEL or any(part.name in ("model", "judge") or is_plugin(part.name) for part in parts):
        return
    raise UserError(
        f"{row.place}: reward_model.style is 'model', so a reward model should score the row, and none of the reward's parts "
        f"({', '.join(part.name for part in parts)}) is one: add {{name: model, options: {{path: DIRECTORY}}, sources: "
        f"[{row.data_source}]}} to reward.parts (or name: judge), and limit the rules to the other sources"
    )
