from __future__ import annotations

import itertools
import math
import random
import re
import subprocess
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.data.tasks.arithmetic import evaluate_expression
from burnish.data.tasks.registry import make_demonstrations, make_task, score_answer
from burnish.data.tasks.task import final_answer, first_on_split, is_held_out
from burnish.rewards.verifiers import rule_scores

BUILT_IN = ("sort_digits", "addition", "countdown", "calculator", "knights_and_knaves")


def identity(name: str, row) -> object:
    """What identifies a problem, written again independently of the tasks' code."""
    if name == "sort_digits":
        return tuple(sorted(row.prompt[:-1]))
    if name == "addition":
        return frozenset(int(n) for n in row.prompt[:-1].split("+"))
    if name == "countdown":
        return (tuple(sorted(row.extra["numbers"])), row.answer)
    if name == "knights_and_knaves":  # without the names
        people = list(row.extra["kinds"])
        return re.sub("|".join(people), lambda found: str(people.index(found[0])), row.prompt)
    return row.prompt


@pytest.mark.parametrize("name", [*BUILT_IN, "reasoning-gym/basic_arithmetic", "reasoning-gym/gcd"])
def test_train_and_held_out_problems_never_overlap_whatever_the_seeds(name: str) -> None:
    if name.startswith("reasoning-gym/"):
        pytest.importorskip("reasoning_gym")
    count = 300
    train = {identity(name, make_task(name, {}, seed).row("train", i)) for seed in (0, 1) for i in range(count)}
    test = {identity(name, make_task(name, {}, seed).row("test", i)) for seed in (0, 2) for i in range(count)}
    assert len(train) > 200
    assert len(test) > 100
    assert not train & test


def test_every_multiset_of_digits_is_on_exactly_one_side_and_a_quarter_is_held_out() -> None:
    multisets = ["".join(c) for n in range(4, 8) for c in itertools.combinations_with_replacement("0123456789", n)]
    held_out = {m for m in multisets if is_held_out(f"sort_digits {m}")}
    assert len(multisets) == sum(math.comb(n + 9, n) for n in range(4, 8))
    assert 0.23 < len(held_out) / len(multisets) < 0.27
    task = make_task("sort_digits", {}, 5)
    assert all(
        (task.row(split, i).answer in held_out) == (split == "test") for split in ("train", "test") for i in range(300)
    )


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_row_depends_on_options_seed_split_and_index_alone(name: str) -> None:
    forward = [make_task(name, {}, 3).row("train", i) for i in range(20)]
    task = make_task(name, {}, 3)
    assert [task.row("train", i) for i in reversed(range(20))] == forward[::-1]
    assert [make_task(name, {}, 4).row("train", i).prompt for i in range(20)] != [r.prompt for r in forward]
    assert len({r.id for r in forward}) == 20


def test_rows_are_the_same_on_every_machine() -> None:
    assert make_task("sort_digits", {}, 0).row("train", 0).prompt == "116129>"
    assert make_task("addition", {}, 0).row("test", 0).prompt == "306+9="
    assert make_task("countdown", {}, 0).row("train", 0).extra["numbers"] == [11, 4, 11, 12]


def test_sort_digits_rows_have_the_stated_form_and_all_lengths_equally_often() -> None:
    task = make_task("sort_digits", {}, 1)
    for split in ("train", "test"):
        rows = [task.row(split, i) for i in range(1000)]
        for row in rows:
            assert row.prompt.endswith(">")
            assert row.answer == "".join(sorted(row.prompt[:-1]))
            assert row.extra == {"task": "sort_digits", "length": len(row.answer)}
        for length in range(4, 8):
            assert 200 < sum(r.extra["length"] == length for r in rows) < 300


def test_sort_digits_scores_exactly_the_sorted_digits() -> None:
    assert score_answer("sort_digits", " 005578\n", "005578", {}) == 1.0
    assert score_answer("sort_digits", "005578 ", "005578", {}) == 1.0
    for wrong in ("507508", "00557", "0055788", "5578", "", "005578>"):
        assert score_answer("sort_digits", wrong, "005578", {}) == 0.0


