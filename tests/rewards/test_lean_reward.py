"""The reward `lean`: statements cannot be changed, cheats are refused, and `lean` runs in the sandbox (a fake one, and a real one if installed)."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from burnish.cli.doctor import lean_row
from burnish.config.data import Reward
from burnish.config.errors import UserError
from burnish.data.row import Row
from burnish.rewards import lean_reward
from burnish.rewards.lean_reward import (
    LeanRunner,
    RefusedProof,
    extract_lean_proof,
    lean_source,
    lean_verdict,
    library_folders,
    parse_statement,
)
from burnish.rewards.score_types import ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.sandbox.client import RunResult

STATEMENT = "theorem swap (p q : Prop) (h : p ∧ q) : q ∧ p"
ROW = f"import Mathlib\nopen Nat\n\n{STATEMENT} := by sorry"
EXPECTED = parse_statement(ROW)
PROOF = "by\n  exact ⟨h.2, h.1⟩"


@pytest.mark.parametrize("ending", ["", " :=", " := by", " := by\n  sorry", " := sorry"])
def test_a_statement_is_read_without_its_proof(ending: str) -> None:
    found = parse_statement(f"import Mathlib\nopen Nat\n\n{STATEMENT}{ending}")
    assert (found.header, found.statement, found.name) == ("import Mathlib\nopen Nat", STATEMENT, "swap")


@pytest.mark.parametrize("text", ["2 + 2 = 4", "theorem a : True := by sorry\ntheorem b : True := by sorry"])
def test_a_row_without_exactly_one_theorem_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="should end with one Lean theorem"):
        parse_statement(text)


@pytest.mark.parametrize(
    "completion",
    [
        PROOF,
        f":= {PROOF}",
        f"```lean4\n{STATEMENT} := {PROOF}\n```",
        f"<think>sorry</think>Here:\n```lean\nimport Mathlib\ntheorem swap (p q : Prop)\n    (h : p ∧ q) : q ∧ p := {PROOF}\n```\nDone.",
        f"/- sorry /- nested -/ -/\n{STATEMENT} := {PROOF} -- no sorry",
    ],
)
def test_a_proof_is_taken_alone_and_put_behind_the_statement_of_the_row(completion: str) -> None:
    proof = extract_lean_proof(completion, EXPECTED)
    source, line = lean_source(EXPECTED, proof)
    assert source.startswith(f"import Mathlib\nopen Nat\n\n{STATEMENT} := by\n  exact ⟨h.2, h.1⟩")
    assert source.splitlines()[line - 1] == "#print axioms swap"
    assert "sorry" not in source


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("by sorry", "may not contain 'sorry'"),
        ("by exact sorryAx _", "may not contain 'sorryAx'"),
        ("by native_decide", "may not contain 'native_decide'"),
        ("by admit", "may not contain 'admit'"),
        ("foo\naxiom foo : q ∧ p", "may not contain 'axiom'"),
        ("by trivial\nunsafe def x := 1", "may not contain 'unsafe'"),
        ('by trivial\n#eval IO.println "x"', "may not contain '#e'"),
        ('by trivial\nmacro "#print" "axioms" n:ident : command => `(#eval 1)', "may not contain 'macro'"),
        ("by trivial\nmacro_rules | `(x) => `(y)", "may not contain 'macro_rules'"),
        ('by trivial\nnotation3 "q" => True', "may not contain 'notation3'"),
        ("by run_tac Lean.Elab.admitGoal (← getMainGoal)", "may not contain 'run_tac'"),
        ("by exact Lean.ofReduceBool _ _ rfl", "may not contain 'Lean'"),
        ("by exact _root_.Lean.ofReduceBool _ _ rfl", "may not contain 'Lean'"),
        ("by\n  .run_tac foo", "may not contain 'run_tac'"),  # `.` is a bullet
        ("by\n  .set_option debug.skipKernelTC true in trivial", "may not contain 'set_option'"),
        ('id ..macro "x" : term => `(y)', "may not contain 'macro'"),
        ('f 5macro "x" : term => `(y)', "may not contain '5m'"),
        ('f 0xamacro "x" : term => `(y)', "may not contain '0xam'"),
        ('f 1.macro "x" : term => `(y)', "may not contain 'macro'"),
        ("f 'a'macro \"x\" : term => `(y)", "may not contain 'macro'"),
        ('x⁻¹macro "x" : term => `(y)', "may not contain 'macro'"),
        ("by set_option maxRecDepth 9 in trivial", "may not contain 'set_option'"),
        ("by trivial\n@[simp] theorem", "may not contain '@['"),
        ("«theorem»", "may not contain '«'"),
        ("theorem swap (p q : Prop) (h : p ∧ q) : True := trivial", "the statement is not the one of the row"),
        (
            f"theorem other : True := trivial\n{STATEMENT.replace('q ∧ p', 'p ∧ q')} := h",
            "the statement is not the one",
        ),
        (f"{STATEMENT} := ", "there is no proof"),
        ("/- by trivial", "there is no proof"),
    ],
)
def test_a_proof_that_may_cheat_is_refused_before_lean_runs(completion: str, reason: str) -> None:
    with pytest.raises(RefusedProof) as refused:
        extract_lean_proof(completion, EXPECTED)
    assert reason in str(refused.value)


def test_names_that_only_look_like_forbidden_words_are_allowed_and_a_stray_mark_drops_nothing() -> None:
    proof = (
        "by\n  rw [abs_def, eval_add, Nat.sub_def, h.end', open', s.prefix, theorem_of_x]\n  exact x -/ y 0x1F 1e5 h.2"
    )
    assert extract_lean_proof(proof, EXPECTED) == proof
    assert extract_lean_proof("by /- a -- b -/ simp -- /- c\n  rfl", EXPECTED) == "by   simp  \n  rfl"


def message(line: int, severity: str, text: str) -> str:
    return json.dumps({"severity": severity, "pos": {"line": line, "column": 0}, "data": text}) + "\n"


NONE = "'swap' does not depend on any axioms"
THREE = "'swap' depends on axioms: [propext,\n Classical.choice,\n Quot.sound]"


@pytest.mark.parametrize(
    ("output", "is_right", "reason"),
    [
        (message(9, "information", NONE), True, "accepted"),
        (message(9, "information", THREE), True, "accepted"),
        (message(5, "warning", "unused variable") + message(9, "information", NONE), True, "accepted"),
        (message(9, "information", "'swap' depends on axioms: [sorryAx]"), False, "sorryAx"),
        (message(9, "information", "'swap' depends on axioms: [propext, cheat]"), False, "uses the axioms cheat"),
        (message(5, "warning", "declaration uses 'sorry'") + message(9, "information", NONE), False, "uses 'sorry'"),
        (message(5, "error", "unsolved goals") + message(9, "information", NONE), False, "line 5: unsolved goals"),
        (message(7, "information", NONE), False, "0 times"),  # printed at another line
        (message(9, "information", NONE) * 2, False, "2 times"),
        (message(9, "information", "'swop' does not depend on any axioms"), False, "did not say which axioms swap"),
        ("", False, "0 times"),
        (f"{NONE}\n", False, "no message"),
        ("[]\n" + message(9, "information", NONE), False, "no message"),
    ],
)
def test_only_leans_own_messages_at_the_right_line_accept_a_proof(output: str, is_right: bool, reason: str) -> None:
    found, said = lean_verdict(RunResult("ended", 0, output, "", []), "swap", 9)
    assert (found, reason in said) == (is_right, True), said


def test_theorems_with_a_prime_or_universes_in_their_name_can_be_proved() -> None:
    assert parse_statement("theorem swap'.{u} (x : Type u) : x = x").name == "swap'"
    output = message(9, "information", NONE.replace("'swap'", "'Foo.swap''"))
    assert lean_verdict(RunResult("ended", 0, output, "", []), "swap'", 9)[0] is True
    assert lean_verdict(RunResult("ended", 0, output, "", []), "swap", 9)[0] is False


def test_a_limit_or_a_bad_exit_is_no_proof() -> None:
    good = message(9, "information", NONE)
    assert lean_verdict(RunResult("time", None, good, "", []), "swap", 9) == (False, "out of time")
    assert lean_verdict(RunResult("ended", 1, good, "broke", []), "swap", 9)[0] is False


# --- a fake lean in the sandbox --------------------------------------------------------------------------------------

FAKE_LEAN = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
static char text[1 << 20];
int main(int count, char **words) {
  if (count == 2 && !strcmp(words[1], "--print-prefix")) { puts(PREFIX); return 0; }
  if (count == 2 && !strcmp(words[1], "--version")) { puts("Lean (version 4.0.0, fake)"); return 0; }
  if (count != 4 || strcmp(words[1], "-j1") || strcmp(words[2], "--json")) return 7;
  char self[500] = "";
  if (readlink("/proc/self/exe", self, sizeof self - 1) < 0) return 8;
  FILE *file = fopen(words[3], "r");
  if (!file) return 9;
  fread(text, 1, sizeof text - 1, file);
  int line = 1;
  char *at = strstr(text, "#print axioms");
  if (!at) return 10;
  for (char *c = text; c < at; c++) line += *c == '\n';
  if (strstr(text, "wait")) for (;;) { }
  if (strstr(text, "fork")) for (;;) fork();
  int has_network = socket(AF_INET, SOCK_STREAM, 0) >= 0;
  int has_files = access(SECRET, R_OK) == 0 || access("/etc/passwd", R_OK) == 0;
  int has_library = !strstr(text, "library") || (getenv("LEAN_PATH") && access(getenv("LEAN_PATH"), R_OK) == 0);
  if (!strstr(text, "exact") || !has_library)
    printf("{\"severity\":\"error\",\"pos\":{\"line\":3,\"column\":0},\"data\":\"unsolved goals\"}\n");
  printf("{\"severity\":\"information\",\"pos\":{\"line\":%d,\"column\":0},\"data\":\"'swap' depends on axioms: [%s]\"}\n", line,
         has_network ? "network" : has_files ? "files" : strncmp(self, "/toolchain/", 11) ? self : "propext");
  return 0;
}
"""


