"""Rollouts with their rewards: generation and scoring overlap, and the result is in a fixed order.

Used by the training source and by every measurement, so that both see rewards the same way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from burnish.core.engine import SamplingOptions
from burnish.core.trajectory import (
    NO_LOGP,
    OFF_POLICY,
    SHARED_TOKENS,
    STEP_REWARDS,
    TokenSequence,
    Trajectory,
    TurnSpan,
)
from burnish.data.demonstrations import DemonstrationTokens, PromptDemonstrations
from burnish.data.prompt_stream import PromptSample
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import Rewards
from burnish.rollout.runner import Branching, RolloutRunner, RolloutStopped
from burnish.rollout.segment_rollouts import BORDER_STATE, ChainPlan, TreePlan, border_prefixes, cut_into_segments

Progress = Callable[[str], None]
SUBMIT_CHUNK = 64  # trajectories sent to the reward workers at once: fewer, larger messages
POLL_INTERVAL_S = 0.2  # how often a wait for scores looks whether the user asked to stop
GREEDY_SAMPLE = -1  # the sample index of a prompt's greedy answer: no sampled one has it, so its id is its own


@dataclass(frozen=True)
class RolloutBatch:
    """Trajectories in the order of the draws and samples, with what it took."""

    draws: list[PromptSample]
    trajectories: list[Trajectory]
    rollout_s: float
    reward_s: float
    """Seconds spent waiting for rewards after the last completion."""
    greedy: list[Trajectory] = field(default_factory=list)
    """The greedy answer of each draw where a baseline was asked for; never trained on."""
    replayed: list[Trajectory] = field(default_factory=list)
    """Groups of earlier steps that come back, group after group; of a step's own numbers they are no part."""
    continued: list[Trajectory] = field(default_factory=list)
    """Answers continued from the borders of segments, for their values; never trained on."""

    demonstrations: list[Trajectory] = field(default_factory=list)
    """What joins the groups and the policy did not write; of the policy's numbers they are no part."""

    @property
    def num_tokens(self) -> int:
        """Tokens that were written, those of the greedy and the continued answers too; what the paths of a tree share counts once."""
        shared = sum(t.metadata.get(SHARED_TOKENS, 0) for t in self.trajectories)
        return sum(t.num_actions for t in [*self.trajectories, *self.greedy, *self.continued]) - shared

    @property
    def usable(self) -> list[Trajectory]:
        """Those with a reward: what a batch is packed from. Groups that come back are spread evenly among the new ones, so that
        every mini-batch has its share of them."""
        fresh = [t for t in self.grouped if t.reward is not None]
        return interleave_groups(fresh, self.replayed) if self.replayed else fresh

    @property
    def grouped(self) -> list[Trajectory]:
        """The samples of every draw, its demonstrations behind them."""
        if not self.demonstrations:
            return self.trajectories
        order = {(d.prompt.row.id, d.visit): k for k, d in enumerate(self.draws)}
        return sorted([*self.trajectories, *self.demonstrations], key=lambda t: (order[t.prompt_id, t.visit], t.sample))

    @property
    def failed(self) -> list[Trajectory]:
        """Those whose scorer failed: without a reward, kept out of the loss and of group statistics."""
        return [t for t in self.grouped if t.reward is None]

    def joined(self, later: RolloutBatch) -> RolloutBatch:
        """This round of a step and a later one as one: in their order, the times added up."""
        return RolloutBatch(
            draws=self.draws + later.draws,
            trajectories=self.trajectories + later.trajectories,
            rollout_s=self.rollout_s + later.rollout_s,
            reward_s=self.reward_s + later.reward_s,
            greedy=self.greedy + later.greedy,
            replayed=self.replayed + later.replayed,
            continued=self.continued + later.continued,
            demonstrations=self.demonstrations + later.demonstrations,
        )


