"""Where the trainer's scored rollouts come from.

A source draws prompts, has them answered and scored, and hands the result over, as often in a step as it is asked. The trainer is
the same for all; they differ in when the sampling is done and with which weights:

    SyncSource     now, with the weights that are trained                                (here)
    AheadSource    while the step before is learnt, with weights one step old             (`ahead.py`)
    AsyncSource    all the time, with weights that change in the middle of a sample       (`asynchronous.py`)

Every stage is in the journal: after a kill, what was handed over is taken from there.
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
    Progress,
    RolloutBatch,
    RoundBuilder,
    attach_greedy_baseline,
    copy_score,
    from_arrays,
    restore_scores,
    scores_to_arrays,
    to_arrays,
)
from burnish.rollout.segment_rollouts import BORDER_STATES, FIRST_CONTINUED_SAMPLE, ChainPlan, attach_border_values
from burnish.run.journal import Journal

PendingDraw = list[Any]
"""A draw that no step was given yet, as a checkpoint holds it: data source, index there, visit, step it was drawn for or in."""


@dataclass(frozen=True)
class RolloutPlan:
    """What is asked of a source at once; it may differ from step to step."""

    prompts: int
    n: int
    """Samples of each prompt."""
    sampling: SamplingOptions
    greedy: bool = False
    """Whether each prompt is also answered greedily once, as the baseline of its samples."""
    branching: Branching | None = None
    """How samples branch, or are cut and valued; None of plain ones."""


PlanForStep = Callable[[int], RolloutPlan | None]
"""What a step will ask for; None after the last one."""


class RolloutSource(Protocol):
    """What the trainer knows of a source."""

    overlaps: bool
    """Whether it samples while the learner learns."""

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        """The scored rollouts of one round of a step.

        A step's rounds are numbered from 0 and asked for in order; each draws new prompts.
        """

    def start_next(self, step: int) -> None:
        """The step before has all its rollouts and is learnt now: what is to be made for this one may be begun."""

    def after_step(
        self, step: int, rollouts: RolloutBatch, batch: Batch | None, unfinished: Sequence[int] | None = None
    ) -> None:
        """A step is learnt from its rollouts; `batch` is what of them was in its loss, None where nothing was. `unfinished` are the
        places among those that are usable whose groups have parts that only later steps would learn from, and no others come back;
        None where groups are learnt from as a whole."""

    def load(self, version: int) -> None:
        """The learner has new weights: take them."""

    def stop(self) -> None:
        """The user asked to stop: end `next` soon with `RolloutStopped`, and keep in the journal what has ended. `load` is not cut
        short. May be called from another thread, again and again."""

    def pause(self) -> None:
        """Leave engine and rewards to somebody else until `next`; called after `load`."""

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        """Metrics of a step, whose rollouts and weights these are."""

    def pending_draws(self) -> list[PendingDraw]:
        """The draws that no step was given yet, for a checkpoint."""

    def restore(self, tickets: Sequence[PendingDraw], version: int) -> None:
        """Go on from a checkpoint, whose draws these are; the engine has its weights, `version`."""

    def close(self) -> None:
        """Stop whatever goes on."""


class RoundKey(NamedTuple):
    """A round of a step and the prompts it is of: what the journal knows its rollouts by."""

    step: int
    round: int
    ids: list[str]

    def file(self, event: str) -> str:
        """The name of an attachment."""
        return f"{event}-{self.step:06d}" + (f"-r{self.round}" if self.round else "")


def group_id(draw: PromptSample) -> str:
    """What the journal calls a draw."""
    return f"{draw.prompt.row.id}#{draw.visit}"


@dataclass(frozen=True)
class RecordedRound:
    """A round from the journal."""

    trajectories: list[Trajectory]
    unscored: list[Trajectory]
    """Those to be scored: their score is not in the journal, or their scorer failed."""
    was_scored: bool
    """Whether the journal has scores of the round, failures among them or not."""


class RolloutJournal:
    """The rollouts of rounds in the journal: written when they are there, read back by a later life of the run."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        # Only steps after the checkpoint that the run resumes from are asked for.
        self.earlier: dict[tuple[str, int, int], dict[str, Any]] = {}
        for event in journal.events:
            kind = event["event"]
            if kind not in ("drawn", "partial", "completed", "scored"):
                continue
            key = kind, event["step"], event.get("round", 0)
            if kind == "completed":  # of a round made again, what followed it in an earlier life did not happen
                drawn = "drawn", *key[1:]
                self.earlier = {k: e for k, e in self.earlier.items() if k[1:] < key[1:] or k == drawn}
            self.earlier[key] = event

    def keep(self, event: str, place: RoundKey, arrays: dict[str, Any]) -> None:
        """Write arrays of a round."""
        self.journal.append(event, **place._asdict(), file=self.journal.attach(place.file(event), arrays))

    def recall(self, event: str, place: RoundKey) -> dict[str, Any] | None:
        """The arrays of a round; None where they are not known, are damaged, or are of other prompts."""
        record = self.earlier.pop((event, place.step, place.round), None)
        if record is None or record["ids"] != place.ids:
            return None
        return self.journal.attachment(record["file"])

    def recall_round(self, place: RoundKey) -> RecordedRound | None:
        """The trajectories of a round as far as an earlier life came with them; None where they are not known, or damaged. Scores
        alone are not used: they belong to trajectories that are lost."""
        saved, scores = (self.recall(event, place) for event in ("completed", "scored"))
        if saved is None:
            return None
        trajectories = from_arrays(saved)
        if scores is not None:
            restore_scores(trajectories, scores)
            return RecordedRound(trajectories, clear_failed_scores(trajectories), was_scored=True)
        scored = {t.id: t for t in self.recall_partial(place) if t.reward is not None}
        for trajectory in trajectories:
            if trajectory.id in scored:
                copy_score(scored[trajectory.id], trajectory)
        return RecordedRound(trajectories, clear_failed_scores(trajectories), was_scored=False)

    def recall_partial(self, place: RoundKey) -> list[Trajectory]:
        """The trajectories of a round that had ended when its run was stopped, scored as far as they were then."""
        saved = self.recall("partial", place)
        trajectories = [] if saved is None else from_arrays(saved)
        clear_failed_scores(trajectories)
        return trajectories

    def recall_all_partial(self) -> list[Trajectory]:
        """The same of the round that was stopped last, whatever its place."""
        places = [RoundKey(e["step"], e["round"], e["ids"]) for key, e in self.earlier.items() if key[0] == "partial"]
        return [t for place in places[-1:] for t in self.recall_partial(place)]

    def keep_partial(self, place: RoundKey, plan: RolloutPlan, found: Sequence[Trajectory]) -> None:
        """Write what has ended of a round that is stopped. Answers with parts in common are made again, all of them."""
        ended = [t for t in found if not t.is_demonstration]
        if ended and plan.branching is None:
            self.keep("partial", place, to_arrays(ended))

    def forget(self, step: int) -> None:
        """Take nothing of this step and later ones from the journal: it does not follow from what the run does now."""
        if any(key[1] >= step for key in self.earlier):
            self.journal.forget(step)
            self.earlier = {key: event for key, event in self.earlier.items() if key[1] < step}

    def forget_after_new_scores(self, place: RoundKey, recalled: RecordedRound) -> None:
        """Later steps were made by a policy that had not learnt from the samples that have a score only now."""
        if recalled.was_scored and any(t.reward is not None for t in recalled.unscored):
            self.forget(place.step + 1)

    def keep_all(self, place: RoundKey, trajectories: Sequence[Trajectory]) -> None:
        """Write a round that is scored already."""
        self.keep("completed", place, to_arrays(trajectories))
        self.keep("scored", place, scores_to_arrays(trajectories))


