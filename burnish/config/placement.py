"""Where the processes of a run are: all in one, or workers that Ray starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from burnish.config.errors import UserError
from burnish.config.parallel import Parallel, check_parallel_fits
from burnish.config.pools import ACTOR, CRITIC, REFERENCE, REWARD, ROLLOUT, Pool, Role, Room, check_pools, in_words
from burnish.config.slots.base import Slot, choice

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig


class LocalPlacement(Slot):
    """Everything in this process; the engine samples from the learner's own tensors."""

    name: Literal["local"] = "local"


class RayPlacement(Slot):
    """Training and sampling in processes of their own, started by Ray on this machine or on the cluster of RAY_ADDRESS."""

    name: Literal["ray"] = "ray"
    workers: int = Field(1, ge=1)
    """Processes that train; `parallel` says how they divide the work."""
    engines: int = Field(1, ge=1)
    """Processes that sample, each with a copy of the weights."""
    cpus: int = Field(1, ge=1)
    """CPUs of each process, and its threads for arithmetic."""
    layout: Literal["colocated", "split"] = "colocated"
    """colocated: the k-th worker and the k-th engine take turns on the same CPUs or GPU; split: each process has its own."""
    pools: dict[str, Pool] = Field(default_factory=dict)
    """Named places for processes, instead of workers, engines, cpus and layout."""
    roles: dict[Role, str] = Field(default_factory=dict)
    """The pool of each role. A reference and a critic that have none, or the actor's, are with the actor's processes; a reward that
    has none is computed beside the controller."""
    sync: Literal["full", "delta"] = "full"
    """What engines are sent after a step: all weights, or only the values that changed (the same bits; a copy of what is trained is kept)."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest time a process may take over one call; then the run stops and says who was waited for and what it did. An engine is
    started again instead."""

    @model_validator(mode="after")
    def _check_pools(self) -> RayPlacement:
        check_pools(self.pools, self.roles)
        for key in ("workers", "engines", "cpus", "layout") if self.pools else ():
            if getattr(self, key) != type(self).model_fields[key].default:
                raise ValueError(f"{key} has no effect with pools, which say how many processes there are and where")
        return self

    @property
    def rooms(self) -> list[Room]:
        """All places, and who is there. Without pools: one for all, or one for workers and one for engines."""
        if self.pools:
            own = {role: where for role, where in self.roles.items() if role in (ACTOR, ROLLOUT) or self.is_apart(role)}
            return [
                (pool, {role: pool.places for role, where in own.items() if where == name})
                for name, pool in self.pools.items()
            ]
        sizes = {ACTOR: self.workers, ROLLOUT: self.engines}
        if self.layout == "colocated":
            return [(Pool(places=max(sizes.values()), cpus=self.cpus), sizes)]
        return [(Pool(places=size, cpus=self.cpus), {role: size}) for role, size in sizes.items()]

    def is_apart(self, role: Role) -> bool:
        """Whether a role has processes of its own: a reference or a critic that is not where the actor is, a reward in a pool."""
        pool = self.roles.get(role)
        return pool is not None and (role == REWARD or pool != self.roles[ACTOR])

    def size(self, role: str) -> int:
        """How many processes a role has that has its own."""
        return next(sizes[role] for _, sizes in self.rooms if role in sizes)

    def cpus_of(self, role: str) -> int:
        """CPUs of each of them."""
        return next(pool.cpus for pool, sizes in self.rooms if role in sizes)

    def take_turns(self, one: str, other: str) -> bool:
        """Whether processes of two roles share places."""
        return any(one in sizes and other in sizes for _, sizes in self.rooms)


STILL = ("frozen", "teacher")
"""References whose weights never change."""
PlacementSlot: Any = choice(LocalPlacement, RayPlacement, plugin=False)
Placement = LocalPlacement | RayPlacement


def scores_elsewhere(placement: Placement) -> bool:
    """Whether rewards have processes of Ray's."""
    return isinstance(placement, RayPlacement) and placement.is_apart(REWARD)


def processes(placement: RayPlacement) -> str:
    """The processes of a run in words."""
    if placement.pools:
        return in_words(placement.pools, placement.roles)
    workers, engines, cpus = (
        f"{number} {what}{'' if number == 1 else 's'}"
        for number, what in ((placement.workers, "worker"), (placement.engines, "engine"), (placement.cpus, "CPU"))
    )
    return f"{workers} and {engines}, {placement.layout}, {cpus} each"


