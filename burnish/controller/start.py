"""The roles of a run as Ray's workers play them: groups started, proxies in the trainer's hands."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from burnish.config.errors import UserError
from burnish.config.placement import RayPlacement
from burnish.config.schema import TrainConfig
from burnish.controller.group import WorkerGroup
from burnish.controller.placement import ACTOR, ROLLOUT
from burnish.controller.proxies import Ledger, RemoteCritic, RemoteLearner, RemotePolicy, RemoteReference, Slimmer
from burnish.controller.workers import CRITIC, RolloutWorker, TrainingWorker
from burnish.core.engine import Engine, Request
from burnish.models.decoder import Decoder
from burnish.models.policy import PolicyModel
from burnish.rollout.native.shared import check_requests
from burnish.rollout.remote import RemoteEngine, Trainer
from burnish.rollout.sync.verify import probe
from burnish.training.interfaces import AnyCritic, AnyLearner, AnyReference

if TYPE_CHECKING:
    from burnish.controller.ray_cluster import Cluster


OBJECTS = 50_000
"""New objects after which the garbage collector looks at them."""


@dataclass(frozen=True)
class Roles:
    """Who does what in a run, wherever they are."""

    policy: PolicyModel
    learner: AnyLearner
    reference: AnyReference | None
    critic: AnyCritic | None
    engine: Engine


@contextmanager
def open_cluster(config: TrainConfig) -> Iterator[Cluster | None]:
    """Ray with room for the run's processes; None where it needs none. An impossible placement is refused here."""
    if not isinstance(config.placement, RayPlacement):
        yield None
        return
    try:
        from burnish.controller.ray_cluster import Cluster
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise UserError("placement=ray needs Ray: pip install 'burnish[ray]'") from error
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
) -> Roles:
    """Start the workers of a run and wait until all are made. `policy` gives its weights up: the workers have them.

    With `weights` (a saved model) the run starts from those. What a worker prints goes to a file of its own in `logs`.
    """
    from burnish.controller.ray_group import RayBackend

    placement = config.placement
    assert isinstance(placement, RayPlacement)
    deadline_s = placement.timeout_s
    place = base.resolve() if base is not None else None
    start = None if weights is None else weights.resolve()
    # As the cluster's machines are, not as the driver's is.
    config = config.model_copy(
        update={"model": config.model.model_copy(update={"device": "cuda" if cluster.on_gpu else "cpu"})}
    )
    training = RayBackend(cluster, ACTOR, TrainingWorker, (config, place, start), logs, deadline_s, together=True)
    sampling = RayBackend(cluster, ROLLOUT, RolloutWorker, (config, place), logs, deadline_s)
    for backend in (training, sampling):
        backend.start()
    actor = WorkerGroup(ACTOR, TrainingWorker, training, deadline_s, mini_batches=config.training.mini_batches)
    actor.shares = actor.place()
    rollout = WorkerGroup(ROLLOUT, RolloutWorker, sampling, deadline_s)
    ledger = Ledger([actor, rollout])
    engine = build_remote_engine(config, policy, actor, rollout, ledger, note)
    about = actor.about()
    dtype: torch.dtype = about["dtype"]
    # Engines on the same GPU give their memory up while the learner works; on CPUs there is room for both.
    before = engine.sleep if cluster.on_gpu and placement.layout == "colocated" else _nothing
    slim = Slimmer()
    learner = RemoteLearner(actor, ACTOR, ledger, dtype, slim, before)
    slot, critic = config.algorithm.kl.reference, config.algorithm.critic
    keep_what_is_there()
    return Roles(
        policy=RemotePolicy.of(policy, actor),
        learner=learner,
        reference=RemoteReference(actor, slot.name, about, slim, before) if slot.name != "none" else None,
        critic=RemoteCritic(RemoteLearner(actor, CRITIC, ledger, dtype, slim, before), critic.clip) if critic else None,
        engine=engine,
    )


def build_remote_engine(
    config: TrainConfig,
    policy: PolicyModel,
    actor: WorkerGroup,
    rollout: WorkerGroup,
    ledger: Ledger,
    note: Callable[[str], None],
) -> RemoteEngine:
    """The engine over a group of them."""
    module, decode = policy.module, policy.tokenizer.decode

    def check(requests: Sequence[Request]) -> None:
        if isinstance(module, Decoder):  # any other engine says so itself
            check_requests(requests, frozenset(), module, decode)

    trainer = Trainer(publish=actor.publish, score=actor.score, dtype=config.model.dtype)
    asked = probe(policy.tokenizer.vocab_size, policy.max_positions)
    return RemoteEngine(rollout, trainer, asked, actor.deadline_s, check, ledger.count, note)


def keep_what_is_there() -> None:
    """Let the garbage collector pass over what was made until now, modules above all: it stays until the run ends.

    A step makes hundreds of thousands of small objects, and the collector would walk through everything several times in each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(OBJECTS)


def _nothing() -> None:
    """Nobody has to make room."""
