"""Actions on a screen as GUI-R1 writes them, and their reward (Luo et al. 2025, 2504.10458).

A model answers with `<think>...</think><answer>[{'action': 'click', 'point': [123, 300], 'input_text': 'no input text'}]</answer>`. The
accuracy of an action is 0 or 1:

- the kind of the action must be the expected one;
- a click must lie in the expected box, borders included;
- a text to type or to select, or a direction to scroll to, must have an F1 of words of 0.5 or more with the expected one.

The reward is 0.8 accuracy + 0.2 format. Answers are parsed as literals, never executed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from burnish.config.errors import UserError

ACCURACY_WEIGHT, FORMAT_WEIGHT = 0.8, 0.2
LEAST_F1 = 0.5
FORM = re.compile(r"\s*<think>.*?</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL)
BARE_POINT = re.compile(r"\s*\[?\s*(\d+(?:\.\d+)?)\s*,\s*(\d+(?:\.\d+)?)\s*\]?\s*")
NO_TEXT = "no input text"
TEXT_ACTIONS = ("type", "select", "scroll", "open_app")
"""Actions whose text is compared."""
MAX_ANSWER = 2000
"""Characters of an answer that are parsed: a longer one is no action."""


class Action(NamedTuple):
    """An action that a model wrote."""

    kind: str
    point: tuple[float, float] | None
    text: str


class Target(NamedTuple):
    """The expected action."""

    kind: str
    box: tuple[float, float, float, float] | None
    text: str


def write_click(x: float, y: float, think: str = "") -> str:
    """Return a click in GUI-R1's form."""
    action = f"[{{'action': 'click', 'point': [{x:g}, {y:g}], 'input_text': '{NO_TEXT}'}}]"
    return f"<think>{think}</think><answer>{action}</answer>"


def read_action(completion: str) -> Action | None:
    """Return the action of a completion in GUI-R1's form; None if it has another form."""
    found = FORM.fullmatch(completion)
    if found is None or len(found[1]) > MAX_ANSWER:
        return None
    try:
        value = ast.literal_eval(found[1].strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # whatever the model wrote is no literal
        return None
    value = value[0] if isinstance(value, list) and value else value
    if not isinstance(value, Mapping) or not isinstance(value.get("action"), str):
        return None
    return Action(value["action"].strip().lower(), _point(value.get("point")), str(value.get("input_text", NO_TEXT)))


def read_bare_point(completion: str) -> Action | None:
    """Return a click that is written as its point alone, `12,34`; None if the completion is anything else."""
    found = BARE_POINT.fullmatch(completion)
    return None if found is None else Action("click", (float(found[1]), float(found[2])), NO_TEXT)


def _point(value: Any) -> tuple[float, float] | None:
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    if any(isinstance(x, bool) or not isinstance(x, int | float) for x in value):
        return None
    return float(value[0]), float(value[1])


def read_target(answer: Any, where: str = "the expected action") -> Target:
    """Check an expected action: an object with `action`, `gt_bbox` and `input_text`, as in GUI-R1's data. `gt_action` may stand for the first."""
    kind = answer.get("action", answer.get("gt_action")) if isinstance(answer, Mapping) else None
    if not isinstance(kind, str):
        raise UserError(f"{where} should be an object with action, gt_bbox and input_text, got {answer!r}")
    box = answer.get("gt_bbox")
    text = str(answer.get("input_text", answer.get("gt_input_text", NO_TEXT)))
    return Target(kind.strip().lower(), None if box is None else _box(box, where), text)


def _box(box: Any, where: str) -> tuple[float, float, float, float]:
    is_numbers = isinstance(box, Sequence) and all(isinstance(x, int | float) for x in box)
    if not is_numbers or len(box) not in (2, 4):
        raise UserError(f"{where}: gt_bbox should be [left, top, right, bottom] or a point [x, y], got {box!r}")
    left, top, right, bottom = (float(x) for x in (box if len(box) == 4 else [*box, *box]))
    return left, top, right, bottom


def accuracy(action: Action | None, target: Target) -> float:
    """Return 1 for the expected action, else 0."""
    if action is None or action.kind != target.kind:
        return 0.0
    if action.kind == "click":
        if action.point is None or target.box is None:
            return 0.0
        (x, y), (left, top, right, bottom) = action.point, target.box
        return float(left <= x <= right and top <= y <= bottom)
    if action.kind in TEXT_ACTIONS:
        return float(word_f1(action.text, target.text) >= LEAST_F1)
    return 1.0


def word_f1(written: str, expected: str) -> float:
    """Return the F1 of two sets of words, without case."""
    ours, theirs = set(written.lower().split()), set(expected.lower().split())
    common = len(ours & theirs)
    return 2 * common / (len(ours) + len(theirs)) if common else 0.0


def gui_reward(completion: str, target: Target, bare: bool = False) -> float:
    """Return 0.8 accuracy + 0.2 format. `bare` expects a point alone instead of GUI-R1's form."""
    action = read_bare_point(completion) if bare else read_action(completion)
    return ACCURACY_WEIGHT * accuracy(action, target) + FORMAT_WEIGHT * (action is not None)