def test_flawed_demonstrations_are_right_as_often_as_stated_and_otherwise_copies() -> None:
    rows = make_demonstrations("sort_digits", {"num": 4000}, seed=0)
    assert len(rows) == 4000
    by_length: dict[int, list[bool]] = {4: [], 5: [], 6: [], 7: []}
    for row in rows:
        digits = row["prompt"][:-1]
        assert row["completion"] in (digits, "".join(sorted(digits)))
        assert not is_held_out("sort_digits " + "".join(sorted(digits)))
        by_length[len(digits)].append(row["completion"] == "".join(sorted(digits)))
    for length, share in {4: 0.8, 5: 0.6, 6: 0.4, 7: 0.2}.items():
        assert abs(sum(by_length[length]) / len(by_length[length]) - share) < 0.06  # 3.7 deviations of 1,000 throws


def test_a_yaml_file_says_how_often_demonstrations_are_right() -> None:
    lengths = {"min_digits": 2, "max_digits": 3, "num": 200}
    of_numbers, of_texts = (
        make_demonstrations("sort_digits", {**lengths, "right": right}, seed=0)
        for right in ({2: 0.5, 3: 1.0}, {"2": 0.5, "3": 1.0})
    )
    assert of_texts == of_numbers
    three = [row for row in of_texts if len(row["prompt"]) == 4]
    assert all(row["completion"] == "".join(sorted(row["prompt"][:-1])) for row in three)


def test_clean_and_verified_demonstrations_are_all_right_and_as_many_as_asked() -> None:
    for options in ({"clean": True, "min_digits": 4, "max_digits": 5}, {"verified": True}):
        rows = make_demonstrations("sort_digits", {"num": 300, **options}, seed=0)
        assert len(rows) == 300
        assert all(r["completion"] == "".join(sorted(r["prompt"][:-1])) for r in rows)
        assert {len(r["completion"]) for r in rows} == ({4, 5} if "clean" in options else {4, 5, 6, 7})


def test_demonstrations_are_2000_by_default_and_follow_the_seed() -> None:
    first = make_demonstrations("sort_digits", {}, seed=0)
    assert len(first) == 2000
    assert first == make_demonstrations("sort_digits", {}, seed=0)
    assert first != make_demonstrations("sort_digits", {}, seed=1)


def test_addition_is_asked_as_the_prompt_says() -> None:
    task = make_task("addition", {"prompt": "What is {a} + {b}?"}, 0)
    assert task.row("test", 0).prompt == "What is 306 + 9?"
    with pytest.raises(UserError, match=r"the prompt .* must contain"):
        make_task("addition", {"prompt": "add {a}!"}, 0)


def test_addition_adds() -> None:
    task = make_task("addition", {"min_digits": 2, "max_digits": 4}, 0)
    for i in range(200):
        row = task.row("train", i)
        a, b = row.prompt[:-1].split("+")
        assert int(a) + int(b) == int(row.answer)
        assert 2 <= min(len(a), len(b)) <= max(len(a), len(b)) <= 4
        assert task.score(f" {row.answer} ", row.answer, row.extra) == 1.0
        assert task.score(row.answer + "0", row.answer, row.extra) == 0.0


@pytest.mark.parametrize("options", [{}, {"min_numbers": 2, "max_numbers": 6, "max_number": 10}])
def test_every_countdown_problem_is_solved_by_its_own_solution(options: dict) -> None:
    task = make_task("countdown", options, 0)
    for split in ("train", "test"):
        for i in range(100):
            row = task.row(split, i)
            assert 1 <= row.answer <= 100
            assert task.score(row.extra["solution"], row.answer, row.extra) == 1.0
            assert task.score(f"thinking 1+1 <answer>{row.extra['solution']}</answer>", row.answer, row.extra) == 1.0
            assert set(row.prompt) <= set(task.alphabet or "")


def test_countdown_problems_of_two_signs_are_solved_with_them() -> None:
    task = make_task("countdown", {"signs": "+-"}, 0)
    assert all(not set("*/") & set(task.row("train", i).extra["solution"]) for i in range(50))
    with pytest.raises(UserError, match="signs should be some of"):
        make_task("countdown", {"signs": "/"}, 0)


NUMBERS = {"numbers": [3, 3, 8, 8]}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("8/(3-8/3)", 1.0),  # exact only in fractions: floats give 23.999999999999989
        ("8 / (3 - 8 / 3)", 1.0),
        ("3*8", 0.0),
        ("8+8+8", 0.0),
        ("8*3+8-8+3-3", 0.0),
        ("24", 0.0),
        ("8/(3-8/3) = 24", 0.0),
        ("8/(3-3)*8", 0.0),
        ("8**3//8-3", 0.0),
        ("-8/(8/3-3)", 0.0),
        ("", 0.0),
        ("__import__('os').system('true')", 0.0),
        ("9**9**9**9", 0.0),
        ("(" * 150, 0.0),
        ("1+" * 5000 + "1", 0.0),
        ("٣*٨", 0.0),
    ],
)
def test_countdown_scores_by_exact_arithmetic_and_executes_nothing(expression: str, expected: float) -> None:
    assert score_answer("countdown", expression, 24, NUMBERS) == expected


