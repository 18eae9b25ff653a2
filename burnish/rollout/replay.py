"""`ReplayStore` keeps groups of earlier steps, and `ReplaySource` adds some of them to the new rollouts of a step.

    store = ReplayStore(settings, seed)
    source = ReplaySource(inner, store, wanted)     # wraps any source; `wanted(step)` is the number of groups to replay

A replayed group keeps its tokens, behaviour log-probs, versions and rewards. Values, advantages and correction weights are computed again
with the current policy. A group enters the store when a step has trained on it. It is removed

- after it was in the loss of `uses` steps;
- when its oldest token is more than `max_age` steps old;
- when the filters of a step removed all its samples from the loss;
- when the store exceeds `capacity` (the oldest entry goes first).

Trees (SPO) differ: a step trains some edges, and a tree enters and stays while it has untrained edges. Each step that draws it counts
as a use.

The store is in every checkpoint. Steps after a checkpoint are repeated with the same rollouts, so a killed run rebuilds the same store.
The journal's `used` records show how often each sample was in a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from burnish.algorithms.spec import Replay
from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.random_keys import fold
from burnish.core.trajectory import Trajectory
from burnish.rollout.async_source import oldest_version
from burnish.rollout.scoring import Progress, RolloutBatch, from_arrays, to_arrays
from burnish.rollout.sync_source import PendingDraw, RolloutPlan, RolloutSource
from burnish.run.checkpoint.snapshot import BytesFile, Content

REPLAY_FILE = "replay.safetensors"
USE_KEY = "use"
"""Key of `Trajectory.metadata`: number of earlier steps that used the group."""
PICK_LABEL = "replay"
"""Label of the random keys that pick groups."""


@dataclass
class ReplayGroup:
    """A group in the store."""

    trajectories: list[Trajectory]
    oldest: int
    """The version of its oldest token."""
    uses: int
    """Number of steps that used it."""

    @property
    def id(self) -> str:
        return self.trajectories[0].group_id

    @property
    def num_tokens(self) -> int:
        return sum(len(node.tokens) for t in self.trajectories for node in t.nodes)


class ReplayStore:
    """Stores groups that may be replayed, in the order in which they were added."""

    def __init__(self, settings: Replay, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.entries: list[ReplayGroup] = []
        self._metrics: dict[str, float] = {}

    def take(self, step: int, wanted: int) -> list[Trajectory]:
        """Return the samples of at most `wanted` groups for a step, each with its number of uses in the metadata.

        Repeated calls for a step return the same groups.
        """
        version = step - 1
        groups = [e for e in self.entries if version - e.oldest <= self.settings.max_age]
        if self.settings.pick == "random":
            groups.sort(key=lambda e: fold(self.seed, PICK_LABEL, step, e.id))
        elif self.settings.pick == "newest":
            groups.reverse()
        found = []
        for entry in groups[:wanted]:
            for trajectory in entry.trajectories:
                trajectory.metadata[USE_KEY] = entry.uses
                found.append(trajectory)
        return found

    def after_step(
        self, step: int, rollouts: RolloutBatch, used: Iterable[str], unfinished: Iterable[str] | None = None
    ) -> None:
        """Update the store after a step: count uses, remove groups, add new ones. `used` are the ids of trajectories in the loss.

        With trees, `unfinished` are the ids of trajectories with untrained edges, and only their groups stay. The step counts as a use
        even if none of their tokens was in the loss.
        """
        ids = list(used)
        in_loss = {group_id_of(name) for name in ids}
        may_stay = in_loss if unfinished is None else {group_id_of(name) for name in unfinished}
        replayed = {t.group_id for t in rollouts.replayed}
        ages = []
        for entry in self.entries:
            if entry.id not in replayed:
                continue
            if entry.id in may_stay:
                entry.uses += 1
            else:
                entry.uses = self.settings.uses  # removed below: the filters left nothing of it to learn from
            if entry.id in in_loss:
                ages.append(step - 1 - entry.oldest)
        self.entries += _new_groups(rollouts.trajectories, may_stay)
        self.entries = [e for e in self.entries if e.uses < self.settings.uses and self._is_usable(e, step)]
        self.entries = self.entries[max(0, len(self.entries) - self.settings.capacity) :]
        self._metrics = {
            "replay/size": float(len(self.entries)),
            "replay/tokens": float(sum(e.num_tokens for e in self.entries)),
            "replay/groups": float(len(ages)),
            "replay/fraction": sum(group_id_of(name) in replayed for name in ids) / max(1, len(ids)),
        } | ({"replay/age_mean": sum(ages) / len(ages), "replay/age_max": float(max(ages))} if ages else {})

    def _is_usable(self, entry: ReplayGroup, step: int) -> bool:
        """Whether a group is young enough for the next step, which begins with weights `step`."""
        return step - entry.oldest <= self.settings.max_age

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the last step: stored groups and tokens, replayed groups, their share of the loss, their age."""
        return self._metrics

    def contents(self) -> list[Content]:
        """Return the store as a checkpoint file."""
        from safetensors.numpy import save

        trajectories = [t for e in self.entries for t in e.trajectories]
        arrays = to_arrays(trajectories) if trajectories else {}
        rows = [[len(e.trajectories), e.oldest, e.uses] for e in self.entries]
        arrays["entries"] = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return [BytesFile(REPLAY_FILE, save({name: np.ascontiguousarray(array) for name, array in arrays.items()}))]

    def load(self, folder: Path) -> None:
        """Load the store from a checkpoint."""
        from safetensors.numpy import load_file

        if not (folder / REPLAY_FILE).is_file():
            raise UserError(
                f"{folder} has no {REPLAY_FILE}, which algorithm.replay resumes from: the checkpoint was saved by a run without replay; "
                "start a run of another name"
            )
        arrays = load_file(folder / REPLAY_FILE)
        trajectories = from_arrays(arrays) if "records" in arrays else []
        self.entries, at = [], 0
        for count, oldest, uses in arrays["entries"].tolist():
            self.entries.append(ReplayGroup(trajectories[at : at + count], oldest, uses))
            at += count


