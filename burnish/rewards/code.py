"""The `code` reward: a program from the completion, run in the sandbox against the tests of its row.

What the program does wrong is its own: an exception, a limit, a death is a test not passed. What the sandbox does wrong (SandboxError) or
the row (ValueError) is raised, so that it is counted and shown and never becomes a quiet zero. A sandbox that breaks while a program runs
can be the program's doing: the program gets a second, new one, and fails its test if that breaks too.
"""

from __future__ import annotations

import functools
import signal
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.rewards.programs import Tests, program_of, read_tests, same_output
from burnish.rewards.types import Result

if TYPE_CHECKING:  # every worker imports this module, and few run programs
    from burnish.rewards.sandbox.client import Ended

SCORES = ("all", "fraction")
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
PROGRAM_SHARE = (
    0.8  # of the deadline of a call is the program's, so that its end is ours to see and not the pool's to make
)
SLACK_SHARE = 0.15
MAX_DETAIL = 300
LIMITS = {
    "time": "out of time",
    "cpu": "out of CPU time",
    "memory": "out of memory",
    "processes": "too many processes",
    "output": "too much output",
    "lost": "the sandbox broke twice while the program ran",
}


class Runner:
    """Runs programs of one reward: the sandbox and the time they have."""

    def __init__(self, timeout_s: float = 10.0, memory_gib: float = 2.0, is_isolated: bool = True) -> None:
        from burnish.rewards.sandbox.client import Sandbox
        from burnish.rewards.sandbox.limits import Limits

        self.sandbox = Sandbox(Limits(memory_bytes=int(memory_gib * 2**30)), is_isolated, SLACK_SHARE * timeout_s)
        self.wall_s = PROGRAM_SHARE * timeout_s

    def outcomes(self, program: str, tests: Tests, stops_early: bool) -> tuple[list[str], bool]:
        """What became of each test, and whether time ran out; with `stops_early` programs for stdio end at the first failure."""
        if not tests.stdio:
            spec, judge = tests.for_program(program), tests.for_judge()
            ended = run_twice(lambda wall_s: self.sandbox.run_calls(spec, judge, wall_s), self.wall_s)
            return outcomes_of_calls(ended, tests.count), ended.reason in ("time", "cpu")
        outcomes = [NOT_RUN] * tests.count
        end, ran_out = time.monotonic() + self.wall_s, False
        for number, (stdin, expected) in enumerate(tests.stdio):
            left = end - time.monotonic()
            if left <= 0 or ran_out or (stops_early and number and outcomes[number - 1] != PASSED):
                break
            ended = run_twice(functools.partial(self.sandbox.run_stdio, program, stdin), left)
            outcomes[number] = outcome_of_stdio(ended, expected)
            ran_out = ended.reason in ("time", "cpu")
        return outcomes, ran_out


def run_twice(run: Callable[[float], Ended], wall_s: float) -> Ended:
    """Run a program; once more, in the time that is left, if the sandbox broke while it ran.

    A neighbour or the machine breaks the sandbox of a harmless program hardly twice in a row. If the program could
    turn its failure into one of the sandbox, it would lose its penalty: samples that cannot be scored leave the loss.
    """
    from burnish.rewards.sandbox.client import Ended, RunLost

    end = time.monotonic() + wall_s
    try:
        return run(wall_s)
    except RunLost:
        left = end - time.monotonic()
    if left <= 0:
        return Ended("time", None, "", "", [])
    try:
        return run(left)
    except RunLost as error:
        return Ended("lost", None, "", str(error), [])


def outcomes_of_calls(ended: Ended, count: int) -> list[str]:
    """What the judge said of each test; the test at which the program or the judge ended is failed."""
    outcomes = [NOT_RUN] * count
    said: dict[str, Any] = {}
    for message in ended.verdicts:
        if "test" in message:
            outcomes[message["test"]] = message["outcome"]
        said |= message
    if "broken" in said:
        raise ValueError(f"the tests of the row cannot run: {said['broken']}")
    if "done" in said:
        return outcomes
    at = outcomes.index(NOT_RUN)
    if ended.reason in LIMITS:
        outcomes[at] = _overrun(ended)
    elif "loaded" in said:
        outcomes[at] = f"{FAILED}: the program does not load: {said['why']}"
    elif "gone" in said:
        outcomes[at] = f"{FAILED}: {_death(ended.status)}"
    else:
        outcomes[at] = f"{FAILED}: the test ended the process it ran in"
    return outcomes


def outcome_of_stdio(ended: Ended, expected: str) -> str:
    """Whether a program that has ended has printed what was expected."""
    if ended.reason in LIMITS:
        return _overrun(ended)
    if ended.status != 0:
        last = ended.errors.strip().rpartition("\n")[2]
        return f"{FAILED}: {last or _death(ended.status)}"[:MAX_DETAIL]
    return PASSED if same_output(expected, ended.output) else f"{FAILED}: wrong output"


def _overrun(ended: Ended) -> str:
    why = f" ({ended.errors})" if ended.reason == "lost" else ""
    return f"{FAILED}: {LIMITS[ended.reason]}{why}"[:MAX_DETAIL]


def _death(status: int | None) -> str:
    if status is not None and status < 0:
        known = {number.value: number.name for number in signal.Signals}  # most real-time signals have no name
        return f"the program was killed by {known.get(-status, f'signal {-status}')}"
    return f"the program exited with status {status}"


_settings: dict[str, Any] = {}


@functools.cache
def runner() -> Runner:
    """The one runner of this process, made with the first program."""
    return Runner(**_settings)


def set_up(timeout_s: float, memory_gib: float, is_isolated: bool) -> None:
    """What programs of this process may use; before the first one."""
    _settings.update(timeout_s=timeout_s, memory_gib=memory_gib, is_isolated=is_isolated)


def check_sandbox(is_isolated: bool) -> None:
    """Refuse, with what to do about it, to go on where programs cannot be run."""
    from burnish.rewards.sandbox.client import Sandbox, SandboxError
    from burnish.rewards.sandbox.limits import Limits

    try:
        with Sandbox(Limits(), is_isolated) as sandbox:
            sandbox.start()
            ended = sandbox.run_stdio("print(input())", "ready", 10.0)
    except SandboxError as error:
        raise UserError(f"code rewards cannot run programs here: {error}") from error
    if ended.output.strip() != "ready":
        raise UserError(f"code rewards cannot run programs here: one of a single line did not run ({ended})")


def code(completion: str, answer: Any, extra: Mapping[str, Any], *, score: str = "all") -> Result:
    """1 if the program passes every test of its row; with `score: fraction` the share of tests it passes."""
    tests = read_tests(answer)
    outcomes, ran_out = runner().outcomes(program_of(completion), tests, stops_early=score == "all")
    num_passed = sum(outcome == PASSED for outcome in outcomes)
    is_right = num_passed == tests.count
    details = "\n".join(f"test {number}: {outcome}" for number, outcome in enumerate(outcomes, start=1))
    return Result(
        value=float(is_right) if score == "all" else num_passed / tests.count,
        accuracy=float(is_right),
        parts={"passed": float(num_passed), "tests": float(tests.count)},
        details=details.encode(errors="replace").decode(),  # an exception's text may be one that no file can hold
        timed_out=ran_out,
    )
