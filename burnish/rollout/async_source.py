"""The source that never stops sampling (AReaL, 2505.24298): the learner takes what is complete, the sampler takes new weights in
the middle of its samples.

As many groups are on their way as it takes to keep up with the learner, and no more than would be used at most `max_staleness`
steps later if steps take the oldest first.
New weights stop all samples; they go on from where they were, so a sample may hold tokens of several versions, each with its
log-prob under its own. Tokens never get older than `max_staleness`: a group that would is waited for, and past the deadline of the
step it is drawn again. A step that has waited that long goes on with the groups that are complete, so a straggler costs a step at
most the deadline. Nothing is given up: a group stays in line until a step is given it.

What steps were given is in the journal. A run that resumes gives the same again, as far as that goes; what was on its way is drawn
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from burnish.config.errors import UserError
from burnish.core.batch import Batch
from burnish.core.trajectory import Trajectory
from burnish.data.prompt_stream import PromptSample, PromptStream
from burnish.rewards.scoring import Rewards
from burnish.rollout.in_flight import InFlightTrajectories
from burnish.rollout.pausable_thread import PausableThread
from burnish.rollout.runner import RolloutRunner, RolloutStopped
from burnish.rollout.scoring import (
    GREEDY_SAMPLE,
    Progress,
    RolloutBatch,
    apply_score,
    attach_greedy_baseline,
    score_request,
)
from burnish.rollout.sync_source import (
    PendingDraw,
    PlanForStep,
    RecordedRound,
    RolloutJournal,
    RolloutPlan,
    RoundKey,
    group_id,
    split_by_kind,
)
from burnish.run.journal import Journal

# --- Groups that were drawn and not handed over yet: what of them is complete, which are waited for, which are too old.


@dataclass(eq=False)
class PendingGroup:
    """A prompt on its way, with all its samples."""

    draw: PromptSample
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
        return [*([GREEDY_SAMPLE] if self.plan.greedy else []), *range(self.plan.n)]

    @property
    def is_complete(self) -> bool:
        return len(self.scored) == self.plan.n + self.plan.greedy + len(self.demonstrations)

    def is_due(self, version: int, max_staleness: int) -> bool:
        """Whether it cannot be used after the step that begins with weights `version`."""
        return self.oldest is not None and version - self.oldest >= max_staleness


def ready_groups(
    groups: Sequence[PendingGroup], wanted: int, version: int, max_staleness: int
) -> list[PendingGroup] | None:
    """The groups for a step, in the order they were drawn; None while it must wait.

    The oldest that are complete; those that could not be used later come first, and are waited for.
    """
    due = [group for group in groups if group.is_due(version, max_staleness)][:wanted]
    chosen = completed_groups(groups, wanted, version, max_staleness)
    return chosen if len(chosen) == wanted and all(group.is_complete for group in due) else None


def completed_groups(
    groups: Sequence[PendingGroup], wanted: int, version: int, max_staleness: int
) -> list[PendingGroup]:
    """At most so many of those that are complete."""
    there = [group for group in groups if group.is_complete]
    there.sort(key=lambda group: (not group.is_due(version, max_staleness), group.number))
    return sorted(there[:wanted], key=lambda group: group.number)


def group_trajectories(groups: Sequence[PendingGroup]) -> list[Trajectory]:
    """All trajectories of complete groups: greedy answers first, then samples and demonstrations, in order."""
    found = [group.found[sample] for group in groups for sample in group.samples]
    found += [trajectory for group in groups for trajectory in group.demonstrations]
    return sorted(found, key=lambda t: t.sample != GREEDY_SAMPLE)


# --- How old tokens are: the steps between the weights that drew them and those that are trained.


def oldest_version(trajectory: Trajectory) -> int | None:
    """Of the tokens that the model wrote; None where it wrote none, as in a demonstration."""
    versions = _versions(trajectory)
    return int(versions.min()) if versions.size else None


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Of the tokens written, with the trainer at `version`: their mean and largest age, the share of every age, and the share of
    samples that were drawn by several versions."""
    ages = [version - _versions(t) for t in trajectories]
    written = [age for age in ages if age.size]
    if not written:
        return {}
    every = np.concatenate(written)
    found, counts = np.unique(every, return_counts=True)
    shares = {f"staleness/share/{age}": count / every.size for age, count in zip(found, counts, strict=True)}
    return {
        "staleness/mean": float(every.mean()),
        "staleness/max": float(every.max()),
        "staleness/mixed": sum(bool(np.ptp(age)) for age in written) / len(written),
    } | {name: float(share) for name, share in shares.items()}


def _versions(trajectory: Trajectory) -> np.ndarray:
    return np.concatenate([s.version[s.action_mask & (s.version >= 0)] for s in trajectory.sequences])


