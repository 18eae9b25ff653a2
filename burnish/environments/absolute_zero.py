"""`AbsoluteZero`: the model proposes a task about a program and then solves it several times (Zhao et al. 2025, 2505.03335).

An episode is one row of the task `absolute_zero`. The proposer writes a task; the sandbox checks it and works out its outputs; then each of
`attempts` solvers answers it in a conversation of its own. If the proposal is not valid, they answer a past task of the buffer instead. Every
conversation is a trajectory with a role: `deduction_propose`, `deduction_solve#0`, `deduction_solve#1`, and so on. So one batch has all six
pairs of task type and role, and the attempts that measure how hard a proposal is are trained on too.

    proposer   learnability of the mean accuracy of the attempts; -1 if the proposal is not valid
    solver     1 if right, -0.5 if wrong, -1 if the answer is not in the format                       (the paper's equations 4 to 6)

A proposal is valid if it is in the format, its program has no forbidden module, and two independent runs give the same literal outputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from burnish.config.environment import DEFAULT_ATTEMPTS
from burnish.config.errors import UserError
from burnish.data.tasks.code_tasks import (
    KINDS,
    CodeTask,
    Proposal,
    are_equal,
    program_problem,
    read_proposal,
    read_solution,
    solve_prompt,
    task_from_json,
)
from burnish.environments.base import Answer, End, Environment, Episode, Observation, RunsIn
from burnish.environments.program_runs import ProgramRuns, RunFailed

RIGHT, WRONG, ILL_FORMED = 1.0, -0.5, -1.0
"""The solver's rewards. A proposal that is not valid counts as ill-formed, as the paper says."""
SHIFT = 101
"""Objects of each type that the second run of a proposal has more than the first."""
Unsolved = Literal["zero", "full"]


def learnability(accuracy: float, unsolved: Unsolved = "zero") -> float:
    """Return the proposer's reward, 1 - p for the mean accuracy p of the attempts at its task, but 0 if none is right.

    With `unsolved` full, a task that no attempt solves is worth 1.
    """
    return 0.0 if accuracy == 0 and unsolved == "zero" else 1.0 - accuracy


