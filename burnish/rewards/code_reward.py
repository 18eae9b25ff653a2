"""The `code` reward: runs the program of a completion in the sandbox against the tests of its row.

The answer of a row is one JSON object (as text, or as a mapping). It has exactly one of

    asserts   a list of tests, each one or more statements (MBPP)
    check     the source of a function `check(candidate)` (HumanEval); `entry_point` names the candidate
    stdio     a list of {"input": text, "output": text} (APPS, TACO, LiveCodeBench)

With asserts or check it may also have `entry_point`, `setup` (imports for program and tests) and `prefix` (code before the program,
whose functions the tests may call).

An exception, a passed limit or a crash of the program is a failed test. An error of the sandbox (SandboxError) or of the row (ValueError)
is raised instead, so that it is counted and reported and never becomes a silent 0. A sandbox that breaks while a program runs may have
been broken by the program. The program then gets one new sandbox, and fails its test if that breaks too.
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
    from burnish.sandbox.client import RunResult

TEST_KINDS = ("asserts", "check", "stdio")
TEXT_FIELDS = ("entry_point", "setup", "prefix")
_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*$", re.MULTILINE)
_PYTHON_TAGS = ("python", "py", "python3", "py3")
MAX_DIGITS = 100
"""Longer numbers in an output are compared as text."""
SCORE_MODES = ("all", "fraction")
PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
PROGRAM_SHARE = 0.8
"""The program's share of the deadline of a call. The rest lets the runner see the end of the program before the worker pool kills it."""
SLACK_SHARE = 0.15
"""The share of the deadline that the sandbox itself may take beyond the program's time."""
MAX_DETAIL = 300
LIMIT_MESSAGES = {
    "time": "out of time",
    "cpu": "out of CPU time",
    "memory": "out of memory",
    "processes": "too many processes",
    "output": "too much output",
    "lost": "the sandbox broke twice while the program ran",
}
_runner_settings: dict[str, Any] = {}


def code(completion: str, answer: Any, extra: Mapping[str, Any], *, score: str = "all") -> PartResult:
    """1 if the program passes every test of its row, else 0. With `score: fraction`, the fraction of tests it passes."""
    tests = parse_tests(answer)
    outcomes, ran_out = process_runner().outcomes(extract_program(completion), tests, stops_early=score == "all")
    num_passed = sum(outcome == PASSED for outcome in outcomes)
    is_right = num_passed == tests.count
    details = "\n".join(f"test {number}: {outcome}" for number, outcome in enumerate(outcomes, start=1))
    return PartResult(
        value=float(is_right) if score == "all" else num_passed / tests.count,
        accuracy=float(is_right),
        parts={"passed": float(num_passed), "tests": float(tests.count)},
        details=details.encode(errors="replace").decode(),  # an exception may hold surrogates that cannot be saved
        timed_out=ran_out,
    )


@functools.cache
def process_runner() -> ProgramRunner:
    """The runner of this process, created with the first program."""
    return ProgramRunner(**_runner_settings)


def configure_runner(timeout_s: float, memory_gib: float, is_isolated: bool) -> None:
    """Set the limits of the programs of this process. Call it before the first program runs."""
    _runner_settings.update(timeout_s=timeout_s, memory_gib=memory_gib, is_isolated=is_isolated)


def runner_settings() -> dict[str, Any]:
    """The limits that `configure_runner` has set; the defaults of the runner apply to others."""
    return dict(_runner_settings)


def check_sandbox(is_isolated: bool) -> None:
    """Raise a UserError, with advice, if programs cannot be run on this machine."""
    from burnish.sandbox.client import Sandbox, SandboxError
    from burnish.sandbox.limits import Limits

    try:
        with Sandbox(Limits(), is_isolated) as sandbox:
            sandbox.start()
            ended = sandbox.run_stdio("print(input())", "ready", 10.0)
    except SandboxError as error:
        raise UserError(f"programs cannot be run here: {error}") from error
    if ended.output.strip() != "ready":
        raise UserError(f"programs cannot be run here: a one-line test program failed ({ended})")


