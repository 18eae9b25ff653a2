"""The source that works one step ahead: while a batch is learnt, the next one is sampled with the weights it began with.

Every token is exactly one step old (the first step's are not), whatever the timing, so a run repeats itself as it does with
`SyncSource`: new weights wait until the batch on its way is complete. Then it is in the journal, before any checkpoint of those
weights: a run that goes on from there could not sample it again. Later rounds of a step are made when they are asked for, with the
weights of that moment.
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
"""How long a batch that is not needed any more may take to stop."""


@dataclass(frozen=True)
class _CompletedRound:
    """A round that is complete."""

    trajectories: list[Trajectory]
    rollout_s: float = 0.0
    reward_s: float = 0.0


@dataclass
class _NextRound:
    """The first round of the next step."""

    draws: list[PromptSample]
    place: RoundKey
    made: _CompletedRound | None = None
    scoring: RoundBuilder | None = None
    """While it is made."""
    recalled: RecordedRound | None = None
    """What the journal had of it."""


class AheadSource(SyncSource):
    """Rollouts of the policy as it was a step before."""

    overlaps = True

    def __init__(
        self,
        stream: PromptStream,
        driver: RolloutRunner,
        rewards: Rewards,
        journal: Journal,
        plans: PlanForStep,
        progress: Progress,
        note: Callable[[str], None],
    ) -> None:
        super().__init__(stream, driver, rewards, journal)
        self.plans, self.progress, self.note = plans, progress, note
        self._coming: _NextRound | None = None
        self._work: BackgroundTask[_CompletedRound] = BackgroundTask()
        self._waited_s = 0.0
        self._said = ""
        """How far the batch on its way is, in the words of its thread."""

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        coming = self._coming
        if coming is None or (coming.place.step, coming.place.round) != (step, round):
            return super().next(step, plan, progress, round)
        with self.driver.stopping.allowed():  # only after a resume is it not complete: there is no step to save
            made = self._complete()
        assert made is not None
        self._coming = None
        return split_by_kind(coming.draws, made.trajectories, made.rollout_s, made.reward_s)

    def start_next(self, step: int) -> None:
        plan = self.plans(step)
        if plan is not None:
            draws, place = self._draw(step, plan, 0)
            self._start(_NextRound(draws, place), plan)

    def load(self, version: int) -> None:
        """Take new weights when the batch on its way is complete, also where the user has asked to stop.

        A step is saved with the next batch, which cannot be sampled any more once its weights are gone. To stop the batch would be
        to lose all steps since the last checkpoint.
        """
        self._complete(saves=version)
        super().load(version)

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        waited_s, self._waited_s = self._waited_s, 0.0
        return staleness_metrics(rollouts.trajectories, version) | {"time/rollout_wait_s": waited_s}

    def pending_draws(self) -> list[PendingDraw]:
        coming = self._coming
        return [] if coming is None else [[d.source, d.index, d.visit, coming.place.step] for d in coming.draws]

    def restore(self, tickets: Sequence[PendingDraw], version: int) -> None:
        if not tickets:
            return
        step = int(tickets[0][3])
        plan = self.plans(step)
        assert plan is not None, "the run would be complete"
        draws = [self.stream.recall(source, index, visit, step) for source, index, visit, _ in tickets]
        place = RoundKey(step, 0, [group_id(draw) for draw in draws])
        self.journal.append("drawn", **place._asdict())  # what it said of steps after the checkpoint counts no more
        self._start(_NextRound(draws, place), plan)
        if self._coming is not None and self._coming.recalled is None:
            self.memory.earlier.clear()  # which followed from them
            self.note(
                f"the rollouts of step {step}, made before step {step - 1} was complete, are not in the journal any more, or damaged: "
                f"they are made again, with the weights of step {step - 1}"
            )

    def close(self) -> None:
        if not self._work.is_idle:
            with self.driver.stopping.allowed():
                self.driver.stopping.request()
                self._work.wait(CLOSE_TIMEOUT_S)

    # --- the batch on its way --------------------------------------------------------------------------------------------

    def _start(self, coming: _NextRound, plan: RolloutPlan) -> None:
        """Take it from the journal, or have it made beside the main thread, which alone writes there."""
        self._coming = coming
        recalled = coming.recalled = self.memory.recall_round(coming.place)
        if recalled is not None and recalled.was_scored and not recalled.unscored:
            coming.made = _CompletedRound(recalled.trajectories)
            return
        kept = self.memory.recall_partial(coming.place) if recalled is None else []
        scoring = coming.scoring = RoundBuilder(self.driver, self.rewards, coming.draws, self._say, kept)
        self._work.start(lambda: self._make(scoring, plan, recalled), f"rollouts of step {coming.place.step}")

    def _make(self, scoring: RoundBuilder, plan: RolloutPlan, recalled: RecordedRound | None) -> _CompletedRound:
        started = time.perf_counter()
        if recalled is None:
            trajectories = generate_round(scoring, plan)
        else:
            trajectories = recalled.trajectories
            scoring.found += trajectories
            scoring.submit(recalled.unscored)
        generated = time.perf_counter()
        collect_scores(scoring, trajectories)
        return _CompletedRound(trajectories, generated - started, time.perf_counter() - generated)

    def _say(self, text: str) -> None:
        self._said = text

    def _complete(self, saves: int | None = None) -> _CompletedRound | None:
        """Wait for the batch on its way and write it to the journal; None where there is none.

        `saves` is the step that can be saved then. How long that may take is up to the engine and the rewards: every request and every score has its own deadline.
        """
        coming = self._coming
        if coming is None or coming.made is not None:
            return None if coming is None else coming.made
        started, told, has_noted = time.perf_counter(), "", False
        while not self._work.wait(POLL_INTERVAL_S):
            if told != self._said:  # a sign of life only where there is life
                told = self._said
                self.progress(f"step {coming.place.step} ahead: {told}")
            if saves is not None and self.driver.stopping.is_requested and not has_noted:
                has_noted = True
                self.note(
                    f"stopping when the rollouts of step {coming.place.step} are complete ({told or 'starting'}): step {saves} is saved with "
                    "them; a stop at once loses the steps since the last checkpoint"
                )
        return self._collected(coming, time.perf_counter() - started)

    def _collected(self, coming: _NextRound, waited_s: float) -> _CompletedRound:
        """The batch that was made beside the main thread, now in the journal, or as much of it as there is."""
        try:
            made = coming.made = self._work.pick_up()
        except RolloutStopped:
            plan = self.plans(coming.place.step)
            assert plan is not None
            assert coming.scoring is not None
            coming.scoring.take_scores()
            self.memory.keep_partial(coming.place, plan, coming.scoring.found)
            raise
        self._waited_s += waited_s
        if coming.recalled is not None:
            self.memory.forget_after_new_scores(coming.place, coming.recalled)
        self.memory.keep_all(coming.place, made.trajectories)
        return made
