"""Which policies a run saves: every one that was measured, or only those that are due."""

from __future__ import annotations

from pathlib import Path

import pytest

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