# --- running programs ------------------------------------------------------------------------------------------------


class ProgramRunner:
    """Runs the programs of one reward: holds the sandbox and the time limit."""

    def __init__(self, timeout_s: float = 10.0, memory_gib: float = 2.0, is_isolated: bool = True) -> None:
        from burnish.sandbox.client import Sandbox
        from burnish.sandbox.limits import Limits

        self.sandbox = Sandbox(Limits(memory_bytes=int(memory_gib * 2**30)), is_isolated, SLACK_SHARE * timeout_s)
        self.wall_s = PROGRAM_SHARE * timeout_s

    def outcomes(self, program: str, tests: ProgramTests, stops_early: bool) -> tuple[list[str], bool]:
        """The outcome of each test, and whether time ran out. With `stops_early`, stdio tests end at the first failure."""
        if not tests.stdio:
            spec, grader_spec = tests.for_program(program), tests.for_grader()
            ended = run_with_retry(lambda wall_s: self.sandbox.run_calls(spec, grader_spec, wall_s), self.wall_s)
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


def run_with_retry(run: Callable[[float], RunResult], wall_s: float) -> RunResult:
    """Run a program; run it once more, in the time that is left, if the sandbox broke while it ran.

    For a harmless program, other processes or the machine hardly ever break the sandbox twice in a row. A program that breaks it twice
    has failed. Otherwise a program could avoid its penalty by breaking the sandbox, because samples without a score leave the loss.
    """
    from burnish.sandbox.client import RunLost, RunResult

    end = time.monotonic() + wall_s
    try:
        return run(wall_s)
    except RunLost:
        left = end - time.monotonic()
    if left <= 0:
        return RunResult("time", None, "", "", [])
    try:
        return run(left)
    except RunLost as error:
        return RunResult("lost", None, "", str(error), [])


def outcomes_from_verdicts(ended: RunResult, count: int) -> list[str]:
    """The grader's verdict on each test. The test during which the program or the grader ended has failed."""
    outcomes = [NOT_RUN] * count
    messages: dict[str, Any] = {}
    for message in ended.verdicts:
        if "test" in message:
            outcomes[message["test"]] = message["outcome"]
        messages |= message
    if "broken" in messages:
        raise ValueError(f"the tests of the row cannot run: {messages['broken']}")
    if "done" in messages:
        return outcomes
    at = outcomes.index(NOT_RUN)
    if ended.reason in LIMIT_MESSAGES:
        outcomes[at] = _limit_failure(ended)
    elif "loaded" in messages:
        outcomes[at] = f"{FAILED}: the program does not load: {messages['why']}"
    elif "gone" in messages:
        outcomes[at] = f"{FAILED}: {_describe_exit(ended.status)}"
    else:
        outcomes[at] = f"{FAILED}: the test ended the process it ran in"
    return outcomes


def stdio_outcome(ended: RunResult, expected: str) -> str:
    """The outcome of a stdio test: whether the ended program printed what was expected."""
    if ended.reason in LIMIT_MESSAGES:
        return _limit_failure(ended)
    if ended.status != 0:
        last = ended.errors.strip().rpartition("\n")[2]
        return f"{FAILED}: {last or _describe_exit(ended.status)}"[:MAX_DETAIL]
    return PASSED if outputs_match(expected, ended.output) else f"{FAILED}: wrong output"


def _limit_failure(ended: RunResult) -> str:
    why = f" ({ended.errors})" if ended.reason == "lost" else ""
    return f"{FAILED}: {LIMIT_MESSAGES[ended.reason]}{why}"[:MAX_DETAIL]


def _describe_exit(status: int | None) -> str:
    if status is not None and status < 0:
        known = {number.value: number.name for number in signal.Signals}  # most real-time signals have no name
        return f"the program was killed by {known.get(-status, f'signal {-status}')}"
    return f"the program exited with status {status}"


