"""A policy that goes astray is named within ten steps, with what to try; one that learns is left in peace.

The numbers are of real runs (`bench/health_runs.py` makes and records them).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench.health_runs import RUNS, make
from burnish.run.health.mismatch_causes import HealthContext
from burnish.run.health.monitor import POLICY_RECOVERY_STEPS, HealthMonitor
from burnish.run.health.policy_rules import NUM_FIRST_STEPS, POLICY_RULES, MetricHistory

FOLDER = Path(__file__).parent / "health_runs"
Steps = list[dict[str, Any]]


def recorded(name: str) -> tuple[Steps, HealthContext]:
    content = json.loads((FOLDER / f"{name}.json").read_text())
    columns = content["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return [{k: v for k, v in row.items() if v is not None} for row in rows], HealthContext(
        selection=content["selection"]
    )


def said_of(steps: Steps, facts: HealthContext) -> list[tuple[int, str]]:
    health = HealthMonitor()
    return [(row["step"], line) for row in steps for line in health.check(row["step"], row, facts)]


def first(steps: Steps, holds: Callable[[int], bool]) -> int:
    """The step at which something begins: the first place where it holds."""
    return int(next(row["step"] for k, row in enumerate(steps) if holds(k)))


def values(steps: Steps, name: str) -> list[float]:
    return [row.get(name, float("nan")) for row in steps]


def entropy_halved(steps: Steps) -> int:
    entropy = values(steps, "actor/entropy")
    return first(
        steps,
        lambda k: k >= NUM_FIRST_STEPS and median(entropy[k - 2 : k + 1]) < 0.5 * median(entropy[:NUM_FIRST_STEPS]),
    )


def format_paid(steps: Steps) -> int:
    return first(steps, lambda k: steps[k]["reward/part/format"] > 0.1)


def length_grown(steps: Steps) -> int:
    return first(steps, lambda k: steps[k]["rollout/length_mean"] > 1.5 * steps[0]["rollout/length_mean"])


def all_solved(steps: Steps) -> int:
    zero = values(steps, "rollout/zero_signal")
    return first(steps, lambda k: k >= 2 and min(zero[k - 2 : k + 1]) >= 0.9)


def nothing_earned(steps: Steps) -> int:
    return first(steps, lambda k: steps[k]["reward/mean"] == 0)


FAILURES: dict[str, tuple[Callable[[Steps], int], str]] = {
    "entropy_collapse": (entropy_halved, "entropy collapse: "),
    "format_hacking": (format_paid, "format hacking: "),
    "length_explosion": (length_grown, "length explosion: "),
    "all_solved": (all_solved, "all groups solved: "),
    "broken_policy": (nothing_earned, "the policy broke: "),
}
LARGE = ["gsm8k"]
"""Recorded on a GPU: GRPO of a model of 1.5 billion parameters on GSM8K, whose answers are right 53% of the time at first and 77% in the end."""
HEALTHY = [name for name in RUNS if name.startswith("healthy")]


def check_named(name: str, steps: Steps, said: list[tuple[int, str]]) -> None:
    onset_of, words = FAILURES[name]
    onset = onset_of(steps)
    mine = [(step, line) for step, line in said if f"likely cause: {words}" in line]
    assert len(mine) == 1, said
    step, line = mine[0]
    assert onset <= step <= onset + 10, (onset, line)
    assert "; try: " in line


def test_there_is_a_recording_and_a_judgement_of_every_run() -> None:
    assert set(RUNS) == {*FAILURES, *HEALTHY}
    assert {path.stem for path in FOLDER.glob("*.json")} == {*RUNS, *LARGE}
    assert len(HEALTHY) == 3


@pytest.mark.parametrize("name", FAILURES)
def test_an_induced_failure_is_named_once_within_ten_steps_of_its_beginning(name: str) -> None:
    steps, facts = recorded(name)
    check_named(name, steps, said_of(steps, facts))


@pytest.mark.parametrize("name", [*HEALTHY, *LARGE])
def test_nothing_is_said_of_a_healthy_run(name: str) -> None:
    steps, facts = recorded(name)
    assert len(steps) >= 60
    assert said_of(steps, facts) == []


@pytest.mark.parametrize("name", [*FAILURES, *HEALTHY])
def test_no_failure_is_taken_for_another_at_its_beginning(name: str) -> None:
    """The first line on how the policy behaves is the one on what was done to it."""
    causes = {behaviour.cause for behaviour in POLICY_RULES}
    said = [line for _, line in said_of(*recorded(name)) if any(cause in line for cause in causes)]
    assert [FAILURES[name][1] in said[0]] == [True] if name in FAILURES else said == []


def test_a_run_that_goes_on_says_what_one_that_never_stopped_says() -> None:
    for name in FAILURES:
        steps, facts = recorded(name)
        whole = said_of(steps, facts)
        for stop in (3, 8, 20, 40):
            health = HealthMonitor()
            health.recall([{"step": 0, "validation/greedy/accuracy": 0.5}, *steps[:stop]], facts)
            later = [(row["step"], line) for row in steps[stop:] for line in health.check(row["step"], row, facts)]
            assert later == [(step, line) for step, line in whole if step > stop]


def test_a_real_run_that_is_paid_for_words_is_told_of_its_length(tmp_path: Path) -> None:
    steps, said, _ = make(
        "length_explosion",
        tmp_path,
        ["training.steps=8", "warm_start.updates=60", "rollout.max_tokens=24", "rollout.prompts=8"],
    )
    lines = [(int(line.split("step ")[1].split(":")[0]), line) for line in said]
    check_named("length_explosion", steps, lines)


@pytest.mark.slow  # about ten seconds each
@pytest.mark.parametrize("name", RUNS)
def test_every_run_made_anew_is_judged_as_its_recording(name: str, tmp_path: Path) -> None:
    steps, said, _ = make(name, tmp_path)
    lines = [(int(line.split("step ")[1].split(":")[0]), line) for line in said]
    if name in FAILURES:
        check_named(name, steps, lines)
    else:
        assert lines == []


# --- one by one --------------------------------------------------------------------------------------------------------


def told(**courses: tuple[float, float]) -> set[str]:
    """Which behaviours are seen of numbers that went from one value to another over thirty steps."""
    names = {"entropy": "actor/entropy", "length": "rollout/length_mean", "accuracy": "reward/accuracy"}
    names |= {"zero": "rollout/zero_signal", "clip": "actor/pg_clipfrac", "norm": "actor/grad_norm"}
    names |= {"reward": "reward/mean", "format": "reward/part/format"}
    names |= {"information": "collapse/mutual_information", "repeated": "collapse/repeated_answers"}
    usual = {
        "entropy": (0.5, 0.4),
        "length": (100, 110),
        "accuracy": (0.4, 0.5),
        "zero": (0.2, 0.3),
        "reward": (0.4, 0.5),
    }
    past, seen = MetricHistory(), set()
    for k in range(30):
        share = min(1.0, max(0.0, (k - 9) / 10))
        past.add({names[n]: a + share * (b - a) for n, (a, b) in {**usual, **courses}.items()})
        seen |= {behaviour.name for behaviour in POLICY_RULES if behaviour.sees(past)}
    return seen


def test_each_behaviour_is_told_from_what_explains_it() -> None:
    assert told() == set()
    assert told(entropy=(0.5, 0.05), accuracy=(0.4, 0.4)) == {"entropy collapse"}
    assert told(entropy=(0.5, 0.05), accuracy=(0.4, 0.97)) == set(), "sure because it knows"
    assert told(length=(100, 300), accuracy=(0.4, 0.4)) == {"length explosion"}
    assert told(length=(100, 300), accuracy=(0.4, 0.8)) == set(), "longer and better"
    assert told(format=(0.1, 0.9), accuracy=(0.4, 0.1)) == {"format hacking"}
    assert told(format=(0.1, 0.9), accuracy=(0.4, 0.4)) == set(), "the form comes first"
    assert told(format=(0.1, 0.9), accuracy=(0.4, 0.7)) == set()
    assert told(reward=(0.4, 1.4), accuracy=(0.4, 0.1)) == {"format hacking"}, "without parts"
    assert told(zero=(0.5, 1.0), accuracy=(0.8, 1.0)) == {"all groups solved"}
    assert told(zero=(0.5, 1.0), accuracy=(0.1, 0.0), reward=(0.1, 0.0)) >= {"broken policy"}
    assert told(accuracy=(0.6, 0.2), reward=(0.6, 0.2)) == {"lost ground"}
    assert told(zero=(1.0, 1.0), accuracy=(0.0, 0.0), reward=(0.0, 0.0)) == {"nothing solved"}
    assert told(entropy=(0.5, 3.0), accuracy=(0.4, 0.28)) == {"noise"}
    assert told(information=(0.3, 0.02), accuracy=(0.4, 0.4)) == {"template collapse"}
    assert told(information=(0.3, 0.2), repeated=(0.1, 0.3)) == set()
    assert told(repeated=(0.1, 0.8), accuracy=(0.4, 0.4)) == {"template collapse"}
    assert told(repeated=(0.9, 0.9)) == set(), "a task with few answers"
    assert told(information=(0.3, 0.02), accuracy=(0.4, 0.97)) == set(), "one answer is right for all"
    assert told(information=(0.3, 0.06), entropy=(0.5, 0.05), accuracy=(0.4, 0.4)) == {"entropy collapse"}
    assert told(clip=(0.1, 0.5)) == {"large steps"}
    assert told(norm=(0.5, 20.0)) == {"gradient jump"}


def test_numbers_that_were_never_measured_are_never_out_of_range() -> None:
    past = MetricHistory()
    for _ in range(30):
        past.add({"reward/mean": 0.5, "odd": float("nan")})
    assert [behaviour.name for behaviour in POLICY_RULES if behaviour.sees(past)] == []


def test_an_episode_ends_only_after_many_healthy_steps() -> None:
    def spoken(healthy: int) -> int:
        health, ill = HealthMonitor(), {"reward/mean": 0.4, "reward/accuracy": 0.4, "actor/pg_clipfrac": 0.9}
        steps = [ill] * 5 + [ill | {"actor/pg_clipfrac": 0.0}] * healthy + [ill] * 5
        return sum(len(health.check(k, row, HealthContext())) for k, row in enumerate(steps))

    assert spoken(POLICY_RECOVERY_STEPS - 2) == 1
    assert spoken(POLICY_RECOVERY_STEPS + 5) == 2


def graded(reward: Callable[[int], float], **others: Callable[[int], float]) -> Steps:
    """Steps of a run whose rewards are graded: no accuracy."""
    named = {"reward/mean": reward} | {name.replace("__", "/"): value for name, value in others.items()}
    return [{"step": k} | {name: value(k) for name, value in named.items()} for k in range(1, 61)]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (graded(lambda k: -3.0 + 0.01 * k, rollout__length_mean=lambda k: 40.0), []),
        (
            graded(lambda k: 1.0 + 0.001 * k, actor__entropy=lambda k: 2.0 * 0.9**k),
            ["graded: fine if that is the most"],
        ),
        (graded(lambda k: 0.1 * k, actor__entropy=lambda k: 2.0 * 0.9**k), []),
        (graded(lambda k: 3.0, rollout__zero_signal=lambda k: 1.0), ["all earn the same reward"]),
        (graded(lambda k: 5.0 - 0.1 * k), ["has become worse than it was"]),
    ],
    ids=["negative and rising", "no gain, whatever 1 means", "rising", "all equal", "falling"],
)
def test_a_graded_reward_is_judged_by_its_own_scale(steps: Steps, expected: list[str]) -> None:
    lines = [line for _, line in said_of(steps, HealthContext())]
    assert len(lines) == len(expected), lines
    for words, line in zip(expected, lines, strict=True):
        assert words in line
