"""Generates and scores rollouts. Scoring overlaps with generation, and the result has a fixed order.

Training sources and validation both use this module, so that they score in the same way. A draw is a prompt with its visit
(`PromptSample`); its samples form a group. A round is one call for rollouts; a step has several rounds if filters leave too few groups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import numpy as np

from burnish.config.errors import UserError
from burnish.core.engine import SamplingOptions
from burnish.core.observations import marks_to_arrays, restore_marks
from burnish.core.pictures import restore_spans, spans_to_arrays
from burnish.core.routed_experts import records_to_arrays, restore_records
from burnish.core.trajectory import (
    EVENTS,
    MAIN_TURN,
    NO_CALLS,
    NO_LOGP,
    OFF_POLICY,
    SCORED_TEXT,
    SHARED_TOKENS,
    STEP_REWARDS,
    TokenNode,
    Trajectory,
    TurnSpan,
    chain_nodes,
)
from burnish.data.demonstrations import DemonstrationTokens, PromptDemonstrations
from burnish.data.images import without_pixels
from burnish.data.prompt_stream import PromptSample
from burnish.models.tokenizer import Tokenizer
from burnish.rewards.score_types import Score, ScoreRequest
from burnish.rewards.scoring import ScoreQueue
from burnish.rollout.runner import Branching, RolloutRunner, RolloutStopped
from burnish.rollout.segment_rollouts import BORDER_STATE, ChainPlan, TreePlan, border_prefixes, cut_into_segments

Progress = Callable[[str], None]
OnScored = Callable[[Trajectory, PromptSample], None]
"""Called with each trajectory that has got its score, and its draw. May be called from a background thread."""
SUBMIT_CHUNK = 64
"""Trajectories per message to the reward workers."""
POLL_INTERVAL_S = 0.2
"""How often a wait for scores checks whether the user asked to stop."""
GREEDY_SAMPLE = -1
"""Sample index of a prompt's greedy answer, so that its id differs from those of the samples."""
SCORE_FIELDS = ("reward", "accuracy", "parts", "error", "metadata")
TRAJECTORY_FIELDS = ("prompt_id", "visit", "sample", "finish", "completion", "turns", *SCORE_FIELDS)


@dataclass(frozen=True)
class RolloutBatch:
    """The rollouts of a round or a step. `trajectories` are the new samples, in the order of draws and sample indices."""

    draws: list[PromptSample]
    trajectories: list[Trajectory]
    rollout_s: float
    reward_s: float
    """Seconds of waiting for rewards after the last completion, with nothing else to do."""
    greedy: list[Trajectory] = field(default_factory=list)
    """The greedy answer of each draw, for advantages with a greedy baseline; never trained on."""
    replayed: list[Trajectory] = field(default_factory=list)
    """Replayed groups of earlier steps, group after group; not part of the step's rollout metrics."""
    continued: list[Trajectory] = field(default_factory=list)
    """Answers continued from segment borders. Their mean reward estimates the border's value; never trained on."""
    demonstrations: list[Trajectory] = field(default_factory=list)
    """Demonstrations that join the groups; not part of the step's rollout metrics."""

    @property
    def num_tokens(self) -> int:
        """Sampled tokens, including greedy and continued answers. Tokens that paths of a tree share count once."""
        shared = sum(t.metadata.get(SHARED_TOKENS, 0) for t in self.trajectories)
        return sum(t.num_actions for t in [*self.trajectories, *self.greedy, *self.continued]) - shared

    @property
    def usable(self) -> list[Trajectory]:
        """Return the trajectories with a reward. A batch is packed from them, and its `trajectory_ids` index this list.

        Replayed groups are spread evenly among the new ones, so that every mini-batch has its share.
        """
        fresh = [t for t in self.grouped if t.reward is not None]
        return interleave_groups(fresh, self.replayed) if self.replayed else fresh

    @property
    def grouped(self) -> list[Trajectory]:
        """Return the samples of each draw, followed by its demonstrations."""
        if not self.demonstrations:
            return self.trajectories
        order = {(d.prompt.row.id, d.visit): k for k, d in enumerate(self.draws)}
        return sorted(
            [*self.trajectories, *self.demonstrations], key=lambda t: (order[t.prompt_id, t.visit], t.place_in_draw)
        )

    @property
    def groups_per_draw(self) -> int:
        """Return the largest number of groups of one draw: those of the roles that played in a game, and 1 otherwise.

        An environment may have more roles than a game has: each game of Absolute Zero is of one type of tasks out of three.
        """
        groups: dict[tuple[str, int], set[str]] = {}
        for t in self.trajectories:
            groups.setdefault((t.prompt_id, t.visit), set()).add(t.group_id)
        return max(map(len, groups.values()), default=1)

    @property
    def failed(self) -> list[Trajectory]:
        """Return the trajectories without a reward, because scorer or environment failed. Neither loss nor group statistics use them."""
        return [t for t in self.grouped if t.reward is None]

    def joined(self, later: RolloutBatch) -> RolloutBatch:
        """Return this round and a later round of the step as one, with the times added up."""
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
    """Merge two lists of whole groups: each keeps its order, and the second is spread evenly over the first."""
    placed = []
    for kind, trajectories in enumerate((fresh, replayed)):
        groups = [list(g) for _, g in groupby(trajectories, lambda t: t.group_id)]
        placed += [((k + 0.5) / len(groups), kind, group) for k, group in enumerate(groups)]
    return [t for *_, group in sorted(placed, key=lambda one: one[:2]) for t in group]


