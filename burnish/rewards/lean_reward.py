"""The `lean` reward: a proof in Lean 4, checked by the user's own `lean`, which runs in the sandbox of the code reward.

The answer of a row is the statement, as Lean source: perhaps a header (imports, open), then one `theorem` or `lemma` without its proof. What follows
the statement (`:=`, `:= by`, `:= by sorry`) is ignored. The completion gives the proof: all of the theorem, or only what follows `:=`. The checked file
is the row's header and statement, the completion's proof, and `#print axioms`. So a statement or header that the completion changes has no effect.

A proof is accepted if Lean reports no error and the theorem depends on no axiom but Lean's three. Refused before Lean runs: words with which a
proof could cheat (`sorry`, `axiom`, `native_decide`, `unsafe`), start another command, or run code while it is checked (`macro`, `elab`, `#eval`).
Those make it possible to forge the output of `#print axioms`.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.config.errors import UserError
from burnish.rewards.code_reward import (
    LIMIT_MESSAGES,
    PROGRAM_SHARE,
    SLACK_SHARE,
    extract_fenced,
    run_with_retry,
    runner_settings,
)
from burnish.rewards.score_types import PartResult, require_answer
from burnish.sandbox.toolchain import Toolchain

if TYPE_CHECKING:
    from burnish.sandbox.client import RunResult

LEAN_TAGS = ("lean", "lean4")
FILE_NAME = "proof.lean"
ALLOWED_AXIOMS = frozenset({"propext", "Classical.choice", "Quot.sound"})
FORBIDDEN_WORDS = r"""
sorry\w* admit stop axioms? native_decide unsafe\w* partial opaque implemented_by extern csimp ofReduceBool ofReduceNat trustCompiler
theorem lemma def abbrev example instance inductive structure class namespace section end mutual open export import universes? variables?
attribute deriving private protected public noncomputable nonrec module meta \w*initialize declare_\w+ register_\w+ syntax\w* macro\w* elab\w*
notation\w* infix[lr]? prefix postfix local scoped set_option run_\w+ by_elab eval_expr \w*simproc\w* alias irreducible_def unseal seal
include omit coinductive unif_hint binder_predicate grind_pattern init_quot proof_wanted
"""
"""Patterns of words. A proof with such a word is refused: they begin a command, reach the elaborator, or trust something unproved."""
_COMMAND = re.compile("|".join(FORBIDDEN_WORDS.split()))
_INTERNAL = re.compile(r"IO|Lean|Elab|Meta|ofReduceBool|ofReduceNat|trustCompiler|sorry\w*|unsafe\w*")
"""Refused in any part of a dotted name: `_root_.Lean.Elab` is `Lean.Elab`."""
_TOKEN = re.compile(
    r"(?P<word>[A-Za-z_][A-Za-z0-9_]*)(?P<rest>['!?]?)|(?P<number>0[xX][0-9a-fA-F]+|[0-9]+(?:[eE][+-]?[0-9]+)?)(?P<joined>[A-Za-z_]?)|#[a-z]|@\[|«"
)
_STATEMENT = re.compile(r"^[ \t]*(?:theorem|lemma)[ \t]+([^\s:({\[.]+(?:\.[^\s:({\[.]+)*)", re.MULTILINE)
_UNPROVED = re.compile(r"\s*:=\s*(?:by)?\s*(?:sorry)?\s*$")
_AXIOMS = re.compile(r"'(\S*)' depends on axioms: \[([^\]]*)\]")  # a name may end with '
_NO_AXIOMS = re.compile(r"'(\S*)' does not depend on any axioms")
_COMMENT, _IN_COMMENT = re.compile(r"/-|--[^\n]*"), re.compile(r"/-|-/")
MAX_MESSAGE_CHARS = 600
PREFIX_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class LeanStatement:
    """The theorem of a row."""

    header: str
    statement: str
    """From `theorem` to the end of its type, without `:=`."""
    name: str


def parse_statement(answer: Any) -> LeanStatement:
    """The statement of a row; ValueError if there is not exactly one theorem, and that the last thing in the text."""
    text = _UNPROVED.sub("", str(answer)).rstrip()
    found = list(_STATEMENT.finditer(text))
    if len(found) != 1:
        raise ValueError(
            f"the answer of the row should end with one Lean theorem without its proof, got {len(found)} theorems in {text[:200]!r}"
        )
    start = found[0].start()
    return LeanStatement(text[:start].rstrip(), text[start:].strip(), found[0][1])


class RefusedProof(Exception):
    """A completion is not a proof that may be checked; the text says why."""


def extract_lean_proof(completion: str, expected: LeanStatement) -> str:
    """The proof in a completion: what follows the statement and `:=`, or all of it if there is no statement; RefusedProof if it may cheat."""
    text = _without_comments(extract_fenced(completion, LEAN_TAGS))
    words = r"\s+".join(map(re.escape, _without_comments(expected.statement).split()))
    stated = list(re.finditer(rf"(?<!\S){words}(?=\s*(?::=|$))", text))
    if stated:
        body = text[stated[-1].end() :].strip()
    elif _STATEMENT.search(text):
        raise RefusedProof("the statement is not the one of the row")
    else:
        body = text.strip()
    body = body.removeprefix(":=").strip()
    if not body:
        raise RefusedProof("there is no proof")
    if (cheat := forbidden_part(body)) is not None:
        raise RefusedProof(f"a proof may not contain {cheat!r}")
    return body


def forbidden_part(proof: str) -> str | None:
    """The first part of a proof that is not allowed, or None.

    Lean needs no space before a keyword: `5macro`, `..macro`, `'a'macro` and the bullet `.run_tac` are two tokens each. So a word is only taken
    for part of a longer name after ASCII letters, or after the dot of such a name (`h.end`). A name that ends with ' ! or ? is no keyword.
    """
    name_end = -1
    """Where the dot of a dotted name would be."""
    for token in _TOKEN.finditer(proof):
        if (word := token["word"]) is None:
            if token["number"] is None or token["joined"]:
                return token[0]
            continue
        is_first = not (token.start() == name_end + 1 and proof[name_end] == ".")
        if _INTERNAL.fullmatch(word) or (is_first and not token["rest"] and _COMMAND.fullmatch(word)):
            return word
        name_end = token.end()
    return None


def _without_comments(text: str) -> str:
    """The text without Lean's comments, nested ones included. One that is not closed goes to the end."""
    kept, depth, at, search_from = list[str](), 0, 0, 0
    while (found := (_IN_COMMENT if depth else _COMMENT).search(text, search_from)) is not None:
        if depth == 0:
            kept.append(text[at : found.start()] + " ")
        depth += {"/-": 1, "-/": -1}.get(found[0], 0)
        at = search_from = found.end()
    return "".join(kept) + (text[at:] if depth == 0 else "")


