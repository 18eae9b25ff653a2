"""Runs with segment chains and trees: they resume exactly, sample ahead, and learn with any engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from burnish.rollout.sync_source import SyncSource
from burnish.run.journal import Journal
from burnish.run.metrics import read_metrics
from burnish.run.run import Run
from burnish.training.learner import Learner
from tests.trainers import test_resume_everything as resuming
from tests.trainers.test_resume_everything import Moment, at_step, dies, event, killing, updates
from tests.trainers.tiny import TINY, run_of

pytestmark = pytest.mark.usefixtures("shared_reward_workers")

COMMON = ["training.steps=5", "training.mini_batches=2", "run.save_every=2", "reward.workers=1", "rollout.max_tokens=5"]
RUNS = {
    "chain": ["algorithm=spo_chain", "algorithm.advantage={name: spo_chain, every: 1, rollouts: 3}"],
    "tree": [
        "algorithm=spo_tree",
        "algorithm.advantage={name: spo_tree, branches: [2, 2], segment: 1}",
        "algorithm.filters=[prob_mask, {name: tree_edges, most: 6}]",
        "algorithm.replay={share: 1.0, uses: 3, max_age: 3}",
    ],
}
MOMENTS = {
    "answers written, not scored": Moment(Journal, "append", event("scored", 1, 0)),
    "before a step after a checkpoint": Moment(SyncSource, "next", at_step(3)),
    "between two mini-batches": Moment(Learner, "update", updates(5)),
    "step done, not committed": Moment(Run, "commit", at_step(3)),
    "a step after a checkpoint": Moment(Run, "commit", at_step(5), after=True),
}


@pytest.fixture(params=RUNS)
def overrides(request: pytest.FixtureRequest, warm: Path) -> list[str]:
    return ["model.new=null", f"model.path={warm}", *RUNS[request.param], *COMMON]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]


def test_a_run_that_dies_at_every_moment_ends_as_one_that_never_did(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resuming, "STEPS", 5)
    expected = resuming.result(run_of(tmp_path / "unbroken", TINY, overrides))
    for name, moment in MOMENTS.items():
        with killing(moment):
            assert dies(lambda: run_of(tmp_path / "broken", TINY, overrides)), f"the run never came to: {name}"
    found = resuming.result(run_of(tmp_path / "broken", TINY, overrides))
    assert found.keys() == expected.keys()
    assert [k for k in found if found[k] != expected[k]] == []
    assert all(row["actor/updates"] > 0 for row in expected["metrics"] if row["step"] > 0)


def test_it_samples_a_step_ahead(overrides: list[str], tmp_path: Path) -> None:
    rows = rows_of(run_of(tmp_path / "ahead", TINY, [*overrides, "rollout.source=ahead"]))
    assert [row["staleness/mean"] for row in rows] == [0, 1, 1, 1, 1]
    assert all(row["actor/updates"] > 0 for row in rows)


def test_the_paged_cache_gives_the_same_run_to_rounding(overrides: list[str], tmp_path: Path) -> None:
    overrides = [*overrides, "model.dtype=float64"]
    dense = rows_of(run_of(tmp_path / "dense", TINY, overrides))
    paged = rows_of(run_of(tmp_path / "paged", TINY, [*overrides, "rollout.cache_gib=0.01"]))
    for name in ("rollout/tokens", "reward/mean", "rollout/tokens_used", "actor/loss"):
        assert [row[name] for row in paged] == pytest.approx([row[name] for row in dense], rel=1e-6, abs=1e-9)


def test_tokens_sampled_for_values_and_shared_by_paths_are_in_the_metrics(tmp_path: Path, warm: Path) -> None:
    common = ["model.new=null", f"model.path={warm}", *COMMON, "training.steps=1", "training.mini_batches=1"]
    plain, chain, tree = (
        run_of(tmp_path / name, TINY, [*common, *more])
        for name, more in (("plain", []), *((k, RUNS[k]) for k in ("chain", "tree")))
    )
    tokens = {folder.parent.name: rows_of(folder)[0]["rollout/tokens"] for folder in (plain, chain, tree)}
    assert tokens["chain"] > 2 * tokens["plain"]
    assert rows_of(chain)[0]["rollout/continued"] % 3 == 0 < rows_of(chain)[0]["rollout/continued"]
    assert rows_of(chain)[0]["reward/continued_failed"] == 0
    used = rows_of(tree)[0]["rollout/tokens_used"]
    assert used < tokens["tree"]
    events = [json.loads(line) for line in (tree / "journal" / "events.jsonl").read_text().splitlines()]
    (ids,) = [e["ids"] for e in events if e["event"] == "used"]
    assert len(ids) == len(set(ids)) > 0


def test_trees_whose_edges_were_all_masked_come_back_while_they_have_others(tmp_path: Path, warm: Path) -> None:
    masked = "algorithm.filters=[{name: prob_mask, below: 1.0e-30}, {name: tree_edges, most: %d}]"
    more = ["model.new=null", f"model.path={warm}", *COMMON, *RUNS["tree"], "training.steps=1"]
    few, all_of_them = (run_of(tmp_path / str(most), TINY, [*more, masked % most]) for most in (1, 99))
    assert rows_of(few)[0]["rollout/sequences_used"] == 0 < rows_of(few)[0]["replay/size"]
    assert rows_of(all_of_them)[0]["replay/size"] == 0
