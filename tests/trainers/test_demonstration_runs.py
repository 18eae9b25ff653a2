"""Demonstrations inside groups: the numbers of ALGORITHMS.md 6.4 from trajectories to the loss, whole runs, and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from burnish.algorithms.losses.loss_view import loss_view
from burnish.algorithms.spec import Algorithm
from burnish.config.loading import algorithm_from_preset
from burnish.core.trajectory import OFF_POLICY, Trajectory, chain_nodes, pack
from burnish.run.metrics import read_metrics
from burnish.trainers.minibatches import mini_batches
from burnish.trainers.mismatch import apply_correction, apply_to_sampled, gap_report
from burnish.trainers.pipeline import AlgorithmPipeline, StepContext
from tests.trainers.test_resume_everything import COMMON, MOMENTS, dies, killing, result
from tests.trainers.tiny import ROWS, TINY, run_of

pytestmark = pytest.mark.usefixtures("shared_reward_workers")

OLD = [[-1.0, -0.5, -2.0, -0.1], [-0.7, -1.2], [-1.8, -0.9, -1.5], [-2.2, -0.4, -0.6, -1.1]]
NEW = [[-0.8, -0.9, -1.5, -0.1], [-0.9, -0.6], [-0.5, -2.4, -1.2], [-1.0, -0.4, -0.5, -1.4]]
REWARDS = [1.0, 0.0, 0.0, 1.0]
LUFFY = ["algorithm=luffy", "data.demonstrations_per_group=1", "data.demonstration_column=answer"]


def trajectory(sample: int, size: int, **fields: Any) -> Trajectory:
    """A prompt of one token and an answer."""
    written = np.arange(size + 1) > 0
    nodes = chain_nodes(
        np.arange(size + 1), written, np.where(written, -1.0, 0.0).astype(np.float32), np.where(written, 3, -1)
    )
    return Trajectory("p", 0, sample, nodes, "stop", "", accuracy=None, **fields)


def group() -> list[Trajectory]:
    """Three samples and a demonstration, with the lengths and rewards of the fixture."""
    shown = [{}, {}, {}, {OFF_POLICY: True}]
    return [
        trajectory(k, len(OLD[k]), reward=reward, metadata=dict(metadata))
        for k, (reward, metadata) in enumerate(zip(REWARDS, shown, strict=True))
    ]


def column(values: list[list[float]]) -> torch.Tensor:
    return torch.tensor([x for row in values for x in [0.0, *row]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [({"name": "token-mean"}, 0.004473), ({"name": "seq-mean-token-sum-norm", "horizon": 4}, 0.003634)],
)
def test_the_worked_numbers_from_trajectories_to_the_loss(aggregation: dict[str, Any], expected: float) -> None:
    algorithm = Algorithm.model_validate(
        {**algorithm_from_preset("luffy").model_dump(), "aggregation": aggregation, "entropy": {"coef": 0}}
    )
    pipeline = AlgorithmPipeline(algorithm, num_updates=2, has_demonstrations=True)
    learner = SimpleNamespace(outputs=lambda batch, needs: {"logp": column(OLD)})
    batch = pipeline.select(pipeline.shape(pack(group()), 1, 4), 1)
    context = StepContext(cast(Any, learner))
    batch = pipeline.prepare(batch, context)
    assert batch.sequence["advantages"].tolist() == [0.5, -0.5, -0.5, 0.5]
    (mini,) = mini_batches(pipeline.trim(batch, context), algorithm, 1, 1, 8192)
    logp = column(NEW)[mini.loss_mask].requires_grad_()
    loss, sums = pipeline.loss(loss_view(mini, logp, torch.zeros_like(logp)))
    assert float(loss.detach()) == pytest.approx(expected, abs=1e-6)
    assert float(sums["demonstrated"]) == 4
    if aggregation["name"] == "token-mean":
        loss.backward()
        assert logp.grad is not None
        assert logp.grad[-4:].tolist() == pytest.approx([-0.006463, -0.004345, -0.004673, -0.007895], abs=1e-6)


def test_a_demonstration_is_in_no_comparison_of_sampler_and_trainer() -> None:
    shown = pack(group()).with_token(old_logp=column(OLD))
    own = pack(group()[:3]).with_token(old_logp=column(OLD[:3]))
    algorithm = Algorithm.model_validate(
        {"correction": {"name": "decoupled", "weights": "token", "reject": {"token_k1": (0.5, 2.0)}}}
    )
    reports = [gap_report(batch, batch, None, Algorithm().correction, 3).metrics for batch in (shown, own)]
    assert reports[0] == reports[1]
    (with_shown, metrics, *_), (alone, expected, *_) = (
        apply_to_sampled(batch, algorithm.correction, None, apply_correction) for batch in (shown, own)
    )
    assert metrics == expected
    size = own.num_tokens
    assert with_shown.token["rollout_weight"][:size].tolist() == alone.token["rollout_weight"].tolist()
    assert with_shown.token["rollout_weight"][size:].tolist() == [1.0] * 5
    assert with_shown.loss_mask[:size].tolist() == alone.loss_mask.tolist()
    assert with_shown.loss_mask[size:].tolist() == [False, *[True] * 4]


# --- runs ----------------------------------------------------------------------------------------------------------------


def events(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal" / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("source", ["sync", "ahead", "async"])
def test_every_group_has_its_demonstration_whatever_the_source(source: str, tmp_path: Path, warm: Path) -> None:
    start = ["model.new=null", f"model.path={warm}", f"rollout.source={source}", "run.samples_every=1"]
    folder = run_of(tmp_path / "run", TINY, [*start, *LUFFY])
    rows = read_metrics(folder / "metrics.jsonl")
    for row in rows:
        assert row["demonstrations/number"] == 4
        assert row["demonstrations/accuracy"] == 1
        assert row["demonstrations/missing"] == 0
        assert row["mismatch/max"] < (1e-3 if source == "sync" else 20)  # a demonstration taken for a sample is far off
        assert 0 < row["actor/demonstrated"] < 0.5
        assert "reward/shaped" not in row  # nothing is shaped
    assert min(row["reward/accuracy"] for row in rows) < 1  # of the policy's samples alone
    used = [e["ids"] for e in events(folder) if e["event"] == "used"]
    assert all(sum(name.endswith(".4") for name in ids) == 4 and len(ids) == 20 for ids in used)
    assert len({name for ids in used for name in ids}) == 4 * 20  # nothing twice
    table = pq.read_table(folder / "samples" / "train-000001.parquet").to_pylist()
    assert [row["sample"] for row in table if row["finish"] == "demonstration"] == [4] * 4
    assert all(row["completion"].strip() == row["answer"] for row in table if row["finish"] == "demonstration")
    for row in table:  # no engine sampled it, and its author says nothing
        has_logp = row["finish"] != "demonstration"
        assert (row["logp"] is not None, row["gap"] is not None) == (has_logp, has_logp)


def test_prompts_without_a_demonstration_are_counted_and_named(tmp_path: Path, warm: Path) -> None:
    rows = "".join(json.dumps({"prompt": row["prompt"], "completion": "1"}) + "\n" for row in ROWS[:9])
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "shown.jsonl").write_text(rows)
    overrides = ["data.train=[{path: rows.jsonl}]", "reward.parts=exact", "data.demonstrations.path=shown.jsonl"]
    start = ["model.new=null", f"model.path={warm}", "algorithm=luffy", "data.demonstrations_per_group=2"]
    folder = run_of(tmp_path / "run", TINY, [*start, *overrides, "training.steps=3"])
    assert "3 of 12 prompts have no demonstration and are sampled only: rows.jsonl/9, rows.jsonl/10, rows.jsonl/11" in (
        (folder / "log.txt").read_text()
    )
    steps = read_metrics(folder / "metrics.jsonl")
    assert sum(row["demonstrations/missing"] for row in steps) == 3  # an epoch is three steps
    assert [row["demonstrations/number"] for row in steps] == [4 - row["demonstrations/missing"] for row in steps]
    assert all(row["demonstrations/accuracy"] == 0 for row in steps)  # judged by the same reward


def test_a_step_without_any_demonstration_says_so(tmp_path: Path, warm: Path) -> None:
    known = {"prompt": ROWS[0]["prompt"], "completion": "11", "logp": [-0.5, -0.25, -0.125]}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "shown.jsonl").write_text(json.dumps(known) + "\n")
    overrides = ["data.train=[{path: rows.jsonl}]", "reward.parts=exact", "data.demonstrations.path=shown.jsonl"]
    start = ["model.new=null", f"model.path={warm}", "algorithm=luffy", "data.demonstrations_per_group=1"]
    folder = run_of(tmp_path / "run", TINY, [*start, *overrides, "training.steps=3", "run.samples_every=1"])
    steps = read_metrics(folder / "metrics.jsonl")
    assert sorted((row["demonstrations/number"], row["demonstrations/missing"]) for row in steps) == [
        (0, 4), (0, 4), (1, 3)
    ]  # fmt: skip
    assert [("demonstrations/reward" in row) for row in steps] == [row["demonstrations/number"] > 0 for row in steps]
    rows = [row for path in sorted((folder / "samples").glob("train-*")) for row in pq.read_table(path).to_pylist()]
    (shown,) = [row for row in rows if row["finish"] == "demonstration"]
    assert (shown["logp"], shown["gap"]) == (known["logp"], None)


def test_the_kl_in_the_reward_is_steered_by_the_policys_own_samples(tmp_path: Path, warm: Path) -> None:
    kl = "algorithm.kl={reward: {estimator: k2, coef: 0.1}, reference: frozen, adaptive: {target: 1.0, horizon: 100}}"
    start = ["model.new=null", f"model.path={warm}", "training.steps=3"]
    rows = read_metrics(run_of(tmp_path / "run", TINY, [*start, *LUFFY, kl]) / "metrics.jsonl")
    for row, later in zip(rows, rows[1:], strict=False):
        assert row["actor/kl_reward"] < 0.8
        expected = row["actor/kl_coef"] * (1 - 0.2 * 16 / 100)  # 4 prompts x 4 samples
        assert later["actor/kl_coef"] == pytest.approx(expected)


KILLED = ("between two mini-batches", "answers written, not scored", "a step after a checkpoint", "between two rounds")


def test_a_run_that_dies_again_and_again_ends_as_one_that_never_did(tmp_path: Path, warm: Path) -> None:
    mixture = "algorithm.loss={weight: mixture, gamma: 0.1, focus: 0.5, clip: 0.2}"
    overrides = ["model.new=null", f"model.path={warm}", *LUFFY, mixture, *COMMON]
    expected = result(run_of(tmp_path / "unbroken", TINY, overrides))
    for name in KILLED:
        with killing(MOMENTS[name]):
            assert dies(lambda: run_of(tmp_path / "run", TINY, overrides)), f"the run never came to: {name}"
    found = result(run_of(tmp_path / "run", TINY, overrides))
    assert [k for k in expected if found[k] != expected[k]] == []
    assert any(name.endswith((".4", ".6")) for ids in found["used"].values() for name in ids)