# --- the program of a completion, the tests of a row, and printed output ---------------------------------------------


def extract_program(completion: str) -> str:
    """The program of a completion: its last fenced Python block, else its last fenced block, else all of it."""
    return extract_fenced(completion, _PYTHON_TAGS)


def extract_fenced(completion: str, tags: Sequence[str]) -> str:
    """The last fenced block with one of these tags, else the last fenced block, else all of a completion.

    An unclosed block extends to the end. Text up to the last `</think>` is ignored.
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
    tagged = [block for tag, block in blocks if tag in tags]
    return (tagged or [block for _, block in blocks] or [text])[-1]


@dataclass(frozen=True)
class ProgramTests:
    """The tests of one row. Exactly one of `asserts`, `check` and `stdio` is set."""

    asserts: tuple[str, ...] = ()
    check: str | None = None
    stdio: tuple[tuple[str, str], ...] = ()
    entry_point: str | None = None
    setup: str = ""
    prefix: str = ""

    @property
    def count(self) -> int:
        """Number of tests; a `check` function is one test."""
        return len(self.asserts) + len(self.stdio) + (self.check is not None)

    def for_grader(self) -> dict[str, Any]:
        """What the grader's process receives."""
        tests = {"asserts": list(self.asserts)} if self.check is None else {"check": self.check}
        return tests | {"setup": self.setup, "prefix": self.prefix, "entry_point": self.entry_point}

    def for_program(self, program: str) -> dict[str, Any]:
        """What the program's process receives: nothing about the tests, so that a program cannot find them in its memory."""
        return {"program": program, "setup": self.setup, "prefix": self.prefix, "entry_point": self.entry_point}


def parse_tests(answer: Any) -> ProgramTests:
    """Parse the answer of a row into tests; ValueError for anything but the format above."""
    try:
        record = json.loads(answer) if isinstance(answer, str | bytes) else answer
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"the code reward needs one JSON object as the answer of a row; this one does not parse: {error}"
        ) from None
    if not isinstance(record, Mapping):
        raise ValueError(f"the code reward needs one JSON object as the answer of a row, got a {type(record).__name__}")
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
            raise ValueError(f"{next(iter(texts))} has no effect with stdio, where a program runs as it is; remove it")
        return ProgramTests(stdio=_stdio_pairs(record["stdio"]))
    if given == ["check"]:
        if not isinstance(record["check"], str) or "entry_point" not in texts:
            raise ValueError(
                "check should be the source of the test function, and entry_point the name of the function that it tests"
            )
        return ProgramTests(check=_checked_python(record["check"]), **texts)
    asserts = record["asserts"]
    if not isinstance(asserts, list | tuple) or not asserts or not all(isinstance(a, str) for a in asserts):
        raise ValueError("asserts should be a list of at least one text")
    texts = {"entry_point": _builtin_entry_point(asserts), **texts}
    return ProgramTests(asserts=tuple(_checked_python(text) for text in asserts), **texts)


def _builtin_entry_point(asserts: Sequence[str]) -> str | None:
    """The function under test if it has the name of a builtin: MBPP has a function called `sum`.

    If all names in the tests are Python's own, the first one that is called must be the program's. This is decided from the tests alone,
    never from the program.
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
        raise ValueError('stdio should be a list of at least one {"input": text, "output": text}')
    if not all(isinstance(text, str) for pair in pairs for text in pair.values()):
        raise ValueError("input and output of stdio tests should be text")
    return tuple((pair["input"], pair["output"]) for pair in pairs)


def _checked_python(source: str, what: str = "a test") -> str:
    """Return the source unchanged if it parses as Python; ValueError otherwise."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} of the row is not valid Python ({error}): {source[:200]!r}") from None
    return source


def outputs_match(expected: str, printed: str) -> bool:
    """Whether a program printed what was expected: compared by line and word, with 1.50 equal to 1.5 (as LiveCodeBench does)."""
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
