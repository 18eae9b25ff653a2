"""Which process of a run goes where, and whether there is room: decided before anything is started.

Ray waits without a word for CPUs that no machine has; so a plan that cannot be placed is refused here, with the numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from burnish.config.errors import UserError
from burnish.config.placement import Placement, RayPlacement, processes

ACTOR, ROLLOUT = "actor", "rollout"
"""The groups: those who train, and those who sample."""
Resources = dict[str, float]
"""CPUs and GPUs, by Ray's names for them."""


@dataclass(frozen=True)
class Seat:
    """A process's place: its bundle, and what it asks of it."""

    bundle: int
    resources: Resources


@dataclass(frozen=True)
class Layout:
    """The bundles that must be had, each on one machine, and who sits in which."""

    bundle: Resources
    num_bundles: int
    seats: dict[str, list[Seat]]

    def total(self, what: str) -> float:
        return self.num_bundles * self.bundle.get(what, 0)


def lay_out(placement: RayPlacement, on_gpu: bool) -> Layout:
    """Colocated, the k-th of each group share a bundle and take turns in it; split, everyone has one alone."""
    sizes = {ACTOR: placement.workers, ROLLOUT: placement.engines}
    bundle: Resources = {"CPU": float(placement.cpus)} | ({"GPU": 1.0} if on_gpu else {})
    if placement.layout == "split":
        places = {ACTOR: range(placement.workers), ROLLOUT: range(placement.workers, sum(sizes.values()))}
    else:
        places = {group: range(size) for group, size in sizes.items()}
    num_bundles = max(stop.stop for stop in places.values())
    crowd = [sum(k in place for place in places.values()) for k in range(num_bundles)]
    seats = {
        group: [Seat(k, {what: amount / crowd[k] for what, amount in bundle.items()}) for k in place]
        for group, place in places.items()
    }
    return Layout(bundle, num_bundles, seats)


def check(placement: RayPlacement, layout: Layout, nodes: Sequence[Mapping[str, float]], where: str) -> None:
    """Refuse a layout that `nodes` (what each machine has) can never hold; `where` is what to call them."""
    for what, name in (("CPU", "CPUs"), ("GPU", "GPUs")):
        wanted, there = layout.total(what), sum(node.get(what, 0) for node in nodes)
        if wanted > there:
            raise UserError(
                f"placement needs {wanted:g} {name} ({processes(placement)}), {where} has {there:g}: {_advice(placement)}"
            )
    fit = sum(_times(layout.bundle, node) for node in nodes)
    if fit < layout.num_bundles:
        each = " and ".join(f"{amount:g} {what}" for what, amount in layout.bundle.items())
        raise UserError(
            f"placement needs {layout.num_bundles} places of {each}, each on one machine, and {where} has {fit} such places: "
            f"{_advice(placement)}"
        )


def own_cores() -> int:
    """CPUs of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_placement(placement: Placement) -> None:
    """The same for a run that would start Ray on this machine, by its CPUs alone: nobody need be asked for them."""
    ray = sys.modules.get("ray")
    is_joined = "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())
    if isinstance(placement, RayPlacement) and not is_joined:
        check(placement, lay_out(placement, on_gpu=False), [{"CPU": own_cores()}], "this machine")


def _times(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    """How many bundles a machine can hold."""
    return int(min(node.get(what, 0) // amount for what, amount in bundle.items()))


def _advice(placement: RayPlacement) -> str:
    colocated = ", set placement.layout=colocated, in which they share," if placement.layout == "split" else ""
    return f"lower placement.workers, engines or cpus{colocated} or add machines"
