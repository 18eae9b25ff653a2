"""Checkpoints: the stated ones stay, a damaged one is never loaded, and nothing goes before its successor is whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.config.errors import UserError
from burnish.run.checkpoint.checkpoints import MANIFEST_FILE, Checkpoints, checkpoint_damage
from burnish.run.checkpoint.snapshot import BytesFile, Checksums, Snapshot


def snapshot(text: str) -> Snapshot:
    return Snapshot([BytesFile("model.safetensors", text)], [BytesFile("state/trainer.json", "{}")])


def steps(checkpoints: Checkpoints) -> list[int]:
    return [c.step for c in checkpoints.all()]


def test_a_checkpoint_is_written_and_found(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    assert checkpoints.latest() is None
    assert checkpoints.best() is None
    path = checkpoints.write(50, snapshot("weights"), score=0.5)
    assert path == tmp_path / "step-000050"
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.path, latest.step, latest.score) == (path, 50, 0.5)
    files = json.loads((path / MANIFEST_FILE).read_text())["files"]
    assert {name: entry["of"] for name, entry in files.items()} == {
        "model.safetensors": "model",
        "state/trainer.json": "state",
    }


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step, score in [(10, 0.1), (20, 0.9), (30, 0.9), (40, None), (50, 0.3)]:
        checkpoints.write(step, snapshot("w"), score)
    assert steps(checkpoints) == [20, 40, 50]  # of the two at 0.9 the earlier
    best = checkpoints.best()
    assert best is not None
    assert best.step == 20
    index = json.loads((tmp_path / "index.json").read_text())
    assert [(row["step"], row["score"]) for row in index["checkpoints"]] == [(20, 0.9), (40, None), (50, 0.3)]
    assert (index["latest"], index["best"]) == (50, 20)


@settings(max_examples=40, deadline=None)
@given(
    scores=st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=8),
    keep=st.integers(1, 3),
)
def test_pruning_keeps_exactly_the_policys_checkpoints(
    tmp_path_factory: pytest.TempPathFactory, scores: list[float | None], keep: int
) -> None:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("checkpoints"), keep)
    for step, score in enumerate(scores):
        checkpoints.write(step, snapshot("w"), score)
    expected = set(range(len(scores))[-keep:])
    known = [s for s in scores if s is not None]
    if known:
        expected.add(scores.index(max(known)))
    assert set(steps(checkpoints)) == expected


def test_scores_are_compared_with_those_of_the_same_metric(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.write(1, snapshot("w"), 1.0, "validation/greedy/accuracy")
    for step, score in [(2, 3.0), (3, 7.5), (4, 5.0)]:
        checkpoints.write(step, snapshot("w"), score, "validation/greedy/reward_mean")
    best = checkpoints.best()
    assert best is not None
    assert (best.step, best.score_text) == (3, "validation/greedy/reward_mean 7.500")
    index = json.loads((tmp_path / "index.json").read_text())
    assert (index["best"], index["best_by"]) == (3, "validation/greedy/reward_mean")
    for step, score in [(5, 12.0), (6, 9.0), (7, 10.0)]:
        checkpoints.write(step, snapshot("w"), score, "-validation/greedy/length_mean")
    best = checkpoints.best()
    assert best is not None
    assert (best.step, best.score_text) == (6, "validation/greedy/length_mean 9.000, lower is better")
    assert steps(checkpoints) == [1, 3, 6, 7]  # the best by each metric, and the newest
    checkpoints.write(8, snapshot("w"), 0.2, "validation/greedy/accuracy")
    best = checkpoints.best()
    assert best is not None
    assert best.step == 1
    assert steps(checkpoints) == [1, 3, 6, 8]


@pytest.mark.parametrize(
    ("configs", "metric"),
    [
        ({"config.yaml": "{run: {}, validation: {modes: {late: {}, early: {}}}}"}, "validation/late/accuracy"),
        (
            {
                "config.1.yaml": "{run: {}, validation: {modes: {first: {}}}}",
                "config.2.yaml": "{run: {}, validation: {modes: {second: {}}}}",
                "config.yaml": "{run: {best_by: null}, validation: {modes: {third: {}}}}",
            },
            "validation/second/accuracy",
        ),
        ({"config.yaml": "{run: {best_by: null}, preference: {loss: {name: kto}}}"}, "validation/answers/accuracy"),
        ({"config.yaml": "{run: {}, reward_model: {}}"}, "validation/pairs/accuracy"),
    ],
)
def test_a_score_without_a_metric_is_the_accuracy_that_older_versions_scored_by(
    tmp_path: Path, configs: dict[str, str], metric: str
) -> None:
    for name, text in configs.items():
        (tmp_path / name).write_text(text)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep_last=1)
    checkpoints.write(1, snapshot("w"), 0.9)
    checkpoints.write(2, snapshot("w"), 0.5, metric)
    best = checkpoints.best()
    assert best is not None
    assert (best.step, best.metric) == (1, metric)


def test_a_score_that_is_not_a_number_is_no_score(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.write(1, snapshot("w"), 0.2)
    checkpoints.write(2, snapshot("w"), float("nan"))
    best = checkpoints.best()
    assert best is not None
    assert best.step == 1


def test_a_writer_that_fails_changes_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.write(1, snapshot("w"))

    class Fails:
        def write(self, folder: Path) -> Checksums:
            (folder / "half").write_text("x")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.write(2, Snapshot([Fails()]))
    assert steps(checkpoints) == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.json", "step-000001"]


def test_nothing_is_removed_before_the_new_one_is_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.write(1, snapshot("w"))
    removed = []

    def watch(path: Path) -> None:
        removed.append(path.name)
        assert checkpoint_damage(tmp_path / "step-000002") is None

    monkeypatch.setattr("burnish.run.checkpoint.checkpoints.remove", watch)
    checkpoints.write(2, snapshot("w"))
    assert removed == ["step-000001"]


def break_size(path: Path) -> None:
    (path / "model.safetensors").write_text("short")


def break_content(path: Path) -> None:
    (path / "model.safetensors").write_text("WEIGHTS")


def lose_file(path: Path) -> None:
    (path / "state" / "trainer.json").unlink()


def lose_manifest(path: Path) -> None:
    (path / MANIFEST_FILE).unlink()


@pytest.mark.parametrize(
    ("break_it", "reason"),
    [
        (break_size, "5 bytes instead of 7"),
        (break_content, "another checksum"),
        (lose_file, "state/trainer.json is missing"),
        (lose_manifest, "burnish.json is missing"),
    ],
)
def test_a_damaged_newest_is_reported_and_the_one_before_is_used(tmp_path: Path, break_it, reason: str) -> None:
    said: list[str] = []
    checkpoints = Checkpoints(tmp_path, keep_last=2, report=said.append)
    checkpoints.write(1, snapshot("weights"), 0.1)
    checkpoints.write(2, snapshot("weights"), 0.2)
    break_it(tmp_path / "step-000002")
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 1
    assert len(said) == 1
    assert "step-000002 is damaged" in said[0]
    assert reason in said[0]
    best = checkpoints.best()
    assert best is not None
    assert best.step == 1


def test_what_reads_the_model_needs_no_training_state(tmp_path: Path) -> None:
    said: list[str] = []
    for of in (None, "model"):
        checkpoints = Checkpoints(tmp_path, keep_last=2, report=said.append, of=of)
        path = checkpoints.write(1, snapshot("weights"), 0.1)
        checkpoints.delete_training_state()
        assert {file.name for file in path.rglob("*") if file.is_file()} == {"model.safetensors", MANIFEST_FILE}
        if of is None:
            assert checkpoints.best() is None
            with pytest.raises(UserError, match=f"is missing(?s:.*)model.path={path}"):
                checkpoints.latest()
        else:
            assert [found and found.path for found in (checkpoints.best(), checkpoints.latest())] == [path, path]
    assert len(said) == 2


def test_only_damaged_checkpoints_is_an_error_that_lists_them(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, report=lambda _: None)
    for path in [checkpoints.write(step, snapshot("weights")) for step in (1, 2)]:
        break_size(path)
    with pytest.raises(UserError, match=r"(?s)step-000002: model.*step-000001: model.*restore"):
        checkpoints.latest()


def test_an_earlier_step_written_again_outlives_a_damaged_future(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1, report=lambda _: None)
    checkpoints.write(25, snapshot("weights"))
    checkpoints.keep_last = 2
    break_content(checkpoints.write(50, snapshot("weights"), 0.9))
    checkpoints.keep_last = 1
    checkpoints.write(40, snapshot("weights"), 0.1)
    assert steps(checkpoints) == [40]
    latest = checkpoints.latest()
    assert latest is not None
    assert latest.step == 40


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.write(1, snapshot("old"))
    path = checkpoints.write(1, snapshot("new one"))
    assert (path / "model.safetensors").read_text() == "new one"
    assert checkpoint_damage(path) is None
