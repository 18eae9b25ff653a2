"""Proxies of the learner, reference, critic and process reward model that run in worker groups.

They implement `training/interfaces.py`, so that the training loop is the same as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from burnish.algorithms.losses.model_losses import ValueLoss
from burnish.algorithms.losses.policy_loss import Loss
from burnish.config.placement import REFERENCE
from burnish.core.batch import Batch
from burnish.core.pictures import PICTURE_COLUMNS
from burnish.core.routed_experts import ENGINE_EXPERTS
from burnish.distributed.role_workers import POLICY
from burnish.distributed.worker_group import PendingCall, WorkerGroup
from burnish.models.policy import PolicyModel
from burnish.run.checkpoint.saver import HostCopy, TensorStaging
from burnish.run.checkpoint.snapshot import Checksums, Content, WriterRank
from burnish.training.forward import Needs
from burnish.training.learner import Update
from burnish.training.meter import LEARNER_PHASES, MeterReading, memory_metrics
from burnish.training.reference import REFERENCES, Reference

DRIVER_ONLY_PREFIXES = (
    *("behaviour_logp", "version", "token_rewards", "dense_rewards", "step_rewards", "process_rewards"),
    *("trajectory_ids", "reward", "part/", "truncated", "greedy_reward", "prompt_value", "budget"),
)
"""Prefixes of columns that only the driver uses (for advantages, corrections and filters), and no loss reads."""


@dataclass
class ControllerMetrics:
    """The driver's counts of a step: messages and bytes, and what engines report."""

    groups: list[WorkerGroup]
    counts: dict[str, float] = field(default_factory=dict)
    _lock: Lock = field(default_factory=Lock)

    def count(self, name: str, amount: float) -> None:
        """Add to a metric of the step. Any thread may call it, since engines are read while the learner works."""
        with self._lock:
            self.counts[name] = self.counts.get(name, 0.0) + amount

    def take(self) -> dict[str, float]:
        """The metrics since the last call, and the memory of this process."""
        taken = [group.backend.traffic.take() for group in self.groups]
        with self._lock:
            counts, self.counts = self.counts, {}
        values = {
            "controller/messages": float(sum(t.messages for t in taken)),
            "controller/bytes_out": float(sum(t.bytes_out for t in taken)),
            "controller/bytes_in": float(sum(t.bytes_in for t in taken)),
            "controller/store_bytes": sum(t.bytes_stored for t in taken) + counts.get("controller/sync_bytes", 0.0),
        }
        if "memory/current_gib" in (own := memory_metrics(torch.device("cpu"))):
            values["controller/resident_gib"] = own["memory/current_gib"]
        return values | counts


@dataclass(frozen=True)
class RemoteFiles:
    """Checkpoint files that the ranks of a group have staged, and write themselves."""

    group: WorkerGroup
    what: str

    def write(self, folder: Path) -> Checksums:
        sums: Checksums = {}
        for part in self.group.write(self.what, folder.resolve()):
            sums |= part
        return sums


def stage_remote(group: WorkerGroup, what: str, stage: TensorStaging) -> list[Content]:
    """Stage a part of a checkpoint in the memory of its workers."""
    in_memory = isinstance(stage, HostCopy)
    is_short = any(group.stage(what, in_memory))
    if isinstance(stage, HostCopy):
        stage.is_short = stage.is_short or is_short
    return [RemoteFiles(group, what)]


class RemotePolicy(PolicyModel):
    """The policy without its weights, which the group has; tokenizer and architecture are here."""

    group: WorkerGroup

    @staticmethod
    def of(policy: PolicyModel, group: WorkerGroup) -> RemotePolicy:
        """The proxy of a policy whose weights are no longer needed here; their memory is freed."""
        remote = RemotePolicy(policy.module.to("meta"), policy.tokenizer, policy.source, policy.note)
        remote.group = group
        return remote

    def contents(self, stage: TensorStaging) -> list[Content]:
        return stage_remote(self.group, POLICY, stage)

    @property
    def part(self) -> WriterRank:
        return WriterRank()

    def load_weights(self, directory: Path) -> None:
        self.group.load(POLICY, directory.resolve())