POLL_INTERVAL_S = 0.02
CLOSE_TIMEOUT_S = 10.0


def _attach_baselines(trajectories: Sequence[Trajectory]) -> None:
    """Tell samples the reward of their prompt's greedy answer, where there is one."""
    if greedy := [t for t in trajectories if t.sample == GREEDY_SAMPLE]:
        attach_greedy_baseline([t for t in trajectories if t.sample != GREEDY_SAMPLE], greedy)


class AsyncSource:
    """Rollouts of the policy as it was up to `max_staleness` steps before. `note` takes a sentence for the user."""

    overlaps = True

    def __init__(
        self,
        stream: PromptStream,
        driver: RolloutRunner,
        rewards: Rewards,
        journal: Journal,
        plans: PlanForStep,
        max_staleness: int,
        deadline_s: float,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream, self.driver, self.rewards, self.journal = stream, driver, rewards, journal
        self.plans, self.max_staleness, self.deadline_s, self.note = plans, max_staleness, deadline_s, note
        self.clock = clock
        self.memory = RolloutJournal(journal)
        self._kept = {(f"{t.prompt_id}#{t.visit}", t.sample): t for t in self.memory.recall_all_partial()}
        """Samples that had ended when the run was stopped, by their group and number."""
        self.version = 0
        self.groups: dict[str, PendingGroup] = {}
        """Those in line, oldest first."""
        self.flight = InFlightTrajectories(driver)
        self.pump = PausableThread(self._sample, self._has_work, lambda: self.driver.engine.interrupt(), "rollouts")
        self._scoring: dict[str, Trajectory] = {}
        self._rewards_lock = threading.Lock()  # the thread submits, the trainer's collects
        self._num_drawn = self._num_ended = self._num_reissued = 0
        self._waited_s = 0.0

    # --- what the trainer asks -------------------------------------------------------------------------------------------

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        self.pump.stop()
        self._take_scores()
        self._fill(step, plan, round)
        chosen, trajectories = self._recalled(step, round)
        self.pump.run()
        started = time.perf_counter()
        if not chosen:
            try:
                chosen = self._wait(step, min(plan.prompts, len(self.groups)), progress)
            except RolloutStopped:
                self._keep_ended(step, plan, round)
                raise
            trajectories = group_trajectories(chosen)
            _attach_baselines(trajectories)
            self.memory.keep_all(RoundKey(step, round, [group.id for group in chosen]), trajectories)
        with self.pump.changed:
            for group in chosen:
                del self.groups[group.id]
        self._waited_s += time.perf_counter() - started
        return split_by_kind([group.draw for group in chosen], trajectories, self.pump.take_worked_s(), 0.0)

    def start_next(self, step: int) -> None:
        """Nothing more: whatever may be on its way is."""

    def after_step(
        self, step: int, rollouts: RolloutBatch, batch: Batch | None, unfinished: Sequence[int] | None = None
    ) -> None:
        """What was handed over is never asked for again."""

    def load(self, version: int) -> None:
        self.pump.stop()
        for trajectory in self.flight.halt():
            self._ended(trajectory)
        self.driver.engine.load(version, ())
        self.version = version
        self._drop_old()

    def stop(self) -> None:
        self.driver.stopping.request()

    def pause(self) -> None:
        while self._scoring:  # every call of a scorer has its own deadline
            self._take_scores()
            time.sleep(POLL_INTERVAL_S)

    def metrics(self, rollouts: RolloutBatch, version: int) -> dict[str, float]:
        found = staleness_metrics(rollouts.trajectories, version) | {
            "staleness/groups_waiting": float(len(self.groups)),
            "staleness/reissued": float(self._num_reissued),
            "time/rollout_wait_s": self._waited_s,
        }
        self._num_reissued, self._waited_s = 0, 0.0
        return found

    def pending_draws(self) -> list[PendingDraw]:
        return [[g.draw.source, g.draw.index, g.draw.visit, g.step] for g in self.groups.values()]

    def restore(self, tickets: Sequence[PendingDraw], version: int) -> None:
        self.version = version
        for source, index, visit, step in tickets:
            plan = self.plans(step)
            assert plan is not None, "a step that was made"
            self._line_up(PendingGroup(self.stream.recall(source, index, visit, step), plan, step, self._num_drawn))

    def close(self) -> None:
        self.pump.close(CLOSE_TIMEOUT_S)

    # --- groups ----------------------------------------------------------------------------------------------------------

    def _fill(self, step: int, plan: RolloutPlan, round: int) -> None:
        """Draw so much that this step and the next one can be given their groups, and no more than `max_staleness` steps will use.

        What is in line and not complete will not be so soon, and does not count: then more is on its way, and grows older.
        """
        later = [self.plans(step + k) for k in range(1, self.max_staleness + 1)]
        asked = [plan.prompts, *(other.prompts for other in later if other is not None)]
        late = sum(not group.is_complete for group in self.groups.values())
        wanted = min(sum(asked), sum(asked[:2]) + late) - len(self.groups)
        # A round made again draws what it drew: who was late then is not known now.
        before = self.memory.earlier.pop(("drawn", step, round), None)
        self.stream.at(step)
        draws = self.stream.draw(max(0, wanted) if before is None else len(before["ids"]))
        fresh = [PendingGroup(draw, plan, step, self._num_drawn + k) for k, draw in enumerate(draws)]
        self.journal.append("drawn", **RoundKey(step, round, [group.id for group in fresh])._asdict())
        for group in fresh:
            self._line_up(group)

    def _line_up(self, group: PendingGroup) -> None:
        self.groups[group.id] = group
        self._num_drawn += 1
        if group.id not in self._recorded():
            self._begin(group)

    def _recorded(self) -> set[str]:
        """Groups that an earlier life of the run gave to steps that are to be made again."""
        return {name for (event, *_), e in self.memory.earlier.items() if event == "completed" for name in e["ids"]}

    def _begin(self, group: PendingGroup) -> None:
        group.is_begun = True
        group.demonstrations = self.driver.demonstrations(group.draw, group.plan.n)
        for trajectory in group.demonstrations:  # they have ended before they begin
            self._ended(trajectory)
        for sample in group.samples:
            kept = self._kept.pop((group.id, sample), None)
            oldest = None if kept is None else oldest_version(kept)
            if kept is None or (oldest is not None and oldest < self.version - self.max_staleness):
                self._issue(group, sample)
                continue
            self._ended(kept)
            group.oldest = min((v for v in (group.oldest, oldest) if v is not None), default=None)

    def _issue(self, group: PendingGroup, sample: int) -> None:
        options, stream = group.plan.sampling, "train"
        if sample == GREEDY_SAMPLE:
            options, stream = replace(options, temperature=0.0), "baseline"
        failed = self.flight.add(group.draw, sample, options, stream, priority=-group.number)
        if failed is not None:
            self._ended(failed)

    def _recalled(self, step: int, round: int) -> tuple[list[PendingGroup], list[Trajectory]]:
        """What an earlier life gave to this round, or nothing; then what it gave to later ones did not follow from this life."""
        record = self.memory.earlier.get(("completed", step, round))
        chosen = [self.groups[name] for name in record["ids"] if name in self.groups] if record is not None else []
        if record is not None and len(chosen) == len(record["ids"]):
            place = RoundKey(step, round, record["ids"])
            recalled = self.memory.recall_round(place)
            if recalled is not None and recalled.was_scored:
                self._score_again(place, chosen, recalled)
                return chosen, recalled.trajectories
        self.memory.earlier.clear()
        for group in self.groups.values():
            if not group.is_begun:
                self._begin(group)
        return [], []

    def _score_again(self, place: RoundKey, groups: Sequence[PendingGroup], recalled: RecordedRound) -> None:
        """Wait for the scores of samples whose scorer failed in an earlier life."""
        if not recalled.unscored:
            return
        draws = {group.id: group.draw for group in groups}
        for trajectory in recalled.unscored:
            self._submit(trajectory, draws[f"{trajectory.prompt_id}#{trajectory.visit}"])
        while any(trajectory in recalled.unscored for trajectory in self._scoring.values()):
            self._take_scores()
            time.sleep(POLL_INTERVAL_S)
        _attach_baselines(recalled.trajectories)
        self.memory.forget_after_new_scores(place, recalled)
        self.memory.keep_all(place, recalled.trajectories)

    def _drop_old(self) -> None:
        """Issue again what is too old for any later step; know how old the rest is."""
        running = {(one.draw.prompt.row.id, one.draw.visit, one.sample): one for one in self.flight}
        least = self.version - self.max_staleness
        for group in self.groups.values():
            known = []
            for sample in group.samples if group.is_begun else ():
                ended = group.found.get(sample)
                one = running.get((group.draw.prompt.row.id, group.draw.visit, sample))
                oldest = oldest_version(ended) if ended is not None else one.oldest if one is not None else None
                if oldest is None or oldest >= least:
                    known += [] if oldest is None else [oldest]
                    continue
                group.found.pop(sample, None)
                group.scored.discard(sample)
                if one is not None:
                    self.flight.aside.remove(one)
                self._issue(group, sample)
                self._num_reissued += 1
            group.oldest = min(known, default=None)

    # --- waiting ---------------------------------------------------------------------------------------------------------

    def _wait(self, step: int, wanted: int, progress: Progress) -> list[PendingGroup]:
        """The groups of a step: all that it wants, or past the deadline those that are complete."""
        until = self.clock() + self.deadline_s
        is_second, told = False, ""
        while True:
            self._take_scores()
            if self.driver.stopping.is_requested:
                raise RolloutStopped
            with self.pump.changed:
                self.pump.check()
                line = list(self.groups.values())
                if (chosen := ready_groups(line, wanted, self.version, self.max_staleness)) is not None:
                    return chosen
                there = completed_groups(line, wanted, self.version, self.max_staleness)
                self.pump.changed.wait(POLL_INTERVAL_S)
            text = f"rollout {len(there)}/{wanted} groups, {self._num_ended} samples in all"
            if text != told:  # a sign of life only where there is life
                progress(text)
                told = text
            if self.clock() < until:
                continue
            if there:
                self._say_late(step, wanted, there, line)
                return there
            if is_second:
                raise UserError(
                    f"step {step}: not one group was complete in twice rollout.source.deadline_s={self.deadline_s:g}, though all requests "
                    "were issued again after the first time; raise it, or lower rollout.max_tokens"
                )
            self.note(
                f"step {step}: not one group is complete after {self.deadline_s:g} s; all requests are issued again"
            )
            self._reissue()
            is_second, until = True, self.clock() + self.deadline_s

    def _say_late(self, step: int, wanted: int, there: list[PendingGroup], line: list[PendingGroup]) -> None:
        late = [g for g in line if g.is_due(self.version, self.max_staleness) and not g.is_complete]
        again = f" ({len(late)} of them from the beginning, their tokens would be too old)" if late else ""
        self.note(
            f"step {step}: {len(there)} of {wanted} groups are complete after rollout.source.deadline_s={self.deadline_s:g}; the step goes "
            f"on with those, the others go on and come later{again}"
        )

    def _reissue(self) -> None:
        """Requests go to whichever engine has least to do now; what they have is kept."""
        self.pump.stop()
        for trajectory in self.flight.halt():
            self._ended(trajectory)
        self._num_reissued += len(self.flight.aside)
        self.pump.run()

    def _keep_ended(self, step: int, plan: RolloutPlan, round: int) -> None:
        """Stop sampling and write down which samples have ended, scored or not."""
        self.pump.stop()
        for trajectory in self.flight.halt():
            self._ended(trajectory)
        self._take_scores()
        groups = list(self.groups.values())
        found = [trajectory for group in groups for trajectory in group.found.values()]
        self.memory.keep_partial(RoundKey(step, round, [group.id for group in groups]), plan, found)

    # --- sampling and scoring --------------------------------------------------------------------------------------------

    def _has_work(self) -> bool:
        return bool(self.flight.running or self.flight.aside)

    def _sample(self) -> None:
        """Until the engine has nothing left, or is interrupted; by the pump's thread."""
        self.flight.go_on()
        for completion in self.driver.engine.stream():
            finished = self.flight.take(completion)
            if finished is not None:
                self._ended(finished)
            self.flight.go_on()

    def _ended(self, trajectory: Trajectory) -> None:
        """A sample is there: on to its score, unless its environment gave it, or failed."""
        group = self.groups[f"{trajectory.prompt_id}#{trajectory.visit}"]
        if group.draw.prompt.budget is not None:
            trajectory.metadata["budget"] = group.draw.prompt.budget
        with self.pump.changed:
            self._num_ended += 1
            group.found[trajectory.sample] = trajectory
            if trajectory.reward is not None or trajectory.error is not None:
                group.scored.add(trajectory.sample)
                self.pump.changed.notify_all()
                return
        self._submit(trajectory, group.draw)

    def _submit(self, trajectory: Trajectory, draw: PromptSample) -> None:
        """Send a sample to be scored."""
        request = score_request(trajectory, draw)
        name, again = request.id, 0
        with self._rewards_lock:
            while name in self._scoring:  # the score of a sample that was drawn again is still to come
                again += 1
                name = f"{request.id}~{again}"
            self._scoring[name] = trajectory
            self.rewards.submit([replace(request, id=name)])

    def _take_scores(self) -> None:
        with self._rewards_lock:
            scores = self.rewards.poll(0.0)
            found = [(self._scoring.pop(score.id), score) for score in scores]
        for trajectory, score in found:
            apply_score(trajectory, score)
            group = self.groups.get(f"{trajectory.prompt_id}#{trajectory.visit}")
            if group is not None and group.found.get(trajectory.sample) is trajectory:
                group.scored.add(trajectory.sample)