@given(
    st.recursive(
        st.integers(0, 50).map(str),
        lambda e: st.tuples(e, st.sampled_from("+-*"), e).map(lambda t: f"({t[0]}{t[1]}{t[2]})"),
        max_leaves=8,
    )
)
def test_countdown_arithmetic_agrees_with_python_on_whole_numbers(expression: str) -> None:
    result = evaluate_expression(expression)
    assert result is not None
    assert result[0] == Fraction(eval(expression))


@given(st.text(alphabet="0123456789+-*/() ", max_size=40))
def test_no_answer_makes_the_countdown_checker_raise(text: str) -> None:
    assert score_answer("countdown", text, 24, NUMBERS) in (0.0, 1.0)


def test_the_last_tagged_answer_counts() -> None:
    assert final_answer("<answer>1</answer> no, <answer> 2\n</answer>.") == "2"
    assert final_answer(" 3 ") == "3"


def test_gym_rows_score_by_the_librarys_checker_and_leave_global_randomness_alone() -> None:
    pytest.importorskip("reasoning_gym")
    task = make_task("reasoning-gym/chain_sum", {"max_terms": 3}, 0)
    random.seed(7)
    expected = random.random()
    random.seed(7)
    row = task.row("train", 0)
    assert random.random() == expected
    assert row.extra["task"] == "reasoning-gym/chain_sum"
    assert row.extra["metadata"]["num_terms"] <= 3
    assert score_answer(row.extra["task"], f"so <answer>{row.answer}</answer>", row.answer, row.extra) == 1.0
    assert score_answer(row.extra["task"], "zzz", row.answer, row.extra) == 0.0
    assert row == make_task("reasoning-gym/chain_sum", {"max_terms": 3}, 0).row("train", 0)


