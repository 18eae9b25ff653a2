"""`AsyncSource` samples all the time and loads new weights in the middle of samples (AReaL, 2505.24298).

Enough groups are pending to keep the engine busy. They are few enough that, if steps take the oldest first, each is used within
`max_staleness` steps. New weights pause all samples, which then continue after their tokens so far. A sample may therefore hold tokens of
several versions, each with its log-prob under its own version.

No token is used more than `max_staleness` steps after its version. A step waits for groups that would otherwise become too old. After
`deadline_s` it trains on the groups that are complete. Groups that have become too old are sampled again. No group is dropped: each
stays pending until a step uses it.

The journal records which groups each step used. A resumed run uses the same groups again; groups that were pending are sampled again.
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
from burnish.rollout.pausable_thread import PausableThread
from burnish.rollout.runner import RolloutRunner, RolloutStopped
from burnish.rollout.scoring import (
    GREEDY_SAMPLE,
    OnScored,
    Progress,
    RolloutBatch,
    apply_score,
    attach_greedy_baseline,
    ignore_scored,
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

POLL_INTERVAL_S = 0.02
CLOSE_TIMEOUT_S = 10.0
"""How long `close` waits for the sampling thread."""


@dataclass(eq=False)
class PendingGroup:
    """A drawn prompt that no step has used yet, with its samples. It is complete when all samples are scored."""

    draw: PromptSample
    plan: RolloutPlan
    step: int
    """The step in which it was drawn."""
    number: int
    """The number of groups drawn before it."""
    is_started: bool = False
    finished: dict[int, list[Trajectory]] = field(default_factory=dict)
    """Samples that have ended, by index. A sample is one trajectory, or in a game of several players one for each that had a turn."""
    demonstrations: list[Trajectory] = field(default_factory=list)
    """Demonstrations that join its samples, set when it is started."""
    unscored: set[int] = field(default_factory=set)
    """The `Trajectory.sample` of those that have ended and have no score yet."""
    oldest: int | None = None
    """The version of its oldest token when weights were last loaded; None without tokens."""

    @property
    def id(self) -> str:
        return group_id(self.draw)

    @property
    def samples(self) -> list[int]:
        """The indices of the samples to generate."""
        return [*([GREEDY_SAMPLE] if self.plan.greedy else []), *range(self.plan.n)]

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == len(self.samples) + len(self.demonstrations) and not self.unscored

    def is_due(self, version: int, max_staleness: int) -> bool:
        """Whether the step that starts from weights `version` is the last that may use it."""
        return self.oldest is not None and version - self.oldest >= max_staleness


def ready_groups(
    groups: Sequence[PendingGroup], wanted: int, version: int, max_staleness: int
) -> list[PendingGroup] | None:
    """Return the groups for a step, in the order of their draws; None while the step must wait.

    Complete groups are taken oldest first. Groups that are due (`PendingGroup.is_due`) come before all others, and the step waits for
    them.
    """
    due = [group for group in groups if group.is_due(version, max_staleness)][:wanted]
    chosen = completed_groups(groups, wanted, version, max_staleness)
    return chosen if len(chosen) == wanted and all(group.is_complete for group in due) else None


def completed_groups(
    groups: Sequence[PendingGroup], wanted: int, version: int, max_staleness: int
) -> list[PendingGroup]:
    """Return at most `wanted` complete groups, preferring due ones, in the order of their draws."""
    found = [group for group in groups if group.is_complete]
    found.sort(key=lambda group: (not group.is_due(version, max_staleness), group.number))
    return sorted(found[:wanted], key=lambda group: group.number)


def group_trajectories(groups: Sequence[PendingGroup]) -> list[Trajectory]:
    """Return all trajectories of complete groups: greedy answers, then samples, then demonstrations."""
    found = list[Trajectory]()
    for group in groups:
        samples = [trajectory for sample in group.samples for trajectory in group.finished[sample]]
        found += sorted(samples, key=lambda t: t.place_in_draw)
    found += [trajectory for group in groups for trajectory in group.demonstrations]
    return sorted(found, key=lambda t: t.sample != GREEDY_SAMPLE)


def oldest_version(trajectories: Sequence[Trajectory]) -> int | None:
    """Return the oldest version among the sampled tokens; None if there are none, as in a demonstration."""
    versions = np.concatenate([_versions(t) for t in trajectories])
    return int(versions.min()) if versions.size else None


def staleness_metrics(trajectories: Sequence[Trajectory], version: int) -> dict[str, float]:
    """Return the age of the sampled tokens when the trainer is at `version`: mean, maximum, share of each age.

    `staleness/mixed` is the share of samples with tokens of several versions.
    """
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
    """Return the versions of its sampled tokens. Those of a demonstration are unknown (-1) and left out."""
    every = np.concatenate([s.version for s in trajectory.sequences])
    return every[every >= 0]


def _attach_baselines(trajectories: Sequence[Trajectory]) -> None:
    """Give samples the reward of their prompt's greedy answer as a baseline, if the plan has greedy answers."""
    if greedy := [t for t in trajectories if t.sample == GREEDY_SAMPLE]:
        attach_greedy_baseline([t for t in trajectories if t.sample != GREEDY_SAMPLE], greedy)


