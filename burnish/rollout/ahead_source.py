"""`AheadSource` samples one step ahead: while a step trains, it generates the rollouts of the next step with the weights before the update.

New weights are loaded only when that round is complete. Every token is therefore exactly one step old (except in step 1), and runs are
reproducible. The round is written to the journal before a checkpoint of the new weights, because a resumed run could not sample it again.
Further rounds of a step (`algorithm.refill`) are sampled inside the step, with the current weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptSample, PromptStream
from burnish.rewards.scoring import Rewards
from burnish.rollout.async_source import staleness_metrics
from burnish.rollout.runner import RolloutRunner, RolloutStopped
from burnish.rollout.scoring import Progress, RolloutBatch, RoundBuilder
from burnish.rollout.sync_source import (
    PendingDraw,
    PlanForStep,
    RecordedRound,
    RolloutPlan,
    RoundKey,
    SyncSource,
    collect_scores,
    generate_round,
    group_id,
    split_by_kind,
)
from burnish.run.checkpoint.saver import BackgroundTask
from burnish.run.journal import Journal

POLL_INTERVAL_S = 0.2
CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for a round that is no longer needed."""


@dataclass(frozen=True)
class _CompletedRound:
    """A generated and scored round, with its times."""

    trajectories: list[Trajectory]
    rollout_s: float = 0.0
    reward_s: float = 0.0


@dataclass
class _NextRound:
    """The first round of the next step, in progress or complete."""

    draws: list[PromptSample]
    key: RoundKey
    completed: _CompletedRound | None = None
    builder: RoundBuilder | None = None
    """Set while the round is generated."""
    recorded: RecordedRound | None = None
    """What the journal has of the round."""


