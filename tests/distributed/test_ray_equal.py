"""The same recipe and seed in one process, with one worker of Ray's and with two: the same tokens, the same numbers.

A Ray of its own and a dozen short runs: about half a minute.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from burnish.run.metrics import read_metrics
from tests.distributed.shared_runs import assert_same, made, numbers, samples

pytest.importorskip("ray", reason="Ray is an extra: pip install 'burnish[ray]'")

RUNS = ["ray-one", "ray-two"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory, "ray-equal", ["equal"], deadline_s=1800)


@pytest.mark.parametrize("name", RUNS)
def test_in_float64_tokens_and_losses_are_those_of_one_process_for_ten_steps(folder: Path, name: str) -> None:
    expected = numbers(folder, "one")
    assert [row["step"] for row in expected] == list(range(1, 11))
    assert abs(expected[0]["actor/loss"] - expected[-1]["actor/loss"]) > 1e-3
    assert len(samples(folder, name)) == 10 * 16
    assert_same(folder, name, "one", 1e-9)


@pytest.mark.parametrize("name", RUNS)
def test_in_float32_the_first_step_is_that_of_one_process(folder: Path, name: str) -> None:
    assert len(numbers(folder, f"{name}-float32")) == 1
    assert_same(folder, f"{name}-float32", "one-float32", 1e-5)


@pytest.mark.parametrize("name", RUNS)
def test_adapters_are_trained_sent_and_switched_off_as_in_one_process(folder: Path, name: str) -> None:
    expected = numbers(folder, "one-adapters")
    assert abs(expected[0]["actor/loss"] - expected[-1]["actor/loss"]) > 1e-3
    assert expected[-1]["actor/kl_ref"] > 1e-6  # the reference is the model without them
    assert_same(folder, f"{name}-adapters", "one-adapters", 1e-9)
    weights = [load_file(adapter_of(folder, run)) for run in ("one-adapters", f"{name}-adapters")]
    assert weights[0].keys() == weights[1].keys()
    assert all(np.abs(weights[0][key] - weights[1][key]).max() < 1e-9 for key in weights[0])
    sent = [row["controller/sync_bytes"] for row in read_metrics(folder / f"{name}-adapters" / "metrics.jsonl")]
    trained = sum(tensor.nbytes for tensor in weights[0].values())
    assert sent[0] > 4 * trained  # everything once, which an engine's own files need not be
    assert all(0 < some <= 1.02 * trained for some in sent[1:])


def adapter_of(folder: Path, name: str) -> Path:
    return folder / name / "checkpoints" / "step-000004" / "adapter_model.safetensors"


def test_with_reference_critic_and_reward_in_pools_of_their_own_numbers_are_those_of_one_process(folder: Path) -> None:
    assert [row["step"] for row in numbers(folder, "one-apart")] == [1, 2, 3, 4]
    assert_same(folder, "ray-apart", "one-apart", 1e-9)
    logs = {path.name for path in (folder / "ray-apart" / "workers").glob("*.log")}
    assert logs == {f"{role}-0.log" for role in ("actor", "rollout", "reference", "critic", "reward")}
    # It was killed after the third step, and the run went on from its checkpoint with fewer pools.
    said = json.loads((folder / "facts.json").read_text())["killed critic"]["said"]
    assert said.startswith("critic rank 0 of 1 has ended")


def test_a_teacher_in_a_process_of_its_own_gives_the_numbers_of_a_local_one(folder: Path) -> None:
    assert all(abs(row["actor/kl_reward"]) > 1e-4 for row in numbers(folder, "one-teacher"))
    assert_same(folder, "ray-teacher", "one-teacher", 1e-9)
    logs = {path.name for path in (folder / "ray-teacher" / "workers").glob("*.log")}
    assert logs == {f"{role}-0.log" for role in ("actor", "rollout", "reference")}


def test_processes_have_the_drivers_priority(folder: Path) -> None:
    assert json.loads((folder / "facts.json").read_text())["niceness"] == [0] * 5


@pytest.mark.parametrize("name", RUNS)
def test_what_the_controller_moves_is_in_the_metrics_of_every_step(folder: Path, name: str) -> None:
    for row in read_metrics(folder / name / "metrics.jsonl"):
        assert row["controller/messages"] > 0
        assert 0 < row["controller/sync_bytes"] <= row["controller/store_bytes"]
        assert 0 < row["time/sync_s"] < row["time/step_s"]
        assert 0 < row["controller/resident_gib"] < 100
        # Tokens and masks go out once; the samples of a prompt share it: a mini-batch is named and not sent.
        assert 0 < row["controller/bytes_out"] < 30_000