class RemoteMeter:
    """The meters of all ranks as one."""

    def __init__(self, group: WorkerGroup, role: str) -> None:
        self.group, self.role = group, role
        self.memory: dict[str, float] = {}
        """Largest memory of any rank at the last reading."""
        self.requested: list[PendingCall] = []
        """Readings that were requested with `release` and are read later."""

    def read(self) -> MeterReading:
        """The work since the last reading."""
        requested, self.requested = self.requested or [self.group.read.later(self.role)], []
        return reduce(add, [self._of_all(pending.result()) for pending in requested])

    def _of_all(self, found: list[tuple[MeterReading, dict[str, float]]]) -> MeterReading:
        """Seconds and FLOPs are means over ranks, tokens the sum over data-parallel ranks."""
        readings, memories = zip(*found, strict=True)
        self.memory = {name: max(memory[name] for memory in memories) for name in memories[0]}
        count = len(readings)
        shares = [self.group.shares.index(part) for part in range(max(self.group.shares) + 1)]
        return MeterReading(
            {part: sum(reading.seconds[part] for reading in readings) / count for part in LEARNER_PHASES},
            sum(readings[rank].tokens for rank in shares),
            _mean([reading.needed for reading in readings]),
            _mean([reading.executed for reading in readings]),
        )


def _mean(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) // len(known) if len(known) == len(amounts) else None


class RemoteLearner:
    """Proxy of a `Learner` in a group. `before` is called before work that needs memory which engines may hold."""

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        metrics: ControllerMetrics,
        dtype: torch.dtype,
        forward_columns: ForwardColumns,
        before: Callable[[], None],
    ) -> None:
        self.group, self.role, self.metrics, self.dtype = group, role, metrics, dtype
        self.forward_columns, self.before = forward_columns, before
        self.device = torch.device("cpu")
        self.model: Any = None
        self.updates = 0
        self.meter = RemoteMeter(group, role)

    def logprobs(self, batch: Batch) -> Tensor:
        return self.outputs(batch, frozenset())["logp"]

    def outputs(self, batch: Batch, needs: Needs, mask: str = "action_mask") -> dict[str, Tensor]:
        self.before()
        found: dict[str, Tensor] = self.group.outputs(self.role, self.forward_columns(batch, mask), needs, mask)
        return found

    def update(
        self,
        batch: Batch,
        loss: Loss,
        lr_scale: float = 1.0,
        also: tuple[Batch, Loss] | None = None,
        columns: bool = True,
    ) -> Update:
        self.before()
        batch = replace(batch, token=_loss_columns(batch.token), sequence=_loss_columns(batch.sequence))
        update: Update = self.group.update(self.role, batch, loss, lr_scale, also, columns)
        self.updates += update.skipped is None
        return update

    def release(self) -> None:
        # The meter is read in the same call, so that a later reading does not wait for calls that were sent in between.
        self.meter.requested.append(self.group.release.later(self.role))

    def reset_optimizer(self) -> None:
        self.group.reset_optimizer(self.role)

    def usage(self) -> dict[str, float]:
        """Memory of the workers, and the driver's metrics."""
        return self.meter.memory | self.metrics.take()

    def contents(self, stage: TensorStaging, folder: str = "") -> list[Content]:
        return stage_remote(self.group, self.role, stage)

    def load(self, directory: Path) -> None:
        self.updates = self.group.load(self.role, directory.resolve())[0]


