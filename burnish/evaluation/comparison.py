"""Compares two evaluations of the same questions, B against A, question by question.

The question is the unit: each has one difference, between two means over samples. So the interval and the test hold for one
greedy sample per question and for many samples. In the table, a question counts as right if more than half of its samples
are right. Questions that only one evaluation has are counted and left out. Nothing is random.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burnish.config.errors import UserError
from burnish.evaluation.completions import SUFFIXES, read_completions
from burnish.evaluation.output_paths import COMBINED_NAME, read_result
from burnish.evaluation.result import Row, aligned_lines, by_question, estimate_json, interval_text
from burnish.evaluation.search_results import summarise_searches
from burnish.evaluation.statistics import Z95, Estimate, mean_at_k, student_t95

MAX_DENOMINATOR = 1000
"""Finest grid of differences in the exact test. Sample counts rarely have a larger common multiple."""
IGNORED_SETTINGS = ("model.content", "model.dtype", "keep_trees")
"""Settings that may differ between two evaluations without a note."""


def mean_difference(values: Sequence[float]) -> Estimate:
    """Return the mean difference with its 95% interval.

    If every difference is -1, 0 or 1 (one sample each), this is the adjusted interval of Bonett and Price (2012). It adds one
    gained and one lost question, and so is valid if few questions changed. Otherwise it is Student's interval over questions.
    """
    n = len(values)
    if not n:
        raise ValueError("no questions in common")
    mean = math.fsum(values) / n
    if all(v in (-1, 0, 1) for v in values):
        centre = math.fsum(values) / (n + 2)
        variance = (math.fsum(v * v for v in values) + 2) / (n + 2) - centre * centre
        half = Z95 * math.sqrt(variance / (n + 2))
        return Estimate(mean, max(-1.0, min(mean, centre - half)), min(1.0, max(mean, centre + half)))
    if n == 1:
        return Estimate(mean, -1.0, 1.0)  # one difference has no variance
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = student_t95(n - 1) * math.sqrt(variance / n)
    return Estimate(mean, max(-1.0, mean - half), min(1.0, mean + half))


def sign_flip_test(values: Sequence[float]) -> float:
    """Return the two-sided p-value of the permutation test that swaps the models on each question at random.

    If the models are equally good, each difference could have the other sign. The probability that the sum with random
    signs is at least as far from 0 is exact over all 2^n choices: one question after the other is added to the
    distribution of the sum. With one sample each, this is McNemar's exact test.
    """
    steps = _as_integer_steps([v for v in values if v])
    if not steps:
        return 1.0
    observed, total = abs(sum(steps)), sum(map(abs, steps))
    chance = np.zeros(2 * total + 1)  # of each sum from -total to total
    chance[total] = 1.0
    reach = 0
    for step in map(abs, steps):
        old = chance[total - reach : total + reach + 1] / 2
        reach += step
        new = np.zeros(2 * reach + 1)
        new[: len(old)] += old
        new[2 * step :] += old
        chance[total - reach : total + reach + 1] = new
    tails = chance[: total - observed + 1].sum() + chance[total + observed :].sum()
    return min(1.0, float(tails if observed else 1.0))


def _as_integer_steps(values: Sequence[float]) -> list[int]:
    """Return the values as integer multiples of 1/d, with d their common denominator, at most `MAX_DENOMINATOR`."""
    exact = [Fraction(v).limit_denominator(MAX_DENOMINATOR) for v in values]
    common = math.lcm(*(f.denominator for f in exact)) if exact else 1
    scale = min(common, MAX_DENOMINATOR)
    return [round(f * scale) for f in exact]


class CompletionsPair(NamedTuple):
    """The files of completions of one data set in both evaluations."""

    name: str
    a: Path
    b: Path


@dataclass(frozen=True)
class Comparison:
    """The differences between A and B."""

    num_questions: int
    """Questions with a score in both evaluations."""
    num_left_out: int
    a: Estimate
    b: Estimate
    difference: Estimate
    """B - A, paired by question."""
    p_value: float
    """Two-sided p-value of the sign-flip test; with one sample each, of McNemar's exact test."""
    both: int
    only_a: int
    only_b: int
    neither: int
    is_sampled: bool
    """Whether a question has several samples in either evaluation."""
    is_oracle: tuple[bool, bool] = (False, False)
    """Whether a strategy chose the completions of A, and those of B, by the expected answers."""
    changed: list[Row] = field(default_factory=list)
    """Questions whose mean differs, largest difference first."""


