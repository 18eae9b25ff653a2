"""The `code` reward: a program from the completion, run in the sandbox against the tests of its row.

What the program does wrong is its own: an exception, a limit, a death is a test not passed. What the sandbox does wrong (SandboxError) or
the row (ValueError) is raised, so that it is counted and shown and never becomes a quiet zero. A sandbox that breaks while a program runs
can be the program's doing: the program gets a second, new one, and fails its test if that breaks too.
"""

from __future__ import annotations

import ast
import builtins
import functools
import json
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.rewards.score_types import PartResult

if TYPE_CHECKING:
    from burnish.sandbox.client import Ended


# --- What stands around a program: finding it in a completion, reading the tests of a row, comparing what it printed.
#
# The answer of a row is one JSON object (text, or a mapping), with exactly one of
#
#     asserts   a list of tests, each one or more statements (MBPP)
#     check     the text of a function `check(candidate)` (HumanEval), with `entry_point`: whom it is given
#     stdio     a list of {"input": text, "output": text} (APPS, TACO, LiveCodeBench)
#
# and, besides asserts or check: `entry_point`, `setup` (imports for program and tests), `prefix` (code before the program, whose functions
# tests may call).

TEST_KINDS = ("asserts", "check", "stdio")
TEXT_FIELDS = ("entry_point", "setup", "prefix")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_PYTHON_TAGS = ("python", "py", "python3", "py3")
MAX_DIGITS = 100  # longer numbers are compared as text


def extract_program(completion: str) -> str:
    """The program in a completion: its last fenced block of Python, else its last fenced block, else all of it.

    A block that is not closed goes to the end. What a model thinks before `</think>` is no answer.
    """
    text = completion.rpartition("</think>")[2]
    blocks: list[tuple[str, str]] = []
    opened: re.Match[str] | None = None
    for fence in _FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif fence[1].startswith(opened[1]) and not fence[2]:
            blocks.append((opened[2].lower(), text[opened.end() + 1 : fence.start()]))
            opened = None
    if opened is not None:
        blocks.append((opened[2].lower(), text[opened.end() + 1 :]))
    tagged = [block for tag, block in blocks if tag in _PYTHON_TAGS]
    return (tagged or [block for _, block in blocks] or [text])[-1]


@dataclass(frozen=True)
class ProgramTests:
    """The tests of one row; one of the three lists has something in it."""

    asserts: tuple[str, ...] = ()
    check: str | None = None
    stdio: tuple[tuple[str, str], ...] = ()
    entry_point: str | None = None
    setup: str = ""
    prefix: str = ""

    @property
    def count(self) -> int:
        """How many outcomes there are; a `check` function is one test."""
        return len(self.asserts) + len(self.stdio) + (self.check is not None)

    def for_judge(self) -> dict[str, Any]:
        """What the judge is told."""
        tests = {"asserts": list(self.asserts)} if self.check is None else {"check": self.check}
        return tests | {"setup": self.setup, "prefix": self.prefix, "entry_point": self.entry_point}

    def for_program(self, program: str) -> dict[str, Any]:
        """What the program's process is told: nothing of the tests."""
        return {"program": program, "setup": self.setup, "prefix": self.prefix, "entry_point": self.entry_point}


def parse_tests(answer: Any) -> ProgramTests:
    """The tests in a row's answer; ValueError, naming what is wrong, for anything else than the format above."""
    try:
        record = json.loads(answer) if isinstance(answer, str | bytes) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the answer of a row for the code reward is one JSON object, but: {error}") from None
    if not isinstance(record, Mapping):
        raise ValueError(f"the answer of a row for the code reward is one JSON object, not a {type(record).__name__}")
    record = {key: value for key, value in record.items() if value is not None}
    unknown = [key for key in record if key not in (*TEST_KINDS, *TEXT_FIELDS)]
    if unknown:
        raise ValueError(
            f"the tests of the row have an unknown key {unknown[0]!r} (known: {', '.join((*TEST_KINDS, *TEXT_FIELDS))})"
        )
    given = [kind for kind in TEST_KINDS if kind in record]
    if len(given) != 1:
        raise ValueError(
            f"the tests of the row need exactly one of {', '.join(TEST_KINDS)}; they have {given or 'none'}"
        )
    for key in TEXT_FIELDS:
        if not isinstance(record.get(key, ""), str):
            raise ValueError(f"{key} of the row's tests should be text, not a {type(record[key]).__name__}")
    texts = {key: record[key] for key in TEXT_FIELDS if key in record}
    _checked_python(texts.get("setup", ""), "setup")
    if given == ["stdio"]:
        if texts:
            raise ValueError(f"{next(iter(texts))} has no effect beside stdio: such a program runs as it is")
        return ProgramTests(stdio=_stdio_pairs(record["stdio"]))
    if given == ["check"]:
        if not isinstance(record["check"], str) or "entry_point" not in texts:
            raise ValueError(
                "check should be the text of the test function, and entry_point the name it is called with"
            )
        return ProgramTests(check=_checked_python(record["check"]), **texts)
    asserts = record["asserts"]
    if not isinstance(asserts, list | tuple) or not asserts or not all(isinstance(a, str) for a in asserts):
        raise ValueError("asserts should be a list of texts, with one at least")
    texts = {"entry_point": _builtin_entry_point(asserts), **texts}
    return ProgramTests(asserts=tuple(_checked_python(text) for text in asserts), **texts)


