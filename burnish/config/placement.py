"""Where the processes of a run are: all in one, or workers that Ray starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from burnish.config.errors import UserError
from burnish.config.parallel import Parallel, check_parallel_fits
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
    sync: Literal["full", "delta"] = "full"
    """What engines are sent after a step: all weights, or only the values that changed (the same bits; a copy of the weights is kept)."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest time a process may take over one call; then the run stops and says who was waited for and what it did. An engine is
    started again instead."""


PlacementSlot: Any = choice(LocalPlacement, RayPlacement, plugin=False)
Placement = LocalPlacement | RayPlacement


def processes(placement: RayPlacement) -> str:
    """The processes of a run in words."""
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
    try:
        parallel.sizes(placement.workers)
    except UserError as error:
        raise ValueError(f"placement.workers={placement.workers}: {error}") from error
    for optimizer in (
        config.training.optimizer,
        *([config.algorithm.critic.optimizer] if config.algorithm.critic else []),
    ):
        check_parallel_fits(parallel, config.model, optimizer, config.training.activations)
    if config.rollout.engine not in ("auto", "native", "transformers"):
        raise ValueError(f"rollout.engine={config.rollout.engine} needs placement=local: it has processes of its own")
    if config.rollout.mismatch is not None:
        raise ValueError("rollout.mismatch needs placement=local: its faults are made of the learner's own tensors")
    for part in config.reward.parts:
        if part.name == "model" and part.options.get("device") != "cpu":
            raise ValueError(
                "reward part model computes in the driver's process, and placement=ray gives the GPUs to the workers: set its "
                "options.device to cpu, or placement=local"
            )
    if config.rollout.exact:
        raise ValueError("rollout.exact needs placement=local: engine and learner must compute in one process")
    if config.model.device.startswith("cuda:"):
        raise ValueError(f"model.device={config.model.device}: Ray gives each process its GPU; write cuda")
    if placement.workers > 1 and config.training.compile:
        raise ValueError("training.compile needs placement.workers=1")
    if placement.workers > 1 and (config.model.lora is not None or config.model.adapter is not None):
        raise ValueError("placement.workers above 1 cannot divide a model with adapters: use one worker")