def find_pairs(a: Path, b: Path) -> list[CompletionsPair]:
    """Return the data sets that two results share. A result is an evaluation's folder, a file of completions or a result file."""
    files_a, files_b = _completion_files(a), _completion_files(b)
    if len(files_a) == len(files_b) == 1 and a.is_file() and b.is_file():
        return [CompletionsPair(next(iter(files_b)), *files_a.values(), *files_b.values())]
    names = [name for name in files_a if name in files_b]
    if not names:
        raise UserError(
            f"{a} has {', '.join(files_a)} and {b} has {', '.join(files_b)}: no data set in common; name two files of completions to compare them anyway"
        )
    return [CompletionsPair(name, files_a[name], files_b[name]) for name in names]


def compare(a: Sequence[Row], b: Sequence[Row]) -> Comparison:
    """Compare two lists of completions of the same questions."""
    groups_a, groups_b = _scored_by_question(a), _scored_by_question(b)
    ids = [question for question in groups_a if question in groups_b]
    _refuse_other_questions(groups_a, groups_b, ids)
    if not ids:
        raise UserError(
            "the two results have no question in common with an accuracy in both (graded rewards have one with --correct-at VALUE)"
        )
    groups = [[[row["accuracy"] for row in side[question]] for question in ids] for side in (groups_a, groups_b)]
    means = [[sum(group) / len(group) for group in side] for side in groups]
    changes = [y - x for x, y in zip(*means, strict=True)]
    right = [(x > 0.5, y > 0.5) for x, y in zip(*means, strict=True)]
    changed = [
        _changed_question(groups_a[question], groups_b[question], x, y)
        for question, x, y in zip(ids, *means, strict=True)
        if x != y
    ]
    return Comparison(
        num_questions=len(ids),
        num_left_out=len(by_question([*a, *b])) - len(ids),
        a=mean_at_k(groups[0]),
        b=mean_at_k(groups[1]),
        difference=mean_difference(changes),
        p_value=sign_flip_test(changes),
        both=right.count((True, True)),
        only_a=right.count((True, False)),
        only_b=right.count((False, True)),
        neither=right.count((False, False)),
        is_sampled=any(len(group) > 1 for side in groups for group in side),
        is_oracle=(_is_oracle(a), _is_oracle(b)),
        changed=sorted(changed, key=lambda row: -abs(row["difference"])),
    )


def _is_oracle(rows: Sequence[Row]) -> bool:
    found = summarise_searches(rows)
    return found is not None and found.is_oracle


def _oracle_label(is_oracle: bool) -> str:
    return "  (oracle)" if is_oracle else ""


def comparison_table(found: Comparison, pair: CompletionsPair) -> str:
    """Return the comparison as text."""
    d = found.difference
    test = "sign-flip test over questions" if found.is_sampled else "McNemar's exact test"
    rows = [
        (pair.name, f"{found.num_questions:,} questions" + (f" ({found.num_left_out:,} are only in one, or not scored)" if found.num_left_out else "")),
        ("A", f"{interval_text(found.a)}  {pair.a}{_oracle_label(found.is_oracle[0])}"),
        ("B", f"{interval_text(found.b)}  {pair.b}{_oracle_label(found.is_oracle[1])}"),
        ("B - A", f"{d.mean:+.3f}  (95% interval {d.low:+.3f} to {d.high:+.3f})  p = {found.p_value:.2g}, {test}"),
        ("both right", f"{found.both:,}" + ("  (right: more than half of the samples)" if found.is_sampled else "")),
        ("only A", f"{found.only_a:,}"),
        ("only B", f"{found.only_b:,}"),
        ("neither", f"{found.neither:,}"),
    ]  # fmt: skip
    return aligned_lines(rows)