class AheadSource(SyncSource):
    """Samples one step ahead of the learner. See the module's docstring."""

    overlaps = True

    def __init__(
        self,
        stream: PromptStream,
        runner: RolloutRunner,
        rewards: Rewards,
        journal: Journal,
        plans: PlanForStep,
        progress: Progress,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(stream, runner, rewards, journal)
        self.plans, self.progress, self.note = plans, progress, note
        self._next: _NextRound | None = None
        self._work: BackgroundTask[_CompletedRound] = BackgroundTask()
        self._waited_s = 0.0
        self._progress_text = ""
        """The last progress text of the background thread."""

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        upcoming = self._next
        if upcoming is None or (upcoming.key.step, upcoming.key.round) != (step, round):
            return super().next(step, plan, progress, round)
        # The round is incomplete here only after a resume. No step has finished since, so a stop loses none.
        with self.runner.stop_request.allowed():
            completed = self._complete()
        assert completed is not None
        self._next = None
        return split_by_kind(upcoming.draws, completed.trajectories, completed.rollout_s, completed.reward_s)

    def start_next(self, step: int) -> None:
        plan = self.plans(step)
        if plan is not None:
            draws, key = self._draw(step, plan, 0)
            self._start(_NextRound(draws, key), plan)

    def load(self, version: int) -> None:
        """Load new weights once the next round is complete, even if the user asked to stop.

        A checkpoint includes the next round, which cannot be sampled once its weights are replaced. Stopping here would therefore
        lose all steps since the last checkpoint.
        """
        self._complete(saves=version)
        super().load(version)

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        waited_s, self._waited_s = self._waited_s, 0.0
        return staleness_metrics(rollouts.trajectories, version) | {"time/rollout_wait_s": waited_s}

    def pending_draws(self) -> list[PendingDraw]:
        upcoming = self._next
        return [] if upcoming is None else [[d.source, d.index, d.visit, upcoming.key.step] for d in upcoming.draws]

    def restore(self, pending: Sequence[PendingDraw], version: int) -> None:
        if not pending:
            return
        step = int(pending[0][3])
        plan = self.plans(step)
        assert plan is not None, "the run would be complete"
        draws = [self.stream.recall(source, index, visit, step) for source, index, visit, _ in pending]
        key = RoundKey(step, 0, [group_id(draw) for draw in draws])
        self.journal.append("drawn", **key._asdict())  # supersedes the records after the checkpoint
        self._start(_NextRound(draws, key), plan)
        if self._next is not None and self._next.recorded is None:
            self.rounds.recorded.clear()  # later records depend on those rollouts
            self.note(
                f"the rollouts of step {step}, sampled before step {step - 1} was complete, are missing in the journal or damaged: "
                f"they are sampled again, with the weights of step {step - 1}"
            )

    def close(self) -> None:
        if not self._work.is_idle:
            with self.runner.stop_request.allowed():
                self.runner.stop_request.request()
                self._work.wait(CLOSE_TIMEOUT_S)
        super().close()

    def _start(self, upcoming: _NextRound, plan: RolloutPlan) -> None:
        """Read the round from the journal, or start to generate it in a background thread. Only the main thread writes to the journal."""
        self._next = upcoming
        recorded = upcoming.recorded = self.rounds.read_round(upcoming.key)
        if recorded is not None and recorded.was_scored and not recorded.unscored:
            upcoming.completed = _CompletedRound(recorded.trajectories)
            return
        resumed = self.rounds.read_partial(upcoming.key) if recorded is None else []
        builder = upcoming.builder = RoundBuilder(
            self.runner, self.rewards, upcoming.draws, self._set_progress, resumed, on_scored=self.on_scored
        )
        self._work.start(lambda: self._generate(builder, plan, recorded), f"rollouts of step {upcoming.key.step}")

    def _generate(self, builder: RoundBuilder, plan: RolloutPlan, recorded: RecordedRound | None) -> _CompletedRound:
        started = time.perf_counter()
        if recorded is None:
            trajectories = generate_round(builder, plan)
        else:
            trajectories = recorded.trajectories
            builder.finished += trajectories
            builder.submit(recorded.unscored)
        generated = time.perf_counter()
        collect_scores(builder, trajectories)
        return _CompletedRound(trajectories, generated - started, time.perf_counter() - generated)

    def _set_progress(self, text: str) -> None:
        self._progress_text = text

    def _complete(self, saves: int | None = None) -> _CompletedRound | None:
        """Wait for the next round, write it to the journal and return it; None if no round was started.

        `saves` is the step that is saved afterwards, for the note to a user who waits for a stop. The wait needs no deadline: every
        request and every score has one.
        """
        upcoming = self._next
        if upcoming is None or upcoming.completed is not None:
            return None if upcoming is None else upcoming.completed
        started, shown, has_noted = time.perf_counter(), "", False
        while not self._work.wait(POLL_INTERVAL_S):
            if shown != self._progress_text:  # the supervisor reads progress as a sign of life
                shown = self._progress_text
                self.progress(f"step {upcoming.key.step} ahead: {shown}")
            if saves is not None and self.runner.stop_request.is_requested and not has_noted:
                has_noted = True
                self.note(
                    f"stopping when the rollouts of step {upcoming.key.step} are complete ({shown or 'starting'}): step {saves} is saved with "
                    "them; a stop at once loses the steps since the last checkpoint"
                )
        return self._collected(upcoming, time.perf_counter() - started)

    def _collected(self, upcoming: _NextRound, waited_s: float) -> _CompletedRound:
        """Return the round that the background thread generated, and write it to the journal; after a stop, write its finished part."""
        try:
            completed = upcoming.completed = self._work.collect()
        except RolloutStopped:
            plan = self.plans(upcoming.key.step)
            assert plan is not None
            assert upcoming.builder is not None
            upcoming.builder.take_scores()
            self.rounds.write_partial(upcoming.key, plan, upcoming.builder.finished)
            raise
        self._waited_s += waited_s
        if upcoming.recorded is not None:
            self.rounds.forget_after_new_scores(upcoming.key, upcoming.recorded)
        self.rounds.write_round(upcoming.key, completed.trajectories)
        return completed
