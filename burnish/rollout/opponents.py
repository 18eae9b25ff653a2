"""Self-play against earlier weights of the policy: the pool of snapshots, and the source whose games it joins.

The weights before step 1 are the first snapshot, and those after every k-th step another. The pool of a step is the last `keep` of them, so
it follows from the step alone. A draw (all samples of a prompt) is either self-play, or the policy plays one role of it and a snapshot all
others; that follows from the run's seed and the draw. Only the policy's own conversation becomes a trajectory, with the snapshot's step in
its metadata, so no token of an opponent is trained.

Snapshots are folders of the run, complete or not there at all, with checksums. One is written before its step is committed, so the last
checkpoint always finds those that it needs. After a kill, the steps after the checkpoint write theirs again.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from burnish.config.errors import UserError
from burnish.config.rollout import Opponents
from burnish.core.batch import Batch
from burnish.core.random_keys import fold, permutation, uniform_from_key
from burnish.core.trajectory import OPPONENT, Trajectory
from burnish.data.prompt_stream import PromptSample
from burnish.inference.opponent_engine import Opponent
from burnish.models.policy import PolicyModel
from burnish.rollout.scoring import Progress, RolloutBatch
from burnish.rollout.sync_source import PendingDraw, RolloutPlan, RolloutSource
from burnish.run.checkpoint.saver import keep_in_place
from burnish.run.checkpoint.snapshot import are_checksums, first_damaged_file, write_contents
from burnish.run.durable_files import START_OVER_HINT, atomic_directory, atomic_write, remove_leftovers

CHECKSUMS = "checksums.json"
METRICS = "opponents/"


class OpponentGame(NamedTuple):
    """How a draw is played against a snapshot."""

    player: str
    """The player that the policy is. A snapshot plays all others."""
    version: int
    """The step after which the policy had the snapshot's weights."""


# --- Snapshots on disk ----------------------------------------------------------------------------------------------------


class SnapshotFolder:
    """Saved weights of the policy by version. With adapters, a snapshot holds the adapters alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)

    def path(self, version: int) -> Path:
        return self.folder / f"step-{version:06d}"

    def versions(self) -> list[int]:
        """The versions on disk, oldest first."""
        names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
        return sorted(int(name) for name in names if name.isdigit())

    def write(self, version: int, policy: PolicyModel) -> None:
        """Save the policy's present weights as a version. A folder that is there is replaced."""
        with atomic_directory(self.path(version), replace=True) as folder:
            sums = write_contents(folder, policy.contents(keep_in_place))
            atomic_write(folder / CHECKSUMS, json.dumps(sums, indent=1) + "\n")

    def damage(self, version: int) -> str | None:
        """Why a version cannot be used, or None."""
        path = self.path(version)
        try:
            sums = json.loads((path / CHECKSUMS).read_text())
        except (OSError, ValueError):
            return f"{path / CHECKSUMS} is missing or damaged"
        return first_damaged_file(path, sums) if are_checksums(sums) else f"{path / CHECKSUMS} is damaged"

    def remove(self, versions: Iterable[int]) -> None:
        for version in versions:
            shutil.rmtree(self.path(version))


# --- The pool -------------------------------------------------------------------------------------------------------------


def pool_versions(options: Opponents, version: int) -> list[int]:
    """The snapshots that a policy of this version may play against, oldest first."""
    newest = version // options.every
    return [k * options.every for k in range(max(0, newest - options.keep + 1), newest + 1)]


def chosen_versions(options: Opponents, version: int, seed: int) -> list[int]:
    """The snapshots that play in the step of a version: at most `at_once` different ones of its pool."""
    pool, key = pool_versions(options, version), fold(seed, "opponents", version)
    num = min(options.at_once, len(pool))
    if options.pick == "newest":
        return pool[-num:]
    if options.pick == "uniform":
        return sorted(pool[k] for k in permutation(len(pool), key)[:num])
    left, found = list(pool), list[int]()
    for draw in range(num):  # weights 1, 2, 3, ... from the oldest to the newest
        weights = [pool.index(one) + 1 for one in left]
        point = uniform_from_key(fold(key, draw)) * sum(weights)
        index = next(k for k in range(len(left)) if point < sum(weights[: k + 1]))
        found.append(left.pop(index))
    return sorted(found)