class AbsoluteZero(Environment):
    """The model proposes a task about a program and solves it. Its rows are those of the task `absolute_zero`."""

    runs_in: ClassVar[RunsIn] = "loop"
    takes_truncated: ClassVar[bool] = True
    has_own_deadlines: ClassVar[bool] = True

    def __init__(
        self,
        attempts: int = DEFAULT_ATTEMPTS,
        unsolved: Unsolved = "zero",
        timeout_s: float = 5.0,
        memory_gib: float = 0.5,
        max_program_chars: int = 2_000,
        max_value_chars: int = 500,
        max_running: int | None = None,
        sandbox: Literal["namespaces", "unsafe"] = "namespaces",
    ) -> None:
        """Options:

        - `attempts`: solvers of each task. environment.max_turns must be at least one more.
        - `unsolved`: what a proposal is worth that no attempt solves: `zero`, or `full` (1 - p without exception).
        - `timeout_s`, `memory_gib`: limits of one run of a program.
        - `max_program_chars`, `max_value_chars`: limits of a program and of each input and output.
        - `max_running`: how many programs run at the same time; by default as many as there are cores.
        - `sandbox`: `unsafe` runs programs as you, where the system allows no sandbox.
        """
        for key, value in (("max_program_chars", max_program_chars), ("max_value_chars", max_value_chars)):
            if value < 1:
                raise UserError(f"environment absolute_zero: {key}={value}; expected a positive number")
        if unsolved not in ("zero", "full"):
            raise UserError(f"environment absolute_zero: unsolved={unsolved!r}; expected zero or full")
        self.num_attempts, self.unsolved, self.max_program_chars = attempts, unsolved, max_program_chars
        self.runs = ProgramRuns(timeout_s, memory_gib, max_value_chars, max_running, sandbox)

    @classmethod
    def roles_with(cls, options: Mapping[str, Any]) -> tuple[str, ...]:
        attempts = options.get("attempts", DEFAULT_ATTEMPTS)
        if not isinstance(attempts, int) or attempts < 1:
            raise UserError(f"environment absolute_zero: attempts={attempts!r}; expected a whole number of 1 or more")
        return tuple(role for kind in KINDS for role in (f"{kind}_propose", *_solvers(kind, attempts)))

    async def start(self, episode: Episode) -> Observation:
        extra = episode.extra
        if extra.get("task") != "absolute_zero":
            raise UserError(
                f"environment absolute_zero: row {episode.id} is not of the task absolute_zero: set data.train={{task: absolute_zero}}; a "
                "held-out task of your own has the columns task: absolute_zero, format, type and solve"
            )
        self.kind, self.format, self.extra = extra["type"], extra["format"], extra
        self.proposed: CodeTask | None = None
        self.problem: str | None = None
        self.is_proposing = "solve" not in extra
        self.solved: list[float] = []
        self.verdicts: dict[str, bool] = {}
        self.rewards: dict[str, float] = {}
        if self.is_proposing:
            return Observation(role=f"{self.kind}_propose")
        self.task, self.solvers = task_from_json(extra["solve"]), _solvers(self.kind, 1)  # a held-out task
        return self._ask()

    async def step(self, answer: Answer) -> Observation | End:
        if self.is_proposing:
            self.is_proposing = False
            self.rewards[f"{self.kind}_propose"] = ILL_FORMED
            self.proposed = await self._accepted(answer.text)
            fill = self.extra["fill"]
            if self.proposed is None and fill is None:
                return self._end()
            self.task = self.proposed or task_from_json(fill)
            self.solvers = _solvers(self.kind, self.num_attempts)
            return self._ask()
        self.rewards[self.solvers[len(self.solved)]] = reward = await self._graded(answer.text)
        self.solved.append(float(reward == RIGHT))
        return self._ask() if len(self.solved) < len(self.solvers) else self._end()

    async def end(self, reason: Literal["turns", "length"]) -> End:
        """The task does not fit into the context: the proposal is not valid."""
        if reason == "turns":
            raise UserError(
                f"environment absolute_zero: set environment.max_turns to attempts + 1 = {self.num_attempts + 1}, so that every solver has a turn"
            )
        self.proposed, self.problem = None, "the task is too long for the context"
        return self._end()

    def _ask(self) -> Observation:
        message = {"role": "user", "content": solve_prompt(self.task, self.format)}
        return Observation(messages=(message,), role=self.solvers[len(self.solved)])

    # --- proposals

    async def _accepted(self, text: str) -> CodeTask | None:
        """Return the task of a valid proposal; None, with the reason in `problem`, of another one."""
        given = self.extra.get("program", "")
        written = read_proposal(text, self.kind, self.format, self.extra["inputs"], given)
        if written is None:
            self.problem = "the answer is not in the format"
            return None
        try:
            outputs = await self._checked_outputs(written)
        except RunFailed as error:
            self.problem = str(error)
            return None
        return CodeTask(self.kind, written.program, written.inputs, outputs, written.message)

    async def _checked_outputs(self, written: Proposal) -> tuple[str, ...]:
        """Return the outputs of a proposal, which two independent runs agree on. Raises `RunFailed`."""
        for what, text in (("program", written.program), ("message", written.message)):
            if len(text) > self.max_program_chars:
                raise RunFailed(f"the {what} has {len(text)} characters, more than {self.max_program_chars}")
        if (problem := program_problem(written.program)) is not None:
            raise RunFailed(problem)
        first = await self.runs.outputs(written.program, written.inputs)
        second = await self.runs.outputs(written.program, written.inputs, shift=SHIFT)
        if not all(are_equal(one, other) for one, other in zip(first, second, strict=True)):
            raise RunFailed("two runs of the program give different outputs")
        return first

    # --- solutions

    async def _graded(self, text: str) -> float:
        """Return the reward of a solver's answer."""
        written = read_solution(text, self.kind, self.format)
        if written is None:
            return ILL_FORMED
        task = self.task
        if self.kind == "deduction":
            return RIGHT if are_equal(written, task.outputs[0]) else WRONG
        program, inputs = (task.program, (written,)) if self.kind == "abduction" else (written, task.inputs)
        if written not in self.verdicts:  # several attempts may give the same answer
            self.verdicts[written] = await self._gives(program, inputs, task.outputs)
        return RIGHT if self.verdicts[written] else WRONG

    async def _gives(self, program: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> bool:
        """Whether a program gives these outputs for these inputs."""
        if len(program) > self.max_program_chars or program_problem(program) is not None:
            return False
        try:
            found = await self.runs.outputs(program, inputs)
        except RunFailed:
            return False
        return all(map(are_equal, found, outputs))

    def _end(self) -> End:
        accuracy = sum(self.solved) / len(self.solved) if self.solved else 0.0
        worth = learnability(accuracy, self.unsolved)
        record: dict[str, Any] | None = None
        if "solve" not in self.extra:
            if self.proposed is not None:
                self.rewards[f"{self.kind}_propose"] = worth
            record = {
                "type": self.kind,
                "proposed": None if self.proposed is None else self.proposed.to_json(),
                "problem": self.problem,
                "solved": list(self.solved),
                "learnability": worth if self.proposed is not None else None,
            }
        played = self.solvers[: len(self.solved)] if self.solved else ()
        successes = {role: bool(value) for role, value in zip(played, self.solved, strict=True)}
        return End(rewards=self.rewards, successes=successes, record=record, text=self.problem)


def _solvers(kind: str, attempts: int) -> Sequence[str]:
    return tuple(f"{kind}_solve#{k}" for k in range(attempts))
