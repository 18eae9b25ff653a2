"""Answers single questions by a strategy, for `burnish solve` and `Policy.solve`. There is no answer key here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from burnish.config.data import Reward, Template
from burnish.config.errors import UserError
from burnish.config.yaml_text import printable
from burnish.core.engine import Engine, SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptSample
from burnish.evaluation.answers import read_answer, verifier_of
from burnish.evaluation.model_source import fit_max_tokens
from burnish.evaluation.strategies.build import build_search_runner
from burnish.evaluation.strategies.registry import strategy_verifier
from burnish.evaluation.strategies.search import STREAM
from burnish.evaluation.strategies.search_program import SearchProgram
from burnish.evaluation.strategies.search_runner import SEARCH
from burnish.evaluation.strategies.search_text import (
    MAX_LINES,
    clipped,
    counted,
    short_value,
    tree_lines,
    tree_text,
    votes_lines,
)
from burnish.evaluation.strategies.solve_settings import SolveSettings, check_strategy
from burnish.evaluation.strategies.spec import SELF_CERTAINTY
from burnish.models.policy import PolicyModel
from burnish.rollout.scoring import Progress

COST = ("tokens", "requests", "context_tokens", "verifier_calls", "verifier_failures", "verifier_tokens")
TREE, WALL = "tree", "wall_s"
LABEL = 12
"""Columns before the value of a line."""


@dataclass(frozen=True)
class Solution:
    """The answer that a strategy chose, with what it cost."""

    completion: str
    """Text of the chosen answer; empty if there is none."""
    answer: str | None
    """The normalised answer in it, by which votes are counted; None if it has none."""
    votes: dict[str, float]
    """Votes of each answer; empty if the strategy does not vote."""
    score: float | None
    """The verifier's score of the chosen answer; None if it has none."""
    tokens: int
    """Tokens sampled, in all branches."""
    requests: int
    context_tokens: int
    """Tokens of the contexts of all requests. The engine reuses those that it has in its cache."""
    verifier_calls: int
    verifier_failures: int
    """Verifier calls without a score."""
    verifier_tokens: int | None
    """Tokens that the verifier read and wrote; None if it does not say."""
    seconds: float
    numbers: dict[str, float] = field(default_factory=dict)
    """What the strategy reports of itself."""
    error: str | None = None
    """Why no answer was chosen; None if there is one."""
    tree: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """All nodes of the search: parent, text, tokens, end, score, whether chosen, and the strategy's notes."""
    trajectory: Trajectory | None = field(default=None, repr=False, compare=False)
    """The chosen answer with its tokens and log-probs."""

    def __str__(self) -> str:
        """The tree, the chosen completion, the votes, the answer and the cost, as `burnish solve` prints them."""
        return solution_text(self)

    def plain(self) -> dict[str, Any]:
        """Return everything but the trajectory as plain values."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "trajectory"}


def solution_of(trajectory: Trajectory, kind: str) -> Solution:
    """Return the solution that a trajectory of a search runner holds. `kind` says where an answer is in a completion."""
    found = dict(trajectory.metadata[SEARCH])
    cost = {name: found.pop(name) for name in COST}
    votes, score, tree, seconds = found.pop("votes", {}), found.pop("score", None), found.pop(TREE, []), found.pop(WALL)
    answer = None if trajectory.error is not None else read_answer(kind, trajectory.completion).text
    numbers = {name: value for name, value in found.items() if isinstance(value, int | float)}
    return Solution(
        trajectory.completion,
        answer,
        votes,
        score,
        **cost,
        seconds=seconds,
        numbers=numbers,
        error=trajectory.error,
        tree=tree,
        trajectory=trajectory,
    )


def solution_text(solution: Solution, width: int = 100, whole_tree: bool = False) -> str:
    """Return a solution as `burnish solve` prints it: the tree, the chosen completion, the votes, the answer and the cost."""
    lines = [tree_text(solution.tree)] if whole_tree else tree_lines(solution.tree, width, MAX_LINES)
    lines.append("")
    if solution.error is None:
        lines += ["\n".join(map(printable, solution.completion.strip().splitlines())), ""]
    for number, line in enumerate(votes_lines(solution.votes, width - LABEL)):
        lines.append(f"{'votes' if number == 0 else '':<{LABEL}}{line}")
    if solution.score is not None:
        lines.append(f"{'score':<{LABEL}}{solution.score:.4g}")
    if solution.numbers:
        numbers = (f"{name} {short_value(value)}" for name, value in solution.numbers.items())
        lines.append(f"{'numbers':<{LABEL}}{', '.join(numbers)}")
    if solution.error is None:
        none = "none (the completion has no answer that could be read)"
        lines.append(f"{'answer':<{LABEL}}{none if solution.answer is None else clipped(solution.answer, width)}")
    else:
        lines.append(f"{'failed':<{LABEL}}{printable(solution.error.partition(chr(10))[0])}")
    lines.append(f"{'cost':<{LABEL}}{cost_text(solution)}")
    return "\n".join(lines)


def cost_text(solution: Solution) -> str:
    """Return what a search cost, in words."""
    failed = f" ({solution.verifier_failures} failed)" if solution.verifier_failures else ""
    read = f" of {_number(solution.verifier_tokens)} tokens" if solution.verifier_calls else ""
    return (
        f"{counted(solution.tokens, 'token')} in {counted(solution.requests, 'request')} over {solution.context_tokens:,} context "
        f"tokens, {counted(solution.verifier_calls, 'verifier call')}{read}{failed}, {solution.seconds:.2f} s"
    )


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


class SolveProgress:
    """How far the searches of several prompts are, as text for `say` whenever one of them has changed."""

    def __init__(self, num_prompts: int, say: Progress) -> None:
        self._num_prompts, self._say = num_prompts, say
        self._num_done = 0
        self._tokens: dict[str, int] = {}
        """Tokens of each search that has begun, by its name."""

    def on_step(self, program: SearchProgram) -> None:
        """A search has changed."""
        self._tokens[program.search.name] = program.search.cost.tokens
        self._num_done += program.is_done
        self._say(f"solved {self._num_done}/{self._num_prompts}, {counted(sum(self._tokens.values()), 'token')}")


def solve_prompts(
    policy: PolicyModel,
    engine: Engine,
    draws: Sequence[PromptSample],
    settings: SolveSettings,
    sampling: SamplingOptions,
    reward: Reward,
    seed: int,
    template: Template,
    base: Path | None = None,
    on_step: Callable[[SearchProgram], None] | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> list[Solution]:
    """Search for an answer to each prompt, all at once over one engine, and return the solutions in order."""
    check_strategy(settings.strategy, sampling.temperature)
    if not draws:
        return []
    verifier = strategy_verifier(settings.strategy)
    if verifier is not None and verifier.name == SELF_CERTAINTY and any(draw.prompt.pictures for draw in draws):
        raise UserError("strategy.verifier=self_certainty reads no images; use likelihood")
    longest = max(len(draw.prompt.start) for draw in draws)
    fitting, cut = fit_max_tokens(sampling.max_tokens, longest, policy.max_positions)
    if cut is not None:
        note(cut)
    sampling = replace(sampling, max_tokens=fitting)
    rows = [draw.prompt.row for draw in draws]
    runner = build_search_runner(
        settings.strategy, policy, engine, reward, rows, seed, base, template, settings.budget, True, on_step
    )
    order = {(draw.prompt.row.id, draw.visit): index for index, draw in enumerate(draws)}
    found: dict[int, Solution] = {}
    try:
        for trajectory in runner.run(draws, 1, sampling, STREAM):
            index = order[trajectory.prompt_id, trajectory.visit]
            row = rows[index]
            found[index] = solution_of(trajectory, verifier_of(reward.parts, row.data_source, row.extra))
    finally:
        runner.close()
    return [found[index] for index in range(len(draws))]