def interleave_groups(fresh: Sequence[Trajectory], replayed: Sequence[Trajectory]) -> list[Trajectory]:
    """Two lists of whole groups as one: each list in its order, the groups of the second evenly among those of the first."""
    placed = []
    for kind, trajectories in enumerate((fresh, replayed)):
        groups = [list(g) for _, g in groupby(trajectories, lambda t: (t.prompt_id, t.visit))]
        placed += [((k + 0.5) / len(groups), kind, group) for k, group in enumerate(groups)]
    return [t for *_, group in sorted(placed, key=lambda one: one[:2]) for t in group]


@dataclass
class RoundBuilder:
    """One batch of rollouts on its way: `generate`, then `collect`."""

    driver: RolloutRunner
    rewards: Rewards
    draws: Sequence[PromptSample]
    progress: Progress
    kept: Sequence[Trajectory] = ()
    """Trajectories that an earlier life of the run finished; they are not made again, and scored only where they are not."""
    found: list[Trajectory] = field(default_factory=list)
    """All that have ended so far."""

    def generate(
        self, n: int, sampling: SamplingOptions, stream: str, branching: Branching | None = None
    ) -> list[Trajectory]:
        """All trajectories in order; the reward of each starts as soon as it ends."""
        most = n * (branching.leaves if isinstance(branching, TreePlan) else 1) * len(self.draws)
        kept = [t for t in self.kept if t.sample != GREEDY_SAMPLE]
        names = {(t.prompt_id, t.visit, t.sample) for t in kept}
        answers = self.driver.run(self.draws, n, sampling, stream, branching=branching, kept=names)
        return self._run(answers, most, "rollout", kept)

    def greedy(self, sampling: SamplingOptions) -> list[Trajectory]:
        """Each draw's most likely answer, one token after the other (ReMax, 2310.10505), on its way to be scored."""
        kept = [t for t in self.kept if t.sample == GREEDY_SAMPLE]
        names = {(t.prompt_id, t.visit, 0) for t in kept}
        answers = self.driver.run(self.draws, 1, replace(sampling, temperature=0.0), "baseline", kept=names)
        numbered = (replace(answer, sample=GREEDY_SAMPLE) for answer in answers)
        return self._run(numbered, len(self.draws), "greedy answers", kept)

    def values(self, samples: Sequence[Trajectory], chain: ChainPlan, sampling: SamplingOptions) -> list[Trajectory]:
        """The samples are cut into segments; the answers continued from the borders, on their way to be scored."""
        cut_into_segments(samples, chain)
        starts = border_prefixes(samples, self.draws, chain, self.driver.seed)
        states = {(b.draw.prompt.row.id, b.draw.visit, b.sample): b.state for b in starts}
        found = self._run(self.driver.continue_all(starts, sampling), len(starts), "values")
        for answer in found:
            answer.metadata[BORDER_STATE] = states[answer.prompt_id, answer.visit, answer.sample]
        return found

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Send trajectories to be scored, except those whose environment gave the reward itself, or failed."""
        draws = {(d.prompt.row.id, d.visit): d for d in self.draws}
        unscored = [t for t in trajectories if t.reward is None and t.error is None]
        self.rewards.submit([score_request(t, draws[t.prompt_id, t.visit]) for t in unscored])

    def collect(self, trajectories: Sequence[Trajectory]) -> None:
        """Wait for the scores and write them into the trajectories; `RolloutStopped` where that is requested meanwhile."""
        by_id = {t.id: t for t in trajectories}
        while self.rewards.pending:
            if self.driver.stopping.is_effective:
                raise RolloutStopped
            if scores := self.rewards.poll(POLL_INTERVAL_S):
                for score in scores:
                    apply_score(by_id[score.id], score)
                self.progress(f"scoring, {self.rewards.pending} left")

    def take_scores(self) -> None:
        """Write the scores that are there into the trajectories that have ended, without waiting for more."""
        by_id = {t.id: t for t in self.found}
        for score in self.rewards.poll(0.0):
            apply_score(by_id[score.id], score)

    def _run(
        self, answers: Iterable[Trajectory], total: int, what: str, kept: Sequence[Trajectory] = ()
    ) -> list[Trajectory]:
        order = {(d.prompt.row.id, d.visit): i for i, d in enumerate(self.draws)}
        self.found += kept
        self.submit(kept)
        found = list[Trajectory]()
        for trajectory in answers:
            self.found.append(trajectory)
            budget = self.draws[order[trajectory.prompt_id, trajectory.visit]].prompt.budget
            if budget is not None:
                trajectory.metadata["budget"] = budget
            found.append(trajectory)
            if len(found) % SUBMIT_CHUNK == 0:
                self.submit(found[-SUBMIT_CHUNK:])
            self.progress(f"{what} {len(kept) + len(found)}/{total}")
        self.submit(found[len(found) - len(found) % SUBMIT_CHUNK :])
        return sorted([*kept, *found], key=lambda t: (order[t.prompt_id, t.visit], t.sample))


def attach_greedy_baseline(samples: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> None:
    """Put the reward of each prompt's greedy answer into the metadata of its samples.

    Where the greedy answer could not be scored its samples have nothing to be compared with, and count as failed too.
    """
    by_draw = {(t.prompt_id, t.visit): t for t in greedy}
    for sample in samples:
        baseline = by_draw[sample.prompt_id, sample.visit]
        if baseline.reward is not None:
            sample.metadata["greedy_reward"] = baseline.reward
        elif sample.reward is not None:
            sample.reward = sample.accuracy = None
            sample.error = f"the greedy answer to its prompt could not be scored: {baseline.error}"


def rollout_and_score(
    driver: RolloutRunner,
    rewards: Rewards,
    draws: Sequence[PromptSample],
    n: int,
    sampling: SamplingOptions,
    stream: str,
    progress: Progress,
) -> RolloutBatch:
    """`n` scored trajectories of each draw."""
    scoring = RoundBuilder(driver, rewards, draws, progress)
    started = time.perf_counter()
    trajectories = scoring.generate(n, sampling, stream)
    generated = time.perf_counter()
    scoring.collect(trajectories)
    return RolloutBatch(list(draws), trajectories, generated - started, time.perf_counter() - generated)


def score_request(trajectory: Trajectory, draw: PromptSample) -> ScoreRequest:
    """What the reward is told about a trajectory."""
    row = draw.prompt.row
    return ScoreRequest(
        id=trajectory.id,
        prompt=row.prompt,
        completion=trajectory.completion,
        data_source=row.data_source,
        answer=row.answer,
        extra=row.extra,
        truncated=trajectory.truncated,
        nested=row.nested,
        step=draw.step,
        tokens=trajectory.sequences[-1].tokens,
        written=trajectory.sequences[-1].action_mask,
    )


def apply_score(trajectory: Trajectory, score: Score) -> None:
    """Write a score into its trajectory."""
    trajectory.reward, trajectory.accuracy = score.reward, score.accuracy
    trajectory.parts, trajectory.error = dict(score.parts), score.error
    trajectory.metadata["timed_out"] = score.timed_out
    if score.steps:
        trajectory.metadata[STEP_REWARDS] = [[position, value] for position, value in score.steps]
    if score.extra:
        trajectory.metadata["extra"] = score.extra
    if score.details:
        trajectory.metadata["details"] = "\n".join(f"{part}: {text}" for part, text in score.details.items())


# --- Demonstrations as trajectories: they join the samples of their prompt and are scored like them, and no engine is asked.
#
# Their tokens count as actions, so that they are in the loss and in the statistics of their group; no version of the policy wrote
# them. Their log-prob under whoever did is 0 where nobody knows it: LUFFY (2504.14945) takes the author to be sure.


class GroupDemonstrations:
    """Up to `each` of them for every draw. A prompt that has more shows others each time it is drawn."""

    def __init__(self, traces: PromptDemonstrations, each: int, tokenizer: Tokenizer) -> None:
        self.traces, self.each, self.tokenizer = traces, each, tokenizer

    def __call__(self, draw: PromptSample, first: int) -> list[Trajectory]:
        """Those of a draw, numbered as samples from `first` on."""
        found = self.traces.of(draw.prompt.row)
        chosen = [found[(draw.visit * self.each + k) % len(found)] for k in range(min(self.each, len(found)))]
        return [self._trajectory(draw, first + k, traced) for k, traced in enumerate(chosen)]

    def _trajectory(self, draw: PromptSample, sample: int, traced: DemonstrationTokens) -> Trajectory:
        tokens, start = traced.tokens, traced.num_prompt
        written = np.arange(len(tokens)) >= start
        logp = np.zeros(len(tokens), dtype=np.float32)
        if traced.logp is not None:
            logp[start:] = traced.logp
        return Trajectory(
            prompt_id=draw.prompt.row.id,
            visit=draw.visit,
            sample=sample,
            sequences=[TokenSequence(tokens, written, logp, np.full(len(tokens), -1, dtype=np.int32))],
            finish="stop",
            completion=self.tokenizer.decode(tokens[start:].tolist()),
            metadata={"prompt_length": start, OFF_POLICY: True} | ({NO_LOGP: True} if traced.logp is None else {}),
        )


# --- Trajectories and scores as arrays, for the journal: written when a step's rollouts are complete and again when they
# are scored, read back on resume so that finished work is not done again.

TOKEN_COLUMNS = ("tokens", "action_mask", "behaviour_logp", "version")
SCORE_FIELDS = ("reward", "accuracy", "parts", "error", "metadata")
TRAJECTORY_FIELDS = ("prompt_id", "visit", "sample", "finish", "completion", "turns", *SCORE_FIELDS)


def to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """All tokens of all sequences, packed, and everything else as JSON."""
    sequences = [s for t in trajectories for s in t.sequences]
    arrays = {name: np.concatenate([getattr(s, name) for s in sequences]) for name in TOKEN_COLUMNS}
    arrays["lengths"] = np.array([len(s.tokens) for s in sequences], dtype=np.int64)
    arrays["sequences"] = np.array([len(t.sequences) for t in trajectories], dtype=np.int64)
    arrays["records"] = _to_bytes([{name: getattr(t, name) for name in TRAJECTORY_FIELDS} for t in trajectories])
    return arrays


def from_arrays(arrays: dict[str, np.ndarray]) -> list[Trajectory]:
    """The inverse of `to_arrays`."""
    stops = np.cumsum(arrays["lengths"])
    bounds = zip((stops - arrays["lengths"]).tolist(), stops.tolist(), strict=True)
    sequences = [TokenSequence(*(arrays[name][a:b].copy() for name in TOKEN_COLUMNS)) for a, b in bounds]
    result, at = [], 0
    for record, count in zip(_from_bytes(arrays["records"]), arrays["sequences"].tolist(), strict=True):
        record["turns"] = [TurnSpan(*span) for span in record.get("turns", ())]
        result.append(Trajectory(sequences=sequences[at : at + count], **record))
        at += count
    return result


def scores_to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """What scoring added to the trajectories."""
    return {"scores": _to_bytes([{name: getattr(t, name) for name in SCORE_FIELDS} for t in trajectories])}


def restore_scores(trajectories: Sequence[Trajectory], arrays: dict[str, np.ndarray]) -> None:
    """Write saved scores back into their trajectories."""
    for trajectory, score in zip(trajectories, _from_bytes(arrays["scores"]), strict=True):
        for name in SCORE_FIELDS:
            setattr(trajectory, name, score[name])


def copy_score(scored: Trajectory, trajectory: Trajectory) -> None:
    """Give a trajectory the score of another copy of it."""
    for name in SCORE_FIELDS:
        setattr(trajectory, name, getattr(scored, name))


def _to_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _from_bytes(array: np.ndarray) -> Any:
    return json.loads(array.tobytes().decode())
