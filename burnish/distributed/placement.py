"""Assigns the processes of a run to bundles of a Ray placement group, and refuses a plan that does not fit.

This happens before anything is started, because Ray waits silently for CPUs that no machine has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from burnish.config.errors import UserError
from burnish.config.placement import Placement, RayPlacement, describe_processes

Resources = dict[str, float]
"""CPUs and GPUs, by Ray's names."""


@dataclass(frozen=True)
class ProcessSlot:
    """A process's bundle, and the resources it takes of it."""

    bundle: int
    resources: Resources


@dataclass(frozen=True)
class Layout:
    """The bundles to reserve, each on one machine, and the slots of each role."""

    bundles: list[Resources]
    slots: dict[str, list[ProcessSlot]]
    pools: list[range]
    """The bundles of each pool, which are all alike."""

    def total(self, what: str) -> float:
        return sum(bundle.get(what, 0) for bundle in self.bundles)

    def sorted_by_machine(self, machines: Sequence[str]) -> Layout:
        """The layout with the places of each pool renumbered, so that consecutive places are on one machine.

        `machines[k]` is where bundle k was reserved. Ranks that exchange most, as those of a tensor-parallel group, are consecutive.
        """
        renumbered: dict[int, int] = {}
        for pool in self.pools:
            order = sorted(pool, key=lambda bundle: (machines[bundle], bundle))
            renumbered |= dict(zip(pool, order, strict=True))
        slots = {
            role: [replace(slot, bundle=renumbered[slot.bundle]) for slot in own] for role, own in self.slots.items()
        }
        return replace(self, slots=slots)


def plan_layout(placement: RayPlacement, on_gpu: bool) -> Layout:
    """One bundle per place of a pool. The k-th process of each role of a pool is in its k-th place, and takes an equal part of it."""
    bundles: list[Resources] = []
    slots: dict[str, list[ProcessSlot]] = {}
    pools: list[range] = []
    for pool, sizes in placement.pool_assignments:
        bundle: Resources = {"CPU": float(pool.cpus)} | ({"GPU": float(pool.gpus)} if on_gpu and pool.gpu else {})
        num_processes = [sum(k < size for size in sizes.values()) for k in range(pool.places)]
        for role, size in sizes.items():
            slots[role] = [
                ProcessSlot(len(bundles) + k, {what: amount / num_processes[k] for what, amount in bundle.items()})
                for k in range(size)
            ]
        pools.append(range(len(bundles), len(bundles) + pool.places))
        bundles += [bundle] * pool.places
    return Layout(bundles, slots, pools)


def check_layout(placement: RayPlacement, layout: Layout, nodes: Sequence[Mapping[str, float]], where: str) -> None:
    """Refuse a layout that `nodes` (the resources of each machine) can never hold; `where` names them in the error."""
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
    """Refuse a placement that needs more CPUs than this machine has, if the run would start Ray here. Ray need not be running."""
    ray = sys.modules.get("ray")
    is_joined = "RAY_ADDRESS" in os.environ or (ray is not None and ray.is_initialized())
    if isinstance(placement, RayPlacement) and not is_joined:
        check_layout(placement, plan_layout(placement, on_gpu=False), [{"CPU": num_usable_cpus()}], "this machine")


def _num_fitting(bundle: Mapping[str, float], node: Mapping[str, float]) -> int:
    """Number of bundles that a machine can hold."""
    return int(min(node.get(what, 0) // amount for what, amount in bundle.items()))


def _advice(placement: RayPlacement) -> str:
    if placement.pools:
        return "lower the places or cpus of placement.pools, let roles share a pool, or add machines"
    colocated = ", set placement.layout=colocated, in which they share," if placement.layout == "split" else ""
    return f"lower placement.workers, engines or cpus{colocated} or add machines"
