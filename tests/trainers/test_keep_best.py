"""Which checkpoints a run keeps, and which one is the best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.config.errors import UserError
from burnish.rollout.validation import validation_metrics
from burnish.run.checkpoint.checkpoints import Checkpoints
from burnish.run.metrics import read_metrics
from tests.trainers.tiny import TINY, run_of

MEASURED = [
    "data.validation.path=rows.jsonl",
    "validation.every=1",
    "run.keep_last=9",
    "run.save_every=3",
    "reward.parts=exact",
]


@pytest.mark.parametrize(("keep_best", "saved"), [(True, [1, 2, 3, 4]), (False, [3, 4])])
def test_measured_policies_are_saved_unless_only_those_that_are_due_are_wanted(
    tmp_path: Path, keep_best: bool, saved: list[int]
) -> None:
    run = run_of(tmp_path / "runs", TINY, [*MEASURED, f"run.keep_best={str(keep_best).lower()}"])
    assert sorted(int(folder.name.removeprefix("step-")) for folder in (run / "checkpoints").glob("step-*")) == saved


RATED = """
def rated(data_source, solution_str, ground_truth, extra_info):
    # From 0 to 10: any answer has 1, each digit of it one more, so that the worst policies are all at 1.
    return float(min(10, 1 + sum(c.isdigit() for c in solution_str)))
"""


@pytest.mark.parametrize(
    ("best_by", "metric", "pick"),
    [
        (None, "validation/greedy/reward_mean", max),
        ("-validation/greedy/reward_mean", "validation/greedy/reward_mean", min),
        ("-validation/greedy/length_mean", "validation/greedy/length_mean", min),
    ],
)
def test_graded_rewards_have_no_accuracy_and_the_best_policy_is_that_of_a_named_metric(
    tmp_path: Path, best_by: str | None, metric: str, pick: object
) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "rated.py").write_text(RATED)
    modes = "validation.modes.greedy={temperature: 1, n: 4}"
    chosen = ["reward.parts=rated.py:rated", modes, f"run.best_by={best_by or 'null'}"]
    run = run_of(tmp_path / "runs", TINY, [*MEASURED, *chosen])
    rows = read_metrics(run / "metrics.jsonl")
    assert [name for row in rows for name in row if "accuracy" in name] == []
    measured = {row["step"]: row[metric] for row in rows if row["step"] > 0}
    assert len(set(measured.values())) > 1, "the policies must differ for the choice to mean anything"
    checkpoints = Checkpoints(run / "checkpoints", 9)
    assert {c.step: c.score for c in checkpoints.all()} == measured
    best = checkpoints.best()
    assert best is not None
    assert (best.score, best.metric) == (pick(measured.values()), best_by or metric)  # type: ignore[operator]
    assert json.loads((best.path / "burnish.json").read_text())["metric"] == (best_by or metric)


def test_a_verdict_is_the_best_by_accuracy_and_a_graded_reward_cannot_be(tmp_path: Path) -> None:
    best = Checkpoints(run_of(tmp_path / "a", TINY, MEASURED) / "checkpoints", 9).best()
    assert best is not None
    assert best.metric == "validation/greedy/accuracy"
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "rated.py").write_text(RATED)
    graded = ["reward.parts=rated.py:rated", "run.best_by=validation/greedy/accuracy"]
    with pytest.raises(
        UserError, match=r"validation/greedy/accuracy was not measured \(the reward is graded.*correct_at"
    ):
        run_of(tmp_path / "b", TINY, [*MEASURED, *graded])


JUDGED = """
def judged(data_source, solution_str, ground_truth, extra_info):
    return solution_str.startswith("1")
"""


@pytest.mark.parametrize(("part", "missing"), [("exact", (0, 1, 3)), ("judged.py:judged", (2, 4))])
def test_a_validation_without_an_accuracy_gives_no_score_where_the_reward_has_one(
    tmp_path: Path,
    part: str,
    missing: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A validation in which every call times out has a mean reward and no accuracy."""
    steps = iter(range(9))

    def without(*given: Any) -> dict[str, float]:
        found = validation_metrics(*given)
        return {k: v for k, v in found.items() if k != "accuracy"} if next(steps) in missing else found

    monkeypatch.setattr("burnish.trainers.held_out_validation.validation_metrics", without)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "judged.py").write_text(JUDGED)
    chosen = [*MEASURED, f"reward.parts={part}", "run.save_every=1"]
    run = run_of(tmp_path / "runs", TINY, chosen)
    named = {c.step: c.metric for c in Checkpoints(run / "checkpoints", 9).all()}
    accuracy = "validation/greedy/accuracy"
    assert named == {step: None if step in missing else accuracy for step in range(1, 5)}
    said = capsys.readouterr().out
    assert said.count("this checkpoint has no score: run.best_by: validation/greedy/accuracy was not measured") == 2
    assert "the reward is graded" not in said
    # A run that goes on remembers, and the first validation of the new life has none.
    steps, missing = iter(range(9)), (0,)
    other = "validation: {modes: {other: {temperature: 0}}}\n"
    run_of(tmp_path / "runs", TINY + other, [*chosen, "training.steps=6"])
    named = {c.step: c.metric for c in Checkpoints(run / "checkpoints", 9).all()}
    assert (named[5], named[6]) == (None, "validation/other/accuracy")