def test_gym_tasks_that_follow_the_hash_seed_are_refused_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("reasoning_gym")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with pytest.raises(UserError, match="PYTHONHASHSEED=0"):
        make_task("reasoning-gym/ransom_note", {}, 0)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert make_task("reasoning-gym/ransom_note", {}, 0).row("test", 0).answer in ("True", "False")


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install 'burnish\[tasks\]'"):
        make_task("reasoning-gym/gcd", {}, 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sort_digit", {}, "did you mean 'sort_digits'"),
        ("sort_digits", {"max_digit": 5}, "did you mean 'max_digits'"),
        ("sort_digits", {"min_digits": 6, "max_digits": 5}, "min_digits=6, max_digits=5"),
        ("sort_digits", {"min_digits": "4"}, "whole number, got '4'"),
        ("sort_digits", {"seed": 4}, "seed is not an option"),
        ("countdown", {"max_number": 0}, "4 or more"),
        ("reasoning-gym/chain_sums", {}, "did you mean 'chain_sum'"),
        ("reasoning-gym/chain_sum", {"size": 4}, "size is not an option"),
        ("reasoning-gym/chain_sum", {"terms": 4}, "unexpected keyword argument 'terms'"),
    ],
)
def test_wrong_task_names_and_options_say_what_is_right(name: str, options: dict, message: str) -> None:
    if name.startswith("reasoning-gym/"):
        pytest.importorskip("reasoning_gym")
    with pytest.raises(UserError, match=message):
        make_task(name, options, 0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("addition", {}, "has no demonstrations"),
        ("sort_digits", {"cleen": True}, "did you mean 'clean'"),
        ("sort_digits", {"max_digits": 8}, "of 8 digits"),
        ("sort_digits", {"right": dict.fromkeys(range(4, 8), 0.0), "verified": True}, "not all zero"),
        ("sort_digits", {"right": {4: 1.0}, "clean": True}, "either clean or right"),
    ],
)
def test_wrong_demonstration_options_are_errors(name: str, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_demonstrations(name, options, 0)


def test_a_task_with_a_single_problem_has_one_side_and_says_so_for_the_other() -> None:
    side, other = ("test", "train") if is_held_out("only") else ("train", "test")
    assert first_on_split(side, lambda attempt: ("only", attempt), "task") == 0
    with pytest.raises(UserError, match="too few different problems"):
        first_on_split(other, lambda attempt: ("only", attempt), "task")


def test_scoring_imports_neither_torch_nor_the_schema() -> None:
    code = (
        "import sys; from burnish.data.tasks.registry import score_answer; "
        "assert score_answer('addition', '3', '3', {}) == 1.0; "
        "assert not {'torch', 'transformers', 'pydantic', 'reasoning_gym'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_student_of_the_calculator_guesses_or_calls_and_only_the_last_parentheses_count() -> None:
    task = make_task("calculator", {}, 0)
    row = task.row("test", 0)
    assert eval(row.prompt[:-1]) == int(row.answer)
    rows = make_demonstrations("calculator", {"num": 400, "calls": 1.0, "slips": 0.0}, 0)
    for call, answer in zip(rows[::2], rows[1::2], strict=True):
        problem = call["prompt"][:-1]
        assert call["completion"] == f"[{problem}]"
        assert answer["prompt"] == f"{problem}=[{problem}]>{eval(problem)};"
        assert answer["completion"] == f"({eval(problem)})"
    guesses = make_demonstrations("calculator", {"num": 50, "calls": 0.0}, 0)
    assert all(guess["completion"][0] == "(" for guess in guesses)
    scores = [
        score_answer("calculator", text, "42", {})
        for text in ("(42)", "(1)(42)", "[6*7]>42;", "(42", "( 42)", "(42)(1)")
    ]
    assert scores == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    slips = make_demonstrations("calculator", {"num": 200, "calls": 1.0, "slips": 1.0}, 0)
    assert all(row["completion"] != f"[{row['prompt'][:-1]}]" for row in slips[::2])


def liars_solutions(prompt: str) -> list[dict[str, bool]]:
    """All solutions of a puzzle of knights and knaves, read from its text, independently of the task's code."""
    said = re.findall(r'(\w+) says, "([^"]+)"\.', prompt)
    found = []
    for kinds in itertools.product((False, True), repeat=len(said)):
        knights = dict(zip((name for name, _ in said), kinds, strict=True))

        def claim(text: str, knights: dict[str, bool] = knights) -> bool:
            name, kind = text.split(" is a ")
            return knights[name] == (kind == "knight")

        def truth(text: str, claim=claim) -> bool:
            if text.startswith("if "):
                left, right = text[3:].split(" then ")
                return not claim(left) or claim(right)
            for word, meaning in ((" if and only if ", "__eq__"), (" and ", "__and__"), (" or ", "__or__")):
                if word in text:
                    left, right = text.split(word)
                    return bool(getattr(claim(left), meaning)(claim(right)))
            return claim(text)

        if all(truth(text) == knights[name] for name, text in said):
            found.append(knights)
    return found


def test_knights_and_knaves_have_one_solution_which_alone_scores() -> None:
    task = make_task("knights_and_knaves", {"max_people": 5}, 0)
    rows = [task.row(split, i) for split in ("train", "test") for i in range(30)]
    assert {row.extra["length"] for row in rows} == {3, 4, 5}
    for row in rows:
        (knights,) = liars_solutions(row.prompt)
        assert row.extra["kinds"] == {name: "knight" if kind else "knave" for name, kind in knights.items()}
        assert task.score(f"<think>hm</think> <answer>\n{row.answer}\n</answer>", row.answer, row.extra) == 1.0
        first = row.answer.splitlines()[0]
        swapped = first.replace("knight", "kn_").replace("knave", "knight").replace("kn_", "knave")
        for wrong in (row.answer.replace(first, swapped), row.answer.replace(first, ""), row.answer + "\n" + swapped):
            assert task.score(wrong, row.answer, row.extra) == 0.0


def test_logic_rl_scores_an_answer_that_the_tasks_checker_judges() -> None:
    row = make_task("knights_and_knaves", {"max_people": 3}, 0).row("train", 0)
    asked = {"rule": "logic_rl", "checker": "task"}
    right, wrong = (f"<think>hm</think><answer>{text}</answer>" for text in (row.answer, "(1) Nobody is a knave"))
    assert rule_scores(right, row.answer, row.extra, **asked) == 3.0
    assert rule_scores(wrong, row.answer, row.extra, **asked) == -0.5
    assert rule_scores(row.answer, row.answer, row.extra, **asked) == -3.0