@pytest.fixture
def fake_lean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the fake lean")
    prefix = tmp_path / "lean"
    (prefix / "bin").mkdir(parents=True)
    (tmp_path / "fake.c").write_text(FAKE_LEAN)
    texts = [f'-DPREFIX="{prefix}"', f'-DSECRET="{tmp_path / "secret"}"']
    subprocess.run([compiler, *texts, "-w", "-o", prefix / "bin/lean", tmp_path / "fake.c"], check=True)
    (tmp_path / "secret").write_text("x")
    monkeypatch.setenv("PATH", f"{prefix / 'bin'}:/usr/bin:/bin")
    lean_reward.lean_prefix.cache_clear()
    yield prefix
    lean_reward.lean_prefix.cache_clear()


def scored(completions: list[str], **options: Any) -> list[Any]:
    row = f"{STATEMENT} := by sorry"
    requests = [ScoreRequest(str(i), "?", text, "s", row, {}) for i, text in enumerate(completions)]
    config = Reward(parts=[{"name": "lean", "options": options}], workers=1, timeout_s=3)
    with Rewards(config, None) as rewards:
        rewards.check([Row("r", "?", "s", row)])
        return rewards.score(requests)


def test_lean_runs_in_the_sandbox_without_network_or_files_and_under_its_limits(fake_lean: Path) -> None:
    scores = scored([PROOF, "by simp", "by sorry", "by exact wait", "by exact fork"])
    assert [score.reward for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0], [score.details for score in scores]
    said = [score.details["lean"] for score in scores]
    assert said[:3] == ["accepted", "line 3: unsolved goals", "refused: a proof may not contain 'sorry'"]
    assert said[3] in ("out of time", "out of CPU time")
    assert said[4] == "too many processes"
    assert [score.accuracy for score in scores] == [1.0, 0.0, 0.0, 0.0, 0.0]
    row = lean_row()
    assert (row.mark, "4.0.0, fake" in row.text) == ("ok", True)


