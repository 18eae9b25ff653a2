"""Tasks by name, and their checkers for reward workers. It imports neither torch, numpy nor the config schema, so that workers start fast."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError, unknown_name_error
from burnish.config.plugins import check_options
from burnish.data.tasks import (
    absolute_zero,
    arithmetic,
    calculator,
    click_target,
    count_shapes,
    games,
    guess_number,
    knights_and_knaves,
    pair_verdict,
    proofs,
    read_chart,
    reasoning_gym,
    reverse_text,
    sort_digits,
    speak,
)
from burnish.data.tasks.task import Task

if TYPE_CHECKING:
    from burnish.config.data import Source

TASKS: dict[str, type[Any]] = {
    sort_digits.SORT_DIGITS: sort_digits.SortDigits,
    arithmetic.ADDITION: arithmetic.Addition,
    arithmetic.COUNTDOWN: arithmetic.Countdown,
    calculator.CALCULATOR: calculator.CalculatorTask,
    guess_number.GUESS_NUMBER: guess_number.GuessNumberTask,
    reverse_text.REVERSE_TEXT: reverse_text.ReverseText,
    proofs.PROOFS: proofs.Proofs,
    pair_verdict.PAIR_VERDICT: pair_verdict.PairVerdict,
    absolute_zero.ABSOLUTE_ZERO: absolute_zero.AbsoluteZeroTask,
    knights_and_knaves.KNIGHTS_AND_KNAVES: knights_and_knaves.KnightsAndKnaves,
    speak.SPEAK: speak.Speak,
    count_shapes.COUNT_SHAPES: count_shapes.CountShapes,
    read_chart.READ_CHART: read_chart.ReadChart,
    click_target.CLICK_TARGET: click_target.ClickTarget,
    **games.GAME_TASKS,
}
TASK_SCORES: dict[str, Callable[[str, Any, dict[str, Any]], float]] = {
    sort_digits.SORT_DIGITS: sort_digits.score,
    arithmetic.ADDITION: arithmetic.score_addition,
    arithmetic.COUNTDOWN: arithmetic.score_countdown,
    calculator.CALCULATOR: calculator.score,
    guess_number.GUESS_NUMBER: guess_number.score,
    reverse_text.REVERSE_TEXT: reverse_text.score,
    proofs.PROOFS: proofs.score,
    pair_verdict.PAIR_VERDICT: pair_verdict.score,
    absolute_zero.ABSOLUTE_ZERO: absolute_zero.score,
    knights_and_knaves.KNIGHTS_AND_KNAVES: knights_and_knaves.score,
    speak.SPEAK: speak.score,
    count_shapes.COUNT_SHAPES: count_shapes.score,
    read_chart.READ_CHART: read_chart.score,
    click_target.CLICK_TARGET: click_target.score,
    **dict.fromkeys(games.GAME_TASKS, games.score),
}


def make_task(name: str, options: dict[str, Any], seed: int) -> Task:
    """Make the task with this name, after checking its options."""
    if name.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.ReasoningGymTask(name, options, seed)
    if name not in TASKS:
        raise unknown_name_error("task", name, [*TASKS, reasoning_gym.PREFIX + "<name>"])
    if "seed" in options:
        raise UserError(f"task {name!r}: seed is not an option; the run's seed is used")
    check_options(TASKS[name], options, f"task {name!r}")
    task: Task = TASKS[name](seed=seed, **options)
    return task


def make_demonstrations(name: str, options: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """The demonstrations of a task: rows of prompt and completion. `options` are those of the task and of its demonstrations."""
    return _task_rows(name, "demonstrations", "prompt and completion rows", options, seed)


def make_preferences(name: str, options: dict[str, Any], seed: int, split: str) -> list[dict[str, str]]:
    """The preferences of one split of a task: rows of prompt, chosen and rejected, judged by its checker."""
    return _task_rows(name, "preferences", "prompt, chosen and rejected rows", options, seed, split=split)


def make_step_values(name: str, options: dict[str, Any], seed: int, split: str) -> list[dict[str, Any]]:
    """The answers with values of their steps of one split of a task: rows of prompt, steps and values."""
    return _task_rows(name, "step_values", "prompt, steps and values rows", options, seed, split=split)


def _task_rows(
    name: str, what: str, instead: str, options: dict[str, Any], seed: int, **given: Any
) -> list[dict[str, Any]]:
    """The rows that the method `what` of a task returns. `options` are those of the task and of the method."""
    function = getattr(TASKS.get(name), what, None)
    if function is None:
        raise UserError(f"task {name!r} has no {what}; give a file of {instead} instead")
    own = set(inspect.signature(function).parameters) - {"self", "seed", *given}
    known = own | set(inspect.signature(TASKS[name]).parameters) - {"seed"}
    for key in options:
        if key not in known:
            raise unknown_name_error(f"option of the {what} of {name!r}:", key, known)
    task: Any = make_task(name, {k: v for k, v in options.items() if k not in own}, seed)
    mine = {k: v for k, v in options.items() if k in own}
    rows: list[dict[str, Any]] = getattr(task, what)(seed=seed, **given, **mine)
    return rows


def score_answer(task_name: str, completion: str, answer: Any, extra: dict[str, Any]) -> float:
    """The score of a completion, by the checker of the row's task (`extra["task"]`)."""
    if task_name.startswith(reasoning_gym.PREFIX):
        return reasoning_gym.score(task_name, completion, answer, extra)
    if task_name not in TASK_SCORES:
        raise unknown_name_error("task", task_name, [*TASK_SCORES, reasoning_gym.PREFIX + "<name>"])
    return TASK_SCORES[task_name](completion, answer, extra)


def alphabet_of(sources: list[Source], seed: int, more: str = "") -> str | None:
    """The characters that generated tasks use, and `more`, for the tokenizer of a new model; None if a task has no alphabet."""
    tasks = [make_task(s.task, s.options, seed) for s in sources if s.task is not None]
    alphabets = [t.alphabet for t in tasks]
    if not alphabets or any(a is None for a in alphabets):
        return None
    return "".join(dict.fromkeys("".join(a for a in [*alphabets, more] if a is not None)))