def check_placement_fits(config: TrainConfig) -> None:
    """Refuse what cannot be placed, or would have no effect."""
    placement, parallel = config.placement, config.parallel
    if isinstance(placement, LocalPlacement):
        if parallel != Parallel():
            raise ValueError(
                "parallel has no effect with placement=local, which trains in one process: set placement=ray and placement.workers"
            )
        return
    _check_roles(config, placement)
    trained = [role for role in (ACTOR, REFERENCE, CRITIC) if role == ACTOR or placement.is_apart(role)]
    for role in trained:
        where = f"placement.pools.{placement.roles[role]}.places" if placement.pools else "placement.workers"
        try:
            parallel.sizes(placement.size(role))
        except UserError as error:
            raise ValueError(f"{where}={placement.size(role)}: {error}") from error
    for optimizer in (
        config.training.optimizer,
        *([config.algorithm.critic.optimizer] if config.algorithm.critic else []),
        *([config.algorithm.process.optimizer] if config.algorithm.process else []),
    ):
        check_parallel_fits(parallel, config.model, optimizer, config.training.activations)
    if config.rollout.engine not in ("auto", "native", "transformers"):
        raise ValueError(f"rollout.engine={config.rollout.engine} needs placement=local: it has processes of its own")
    if config.rollout.mismatch is not None:
        raise ValueError("rollout.mismatch needs placement=local: its faults are made of the learner's own tensors")
    for part in config.reward.parts:
        if part.name == "model" and part.options.get("device") != "cpu" and not placement.is_apart(REWARD):
            raise ValueError(
                "reward part model computes in the driver's process, and placement=ray gives the GPUs to the workers: set its "
                "options.device to cpu, name a pool for it in placement.roles.reward, or set placement=local"
            )
        if part.name == "judge" and part.options.get("path") and part.options.get("device", "auto") == "auto":
            raise ValueError(
                "reward part judge runs its model beside the driver, and placement=ray gives the GPUs to the workers: set its "
                "options.device to cpu, or to a GPU that Ray does not have (cuda:1)"
            )
    if config.rollout.exact:
        raise ValueError("rollout.exact needs placement=local: engine and learner must compute in one process")
    if config.model.device.startswith("cuda:"):
        raise ValueError(f"model.device={config.model.device}: Ray gives each process its GPU; write cuda")
    most = max(placement.size(role) for role in trained)
    if most > 1 and config.training.compile:
        raise ValueError("training.compile needs placement.workers=1, or one place in the pools of actor and critic")


def _check_roles(config: TrainConfig, placement: RayPlacement) -> None:
    """Refuse a pool for what the run does not have, or what cannot be apart from the actor."""
    algorithm, reference = config.algorithm, config.algorithm.kl.reference
    if REFERENCE in placement.roles and reference.name == "none":
        raise ValueError("placement.roles.reference has no effect: algorithm.kl.reference is none")
    if CRITIC in placement.roles and algorithm.critic is None:
        raise ValueError("placement.roles.critic has no effect: the algorithm has no critic")
    if placement.is_apart(REWARD) and all(part.name == "judge" for part in config.reward.parts):
        raise ValueError(
            "placement.roles.reward has no effect: every part of the reward is a judge, which the driver asks; remove the role and its pool"
        )
    if placement.pools and config.model.device.startswith("cuda") and not placement.pools[placement.roles[ACTOR]].gpu:
        raise ValueError(
            f"model.device={config.model.device}, but placement.pools.{placement.roles[ACTOR]}.gpu=false leaves actor and engines without "
            "a GPU: set model.device=cpu, or leave gpu=false out"
        )
    if placement.is_apart(REFERENCE):
        if reference.name not in STILL:
            raise ValueError(
                f"algorithm.kl.reference={reference.name} follows the policy's weights, so it must be where they are: put "
                f"placement.roles.reference in the actor's pool, or use {' or '.join(STILL)}"
            )
        if algorithm.kl.loss.estimator == "full":
            raise ValueError(
                "algorithm.kl.loss.estimator=full compares whole distributions inside the policy's update: put "
                "placement.roles.reference in the actor's pool, or use another estimator"
            )
