"""Waiting for the machines of a cluster: until all are there and a run fits in, with a deadline and a word now and then.

Machines of a batch system come one after the other, minutes apart. A run that begins too early would be refused, and one that
waits for a machine that never comes would wait for ever: so it is waited for here, and what is missing is said.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from burnish.config.errors import UserError
from burnish.config.placement import RayPlacement
from burnish.controller.placement import check, lay_out

LOOK_EVERY_S = 1.0
SAY_EVERY_S = 30.0
Nodes = Sequence[Mapping[str, float]]
"""What each machine has."""
Look = Callable[[], Nodes]
"""The machines there are now; a `ConnectionError` where there is no cluster yet."""


@dataclass(frozen=True)
class Wanted:
    """What a run needs of a cluster."""

    placement: RayPlacement
    nodes: int
    """Machines."""
    on_gpu: bool | None
    """Whether its processes need GPUs; None: if there are any."""

    def missing(self, nodes: Nodes) -> str | None:
        """What is not there yet, in words; None where all is."""
        words = []
        if len(nodes) < self.nodes:
            words.append(f"{len(nodes)} of {self.nodes} machines are there")
        on_gpu = any(node.get("GPU", 0) for node in nodes) if self.on_gpu is None else self.on_gpu
        try:
            check(self.placement, lay_out(self.placement, on_gpu), nodes, "the cluster")
        except UserError as error:
            words.append(str(error))
        return "; ".join(words) or None


def wait_for(
    wanted: Wanted,
    look: Look,
    where: str,
    deadline_s: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Nodes:
    """The machines, once all that is wanted is there; past the deadline an error says what is missing."""
    started, said, said_at = clock(), "", float("-inf")
    while True:
        try:
            nodes: Nodes = look()
            missing = wanted.missing(nodes)
        except ConnectionError as error:
            missing = f"there is no answer, or this process has another token ({' '.join(str(error).split())[:200]})"
        waited_s = clock() - started
        if missing is None:
            return nodes
        if waited_s >= deadline_s:
            raise UserError(
                f"the cluster at {where} was not ready in {deadline_s:g} s (--wait): {missing}. `ray status` there tells who has joined"
            )
        if missing != said or waited_s - said_at >= SAY_EVERY_S:
            say(f"waiting for the cluster at {where}: {missing} ({waited_s:.0f} s of {deadline_s:g} s)")
            said, said_at = missing, waited_s
        sleep(min(LOOK_EVERY_S, deadline_s - waited_s))


def described(nodes: Nodes) -> str:
    """The machines in words."""
    amounts = {what: sum(node.get(what, 0) for node in nodes) for what in ("CPU", "GPU")}
    there = " and ".join(f"{amount:g} {what}s" for what, amount in amounts.items() if amount)
    return f"{len(nodes)} machine{'' if len(nodes) == 1 else 's'} with {there}"