def ignore_scored(trajectory: Trajectory, draw: PromptSample) -> None:
    """Do nothing with a scored trajectory."""


@dataclass
class RoundBuilder:
    """Generates and scores one round of rollouts: `generate`, then `collect`."""

    runner: RolloutRunner
    rewards: ScoreQueue
    draws: Sequence[PromptSample]
    progress: Progress
    resumed: Sequence[Trajectory] = ()
    """Trajectories that ended before the run was interrupted. They are not sampled again, and are scored only if they have no score."""
    finished: list[Trajectory] = field(default_factory=list)
    """All trajectories that have ended so far, resumed ones included."""
    on_scored: OnScored = ignore_scored

    def generate(
        self, n: int, sampling: SamplingOptions, stream: str, branching: Branching | None = None
    ) -> list[Trajectory]:
        """Return all trajectories in order. Finished ones are sent to the scorers in chunks, while others are still sampled."""
        total = n * (branching.leaves if isinstance(branching, TreePlan) else 1) * len(self.draws)
        resumed = [t for t in self.resumed if t.sample != GREEDY_SAMPLE]
        names = {(t.prompt_id, t.visit, t.sample) for t in resumed}
        answers = self.runner.run(self.draws, n, sampling, stream, branching=branching, resumed=names)
        return self._run(answers, total, "rollout", resumed)

    def generate_greedy(self, sampling: SamplingOptions) -> list[Trajectory]:
        """Return the greedy answer of each draw (ReMax, 2310.10505), and send it to the scorers."""
        resumed = [t for t in self.resumed if t.sample == GREEDY_SAMPLE]
        names = {(t.prompt_id, t.visit, 0) for t in resumed}
        answers = self.runner.run(self.draws, 1, replace(sampling, temperature=0.0), "baseline", resumed=names)
        numbered = (replace(answer, sample=GREEDY_SAMPLE) for answer in answers)
        return self._run(numbered, len(self.draws), "greedy answers", resumed)

    def continue_borders(
        self, samples: Sequence[Trajectory], chain: ChainPlan, sampling: SamplingOptions
    ) -> list[Trajectory]:
        """Cut the samples into segments, and return answers that continue from the borders. They are sent to the scorers."""
        cut_into_segments(samples, chain)
        starts = border_prefixes(samples, self.draws, chain, self.runner.seed)
        states = {(b.draw.prompt.row.id, b.draw.visit, b.sample): b.state for b in starts}
        found = self._run(self.runner.continue_all(starts, sampling), len(starts), "values")
        for answer in found:
            answer.metadata[BORDER_STATE] = states[answer.prompt_id, answer.visit, answer.sample]
        return found

    def submit(self, trajectories: Sequence[Trajectory]) -> None:
        """Send trajectories to the scorers, except those whose environment failed or gave the reward itself."""
        draws = self._draws_by_prompt()
        unscored = [t for t in trajectories if t.reward is None and t.error is None]
        self.rewards.submit([score_request(t, draws[t.prompt_id, t.visit]) for t in unscored])
        for t in trajectories:
            if t.reward is not None or t.error is not None:
                self.on_scored(t, draws[t.prompt_id, t.visit])

    def collect(self, trajectories: Sequence[Trajectory]) -> None:
        """Wait for the scores and write them into the trajectories. Raises `RolloutStopped` if a stop is requested meanwhile."""
        by_id, draws = {t.id: t for t in trajectories}, self._draws_by_prompt()
        while self.rewards.pending:
            if self.runner.stop_request.is_effective:
                raise RolloutStopped
            if scores := self.rewards.poll(POLL_INTERVAL_S):
                for score in scores:
                    t = by_id[score.id]
                    apply_score(t, score)
                    self.on_scored(t, draws[t.prompt_id, t.visit])
                self.progress(f"scoring, {self.rewards.pending} left")

    def _draws_by_prompt(self) -> dict[tuple[str, int], PromptSample]:
        return {(d.prompt.row.id, d.visit): d for d in self.draws}

    def take_scores(self) -> None:
        """Write the scores that have arrived into the finished trajectories, without waiting for more."""
        by_id = {t.id: t for t in self.finished}
        for score in self.rewards.poll(0.0):
            apply_score(by_id[score.id], score)

    def _run(
        self, answers: Iterable[Trajectory], total: int, what: str, resumed: Sequence[Trajectory] = ()
    ) -> list[Trajectory]:
        """Iterate over `answers`, send them to the scorers, and return them with the resumed ones in order."""
        order = {(d.prompt.row.id, d.visit): i for i, d in enumerate(self.draws)}
        self.finished += resumed
        self.submit(resumed)
        found, ended = list[Trajectory](), {self._episode(t) for t in resumed}
        for trajectory in answers:
            self.finished.append(trajectory)
            ended.add(self._episode(trajectory))
            trajectory.metadata |= self.draws[order[trajectory.prompt_id, trajectory.visit]].prompt.numbers
            found.append(trajectory)
            if len(found) % SUBMIT_CHUNK == 0:
                self.submit(found[-SUBMIT_CHUNK:])
            self.progress(f"{what} {len(ended)}/{total}")
        self.submit(found[len(found) - len(found) % SUBMIT_CHUNK :])
        return sorted([*resumed, *found], key=lambda t: (order[t.prompt_id, t.visit], t.place_in_draw))

    def _episode(self, t: Trajectory) -> tuple[str, int, int]:
        """Name the episode of a trajectory. The players of a game have one in common."""
        return t.prompt_id, t.visit, self.runner.episode_index(t.sample)


