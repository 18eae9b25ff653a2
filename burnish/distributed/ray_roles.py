"""Starts the roles of a run in Ray workers, and returns proxies of them for the trainer."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from burnish.config.default_correction import rounding_setting
from burnish.config.errors import UserError
from burnish.config.extras import install_hint
from burnish.config.placement import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, RayPlacement
from burnish.config.schema import TrainConfig
from burnish.core.dispatch import WorkerLost
from burnish.core.engine import Engine, Request
from burnish.distributed.engine_builder import is_foreign
from burnish.distributed.parallel_rollout import ParallelEngines, ParallelRolloutWorker
from burnish.distributed.remote_reward_pool import RemoteRewardPool, RewardWorker
from burnish.distributed.role_proxies import (
    ControllerMetrics,
    ForwardColumns,
    RemoteCritic,
    RemoteLearner,
    RemotePolicy,
    RemoteProcessRewardModel,
    RemoteReference,
)
from burnish.distributed.role_workers import PROCESS, TRAINING_ROLES, RolloutWorker, TrainingWorker
from burnish.distributed.weight_link import LinkAddress
from burnish.distributed.worker_group import WorkerGroup
from burnish.inference.engine_common import check_native_request, check_requests
from burnish.inference.remote_engine import RemoteEngine
from burnish.inference.weight_sync import (
    FOREIGN_PROBE_TOLERANCE,
    PROBE_TOLERANCE,
    ROUNDED_PROBE_TOLERANCE,
    TrainerClient,
    probe_request,
)
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.scoring import Rewards
from burnish.rewards.worker_pool import OutcomeQueue
from burnish.training.interfaces import AnyCritic, AnyLearner, AnyProcessRewardModel, AnyReference

if TYPE_CHECKING:
    from burnish.distributed.ray_cluster import Cluster


GC_THRESHOLD = 200_000
"""Allocations after which the garbage collector runs: about those of some ten thousand samples, which is less than once a step. Cyclic
garbage stays below some tens of megabytes."""


@dataclass(frozen=True)
class Roles:
    """The roles of a run, in this process or as proxies."""

    policy: PolicyModel
    learner: AnyLearner
    reference: AnyReference | None
    critic: AnyCritic | None
    engine: Engine
    process: AnyProcessRewardModel | None = None


@contextmanager
def open_cluster(config: TrainConfig) -> Iterator[Cluster | None]:
    """Ray with resources for the run's processes; None without placement=ray. Refuses a placement that does not fit."""
    if not isinstance(config.placement, RayPlacement):
        yield None
        return
    try:
        from burnish.distributed.ray_cluster import Cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError(f"placement=ray needs Ray: {install_hint('ray')}") from error
    on_gpu = {"auto": None, "cpu": False}.get(config.model.device, True)
    with Cluster(config.placement, on_gpu) as cluster:
        yield cluster


def start_roles(
    config: TrainConfig,
    base: Path | None,
    policy: PolicyModel,
    weights: Path | None,
    cluster: Cluster,
    logs: Path,
    note: Callable[[str], None],
    rewards: Rewards,
) -> Roles:
    """Start the workers of a run, and wait until all are built.

    `policy` gives up its weights, which the workers have. `rewards` are computed by workers if they have a pool. With `weights` (a saved
    model) the run starts from those. A worker's output goes to a file in `logs`.
    """
    groups = _start_groups(config, base, weights, cluster, logs)
    if cluster.placement.is_separate(REWARD):
        groups[REWARD] = start_reward_workers(config, base, policy.tokenizer, cluster, logs, note, rewards)
    actor, rollout = groups[ACTOR], groups[ROLLOUT]
    metrics = ControllerMetrics(list(groups.values()))
    engine = build_remote_engine(config, policy, actor, rollout, metrics, note)
    placement, columns = cluster.placement, ForwardColumns()
    dtype: torch.dtype = actor.about()["dtype"]

    def before(role: str) -> Callable[[], None]:
        # Engines free their memory before a role on the same GPU works; on CPUs there is room for both. In any case the last
        # weights must be verified before the learner changes its own.
        if engine.at_once:  # weights are verified when they are sent, and another thread uses the engine
            return _no_op
        return engine.sleep if cluster.on_gpu and placement.share_pool(role, ROLLOUT) else engine.confirm

    def learner(role: str) -> RemoteLearner:
        group = groups.get(role, actor)
        return RemoteLearner(group, role, metrics, dtype, columns, before(role if role in groups else ACTOR))

    slot, critic, process = config.algorithm.kl.reference, config.algorithm.critic, config.algorithm.process
    with_reference = groups.get(REFERENCE, actor)
    where = before(REFERENCE if REFERENCE in groups else ACTOR)
    freeze_garbage_collector()
    return Roles(
        policy=RemotePolicy.of(policy, actor),
        learner=learner(ACTOR),
        reference=None
        if not slot.has_weights
        else RemoteReference(with_reference, slot.name, with_reference.about(), columns, where),
        critic=RemoteCritic(learner(CRITIC), critic.clip) if critic else None,
        engine=engine,
        process=RemoteProcessRewardModel(learner(PROCESS)) if process else None,
    )


def _no_op() -> None:
    """No engine has to sleep or verify weights."""