def lean_source(expected: LeanStatement, proof: str) -> tuple[str, int]:
    """The file to check, and the number of the line with `#print axioms`."""
    text = f"{expected.header}\n\n{expected.statement} := {proof}\n\n"
    return text + f"#print axioms {expected.name}\n", text.count("\n") + 1


def lean(
    completion: str, answer: Any, extra: Mapping[str, Any], *, project: str | None = None, header: str = ""
) -> PartResult:
    """1 if `lean` accepts the completion as a proof of the row's theorem, without `sorry` and with Lean's own axioms only; else 0.

    `project` is the folder of a built Lake project, whose libraries (Mathlib) can be imported. `header` is put before the header of every row.
    """
    require_answer(answer)
    expected = parse_statement(answer)
    try:
        body = extract_lean_proof(completion, expected)
    except RefusedProof as error:
        return PartResult(0.0, details=f"refused: {error}")
    source, line = lean_source(expected, body)
    runner = lean_runner(project)
    ended = runner.run(f"{header}\n{source}" if header else source)
    is_right, message = lean_verdict(ended, expected.name, line + (header.count("\n") + 1 if header else 0))
    details = message[:MAX_MESSAGE_CHARS].encode(errors="replace").decode()
    return PartResult(float(is_right), details=details, timed_out=ended.reason in ("time", "cpu"))


