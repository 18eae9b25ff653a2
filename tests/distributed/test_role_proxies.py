"""A process reward model behind the wire: the numbers of one in this process, and checkpoints that either can read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from burnish.config.placement import ACTOR
from burnish.core.batch import Batch
from burnish.core.routed_experts import ENGINE_EXPERTS, LEARNER_EXPERTS
from burnish.core.trajectory import Trajectory, chain_nodes, pack
from burnish.distributed import roles
from burnish.distributed.role_proxies import ControllerMetrics, ForwardColumns, RemoteLearner, RemoteProcessRewardModel
from burnish.distributed.role_workers import PROCESS, TrainingWorker
from burnish.distributed.roles import build_process_reward_model
from burnish.distributed.worker_group import WorkerGroup
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import write_contents
from burnish.trainers.process_rewards import ProcessRewards
from tests.distributed.in_process_backend import HereBackend
from tests.distributed.toy_run import config_of

PRIME = ["algorithm=prime", "algorithm.process={mini_batches: 2, optimizer: {lr: 0.01}}", "algorithm.kl.loss.coef=0"]


def remote(folder: Path) -> RemoteProcessRewardModel:
    config = config_of(folder, *PRIME, "algorithm.kl.reference=none")
    backend = HereBackend(lambda rank: TrainingWorker(config, folder, None), 1)
    group = WorkerGroup("actor", TrainingWorker, backend, deadline_s=5)
    group.shares = group.place()
    return RemoteProcessRewardModel(
        RemoteLearner(group, PROCESS, ControllerMetrics([group]), torch.float64, ForwardColumns(), lambda: None)
    )


def batch() -> Batch:
    """Four groups of three answers, some right."""
    generator = np.random.default_rng(0)
    found = []
    for k in range(12):
        size = 3 + k % 4
        mask = np.arange(size) > 1
        tokens = np.concatenate([[3, 4 + k // 3], generator.integers(3, 12, size - 2)])
        nodes = chain_nodes(tokens, mask, np.zeros(size, np.float32), np.where(mask, 0, -1))
        right = float(k % 3 == 0)
        found.append(Trajectory(f"p{k // 3}", 0, k % 3, nodes, "stop", "", reward=right, accuracy=right))
    return pack(found)


def test_learning_rewarding_and_saving_are_those_of_one_process(tmp_path: Path) -> None:
    config = config_of(tmp_path, *PRIME, "algorithm.kl.reference=none")
    policy = roles.build_policy(config.model, config.data.train, config.seed, tmp_path)
    here = build_process_reward_model(config, policy, tmp_path)
    assert here is not None
    assert config.algorithm.process is not None
    there, settings, rows = remote(tmp_path), config.algorithm.process, batch()
    one, other = ProcessRewards(here, settings), ProcessRewards(there, settings)
    for _ in range(3):
        mine, theirs = one(rows), other(rows)
        assert mine.metrics == theirs.metrics
        assert torch.equal(mine.rewards, theirs.rewards)
    assert mine.rewards.any()
    assert there.learner.updates == here.learner.updates == 6
    # What the workers wrote goes on here, and what was written here goes on there.
    for source, target in ((there, build_process_reward_model(config, policy, tmp_path)), (here, remote(tmp_path))):
        folder = tmp_path / type(source).__name__
        folder.mkdir()
        write_contents(folder, source.contents(keep_in_place))
        assert target is not None
        target.load(folder)
        assert target.learner.updates == 6
        assert torch.equal(target.logprobs(rows), here.logprobs(rows))
        assert torch.equal(target.prior(rows), here.prior(rows))


def test_replayed_experts_reach_passes_without_gradient(tmp_path: Path) -> None:
    new = "model.new={family: qwen3_moe, hidden_size: 16, num_layers: 2, num_heads: 2, experts: [4, 2, 12], max_positions: 64}"
    config = config_of(tmp_path, new, "algorithm.router.engine_experts=replay")
    group = WorkerGroup("actor", TrainingWorker, HereBackend(lambda _: TrainingWorker(config, tmp_path, None), 1), 5)
    group.shares = group.place()
    there = RemoteLearner(group, ACTOR, ControllerMetrics([group]), torch.float64, ForwardColumns(), lambda: None)
    here = roles.build_learner(config, roles.build_policy(config.model, config.data.train, config.seed, tmp_path))
    rows = batch()
    record = torch.tensor([0, 3]).expand(rows.num_tokens, 2, 2).to(torch.int16)
    replayed = rows.with_token(**{ENGINE_EXPERTS: record})
    torch.testing.assert_close(there.logprobs(replayed), here.logprobs(replayed), atol=0, rtol=0)
    assert not torch.equal(there.logprobs(replayed), there.logprobs(rows))
    found, wanted = (one.outputs(replayed, frozenset({LEARNER_EXPERTS}))[LEARNER_EXPERTS] for one in (there, here))
    assert torch.equal(found, record)
    assert torch.equal(wanted, record)
