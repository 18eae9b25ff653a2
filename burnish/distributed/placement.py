"""Which process of a run goes where, and whether there is room: decided before anything is started.

Ray waits without a word for CPUs that no machine has; so a plan that cannot be placed is refused here, with the numbers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from burnish.config.errors import UserError
from burnish.config.placement import Placement, RayPlacement, describe_processes

Resources = dict[str, float]
"""CPUs and GPUs, by Ray's names for them."""


@dataclass(frozen=True)
class ProcessSlot:
    """A process's place: its bundle, and what it asks of it."""

    bundle: int
    resources: Resources


@dataclass(frozen=True)
class Layout:
    """The bundles that must be had, each on one machine, and who sits in which."""

    bundles: list[Resources]
    seats: dict[str, list[ProcessSlot]]

    def total(self, what: str) -> float:
        return sum(bundle.get(what, 0) for bundle in self.bundles)


def plan_layout(placement: RayPlacement, on_gpu: bool) -> Layout:
    """Every place is a bundle; the k-th process of each role of a pool sits in its k-th place, and asks for its part of it."""
    bundles: list[Resources] = []
    seats: dict[str, list[ProcessSlot]] = {}
    for pool, sizes in placement.rooms:
        bundle: Resources = {"CPU": float(pool.cpus)} | ({"GPU": 1.0} if on_gpu and pool.gpu else {})
        crowd = [sum(k < size for size in sizes.values()) for k in range(pool.places)]
        for role, size in sizes.items():
            seats[role] = [
                ProcessSlot(len(bundles) + k, {what: amount / crowd[k] for what, amount in bundle.items()})
                for k in range(size)
            ]
        bundles += [bundle] * pool.places
    return Layout(bundles, seats)


def check_layout(placement: RayPlacement, layout: Layout, nodes: Sequence[Mapping[str, float]], where: str) -> None:
    """Refuse a layout that `nodes` (what each machine has) can never hold; `where` is what to call them."""
    for what, name in (("CPU", "CPUs"), ("GPU", "GPUs")):
        wanted, there = layout.total(what), sum(node.get(what, 0) for node in nodes)
        if wanted > there:
            raise UserError(
                f"placement needs {wanted:g} {name} ({describe_processes(placement)}), {where} has {there:g}: {_advice(placement)}"
            )
    for bundle in layout.bundles:
        needed = sum(all(other.get(what, 0) >= bundle[what] for what in bundle) for other in layout.bundles)
        fit = sum(_num_fitting(bundle, node) for node in nodes)
        if fit < needed:
            each = " and ".join(f"{amount:g} {what}" for what, amount in bundle.items())
            raise UserError(
                f"placement needs {needed} places of {each}, each on one machine, and {where} has {fit} such places: "
                f"{_advice(placement)}"
            )


def num_usable_cpus() -> int:
    """CPUs of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_placement(placement: Placement) -> None:
    """The same for a run that would start Ray on this machine, by its CPUs alone: nobody need be asked for them."""
    ray = sys.modules.get("ray")
    is_joined = "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())
    if isinstance(placement, RayPlacement) and not is_joined:
        check_layout(placement, plan_layout(placement, on_gpu=False), [{"CPU": num_usable_cpus()}], "this machine")


def _num_fitting(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    """How many bundles a machine can hold."""
    return int(min(node.get(what, 0) // amount for what, amount in bundle.items()))


def _advice(placement: RayPlacement) -> str:
    if placement.pools:
        return "lower the places or cpus of placement.pools, let roles share a pool, or add machines"
    colocated = ", set placement.layout=colocated, in which they share," if placement.layout == "split" else ""
    return f"lower placement.workers, engines or cpus{colocated} or add machines"