def _builtin_entry_point(asserts: Sequence[str]) -> str | None:
    """Where every name in the tests is one of Python's own, the first that is called is the program's after all.

    MBPP has a function called `sum`. Only the tests decide this, never the program.
    """
    calls: list[str] = []
    for text in asserts:
        nodes = list(ast.walk(ast.parse(_checked_python(text))))
        names = {node.id for node in nodes if isinstance(node, ast.Name)}
        if any(not hasattr(builtins, name) and name not in sys.stdlib_module_names for name in names):
            return None
        calls += [node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return calls[0] if calls else None


def _stdio_pairs(pairs: Any) -> tuple[tuple[str, str], ...]:
    is_list = isinstance(pairs, list | tuple) and len(pairs) > 0
    if not is_list or not all(isinstance(p, Mapping) and set(p) == {"input", "output"} for p in pairs):
        raise ValueError('stdio should be a list of {"input": text, "output": text}, with one at least')
    if not all(isinstance(text, str) for pair in pairs for text in pair.values()):
        raise ValueError("input and output of stdio tests should be text")
    return tuple((pair["input"], pair["output"]) for pair in pairs)


def _checked_python(source: str, what: str = "a test") -> str:
    """A test, as it is, if it is Python."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} of the row is no Python ({error}): {source[:200]!r}") from None
    return source


def outputs_match(expected: str, printed: str) -> bool:
    """Whether a program printed what was expected: line by line, words apart, 1.50 being 1.5 (as LiveCodeBench has it)."""
    left, right = (_split_lines(text) for text in (expected, printed))
    return len(left) == len(right) and all(map(_words_match, left, right))


def _split_lines(text: str) -> list[list[str]]:
    lines = [line.split() for line in text.strip().splitlines()]
    return lines or [[]]


def _words_match(left: list[str], right: list[str]) -> bool:
    return len(left) == len(right) and all(
        a == b or (_parse_decimal(a) is not None and _parse_decimal(a) == _parse_decimal(b))
        for a, b in zip(left, right, strict=True)
    )


def _parse_decimal(word: str) -> Decimal | None:
    try:
        value = Decimal(word) if len(word) <= MAX_DIGITS else None
    except InvalidOperation:
        return None
    return value if value is not None and value.is_finite() else None


SCORE_MODES = ("all", "fraction")
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
PROGRAM_SHARE = (
    0.8  # of the deadline of a call is the program's, so that its end is ours to see and not the pool's to make
)
SLACK_SHARE = 0.15
MAX_DETAIL = 300
LIMIT_MESSAGES = {
    "time": "out of time",
    "cpu": "out of CPU time",
    "memory": "out of memory",
    "processes": "too many processes",
    "output": "too much output",
    "lost": "the sandbox broke twice while the program ran",
}


class ProgramRunner:
    """Runs programs of one reward: the sandbox and the time they have."""

    def __init__(self, timeout_s: float = 10.0, memory_gib: float = 2.0, is_isolated: bool = True) -> None:
        from burnish.sandbox.client import Sandbox
        from burnish.sandbox.limits import Limits

        self.sandbox = Sandbox(Limits(memory_bytes=int(memory_gib * 2**30)), is_isolated, SLACK_SHARE * timeout_s)
        self.wall_s = PROGRAM_SHARE * timeout_s

    def outcomes(self, program: str, tests: ProgramTests, stops_early: bool) -> tuple[list[str], bool]:
        """What became of each test, and whether time ran out; with `stops_early` programs for stdio end at the first failure."""
        if not tests.stdio:
            spec, judge = tests.for_program(program), tests.for_judge()
            ended = run_with_retry(lambda wall_s: self.sandbox.run_calls(spec, judge, wall_s), self.wall_s)
            return outcomes_from_verdicts(ended, tests.count), ended.reason in ("time", "cpu")
        outcomes = [NOT_RUN] * tests.count
        end, ran_out = time.monotonic() + self.wall_s, False
        for number, (stdin, expected) in enumerate(tests.stdio):
            left = end - time.monotonic()
            if left <= 0 or ran_out or (stops_early and number and outcomes[number - 1] != PASSED):
                break
            ended = run_with_retry(functools.partial(self.sandbox.run_stdio, program, stdin), left)
            outcomes[number] = stdio_outcome(ended, expected)
            ran_out = ended.reason in ("time", "cpu")
        return outcomes, ran_out


def run_with_retry(run: Callable[[float], Ended], wall_s: float) -> Ended:
    """Run a program; once more, in the time that is left, if the sandbox broke while it ran.

    A neighbour or the machine breaks the sandbox of a harmless program hardly twice in a row. If the program could
    turn its failure into one of the sandbox, it would lose its penalty: samples that cannot be scored leave the loss.
    """
    from burnish.sandbox.client import Ended, RunLost

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


def outcomes_from_verdicts(ended: Ended, count: int) -> list[str]:
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
    if ended.reason in LIMIT_MESSAGES:
        outcomes[at] = _limit_failure(ended)
    elif "loaded" in said:
        outcomes[at] = f"{FAILED}: the program does not load: {said['why']}"
    elif "gone" in said:
        outcomes[at] = f"{FAILED}: {_describe_exit(ended.status)}"
    else:
        outcomes[at] = f"{FAILED}: the test ended the process it ran in"
    return outcomes


def stdio_outcome(ended: Ended, expected: str) -> str:
    """Whether a program that has ended has printed what was expected."""
    if ended.reason in LIMIT_MESSAGES:
        return _limit_failure(ended)
    if ended.status != 0:
        last = ended.errors.strip().rpartition("\n")[2]
        return f"{FAILED}: {last or _describe_exit(ended.status)}"[:MAX_DETAIL]
    return PASSED if outputs_match(expected, ended.output) else f"{FAILED}: wrong output"


def _limit_failure(ended: Ended) -> str:
    why = f" ({ended.errors})" if ended.reason == "lost" else ""
    return f"{FAILED}: {LIMIT_MESSAGES[ended.reason]}{why}"[:MAX_DETAIL]


def _describe_exit(status: int | None) -> str:
    if status is not None and status < 0:
        known = {number.value: number.name for number in signal.Signals}  # most real-time signals have no name
        return f"the program was killed by {known.get(-status, f'signal {-status}')}"
    return f"the program exited with status {status}"


_runner_settings: dict[str, Any] = {}


@functools.cache
def process_runner() -> ProgramRunner:
    """The one runner of this process, made with the first program."""
    return ProgramRunner(**_runner_settings)


def configure_runner(timeout_s: float, memory_gib: float, is_isolated: bool) -> None:
    """What programs of this process may use; before the first one."""
    _runner_settings.update(timeout_s=timeout_s, memory_gib=memory_gib, is_isolated=is_isolated)


def check_sandbox(is_isolated: bool) -> None:
    """Refuse, with what to do about it, to go on where programs cannot be run."""
    from burnish.sandbox.client import Sandbox, SandboxError
    from burnish.sandbox.limits import Limits

    try:
        with Sandbox(Limits(), is_isolated) as sandbox:
            sandbox.start()
            ended = sandbox.run_stdio("print(input())", "ready", 10.0)
    except SandboxError as error:
        raise UserError(f"code rewards cannot run programs here: {error}") from error
    if ended.output.strip() != "ready":
        raise UserError(f"code rewards cannot run programs here: one of a single line did not run ({ended})")


def code(completion: str, answer: Any, extra: Mapping[str, Any], *, score: str = "all") -> PartResult:
    """1 if the program passes every test of its row; with `score: fraction` the share of tests it passes."""
    tests = parse_tests(answer)
    outcomes, ran_out = process_runner().outcomes(extract_program(completion), tests, stops_early=score == "all")
    num_passed = sum(outcome == PASSED for outcome in outcomes)
    is_right = num_passed == tests.count
    details = "\n".join(f"test {number}: {outcome}" for number, outcome in enumerate(outcomes, start=1))
    return PartResult(
        value=float(is_right) if score == "all" else num_passed / tests.count,
        accuracy=float(is_right),
        parts={"passed": float(num_passed), "tests": float(tests.count)},
        details=details.encode(errors="replace").decode(),  # an exception's text may be one that no file can hold
        timed_out=ran_out,
    )