class ReplaySource:
    """Adds replayed groups to the rollouts of another source."""

    def __init__(self, inner: RolloutSource, store: ReplayStore, wanted: Callable[[int], int]) -> None:
        self.inner, self.store, self.wanted = inner, store, wanted
        self.overlaps = inner.overlaps

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        fresh = self.inner.next(step, plan, progress, round)
        for trajectory in fresh.trajectories:
            trajectory.metadata[USE_KEY] = 0
        if round > 0:  # the first round has added the replayed groups of this step
            return fresh
        return replace(fresh, replayed=self.store.take(step, self.wanted(step)))

    def after_step(
        self, step: int, rollouts: RolloutBatch, batch: Batch | None, unfinished: Sequence[int] | None = None
    ) -> None:
        self.inner.after_step(step, rollouts, batch, unfinished)
        usable = rollouts.usable
        owners = [] if batch is None else batch.sequence["trajectory_ids"].unique().tolist()
        left = None if unfinished is None else [usable[i].id for i in unfinished]
        self.store.after_step(step, rollouts, [usable[i].id for i in owners], left)

    def start_next(self, step: int) -> None:
        self.inner.start_next(step)

    def load(self, version: int) -> None:
        self.inner.load(version)

    def stop(self) -> None:
        self.inner.stop()

    def pause(self) -> None:
        self.inner.pause()

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        return self.inner.metrics(rollouts, version) | self.store.metrics()

    def pending_draws(self) -> list[PendingDraw]:
        return self.inner.pending_draws()

    def restore(self, pending: Sequence[PendingDraw], version: int) -> None:
        self.inner.restore(pending, version)

    def close(self) -> None:
        self.inner.close()


def group_id_of(trajectory_id: str) -> str:
    """Return the group id of a trajectory id."""
    return trajectory_id.rpartition(".")[0]


def _new_groups(trajectories: Sequence[Trajectory], wanted: set[str]) -> list[ReplayGroup]:
    """Return the new groups that may be replayed, each with all its scored samples, which its group statistics need."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.reward is not None and trajectory.group_id in wanted:
            groups.setdefault(trajectory.group_id, []).append(trajectory)
    found = []
    for samples in groups.values():
        oldest = oldest_version(samples)
        if oldest is not None:
            found.append(ReplayGroup(samples, oldest, 1))
    return found