def comparison_json(found: Comparison, pair: CompletionsPair) -> dict[str, Any]:
    """Return the comparison as plain values for JSON."""
    return {
        "a": {"completions": str(pair.a), **estimate_json(found.a), "oracle": found.is_oracle[0]},
        "b": {"completions": str(pair.b), **estimate_json(found.b), "oracle": found.is_oracle[1]},
        "difference": estimate_json(found.difference),
        "p_value": found.p_value,
        "num_questions": found.num_questions,
        "num_left_out": found.num_left_out,
        "both": found.both,
        "only_a": found.only_a,
        "only_b": found.only_b,
        "neither": found.neither,
        "num_changed": len(found.changed),
    }


def differing_settings(pair: CompletionsPair) -> list[str]:
    """Return the settings other than the model in which the two evaluations differ, if they have result files."""
    a, b = (read_result(path.with_suffix(".json")) for path in (pair.a, pair.b))
    if a is None or b is None:
        return []
    in_a, in_b = a["settings"], b["settings"]
    names = [k for k in sorted(in_a.keys() | in_b.keys()) if in_a.get(k) != in_b.get(k) and k not in IGNORED_SETTINGS]
    return [f"{name}: {in_a.get(name)!r} in A, {in_b.get(name)!r} in B" for name in names]


def _completion_files(path: Path) -> dict[str, Path]:
    """Return the files of completions of a path, by data set."""
    if path.is_dir():
        found = {p.stem: r for p in sorted(path.glob("*.json")) if p.stem != COMBINED_NAME and (r := read_result(p))}
        files = {name: path / result["completions"] for name, result in found.items()}
        if not files:
            raise UserError(f"{path} holds no finished evaluation: there is no <name>.json beside completions in it")
        return files
    if path.suffix == ".json" and (result := read_result(path)) is not None:
        return {path.stem: path.parent / result["completions"]}
    if path.suffix in SUFFIXES and path.is_file():
        return {path.stem: path}
    raise UserError(
        f"{path} is neither a folder that `burnish eval` wrote nor a file of completions ({', '.join(SUFFIXES)})"
    )


def read_pair(pair: CompletionsPair) -> tuple[list[Row], list[Row]]:
    """Read the completions of both evaluations."""
    return read_completions(pair.a), read_completions(pair.b)


def _scored_by_question(rows: Sequence[Row]) -> dict[str, list[Row]]:
    return by_question([row for row in rows if row["accuracy"] is not None])


def _refuse_other_questions(a: dict[str, list[Row]], b: dict[str, list[Row]], ids: Sequence[str]) -> None:
    for question in ids:
        answer_a, answer_b = a[question][0]["answer"], b[question][0]["answer"]
        if answer_a != answer_b:
            raise UserError(
                f"question {question} has the answer {answer_a!r} in A and {answer_b!r} in B: these are not the same questions"
            )


def _changed_question(a: list[Row], b: list[Row], mean_a: float, mean_b: float) -> Row:
    """Return a question whose mean changed, with a typical completion of each side."""

    def example(rows: list[Row], wanted: bool) -> str:
        return str(next((row for row in rows if (row["accuracy"] >= 1) is wanted), rows[0])["completion"])

    return {
        "id": a[0]["id"],
        "tags": a[0].get("tags", {}),
        "answer": a[0]["answer"],
        "a": mean_a,
        "b": mean_b,
        "difference": mean_b - mean_a,
        "prompt": a[0].get("prompt"),
        "a_completion": example(a, mean_a > mean_b),
        "b_completion": example(b, mean_b > mean_a),
    }
