"""Groups that were drawn and not handed over yet: what of them is complete, which are waited for, which are too old."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from burnish.core.trajectory import Trajectory
from burnish.data.prompts import Draw
from burnish.rollout.scored import GREEDY
from burnish.rollout.sources import RolloutPlan, group_id


@dataclass(eq=False)
class Group:
    """A prompt on its way, with all its samples."""

    draw: Draw
    plan: RolloutPlan
    step: int
    """In which it was drawn."""
    number: int
    """How many were drawn before it."""
    is_begun: bool = False
    found: dict[int, Trajectory] = field(default_factory=dict)
    """Samples that have ended."""
    demonstrations: list[Trajectory] = field(default_factory=list)
    """What joins its samples, once it is begun."""
    scored: set[int] = field(default_factory=set)
    oldest: int | None = None
    """The version of its oldest token, as of the last new weights; None where it had none."""

    @property
    def id(self) -> str:
        return group_id(self.draw)

    @property
    def samples(self) -> list[int]:
        """Which there shall be of the policy."""
        return [*([GREEDY] if self.plan.greedy else []), *range(self.plan.n)]

    @property
    def is_complete(self) -> bool:
        return len(self.scored) == self.plan.n + self.plan.greedy + len(self.demonstrations)

    def is_due(self, version: int, max_staleness: int) -> bool:
        """Whether it cannot be used after the step that begins with weights `version`."""
        return self.oldest is not None and version - self.oldest >= max_staleness


def ready(groups: Sequence[Group], wanted: int, version: int, max_staleness: int) -> list[Group] | None:
    """The groups for a step, in the order they were drawn; None while it must wait.

    The oldest that are complete; those that could not be used later come first, and are waited for.
    """
    due = [group for group in groups if group.is_due(version, max_staleness)][:wanted]
    chosen = complete(groups, wanted, version, max_staleness)
    return chosen if len(chosen) == wanted and all(group.is_complete for group in due) else None


def complete(groups: Sequence[Group], wanted: int, version: int, max_staleness: int) -> list[Group]:
    """At most so many of those that are complete."""
    there = [group for group in groups if group.is_complete]
    there.sort(key=lambda group: (not group.is_due(version, max_staleness), group.number))
    return sorted(there[:wanted], key=lambda group: group.number)


def of_groups(groups: Sequence[Group]) -> list[Trajectory]:
    """All trajectories of complete groups: greedy answers first, then samples and demonstrations, in order."""
    found = [group.found[sample] for group in groups for sample in group.samples]
    found += [trajectory for group in groups for trajectory in group.demonstrations]
    return sorted(found, key=lambda t: t.sample != GREEDY)
