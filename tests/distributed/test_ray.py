"""Runs whose workers are Ray's: the same numbers as in one process, whoever is killed; and the group on the real wire.

One process with one Ray makes all runs (`scenarios.py`); the tests read what it left.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from burnish.run.metrics import read_metrics
from tests.distributed.shared_runs import assert_same, made, numbers, samples

pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")
pytestmark = pytest.mark.slow  # a Ray of its own and a dozen runs: one to two minutes

SCENARIOS = [
    "numbers",
    "parallel_engine",
    "servers",
    "killed_engine",
    "relayed",
    "killed_trainer",
    "refused",
    "taken",
    "actors",
    "own_processes",
]
DEADLINE_S = 900


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "ray", SCENARIOS, DEADLINE_S)


@pytest.fixture(scope="session")
def facts(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    print({name: round(seconds, 1) for name, seconds in found["times"].items()})  # shown by pytest -s
    return found


RELAYS = ["actor-relay-0.log", "rollout-relay-0.log"]


@pytest.mark.parametrize("name", ["two", "fresh", "killed", "stopped", "relayed", "resumed", "parallel"])
def test_tokens_and_losses_are_those_of_one_process(folder: Path, name: str) -> None:
    expected = numbers(folder, "one")
    assert len(expected) == 10
    assert abs(expected[0]["actor/loss"] - expected[-1]["actor/loss"]) > 1e-3
    assert_same(folder, name, "one", 1e-9)
    assert len(samples(folder, name)) == 10 * 16


@pytest.mark.parametrize("name", ["two", "fresh", "killed", "relayed", "resumed"])
def test_the_weights_are_those_of_one_process_however_many_wrote_them(folder: Path, name: str) -> None:
    expected, found = (stored(folder / run / "checkpoints" / "step-000010") for run in ("one", name))
    assert found.keys() == expected.keys()
    assert max(float(np.abs(found[key] - expected[key]).max()) for key in expected) < 1e-9


def stored(path: Path) -> dict[str, np.ndarray]:
    tensors = (held for file in sorted(path.glob("model*.safetensors")) for held in load_file(file).items())
    return dict(tensors)


@pytest.mark.parametrize(
    ("one", "two", "steps", "within"),
    [
        ("one", "copies", 3, 1e-9),
        ("one", "resharded", 5, 1e-9),
        ("one-mixed", "two-mixed", 3, 1e-9),
        ("one-adapters", "two-adapters", 3, 1e-9),
        ("one-adapters", "cut-adapters", 3, 1e-9),
        ("one-mixed", "stages-mixed", 3, 1e-9),
        ("one-experts", "cut-experts", 3, 1e-9),
        ("one-float32", "two-float32", 1, 1e-5),
    ],
)
def test_other_divisions_roles_and_types_agree_too(folder: Path, one: str, two: str, steps: int, within: float) -> None:
    expected, found = numbers(folder, one)[:steps], numbers(folder, two)
    assert len(found) == steps
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for key, value in row.items():
            if (
                key.startswith(("actor/", "critic/", "reward/")) and key != "actor/lr"
            ):  # whose schedule knows the last step
                assert value == pytest.approx(other[key], abs=within), key


def test_an_engine_of_two_processes_samples_with_adapters_as_one_does(folder: Path) -> None:
    assert_same(folder, "parallel-adapters", "one-plain-adapters", 1e-9)


def test_an_engine_that_lost_one_of_its_processes_is_started_again_as_a_whole(
    folder: Path, facts: dict[str, Any]
) -> None:
    assert facts["parallel"] == 1
    said = (folder / "parallel" / "log.txt").read_text()
    assert "engine 0 is started again, and its 16 unfinished requests are issued again" in said
    assert "rollout rank 1 of 2 has ended" in said


def test_weights_go_straight_to_the_ranks_of_an_engine_also_after_it_was_started_again(
    folder: Path, facts: dict[str, Any]
) -> None:
    assert facts["resharded"] == 1
    said = (folder / "resharded" / "log.txt").read_text()
    assert "engine 0 is started again" in said
    assert "goes through the object store" not in said, "a new link was made"


def test_a_server_of_another_engine_has_the_weights_of_every_step_and_is_started_again_when_it_ends(
    folder: Path, facts: dict[str, Any]
) -> None:
    rows = read_metrics(folder / "served" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["mismatch/max"] for row in rows) < 1e-6
    assert facts["killed servers"] == 1
    assert "engine 0 is started again, and its 16 unfinished requests" in (folder / "served" / "log.txt").read_text()


@pytest.mark.parametrize("name", ["killed", "stopped", "relayed"])
def test_every_sample_is_used_once_though_an_engine_ended(folder: Path, facts: dict[str, Any], name: str) -> None:
    events = [json.loads(line) for line in (folder / name / "journal" / "events.jsonl").read_text().splitlines()]
    used = [id for event in events if event["event"] == "used" for id in event["ids"]]
    assert len(used) == len(set(used))
    restarts = [row.get("controller/restarts", 0) for row in read_metrics(folder / name / "metrics.jsonl")]
    assert sum(restarts) >= 1
    assert "engine 1 is started again, and its" in (folder / name / "log.txt").read_text()
    assert facts[name] == ({"victims": 1, "ended": True} if name != "relayed" else RELAYS)


def test_a_rank_that_trains_is_named_when_it_ends_and_the_run_goes_on_from_its_checkpoint(
    facts: dict[str, Any],
) -> None:
    said, seconds = facts["killed trainer"]["said"], facts["killed trainer"]["seconds"]
    assert said.startswith("actor rank 1 of 2 has ended in `")
    assert "actor-1.log" in said
    assert seconds < 30


def test_what_went_through_the_controller_is_measured(folder: Path) -> None:
    rows = read_metrics(folder / "two" / "metrics.jsonl")
    assert all(row["controller/messages"] > 0 for row in rows)
    assert all(0 < row["controller/bytes_in"] < 1e6 for row in rows)
    assert all(0 < row["controller/bytes_out"] < 1e6 for row in rows)
    assert all(0 < row["controller/sync_bytes"] <= row["controller/store_bytes"] < 1e6 for row in rows)
    assert all(0 < row["controller/resident_gib"] < 100 for row in rows)
    assert all(0 < row["time/sync_s"] < row["time/step_s"] for row in rows)


def test_what_cannot_be_placed_is_refused_with_the_numbers(facts: dict[str, Any]) -> None:
    words = facts["refused"]
    assert "needs 5 CPUs (2 workers and 3 engines, split, 1 CPU each), the cluster has 4" in words["too many"]
    assert "layout=colocated" in words["too many"]
    assert "needs 5 CPUs (1 worker and 1 engine, colocated, 5 CPUs each), the cluster has 4" in words["too large"]
    assert not words["left behind"]
    assert "needs 2 CPUs, which the cluster has, but 1 are free" in facts["taken"]


def test_actors_answer_fail_and_end_as_a_group_says(facts: dict[str, Any]) -> None:
    seen = facts["actors"]
    assert seen["ranks"] == [["0", 3], ["1", 3]]
    assert seen["doubled"]
    assert 40_000 * 4 < seen["out"] < 40_000 * 4 + 20_000  # each got its part and no more
    assert seen["in"] == 40_000 * 8
    assert seen["relayed"] == [[["0", 3], ["1", 3]], True, [["0", 5], ["1", 6]]]
    assert seen["user"] == ["UserError", "do it otherwise"]
    kind, text = seen["bug"]
    assert kind == "WorkerFailed"
    assert "ZeroDivisionError: a bug" in text
    assert "echo.py" in text
    kind, text = seen["late"]
    assert kind == "WorkerLost"
    assert "actor ranks 0, 1 of 2 did not answer `wait_for` (Wait a while) in 1 s" in text
    assert "time.sleep(seconds)" in seen["stacks"]
    kind, text, seconds = seen["lost"]
    assert kind == "WorkerLost"
    assert text.startswith("actor rank 0 of 2 has ended in `wait_for` (Wait a while)")
    assert "echo 3 is here" in text
    assert seconds < 30
