"""A run of a fraction of a second whose rewards differ from the first step on, and its parts without Ray."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.core.engine import Completion, Engine, Request, SamplingOptions
from burnish.distributed import engine_builder
from burnish.distributed.ray_roles import build_remote_engine
from burnish.distributed.role_proxies import ControllerMetrics
from burnish.distributed.role_workers import RolloutWorker, TrainingWorker
from burnish.distributed.worker_group import LocalBackend, WorkerGroup
from burnish.inference.remote_engine import RemoteEngine
from tests.distributed.in_process_backend import HereBackend

TOY = """
model: {new: {hidden_size: 16, num_layers: 2, num_heads: 2, mlp_size: 24, max_positions: 32}, dtype: float64, device: cpu}
data: {train: {task: sort_digits, limit: 12, options: {min_digits: 2, max_digits: 3}}, max_prompt_tokens: 8}
reward: {workers: 1, parts: [{name: format, options: {pattern: '[0-9]{1,3}'}}, {name: task, weight: 0.5}]}
rollout: {prompts: 4, n: 4, max_tokens: 4}
training: {steps: 10, mini_batches: 2, optimizer: {lr: 1.0e-2}}
algorithm: {kl: {loss: {coef: 0.1}, reference: frozen}}
run: {samples_every: 1, save_every: 4, threads: 1}
"""
OPTIONS = SamplingOptions(max_tokens=6)


def config_of(folder: Path, *overrides: str) -> TrainConfig:
    (folder / "toy.yaml").write_text(TOY)
    return load(TrainConfig, folder / "toy.yaml", ["placement=ray", *overrides]).config


@dataclass
class Parts:
    """An engine over workers in this process, one that trains, and what they say."""

    config: TrainConfig
    trainer: TrainingWorker
    backend: HereBackend
    engine: RemoteEngine
    notes: list[str] = field(default_factory=list)
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def local(self) -> Engine:
        """An engine on the trainer's own tensors."""
        return engine_builder.build_engine(self.trainer.policy, self.config.rollout)


def parts_of(folder: Path, *overrides: str, engines: int = 2, backend: type[HereBackend] = HereBackend) -> Parts:
    config = config_of(folder, f"placement.engines={engines}", *overrides)
    trainer = TrainingWorker(config, folder, None)
    actor = WorkerGroup("actor", TrainingWorker, LocalBackend(trainer), deadline_s=5)
    here = backend(lambda rank: RolloutWorker(config, folder), engines)
    rollout = WorkerGroup("rollout", RolloutWorker, here, deadline_s=5)
    notes: list[str] = []
    ledger = ControllerMetrics([actor, rollout])
    engine = build_remote_engine(config, trainer.policy, actor, rollout, ledger, notes.append)
    return Parts(config, trainer, here, engine, notes, ledger.counts)


def requests(count: int, samples: int = 2, sampling: SamplingOptions = OPTIONS, first: int = 0) -> list[Request]:
    """`samples` of each of `count` prompts."""
    return [
        Request(f"{k}.{s}", (1 + k % 9, 2, 3), sampling, key=100 * k + s)
        for k in range(first, first + count)
        for s in range(samples)
    ]


def run(engine: Engine, asked: list[Request]) -> dict[str, tuple[list[int], str, int]]:
    """What came of requests, by their ids."""
    engine.submit(asked)
    return {c.id: told(c) for c in engine.stream()}


def told(completion: Completion) -> tuple[list[int], str, int]:
    return completion.tokens.tolist(), completion.finish, completion.version


def learn(trainer: TrainingWorker) -> None:
    """Change every weight a little, as an update would."""
    with torch.no_grad():
        for parameter in trainer.policy.module.parameters():
            parameter.mul_(1.01)
