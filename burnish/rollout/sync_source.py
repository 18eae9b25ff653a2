"""The `RolloutSource` protocol, its records in the journal, and the synchronous source.

A source draws prompts, samples answers, scores them and returns the result. The trainer asks for one or more rounds per step. Sources
differ in when they sample and with which weights:

    SyncSource     in the step, with the current weights                           (this file)
    AheadSource    during the step before, with weights one step old               (`ahead_source.py`)
    AsyncSource    all the time, with weights that change in the middle of a sample (`async_source.py`)

Every stage is written to the journal, so that a run that was killed reads its rollouts back from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptSample, PromptStream
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import Branching, RolloutRunner, RolloutStopped
from burnish.rollout.scoring import (
    GREEDY_SAMPLE,
    OnScored,
    Progress,
    RolloutBatch,
    RoundBuilder,
    attach_greedy_baseline,
    copy_score,
    from_arrays,
    ignore_scored,
    restore_scores,
    scores_to_arrays,
    to_arrays,
)
from burnish.rollout.segment_rollouts import BORDER_STATES, FIRST_CONTINUED_SAMPLE, ChainPlan, attach_border_values
from burnish.run.journal import Journal

PendingDraw = list[Any]
"""A drawn prompt that no step has used yet, as saved in a checkpoint: data source, index there, visit, step of the draw."""


@dataclass(frozen=True)
class RolloutPlan:
    """The settings of one round of rollouts. They may differ from step to step."""

    prompts: int
    n: int
    """Samples per prompt."""
    sampling: SamplingOptions
    greedy: bool = False
    """Whether each prompt also gets a greedy answer, as the baseline of its samples."""
    branching: Branching | None = None
    """How answers share prefixes (segments or trees); None for plain samples."""


WhileScoring = Callable[[Sequence[PromptSample], Sequence[Trajectory]], None]
"""Takes the draws and the trajectories of a round while their rewards are being computed, and does other work of the step meanwhile."""
PlanForStep = Callable[[int], RolloutPlan | None]
"""Returns the plan of a step; None after the last step."""


class RolloutSource(Protocol):
    """What the trainer calls. `SyncSource`, `AheadSource`, `AsyncSource` and the wrapper `ReplaySource` implement it."""

    overlaps: bool
    """Whether it samples while the learner trains."""

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        """Return the scored rollouts of one round of a step. Rounds count from 0, in order; each draws new prompts."""

    def start_next(self, step: int) -> None:
        """Allow sampling for `step`. Called when the step before it has all its rollouts."""

    def after_step(
        self, step: int, rollouts: RolloutBatch, batch: Batch | None, unfinished: Sequence[int] | None = None
    ) -> None:
        """Called after the updates of a step. `batch` is what was in its loss, or None.

        `unfinished` are indices into `rollouts.usable` of trajectories with untrained tree edges; only their groups may be replayed.
        With None, any group may be replayed.
        """

    def load(self, version: int) -> None:
        """Load the learner's new weights into the engine."""

    def stop(self) -> None:
        """End `next` soon with `RolloutStopped`, after writing finished samples to the journal. `load` is not cut short.

        May be called repeatedly and from another thread.
        """

    def pause(self) -> None:
        """Stop using engine and rewards until `next`, so that validation can use them. Called after `load`."""

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        """Return the metrics of a step, from its rollouts and the version of its weights."""

    def pending_draws(self) -> list[PendingDraw]:
        """Return the drawn prompts that no step has used yet, for a checkpoint."""

    def restore(self, pending: Sequence[PendingDraw], version: int) -> None:
        """Resume from a checkpoint with these pending draws. The engine has weights `version`."""

    def close(self) -> None:
        """Stop all background work."""


class RoundKey(NamedTuple):
    """Identifies a round in the journal: its step, its number, and the ids of its groups."""

    step: int
    round: int
    ids: list[str]

    def file(self, event: str) -> str:
        """Return the name of the file that holds the arrays of an event."""
        return f"{event}-{self.step:06d}" + (f"-r{self.round}" if self.round else "")


def group_id(draw: PromptSample) -> str:
    """Return the id of a draw's group in the journal."""
    return f"{draw.prompt.row.id}#{draw.visit}"


@dataclass(frozen=True)
class RecordedRound:
    """A round that was read from the journal."""

    trajectories: list[Trajectory]
    unscored: list[Trajectory]
    """Trajectories to score: the journal has no score, or the scorer had failed."""
    was_scored: bool
    """Whether the journal has the scores of the round, failed ones included."""