def attach_greedy_baseline(samples: Sequence[Trajectory], greedy: Sequence[Trajectory]) -> None:
    """Put the reward of each prompt's greedy answer into the metadata of its samples.

    If the greedy answer could not be scored, its samples have no baseline and fail too.
    """
    by_group = {t.group_id: t for t in greedy}
    for sample in samples:
        baseline = by_group[sample.group_id]
        if baseline.reward is not None:
            sample.metadata["greedy_reward"] = baseline.reward
        elif sample.reward is not None:
            sample.reward = sample.accuracy = None
            sample.error = f"the greedy answer to its prompt could not be scored: {baseline.error}"


def rollout_and_score(
    runner: RolloutRunner,
    rewards: ScoreQueue,
    draws: Sequence[PromptSample],
    n: int,
    sampling: SamplingOptions,
    stream: str,
    progress: Progress,
) -> RolloutBatch:
    """Return `n` scored trajectories per draw."""
    builder = RoundBuilder(runner, rewards, draws, progress)
    started = time.perf_counter()
    trajectories = builder.generate(n, sampling, stream)
    generated = time.perf_counter()
    builder.collect(trajectories)
    return RolloutBatch(list(draws), trajectories, generated - started, time.perf_counter() - generated)


def refuse_silent_agents(trajectories: Sequence[Trajectory], when: str) -> None:
    """Raise if every sample is of an agent that never called the model: the agent does not use the address that it gets."""
    events = [t.metadata.get(EVENTS) for t in trajectories if t.finish == "error"]
    if events and len(events) == len(trajectories) and all(own and own[-1]["kind"] == NO_CALLS for own in events):
        raise UserError(
            f"{when}: not one of {len(trajectories)} agents called the model. Each gets a base URL and a key of its own, as base_url and api_key "
            f"or as OPENAI_BASE_URL and OPENAI_API_KEY: have it use them. First: {trajectories[0].error}"
        )


