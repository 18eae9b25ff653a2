"""`burnish data impact`: LIMR's scores of the rows a run was trained on, from what its journal says of them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from burnish.cli.main import main
from burnish.config.data import Source
from burnish.config.errors import UserError
from burnish.data.curation.impact import Impact, impact_scores, reward_curves
from burnish.data.rows import read_rows
from burnish.run.journal import Journal
from burnish.run.run import Visit, read_visits
from burnish.run.samples import read_samples
from tests.trainers.tiny import TINY, WARM, run_of

EPOCHS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows, four a step: three epochs and a step of a fourth, with every sample kept."""
    folder = tmp_path_factory.mktemp("learnt")
    return run_of(
        folder, TINY + WARM, ["training.steps=10", "run.samples_every=1", "rollout.n=6", "warm_start.updates=30"]
    )


def curves(*rows: list[float]) -> list[Visit]:
    """Visits with ten samples each, whose means are these rows."""
    return [Visit(f"f/{i}", k, 10, 10 * r, 10, 10 * r) for i, row in enumerate(rows) for k, r in enumerate(row)]


def test_the_worked_numbers_go_through() -> None:
    found, by = reward_curves(curves([0.2, 0.5, 0.7, 0.9], [0, 0, 0.1, 0.1], [1, 1, 1, 1]), Impact())
    scores, average = impact_scores(found)
    assert by == "accuracy"
    assert average == pytest.approx([0.4, 0.5, 0.6, 2 / 3])
    assert list(scores.values()) == pytest.approx([0.881463, -0.113493, 0], abs=1e-6)


def test_only_finished_epochs_count_and_a_gap_is_filled_from_the_next() -> None:
    visits = curves([0.0, 0.5, 1.0], [0.5, 0.5], [0.0, 1.0])
    found, _ = reward_curves(visits, Impact())
    assert found["f/0"] == [0.0, 0.5]
    gap = [Visit("f/0", 0, 0, 0.0, 0, 0.0), *curves([0.3, 0.9])[1:], *curves([], [0.1, 0.3])]
    found, _ = reward_curves(gap, Impact())
    assert math.isnan(found["f/0"][0])
    assert impact_scores(found)[1] == pytest.approx([0.5, 0.6])


def test_what_cannot_be_scored_is_refused() -> None:
    with pytest.raises(UserError, match="two epochs"):
        reward_curves(curves([0.1], [0.2]), Impact())
    with pytest.raises(UserError, match="--epochs 3: the run has finished 2, and a curve"):
        reward_curves(curves([0.1, 0.2]), Impact(epochs=3))
    large = [Visit("f/0", k, 2, 5.0, 2, 1.0) for k in range(2)]
    with pytest.raises(UserError, match="use --by accuracy"):
        reward_curves(large, Impact(by="reward"))
    assert reward_curves(large, Impact())[0] == {"f/0": [0.5, 0.5]}
    unjudged = [Visit("f/0", k, 2, 1.0, 0, 0.0) for k in range(2)]
    assert reward_curves(unjudged, Impact())[1] == "reward"


def test_a_journal_tells_what_every_sample_of_every_step_was_worth(run: Path) -> None:
    rows = [row for row in read_samples(run / "samples") if row["kind"] == "train"]
    wanted: dict[str, list[float]] = {}
    for row in rows:
        wanted.setdefault(row["group"], []).append(row["reward"])
    found = {f"{v.prompt_id}#{v.visit}": (v.scored, v.reward, v.judged, v.right) for v in read_visits(run)}
    assert found == {group: (6, sum(rewards), 6, sum(rewards)) for group, rewards in wanted.items()}
    assert len({sum(rewards) for rewards in wanted.values()}) > 2, "a run in which nothing moves would prove nothing"


def test_scores_of_a_run_agree_with_its_samples_and_the_rows_read_back(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_prompt: dict[str, list[list[float]]] = {}
    for row in read_samples(run / "samples"):
        name, _, visit = row["group"].rpartition("#")
        if int(visit) < EPOCHS:
            by_prompt.setdefault(name, [[] for _ in range(EPOCHS)])[int(visit)].append(row["accuracy"])
    rewards = np.array([[np.mean(epoch) for epoch in found] for found in by_prompt.values()])
    average = rewards.mean(0)
    scores = 1 - ((rewards - average) ** 2).sum(1) / ((1 - average) ** 2).sum()
    threshold = float(np.median(scores))
    out = tmp_path / "kept.jsonl"
    assert main(["data", "impact", str(run), str(out), "--threshold", str(threshold)]) == 0
    printed = capsys.readouterr().out
    assert f"mean accuracy of 12 prompts by epoch: {' '.join(f'{a:.3f}' for a in average)}" in printed
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    expected = sorted(scores[scores >= threshold])
    assert sorted(record["impact"] for record in kept) == pytest.approx(expected)
    assert 0 < len(kept) < 12
    read = read_rows(Source(path=str(out)))
    assert [row.answer for row in read] == ["".join(sorted(str(row.prompt).rstrip(">"))) for row in read]
    manifest = json.loads((tmp_path / "kept.jsonl.manifest.json").read_text())
    assert sum(manifest["left_out"].values()) == 12 - len(kept)
    assert manifest["asked"]["scores"][0]["file"] == "events.jsonl"
    before = out.stat().st_mtime_ns
    assert main(["data", "impact", str(run), str(out), "--threshold", str(threshold)]) == 0
    assert "is up to date" in capsys.readouterr().out
    assert out.stat().st_mtime_ns == before


def test_steps_that_a_resumed_run_made_again_count_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    journal = Journal(tmp_path / "journal")
    for step, right in ((1, 0.0), (2, 1.0)):
        journal.append("step", step=step, prompts=[Visit("f/0", step, 4, right, 4, right).values()])
    journal.rewind(1)
    journal.append("step", step=2, prompts=[Visit("f/0", 2, 4, 3.0, 4, 3.0).values()])
    with open(journal.path, "ab") as file:
        file.write(b'{"i": 4, "torn')
    assert [(v.visit, v.right) for v in read_visits(tmp_path)] == [(1, 0.0), (2, 3.0)]
    assert journal.path.read_bytes().endswith(b"torn"), "a run that is being written is only read"


def test_a_run_without_rewards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    with pytest.raises(UserError, match="no rewards of prompts"):
        read_visits(tmp_path)