class RolloutJournal:
    """Writes rounds of rollouts to the journal, and reads them back when the run resumes."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        # A resumed run reads only records after its checkpoint, because it repeats only those steps.
        self.recorded: dict[tuple[str, int, int], dict[str, Any]] = {}
        for event in journal.events:
            kind = event["event"]
            if kind not in ("drawn", "partial", "completed", "scored"):
                continue
            key = kind, event["step"], event.get("round", 0)
            if (
                kind == "completed"
            ):  # if the round was sampled before, its new rollouts invalidate all later records of that attempt
                drawn = "drawn", *key[1:]
                self.recorded = {k: e for k, e in self.recorded.items() if k[1:] < key[1:] or k == drawn}
            self.recorded[key] = event

    def write(self, event: str, key: RoundKey, arrays: dict[str, Any]) -> None:
        """Write the arrays of a round."""
        self.journal.append(event, **key._asdict(), file=self.journal.attach(key.file(event), arrays))

    def read(self, event: str, key: RoundKey) -> dict[str, Any] | None:
        """Remove the record of a round and return its arrays; None if they are missing, damaged, or of other prompts."""
        record = self.recorded.pop((event, key.step, key.round), None)
        if record is None or record["ids"] != key.ids:
            return None
        return self.journal.attachment(record["file"])

    def read_round(self, key: RoundKey) -> RecordedRound | None:
        """Return a round with the scores that were recorded; None if its trajectories are missing or damaged."""
        saved, scores = (self.read(event, key) for event in ("completed", "scored"))
        if saved is None:
            return None
        trajectories = from_arrays(saved)
        if scores is not None:
            restore_scores(trajectories, scores)
            return RecordedRound(trajectories, clear_failed_scores(trajectories), was_scored=True)
        scored = {t.id: t for t in self.read_partial(key) if t.reward is not None}
        for trajectory in trajectories:
            if trajectory.id in scored:
                copy_score(scored[trajectory.id], trajectory)
        return RecordedRound(trajectories, clear_failed_scores(trajectories), was_scored=False)

    def read_partial(self, key: RoundKey) -> list[Trajectory]:
        """Return the trajectories of a round that had ended when the run was stopped, with the scores they had."""
        saved = self.read("partial", key)
        trajectories = [] if saved is None else from_arrays(saved)
        clear_failed_scores(trajectories)
        return trajectories

    def read_last_partial(self) -> list[Trajectory]:
        """Return `read_partial` of the round that was stopped last."""
        keys = [RoundKey(e["step"], e["round"], e["ids"]) for key, e in self.recorded.items() if key[0] == "partial"]
        return [t for key in keys[-1:] for t in self.read_partial(key)]

    def write_partial(self, key: RoundKey, plan: RolloutPlan, found: Sequence[Trajectory]) -> None:
        """Write the finished trajectories of a stopped round. Rounds with shared prefixes are not written: all answers are sampled again."""
        ended = [t for t in found if not t.is_demonstration]
        if ended and plan.branching is None:
            self.write("partial", key, to_arrays(ended))

    def forget(self, step: int) -> None:
        """Ignore the records of this and later steps, because the weights will differ from those of the recorded run."""
        if any(key[1] >= step for key in self.recorded):
            self.journal.forget(step)
            self.recorded = {key: event for key, event in self.recorded.items() if key[1] < step}

    def forget_after_new_scores(self, key: RoundKey, recorded: RecordedRound) -> None:
        """Forget later steps if samples got their score only now: the recorded run did not train on them."""
        if recorded.was_scored and any(t.reward is not None for t in recorded.unscored):
            self.forget(key.step + 1)

    def write_round(self, key: RoundKey, trajectories: Sequence[Trajectory]) -> None:
        """Write a round that is already scored."""
        self.write("completed", key, to_arrays(trajectories))
        self.write("scored", key, scores_to_arrays(trajectories))


def clear_failed_scores(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Clear the failed scores and return their trajectories, so that they are scored again: the user may have fixed the reward.

    Trajectories whose environment failed stay as they are: there is no answer to score.
    """
    failed = [t for t in trajectories if t.reward is None and t.finish != "error"]
    for trajectory in failed:
        trajectory.error, trajectory.accuracy, trajectory.parts = None, None, {}
    return failed


def split_by_kind(
    draws: Sequence[PromptSample], found: Sequence[Trajectory], rollout_s: float, reward_s: float
) -> RolloutBatch:
    """Sort the trajectories of a round into a `RolloutBatch`: samples, greedy answers, continued answers and demonstrations."""
    continued = [t for t in found if t.sample <= FIRST_CONTINUED_SAMPLE]
    samples, greedy, shown = list[Trajectory](), list[Trajectory](), list[Trajectory]()
    for t in found:
        if t.sample > FIRST_CONTINUED_SAMPLE:
            (greedy if t.sample == GREEDY_SAMPLE else shown if t.is_demonstration else samples).append(t)
    return RolloutBatch(list(draws), samples, rollout_s, reward_s, greedy, continued=continued, demonstrations=shown)