class ForwardColumns:
    """Reduces a batch to the columns that passes without gradient read, and to small ones.

    For a batch with other columns added it returns the same object, whose shards the workers already have.
    """

    def __init__(self) -> None:
        self._last: Batch | None = None

    def __call__(self, batch: Batch, mask: str) -> Batch:
        # Replayed experts change log-probs. Those of the learner's own pass are for updates, after all passes.
        names = sorted({mask, "action_mask", ENGINE_EXPERTS})
        token = {name: batch.token[name] for name in names if name in batch.token}
        last = self._last
        ragged = {name: column for name, column in batch.ragged.items() if name in PICTURE_COLUMNS}
        reduced = Batch(
            batch.tokens, batch.offsets, token, _loss_columns(batch.sequence), ragged, pictures=batch.pictures
        )
        if last is None or _column_ids(last) != _column_ids(reduced):
            self._last = last = reduced
        return last


def _loss_columns(columns: dict[str, Tensor]) -> dict[str, Tensor]:
    """The columns that losses use."""
    return {name: column for name, column in columns.items() if not name.startswith(DRIVER_ONLY_PREFIXES)}


def _column_ids(batch: Batch) -> list[int]:
    """Identities of the token columns; passes without gradient read no other columns."""
    return [id(column) for column in (batch.tokens, batch.offsets, *batch.token.values())]


class RemoteReference:
    """Proxy of a `Reference` in a group."""

    def __init__(
        self,
        group: WorkerGroup,
        kind: str,
        about: dict[str, Any],
        forward_columns: ForwardColumns,
        before: Callable[[], None],
    ) -> None:
        self.group, self.forward_columns, self.before = group, forward_columns, before
        self.restarts, self.is_policy = bool(about["restarts"]), bool(about["is_policy"])
        made = REFERENCES[kind]
        # Most kinds of reference do nothing after an update or a step, and need no call.
        self._follows_updates = made.after_update is not Reference.after_update
        self._follows_steps = made.after_step is not Reference.after_step or self.is_policy
        self._moves = made.moves and not self.is_policy

    def logprobs(self, batch: Batch) -> Tensor:
        self.before()
        found: Tensor = self.group.reference_logprobs(self.forward_columns(batch, "action_mask"))
        return found

    def after_update(self, model: Any) -> None:
        if self._follows_updates:
            self.group.after_update()

    def after_step(self, model: Any, step: int) -> bool:
        return bool(self.group.after_step(step)) if self._follows_steps else False

    def contents(self, stage: TensorStaging) -> list[Content]:
        return stage_remote(self.group, REFERENCE, stage) if self._moves else []

    def load(self, folder: Path) -> None:
        if self._moves:
            self.group.load(REFERENCE, folder.resolve())


class RemoteCritic:
    """Proxy of a `Critic` in a group."""

    def __init__(self, learner: RemoteLearner, clip: float | None) -> None:
        self.learner, self.loss = learner, ValueLoss(clip)

    def values(self, batch: Batch) -> Tensor:
        return self.learner.outputs(batch, frozenset({"value"}))["value"]

    def update(self, mini_batch: Batch) -> Update:
        return self.learner.update(mini_batch, self.loss, columns=False)

    def contents(self, stage: TensorStaging) -> list[Content]:
        return self.learner.contents(stage)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)


class RemoteProcessRewardModel:
    """Proxy of a `ProcessRewardModel` in a group."""

    def __init__(self, learner: RemoteLearner) -> None:
        self.learner = learner

    def logprobs(self, batch: Batch) -> Tensor:
        return self.learner.logprobs(batch)

    def prior(self, batch: Batch) -> Tensor:
        self.learner.before()
        found: Tensor = self.learner.group.process_prior(self.learner.forward_columns(batch, "action_mask"))
        return found

    def update(self, mini_batch: Batch, loss: Loss) -> Update:
        return self.learner.update(mini_batch, loss)

    def contents(self, stage: TensorStaging) -> list[Content]:
        return self.learner.contents(stage)

    def load(self, folder: Path) -> None:
        self.learner.load(folder)