def clear_failed_scores(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Those whose scorer failed, now as before they were scored: a reward that was mended since gets another try.

    One that its environment failed stays as it is: it has no answer to score.
    """
    failed = [t for t in trajectories if t.reward is None and t.finish != "error"]
    for trajectory in failed:
        trajectory.error, trajectory.accuracy, trajectory.parts = None, None, {}
    return failed


def split_by_kind(
    draws: Sequence[PromptSample], found: Sequence[Trajectory], rollout_s: float, reward_s: float
) -> RolloutBatch:
    """Samples, greedy and continued answers and demonstrations of a round, apart."""
    continued = [t for t in found if t.sample <= FIRST_CONTINUED_SAMPLE]
    samples, greedy, shown = list[Trajectory](), list[Trajectory](), list[Trajectory]()
    for t in found:
        if t.sample > FIRST_CONTINUED_SAMPLE:
            (greedy if t.sample == GREEDY_SAMPLE else shown if t.is_demonstration else samples).append(t)
    return RolloutBatch(list(draws), samples, rollout_s, reward_s, greedy, continued=continued, demonstrations=shown)


class SyncSource:
    """Rollouts of the policy as it is now.

    A generation that a kill cut short is made again, and gives the same tokens, because randomness belongs to the sample and not
    to the moment.
    """

    overlaps = False

    def __init__(self, stream: PromptStream, driver: RolloutRunner, rewards: Rewards, journal: Journal) -> None:
        self.stream, self.driver, self.rewards, self.journal = stream, driver, rewards, journal
        self.memory = RolloutJournal(journal)

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        draws, place = self._draw(step, plan, round)
        started = time.perf_counter()
        recalled = self.memory.recall_round(place)
        kept = self.memory.recall_partial(place) if recalled is None else []
        scoring = RoundBuilder(self.driver, self.rewards, draws, progress, kept)
        try:
            with self.driver.stopping.allowed():
                if recalled is None:
                    trajectories = generate_round(scoring, plan)
                    self.memory.keep("completed", place, to_arrays(trajectories))
                else:
                    trajectories = recalled.trajectories
                generated = time.perf_counter()
                self._score(scoring, place, trajectories, recalled)
        except RolloutStopped:
            scoring.take_scores()
            self.memory.keep_partial(place, plan, scoring.found)
            raise
        return split_by_kind(draws, trajectories, generated - started, time.perf_counter() - generated)

    def _score(
        self, scoring: RoundBuilder, place: RoundKey, trajectories: list[Trajectory], recalled: RecordedRound | None
    ) -> None:
        """Wait for the scores of a round and write them down; of a round that the journal has, only those that are missing there."""
        if recalled is not None:
            scoring.found += trajectories
            if recalled.was_scored and not recalled.unscored:
                return
            scoring.submit(recalled.unscored)
        collect_scores(scoring, trajectories)
        if recalled is not None:
            self.memory.forget_after_new_scores(place, recalled)
        self.memory.keep("scored", place, scores_to_arrays(trajectories))

    def _draw(self, step: int, plan: RolloutPlan, round: int) -> tuple[list[PromptSample], RoundKey]:
        """New prompts, and their place in the journal, which has heard of them."""
        self.stream.at(step)
        draws = self.stream.draw(plan.prompts)
        place = RoundKey(step, round, [group_id(draw) for draw in draws])
        self.journal.append("drawn", **place._asdict())
        return draws, place

    def start_next(self, step: int) -> None:
        """Nothing is made before its weights are there."""

    def after_step(
        self, step: int, rollouts: RolloutBatch, batch: Batch | None, unfinished: Sequence[int] | None = None
    ) -> None:
        """What was handed over is never asked for again."""

    def load(self, version: int) -> None:
        self.driver.engine.load(version, ())

    def stop(self) -> None:
        self.driver.stopping.request()

    def pause(self) -> None:
        """Nothing goes on between two calls."""

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        return {}

    def pending_draws(self) -> list[PendingDraw]:
        return []

    def restore(self, tickets: Sequence[PendingDraw], version: int) -> None:
        if tickets:
            raise UserError(
                f"cannot resume: {len(tickets)} prompts were drawn ahead, which rollout.source=sync never does"
            )

    def close(self) -> None:
        """Nothing goes on."""


def generate_round(scoring: RoundBuilder, plan: RolloutPlan) -> list[Trajectory]:
    """All trajectories of a round, on their way to be scored."""
    # The greedy answers come first: their rewards are computed while the samples are drawn.
    greedy = scoring.greedy(plan.sampling) if plan.greedy else []
    samples = scoring.generate(plan.n, plan.sampling, "train", plan.branching)
    values = scoring.values(samples, plan.branching, plan.sampling) if isinstance(plan.branching, ChainPlan) else []
    return [*greedy, *values, *samples]


def collect_scores(scoring: RoundBuilder, trajectories: Sequence[Trajectory]) -> None:
    """Wait for the scores of a round; its samples are told their baseline, or the values of their borders."""
    scoring.collect(trajectories)
    greedy = [t for t in trajectories if t.sample == GREEDY_SAMPLE]
    if greedy:
        attach_greedy_baseline([t for t in trajectories if t.sample != GREEDY_SAMPLE], greedy)
    attach_border_values(
        [t for t in trajectories if BORDER_STATES in t.metadata],
        [t for t in trajectories if t.sample <= FIRST_CONTINUED_SAMPLE],
    )
