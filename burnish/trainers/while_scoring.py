"""Work of a step that needs no reward, done while the rewards of its samples are being computed.

With slow rewards (a judge, a program, a user's function) and `rollout.source=sync`, the GPU would wait between the last sample of a
step and its last reward. The weights do not change in that time, so this work gives the same numbers there as in its usual place:

    the commit of the step before   if it validates: validation, metrics, journal, checkpoint
    the passes of the preparation   log-probs of policy and reference, values of the critic (`EarlyPasses`)

The rollouts of the next step cannot begin: their weights depend on these rewards.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from burnish.core.batch import Batch
from burnish.core.trajectory import Trajectory, pack
from burnish.data.prompt_stream import PromptSample
from burnish.rollout.runner import RolloutStopped
from burnish.rollout.sync_source import split_by_kind
from burnish.trainers.pipeline import AlgorithmPipeline
from burnish.trainers.pipeline_steps import StepContext

REWARD_COLUMNS = frozenset({"reward", "accuracy"})
"""Columns of `pack` that are not known before the scores. The passes do not read them."""


class WhileScoring:
    """What a step does while its rewards are computed. `SyncSource` calls it with each round that it has generated."""

    def __init__(self, passes: EarlyPasses | None = None) -> None:
        self.passes = passes
        self._commit: Callable[[bool], bool] | None = None

    def __call__(self, draws: Sequence[PromptSample], trajectories: Sequence[Trajectory]) -> None:
        self.finish_commit()
        if self.passes is not None:
            self.passes.run(draws, trajectories)

    def put_off(self, commit: Callable[[bool], bool]) -> None:
        """Take the commit of a step. It gets whether to validate, and returns whether the run stops after that step."""
        assert self._commit is None
        self._commit = commit

    def finish_commit(self, validates: bool = True) -> None:
        """Make the commit that was put off, if there is one. Called before the next update at the latest, because it needs these weights.

        Raises `RolloutStopped` if the run stops after the step of the commit.
        """
        commit, self._commit = self._commit, None
        if commit is not None and commit(validates):
            raise RolloutStopped


@dataclass(frozen=True)
class EarlyColumns:
    """Token columns that passes gave before the scores were known."""

    batch: Batch
    """What the passes read."""
    columns: dict[str, dict[str, Tensor]]
    """By the name of the preparation step, then of the column."""

    def fits(self, batch: Batch) -> bool:
        """Whether the passes over `batch` would read the same numbers in the same order, and so give the same columns bit for bit.

        Not if a sample got no score and is left out, say. Columns that only scores add are not compared: no pass reads them.
        """
        before = self.batch
        if not (_equal(before.tokens, batch.tokens) and _equal(before.offsets, batch.offsets)):
            return False
        for early, late in ((before.token, batch.token), (before.sequence, batch.sequence)):
            names = early.keys() - REWARD_COLUMNS
            if not all(name in late and _equal(early[name], late[name]) for name in names):
                return False
        return all(
            name in batch.ragged
            and _equal(column.values, batch.ragged[name].values)
            and _equal(column.offsets, batch.ragged[name].offsets)
            for name, column in before.ragged.items()
        )


class EarlyPasses:
    """Makes the passes of a step's preparation over the samples of its first round, on the guess that all of them will be learnt from.

    If the guess is wrong, the columns are dropped and `prepare` makes the passes as usual. So it is not built for algorithms that
    drop groups, or that draw more than they use.
    """

    def __init__(
        self, pipeline: AlgorithmPipeline, seed: int, context: StepContext, free_cache: Callable[[], None]
    ) -> None:
        """`context` has the models of the passes. `free_cache` makes room for them on a GPU, as before the updates."""
        self.pipeline, self.seed, self.context, self.free_cache = pipeline, seed, context, free_cache
        self._found: EarlyColumns | None = None
        self._seconds = 0.0

    def take_seconds(self) -> float:
        """Return how long the passes took since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def run(self, draws: Sequence[PromptSample], trajectories: Sequence[Trajectory]) -> None:
        """Make the passes over a round whose scores are not known."""
        expected = split_by_kind(draws, [t for t in trajectories if t.error is None], 0.0, 0.0).grouped
        if not expected or len({t.group_id for t in expected}) < len(draws):
            return  # environments of a whole group failed, so another round may follow
        started = time.perf_counter()
        self.free_cache()
        context = self.context
        unscored = [replace(t, reward=0.0, accuracy=None, parts={}) for t in expected]
        batch = first = pack(unscored, self.seed).to(context.learner.device)
        columns: dict[str, dict[str, Tensor]] = {}
        for step in self.pipeline.reward_free_steps:
            if step.name == "reference_logprobs" and context.reference is not None and context.reference.is_policy:
                continue  # it copies `old_logp`, which a correction may replace first
            known = batch.token
            batch = step.run(batch, context)
            columns[step.name] = {name: column for name, column in batch.token.items() if name not in known}
        self._found = EarlyColumns(first, columns)
        self._seconds += time.perf_counter() - started

    def take(self, batch: Batch) -> dict[str, dict[str, Tensor]]:
        """Return the columns of each pass that was made over this very batch, once."""
        found, self._found = self._found, None
        return found.columns if found is not None and found.fits(batch) else {}


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether two columns are equal, where nan equals nan."""
    if a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.nan_to_num(), b.nan_to_num()))
