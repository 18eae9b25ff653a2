"""Throughput, utilisation, time split and memory metrics: their arithmetic, and that a run logs them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from burnish.rollout.scoring import RolloutBatch
from burnish.run.display import headline_numbers
from burnish.run.metrics import MACHINE_PREFIXES, read_metrics
from burnish.trainers.performance import rollout_throughput, throughput_metrics, time_metrics
from burnish.training.meter import MeterReading, memory_metrics
from tests.trainers.tiny import TINY, run_of

READING = MeterReading(
    {"forward": 1.0, "backward": 2.0, "optimizer": 0.5, "communication": 0.25, "other": 0.25},
    8000,
    4 * 10**12,
    6 * 10**12,
)


def test_the_split_of_the_learning_phase_adds_up() -> None:
    values = time_metrics(READING, 5.0)
    assert values["time/learn_s"] == 5.0
    assert values["time/other_s"] == 1.25  # the learner's own, and what lies between its calls
    assert sum(value for name, value in values.items() if name != "time/learn_s") == 5.0


def test_rates_are_over_the_learners_own_time() -> None:
    values = throughput_metrics(READING, 10e12)
    assert values["performance/learn_tokens_per_s"] == 2000
    assert values["performance/tflops_per_s"] == pytest.approx(1.5)
    assert values["performance/mfu"] == pytest.approx(0.1)
    assert values["performance/hfu"] == pytest.approx(0.15)
    assert headline_numbers(values) == {"mfu": pytest.approx(0.1)}


def test_what_is_not_known_is_left_out() -> None:
    assert throughput_metrics(READING, None).keys() == {"performance/learn_tokens_per_s", "performance/tflops_per_s"}
    unknown = MeterReading(READING.seconds, 8000, None, None)
    assert throughput_metrics(unknown, 10e12).keys() == {"performance/learn_tokens_per_s"}
    assert throughput_metrics(MeterReading(), 10e12) == {}
    assert rollout_throughput(RolloutBatch([], [], 0.0, 0.0)) == {}


def test_memory_of_a_process_is_its_resident_size() -> None:
    before = memory_metrics(torch.device("cpu"))
    block = torch.ones(2**26, dtype=torch.uint8)
    after = memory_metrics(torch.device("cpu"))
    grown = after["memory/current_gib"] - before["memory/current_gib"]
    assert 2**-4 * 0.9 < grown < 2**-4 * 2
    assert after["memory/peak_gib"] >= after["memory/current_gib"] * 0.99
    assert block.numel() == 2**26


def test_a_run_logs_all_of_it_for_policy_and_critic(tmp_path: Path) -> None:
    overrides = [
        "training.steps=2",
        "training.grad_norms=true",
        "algorithm.advantage=gae",
        "algorithm.critic.warmup_steps=1",
    ]
    rows = read_metrics(run_of(tmp_path, TINY, overrides) / "metrics.jsonl")[-2:]
    for row in rows:
        parts = [row[f"time/{part}_s"] for part in ("forward", "backward", "optimizer", "communication", "other")]
        assert sum(parts) == pytest.approx(row["time/learn_s"])
        assert row["time/learn_s"] < row["time/step_s"]
        assert row["performance/learn_tokens_per_s"] > 0
        assert row["performance/rollout_tokens_per_s"] > 0
        assert row["performance/tflops_per_s"] > 0
        assert "performance/mfu" not in row  # a CPU's peak is unknown
        assert row["memory/peak_gib"] > 0
        assert row["memory/current_gib"] > 0
    blocks = {name for name in rows[-1] if "/grad_norm_" in name}
    assert blocks == {f"actor/grad_norm_{block}" for block in ("embedding", "layer_00", "head", "rest")}
    here = set(MACHINE_PREFIXES) - {"controller/"}  # which one process has none of
    assert {name.split("/")[0] + "/" for name in rows[-1] if name.startswith(MACHINE_PREFIXES)} == here