class SyncSource:
    """Samples in the step itself, with the current weights.

    If a kill interrupts a round, the resumed run samples the same tokens again, because each sample has its own random key.
    """

    overlaps = False

    def __init__(self, stream: PromptStream, runner: RolloutRunner, rewards: Rewards, journal: Journal) -> None:
        self.stream, self.runner, self.rewards, self.journal = stream, runner, rewards, journal
        self.rounds = RolloutJournal(journal)
        self.on_scored: OnScored = ignore_scored
        self.while_scoring: WhileScoring | None = None
        """Called when all samples of a round were generated and sent to the scorers. It may use engine and learner, and raise `RolloutStopped`."""
        self._worked_s = 0.0  # in `while_scoring`, since the last metrics

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        draws, key = self._draw(step, plan, round)
        started = time.perf_counter()
        recorded = self.rounds.read_round(key)
        resumed = self.rounds.read_partial(key) if recorded is None else []
        builder = RoundBuilder(self.runner, self.rewards, draws, progress, resumed, on_scored=self.on_scored)
        try:
            with self.runner.stop_request.allowed():
                if recorded is None:
                    trajectories = generate_round(builder, plan)
                    self.rounds.write("completed", key, to_arrays(trajectories))
                else:
                    trajectories = recorded.trajectories
            generated = time.perf_counter()
            if recorded is None and self.while_scoring is not None:
                self.while_scoring(draws, trajectories)
            waits_from = time.perf_counter()
            self._worked_s += waits_from - generated
            with self.runner.stop_request.allowed():
                self._score(builder, key, trajectories, recorded)
        except RolloutStopped:
            builder.take_scores()
            self.rounds.write_partial(key, plan, builder.finished)
            raise
        return split_by_kind(draws, trajectories, generated - started, time.perf_counter() - waits_from)

    def _score(
        self, builder: RoundBuilder, key: RoundKey, trajectories: list[Trajectory], recorded: RecordedRound | None
    ) -> None:
        """Wait for the scores of a round and record them. Of a recorded round, only missing scores are computed."""
        if recorded is not None:
            builder.finished += trajectories
            if recorded.was_scored and not recorded.unscored:
                return
            builder.submit(recorded.unscored)
        collect_scores(builder, trajectories)
        if recorded is not None:
            self.rounds.forget_after_new_scores(key, recorded)
        self.rounds.write("scored", key, scores_to_arrays(trajectories))

    def _draw(self, step: int, plan: RolloutPlan, round: int) -> tuple[list[PromptSample], RoundKey]:
        """Draw new prompts and record them in the journal."""
        self.stream.at(step)
        draws = self.stream.draw(plan.prompts)
        key = RoundKey(step, round, [group_id(draw) for draw in draws])
        self.journal.append("drawn", **key._asdict())
        return draws, key

    def start_next(self, step: int) -> None:
        """Nothing to do: sampling waits for the new weights."""

    def after_step(
        self, step: int, rollouts: RolloutBatch, batch: Batch | None, unfinished: Sequence[int] | None = None
    ) -> None:
        """Nothing to do: rollouts are used once."""

    def load(self, version: int) -> None:
        self.runner.engine.load(version, ())

    def stop(self) -> None:
        self.runner.stop_request.request()

    def pause(self) -> None:
        """Nothing to do: there is no background work."""

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        if self.while_scoring is None:
            return {}
        worked_s, self._worked_s = self._worked_s, 0.0
        return {"time/while_scoring_s": worked_s}

    def pending_draws(self) -> list[PendingDraw]:
        return []

    def restore(self, pending: Sequence[PendingDraw], version: int) -> None:
        if pending:
            raise UserError(
                f"cannot resume: {len(pending)} prompts were drawn ahead, which rollout.source=sync never does"
            )

    def close(self) -> None:
        self.runner.close()


def generate_round(builder: RoundBuilder, plan: RolloutPlan) -> list[Trajectory]:
    """Generate all trajectories of a round and send them to be scored."""
    # Greedy answers come first, so that they are scored while the samples are generated.
    greedy = builder.generate_greedy(plan.sampling) if plan.greedy else []
    samples = builder.generate(plan.n, plan.sampling, "train", plan.branching)
    continued = (
        builder.continue_borders(samples, plan.branching, plan.sampling)
        if isinstance(plan.branching, ChainPlan)
        else []
    )
    return [*greedy, *continued, *samples]


def collect_scores(builder: RoundBuilder, trajectories: Sequence[Trajectory]) -> None:
    """Wait for the scores of a round, and give its samples their greedy baselines or border values."""
    builder.collect(trajectories)
    greedy = [t for t in trajectories if t.sample == GREEDY_SAMPLE]
    if greedy:
        attach_greedy_baseline([t for t in trajectories if t.sample != GREEDY_SAMPLE], greedy)
    attach_border_values(
        [t for t in trajectories if BORDER_STATES in t.metadata],
        [t for t in trajectories if t.sample <= FIRST_CONTINUED_SAMPLE],
    )