def score_request(trajectory: Trajectory, draw: PromptSample) -> ScoreRequest:
    """Return what a reward may read of a trajectory: of one with several sequences the last, in which the final answer is.

    Its text and tokens are those that the model read last. What a template left out of earlier turns is not in them, and of an episode with
    several conversations only the last is. Of an agent, it is the sequence of its main conversation.
    """
    row, number = draw.prompt.row, -1
    if MAIN_TURN in trajectory.metadata:
        number = trajectory.turn_places[trajectory.metadata[MAIN_TURN]].sequence
    nodes = [trajectory.nodes[index] for index in trajectory.paths[number]]
    written = [np.full(len(node.tokens), node.is_sampled) for node in nodes]
    return ScoreRequest(
        id=trajectory.id,
        prompt=row.prompt if isinstance(row.prompt, str) else without_pixels(row.prompt),
        completion=trajectory.metadata.get(SCORED_TEXT, trajectory.completion),
        data_source=row.data_source,
        answer=row.answer,
        extra=row.extra,
        truncated=trajectory.truncated,
        nested=row.nested,
        step=draw.step,
        style=row.style,
        tokens=trajectory.sequences[number].tokens,
        written=np.concatenate(written) if written else np.zeros(0, dtype=bool),
        num_prompt=trajectory.metadata["prompt_length"],
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


# --- Demonstrations inside groups -----------------------------------------------------------------------------------------


class GroupDemonstrations:
    """Returns demonstrations as trajectories: up to `each` per draw, which join its samples and are scored like them.

    Their tokens count as actions, so that they enter the loss and the statistics of their group. Their weight version is -1. Unknown
    log-probs are 0, as in LUFFY (2504.14945): the author's probability counts as 1. A prompt with more demonstrations than `each` uses
    the next ones at its next visit.
    """

    def __init__(self, traces: PromptDemonstrations, each: int, tokenizer: Tokenizer) -> None:
        self.traces, self.each, self.tokenizer = traces, each, tokenizer

    def __call__(self, draw: PromptSample, first: int) -> list[Trajectory]:
        """Return the demonstrations of a draw, with sample indices from `first` on."""
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
            nodes=chain_nodes(
                tokens, written, logp, np.full(len(tokens), -1, dtype=np.int32), pictures=traced.pictures
            ),
            finish="stop",
            completion=self.tokenizer.decode(tokens[start:].tolist()),
            metadata={"prompt_length": start, OFF_POLICY: True} | ({NO_LOGP: True} if traced.logp is None else {}),
        )