class AsyncSource:
    """Samples all the time, with weights up to `max_staleness` steps old. `note` shows a sentence to the user."""

    overlaps = True

    def __init__(
        self,
        stream: PromptStream,
        runner: RolloutRunner,
        rewards: Rewards,
        journal: Journal,
        plans: PlanForStep,
        max_staleness: int,
        deadline_s: float,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stream, self.runner, self.rewards, self.journal = stream, runner, rewards, journal
        self.plans, self.max_staleness, self.deadline_s, self.note = plans, max_staleness, deadline_s, note
        self.clock = clock
        self.rounds = RolloutJournal(journal)
        self._resumed: dict[tuple[str, int], list[Trajectory]] = {}
        """Samples that had ended when the run was stopped, by group id and index."""
        for t in self.rounds.read_last_partial():
            self._resumed.setdefault((f"{t.prompt_id}#{t.visit}", runner.episode_index(t.sample)), []).append(t)
        self.version = 0
        self.groups: dict[str, PendingGroup] = {}
        """Pending groups by id, in the order of their draws."""
        self.in_flight = runner.in_flight()
        self.thread = PausableThread(self._sample, self._has_work, lambda: self.runner.engine.interrupt(), "rollouts")
        self._scoring: dict[str, Trajectory] = {}
        self._rewards_lock = threading.Lock()  # the sampling thread submits, the trainer's thread collects
        self._num_drawn = self._num_finished = self._num_reissued = 0
        self._waited_s = 0.0
        self.on_scored: OnScored = ignore_scored

    def next(self, step: int, plan: RolloutPlan, progress: Progress, round: int = 0) -> RolloutBatch:
        self.thread.stop()
        self._take_scores()
        self._fill(step, plan, round)
        chosen, trajectories = self._read_recorded(step, round)
        self.thread.run()
        started = time.perf_counter()
        if not chosen:
            try:
                chosen = self._wait(step, min(plan.prompts, len(self.groups)), progress)
            except RolloutStopped:
                self._record_finished(step, plan, round)
                raise
            trajectories = group_trajectories(chosen)
            _attach_baselines(trajectories)
            self.rounds.write_round(RoundKey(step, round, [group.id for group in chosen]), trajectories)
        with self.thread.changed:
            for group in chosen:
                del self.groups[group.id]
        self._waited_s += time.perf_counter() - started
        return split_by_kind([group.draw for group in chosen], trajectories, self.thread.take_worked_s(), 0.0)

    def start_next(self, step: int) -> None:
        """Nothing to do: sampling never stops."""

    def after_step(
        self, step: int, rollouts: RolloutBatch, batch: Batch | None, unfinished: Sequence[int] | None = None
    ) -> None:
        """Nothing to do: groups are used once."""

    def load(self, version: int) -> None:
        self.thread.stop()
        self._on_finished(self.in_flight.pause_all())
        self.runner.engine.load(version, ())
        self.version = version
        self._restart_stale_samples()

    def stop(self) -> None:
        self.runner.stop_request.request()

    def pause(self) -> None:
        while self._scoring:  # every scorer call has its own deadline
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

    def restore(self, pending: Sequence[PendingDraw], version: int) -> None:
        self.version = version
        for source, index, visit, step in pending:
            plan = self.plans(step)
            assert plan is not None, "the step was run before"
            self._add_group(PendingGroup(self.stream.recall(source, index, visit, step), plan, step, self._num_drawn))

    def close(self) -> None:
        self.thread.close(CLOSE_TIMEOUT_S)
        self.in_flight.close()
        self.runner.close()

    def _fill(self, step: int, plan: RolloutPlan, round: int) -> None:
        """Draw new groups, so that the complete and the new ones are enough for this step and the next.

        Incomplete groups do not count, because they may be late. The number of pending groups is bounded by what this step and the next
        `max_staleness` steps use: with more, some would become too old.
        """
        later = [self.plans(step + k) for k in range(1, self.max_staleness + 1)]
        prompts = [
            plan.prompts,
            *(other.prompts for other in later if other is not None),
        ]  # of this step and the later ones
        num_incomplete = sum(not group.is_complete for group in self.groups.values())
        wanted = min(sum(prompts), sum(prompts[:2]) + num_incomplete) - len(self.groups)
        # A round that a resumed run repeats draws as many as before: which groups were incomplete then is not recorded.
        before = self.rounds.recorded.pop(("drawn", step, round), None)
        self.stream.at(step)
        draws = self.stream.draw(max(0, wanted) if before is None else len(before["ids"]))
        fresh = [PendingGroup(draw, plan, step, self._num_drawn + k) for k, draw in enumerate(draws)]
        self.journal.append("drawn", **RoundKey(step, round, [group.id for group in fresh])._asdict())
        for group in fresh:
            self._add_group(group)

    def _add_group(self, group: PendingGroup) -> None:
        self.groups[group.id] = group
        self._num_drawn += 1
        if group.id not in self._recorded_ids():
            self._start(group)

    def _recorded_ids(self) -> set[str]:
        """Return the ids of groups that the journal assigns to steps that a resumed run repeats."""
        return {name for (event, *_), e in self.rounds.recorded.items() if event == "completed" for name in e["ids"]}

    def _start(self, group: PendingGroup) -> None:
        group.is_started = True
        group.demonstrations = self.runner.demonstrations(group.draw, group.plan.n)
        self._on_finished(group.demonstrations)
        for sample in group.samples:
            resumed = self._resumed.pop((group.id, sample), None)
            oldest = None if resumed is None else oldest_version(resumed)
            if resumed is None or (oldest is not None and oldest < self.version - self.max_staleness):
                self._add_sample(group, sample)
                continue
            self._on_finished(resumed)
            group.oldest = min((v for v in (group.oldest, oldest) if v is not None), default=None)

    def _add_sample(self, group: PendingGroup, sample: int) -> None:
        options, stream = group.plan.sampling, "train"
        if sample == GREEDY_SAMPLE:
            options, stream = replace(options, temperature=0.0), "baseline"
        self._on_finished(self.in_flight.add(group.draw, sample, options, stream, priority=-group.number))

    def _read_recorded(self, step: int, round: int) -> tuple[list[PendingGroup], list[Trajectory]]:
        """Return the groups that the journal assigns to this round, with their trajectories.

        If the journal has no usable record of the round, return nothing and ignore all later records, which depend on it.
        """
        record = self.rounds.recorded.get(("completed", step, round))
        chosen = [self.groups[name] for name in record["ids"] if name in self.groups] if record is not None else []
        if record is not None and len(chosen) == len(record["ids"]):
            key = RoundKey(step, round, record["ids"])
            recorded = self.rounds.read_round(key)
            if recorded is not None and recorded.was_scored:
                self._score_again(key, chosen, recorded)
                return chosen, recorded.trajectories
        self.rounds.recorded.clear()
        for group in self.groups.values():
            if not group.is_started:
                self._start(group)
        return [], []

    def _score_again(self, key: RoundKey, groups: Sequence[PendingGroup], recorded: RecordedRound) -> None:
        """Score samples again whose scorer failed before the run was interrupted."""
        if not recorded.unscored:
            return
        draws = {group.id: group.draw for group in groups}
        for trajectory in recorded.unscored:
            self._submit(trajectory, draws[f"{trajectory.prompt_id}#{trajectory.visit}"])
        while any(trajectory in recorded.unscored for trajectory in self._scoring.values()):
            self._take_scores()
            time.sleep(POLL_INTERVAL_S)
        _attach_baselines(recorded.trajectories)
        self.rounds.forget_after_new_scores(key, recorded)
        self.rounds.write_round(key, recorded.trajectories)

    def _restart_stale_samples(self) -> None:
        """Restart samples that are too old for any later step, and update the age of the other groups."""
        running = {(active.draw.prompt.row.id, active.draw.visit, active.sample): active for active in self.in_flight}
        oldest_allowed = self.version - self.max_staleness
        for group in self.groups.values():
            known = []
            for sample in group.samples if group.is_started else ():
                ended = group.finished.get(sample)
                active = running.get((group.draw.prompt.row.id, group.draw.visit, sample))
                oldest = oldest_version(ended) if ended is not None else active.oldest if active is not None else None
                if oldest is None or oldest >= oldest_allowed:
                    known += [] if oldest is None else [oldest]
                    continue
                for trajectory in group.finished.pop(sample, ()):
                    group.unscored.discard(trajectory.sample)
                if active is not None:
                    self.in_flight.drop(active)
                self._add_sample(group, sample)
                self._num_reissued += 1
            group.oldest = min(known, default=None)

    def _wait(self, step: int, wanted: int, progress: Progress) -> list[PendingGroup]:
        """Wait for `wanted` groups and return them. After the deadline, return the groups that are complete.

        If none is complete at the deadline, reissue all requests once and wait again; then raise.
        """
        until = self.clock() + self.deadline_s
        is_second, shown = False, ""
        while True:
            self._take_scores()
            if self.runner.stop_request.is_requested:
                raise RolloutStopped
            with self.thread.changed:
                self.thread.check()
                pending = list(self.groups.values())
                if (chosen := ready_groups(pending, wanted, self.version, self.max_staleness)) is not None:
                    return chosen
                complete = completed_groups(pending, wanted, self.version, self.max_staleness)
                self.thread.changed.wait(POLL_INTERVAL_S)
            text = f"rollout {len(complete)}/{wanted} groups, {self._num_finished} samples in all"
            if text != shown:  # the supervisor reads progress as a sign of life
                progress(text)
                shown = text
            if self.clock() < until:
                continue
            if complete:
                self._note_late(step, wanted, complete, pending)
                return complete
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

    def _note_late(self, step: int, wanted: int, complete: list[PendingGroup], pending: list[PendingGroup]) -> None:
        late = [g for g in pending if g.is_due(self.version, self.max_staleness) and not g.is_complete]
        again = f" ({len(late)} of them start over, because their tokens would be too old)" if late else ""
        self.note(
            f"step {step}: {len(complete)} of {wanted} groups are complete after rollout.source.deadline_s={self.deadline_s:g}; the step trains "
            f"on those, the others continue and are used later{again}"
        )

    def _reissue(self) -> None:
        """Pause and resubmit all requests, so that they go to the least busy engine. Their tokens are kept."""
        self.thread.stop()
        self._on_finished(self.in_flight.pause_all())
        self._num_reissued += len(self.in_flight.paused)
        self.thread.run()

    def _record_finished(self, step: int, plan: RolloutPlan, round: int) -> None:
        """Stop sampling and write the samples that have ended to the journal, scored or not."""
        self.thread.stop()
        self._on_finished(self.in_flight.pause_all())
        self._take_scores()
        groups = list(self.groups.values())
        found = [trajectory for group in groups for ended in group.finished.values() for trajectory in ended]
        self.rounds.write_partial(RoundKey(step, round, [group.id for group in groups]), plan, found)

    def _has_work(self) -> bool:
        return bool(self.in_flight.running or self.in_flight.paused or self.in_flight.waiting)

    def _sample(self) -> None:
        """Process completions until the engine is idle or interrupted. Runs in the sampling thread."""
        # Replies that came during a pause have interrupted the stream of `pause_all`, and will not interrupt this one.
        self._on_finished(self.in_flight.take_replies())
        self.in_flight.submit_pending()
        for completion in self.runner.engine.stream():
            self._on_finished([*self.in_flight.take(completion), *self.in_flight.take_replies()])
            self.in_flight.submit_pending()
        self._on_finished(self.in_flight.take_replies(0.0 if self.in_flight.running else POLL_INTERVAL_S))

    def _on_finished(self, trajectories: Sequence[Trajectory]) -> None:
        """Record finished samples, and submit them for scoring unless their environment failed or gave the reward.

        All players of a game are given at once: a group with some of them must not look complete.
        """
        groups = [self.groups[f"{t.prompt_id}#{t.visit}"] for t in trajectories]
        unscored = [t.reward is None and t.error is None for t in trajectories]
        with self.thread.changed:
            for t, group, waits in zip(trajectories, groups, unscored, strict=True):
                t.metadata |= group.draw.prompt.numbers
                samples = group.finished.setdefault(self.runner.episode_index(t.sample), [])
                self._num_finished += not samples
                samples.append(t)
                if waits:
                    group.unscored.add(t.sample)
            self.thread.changed.notify_all()
        for t, group, waits in zip(trajectories, groups, unscored, strict=True):
            if waits:
                self._submit(t, group.draw)
            else:
                self.on_scored(t, group.draw)

    def _submit(self, trajectory: Trajectory, draw: PromptSample) -> None:
        """Submit a sample for scoring."""
        request = score_request(trajectory, draw)
        name, again = request.id, 0
        with self._rewards_lock:
            while name in self._scoring:  # the score of an earlier version of this sample is still pending
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
            ended = [] if group is None else group.finished.get(self.runner.episode_index(trajectory.sample), [])
            if group is not None and any(t is trajectory for t in ended):
                group.unscored.discard(trajectory.sample)
                self.on_scored(trajectory, group.draw)