def _start_groups(
    config: TrainConfig, base: Path | None, weights: Path | None, cluster: Cluster, logs: Path
) -> dict[str, WorkerGroup]:
    """The training and rollout groups by role. All actors are started at once; returns when all are ready."""
    from burnish.distributed.ray_backend import RayBackend

    placement = cluster.placement
    deadline_s, place = placement.timeout_s, base.resolve() if base is not None else None
    start = None if weights is None else weights.resolve()
    apart = [role for role in (REFERENCE, CRITIC) if placement.is_separate(role)]
    together = [ACTOR, *(part for part in TRAINING_ROLES if part != ACTOR and part not in apart)]

    rollout_worker = ParallelRolloutWorker if placement.engine_tensor > 1 else RolloutWorker

    def backend(role: str, kind: type, *more: Any) -> RayBackend:
        device = "cuda" if cluster.has_gpu(role) else "cpu"  # decided by its machine, not by the driver's
        own = config.model_copy(update={"model": config.model.model_copy(update={"device": device})})
        group_size = placement.size(role) if kind is TrainingWorker else placement.engine_tensor
        return RayBackend(cluster, role, kind, (own, place, *more), logs, deadline_s, group_size)

    backends = {ACTOR: backend(ACTOR, TrainingWorker, start, together), ROLLOUT: backend(ROLLOUT, rollout_worker)}
    backends |= {role: backend(role, TrainingWorker, start, [role]) for role in apart}
    groups = {}
    for role, made in backends.items():
        made.start()
        kind = rollout_worker if role == ROLLOUT else TrainingWorker
        groups[role] = WorkerGroup(role, kind, made, deadline_s, mini_batches=config.training.mini_batches)
        if kind is TrainingWorker:
            groups[role].shares = groups[role].place()
    return groups


def start_reward_workers(
    config: TrainConfig,
    base: Path | None,
    tokenizer: Tokenizer,
    cluster: Cluster,
    logs: Path,
    note: Callable[[str], None],
    rewards: Rewards,
) -> WorkerGroup:
    """Start the workers that compute a run's rewards."""
    from burnish.distributed.ray_backend import RayBackend

    deadline_s, reward = cluster.placement.timeout_s, config.reward
    place = base.resolve() if base is not None else None
    made = (reward, list(rewards.worker_setups.values()), tokenizer, place, cluster.placement.cpus_of(REWARD))
    backend = RayBackend(cluster, REWARD, RewardWorker, made, logs, deadline_s)
    backend.start()
    group = WorkerGroup(REWARD, RewardWorker, backend, deadline_s)

    def open_pool(outcomes: OutcomeQueue) -> RemoteRewardPool:
        models = [index for index, part in enumerate(reward.parts) if part.name == "model"]
        pool = RemoteRewardPool(group, outcomes, reward.workers, reward.timeout_s, deadline_s, note, models)
        cluster.before_close.append(pool.close)  # while workers end, it would restart them
        return pool

    rewards.use_pool(open_pool)
    return group


def build_remote_engine(
    config: TrainConfig,
    policy: PolicyModel,
    actor: WorkerGroup,
    rollout: WorkerGroup,
    metrics: ControllerMetrics,
    note: Callable[[str], None],
) -> RemoteEngine:
    """One engine over a group of rollout workers."""
    module = policy.module

    def check(requests: Sequence[Request]) -> None:
        if isinstance(module, Decoder):  # other engines check by themselves
            check_requests(requests, (), partial(check_native_request, model=module, has_text=True))

    tolerances = FOREIGN_PROBE_TOLERANCE if is_foreign(config.rollout) else PROBE_TOLERANCE
    tolerance = tolerances[config.model.dtype]
    if rounding_setting(config.model_dump()) is not None:
        tolerance = max(tolerance, ROUNDED_PROBE_TOLERANCE)
    trainer = TrainerClient(actor.publish.later, actor.publish_again.later, actor.score.later, tolerance)
    if uses_link(config, actor.size):
        trainer = replace(
            trainer, open_link=partial(open_link, config.placement, actor, rollout, note), reshard=actor.reshard.later
        )
    asked = probe_request(policy.tokenizer.vocab_size, policy.max_positions)
    at_once = config.rollout.source.name != "sync"  # else sampling and learning alternate
    assert isinstance(config.placement, RayPlacement)
    ranks = config.placement.engine_tensor
    workers = rollout if ranks == 1 else ParallelEngines(rollout, ranks)
    engine = RemoteEngine(workers, trainer, asked, actor.deadline_s, check, metrics.count, note, at_once)
    if at_once:
        # Before the first update: a resumed run learns from its journal while engines sample for later steps.
        engine.load(0, ())
    return engine


def uses_link(config: TrainConfig, num_learners: int) -> bool:
    """Whether weights go straight from the learner's ranks to those of engines (`weight_link.py`), both of which must be several.

    Deltas, and weights that engines get while the learner trains, need a copy of the last version, which the object store has.
    """
    placement = config.placement
    is_full = isinstance(placement, RayPlacement) and placement.engine_tensor > 1 and placement.sync == "full"
    return is_full and num_learners > 1 and config.rollout.source.name == "sync"


def open_link(placement: RayPlacement, actor: WorkerGroup, rollout: WorkerGroup, note: Callable[[str], None]) -> bool:
    """Connect the learner's ranks with those of all engines. If one does not come, weights go through the object store."""
    host, port = actor.host_link()
    address = LinkAddress(host, port, actor.size, rollout.size, placement.engine_tensor, placement.timeout_s)
    joining = actor.join_link.later(address)
    handles = rollout.send_each("join_link", {process: (address, process) for process in range(rollout.size)})
    rollout.wait_all(handles)
    why = "a process did not come"
    try:
        has_joined = [rollout.result(handle) for handle in handles]
    except WorkerLost as error:  # the engine is started again when it does not take weights
        has_joined, why = [False], str(error)
    if all([*has_joined, *joining.result()]):
        return True
    note(
        f"this version of the weights goes through the object store, since the link to the engines was not made: {why}"
    )
    return False


def freeze_garbage_collector() -> None:
    """Exclude all existing objects, mostly modules, from garbage collection: they stay until the run ends.

    A step allocates hundreds of thousands of small objects. Otherwise the collector would scan everything several times per step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)