class OpponentPool:
    """The snapshots of a run, those that play in the current step, and which games they play."""

    def __init__(
        self,
        options: Opponents,
        roles: Sequence[str],
        seed: int,
        policy: PolicyModel,
        opponents: Sequence[Opponent],
        snapshots: SnapshotFolder,
        checkpoints: Callable[[], list[int]],
    ) -> None:
        """`policy` is the one that is trained; `checkpoints` returns the steps of the checkpoints on disk."""
        self.options, self.roles, self.seed, self.policy = options, roles, seed, policy
        self.opponents, self.snapshots, self.checkpoints = opponents, snapshots, checkpoints
        self.playing: list[int] = []

    def prepare(self, version: int) -> None:
        """Load the snapshots that play against the policy of a version."""
        if version == 0 and self.snapshots.damage(0) is not None:
            self.snapshots.write(0, self.policy)
        self.playing = chosen_versions(self.options, version, self.seed)
        for opponent in self.opponents:  # one that has a wanted version keeps it
            if opponent.version not in self.playing:
                missing = [v for v in self.playing if v not in {one.version for one in self.opponents}]
                if missing:
                    opponent.load(missing[0], partial(self._read, missing[0]))

    def _read(self, version: int, policy: PolicyModel) -> None:
        if damage := self.snapshots.damage(version):
            raise UserError(
                f"the opponent of step {version} cannot be used ({damage}): restore it from a copy, {START_OVER_HINT}"
            )
        policy.load_weights(self.snapshots.path(version))

    def game_of(self, draw: PromptSample) -> OpponentGame | None:
        """How a draw is played; None for self-play. All samples of a draw are played alike, so that they can be compared."""
        key = fold(self.seed, "opponent of a draw", draw.prompt.row.id, draw.visit)
        against, player, which = (uniform_from_key(fold(key, k)) for k in range(3))
        if against >= self.options.share:
            return None
        return OpponentGame(self.roles[int(player * len(self.roles))], self.playing[int(which * len(self.playing))])

    def after_step(self, version: int) -> None:
        """Save the weights if they join the pool, and delete snapshots that neither this step nor a checkpoint needs."""
        if version % self.options.every == 0:
            self.snapshots.write(version, self.policy)
        saved = self.checkpoints()
        oldest = min(
            pool_versions(self.options, max(saved, default=0))
        )  # a checkpoint after this one may be half written
        needed = {one for step in saved for one in pool_versions(self.options, step)}
        self.snapshots.remove(v for v in self.snapshots.versions() if v < oldest and v not in needed)


def opponent_metrics(trajectories: Sequence[Trajectory], version: int, every: int) -> dict[str, float]:
    """`opponents/games`, `reward`, `win_rate` (a draw is half a win), and the win rate by the opponent's age in steps.

    The age is rounded down to a multiple of `every`. `version` is that of the policy. Rewards above 0 are wins, 0 is a draw.
    """
    games = [(version - t.metadata[OPPONENT], t.reward) for t in trajectories if OPPONENT in t.metadata]
    scored = [(age, reward) for age, reward in games if reward is not None]
    values = {"games": float(len(games))}
    if scored:
        values["reward"] = sum(reward for _, reward in scored) / len(scored)
        values["win_rate"] = _win_rate([reward for _, reward in scored])
    for bucket in sorted({age // every for age, _ in scored}):
        values[f"win_rate/age={bucket * every}"] = _win_rate([r for age, r in scored if age // every == bucket])
    return {METRICS + name: value for name, value in values.items()}


def _win_rate(rewards: Sequence[float]) -> float:
    return sum(1.0 if reward > 0 else 0.5 if reward == 0 else 0.0 for reward in rewards) / len(rewards)


class OpponentSource:
    """Lets snapshots play in the games of another source, which samples with the current weights."""

    def __init__(self, inner: RolloutSource, pool: OpponentPool) -> None:
        self.inner, self.pool = inner, pool
        self.overlaps = inner.overlaps

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        self.pool.prepare(step - 1)
        return self.inner.next(step, plan, progress, round)

    def after_step(
        self, step: int, rollouts: RolloutBatch, batch: Batch | None, unfinished: Sequence[int] | None = None
    ) -> None:
        self.inner.after_step(step, rollouts, batch, unfinished)
        self.pool.after_step(step)

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        found = opponent_metrics(rollouts.trajectories, version, self.pool.options.every)
        return self.inner.metrics(rollouts, version) | found

    def start_next(self, step: int) -> None:
        self.inner.start_next(step)

    def load(self, version: int) -> None:
        self.inner.load(version)

    def stop(self) -> None:
        self.inner.stop()

    def pause(self) -> None:
        self.inner.pause()

    def pending_draws(self) -> list[PendingDraw]:
        return self.inner.pending_draws()

    def restore(self, pending: Sequence[PendingDraw], version: int) -> None:
        self.inner.restore(pending, version)

    def close(self) -> None:
        self.inner.close()