def lean_verdict(ended: RunResult, name: str, line: int) -> tuple[bool, str]:
    """Whether a run of Lean accepted the theorem `name`, and why not. `line` has the only `#print axioms`.

    Lean's output is one JSON object for each message (`--json`). Anything else in it comes from the proof, and refuses it.
    """
    if ended.reason in LIMIT_MESSAGES:
        return False, LIMIT_MESSAGES[ended.reason]
    axioms: list[str] = []
    for row in ended.output.splitlines():
        try:
            message = json.loads(row)
            severity, text, at = message["severity"], str(message["data"]), int(message["pos"]["line"])
        except (ValueError, KeyError, TypeError, RecursionError):
            return False, f"lean printed something that is no message: {row}"
        if severity == "error":
            return False, f"line {at}: {text}"
        if "sorry" in text:
            return False, f"line {at}: {text}"
        if at == line and severity == "information":
            axioms.append(text)
    if ended.status != 0:
        return False, f"lean exited with status {ended.status}: {ended.errors}"
    if len(axioms) != 1:
        return False, f"lean said {len(axioms)} times which axioms are used, and once is expected"
    named = _AXIOMS.search(axioms[0]) or _NO_AXIOMS.search(axioms[0])
    if named is None or named[1].rpartition(".")[2] != name.rpartition(".")[2]:
        return False, f"lean did not say which axioms {name} uses: {axioms[0]}"
    used = set() if named.re is _NO_AXIOMS else {axiom.strip() for axiom in named[2].split(",")}
    if used - ALLOWED_AXIOMS:
        return False, f"the proof uses the axioms {', '.join(sorted(used - ALLOWED_AXIOMS))}"
    return True, "accepted"


# --- the user's lean -------------------------------------------------------------------------------------------------


@functools.cache
def lean_prefix() -> Path:
    """The folder of the Lean that is on PATH, as Lean says it (elan's `lean` is a link); UserError if there is none."""
    found = shutil.which("lean")
    if found is None:
        raise UserError(
            "the lean reward needs `lean` on PATH: install Lean 4 with elan (https://github.com/leanprover/elan), or use the "
            "reward `proof`, which needs nothing"
        )
    try:
        done = subprocess.run(
            [found, "--print-prefix"], capture_output=True, text=True, timeout=PREFIX_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{found} --print-prefix failed: {error}") from error
    prefix = Path(done.stdout.strip())
    if done.returncode != 0 or not (prefix / "bin/lean").is_file():
        raise UserError(f"{found} --print-prefix gives no folder with bin/lean in it: {done.stdout}{done.stderr}")
    return prefix


def library_folders(project: str | None) -> tuple[str, ...]:
    """The folders of compiled libraries of a Lake project and of the packages it depends on; UserError if there are none."""
    if project is None:
        return ()
    roots = [Path(project), *sorted(Path(project, ".lake/packages").glob("*"))]
    candidates = [root / ".lake/build/lib" / inner for root in roots for inner in ("lean", "")]
    found = {
        path.parents[2] if path.name == "lean" else path.parents[1]: path
        for path in reversed(candidates)
        if path.is_dir()
    }
    if not found:
        raise UserError(
            f"lean: project {project!r} has no compiled libraries (.lake/build/lib): run `lake build` there"
        )
    return tuple(sorted(str(path.resolve()) for path in found.values()))


class LeanRunner:
    """Holds the sandbox in which this process runs Lean."""

    def __init__(
        self, project: str | None, timeout_s: float = 10.0, memory_gib: float = 2.0, is_isolated: bool = True
    ) -> None:
        from burnish.sandbox.client import Sandbox
        from burnish.sandbox.limits import Limits

        libraries = library_folders(project)
        environment = {"LEAN_PATH": "{data}"} if libraries else {}
        # One thread: the sandbox counts threads as processes.
        toolchain = Toolchain(str(lean_prefix()), "bin/lean", libraries, ("-j1", "--json"), environment)
        limits = Limits(memory_bytes=int(memory_gib * 2**30))
        self.sandbox = Sandbox(limits, is_isolated, SLACK_SHARE * timeout_s, toolchain)
        self._launcher = toolchain.launcher(is_isolated, FILE_NAME)
        self._wall_s = PROGRAM_SHARE * timeout_s

    def run(self, source: str) -> RunResult:
        """Have Lean check a file."""
        return run_with_retry(lambda wall_s: self.sandbox.run_stdio(self._launcher, source, wall_s), self._wall_s)


@functools.cache
def lean_runner(project: str | None) -> LeanRunner:
    """The runner of this process, created with the first proof."""
    return LeanRunner(project, **runner_settings())


def check_lean(options: Mapping[str, Any], where: str) -> None:
    """Raise a UserError before a run starts if Lean or the project's libraries are missing."""
    for name, kind in (("project", str | None), ("header", str)):
        if name in options and not isinstance(options[name], kind):
            raise UserError(f"{where}: {name} should be text, got {options[name]!r}")
    try:
        lean_prefix()
        library_folders(options.get("project"))
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