# --- Trajectories and scores as arrays, for journal and checkpoints ---------------------------------------------------------


def to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Return the nodes of all trajectories as packed arrays, each token once, and all other fields as JSON.

    `logp` and `versions` have the sampled tokens only. An image is there once, by the hash of its content.
    """
    nodes = [node for t in trajectories for node in t.nodes]
    found = {
        "tokens": _packed([node.tokens for node in nodes], np.int64),
        "logp": _packed([node.logp for node in nodes if node.logp is not None], np.float32),
        "versions": _packed([_versions(node) for node in nodes if node.is_sampled], np.int32),
        "parents": np.array([node.parent for node in nodes], dtype=np.int64),
        "lengths": np.array([len(node.tokens) for node in nodes], dtype=np.int64),
        "sampled": np.array([node.is_sampled for node in nodes], dtype=bool),
        "trained": np.array([node.is_trained for node in nodes], dtype=bool),
        "nodes": np.array([len(t.nodes) for t in trajectories], dtype=np.int64),
        "records": _to_bytes([{name: getattr(t, name) for name in TRAJECTORY_FIELDS} for t in trajectories]),
    }
    return found | marks_to_arrays(nodes) | records_to_arrays(nodes) | spans_to_arrays(nodes)


def from_arrays(arrays: dict[str, np.ndarray]) -> list[Trajectory]:
    """Inverse of `to_arrays`. The trajectories are views of a copy of the arrays."""
    if "parents" not in arrays:
        raise UserError(
            "the rollouts of this run were saved by an older version of burnish, which this one cannot read; start a new run from "
            "its checkpoint (model.path)"
        )
    tokens, logp, versions = (arrays[name].copy() for name in ("tokens", "logp", "versions"))
    nodes: list[TokenNode] = []
    at = at_sampled = 0
    trained = arrays.get("trained", np.ones(len(arrays["parents"]), dtype=bool))  # older files do not have it: all are
    columns = (column.tolist() for column in (arrays["parents"], arrays["lengths"], arrays["sampled"], trained))
    for parent, length, is_sampled, is_trained in zip(*columns, strict=True):
        nodes.append(TokenNode(parent, tokens[at : (at := at + length)], is_trained=is_trained))
        if is_sampled:
            own = slice(at_sampled, at_sampled := at_sampled + length)
            nodes[-1].logp, nodes[-1].version = logp[own], versions[own]
    restore_marks(nodes, arrays)
    restore_records(nodes, arrays)
    restore_spans(nodes, arrays)
    result, at = [], 0
    for record, count in zip(_from_bytes(arrays["records"]), arrays["nodes"].tolist(), strict=True):
        record["turns"] = [TurnSpan(*span) for span in record["turns"]]
        result.append(Trajectory(nodes=nodes[at : at + count], **record))
        at += count
    return result


def _versions(node: TokenNode) -> np.ndarray:
    return np.full(len(node.tokens), -1, dtype=np.int32) if node.version is None else node.version


def _packed(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=dtype)


def scores_to_arrays(trajectories: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """Return the fields that scoring writes, as JSON in an array."""
    return {"scores": _to_bytes([{name: getattr(t, name) for name in SCORE_FIELDS} for t in trajectories])}


def restore_scores(trajectories: Sequence[Trajectory], arrays: dict[str, np.ndarray]) -> None:
    """Write saved scores back into their trajectories."""
    for trajectory, score in zip(trajectories, _from_bytes(arrays["scores"]), strict=True):
        for name in SCORE_FIELDS:
            setattr(trajectory, name, score[name])


def copy_score(scored: Trajectory, trajectory: Trajectory) -> None:
    """Copy the score from one object of a trajectory to another object of the same trajectory."""
    for name in SCORE_FIELDS:
        setattr(trajectory, name, getattr(scored, name))


def _to_bytes(value: Any) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)


def _from_bytes(array: np.ndarray) -> Any:
    return json.loads(array.tobytes().decode())
