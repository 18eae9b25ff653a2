"""When a step's rollouts are made: before it, during the one before, or all the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from burnish.config.placement import RayPlacement
from burnish.config.slots.base import Slot, choice

if TYPE_CHECKING:
    from burnish.config.schema import TrainConfig


class Sync(Slot):
    """Sample, then learn: every token is of the weights that are trained."""

    name: Literal["sync"] = "sync"


class Ahead(Slot):
    """The rollouts of the next step are made while this one is learnt: every token is exactly one step old, the run as repeatable as sync."""

    name: Literal["ahead"] = "ahead"


class Async(Slot):
    """Sampling never stops: new weights are taken in the middle of samples, and a step gets the oldest groups that are complete."""

    name: Literal["async"] = "async"
    max_staleness: int = Field(1, ge=0)
    """Most steps that a token may be older than the weights that are trained; 0 is sync."""
    deadline_s: float = Field(600.0, gt=0)
    """Longest time a step waits for groups that are not complete; then it goes on with those that are, and the others come later.
    Tokens that have grown too old by then are dropped and drawn again."""


SourceSlot: Any = choice(Sync, Ahead, Async, plugin=False)
RolloutSource = Sync | Ahead | Async


def check_source_fits(config: TrainConfig) -> None:
    """Refuse a source that cannot sample while the learner learns."""
    rollout, placement = config.rollout, config.placement
    if rollout.source.name == "sync":
        return
    what = f"rollout.source={rollout.source.name}"
    if rollout.mismatch is not None:
        raise ValueError(f"{what} has a gap of its own between sampler and trainer: study rollout.mismatch with sync")
    if rollout.exact:
        raise ValueError(f"{what} samples with older weights, so rollout.exact has nothing to be exact about: use sync")
    if isinstance(placement, RayPlacement):
        if any(placement.take_turns(role, "rollout") for role in ("actor", "reference", "critic")):
            where = "one pool" if placement.pools else "placement.layout=colocated"
            instead = "give them pools of their own" if placement.pools else "set placement.layout=split"
            raise ValueError(f"{what} samples while the learner learns, and {where} lets them take turns: {instead}")
        return
    if rollout.engine == "vllm" and (rollout.vllm is None or rollout.vllm.url is None):
        raise ValueError(
            f"{what} needs an engine that samples while the learner learns, and vLLM in this process takes turns with it: "
            "start a server and set rollout.vllm.url"
        )
    if config.model.device.startswith("cuda") and rollout.engine not in ("vllm", "sglang"):
        raise ValueError(gpu_refusal(rollout.source.name))


def gpu_refusal(name: str) -> str:
    """Why one GPU does not sample and learn at once."""
    return (
        f"rollout.source={name} with placement=local on a GPU: sampler and learner would slow each other down on the one device; "
        "set placement=ray and placement.layout=split (a GPU for each), or rollout.engine to a vLLM or SGLang server on another GPU"
    )