def test_a_lake_project_gives_its_libraries_to_lean(fake_lean: Path, tmp_path: Path) -> None:
    (tmp_path / "project/.lake/packages/mathlib/.lake/build/lib/lean").mkdir(parents=True)
    project = str(tmp_path / "project")
    assert library_folders(project) == (str(tmp_path / "project/.lake/packages/mathlib/.lake/build/lib/lean"),)
    runner = LeanRunner(project)
    source, line = lean_source(EXPECTED, "by exact library")
    try:
        assert lean_verdict(runner.run(source), "swap", line) == (True, "accepted")
    finally:
        runner.sandbox.close()
    with pytest.raises(UserError, match="run `lake build` there"):
        library_folders(str(tmp_path))


def test_without_lean_a_run_does_not_start_and_doctor_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lean_reward.lean_prefix.cache_clear()
    with pytest.raises(UserError, match="needs `lean` on PATH"):
        Rewards(Reward(parts=["lean"]), None)
    assert lean_row().mark == "--"
    lean_reward.lean_prefix.cache_clear()


@pytest.mark.skipif(shutil.which("lean") is None, reason="no `lean` on PATH")
def test_a_real_lean_accepts_a_proof_and_refuses_a_wrong_one() -> None:
    row = f"{STATEMENT} := by sorry"
    requests = [ScoreRequest(str(i), "?", text, "s", row, {}) for i, text in enumerate([PROOF, "by exact h"])]
    with Rewards(Reward(parts=["lean"], workers=1, timeout_s=60, memory_gib=8), None) as rewards:
        assert [score.reward for score in rewards.score(requests)] == [1.0, 0.0]
